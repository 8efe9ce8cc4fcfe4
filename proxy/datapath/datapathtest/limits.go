package datapathtest

import (
	"io"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

func (s suite) rate() {
	a, b := s.connect()
	o := observeRate(a, flow.Limit{Cwnd: cc.MaxCwnd, PacingRate: testRate})
	s.paced(a, b, o, 0)
}

// changedRate limits the rate of a leg that is idle by now.
func (s suite) changedRate() {
	a, b := s.connect()
	o := observeRate(a, flow.Limit{Cwnd: cc.MaxCwnd})
	s.pass(a, b, o, 1<<20)
	a.Apply(flow.Limit{Cwnd: cc.MaxCwnd, PacingRate: testRate})
	s.paced(a, b, o, 1<<20)
}

const testRate = cc.Rate(160_000_000)

// paced writes to a leg that has taken some bytes before, and has them arrive in no less
// time than testRate needs for them.
func (s suite) paced(a, b datapath.Conn, o *observer, before int) {
	s.Helper()
	if o.holds&datapath.HoldRate == 0 {
		s.Skip("this datapath does not enforce a rate by itself")
	}
	first := len(o.all(s.T)) - 1
	s.pass(a, b, o, before+4<<20)
	all := o.all(s.T)
	last := all[len(all)-1]
	// Kernels do not pace a connection's first ten segments. Lateness can only
	// make the rest slower.
	paced := 4<<20 - 10*last.MSS
	require.Positive(s, paced)
	assert.Greater(s, last.At.Sub(all[first].At), testRate.TimeFor(paced)*3/4)
}

// pass has bytes arrive at b until total have arrived.
func (s suite) pass(a, b datapath.Conn, o *observer, total int) {
	s.Helper()
	n := total - int(o.until(s.T, "a start", func(flow.Report) bool { return true }).Written)
	wrote := inBackground(func() error {
		_, err := a.Write(payload(n, 6))
		return err
	})
	_, err := io.CopyN(io.Discard, b, int64(n))
	require.NoError(s, err)
	require.NoError(s, wrote())
	o.until(s.T, "everything arrived", arrived(total))
}

func (s suite) window() {
	a, b := s.connect()
	const window = 128 << 10
	o := observe(a, flow.Limit{Cwnd: window})
	if o.holds&datapath.HoldWindow == 0 {
		s.Skip("this datapath does not enforce a window by itself: the relay does")
	}
	s.pass(a, b, o, 4<<20)
	for _, r := range o.all(s.T) {
		assert.LessOrEqual(s, r.Pipe, window+r.MSS)
	}
}

// changedWindow narrows the window of a leg that is idle, and widens it again while its
// bytes wait and nothing comes back.
func (s suite) changedWindow() {
	a, b := s.connect()
	o := observe(a, flow.Limit{Cwnd: cc.MaxCwnd})
	if o.holds&datapath.HoldWindow == 0 {
		s.Skip("this datapath does not enforce a window by itself: the relay does")
	}
	const before = 32<<20 + 1
	s.pass(a, b, o, before-1) // has the receive window grow
	s.pass(a, b, o, before)   // and its acknowledgement say so
	all := o.all(s.T)
	mss := all[len(all)-1].MSS
	narrow, wide := mss, 5*mss
	a.Apply(flow.Limit{Cwnd: narrow})
	s.mute(s.T, a)
	wrote := inBackground(func() error {
		_, err := a.Write(make([]byte, 8<<20))
		return err
	})
	blocked := o.until(s.T, "bytes wait", func(r flow.Report) bool { return r.Unsent > 0 })
	undelivered, err := a.Undelivered()
	require.NoError(s, err)
	left := undelivered - a.Info().Unsent
	assert.LessOrEqual(s, blocked.Pipe, narrow)
	assert.LessOrEqual(s, left, narrow+mss, "a loss probe may come on top")

	a.Apply(flow.Limit{Cwnd: wide, Now: true})
	// A kernel may keep the last third of a window for later.
	last := o.until(s.T, "more is in flight", func(r flow.Report) bool { return r.Timeouts > 0 || r.Pipe >= wide*2/3 })
	if last.Timeouts > 0 {
		s.Skip("this machine stood still for long enough for a retransmission timeout")
	}
	assert.LessOrEqual(s, last.Pipe, wide)
	assert.Equal(s, cc.Bytes(before), last.Acked, "nothing came back")
	// A loss probe's copy counts as in flight, and arrives as nothing new.
	_, err = io.CopyN(io.Discard, b, int64(wide*2/3-mss))
	require.NoError(s, err, "what is reported to be in flight is")
	require.NoError(s, a.Close())
	require.Error(s, wrote())
}
