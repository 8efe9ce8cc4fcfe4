//go:build linux

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// TestEveryAlgorithmCrossesACellularLink has each transfer a little over an
// emulated LTE link; those that need hints go without. How fast
// it went is told beside the same in virtual time, and left to the reader: on a
// machine that others share it says more about them.
func TestEveryAlgorithmCrossesACellularLink(t *testing.T) {
	needsPrivilege(t)
	trace, err := sim.Generate("lte", 1, 20*time.Second)
	require.NoError(t, err)
	link := sim.LinkConfig{Trace: trace, Delay: linkDelay, QueueBytes: 2_000_000}
	for _, spec := range sim.Algorithms() {
		t.Run(spec.Name, func(t *testing.T) {
			t.Parallel()
			crosses(t, link, spec)
		})
	}
}

func crosses(t *testing.T, link sim.LinkConfig, spec cc.Spec) {
	t.Helper()
	const size = 2 * megabyte
	s, path := newCellular(t, link)
	w := ways[0]
	p := s.start(w.yaml(fmt.Sprintf("defaults: {algorithm: %s}\n", spec.Name)))
	s.capture(w)
	path.StartOnData()
	d := w.download(s, 1, size)
	d.reaches(size / 10)
	flow := p.relaying(1)[0]
	assert.Equal(t, p.envelope(), leg(t, flow, "client")["envelope"])
	down := flow["down"].(map[string]any)
	assert.Equal(t, spec.Name, down["algorithm"])
	internals, _ := down["control"].(map[string]any)["internals"].(map[string]any)
	assert.Len(t, internals, len(spec.Internals))
	for _, show := range spec.Internals {
		assert.Contains(t, internals, show.Name)
	}
	d.arrives()
	crossed := path.Report(0, path.Elapsed()).Down

	transport := sim.Relay
	if present.envelope == kernel.EBPF {
		transport = sim.Kernel
	}
	virtual, err := netlab.Simulate(t.Context(), sim.Scenario{
		Down: link, Up: sim.LinkConfig{Delay: link.Delay}, Transport: transport,
		Flows: []sim.FlowConfig{{Algorithm: spec.Name, Bytes: size}}, Duration: time.Minute,
	})
	require.NoError(t, err)
	took := virtual.Flows[0].Completed
	require.Positive(t, took, "not even in virtual time it arrives within a minute")
	simulated := virtual.Report(0, took).Down
	t.Logf("%s: %.2f Mbit/s and %v in the queue at the median; in virtual time %.2f Mbit/s and %v", spec.Name,
		crossed.Throughput.Mbps(), crossed.DataQueueing.P50.Round(time.Millisecond),
		simulated.Throughput.Mbps(), simulated.DataQueueing.P50.Round(time.Millisecond))
}
