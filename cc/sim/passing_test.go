package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// besidePassing is a scenario of a download beside a flow to the same phone that passes.
func besidePassing(hop LinkConfig, passing FlowConfig) Scenario {
	own := download
	own.Host, passing.Host = 1, 1
	return over(hop, own, passing)
}

// countPassingEvery is how often an edge reads the kernel's counters.
const countPassingEvery = 100 * ms

// playPassing runs a scenario whose second flow the edge forwards beside all windows: it counts the flow's bytes for
// the windows to the same host.
func playPassing(t *testing.T, s Scenario) Result {
	t.Helper()
	require.NoError(t, s.Check())
	w := newWorld(s)
	w.plan()
	var count func()
	count = func() {
		passed := cc.Bytes(0)
		switch e := w.endpoints[1].(type) {
		case *sender:
			passed = cc.Bytes(e.board.count) * (cc.DefaultMSS + HeaderBytes) // each packet is full
		case *datagrams:
			passed = e.sent / DatagramPayload * DatagramBytes
		}
		w.manager.CountPassing(w.now, hostAddr(0), passed)
		w.at(w.now.Add(countPassingEvery), count)
	}
	w.at(w.origin, count)
	w.run()
	require.NoError(t, w.err)
	return w.result()
}

// TestADownloadHoldsItsPartBesideWhatPasses has another server's transport send to the phone past the edge, which only
// counts its bytes.
func TestADownloadHoldsItsPartBesideWhatPasses(t *testing.T) {
	for _, algorithm := range []string{"cubic", "reno", "bbr"} {
		for _, delay := range []time.Duration{10 * ms, 30 * ms} {
			for _, queue := range []cc.Bytes{150_000, 750_000, 2_000_000} {
				t.Run(fmt.Sprintf("%s, %v, %v", algorithm, 2*delay, queue), func(t *testing.T) {
					t.Parallel()
					rival := FlowConfig{Name: "passes", Algorithm: algorithm}
					s := besidePassing(LinkConfig{Rate: 20e6, Delay: delay, QueueBytes: queue}, rival)
					s.Warmup = 0
					r := playPassing(t, s)
					part := func(from, to int) float64 {
						var ours, theirs float64
						for i := from; i < to; i++ {
							ours += float64(r.Flows[0].PerSecond[i])
							theirs += float64(r.Flows[1].PerSecond[i])
						}
						return ours / (ours + theirs)
					}
					t.Logf("%.2f from second 3 to 20, %.2f after", part(3, 20), part(20, 40))
					assert.GreaterOrEqual(t, part(3, 20), 0.3)
					after := 0.4
					if algorithm != "bbr" && queue == 2_000_000 { // 0.32 to 0.39: epochs are longer than this course
						after = 0.3
					}
					assert.GreaterOrEqual(t, part(20, 40), after)
				})
			}
		}
	}
}

// TestACallThatPassesCostsLittleQueue has a call pass at 1 Mbit/s, which is counted, or as if it were not.
func TestACallThatPassesCostsLittleQueue(t *testing.T) {
	s := besidePassing(LinkConfig{Rate: 20e6, Delay: 20 * ms, QueueBytes: 750_000}, FlowConfig{Algorithm: UDP, Rate: 1e6})
	counted := playPassing(t, s)
	uncounted := play(t, s)
	assert.Zero(t, counted.Flows[1].Drops)
	assert.LessOrEqual(t, counted.Queueing.P95, uncounted.Queueing.P95+5*ms)
	assert.Greater(t, counted.Flows[0].Throughput, cc.Rate(17e6))
}
