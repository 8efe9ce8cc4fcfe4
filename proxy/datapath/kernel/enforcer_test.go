//go:build linux

package kernel

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// enforcing returns a datapath whose ticks the test makes, with room for so many legs.
func enforcing(t *testing.T, legs int) *Datapath {
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
		r := *c.lastReport()
		c.mu.Unlock()
		if r.Acked >= acked {
			return r
		}
		require.NotEqual(t, cc.Never, c.shard.tickAt, "nobody looks for the rest: %+v", r)
		c.shard.next(t)
	}
}

func TestTheRelayKeepsTheWindowOfALegForWhichThereIsNoRoom(t *testing.T) {
	d := enforcing(t, 1)
	assert.Equal(t, EBPF, d.Envelope())
	assert.NotEqual(t, EBPF, d.Beneath())
	enforced, _ := d.pair(t, loopback4)
	late, peer := d.pair(t, loopback4)
	watched(enforced)
	reports := watched(late)

	info := enforced.Info()
	assert.Equal(t, EBPF, info.Envelope)
	assert.Equal(t, datapath.HoldRate|datapath.HoldWindow, info.Holds)
	assert.Empty(t, info.Missing)

	info = late.Info()
	assert.Equal(t, d.Beneath(), info.Envelope)
	assert.Zero(t, info.Holds)
	require.Len(t, info.Missing, 1)
	assert.Contains(t, info.Missing[0], "limits.held_legs")
	assert.Contains(t, info.Missing[0], "1 leg")

	status := d.Status().Enforced
	require.NotNil(t, status)
	assert.Equal(t, 1, status.Legs)
	assert.Equal(t, 1, status.Limit)
	assert.EqualValues(t, 1, status.Full)
	assert.Zero(t, status.Failed)

	// It is reported all the same.
	before := *reports
	pass(t, late, peer, 100_000)
	r := d.drain(t, late, 100_000)
	assert.EqualValues(t, 100_000, r.Acked)
	assert.Greater(t, *reports, before)

	require.NoError(t, enforced.Close())
	assert.Zero(t, d.Status().Enforced.Legs)
	next, peer := d.pair(t, loopback4)
	watched(next)
	assert.Equal(t, EBPF, next.Info().Envelope)
	assert.Empty(t, next.Info().Missing)
	assert.Equal(t, 1, d.Status().Enforced.Legs)
	assert.EqualValues(t, 1, d.Status().Enforced.Full)
	pass(t, next, peer, 100_000)
	r = d.drain(t, next, 100_000)
	assert.EqualValues(t, 100_000, r.Acked)
}

// says is what the cell says now.
func (c *Conn) says(t *testing.T) (s bpf.Seen) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.enforced.Load()
	require.NotNil(t, h)
	require.True(t, h.cell.Read(&s))
	return s
}

func TestClosingALegLetsItsSocketGo(t *testing.T) {
	d := enforcing(t, 3)
	s := d.shards[0]
	a, b := d.pair(t, loopback4)
	watched(a)
	watched(b)
	assert.Equal(t, 2, d.Status().Enforced.Legs)
	a.beginWrite()
	assert.Equal(t, 1, d.Status().Busy)
	require.NoError(t, a.Close())
	assert.Equal(t, 1, d.Status().Enforced.Legs)
	assert.Zero(t, d.Status().Busy)
	s.next(t)
	assert.Equal(t, cc.Never, s.tickAt, "nothing is left to tick for")
	require.Error(t, a.Close())
	assert.Equal(t, 1, d.Status().Enforced.Legs, "closing it twice lets it go once")
	a.endWrite()
	a.Apply(flow.Limit{Cwnd: 1})
	require.NoError(t, b.Reset())
	assert.Zero(t, d.Status().Enforced.Legs)
	for range 3 {
		c, _ := d.pair(t, loopback4)
		watched(c)
		assert.Equal(t, EBPF, c.Info().Envelope)
	}
	assert.Zero(t, d.Status().Enforced.Full)
	assert.Zero(t, d.Status().Busy)
}

