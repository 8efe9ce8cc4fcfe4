package sim

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// playLines runs a case and checks what it expects.
func playLines(t *testing.T, lines ...string) Result {
	t.Helper()
	c, err := readCase(t, lines...)
	require.NoError(t, err)
	r := play(t, c.Scenario)
	for _, e := range c.Expect {
		got, ok := e.Check(r)
		assert.True(t, ok, "expect %v: it is %.4g", e, got)
	}
	return r
}

func TestACellGivesEachHostHalf(t *testing.T) {
	playLines(t,
		"cell rtt 40ms", "host queue 250pkt",
		"flow cubic host 1", "flow cubic host 2", "flow cubic host 1",
		"run 20s warmup 5s",
		"expect utilisation >= 0.97",
		"expect 2.share >= 0.48", // one flow as much as the two of the other
		"expect 2.share <= 0.52",
	)
}

func TestWhoIsAloneInACellGetsAll(t *testing.T) {
	r := playLines(t, "cell rtt 40ms", "host queue 400pkt", "host", "flow cubic host 1", "flow cubic host 2 stop 5s",
		"run 15s warmup 7s", "expect 1.throughput_mbit >= 46", "expect utilisation >= 0.97")
	assert.LessOrEqual(t, r.Utilisation, 1.001)
}

// Each host has a queue of its own: what one floods is not the other's delay.
func TestOneHostsBloatIsNotTheOthers(t *testing.T) {
	lines := []string{
		"host queue 2MB", "flow cubic name bloated", "flow cubic rate 2mbit name light",
		"run 20s warmup 5s", "expect bloated.p95_queueing_ms >= 200",
	}
	playLines(t, append(lines, "cell rtt 40ms", "expect light.p95_queueing_ms <= 5",
		"expect light.throughput_mbit >= 1.9")...)
	playLines(t, append(lines[1:], "link 50mbit rtt 40ms queue 2MB", "expect light.p95_queueing_ms >= 200")...)
}

// A better modulation makes more of the same blocks.
func TestEqualPartsOfTheAirAreNotEqualRates(t *testing.T) {
	r := playLines(t, "cell rtt 40ms", "host bits 600 queue 200pkt", "host bits 200 queue 200pkt", "flow cubic",
		"flow cubic",
		"run 20s warmup 5s", "expect utilisation >= 0.97", "expect utilisation <= 1.001")
	assert.InEpsilon(t, 3, r.Flows[0].Throughput.Mbps()/r.Flows[1].Throughput.Mbps(), 0.05)
	assert.InDelta(t, 0.5, r.Flows[1].Utilisation, 0.02, "of what it would carry for that host alone")
}

// Two listeners of 4 and 30 Mbit/s on a cell of 50: the first may have its own
// and half of what is idle.
func TestACellTellsItsHosts(t *testing.T) {
	heard := hear(t, Scenario{
		Cell: &CellConfig{Delay: 20 * ms}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(4), paced(30)}, Hints: 10 * ms, Duration: 2 * time.Second,
	})
	wire := func(mbit float64) float64 { return mbit * 1500 / 1448 }
	idle := 50 - wire(34)
	for i, own := range []float64{4, 30} {
		h := heard[i].last(t, time.Second)
		assert.InEpsilon(t, 0.932e6*(wire(own)+idle/2), float64(h.Capacity), 0.06, "flow %d", i+1)
		assert.InEpsilon(t, 0.932*25e6, float64(h.FairShare), 0.001)
		assert.EqualValues(t, 50e6, h.LinkRate)
		assert.Equal(t, 2, h.Flows)
		assert.InDelta(t, float64(20*ms), float64(h.at.Sub(h.At)), float64(11*ms),
			"it takes the way of the acknowledgements")
	}
}

