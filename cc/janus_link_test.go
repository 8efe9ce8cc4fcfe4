package cc_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// janusGamma is how far a flow may be from what it should have (TMC 2018 §7.3).
const janusGamma = 0.2

// janusShare runs flows over a link that carries mbit of payload, with the round trip
// and the buffer of TMC 2018 §8.1; figures count from warmup on.
func janusShare(t *testing.T, mbit float64, warmup, duration time.Duration, flows ...sim.FlowConfig) sim.Result {
	t.Helper()
	r, err := sim.Run(sim.Scenario{
		Down:     sim.LinkConfig{Rate: payloadRate(mbit), Delay: 30 * time.Millisecond, QueuePackets: 200},
		Up:       sim.LinkConfig{Delay: 30 * time.Millisecond},
		Duration: duration, Warmup: warmup, Sample: 100 * time.Millisecond, Seed: 1, Flows: flows,
	})
	require.NoError(t, err)
	return r
}

// payloadRate is the rate of a link that carries mbit of payload in full packets.
func payloadRate(mbit float64) cc.Rate { return cc.Rate(mbit * 1e6 * 1500 / float64(cc.DefaultMSS)) }

// janusFlow starts a flow of the algorithm that ref names and stops it; stop 0: never.
func janusFlow(t *testing.T, start, stop time.Duration, ref string) sim.FlowConfig {
	t.Helper()
	name, params, err := cc.Parse(ref)
	require.NoError(t, err)
	return sim.FlowConfig{Algorithm: name, Params: params, Start: start, Stop: stop}
}

// maxMin fills the link with water until each has what it wants or as much as
// the others.
func maxMin(capacity float64, wants ...float64) []float64 {
	got := make([]float64, len(wants))
	order := slices.Clone(wants)
	slices.Sort(order)
	level := 0.0
	for i, w := range order {
		level = min(w, capacity/float64(len(order)-i))
		capacity -= level
	}
	for i, w := range wants {
		got[i] = min(w, level)
	}
	return got
}

func TestMaxMin(t *testing.T) {
	wants := []float64{10, 8, 6, 4}
	for capacity, want := range map[float64][]float64{
		25: {7.5, 7.5, 6, 4},
		20: {16. / 3, 16. / 3, 16. / 3, 4},
		28: wants,
		40: wants,
		12: {3, 3, 3, 3},
	} {
		assert.InDeltaSlice(t, want, maxMin(capacity, wants...), 1e-9, "over %v", capacity)
	}
}

// janusStages are the phases of a flow from then on, each once.
func janusStages(f sim.FlowResult, from time.Duration) []string {
	var seen []string
	for _, s := range f.Samples {
		if s.At >= from && !slices.Contains(seen, s.Phase) {
			seen = append(seen, s.Phase)
		}
	}
	return seen
}

// janusGets is P, and janusAims R', in Mbit/s.
func janusGets(s sim.Sample) float64 { return s.Internals[1] }
func janusAims(s sim.Sample) float64 { return s.Internals[0] }

func TestJanusFlowsShareTheLinkMaxMinFairly(t *testing.T) {
	t.Parallel()
	for capacity, queue := range map[float64]float64{28: 26, 25: 26, 20: 26, 12: 50} {
		t.Run(fmt.Sprintf("28 Mbit/s are wanted of %v", capacity), func(t *testing.T) {
			const settled = 42 * time.Second
			want := maxMin(capacity, 10, 8, 6, 4)
			r := janusShare(t, capacity, settled, settled+6*time.Second,
				janusFlow(t, 0, 0, "janus:class=guarantee,target_mbit=10"),
				janusFlow(t, 10*time.Second, 0, "janus:class=guarantee,target_mbit=8"),
				janusFlow(t, 20*time.Second, 0, "janus:class=guarantee,target_mbit=6"),
				janusFlow(t, 30*time.Second, 0, "janus:class=guarantee,target_mbit=4"))
			for i, f := range r.Flows {
				assert.InEpsilon(t, want[i], f.Throughput.Mbps(), janusGamma, "flow %d", i+1)
				assert.NotContains(t, janusStages(f, settled), "aggressive", "flow %d is content", i+1)
			}
			assert.GreaterOrEqual(t, r.Utilisation, min(0.99, 28/capacity))
			assert.LessOrEqual(t, r.QueuePackets, queue, "far from the 200 that the buffer holds")
			assert.Zero(t, r.Drops)
			t.Logf("%.2f %.2f %.2f %.2f Mbit/s, queue %.1f packets",
				r.Flows[0].Throughput.Mbps(), r.Flows[1].Throughput.Mbps(), r.Flows[2].Throughput.Mbps(), r.Flows[3].Throughput.Mbps(), r.QueuePackets)
		})
	}
}