func TestLegsTakeTheCellsOfAllShards(t *testing.T) {
	needsEBPF(t)
	d := still(t, Config{Envelope: EBPF, Cells: 100, Shards: 4})
	require.Equal(t, 2, d.Shards(), "64 cells at least for each, but the last")
	for range 50 {
		a, b := d.pair(t, loopback4)
		watched(a)
		watched(b)
	}
	assert.Zero(t, d.Status().Enforced.Full)
	assert.Equal(t, 100, d.Status().Enforced.Legs)
	for _, s := range d.shards {
		assert.Zero(t, d.freeCells(s), "the first is asked for, the second has what it has no room for")
	}
}

// enforcingByHand has one cell, and a clock and a tick that the test moves.
func enforcingByHand(t *testing.T) (*hands, *Datapath, *shard) {
	t.Helper()
	needsEBPF(t)
	h := &hands{cc.Time(time.Hour)}
	d := still(t, Config{Envelope: EBPF, Cells: 1, Clock: h.clock})
	return h, d, d.shards[0]
}

// TestASilentLegHasTheTickComeLessOften: one whose window the kernel enforces.
func TestASilentLegHasTheTickComeLessOften(t *testing.T) {
	h, d, s := enforcingByHand(t)
	a, b := d.pair(t, loopback4)
	reports := watched(a)
	a.beginWrite()
	ticks := 0
	for h.step(s, Tick); s.tickAt.Sub(h.now) < maxPause; ticks++ {
		h.step(s, s.tickAt.Sub(h.now))
	}
	assert.Less(t, ticks, 400)
	assert.LessOrEqual(t, *reports, 2, "nothing is looked at without news")
	before := *reports
	a.write(t, 1)
	assert.Equal(t, h.now.Add(Tick), s.tickAt, "a write ends the pause")
	h.step(s, Tick)
	assert.Equal(t, before+1, *reports)
	assert.Equal(t, h.now.Add(Tick), s.tickAt)
	a.endWrite()

	_, err := io.ReadFull(b, make([]byte, 1))
	require.NoError(t, err)
	for d.Status().Busy > 0 {
		h.step(s, Tick)
	}
	assert.Equal(t, cc.Never, s.tickAt)
}

// TestAnAcknowledgementThatNobodySaidIsNoticed takes the control away, so that the kernel
// calls another.
func TestAnAcknowledgementThatNobodySaidIsNoticed(t *testing.T) {
	h, d, s := enforcingByHand(t)
	a, b := d.pair(t, loopback4)
	var last flow.Report
	a.manage(flow.Limit{Cwnd: cc.MaxCwnd}, func(r flow.Report) { last = r })
	require.NoError(t, a.setCongestion("reno"))
	pass(t, a, b, 100_000)
	delivered := func() bool { return a.Info().Unsent == 0 && a.status.unacked == 0 }
	require.Eventually(t, delivered, patience, time.Millisecond)
	began := h.now
	for s.runTick(); d.Status().Busy > 0; h.step(s, s.tickAt.Sub(h.now)) {
		require.NotEqual(t, cc.Never, s.tickAt)
		require.Less(t, h.now.Sub(began), 4*confirmAfter)
	}
	assert.GreaterOrEqual(t, h.now.Sub(began), confirmAfter)
	assert.Equal(t, cc.Bytes(100_000), last.Acked)
	assert.Zero(t, last.Pipe)
	assert.Zero(t, last.Unsent)
	h.step(s, Tick)
	assert.Equal(t, cc.Never, s.tickAt)
	assert.Empty(t, s.confirmList)
}