func TestPBEFollowsItsCell(t *testing.T) {
	playLines(t, "cell rtt 40ms", "host queue 2MB", "hints every 10ms",
		"flow pbe name phone", "flow cubic name other start 10s stop 20s",
		"run 30s warmup 2s",
		"expect phone.throughput_mbit from 5s to 10s >= 42",
		"expect phone.throughput_mbit from 12s to 20s >= 20",
		"expect phone.throughput_mbit from 12s to 20s <= 25",
		"expect phone.throughput_mbit from 22s to 30s >= 42",
		"expect phone.p95_queueing_ms <= 20",
	)
}

func TestAFlowsOwnDelay(t *testing.T) {
	r := playLines(t, "link 12mbit rtt 20ms", "flow static:cwnd_packets=2", "flow static:cwnd_packets=2 rtt 60ms",
		"run 5s warmup 1s sample 10ms")
	near, far := r.Flows[0], r.Flows[1]
	assert.InDelta(t, float64(30*ms), float64(far.OneWay.P50-near.OneWay.P50), float64(2*ms),
		"half of it on the way there")
	assert.InDelta(t, float64(60*ms), float64(far.Final.MinRTT-near.Final.MinRTT), float64(2*ms))
	assert.InDelta(t, 4, near.Throughput.Mbps()/far.Throughput.Mbps(), 0.4)
}

func TestHostsOfFlows(t *testing.T) {
	s := Scenario{Flows: []FlowConfig{{}, {Group: "a"}, {Host: 3}, {Group: "a"}, {}, {Host: 1}}}
	assert.Equal(t, []int{1, 3, 2, 3, 4, 0}, s.hosts())
	assert.Equal(t, "10.0.0.4", s.terms(1).Host.String())
}

// 1428 bytes on the wire for 1400 of payload, 20 Mbit/s of them on a link of 12.
func TestDatagramsComeWhateverBecomesOfThem(t *testing.T) {
	r := playLines(t, "link 12mbit rtt 20ms queue 50pkt", "flow udp rate 20mbit start 1s stop 9s name cross",
		"flow reno start 11s",
		"run 15s")
	u := r.Flows[0]
	assert.InDelta(t, 8*20e6/8/1428, float64(u.Packets), 1)
	assert.InDelta(t, 8*12e6/8/1428, float64(u.Arrived), 60, "but for those on the way at the end")
	assert.InDelta(t, float64(u.Packets-u.Arrived), float64(u.Drops), 60)
	assert.InEpsilon(t, 12*1400./1428, u.Throughput.Mbps(), 0.01)
	assert.InDelta(t, 1, r.Jain, 1e-9, "cross traffic is no party to fairness")
	assert.InEpsilon(t, 11.5, r.Flows[1].PerSecond[13].Mbps(), 0.05)
}

func TestDatagramsRest(t *testing.T) {
	u := playLines(t, "link 50mbit rtt 20ms", "flow udp rate 20mbit on 2s off 3s", "run 10s").Flows[0]
	for k, on := range []bool{true, true, false, false, false, true, true, false, false, false} {
		assert.Equal(t, on, u.PerSecond[k].Mbps() > 15, "second %d", k)
	}
}

// On and off at random: means are kept, the seed decides, and each flow has times
// of its own.
func TestRandomRests(t *testing.T) {
	run := func(seed string) Result {
		return playLines(t, "link 100mbit rtt 10ms", "flow udp rate 1mbit on 1s off 3s random",
			"flow udp rate 1mbit on 1s off 3s random",
			"run 1000s seed "+seed)
	}
	r := run("1")
	for _, f := range r.Flows {
		assert.InDelta(t, 0.25, f.Throughput.Mbps(), 0.05, "a quarter of the time")
	}
	assert.NotEqual(t, r.Flows[0].PerSecond, r.Flows[1].PerSecond)
	assert.Equal(t, r, run("1"))
	assert.NotEqual(t, r.Flows[0].PerSecond, run("2").Flows[0].PerSecond)
	tcp := playLines(t, "link 12mbit rtt 10ms queue 50pkt", "flow cubic on 2s off 2s random",
		"run 400s seed 3").Flows[0]
	assert.InDelta(t, 5.8, tcp.Throughput.Mbps(), 1.5, "half of the time")
}

