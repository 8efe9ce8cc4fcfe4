//go:build linux

package kernel

import (
	"io"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

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
	assert.NotEqual(t, EBPF, d.RelayEnvelope())
	enforced, _ := d.pair(t, loopback4)
	late, peer := d.pair(t, loopback4)
	watched(enforced)
	reports := watched(late)

	info := enforced.Info()
	assert.Equal(t, EBPF, info.Envelope)
	assert.Equal(t, datapath.HoldRate|datapath.HoldWindow, info.Holds)
	assert.Empty(t, info.Missing)

	info = late.Info()
	assert.Equal(t, d.RelayEnvelope(), info.Envelope)
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
	a.countAccepted(1)
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

// reading is what a socket says when n segments were sent and the first acked of
// them are acknowledged; segments are full.
func reading(n, acked int, change func(*bpf.Seen)) bpf.Seen {
	s := bpf.Seen{
		At: 1, Mss: mss, SndWnd: wideWnd, Cwnd: 1, PacketsOut: uint32(n - acked),
		Acked: uint64(acked) * mss, Newest: uint64(acked) * mss, Sent: uint64(n) * mss, End: uint64(n) * mss,
	}
	if change != nil {
		change(&s)
	}
	return s
}

// enforcedFrom is a leg whose observation begins with that reading.
func enforcedFrom(first bpf.Seen) *cellReporter {
	h := &cellReporter{latest: first}
	h.startCountersAt(0)
	return h
}

// reportAt is the report under a window of ten segments of a socket that has accepted wrote bytes. Its latest reading
// happened at that time.
func (h *cellReporter) reportAt(wrote int64, happened, at cc.Time) flow.Report {
	return h.makeReport(wrote, false, happened, at, flow.Limit{Cwnd: 10 * mss}, prevWindow{})
}

func TestOneReadingOfACellBecomesAReport(t *testing.T) {
	const hole = 3
	for name, row := range map[string]struct {
		first bpf.Seen   // zero: a fresh socket
		limit flow.Limit // in force
		wider prevWindow // in force before, since the reading
		then  bpf.Seen
		age   time.Duration // of then
		wrote int64         // by now; 0: what then says
		fin   bool
		want  flow.Report
	}{
		"nothing written": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(0, 0, nil),
		},
		"ten segments sent, four acknowledged": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(10, 4, nil),
			want:  flow.Report{Written: 10_000, Acked: 4_000, Newest: 4_000, Pipe: 6_000},
		},
		"a full window keeps the rest unsent": {
			limit: flow.Limit{Cwnd: 6 * mss},
			then:  reading(10, 4, func(s *bpf.Seen) { s.End += 500 }),
			want:  flow.Report{Written: 10_500, Acked: 4_000, Newest: 4_000, Pipe: 6_000, Unsent: 500},
		},
		"what was written since leaves as far as the window goes": {
			limit: flow.Limit{Cwnd: 10*mss + 999},
			then:  reading(10, 4, nil),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 10_000, Unsent: 1_000},
		},
		"a window that has shrunk lets nothing out": {
			limit: flow.Limit{Cwnd: 3 * mss},
			then:  reading(10, 4, nil),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 6_000, Unsent: 5_000},
		},
		"what a wider window let out is out": {
			limit: flow.Limit{Cwnd: 3 * mss},
			wider: prevWindow{10 * mss, 15_000},
			then:  reading(10, 4, func(s *bpf.Seen) { s.Cwnd = 10 }),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 10_000, Unsent: 1_000},
		},
		"but nothing that was written afterwards": {
			limit: flow.Limit{Cwnd: 3 * mss},
			wider: prevWindow{10 * mss, 12_000},
			then:  reading(10, 4, func(s *bpf.Seen) { s.Cwnd = 10 }),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 8_000, Unsent: 3_000},
		},
		"of which as much leaves as the window in force lets out": {
			limit: flow.Limit{Cwnd: 7 * mss},
			wider: prevWindow{10 * mss, 10_500},
			then:  reading(10, 4, func(s *bpf.Seen) { s.Cwnd = 10 }),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 7_000, Unsent: 4_000},
		},
		"a window of less than a packet is one": {
			limit: flow.Limit{Cwnd: 1},
			then:  reading(10, 10, nil),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 10_000, Newest: 10_000, Pipe: 1_000, Unsent: 4_000},
		},
		"the receive window holds it back": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(10, 4, func(s *bpf.Seen) { s.SndWnd = 7_000 }),
			wrote: 15_000,
			want: flow.Report{
				Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 7_000, Unsent: 4_000,
				RwndFull: true,
			},
		},
		"a closed receive window": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(10, 10, func(s *bpf.Seen) { s.SndWnd = 0 }),
			wrote: 12_000,
			want:  flow.Report{Written: 12_000, Acked: 10_000, Newest: 10_000, Unsent: 2_000, RwndFull: true},
		},
		"a receive window of which nothing is wanted": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(10, 10, func(s *bpf.Seen) { s.SndWnd = 0 }),
			want:  flow.Report{Written: 10_000, Acked: 10_000, Newest: 10_000},
		},
		"pacing lets out what the time since allows, and a burst": {
			limit: flow.Limit{Cwnd: 10 * mss, PacingRate: 8_000_000},
			then:  reading(10, 4, nil),
			age:   time.Millisecond,
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 9_000, Unsent: 2_000},
		},
		"pacing lets out no more than the window": {
			limit: flow.Limit{Cwnd: 10 * mss, PacingRate: 8_000_000},
			then:  reading(10, 4, nil),
			age:   time.Hour,
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 10_000, Unsent: 1_000},
		},
		"a socket in fallback has a window of its own": {
			limit: flow.Limit{Cwnd: 100 * mss, PacingRate: 8},
			then:  reading(10, 4, func(s *bpf.Seen) { s.InFallback, s.Cwnd = 1, 8 }),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 8_000, Unsent: 3_000},
		},
		"so has one to which no limit was applied yet": {
			then:  reading(10, 4, func(s *bpf.Seen) { s.Cwnd = 8 }),
			wrote: 15_000,
			want:  flow.Report{Written: 15_000, Acked: 4_000, Newest: 4_000, Pipe: 8_000, Unsent: 3_000},
		},
		"a hole with three acknowledged behind it": {
			limit: flow.Limit{Cwnd: 2 * mss},
			then:  reading(10, 4, func(s *bpf.Seen) { s.SackedOut, s.LostOut, s.Newest, s.Lost = hole, 1, 8_000, 1 }),
			want:  flow.Report{Written: 10_000, Acked: 7_000, Sacked: 3_000, Newest: 8_000, Pipe: 2_000, Lost: 1_000},
		},
		"the hole is repaired but not acknowledged yet": {
			limit: flow.Limit{Cwnd: 2 * mss},
			then: reading(10, 4, func(s *bpf.Seen) {
				s.SackedOut, s.LostOut, s.RetransOut, s.Newest, s.Lost = hole, 1, 1, 8_000, 1
			}),
			want: flow.Report{Written: 10_000, Acked: 7_000, Sacked: 3_000, Newest: 8_000, Pipe: 3_000, Lost: 1_000},
		},
		"small packets behind a hole are not taken for the full ones that follow": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then: bpf.Seen{
				At: 1, Mss: mss, SndWnd: wideWnd, Cwnd: 10, PacketsOut: 3, SackedOut: 2, Newest: 30, Sent: 30, End: 30,
			},
			wrote: 10_030,
			want:  flow.Report{Written: 10_030, Acked: 20, Sacked: 20, Newest: 30, Pipe: 10_000, Unsent: 10},
		},
		"two timeouts, a packet given up in each": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(4, 2, func(s *bpf.Seen) { s.LostOut, s.Lost, s.Timeouts = 2, 2, 2 }),
			want:  flow.Report{Written: 4_000, Acked: 2_000, Newest: 2_000, Lost: 2_000, Timeouts: 2},
		},
		"marks are no more than what arrived": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then: bpf.Seen{
				At: 1, Mss: mss, SndWnd: wideWnd, Acked: 30, Newest: 30, Sent: 30, End: 30, Marked: 3,
			},
			want: flow.Report{Written: 30, Acked: 30, Newest: 30, Marked: 30},
		},
		"a FIN is no byte": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(10, 4, func(s *bpf.Seen) { s.Sent++; s.End++; s.PacketsOut++ }),
			wrote: 10_000,
			fin:   true,
			want:  flow.Report{Written: 10_000, Acked: 4_000, Newest: 4_000, Pipe: 6_000},
		},
		"nor is one that waits": {
			limit: flow.Limit{Cwnd: 6 * mss},
			then:  reading(10, 4, func(s *bpf.Seen) { s.End += 501 }),
			wrote: 10_500,
			fin:   true,
			want:  flow.Report{Written: 10_500, Acked: 4_000, Newest: 4_000, Pipe: 6_000, Unsent: 500},
		},
		"nor one that is acknowledged": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(10, 10, func(s *bpf.Seen) { s.Sent++; s.End++; s.Acked++; s.Newest++ }),
			wrote: 10_000,
			fin:   true,
			want:  flow.Report{Written: 10_000, Acked: 10_000, Newest: 10_000},
		},
		"what was there before is not counted, though it is underway": {
			first: reading(5, 3, nil),
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(5, 3, nil),
			want:  flow.Report{Pipe: 2_000},
		},
		"counting begins where observation did": {
			first: reading(5, 3, nil),
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(8, 7, nil),
			want:  flow.Report{Written: 3_000, Acked: 2_000, Newest: 2_000, Pipe: 1_000},
		},
		"offsets past 4 GiB": {
			first: reading(9_000_000, 8_999_999, nil),
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(18_000_000, 17_999_990, nil),
			want:  flow.Report{Written: 9_000_000_000, Acked: 8_999_990_000, Newest: 8_999_990_000, Pipe: 10_000},
		},
		"counters that have wrapped": {
			first: reading(0, 0, func(s *bpf.Seen) {
				s.Lost, s.Marked, s.Timeouts = math.MaxUint32, math.MaxUint32-1, math.MaxUint32
			}),
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(9, 9, func(s *bpf.Seen) { s.Lost, s.Marked, s.Timeouts = 2, 1, 0 }),
			want:  flow.Report{Written: 9_000, Acked: 9_000, Newest: 9_000, Lost: 3_000, Marked: 3_000, Timeouts: 1},
		},
		"a new round trip": {
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(1, 1, func(s *bpf.Seen) { s.RttUs, s.Samples = 20_500, 1 }),
			want:  flow.Report{Written: 1_000, Acked: 1_000, Newest: 1_000, RTT: 20_500 * time.Microsecond},
		},
		"a round trip that was reported before": {
			first: reading(1, 1, func(s *bpf.Seen) { s.RttUs, s.Samples = 20_500, math.MaxUint32 }),
			limit: flow.Limit{Cwnd: 10 * mss},
			then:  reading(2, 2, func(s *bpf.Seen) { s.RttUs, s.Samples = 20_500, math.MaxUint32 }),
			want:  flow.Report{Written: 1_000, Acked: 1_000, Newest: 1_000},
		},
	} {
		t.Run(name, func(t *testing.T) {
			first := row.first
			if first.Mss == 0 {
				first = reading(0, 0, nil)
			}
			h := enforcedFrom(first)
			r := h.makeReport(0, false, now-1, now-1, row.limit, prevWindow{})
			require.Zero(t, r.Written, "counters start at zero")
			require.Zero(t, r.Acked, "counters start at zero")
			h.latest = row.then
			if h.latest.At == first.At {
				h.latest.At++
			}
			r = h.makeReport(row.wrote, row.fin, now, now.Add(row.age), row.limit, row.wider)
			row.want.At, row.want.MSS = now, mss
			assert.Equal(t, row.want, r)
		})
	}
}