func TestAReaderThatStallsIsAskedForLessAndLessOften(t *testing.T) {
	h, d, s := enforcingByHand(t)
	a, _ := d.pair(t, loopback4)
	watched(a)
	a.beginWrite()
	mute(t, a) // else its bytes would arrive
	require.NoError(t, a.raw.Visit(func(fd int) error {
		_, err := unix.Write(fd, make([]byte, 1))
		return err
	}))
	a.noteTaken(1)
	asked, due := 0, cc.Time(0)
	for range 4000 {
		h.step(s, Tick)
		if a.nextPoll != due && h.now >= due {
			asked++
		}
		due = a.nextPoll
	}
	assert.LessOrEqual(t, asked, 8)
	assert.Equal(t, 1, d.Status().Busy)
	a.endWrite()
}

func TestWhatASocketDoesByItselfIsCounted(t *testing.T) {
	d := enforcing(t, 1)
	a, b := d.pair(t, loopback4)
	watched(a)
	for a.says(t).InFallback == 0 { // without a tick nobody answers it
		pass(t, a, b, 100_000)
	}
	assert.Zero(t, d.Status().Enforced.Fallbacks, "not known yet")
	a.pollSocket()
	assert.EqualValues(t, 1, d.Status().Enforced.Fallbacks)
	assert.EqualValues(t, 1, a.Info().Fallbacks)
	for a.says(t).InFallback == 1 {
		pass(t, a, b, 100_000)
		a.pollSocket()
	}
	assert.EqualValues(t, 1, d.Status().Enforced.Fallbacks)
	for d.Status().Enforced.Answers.Count() == 0 { // one counts that came while more was underway
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = a.Write(make([]byte, 1<<20))
		}()
		_, err := io.CopyN(pollingWriter{a}, b, 1<<20)
		require.NoError(t, err)
		<-done
		a.pollSocket()
	}
}

// TestABusyUserSpaceKeepsToTheRate has nobody tick, as if every tick came late, while
// the relay goes on writing.
func TestABusyUserSpaceKeepsToTheRate(t *testing.T) {
	d := enforcing(t, 1)
	a, b := d.pair(t, loopback4)
	const rate = 80_000_000 // loopback carries a thousand times as much
	a.manage(flow.Limit{Cwnd: cc.MaxCwnd, PacingRate: rate}, func(flow.Report) {})
	for a.says(t).InFallback == 0 {
		pass(t, a, b, 100_000)
	}
	before := a.says(t)
	pass(t, a, b, 2_000_000)
	after := a.says(t)
	require.EqualValues(t, 1, after.InFallback)
	allowed := cc.Rate(rate).BytesIn(time.Duration(after.At-before.At)) + 256<<10 // and what the kernel sends at once
	assert.LessOrEqual(t, cc.Bytes(after.Acked-before.Acked), allowed)
}

// pollingWriter has its leg polled for each piece.
type pollingWriter struct{ *Conn }

func (w pollingWriter) Write(p []byte) (int, error) {
	w.pollSocket()
	return len(p), nil
}

func TestAnAcknowledgementIsAnsweredOnce(t *testing.T) {
	d := enforcing(t, 1)
	a, b := d.pair(t, loopback4)
	watched(a)
	pass(t, a, b, 1)
	d.drain(t, a, 1)
	answers := d.Status().Enforced.Answers.Count()
	assert.NotZero(t, answers)
	a.pollSocket()
	assert.Equal(t, answers, d.Status().Enforced.Answers.Count(), "nothing has happened since")
}

func TestAWaitBetweenTheClocksDoesNotShiftTheKernels(t *testing.T) {
	const ahead, wait = time.Hour, time.Minute
	readings := 0
	clock := func() cc.Time {
		var ts unix.Timespec
		require.NoError(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
		now := cc.Time(ts.Nano()).Add(ahead)
		if readings++; readings == 1 {
			return now.Add(wait) // the thread had to wait before it came here
		}
		return now
	}
	offset, err := clockOffset(clock)
	require.NoError(t, err)
	assert.GreaterOrEqual(t, offset, ahead)
	assert.Less(t, offset, ahead+wait)
}
