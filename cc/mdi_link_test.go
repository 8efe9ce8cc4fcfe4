package cc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Over traces that its model has not seen.
func TestMDIOverCellularLinks(t *testing.T) {
	for _, link := range []string{"lte", "walk"} {
		trace, err := sim.Generate(link, 99, time.Minute)
		require.NoError(t, err)
		s := sim.Scenario{
			Down: sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueueBytes: 2_000_000},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond},
			Flows: []sim.FlowConfig{{Algorithm: "mdi", Params: cc.Params{
				"down":       0.95,
				"up_packets": 5,
			}}}, Duration: 30 * time.Second, Seed: 99,
		}
		r, err := sim.Run(s)
		require.NoError(t, err)
		assert.Greater(t, r.Utilisation, 0.7, link)
		assert.Less(t, r.Queueing.P50, 100*time.Millisecond, link)
		again, err := sim.Run(s)
		require.NoError(t, err)
		assert.Equal(t, r, again, "same seed, same windows")
	}
}
