package recipe

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

func TestADownloadThatDidNotEndHasNoFinish(t *testing.T) {
	r := Run{
		Stage: stage.Stage{
			Duration: time.Second,
			Actors:   []stage.Actor{{Name: "a", Kind: stage.Bulk, Size: 30}, {Name: "b", Kind: stage.Bulk}},
		},
		Record: stage.Record{Actors: []stage.ActorRecord{
			{Name: "a", Bytes: []cc.Bytes{10, 20, 0, 0, 0, 0, 0, 0, 0, 0}},
			{Name: "b", Bytes: []cc.Bytes{10, 20, 0, 0, 0, 0, 0, 0, 0, 0}},
		}},
	}
	finish := func(flow string) float64 {
		at, err := ofFlow(r, r.finish)(flow)
		require.NoError(t, err)
		return at
	}
	assert.InDelta(t, 0.2, finish("a"), 1e-9)
	r.Record.Actors[0].Bytes[1] = 19
	assert.True(t, math.IsInf(finish("a"), 1), "a byte is missing, over real sockets too")
	assert.InDelta(t, 0.2, finish("b"), 1e-9, "one without end has a last byte")

	r.Record.Virtual = &sim.Result{Flows: []sim.FlowResult{{Received: 150 * time.Millisecond}}}
	assert.InDelta(t, 0.15, finish("a"), 1e-9, "not when the sender hears of it")
	r.Record.Virtual.Flows[0].Received = 0
	assert.True(t, math.IsInf(finish("a"), 1))
}

func TestWhatIsNotThereHoldsNothing(t *testing.T) {
	for _, lists := range [][2][]float64{{{}, {1}}, {{1}, {}}, {{}, {}}} {
		distance, err := judging.KS(lists[0], lists[1])
		require.NoError(t, err)
		assert.True(t, math.IsNaN(distance), lists)
	}
	result := playText(t, `
vary: {carries: [12mbit, "generate:lte"]}
name: $(carries)
link: {carries: "$(carries)", rtt: 40ms}
algorithm: copa
flows: {a: {}}
duration: 2s
must:
  - for: {run: [12mbit, "generate:lte"]}
    run: $(run)
    is: rate("a") / capacity
    at_least: 0.1
`)
	assert.True(t, result.Findings[0].OK, result.Findings[0].Got)
	assert.False(t, result.Findings[1].OK, "a link that varies has no fixed capacity")
	assert.Equal(t, "not measured", result.Findings[1].Got)
}

// A bound from above does not hold by itself where the flow that it is about has gone.
func TestAFlowThatBrokeIsFound(t *testing.T) {
	const text = "link: {rate: 12mbit, rtt: 40ms}\nalgorithm: copa\nflows: {a: {}, b: {}}\nduration: 2s\n"
	for must, broken := range map[string]string{"": "", "must: [duration > 1]": "2: my: a: refused"} {
		r, err := readText("my", "my", []byte(text+must), loader{})
		require.NoError(t, err)
		play := func(ctx context.Context, s stage.Stage, tell func(time.Duration)) (stage.Record, error) {
			rec, err := Virtual(ctx, s, tell)
			rec.Actors[0].Error, rec.Actors[1].Corrupt = "refused", "a wrong byte"
			return rec, err
		}
		result, err := r.Play(t.Context(), Full, 1, play, func(Progress) {})
		require.NoError(t, err)
		if broken == "" {
			assert.Empty(t, result.Findings)
			continue
		}
		require.Len(t, result.Findings, 2)
		assert.True(t, result.Findings[0].OK)
		assert.False(t, result.Findings[1].OK)
		assert.Equal(t, broken, result.Findings[1].Got)
	}
}

