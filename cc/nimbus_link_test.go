package cc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// nimbusRun runs nimbus first and others beside it over 12 Mbit/s and 40 ms.
func nimbusRun(t *testing.T, buffer int, length, warmup time.Duration, others ...sim.FlowConfig) sim.Result {
	t.Helper()
	r, err := sim.Run(sim.Scenario{
		Down:  sim.LinkConfig{Rate: 12_000_000, Delay: 20 * time.Millisecond, QueuePackets: buffer},
		Up:    sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows: append([]sim.FlowConfig{{Algorithm: "nimbus"}}, others...), Duration: length, Warmup: warmup,
		Sample: 100 * time.Millisecond, Seed: 1,
	})
	require.NoError(t, err)
	return r
}

// spent is the part of its time that the first flow spent in the phase, from a
// moment on.
func spent(r sim.Result, phase string, from time.Duration) float64 {
	in, all := 0.0, 0.0
	for _, s := range r.Flows[0].Samples {
		if s.At >= from {
			all++
			if s.Phase == phase {
				in++
			}
		}
	}
	return in / all
}

func TestNimbusAloneKeepsTheQueueShortAndTheLinkBusy(t *testing.T) {
	r := nimbusRun(t, 250, 30*time.Second, 10*time.Second)
	assert.Greater(t, r.Utilisation, 0.98)
	assert.Less(t, r.Queueing.P50, 20*time.Millisecond, "a quarter of the round trip, and the pulse")
	assert.Equal(t, 1.0, spent(r, "delay", 2*time.Second))
}

func TestNimbusBesideCubicCompetes(t *testing.T) {
	r := nimbusRun(t, 250, 80*time.Second, 30*time.Second, sim.FlowConfig{Algorithm: "cubic", Start: 3 * time.Second})
	assert.Greater(t, spent(r, "competitive", 20*time.Second), 0.95)
	share := float64(r.Flows[0].Throughput) / float64(r.Flows[0].Throughput+r.Flows[1].Throughput)
	assert.Greater(t, share, 0.33, "about a half")
	assert.Less(t, share, 0.67)
}

func TestNimbusBesideAConstantRateKeepsTheQueueShort(t *testing.T) {
	constant := sim.FlowConfig{
		Algorithm: "static", Params: cc.Params{"cwnd_packets": 1000}, Rate: 6_000_000,
		Start: 3 * time.Second,
	}
	r := nimbusRun(t, 250, 40*time.Second, 15*time.Second, constant)
	assert.Equal(t, 1.0, spent(r, "delay", 5*time.Second))
	assert.Less(t, r.Queueing.P95, 25*time.Millisecond)
	assert.Greater(t, r.Utilisation, 0.98, "what the other leaves is used")
	assert.InEpsilon(t, 6e6, float64(r.Flows[1].Throughput), 0.01, "and the other loses nothing")
}

func TestNimbusGoesBackToAShortQueueWhenCubicHasLeft(t *testing.T) {
	r := nimbusRun(t, 250, 90*time.Second, 75*time.Second,
		sim.FlowConfig{Algorithm: "cubic", Start: 3 * time.Second, Stop: 45 * time.Second})
	assert.Greater(t, spent(r, "delay", 52*time.Second), 0.95)
	assert.Less(t, r.Queueing.P50, 20*time.Millisecond)
	assert.Greater(t, r.Utilisation, 0.97)
}
