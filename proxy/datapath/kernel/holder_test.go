//go:build linux

package kernel

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/datapathtest"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// holding returns a datapath whose ticks the test makes, with room for so many
// legs.
func holding(t *testing.T, legs int) *Datapath {
	t.Helper()
	needsEBPF(t)
	return still(t, Config{Envelope: EBPF, Cells: legs})
}

// pass has n bytes go from one leg to another.
func pass(t *testing.T, from, to *Conn, n int) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() {
		_, err := from.Write(make([]byte, n))
		wrote <- err
	}()
	_, err := io.CopyN(io.Discard, to, int64(n))
	require.NoError(t, err)
	require.NoError(t, <-wrote)
}

// drain makes ticks until so much is acknowledged, and returns the last report.
func (d *Datapath) drain(t *testing.T, c *Conn, acked cc.Bytes) flow.Report {
	t.Helper()
	for {
		c.mu.Lock()
		r := *c.last()
		c.mu.Unlock()
		if r.Acked >= acked {
			return r
		}
		require.Equal(t, ticking, d.mode, "nobody looks for the rest: %+v", r)
		d.next(t)
	}
}

func TestALegForWhichThereIsNoRoomIsHeldByTheRelay(t *testing.T) {
	d := holding(t, 1)
	assert.Equal(t, EBPF, d.Envelope())
	assert.NotEqual(t, EBPF, d.Beneath())
	held, _ := d.pair(t, loopback4)
	late, peer := d.pair(t, loopback4)
	watched(held)
	reports := watched(late)

	info := held.Info()
	assert.Equal(t, EBPF, info.Envelope)
	assert.Equal(t, datapath.HoldRate|datapath.HoldWindow, info.Holds)
	assert.Empty(t, info.Missing)

	info = late.Info()
	assert.Equal(t, d.Beneath(), info.Envelope)
	assert.Equal(t, datapath.HoldRate, info.Holds)
	require.Len(t, info.Missing, 1)
	assert.Contains(t, info.Missing[0], "limits.held_legs")
	assert.Contains(t, info.Missing[0], "1 leg")

	status := d.Status().Held
	require.NotNil(t, status)
	assert.Equal(t, 1, status.Legs)
	assert.Equal(t, 1, status.Limit)
	assert.EqualValues(t, 1, status.Full)
	assert.Zero(t, status.Failed)

	// It is reported all the same.
	before := *reports
	pass(t, late, peer, 100_000)
	r := d.drain(t, late, 100_000)
	assert.False(t, r.Held)
	assert.EqualValues(t, 100_000, r.Acked)
	assert.Greater(t, *reports, before)

	require.NoError(t, held.Close())
	assert.Zero(t, d.Status().Held.Legs)
	next, peer := d.pair(t, loopback4)
	watched(next)
	assert.Equal(t, EBPF, next.Info().Envelope)
	assert.Empty(t, next.Info().Missing)
	assert.Equal(t, 1, d.Status().Held.Legs)
	assert.EqualValues(t, 1, d.Status().Held.Full)
	pass(t, next, peer, 100_000)
	r = d.drain(t, next, 100_000)
	assert.True(t, r.Held)
	assert.EqualValues(t, 100_000, r.Acked)
}

// told is what the cell says now.
func (c *Conn) told(t *testing.T) (s bpf.Seen) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.held.Load()
	require.NotNil(t, h)
	require.True(t, h.cell.Read(&s))
	return s
}

func TestEachAcknowledgementIsReportedByItselfWhereThatIsWanted(t *testing.T) {
	d := holding(t, 2)
	a, b := d.pair(t, loopback4)
	limit := flow.Limit{Cwnd: 1 << 20, EveryAck: true}
	var reports []flow.Report
	a.Observe(func(r flow.Report) flow.Limit {
		reports = append(reports, r)
		return limit
	}, datapath.HoldAll)
	other, sink := d.pair(t, loopback4)
	calls := watched(other)
	first, before := a.told(t), len(reports)
	pass(t, other, sink, 1<<20)
	pass(t, a, b, 1<<20)
	acked := func() bool { s := a.told(t); return s.Acked == s.End }
	for !acked() {
		pass(t, b, a, 1) // brings the last one along
	}
	require.NoError(t, d.holder.acks())
	last := a.told(t)
	assert.Zero(t, last.Missed)
	assert.EqualValues(t, last.Acks-first.Acks, len(reports)-before)
	assert.Greater(t, len(reports), before+2)
	for i, r := range reports[before:] {
		require.Greater(t, r.At, reports[before+i-1].At, "each is of its own time")
		require.GreaterOrEqual(t, r.Acked, reports[before+i-1].Acked)
	}
	assert.EqualValues(t, 1<<20, reports[len(reports)-1].Acked)
	assert.Equal(t, 1, *calls, "nobody asked for the other's")

	// What the ring tells late is no news any more.
	pass(t, a, b, 100_000)
	for !acked() {
		pass(t, b, a, 1)
	}
	a.poll()
	before = len(reports)
	require.NoError(t, d.holder.acks())
	assert.Len(t, reports, before)

	limit.EveryAck = false
	a.poll()
	before = len(reports)
	pass(t, a, b, 100_000)
	for !acked() {
		pass(t, b, a, 1)
	}
	require.NoError(t, d.holder.acks())
	assert.Len(t, reports, before, "not wanted any more")
	assert.EqualValues(t, 1<<20+200_000, d.drain(t, a, 1<<20+200_000).Acked)
}

