package sim

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

func readCase(tb testing.TB, lines ...string) (Case, error) {
	tb.Helper()
	return ReadCase("test", strings.NewReader(strings.Join(lines, "\n")), func(name string) (*Trace, error) {
		if name != "there" {
			return nil, errors.New("not there")
		}
		return readTrace(tb, "1\n"), nil
	})
}

func TestReadCase(t *testing.T) {
	c, err := readCase(t,
		"# a comment",
		"link 20mbit rtt 40ms queue 100pkt loss 0.01 # and another",
		"",
		"up 2mbit queue 64KiB loss 0.5 reorder 0.1 reorder-by 3ms",
		"acks every 10ms",
		"transport kernel",
		"hints every 20ms",
		"timestamps 10ms skew -20",
		"delay 30s rtt 80ms",
		"flow copa:delta=0.1 name a group g weight 2 priority 1 maxrate 5mbit start 1s stop 20s",
		"flow cubic bytes 1MB rate 2mbit on 1s off 2s class guarantee target 2mbit minrate 1mbit",
		"run 40s warmup 5s seed 9 sample 50ms",
		"expect utilisation >= 0.9",
		"expect a.throughput_mbit from 10s to 20s < 5.5",
	)
	require.NoError(t, err)
	assert.Equal(t, Scenario{
		Down: LinkConfig{Rate: 20e6, Delay: 20 * ms, QueuePackets: 100, Loss: 0.01},
		Up: LinkConfig{
			Rate: 2e6, Delay: 20 * ms, QueueBytes: 64 << 10, Loss: 0.5, Reorder: 0.1,
			ReorderBy: 3 * ms,
		},
		Transport: Kernel, AckEvery: 10 * ms, Hints: 20 * ms, RawRTT: true, Timestamps: 10 * ms, ClockSkew: -20,
		Flows: []FlowConfig{
			{
				Name: "a", Algorithm: "copa", Params: cc.Params{"delta": 0.1}, Group: "g", Priority: 1, Weight: 2,
				MaxRate: 5e6, Start: time.Second, Stop: 20 * time.Second,
			},
			{
				Algorithm: "cubic", Params: cc.Params{}, Bytes: 1e6, Rate: 2e6, On: time.Second, Off: 2 * time.Second,
				Class: flow.Guarantee, Target: 2e6, MinRate: 1e6,
			},
		},
		Changes:  []Change{{At: 30 * time.Second, Delay: 40 * ms}},
		Duration: 40 * time.Second, Warmup: 5 * time.Second, Sample: 50 * ms, Seed: 9,
	}, c.Scenario)
	require.Len(t, c.Expect, 2)
	assert.Equal(t, "utilisation >= 0.9", c.Expect[0].String())
	assert.Equal(t, "a.throughput_mbit from 10s to 20s < 5.5", c.Expect[1].String())
}

func TestReadCaseOfACell(t *testing.T) {
	c, err := readCase(t,
		"cell rtt 30ms blocks 50",
		"host bits 300 queue 100pkt loss 0.01 delay 5ms",
		"host",
		"flow udp rate 20mbit on 2s off 3s random start 1s host 2 delay 15ms",
		"flow reno bytes 100KB every 2s",
		"flow reno video 4mbit chunk 4s buffer 30s rtt 40ms",
		"run 5s",
	)
	require.NoError(t, err)
	assert.Equal(t, &CellConfig{Blocks: 50, Delay: 15 * ms, Hosts: []CellHost{
		{BitsPerBlock: 300, QueuePackets: 100, Loss: 0.01, Delay: 5 * ms}, {},
	}}, c.Cell)
	assert.Equal(t, 15*ms, c.Up.Delay)
	assert.Equal(t, []FlowConfig{
		{
			Algorithm: UDP, Rate: 20e6, On: 2 * time.Second, Off: 3 * time.Second, Random: true, Start: time.Second,
			Host: 2, Delay: 15 * ms,
		},
		{Algorithm: "reno", Params: cc.Params{}, Bytes: 100e3, Every: 2 * time.Second},
		{
			Algorithm: "reno", Params: cc.Params{}, Delay: 20 * ms,
			Video: Video{Rate: 4e6, Chunk: 4 * time.Second, Buffer: 30 * time.Second},
		},
	}, c.Flows)
}

func TestReadCaseBuildsTraces(t *testing.T) {
	c, err := readCase(t, "link rtt 20ms", "trace there", "up trace highway seed 4", "flow copa", "run 5s")
	require.NoError(t, err)
	assert.Equal(t, 12e6, float64(c.Down.Trace.MeanRate()))
	assert.Equal(t, "highway seed 4", c.Up.Trace.Name)

	c, err = readCase(t, "run 6s", "link 12mbit rtt 20ms", "step 2s 6mbit", "outage 3s 5s", "flow copa")
	require.NoError(t, err)
	l := NewLink(c.Down, start)
	at := func(s float64) cc.Time { return start.Add(time.Duration(s*1e9) + 1) }
	assert.EqualValues(t, 2000*1500, l.Offered(at(0), at(2)))
	assert.EqualValues(t, 500*1500, l.Offered(at(2), at(3)))
	assert.Zero(t, l.Offered(at(3), at(5)))
	assert.EqualValues(t, 500*1500, l.Offered(at(5), at(6)))
}

