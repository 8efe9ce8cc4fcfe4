package cc_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
)

// longestIn is how long a flow was in a phase without a break.
func longestIn(f sim.FlowResult, phase string) (longest time.Duration, entered int) {
	var since time.Duration
	was := false
	for _, s := range f.Samples {
		if s.Phase == phase {
			if !was {
				since = s.At
				entered++
			}
			longest = max(longest, s.At-since)
		}
		was = s.Phase == phase
	}
	return longest, entered
}

func TestBbr3AloneOnALink(t *testing.T) {
	for _, transport := range []sim.Transport{sim.Relay, sim.Kernel} {
		r := play(t, sim.Scenario{
			Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 80},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Transport: transport,
			Flows:    []sim.FlowConfig{{Algorithm: "bbr3"}},
			Duration: 40 * time.Second, Warmup: 2 * time.Second, Sample: 10 * time.Millisecond,
		})
		f := r.Flows[0]
		assert.GreaterOrEqual(t, r.Utilisation, 0.95, transport)
		assert.Zero(t, r.Drops, transport)
		assert.Less(t, r.Queueing.P95, 45*time.Millisecond, transport)
		last := f.Samples[len(f.Samples)-1]
		assert.InDelta(t, 12*1448./1500, last.Internals[0], 0.25, "%s: the rate of the link, within 2 %%", transport)
		assert.InDelta(t, 41, last.Internals[2], 1, "%s: its round trip", transport)
		lasts, entered := longestIn(f, "probe_rtt")
		assert.InDelta(t, 7, entered, 1, "%s: every five seconds, behind what they take", transport)
		assert.InDelta(t, 0.25, lasts.Seconds(), 0.06, transport)
	}
}

// An eighth of the packets that fill the path fit into the queue.
func TestBbr3LosesLittleBeforeAShortQueue(t *testing.T) {
	v1 := play(t, sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 5},
		Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr"}},
		Duration: 40 * time.Second, Warmup: 5 * time.Second,
	})
	v3 := play(t, sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 5},
		Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr3"}},
		Duration: 40 * time.Second, Warmup: 5 * time.Second, Sample: 10 * time.Millisecond,
	})
	assert.Greater(t, v3.Utilisation, 0.85)
	assert.Less(t, 3*v3.Drops, v1.Drops)
	bound := 0.0
	for _, s := range v3.Flows[0].Samples {
		if bound = s.Internals[4]; s.At > 10*time.Second {
			assert.InDelta(t, 46, bound, 25, "at %v: what fills the path and the queue, about", s.At)
		}
	}
	assert.Positive(t, bound)
}

func TestBbr3FindsTenTimesTheRate(t *testing.T) {
	r := play(t, sim.Scenario{
		Down: sim.LinkConfig{
			Delay: 20 * time.Millisecond,
			Trace: steps(t, 20*time.Second, sim.Step{Rate: 10e6}, sim.Step{At: 8 * time.Second, Rate: 100e6}),
		},
		Up: sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr3"}},
		Duration: 20 * time.Second,
	})
	f := r.Flows[0]
	assert.Greater(t, f.PerSecond[7].Mbps(), 9.0)
	assert.Greater(t, f.PerSecond[12].Mbps(), 85.0, "a probe is due within three seconds")
}

func TestBbr3FollowsADropToATenth(t *testing.T) {
	r := play(t, sim.Scenario{
		Down: sim.LinkConfig{
			Delay: 20 * time.Millisecond, QueueBytes: 500000,
			Trace: steps(t, 30*time.Second, sim.Step{Rate: 100e6}, sim.Step{At: 8 * time.Second, Rate: 10e6}),
		},
		Up: sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr3"}},
		Duration: 30 * time.Second, Sample: 10 * time.Millisecond,
	})
	f := r.Flows[0]
	for _, s := range f.Samples {
		if s.At >= 16*time.Second {
			assert.InDelta(t, 9.7, s.Internals[0], 1, "at %v it knows of the new rate", s.At)
		}
	}
	for second := 12; second < 30; second++ {
		assert.Greater(t, f.PerSecond[second].Mbps(), 8.0, "second %d", second)
	}
}