func TestAnObjectEverySoOften(t *testing.T) {
	f := playLines(t, "link 12mbit rtt 40ms queue 100pkt", "flow cubic bytes 100KB every 2s", "run 11s",
		"expect 1.objects == 6", "expect 1.fct_p50_ms <= 200", "expect 1.fct_max_ms >= 107").Flows[0]
	for i, o := range f.Objects {
		assert.Equal(t, time.Duration(2*i)*time.Second, o.At)
		assert.GreaterOrEqual(t, o.Took, 40*ms+67*ms, "a round trip and its transmission")
	}
	assert.InEpsilon(t, 8*6*100e3, 11*float64(f.Throughput), 0.001)

	f = playLines(t, "link 1mbit rtt 40ms queue 100pkt", "flow cubic bytes 200KB every 1s", "run 10s").Flows[0]
	require.Greater(t, len(f.Objects), 2)
	for i, o := range f.Objects[1:] {
		assert.Equal(t, f.Objects[i].At+f.Objects[i].Took, o.At, "the next waits until the last has come")
	}
	assert.Zero(t, f.Objects[len(f.Objects)-1].Took, "not ended")
}

// A video of 4 Mbit/s plays smoothly on 6 Mbit/s, and asks for no more than its
// buffer holds; with an outage longer than that it stops once.
func TestAVideo(t *testing.T) {
	video := "flow cubic video 4mbit chunk 4s buffer 12s"
	f := playLines(t, "link 6mbit rtt 40ms queue 100pkt", video, "run 60s",
		"expect 1.rebuffers == 0", "expect 1.startup_s >= 2.6", "expect 1.startup_s <= 3.5").Flows[0]
	assert.Equal(t, time.Minute-f.Video.StartUp, f.Video.Played)
	assert.InDelta(t, 4, cc.RateOf(cc.Bytes(float64(f.Throughput)*60/8), 60*time.Second).Mbps(), 0.9)
	f = playLines(t, "link 6mbit rtt 40ms queue 100pkt", "outage 20s 40s", video, "run 60s",
		"expect 1.rebuffers == 1", "expect 1.rebuffer_s >= 8").Flows[0]
	assert.Equal(t, time.Minute-f.Video.StartUp-f.Video.Rebuffer, f.Video.Played)
	playLines(t, "link 2mbit rtt 40ms queue 100pkt", video, "run 60s", "expect 1.rebuffers >= 3",
		"expect 1.rebuffer_s >= 20")
}

func TestPlayer(t *testing.T) {
	p := Player{Chunk: 4 * time.Second, Buffer: 10 * time.Second}
	at := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	assert.Equal(t, Playback{}, p.Playback(at(2)), "nothing has come")
	p.Arrived(at(2))
	assert.Equal(t, at(2), p.Room(at(2)))
	p.Arrived(at(3)) // 7 s ahead
	assert.Equal(t, at(4), p.Room(at(3)), "when 6 s are left")
	assert.Equal(t, Playback{StartUp: at(2), Played: at(8), Rebuffers: 1, Rebuffer: at(1)}, p.Playback(at(11)),
		"dry at 10 s")
	p.Arrived(at(12))
	assert.Equal(t, Playback{StartUp: at(2), Played: at(9), Rebuffers: 1, Rebuffer: at(2)}, p.Playback(at(13)))
}

func TestEveryLineOfTheFormatIsUnderstood(t *testing.T) {
	for _, line := range strings.Split(strings.TrimSpace(CaseFormat), "\n") {
		text, _, _ := strings.Cut(line, "#")
		p := &caseReader{once: map[string]bool{}, declared: map[string]bool{}}
		assert.NoError(t, p.line(strings.Fields(text)), line)
	}
}