func TestReadCaseRefuses(t *testing.T) {
	for line, complaint := range map[string]string{
		"frob":                          `test:4: "frob" is not something a scenario says`,
		"link 2mbit":                    `test:4: a second "link"`,
		"run 4s":                        `test:4: a second "run"`,
		"up 12":                         `"12" needs a unit`,
		"up 1mbit rtt 2ms":              `up has no "rtt"; it has loss, queue, reorder, reorder-by`,
		"up 1mbit loss":                 "up: loss lacks its value",
		"up 1mbit loss 1.5":             `up: loss: "1.5" is not a fraction`,
		"up 1mbit loss 0.1 loss 0.1":    `up has "loss" twice`,
		"up 1mbit queue 5":              `up: queue: "5" needs a unit, such as 64KiB or 100pkt`,
		"up 1mbit queue -5pkt":          `"-5pkt" is not a number of packets`,
		"up trace":                      "up lacks a word",
		"up trace away":                 "test: not there",
		"up trace lte seed -1":          `seed: "-1" is not a seed`,
		"trace lte":                     "",
		"acks 10ms":                     `acks has no "10ms"; it has delayed, every`,
		"acks every 9ms delayed 40ms":   "acknowledgements are either in batches or delayed",
		"acks every 10":                 `"10" is not a time such as 40ms`,
		"timestamps on":                 `"on" is not a time such as 40ms`,
		"timestamps 0s":                 "a clock needs a tick such as 1ms; off: no clock",
		"timestamps 2s":                 "receivers' clocks tick every 2s",
		"timestamps 1ms drift 3":        `timestamps has no "drift"; it has skew`,
		"timestamps skew 20000":         `"20000" is not a number of millionths`,
		"hints every 10us":              "the shortest period is 1ms",
		"hints never":                   `hints has no "never"; it has every`,
		"step 1s":                       "step lacks a word",
		"step 2s 1mbit\nstep 1s 2mbit":  "the step at 1s comes after the one at 2s",
		"outage 2s 1s":                  "an outage ends after it begins",
		"delay":                         "delay lacks a word",
		"flow":                          "flow lacks a word",
		"flow frob":                     `no algorithm "frob"`,
		"cell rtt 20ms":                 "a cell takes the place of link down",
		"host bits 300":                 "hosts are those of a cell",
		"flow udp":                      "write flow udp rate 20mbit",
		"flow udp rate 1mbit bytes 1MB": "without an end",
		"flow udp:x=1 rate 1mbit":       `no algorithm "udp"`,
		"flow udp rate 1mbit name u\nmove 1s u copa":           "datagrams have no algorithm",
		"flow copa on 1s random":                               "random needs means of at least 10ms",
		"flow copa host 300":                                   "hosts are counted from 1 to 256",
		"flow copa every 2s":                                   "needs a size: write bytes 100KB every 2s",
		"flow copa bytes 1KB every 2s on 1s":                   "do not go with every and video",
		"flow copa video 1mbit":                                "write video 4mbit chunk 4s buffer 30s",
		"flow copa chunk 1s":                                   "a video needs a rate",
		"flow none":                                            "a simulated one has none",
		"flow copa:gamma=1":                                    `copa has no parameter "gamma"`,
		"flow copa video 1mbit chunk 2s buffer 1s":             "a buffer of 1s has no room for a chunk of 2s",
		"flow copa weight many":                                `weight: "many" is not a whole number`,
		"flow copa off 2s":                                     "a pause needs a time",
		"flow copa class best":                                 `"best" is not one of bulk, delay_sensitive, guarantee`,
		"flow copa class guarantee target 1mbit minrate 2mbit": "a minimum rate of 2mbit is above the target of 1mbit",
		"flow copa name 1":                                     `a second flow "1"`,
		"expect":                                               "an expectation has three words",
		"expect joy > 1":                                       `a run has no "joy"; it has drops, jain`,
		"expect 1.joy > 1":                                     `a flow has no "joy"; it has arrived_packets, completed_s`,
		"expect 7.drops > 1":                                   `"7.drops > 1" is expected of flow "7", which is not there`,
		"expect .drops > 1":                                    `".drops" lacks the name of its flow`,
		"expect drops ~ 1":                                     `"~" is no comparison`,
		"expect drops > few":                                   `"few" is not a number`,
		"expect 1.drops from 1s to 2s > 1":                     "only throughput_mbit and jain can be asked",
		"expect 1.throughput_mbit from 1s > 1":                 "an expectation has three words, or seven",
		"expect 1.throughput_mbit from 2s to 1s > 1":           "it must be whole seconds, and go forwards",
		"expect 1.throughput_mbit from 1s to 1500ms > 1":       "it must be whole seconds",
		strings.Repeat("x", 100_000):                           "test:4: the line is too long",
		strings.Repeat("\n", 1000):                             "at most 1000 lines",
	} {
		_, err := readCase(t, "link 1mbit", "flow copa", "run 3s", line)
		if complaint == "" {
			assert.NoError(t, err, "%q", line)
			continue
		}
		assert.ErrorContains(t, err, complaint, "%.60q", line)
		assert.NotContains(t, err.Error(), "\n", "%.60q: one line", line)
	}
	_, err := readCase(t, "link 1mbit", "flow copa")
	assert.ErrorContains(t, err, `it needs a line such as "run 30s"`)
	_, err = readCase(t, "trace lte", "step 1s 1mbit", "flow copa", "run 1s")
	assert.ErrorContains(t, err, "steps need a link with a rate")
}

