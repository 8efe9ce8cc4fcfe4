//go:build linux

package e2e

import (
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestAnUploadShowsAsAQueueOnTheWayBack has a client upload, with a control of its own,
// beside a download, whose acknowledgements wait behind it.
func TestAnUploadShowsAsAQueueOnTheWayBack(t *testing.T) {
	needsPrivilege(t)
	s, path := lastHop(t, "none")
	sink := s.serve(servicePort, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	source := s.serve(servicePort+1, func(c net.Conn) { _, _ = io.Copy(struct{ io.Writer }{c}, random(1, 1<<40)) })
	watch := newWatch()
	defer watch.stop()
	down, up := s.dial(source, "cubic"), s.dial(sink, "cubic")
	var busy sync.WaitGroup
	busy.Go(func() { _, _ = io.Copy(io.Discard, down) })
	busy.Go(func() { _, _ = io.Copy(struct{ io.Writer }{up}, random(2, 1<<40)) })
	until(t, path, uploadTime/2)
	var forward, reverse []float64
	for path.Elapsed() < uploadTime*9/10 {
		for _, f := range s.proxy.flows() {
			control, busy := f["down"].(map[string]any)["control"].(map[string]any)
			if !busy || control["delivered_bytes"].(float64) < megabyte {
				continue // the upload's
			}
			if there, known := control["forward_queueing_delay_seconds"]; known {
				forward = append(forward, there.(float64))
				reverse = append(reverse, control["reverse_queueing_delay_seconds"].(float64))
			}
		}
		until(t, path, path.Elapsed()+100*time.Millisecond)
	}
	busy.Wait()
	watch.skip(t, 40*time.Millisecond)
	require.Greater(t, len(reverse), 20)
	slices.Sort(forward)
	slices.Sort(reverse)
	there, back := forward[len(forward)/2], reverse[len(reverse)/2]
	r := path.Report(uploadTime/2, uploadTime*9/10)
	t.Logf("told: %.3f s there, %.3f s back; %v down, queueing p50 %v there, %v back", there, back,
		r.Down.Throughput, r.Down.DataQueueing.P50, r.Up.DataQueueing.P50)
	truth := r.Up.DataQueueing.P50.Seconds()
	assert.Greater(t, truth, 0.1, "there is a queue to be told of")
	assert.InDelta(t, truth, back, truth/4)
	assert.InDelta(t, r.Down.DataQueueing.P50.Seconds(), there, 0.02+truth/8)
}
