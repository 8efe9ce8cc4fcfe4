package datapathtest

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
)

// PeerClock checks a datapath that sees the timestamps of its peer. The peer's clock ticks each millisecond.
func PeerClock(t *testing.T, pair Pair) {
	t.Helper()
	t.Run("the peer's clock is told", func(t *testing.T) {
		t.Cleanup(func() { assert.NoError(t, need.Leaks()) })
		suite{T: t, pair: pair}.peerClock()
	})
}

// clockTicks is for how many ticks the clock is looked at.
const clockTicks = 30

// peerClock passes bytes until the clock has gone on for a while. Of two acknowledgements
// each was on its way, and waited for a processor, for no longer than its bytes took from
// the write to the report. So that is by how much the time between their arrivals may
// differ from what the clock shows of it, and by a tick.
func (s suite) peerClock() {
	a, b := s.connect()
	o := observe(a, flow.Limit{Cwnd: cc.MaxCwnd})
	data := payload(10_000, 1)
	var first, before flow.Report
	var firstTook time.Duration
	for n := len(data); ; n += len(data) {
		began := time.Now() //nolint:forbidigo // the datapath runs on it
		wrote := inBackground(func() error {
			_, err := a.Write(data)
			return err
		})
		_, err := io.ReadFull(b, make([]byte, len(data)))
		require.NoError(s, err)
		require.NoError(s, wrote())
		r := o.until(s.T, "all arrived", arrived(n))
		took := time.Since(began) //nolint:forbidigo // the datapath runs on it
		news := r.Peer.At != before.Peer.At
		before = r
		switch {
		case r.Peer.At == 0 || !news:
			continue
		case first.Peer.At == 0:
			first, firstTook = r, took
		}
		require.LessOrEqual(s, r.Peer.At, r.At)
		ticks := int32(r.Peer.Value - first.Peer.Value)
		shown, passed := time.Duration(ticks)*time.Millisecond, r.Peer.At.Sub(first.Peer.At)
		require.InDelta(s, shown, passed, float64(max(took, firstTook)+2*time.Millisecond), "%+v %+v", first, r)
		if ticks >= clockTicks {
			return
		}
	}
}