func TestAReportIsOfWhenItsReadingWas(t *testing.T) {
	h := enforcedFrom(reading(0, 0, nil))
	h.latest = reading(1, 0, func(s *bpf.Seen) { s.At = 2 })
	assert.Equal(t, now, h.reportAt(0, now, now+5).At)
	assert.Equal(t, now+7, h.reportAt(0, now, now+7).At, "nothing happened since: it is of now")
	h.latest.At = 3
	assert.Equal(t, now+7, h.reportAt(0, now+6, now+8).At, "never back")
	h.latest.At = 4
	assert.Equal(t, now+9, h.reportAt(0, now+11, now+9).At, "never ahead")
}

func TestObservationBeginsWithWhatIsWrittenNext(t *testing.T) {
	h := enforcedFrom(reading(5, 3, nil))
	h.startCountersAt(4_000) // written since, of which nothing came back
	r := h.reportAt(4_000, now, now)
	assert.Zero(t, r.Written)
	assert.Equal(t, cc.Bytes(6_000), r.Pipe)
	h.latest = reading(10, 9, func(s *bpf.Seen) { s.At = 2 })
	r = h.reportAt(5_000, now+1, now+1)
	assert.Equal(t, cc.Bytes(1_000), r.Written)
	assert.Zero(t, r.Acked)
}