func TestJanusFlowsThatWantTooMuchMeetAndTheOneLeftIsSoonBack(t *testing.T) {
	t.Parallel()
	const leaves, end = 20 * time.Second, 23 * time.Second
	for _, first := range []time.Duration{0, 2 * time.Second, 4 * time.Second} { // of the one that stays
		r := janusShare(t, 20, 10*time.Second, end,
			janusFlow(t, 2*time.Second, leaves, "janus:class=guarantee,target_mbit=12"),
			janusFlow(t, first, 0, "janus:class=guarantee,target_mbit=12"))
		sum, n := 0.0, 0
		var rates [2]float64
		for i, f := range r.Flows {
			for _, v := range f.PerSecond[10:20] {
				rates[i] += v.Mbps() / 10
			}
			sum += rates[i]
			for _, s := range f.Samples {
				if s.At >= 10*time.Second && s.At < leaves {
					n++
					assert.Contains(t, []string{"9.60", "7.68"}, fmt.Sprintf("%.2f", janusAims(s)),
						"lowered once, or twice")
				}
			}
			assert.InEpsilon(t, 10, rates[i], janusGamma, "flow %d, the one that stays started at %v", i+1, first)
		}
		require.NotZero(t, n)
		assert.GreaterOrEqual(t, sum, 0.9*20)
		back := slices.IndexFunc(r.Flows[1].Samples, func(s sim.Sample) bool { return s.At > leaves && janusGets(s) >= 12 })
		require.NotEqual(t, -1, back, "the one that stays has what it wants again")
		assert.LessOrEqual(t, r.Flows[1].Samples[back].At, leaves+2*time.Second)
		t.Logf("%.2f and %.2f Mbit/s; back at %v", rates[0], rates[1], r.Flows[1].Samples[back].At-leaves)
	}
}

func TestJanusTakesWhatItAskedForAndNoMore(t *testing.T) {
	t.Parallel()
	r := janusShare(t, 10, 10*time.Second, 20*time.Second, janusFlow(t, 0, 0, "janus:class=guarantee,target_mbit=8"))
	f := r.Flows[0]
	has := slices.IndexFunc(f.Samples, func(s sim.Sample) bool { return s.Phase == "conservative" })
	require.NotEqual(t, -1, has)
	assert.LessOrEqual(t, f.Samples[has].At, 500*time.Millisecond, "its target after a few round trips of slow start")
	assert.InDelta(t, 8.71, f.Throughput.Mbps(), 0.1, "then a tenth more at the most")
	assert.LessOrEqual(t, f.Throughput.Mbps(), 8.8)
	assert.LessOrEqual(t, r.QueuePackets, 2.0)
	assert.Equal(t, []string{"capped"}, janusStages(f, 10*time.Second))
	t.Logf("at %v; %.2f Mbit/s, queue %.1f packets", f.Samples[has].At, f.Throughput.Mbps(), r.QueuePackets)
}

