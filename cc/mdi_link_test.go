package cc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
)

// Over traces that its model has not seen.
func TestMDIOverCellularLinks(t *testing.T) {
	for _, link := range []string{"lte", "walk"} {
		trace, err := sim.Generate(link, 99, time.Minute)
		require.NoError(t, err)
		s := sim.Scenario{
			Down: sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueueBytes: 2_000_000},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, Transport: sim.Kernel,
			Flows: []sim.FlowConfig{{Algorithm: "verus"}}, Duration: time.Minute, Warmup: 5 * time.Second, Seed: 99,
		}
		verus, err := sim.Run(s)
		require.NoError(t, err)
		s.Flows[0].Algorithm = "mdi"
		r, err := sim.Run(s)
		require.NoError(t, err)
		assert.InEpsilon(t, verus.Utilisation, r.Utilisation, 0.05, link)
		assert.InEpsilon(t, verus.Queueing.P50, r.Queueing.P50, 0.2, link)
		again, err := sim.Run(s)
		require.NoError(t, err)
		assert.Equal(t, r, again, "same seed, same windows")
	}
}