func TestWhatIsConfirmedHasArrivedWhateverTheCellSays(t *testing.T) {
	h := enforcedFrom(reading(0, 0, nil))
	h.latest = reading(10, 6, func(s *bpf.Seen) { s.At, s.LostOut, s.SackedOut = 2, 1, 1 })
	assert.Equal(t, cc.Bytes(7_000), h.reportAt(10_000, now, now).Acked)
	h.confirmArrival(10_000)
	r := h.reportAt(10_000, now, now+1)
	assert.Equal(t, flow.Report{
		At: now + 1, MSS: mss, Written: 10_000, Acked: 10_000, Newest: 10_000,
	}, r)
	r = h.reportAt(12_000, now, now+2)
	assert.Equal(t, cc.Bytes(2_000), r.Pipe, "what is written next is in flight")
	assert.Equal(t, cc.Bytes(10_000), r.Acked)
	h.latest = reading(12, 11, func(s *bpf.Seen) { s.At = 3 })
	r = h.reportAt(12_000, now+3, now+3)
	assert.Equal(t, cc.Bytes(11_000), r.Acked, "a newer reading counts")
	assert.Equal(t, cc.Bytes(1_000), r.Pipe)
	h.startCountersAt(12_000)
	h.confirmArrival(12_500)
	assert.Equal(t, cc.Bytes(500), h.reportAt(12_500, now+4, now+4).Acked)
}

