package cc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// steps is a trace of these rates.
func steps(t *testing.T, d time.Duration, all ...sim.Step) *sim.Trace {
	t.Helper()
	trace, err := sim.Steps("steps", d, all...)
	require.NoError(t, err)
	return trace
}

func segmentsOf(b cc.Bytes) float64 { return float64(b) / float64(cc.DefaultMSS) }

// Of 12 Mbit/s in 40 ms, 40 packets fill the path.
func TestBbrAloneOnALink(t *testing.T) {
	r := play(t, sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 80},
		Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr"}},
		Duration: 40 * time.Second, Warmup: 2 * time.Second, Sample: 10 * time.Millisecond,
	})
	assert.GreaterOrEqual(t, r.Utilisation, 0.95)
	assert.Zero(t, r.Drops)

	var dips []time.Duration // when each dip to four packets began
	lasted := time.Duration(0)
	highest := time.Duration(0)
	for _, s := range r.Flows[0].Samples {
		if segmentsOf(s.Inflight) <= 4.01 {
			if s.Phase == "probe_rtt" {
				if lasted == 0 {
					dips = append(dips, s.At)
				}
				lasted += 10 * time.Millisecond
			}
		} else if lasted > 0 {
			assert.GreaterOrEqual(t, lasted, 200*time.Millisecond)
			assert.LessOrEqual(t, lasted, 300*time.Millisecond)
			lasted = 0
		}
		if s.At >= 2*time.Second && s.Phase == "probe_bw" {
			highest = max(highest, s.LatestRTT)
		}
	}
	require.GreaterOrEqual(t, len(dips), 3)
	for i := 1; i < len(dips); i++ {
		assert.InDelta(t, 10.25, (dips[i] - dips[i-1]).Seconds(), 0.25, "10 s after the last ended")
	}
	assert.LessOrEqual(t, highest, 50*time.Millisecond+10*time.Millisecond,
		"a quarter over the base, and three bursts of two with what rounds them up")
}

func TestBbrFollowsADropInCapacity(t *testing.T) {
	r := play(t, sim.Scenario{
		Down: sim.LinkConfig{
			Delay: 20 * time.Millisecond,
			Trace: steps(t, 25*time.Second, sim.Step{Rate: 12e6}, sim.Step{At: 15 * time.Second, Rate: 6e6}),
		},
		Up: sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr"}},
		Duration: 25 * time.Second, Sample: 10 * time.Millisecond,
	})
	var forgot time.Duration // when it last believed in the old rate
	for _, s := range r.Flows[0].Samples {
		if s.At < 5*time.Second {
			continue
		}
		if s.Internals[0] > 9 {
			forgot = s.At
		}
		assert.LessOrEqual(t, segmentsOf(s.Inflight), 2*41.4+10+s.Internals[4],
			"twice what filled the path, bunches, and bursts in even numbers, at %v", s.At)
	}
	require.Greater(t, forgot, 15*time.Second)
	assert.LessOrEqual(t, forgot-15*time.Second, 11*160*time.Millisecond,
		"ten round trips, the queue of twice the path at half the rate included")
	assert.InDelta(t, 6*1448./1500, r.Flows[0].PerSecond[19].Mbps(), 0.1, "and fills what there is")
}

func TestBbrIgnoresRandomLoss(t *testing.T) {
	clean := play(t, sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 80},
		Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr"}},
		Duration: 15 * time.Second, Warmup: 5 * time.Second,
	})
	lossy := play(t, sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 80, Loss: 0.01},
		Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Flows: []sim.FlowConfig{{Algorithm: "bbr"}},
		Duration: 15 * time.Second, Warmup: 5 * time.Second,
	})
	assert.Greater(t, float64(lossy.Flows[0].Throughput), 0.9*float64(clean.Flows[0].Throughput))
	assert.Positive(t, lossy.Losses)
}

func TestBbrsShare(t *testing.T) {
	r := play(t, sim.Scenario{
		Down:     sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 200},
		Up:       sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows:    []sim.FlowConfig{{Algorithm: "bbr"}, {Algorithm: "bbr", Start: 5 * time.Second}},
		Duration: 40 * time.Second, Warmup: 20 * time.Second,
	})
	assert.Greater(t, r.Jain, 0.9)
	assert.GreaterOrEqual(t, r.Utilisation, 0.95)
	assert.LessOrEqual(t, r.QueuePackets, 80.0, "the queue is about one bandwidth-delay product, for want of a "+
		"better RTprop")
}

func TestBbrKeepsItsRateWhereAcknowledgementsComeInBunches(t *testing.T) {
	for _, every := range []time.Duration{5 * ms, 20 * ms, 60 * ms} {
		r := play(t, sim.Scenario{
			Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, AckEvery: every,
			Flows:    []sim.FlowConfig{{Algorithm: "bbr"}},
			Duration: 12 * time.Second, Warmup: 5 * time.Second,
		})
		assert.Greater(t, r.Utilisation, 0.9, every)
	}
}

func TestBbrIsNotMisledByAnApplicationThatPauses(t *testing.T) {
	r := play(t, sim.Scenario{
		Down:     sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond},
		Up:       sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows:    []sim.FlowConfig{{Algorithm: "bbr", Rate: 2e6, On: time.Second, Off: time.Second}},
		Duration: 30 * time.Second, Sample: 10 * time.Millisecond,
	})
	assert.InDelta(t, 1, r.Flows[0].Throughput.Mbps(), 0.1, "all that there was")
	assert.LessOrEqual(t, r.Queueing.P99, 12*time.Millisecond)
	last := r.Flows[0].Samples[len(r.Flows[0].Samples)-1]
	assert.GreaterOrEqual(t, last.Internals[0], 1.9, "the path gave at least what the application sent")
	assert.InDelta(t, 41, last.Internals[1], 1)
	assert.Contains(t, []string{"startup", "probe_bw"}, last.Phase)
}