func TestClosingALegLetsItsSocketGo(t *testing.T) {
	d := holding(t, 3)
	a, b := d.pair(t, loopback4)
	for _, c := range []*Conn{a, b} {
		c.Observe(func(flow.Report) flow.Limit { return flow.Limit{Cwnd: cc.MaxCwnd, EveryAck: true} }, datapath.HoldAll)
	}
	assert.Equal(t, 2, d.Status().Held.Legs)
	assert.EqualValues(t, 2, d.holder.each.Load())
	pass(t, a, b, 100_000)
	require.NoError(t, a.Close())
	assert.Equal(t, 1, d.Status().Held.Legs)
	assert.EqualValues(t, 1, d.holder.each.Load())
	require.Error(t, a.Close())
	assert.Equal(t, 1, d.Status().Held.Legs, "closing it twice lets it go once")
	require.NoError(t, d.holder.acks(), "some are left of the one that is gone")
	require.NoError(t, b.Reset())
	assert.Zero(t, d.Status().Held.Legs)
	assert.Zero(t, d.holder.each.Load())
	for range 3 {
		c, _ := d.pair(t, loopback4)
		watched(c)
		assert.Equal(t, EBPF, c.Info().Envelope)
	}
	assert.Zero(t, d.Status().Held.Full)
}

func TestWhatASocketDoesByItselfIsCounted(t *testing.T) {
	d := holding(t, 1)
	a, b := d.pair(t, loopback4)
	watched(a)
	for a.told(t).Fallen == 0 { // without a tick nobody answers it
		pass(t, a, b, 100_000)
	}
	assert.Zero(t, d.Status().Held.Falls, "not known yet")
	a.poll()
	assert.EqualValues(t, 1, d.Status().Held.Falls)
	assert.EqualValues(t, 1, a.Info().Falls)
	for a.told(t).Fallen == 1 {
		pass(t, a, b, 100_000)
		a.poll()
	}
	assert.EqualValues(t, 1, d.Status().Held.Falls)
	for d.Status().Held.Answers.Count() == 0 { // one counts that came while more was underway
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = a.Write(make([]byte, 1<<20))
		}()
		_, err := io.CopyN(pollingWriter{a}, b, 1<<20)
		require.NoError(t, err)
		<-done
		a.poll()
	}
}

// TestABusyUserSpaceKeepsToTheRate has nobody tick, as if every tick came late, while
// the relay goes on writing.
func TestABusyUserSpaceKeepsToTheRate(t *testing.T) {
	d := holding(t, 1)
	a, b := d.pair(t, loopback4)
	const rate = 80_000_000 // loopback carries a thousand times as much
	a.Observe(func(flow.Report) flow.Limit { return flow.Limit{Cwnd: cc.MaxCwnd, PacingRate: rate} }, datapath.HoldAll)
	for a.told(t).Fallen == 0 {
		pass(t, a, b, 100_000)
	}
	before := a.told(t)
	pass(t, a, b, 2_000_000)
	after := a.told(t)
	require.EqualValues(t, 1, after.Fallen)
	allowed := cc.Rate(rate).BytesIn(time.Duration(after.At-before.At)) + 256<<10 // and what the kernel sends at once
	assert.LessOrEqual(t, cc.Bytes(after.Acked-before.Acked), allowed)
}

// pollingWriter has its leg polled for each piece.
type pollingWriter struct{ *Conn }

func (w pollingWriter) Write(p []byte) (int, error) {
	w.poll()
	return len(p), nil
}

func TestTheFirstBytesOfALegAreNoAnswer(t *testing.T) {
	d := holding(t, 1)
	a, b := d.pair(t, loopback4)
	watched(a)
	pass(t, a, b, 1) // was told its window before; how long ago says nothing
	d.drain(t, a, 1)
	assert.Zero(t, d.Status().Held.Answers.Count())
}

// everyAck is a leg of which every acknowledgement is wanted.
type everyAck struct{ *Conn }

func (c everyAck) Observe(exchange func(flow.Report) flow.Limit, want datapath.Hold) datapath.Hold {
	return c.Conn.Observe(func(r flow.Report) flow.Limit {
		limit := exchange(r)
		limit.EveryAck = true
		return limit
	}, want)
}

func TestConformanceWithEachAcknowledgementByItself(t *testing.T) {
	needsEBPF(t)
	pair := pairs(Config{Envelope: EBPF, Cells: 64}, loopback4)
	datapathtest.Run(t, func(t *testing.T) (a, b datapath.Conn) {
		t.Helper()
		dialled, accepted := pair(t)
		return everyAck{dialled.(*Conn)}, everyAck{accepted.(*Conn)}
	})
}