func TestARoundTripIsReportedOnce(t *testing.T) {
	h := enforcedFrom(reading(0, 0, nil))
	h.latest = reading(2, 2, func(s *bpf.Seen) { s.RttUs, s.Samples, s.At = 1_000, 2, 2 })
	assert.Equal(t, time.Millisecond, h.reportAt(0, now, now).RTT)
	assert.Zero(t, h.reportAt(0, now, now+1).RTT)
	h.latest.At, h.latest.Acks = 3, 9 // an acknowledgement without a sample
	assert.Zero(t, h.reportAt(0, now+2, now+2).RTT)
	h.latest.At, h.latest.Samples = 4, 3 // as long as the last
	assert.Equal(t, time.Millisecond, h.reportAt(0, now+3, now+3).RTT)
}

func TestThePeersClockIsReportedAsOfItsAcknowledgement(t *testing.T) {
	h := enforcedFrom(reading(4, 0, nil))
	peer := func(age time.Duration, change func(*bpf.Seen)) flow.PeerClock {
		change(&h.latest)
		h.latest.At++
		return h.makeReport(0, false, now, now.Add(age), flow.Limit{}, prevWindow{}).Peer
	}
	assert.Zero(t, peer(0, func(s *bpf.Seen) { s.Acks++ }), "there are no timestamps")
	first := flow.PeerClock{At: now, Value: 7}
	assert.Equal(t, first, peer(5, func(s *bpf.Seen) { s.Acks, s.Tsval = 2, 7 }), "and not as of the report")
	now := now + 9
	assert.Equal(t, first, h.reportAt(0, now, now).Peer, "nothing has come")
	h.latest.Tsval, h.latest.Acks, h.latest.Timeouts, h.latest.At = 8, 3, 1, 99
	assert.Equal(t, first, h.reportAt(0, now, now).Peer,
		"the time may be that of the timeout")
	h.latest.Acks, h.latest.At = 4, 100
	r := h.reportAt(0, now+1, now+1)
	assert.Equal(t, flow.PeerClock{At: now + 1, Value: 8}, r.Peer)
}

// enforcedSender is a model of the kernel's send side under a window of ours:
// segments in order, each on the wire, selectively acknowledged, or lost.
type enforcedSender struct {
	seen     bpf.Seen // as of the last event
	segments []segment
	limit    int // window in packets
	stream   int64
	sent     int64
	una      int64
	newest   int64
}

func (s *enforcedSender) counts() (out, sacked, lost, retrans uint32) {
	for _, seg := range s.segments {
		switch {
		case seg.sacked:
			sacked++
		case seg.lost:
			lost++
			if seg.retransmitted {
				retrans++
			}
		}
	}
	return uint32(len(s.segments)), sacked, lost, retrans
}

// send sends what there is, in segments of that size, as far as the window goes.
func (s *enforcedSender) send(size int64) {
	for s.sent < s.stream {
		out, sacked, lost, retrans := s.counts()
		if int(out)-int(sacked)-int(lost)+int(retrans) >= s.limit {
			return
		}
		n := min(size, s.stream-s.sent)
		s.sent += n
		s.segments = append(s.segments, segment{size: n})
	}
}

// says is what the socket does at an event.
func (s *enforcedSender) says() {
	i := &s.seen
	i.At++
	i.Cwnd = uint32(s.limit)
	i.PacketsOut, i.SackedOut, i.LostOut, i.RetransOut = s.counts()
	i.Acked, i.Newest, i.Sent, i.End = uint64(s.una), uint64(s.newest), uint64(s.sent), uint64(s.stream)
}