func TestJanusGivesUpATargetThatTheLinkHasNot(t *testing.T) {
	t.Parallel()
	r := janusShare(t, 20, 10*time.Second, 20*time.Second, janusFlow(t, 0, 0, "janus:class=guarantee,target_mbit=50"))
	f := r.Flows[0]
	assert.NotContains(t, janusStages(f, 10*time.Second), "aggressive")
	assert.GreaterOrEqual(t, r.Utilisation, 0.99, "all of it")
	assert.LessOrEqual(t, r.QueuePackets, 6.0, "without filling the buffer")
}

func TestJanusBulkYieldsToGuaranteesAndTakesTheLinkBack(t *testing.T) {
	t.Parallel()
	const s = time.Second
	r := janusShare(t, 20, 5*s, 48*s,
		janusFlow(t, 0, 0, "janus"),
		janusFlow(t, 10*s, 40*s, "janus:class=guarantee,target_mbit=5"),
		janusFlow(t, 15*s, 40*s, "janus:class=guarantee,target_mbit=5"),
		janusFlow(t, 20*s, 40*s, "janus:class=guarantee,target_mbit=5"))
	bulk := r.Flows[0].PerSecond
	assert.GreaterOrEqual(t, bulk[8].Mbps(), 19.0, "alone it has the link")
	for i, f := range r.Flows {
		mean := 0.0
		for _, v := range f.PerSecond[30:40] {
			mean += v.Mbps() / 10
		}
		if i == 0 {
			assert.LessOrEqual(t, mean, 7.5, "it makes room")
		} else {
			assert.GreaterOrEqual(t, mean, 5*(1-janusGamma)*(1-janusGamma),
				"flow %d is content, its target lowered once at the most", i+1)
		}
		t.Logf("flow %d: %.2f Mbit/s", i+1, mean)
	}
	assert.GreaterOrEqual(t, bulk[46].Mbps(), 19.0, "alone again")
	assert.LessOrEqual(t, r.QueuePackets, 40.0)
}

func TestJanusStaysWhereItsFloorIsAgainstCubic(t *testing.T) {
	t.Parallel()
	const leaves = 30 * time.Second
	r := janusShare(t, 20, 10*time.Second, leaves+4*time.Second,
		janusFlow(t, 0, 0, "janus:class=guarantee,target_mbit=10,min_mbit=5"),
		janusFlow(t, 5*time.Second, leaves, "cubic"))
	mean := 0.0
	for _, v := range r.Flows[0].PerSecond[10:30] {
		mean += v.Mbps() / 20
	}
	assert.InEpsilon(t, 5, mean, janusGamma, "TMC 2018 §8.5")
	assert.GreaterOrEqual(t, r.Flows[0].PerSecond[33].Mbps(), 10.0, "and has its target again when the other has left")
	t.Logf("%.2f Mbit/s, then %v", mean, r.Flows[0].PerSecond[30:])
}

func TestJanusOutlivesALongerPath(t *testing.T) {
	t.Parallel()
	run := func(ref string) (slowest float64) {
		r, err := sim.Run(sim.Scenario{
			Down: sim.LinkConfig{Rate: payloadRate(20), Delay: 20 * time.Millisecond, QueuePackets: 200},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond},
			Changes: []sim.Change{
				{At: 10 * time.Second, Delay: 30 * time.Millisecond},
				{At: 20 * time.Second, Delay: 40 * time.Millisecond},
			},
			Duration: 30 * time.Second, Warmup: 24 * time.Second, Seed: 1,
			Flows: []sim.FlowConfig{janusFlow(t, 0, 0, ref), janusFlow(t, 0, 0, ref)},
		})
		require.NoError(t, err)
		t.Logf("%s: %.2f and %.2f Mbit/s", ref, r.Flows[0].Throughput.Mbps(), r.Flows[1].Throughput.Mbps())
		return min(r.Flows[0].Throughput.Mbps(), r.Flows[1].Throughput.Mbps())
	}
	assert.GreaterOrEqual(t, run("janus:class=guarantee,target_mbit=10"), 8.0, "TMC 2018 §8.4")
	assert.Less(t, run("vegas"), 5.0, "Vegas takes the longer path for a queue")
}

