package scenarios

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// A Reno sender's window is about sqrt(1.5/p) packets where a part p of them is
// marked (RFC 3168 §5): four at a tenth, and the least there is at all of them.
func TestEveryAlgorithmAnswersMarks(t *testing.T) {
	for _, m := range []struct {
		part, most float64 // most: mean window, in packets
	}{{0.1, 8}, {1, 3}} {
		for _, spec := range sim.Algorithms() {
			for _, transport := range []sim.Transport{sim.Relay, sim.Kernel} {
				t.Run(fmt.Sprintf("%s over the %v", spec.Name, transport), func(t *testing.T) {
					t.Parallel()
					s := ordeal{change: func(s *sim.Scenario) {
						s.Down.Mark, s.Transport, s.Flows[0].ECN = m.part, transport, sim.ECNClassic
					}}.scenario(spec)
					r, err := sim.Run(s)
					require.NoError(t, err)
					var windows []float64
					for _, s := range r.Flows[0].Samples[4:] {
						windows = append(windows, float64(s.Cwnd)/float64(cc.DefaultMSS))
					}
					slices.Sort(windows)
					median, got := windows[len(windows)/2], throughput(r, 2, 10)
					t.Logf("%.0f %% marked: a window of %.1f packets, %.2f Mbit/s", 100*m.part, median, got)
					assert.LessOrEqual(t, median, m.most, "packets in the window")
					assert.GreaterOrEqual(t, got, 0.1, "Mbit/s: a packet per round trip and delayed acknowledgement, at least")
				})
			}
		}
	}
}