func TestBbr3BearsOnePercentOfLoss(t *testing.T) {
	r := play(t, sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 80, Loss: 0.01},
		Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr3"}},
		Duration: 40 * time.Second, Warmup: 5 * time.Second,
	})
	assert.Greater(t, r.Utilisation, 0.75)
	cubic := play(t, sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 80, Loss: 0.01},
		Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "cubic"}},
		Duration: 40 * time.Second, Warmup: 5 * time.Second,
	})
	assert.Greater(t, r.Utilisation, 1.5*cubic.Utilisation)
}

func TestBbr3sShare(t *testing.T) {
	for _, queue := range []int{30, 200} {
		r := play(t, sim.Scenario{
			Down:     sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: queue},
			Up:       sim.LinkConfig{Delay: 20 * time.Millisecond},
			Flows:    []sim.FlowConfig{{Algorithm: "bbr3"}, {Algorithm: "bbr3", Start: 5 * time.Second}},
			Duration: 60 * time.Second, Warmup: 30 * time.Second,
		})
		assert.Greater(t, r.Jain, 0.9, queue)
		assert.GreaterOrEqual(t, r.Utilisation, 0.9, queue)
	}
}

// A queue of one and a half of what fills the path is what BBR is made for.
func TestBbr3LeavesCubicItsShare(t *testing.T) {
	for _, tt := range []struct {
		queue       int
		least, most float64 // bbr3's part
	}{
		{60, 0.25, 0.75},
		{160, 0.2, 0.7},
	} {
		r := play(t, sim.Scenario{
			Down:     sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: tt.queue},
			Up:       sim.LinkConfig{Delay: 20 * time.Millisecond},
			Flows:    []sim.FlowConfig{{Algorithm: "bbr3"}, {Algorithm: "cubic", Start: 2 * time.Second}},
			Duration: 60 * time.Second, Warmup: 20 * time.Second,
		})
		share := r.Flows[0].Throughput.Mbps() / (r.Flows[0].Throughput.Mbps() + r.Flows[1].Throughput.Mbps())
		assert.GreaterOrEqual(t, share, tt.least, tt.queue)
		assert.LessOrEqual(t, share, tt.most, tt.queue)
		assert.Greater(t, r.Utilisation, 0.95, tt.queue)
	}
}

func TestBbr3KeepsItsRateWhereAcknowledgementsComeInBunches(t *testing.T) {
	for _, every := range []time.Duration{5 * ms, 20 * ms, 60 * ms} {
		r := play(t, sim.Scenario{
			Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, AckEvery: every,
			Flows:    []sim.FlowConfig{{Algorithm: "bbr3"}},
			Duration: 15 * time.Second, Warmup: 5 * time.Second,
		})
		assert.Greater(t, r.Utilisation, 0.9, every)
	}
}

func TestBbr3IsNotMisledByAnApplicationThatPauses(t *testing.T) {
	r := play(t, sim.Scenario{
		Down:     sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond},
		Up:       sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows:    []sim.FlowConfig{{Algorithm: "bbr3", Rate: 2e6, On: time.Second, Off: time.Second}},
		Duration: 30 * time.Second, Sample: 10 * time.Millisecond,
	})
	assert.InDelta(t, 1, r.Flows[0].Throughput.Mbps(), 0.1, "all that there was")
	_, probes := longestIn(r.Flows[0], "probe_rtt")
	assert.Zero(t, probes, "the pauses drain the path")
	last := r.Flows[0].Samples[len(r.Flows[0].Samples)-1]
	assert.GreaterOrEqual(t, last.Internals[0], 1.9, "the path gave at least what the application sent")
	require.InDelta(t, 41, last.Internals[2], 1)
	assert.Less(t, r.Queueing.P99, 12*time.Millisecond, fmt.Sprint(r.Queueing))
}