func TestJanusDoesWithAcknowledgementsInBatches(t *testing.T) {
	t.Parallel()
	for _, every := range []time.Duration{10 * time.Millisecond, 50 * time.Millisecond} {
		r, err := sim.Run(sim.Scenario{
			Down:     sim.LinkConfig{Rate: payloadRate(10), Delay: 10 * time.Millisecond, QueuePackets: 200},
			Up:       sim.LinkConfig{Delay: 10 * time.Millisecond},
			AckEvery: every, Duration: 20 * time.Second, Warmup: 5 * time.Second, Seed: 1,
			Flows: []sim.FlowConfig{janusFlow(t, 0, 0, "janus:class=guarantee,target_mbit=8")},
		})
		require.NoError(t, err)
		assert.GreaterOrEqual(t, r.Flows[0].Throughput.Mbps(), 8*(1-janusGamma), "every %v", every)
		assert.LessOrEqual(t, r.Flows[0].Throughput.Mbps(), 8.8, "every %v", every)
		t.Logf("every %v: %.2f Mbit/s, queueing %v", every, r.Flows[0].Throughput.Mbps(), r.Queueing.P95)
	}
}

// TMC 2018 §8.3.2: what lies between the fastest and the slowest of four flows that
// are alike is less than with Cubic.
func TestJanusBulkFlowsAreCloserToEachOtherThanCubics(t *testing.T) {
	t.Parallel()
	const runs = 5
	apart := func(ref string) (sum float64) {
		for seed := range uint64(runs) {
			rng := rand.New(rand.NewPCG(seed, 0))
			var flows []sim.FlowConfig
			for range 4 {
				flows = append(flows, janusFlow(t, time.Duration(rng.Int64N(int64(2*time.Second))), 0, ref))
			}
			r := janusShare(t, 20, 2*time.Second, 60*time.Second, flows...)
			least, most := r.Flows[0].Throughput, r.Flows[0].Throughput
			for _, f := range r.Flows {
				least, most = min(least, f.Throughput), max(most, f.Throughput)
			}
			assert.GreaterOrEqual(t, r.Utilisation, 0.97, "%s, seed %d", ref, seed)
			sum += (most - least).Mbps() / runs
		}
		return sum
	}
	janus, cubic := apart("janus"), apart("cubic")
	assert.LessOrEqual(t, janus, 0.55*cubic)
	t.Logf("%.2f Mbit/s, Cubic %.2f", janus, cubic)
}

// TMC 2018 §8.2.1: an object of 100 kB every two seconds beside a download.
func TestJanusDownloadsLeaveTheQueueToShortFlows(t *testing.T) {
	t.Parallel()
	beside := func(ref string) (r sim.Result, slowest time.Duration) {
		flows := []sim.FlowConfig{janusFlow(t, 0, 0, ref)}
		for k := range 28 {
			object := janusFlow(t, time.Duration(3+2*k)*time.Second, 0, "cubic")
			object.Bytes = 100e3
			flows = append(flows, object)
		}
		r = janusShare(t, 15, 2*time.Second, 60*time.Second, flows...)
		for _, f := range r.Flows[1:] {
			require.NotZero(t, f.Completed)
			slowest = max(slowest, f.Completed)
		}
		t.Logf("%s: %.2f Mbit/s, p95 queueing %v, slowest object %v", ref, r.Flows[0].Throughput.Mbps(),
			r.Queueing.P95, slowest)
		return r, slowest
	}
	cubic, slow := beside("cubic")
	for ref, least := range map[string]float64{"janus": 0.9 * 15, "janus:class=guarantee,target_mbit=12": 12} {
		r, slowest := beside(ref)
		assert.LessOrEqual(t, 8*r.Queueing.P95, cubic.Queueing.P95, ref)
		assert.Less(t, 2*slowest, slow, ref)
		assert.GreaterOrEqual(t, r.Flows[0].Throughput.Mbps(), least, ref)
	}
}