// A figure of no samples is none, and no 0 that is within a bound.
func TestAFigureOfNoSamplesIsNotMeasured(t *testing.T) {
	const early = `
link: {rate: 12mbit, rtt: 40ms}
algorithm: copa
flows: {a: {stop: 1s}, b: {stop: 1s}}
duration: 3s
warmup: 2s
`
	const never = `
link: {rate: 12mbit, rtt: 40ms}
algorithm: copa
flows:
  a: {}
  late: {start: 1990ms}
  sound: {app: udp, rate: 1mbit, start: 1999ms}
  film: {app: video, rate: 2mbit, chunk: 4s, start: 1990ms}
duration: 2s
`
	for text, figures := range map[string][]string{
		early: {
			"queueing.p95", `queueing_of("a").p95`, "fairness", `rate("a")`, `share("a")`, "queueing_centiles[50]",
			"least_jain(2, 3)", `mean(window("a"))`, `median(seconds("a"))`,
		},
		never: {
			`rate_beside("a", "late")`, `finish("late")`, `mean(jitter("sound"))`,
			`video("film").rebuffers`, `video("film").rebuffer`,
			"mean([])", "median([])", "jain([])", "jain([0, 0])", "max([1, 0/0])", "min(1, [0/0])", "median([1, 0/0, 2])",
		},
	} {
		text += "must:\n"
		for _, f := range figures {
			text += "  - '" + f + " <= 1000'\n"
		}
		for _, f := range playText(t, text).Findings {
			assert.False(t, f.OK, "%s is %s", f.What, f.Got)
			assert.Contains(t, f.Got, "not measured", f.What)
		}
	}
	result := playText(t, never+`must: ["mean(1..3) == 2", "median([4, 1..2]) == 2", "max([1, inf], 2) == inf",
		"min(3, 2) == 2",
  "(1..5)[max(0, 2)] == 3"]`)
	for _, f := range result.Findings {
		assert.True(t, f.OK, "%s is %s", f.What, f.Got)
	}
}

func TestAWebApplicationIsOneAmongTheFlows(t *testing.T) {
	r := playText(t, `
link: {rate: 12mbit, rtt: 40ms, queue: 20pkt, loss: 0.05}
kernel: cubic
flows:
  a: {}
  b: {}
  web: {app: web, size: 60KB, every: 200ms}
duration: 10s
warmup: 2s
`).Runs[0]
	v := r.view()
	rates := make([]float64, 3)
	for i, name := range []string{"a", "b", "web"} {
		var err error
		rates[i], err = v.Rate(name)
		require.NoError(t, err)
	}
	assert.InDelta(t, sim.Jain(rates...), v.Fairness, 0.01, "three applications, not fifty connections")
	share, err := v.Share("web")
	require.NoError(t, err)
	assert.InDelta(t, rates[2]/(rates[0]+rates[1]+rates[2]), share, 0.01)
	timeouts := 0
	for _, f := range r.Record.Virtual.Flows[2:] {
		timeouts += f.Timeouts
	}
	require.Positive(t, timeouts)
	got, err := v.Timeouts("web")
	require.NoError(t, err)
	assert.InDelta(t, timeouts, got, 0)
	queueing, err := v.QueueingOf("web")
	require.NoError(t, err)
	assert.Equal(t, v.Queueing, queueing, "not that of a connection that ended in the warm-up")
}

func TestOneFlowsQueueingIsThatOfTheLink(t *testing.T) {
	for flow, link := range map[string]string{
		"{}":                               "link: {rate: 12mbit, rtt: 40ms, queue: 100pkt}",
		"{app: udp, rate: 20mbit}":         "link: {rate: 12mbit, rtt: 40ms, queue: 100pkt}",
		"{app: upload}":                    "link: {rate: 12mbit, rtt: 40ms}\nup: {rate: 2mbit, queue: 50pkt}",
		"{start: 1s, stop: 2s, size: 1MB}": "cell: {rtt: 40ms, hosts: [{queue: 6MB}]}",
	} {
		v := playText(t, "algorithm: cubic\nflows: {a: "+flow+"}\nduration: 3s\n"+link+"\n").Runs[0].view()
		queueing, err := v.QueueingOf("a")
		require.NoError(t, err)
		assert.Positive(t, queueing.P95, flow)
		assert.Equal(t, v.Queueing, queueing, flow)
	}
}

func TestResponsivenessIsNotThatOfRequestsCutShort(t *testing.T) {
	a := stage.ActorRecord{Name: "probe"}
	for i := range 15 {
		q := sim.Object{At: time.Duration(2*i) * time.Second, Took: 10 * time.Second}
		if q.At+q.Took > 30*time.Second {
			q.Took = 0
		}
		a.Requests = append(a.Requests, q)
	}
	run := Run{Stage: stage.Stage{Duration: 30 * time.Second}, Record: stage.Record{Actors: []stage.ActorRecord{a}}}
	rpm, err := run.rpm("probe")
	require.NoError(t, err)
	assert.InDelta(t, 6, rpm, 1e-9, "what the end of the run cut short would have taken as long")
	a.Requests[3].Took, a.Requests[4].Took = 0, 0 // for 24 and 22 s
	rpm, err = run.rpm("probe")
	require.NoError(t, err)
	assert.InDelta(t, 60*10/(9*10+22.), rpm, 1e-9, "but who hangs counts, unless it is the slowest twentieth")
	for i := range a.Requests {
		a.Requests[i].Took = 0
	}
	rpm, err = run.rpm("probe")
	require.NoError(t, err)
	assert.Less(t, rpm, 6.)
}
