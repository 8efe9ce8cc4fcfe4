package scenarios

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Two seconds after a link is back, it is in use again: nine tenths of what was before
// the gap, over four seconds, so that BBR's ProbeRTT may fall into them. Of a long path
// before a short queue, most of what was in flight is lost. If the gap meets a probe of
// BBRv3, inflight_longterm stays at seven tenths of the BDP until the next probe, two to
// three seconds later.
func TestTwoSecondsAfterAGapTheLinkIsInUse(t *testing.T) {
	for _, algorithm := range []string{"copa", "bbr", "bbr3", "penstock"} {
		for _, path := range []sim.LinkConfig{
			{Rate: 12e6, Delay: 20 * ms, QueuePackets: 250},
			{Rate: 20e6, Delay: 50 * ms, QueuePackets: 60},
		} {
			for _, transport := range []sim.Transport{sim.Relay, sim.Kernel} {
				for _, gap := range []int{1, 4, 10, 60} {
					name := fmt.Sprintf("%s, %v and %v, %v, %d s", algorithm, path.Rate, path.Delay, transport, gap)
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						for seed := range uint64(4) {
							used := afterGap(t, algorithm, path, transport, gap, seed)
							bound := 0.9
							if algorithm == "bbr3" && path.QueuePackets == 60 && transport == sim.Relay && gap <= 4 {
								bound = 0.8
							}
							assert.GreaterOrEqual(t, used, bound, "started %d·137 ms late", seed)
						}
					})
				}
			}
		}
	}
}

// afterGap is what is used of a link in the four seconds from two seconds after its
// return, over what was before the gap, which is in the 11th second. The seed also tells
// where in its cycle the algorithm meets it.
func afterGap(
	t *testing.T, algorithm string, path sim.LinkConfig, transport sim.Transport, gap int, seed uint64,
) float64 {
	t.Helper()
	back := 10 + gap
	end := time.Duration(back+6) * time.Second
	s := sim.Scenario{
		Down: path, Up: sim.LinkConfig{Delay: path.Delay}, Transport: transport, Seed: seed, Duration: end,
		Flows: []sim.FlowConfig{{Algorithm: algorithm, Start: time.Duration(seed) * 137 * ms}},
	}
	s.Down.Rate = 0
	s.Down.Trace = steps(end, sim.Step{Rate: path.Rate},
		sim.Step{At: 10 * time.Second}, sim.Step{At: time.Duration(back) * time.Second, Rate: path.Rate})
	r, err := sim.Run(s)
	require.NoError(t, err)
	require.Greater(t, throughput(r, 5, 10), 0.9*float64(path.Rate)*float64(cc.DefaultMSS)/1500/1e6, "before the gap")
	return throughput(r, back+2, back+6) / throughput(r, 5, 10)
}