func TestExpectationsReadTheResult(t *testing.T) {
	r := Result{
		Utilisation: 0.5, Drops: 3,
		Flows: []FlowResult{
			{Name: "a", Throughput: 3e6, PerSecond: []cc.Rate{1e6, 2e6, 3e6}},
			{Name: "b", Throughput: 1e6, Completed: 2 * time.Second},
		},
	}
	for text, want := range map[string]bool{
		"utilisation >= 0.5":                     true,
		"utilisation > 0.5":                      false,
		"drops == 3":                             true,
		"drops <= 2":                             false,
		"a.share == 0.75":                        true,
		"a.completed_s < 100":                    false,
		"b.completed_s < 2.1":                    true,
		"a.throughput_mbit from 1s to 3s == 2.5": true,
		"a.throughput_mbit from 8s to 9s == 0":   true,
	} {
		e, err := parseExpectation(strings.Fields(text))
		require.NoError(t, err, text)
		got, ok := e.Check(r)
		assert.Equal(t, want, ok, "%s: it is %v", text, got)
	}
}

func FuzzReadCase(f *testing.F) {
	files, err := filepath.Glob("../../test/scenarios/testdata/*.txt")
	require.NoError(f, err)
	require.NotEmpty(f, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ReadCase("fuzz", bytes.NewReader(text), nil)
		if err != nil {
			assert.NotContains(t, err.Error(), "\n")
			return
		}
		require.NoError(t, c.Check())
		for _, e := range c.Expect {
			e.Check(Result{}) // of flows that are not there
		}
	})
}

func TestFairnessOfAPartIsThatOfItsWorstSecond(t *testing.T) {
	flows := []FlowResult{
		{To: 4 * time.Second, PerSecond: []cc.Rate{9, 9, 3, 9}},
		{From: time.Second, To: 3500 * ms, PerSecond: []cc.Rate{0, 9, 1, 1}},
	}
	assert.InDelta(t, 1, leastJain(flows, 0, 2*time.Second), 1e-9, "one that is not there yet does not count")
	assert.InDelta(t, 0.8, leastJain(flows, 0, 3*time.Second), 1e-9)
	assert.InDelta(t, 1, leastJain(flows, 3*time.Second, 4*time.Second), 1e-9, "nor one that leaves within the second")
}

func TestReadCaseOfATransport(t *testing.T) {
	for lines, want := range map[string]Scenario{
		"":                                    {},
		"transport relay":                     {Transport: Relay},
		"transport kernel":                    {Transport: Kernel, AckDelay: DelayedAck, RawRTT: true, Timestamps: ms},
		"transport kernel\nacks delayed 25ms": {Transport: Kernel, AckDelay: 25 * ms, RawRTT: true, Timestamps: ms},
		"transport kernel\nacks delayed 0s":   {Transport: Kernel, RawRTT: true, Timestamps: ms},
		"transport kernel\nacks every 5ms":    {Transport: Kernel, AckEvery: 5 * ms, RawRTT: true, Timestamps: ms},
		"acks delayed 40ms":                   {AckDelay: 40 * ms},
		"transport relay\nacks delayed 0s":    {},
		"transport relay\ntimestamps":         {RawRTT: true, Timestamps: ms},
		"transport relay\ntimestamps skew 9":  {RawRTT: true, Timestamps: ms, ClockSkew: 9},
		"transport relay\ntimestamps 4ms":     {RawRTT: true, Timestamps: 4 * ms},
		"transport kernel\ntimestamps off":    {Transport: Kernel, AckDelay: DelayedAck, RawRTT: true},
	} {
		c, err := readCase(t, lines, "link 12mbit", "flow copa", "run 5s")
		require.NoError(t, err, lines)
		got := c.complete()
		assert.Equal(t, want, Scenario{
			Transport: got.Transport, AckDelay: got.AckDelay, AckEvery: got.AckEvery, RawRTT: got.RawRTT,
			Timestamps: got.Timestamps, ClockSkew: got.ClockSkew,
		}, lines)
	}
	for lines, complaint := range map[string]string{
		"transport":                          "transport lacks a word",
		"transport quic":                     `no transport "quic"; use kernel, relay or native`,
		"transport kernel relay":             "too much",
		"transport kernel\ntransport kernel": `a second "transport"`,
	} {
		_, err := readCase(t, lines)
		assert.ErrorContains(t, err, complaint, lines)
	}
}
