//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/telemetry"
)

// TestAProofSaysWhatAClientGains has a client download for a second at a time over an LTE link with a deep queue, and
// asks the proxy what the client gains.
func TestAProofSaysWhatAClientGains(t *testing.T) {
	needsPrivilege(t)
	trace, err := sim.Generate("lte", 1, time.Minute)
	require.NoError(t, err)
	s, path := newCellular(t, sim.LinkConfig{Trace: trace, Delay: 10 * time.Millisecond, QueueBytes: 2_000_000})
	// Without HyStart, what the kernel sends alone fills the queue in each download. Cubic does only in some.
	require.NoError(t, s.Edge.Sysctl("net.ipv4.tcp_congestion_control", "reno"))
	w := ways[0]
	p := s.start(w.yaml(""))
	s.capture(w)
	target := s.serve(servicePort, func(c net.Conn) { _, _ = io.Copy(struct{ io.Writer }{c}, random(1, 1<<40)) })
	path.StartOnData()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			c, err := s.Client.Dial("tcp", target.String())
			if err != nil {
				continue
			}
			_ = c.SetDeadline(time.Now().Add(1800 * time.Millisecond))
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}
	}()
	out, err := s.Edge.Command(t.Context(), executable, "prove", "--telemetry", telemetryAddr, "--host",
		s.ClientAddr.V4.String(), "--for", "48s", "--json").Output()
	require.NoError(t, err)
	var proof telemetry.Proof
	require.NoError(t, json.Unmarshal(out, &proof), "%s", out)
	assert.True(t, proof.Ended)
	t.Logf("%s; busy seconds %.0f and %.0f", proof.Result.Verdict, proof.Result.First.Seconds, proof.Result.Second.Seconds)
	require.NotEmpty(t, proof.Result.Figures, proof.Result.Verdict)
	mean := proof.Result.Figures[0]
	t.Logf("mean queueing delay %.0f and %.0f ms, ratio %.2f", 1e3*mean.First, 1e3*mean.Second, mean.Ratio.Value)
	assert.Less(t, mean.Ratio.Value, 0.5, "the mean queueing delay of managed connections to those left to the kernel")
	assert.Contains(t, p.page("/v1/proof"), `"ended":true`)
	assert.Contains(t, p.page("/v1/view"), ", proved: "+proof.Result.Verdict, "as the page shows it")

	require.EventuallyWithT(t, func(c *assert.CollectT) { // a look may fall between two downloads
		var signals []telemetry.Signal
		require.NoError(c, json.Unmarshal([]byte(p.page("/v1/signals")), &signals))
		near := slices.IndexFunc(signals, func(s telemetry.Signal) bool { return s.Interface == netlab.NearDevice })
		require.GreaterOrEqual(c, near, 0, "%v", signals)
		assert.NotNil(c, signals[near].QueueingDelay, "the client downloads")
		assert.Greater(c, float64(signals[near].ProxySent), 1e5)
		assert.Greater(c, float64(signals[near].Sent), 1e5)
	}, 20*time.Second, 100*time.Millisecond)
}
