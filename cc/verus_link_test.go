package cc_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// verusOverPath runs one flow over a path of this round trip and this many
// 1500-byte packets per second, and leaves out the first 20 s.
func verusOverPath(t *testing.T, ref string, packets int, rtt time.Duration, change func(*sim.Scenario)) sim.Result {
	t.Helper()
	name, params, err := cc.Parse(ref)
	require.NoError(t, err)
	s := sim.Scenario{
		Down:     sim.LinkConfig{Rate: cc.Rate(packets) * 12_000, Delay: rtt / 2},
		Up:       sim.LinkConfig{Delay: rtt / 2},
		Flows:    []sim.FlowConfig{{Algorithm: name, Params: params}},
		Duration: 40 * time.Second, Warmup: 20 * time.Second,
	}
	if change != nil {
		change(&s)
	}
	r, err := sim.Run(s)
	require.NoError(t, err)
	return r
}

// On a constant link with an infinite queue, r and not the deltas sets the
// operating point: the round trip stays below r times the least.
func TestVerusHoldsTheDelayThatRAllows(t *testing.T) {
	for _, tt := range []struct {
		packets int
		base    time.Duration
		r       float64
	}{
		{1000, 50 * time.Millisecond, 6},
		{1000, 50 * time.Millisecond, 4},
		{1000, 50 * time.Millisecond, 2},
		{1000, 20 * time.Millisecond, 6},
		{500, 100 * time.Millisecond, 6},
	} {
		got := verusOverPath(t, fmt.Sprintf("verus:r=%g", tt.r), tt.packets, tt.base, nil)
		median := float64(got.OneWay.P50+tt.base/2) / float64(tt.base)
		longest := float64(got.OneWay.Max+tt.base/2) / float64(tt.base)
		assert.GreaterOrEqual(t, got.Utilisation, 0.98, "%+v", tt)
		assert.GreaterOrEqual(t, median, 0.7*tt.r, "%+v", tt)
		assert.LessOrEqual(t, median, tt.r, "%+v", tt)
		assert.Less(t, longest, tt.r+1, "%+v", tt)
		assert.Zero(t, got.Retransmits, "%+v", tt)
	}
}

func TestVerusFillsAPathWhoseRateChanges(t *testing.T) {
	got := verusOverPath(t, "verus", 0, 40*time.Millisecond, func(s *sim.Scenario) {
		var err error
		s.Down.Trace, err = sim.Steps("steps", s.Duration, sim.Step{Rate: 2e6},
			sim.Step{At: 10 * time.Second, Rate: 40e6}, sim.Step{At: 25 * time.Second, Rate: 4e6})
		require.NoError(t, err)
		s.Warmup = 5 * time.Second
	})
	assert.GreaterOrEqual(t, got.Utilisation, 0.85)
	assert.Less(t, got.OneWay.P95, 6*40*time.Millisecond+100*time.Millisecond)
}

func TestVerusComesBackFromAnOutageWithTheDelayItHad(t *testing.T) {
	got := verusOverPath(t, "verus", 0, 20*time.Millisecond, func(s *sim.Scenario) {
		trace, err := sim.Steps("outage", s.Duration, sim.Step{Rate: 12e6})
		require.NoError(t, err)
		s.Down.Trace, err = trace.Without(15*time.Second, 17*time.Second, s.Duration)
		require.NoError(t, err)
	})
	assert.GreaterOrEqual(t, got.Utilisation, 0.98)
	assert.Less(t, got.OneWay.Max, 7*20*time.Millisecond, "the outage has not become the least delay")
}

func TestVerusKeepsGoingWithABufferShorterThanItsDelay(t *testing.T) {
	for _, packets := range []int{50, 100} {
		got := verusOverPath(t, "verus", 1000, 50*time.Millisecond,
			func(s *sim.Scenario) { s.Down.QueuePackets = packets })
		assert.GreaterOrEqual(t, got.Utilisation, 0.5, "%d packets", packets)
		assert.Less(t, float64(got.Retransmits), 0.1*20_000, "%d packets: no storm", packets)
	}
}

func TestVerusLeavesNothingOfAnIdleSpellInItsProfile(t *testing.T) {
	got := verusOverPath(t, "verus", 1000, 50*time.Millisecond, func(s *sim.Scenario) {
		s.Flows[0].Rate, s.Flows[0].On, s.Flows[0].Off = 40e6, 2*time.Second, time.Second
	})
	assert.GreaterOrEqual(t, got.Utilisation, 0.6, "it sends two seconds of three")
	assert.Less(t, got.OneWay.Max, 7*50*time.Millisecond)
}