// TestReportsOfAnyEnforcedLegAddUp drives the model at random and looks at it now and
// then. Whatever happens, and whatever is not looked at, reports are exact where
// the socket is, and never contradict each other.
func TestReportsOfAnyEnforcedLegAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.SampledFrom([]uint32{0, math.MaxUint32 - 3}).Draw(t, "counters start at")
		s := &enforcedSender{
			seen: bpf.Seen{
				Mss: mss, SndWnd: wideWnd, Cwnd: 10, Lost: start, Timeouts: start, Marked: start,
				Samples: start,
			},
			limit: 10,
		}
		s.says()
		h := enforcedFrom(s.seen)
		at := now
		var l limits
		l.beginEnforcing(nil, 0)
		clock := func() cc.Time { return at }
		var taken atomic.Int64
		l.applyLimit(flow.Limit{Cwnd: 10 * mss}, clock, &taken)
		happened := at // when the newest reading was
		says := func() {
			at++
			happened = at
			s.says()
		}
		report := func() flow.Report {
			limit, wider := l.limitSince(happened)
			return h.makeReport(s.stream, false, happened, at, limit, wider)
		}
		before := report()
		look := func() {
			at++
			h.latest = s.seen
			r := report()
			require.GreaterOrEqual(t, r.At, before.At)
			require.Equal(t, cc.Bytes(s.stream), r.Written)
			require.GreaterOrEqual(t, r.Unsent, cc.Bytes(0))
			require.GreaterOrEqual(t, r.Written-r.Unsent, r.Acked)
			require.GreaterOrEqual(t, r.Written-r.Unsent, cc.Bytes(s.sent), "no less than what has left")
			require.GreaterOrEqual(t, r.Acked, cc.Bytes(s.una))
			require.LessOrEqual(t, r.Acked, cc.Bytes(s.seen.Sent), "no more than what had left")
			require.GreaterOrEqual(t, r.Acked, before.Acked)
			require.GreaterOrEqual(t, r.Newest, r.Acked)
			require.GreaterOrEqual(t, r.Newest, before.Newest)
			require.LessOrEqual(t, r.Newest, cc.Bytes(s.seen.Sent))
			require.LessOrEqual(t, r.Sacked, r.Acked)
			require.GreaterOrEqual(t, r.Pipe, cc.Bytes(0))
			require.Equal(t, cc.Bytes(s.seen.Lost-start)*mss, r.Lost)
			require.Equal(t, int(s.seen.Timeouts-start), r.Timeouts)
			require.GreaterOrEqual(t, r.Marked, before.Marked)
			require.LessOrEqual(t, r.Marked, r.Acked)
			before = r
		}
		pick := func() int { return rapid.IntRange(0, len(s.segments)-1).Draw(t, "segment") }
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch op := rapid.IntRange(0, 6).Draw(t, "operation"); {
			case op == 0:
				s.stream += rapid.Int64Range(1, 20*mss).Draw(t, "write")
				taken.Store(s.stream)
				s.send(rapid.Int64Range(1, mss).Draw(t, "size"))
			case op == 1: // a new limit takes effect at once
				at++
				s.limit = rapid.IntRange(1, 30).Draw(t, "window")
				l.applyLimit(flow.Limit{Cwnd: cc.Bytes(s.limit) * mss}, clock, &taken)
				s.send(mss)
			case len(s.segments) == 0:
			case op == 2: // an acknowledgement, after which more may leave
				for range pick() + 1 {
					s.una += s.segments[0].size
					s.segments = s.segments[1:]
				}
				s.newest = max(s.newest, s.una)
				s.seen.Samples++
				s.seen.Marked += uint32(rapid.IntRange(0, 1).Draw(t, "marked"))
				says()
				s.send(rapid.Int64Range(1, mss).Draw(t, "size"))
			case op == 3:
				i := pick()
				s.segments[i].sacked = true
				end := s.una
				for _, seg := range s.segments[:i+1] {
					end += seg.size
				}
				s.newest = max(s.newest, end)
				says()
				s.send(mss)
			case op == 4:
				if seg := &s.segments[pick()]; !seg.sacked && !seg.lost {
					seg.lost = true
					s.seen.Lost++
				}
				says()
				s.send(mss)
			case op == 5:
				seg := &s.segments[pick()]
				seg.retransmitted = seg.retransmitted || seg.lost
			case op == 6:
				s.seen.Timeouts++
				says()
			}
			if rapid.Bool().Draw(t, "look") {
				look()
			}
		}
		for len(s.segments) > 0 || s.sent < s.stream {
			s.una, s.newest, s.segments = s.sent, s.sent, nil
			says()
			s.send(mss)
		}
		look()
		require.Equal(t, before.Written, before.Acked)
		require.Zero(t, before.Unsent)
		require.Zero(t, before.Pipe)
		require.Zero(t, before.Sacked)
	})
}
