//go:build linux

package e2e

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
)

// longGaps is the variable that has the gap of a minute tested as well.
const longGaps = "PENSTOCK_E2E_LONG"

// TestAfterAGapTheLinkIsInUseAgain: the kernel's timer backs off while the link is
// gone. Its last retransmission waits in the queue, so the answer is there as soon
// as the link is.
func TestAfterAGapTheLinkIsInUseAgain(t *testing.T) {
	gaps := []time.Duration{time.Second, 4 * time.Second, 10 * time.Second}
	if os.Getenv(longGaps) != "" {
		gaps = append(gaps, time.Minute)
	}
	const (
		begins = 2 * time.Second
		within = 5 * time.Second // after the return
		span   = 2 * time.Second
	)
	for algorithm, least := range map[string]float64{ // Mbit/s
		"penstock": 6, "bbr": 6, "bbr3": 6, // half of the link
	} {
		for _, gap := range gaps {
			t.Run(fmt.Sprintf("%s, %v", algorithm, gap), func(t *testing.T) {
				t.Parallel() // they wait, most of the time
				back := begins + gap
				trace, err := sim.Steps("a gap", 2*time.Minute, sim.Step{Rate: linkRate}, sim.Step{At: begins},
					sim.Step{At: back, Rate: linkRate})
				require.NoError(t, err)
				w := named("socks5")
				s, path := newCellular(t, sim.LinkConfig{Trace: trace, Delay: linkDelay, QueuePackets: 100})
				s.start(w.yaml("defaults: {algorithm: " + algorithm + ", up: {algorithm: none}}\n"))
				path.StartOnData()
				d := w.download(s, 1, 64*megabyte)
				if gap > patience/2 {
					time.Sleep(gap)
				}
				until(t, path, back+within)
				moved, from := d.moved.Load(), path.Elapsed()
				until(t, path, from+span)
				rate := float64(d.moved.Load()-moved) * 8 / 1e6 / (path.Elapsed() - from).Seconds()
				t.Logf("%.2f Mbit/s from %v after the return", rate, within)
				assert.Greater(t, rate, least)
			})
		}
	}
}
