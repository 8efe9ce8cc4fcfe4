package cc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

const ms = time.Millisecond

// guided runs algorithms over a link of 12 Mbit/s and 40 ms that tells of
// itself every 10 ms; change alters the scenario.
func guided(t *testing.T, change func(*sim.Scenario), refs ...string) sim.Result {
	t.Helper()
	s := sim.Scenario{
		Down:  sim.LinkConfig{Rate: 12e6, Delay: 20 * ms, QueueBytes: 2e6},
		Up:    sim.LinkConfig{Delay: 20 * ms},
		Hints: 10 * ms, Duration: 10 * time.Second, Warmup: time.Second, Seed: 1,
	}
	for _, ref := range refs {
		algorithm, params, err := cc.Parse(ref)
		require.NoError(t, err)
		s.Flows = append(s.Flows, sim.FlowConfig{Algorithm: algorithm, Params: params})
	}
	if change != nil {
		change(&s)
	}
	r, err := sim.Run(s)
	require.NoError(t, err)
	return r
}

func TestNaccUsesTheFractionOfTheLinkThatItIsTold(t *testing.T) {
	r := guided(t, nil, "nacc:wired")
	assert.Greater(t, r.Utilisation, 0.9)
	assert.Less(t, r.Queueing.P95, 15*ms)

	r = guided(t, nil, "nacc")
	assert.InDelta(t, 0.2, r.Utilisation, 0.1, "a sixth of it, by default, and what the floor of 10 packets adds")
}

func TestNaccDoesNotTakeTheRadiosLossesForCongestion(t *testing.T) {
	lossy := func(s *sim.Scenario) { s.Down.Loss = 0.01 }
	r := guided(t, lossy, "nacc:wired")
	assert.Greater(t, r.Utilisation, 0.9)
	reno := guided(t, lossy, "reno")
	assert.Less(t, reno.Utilisation, 0.6, "which one that is not told does")
}

func TestNaccFlowsShareEqually(t *testing.T) {
	r := guided(t, func(s *sim.Scenario) { s.Flows[1].Start = 2 * time.Second; s.Warmup = 4 * time.Second }, "nacc:wired", "nacc:wired")
	assert.Greater(t, r.Jain, 0.98)
	assert.Greater(t, r.Utilisation, 0.9)
	assert.Zero(t, r.Drops)
}

func TestNaccSharesByPriority(t *testing.T) {
	const app = "nacc:wired,application,priority="
	change := func(s *sim.Scenario) { s.Down.Rate, s.Down.QueueBytes = 100e6, 2e6 }
	r := guided(t, change, app+"4", app+"2")
	assert.Greater(t, r.Flows[0].Throughput, 5*r.Flows[1].Throughput/4, "priorities 4 and 2")
	assert.Greater(t, r.Utilisation, 0.8)
	r = guided(t, change, app+"2", app+"4", app+"1")
	assert.Greater(t, r.Flows[1].Throughput, r.Flows[0].Throughput, "priorities 2, 4 and 1")
	assert.Greater(t, r.Flows[0].Throughput, r.Flows[2].Throughput)
}

func TestNaccFollowsALinkThatChanges(t *testing.T) {
	trace, err := sim.Generate("lte", 1, sim.GeneratedLength)
	require.NoError(t, err)
	r := guided(t, func(s *sim.Scenario) { s.Down.Trace, s.Duration = trace, 20*time.Second }, "nacc:wired")
	assert.Greater(t, r.Utilisation, 0.7)
	assert.Less(t, r.Queueing.P95, 100*ms)
}
