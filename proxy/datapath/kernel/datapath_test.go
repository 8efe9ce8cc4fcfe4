//go:build linux

package kernel

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// still returns a datapath whose ticks the test makes; without a choice of
// envelope it is one that holds no window.
func still(tb testing.TB, cfg Config) *Datapath {
	tb.Helper()
	if cfg.Envelope == "" {
		cfg.Envelope = "cubic"
	}
	if cfg.Clock == nil {
		cfg.Clock = clock()
	}
	d, err := prepared(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		require.NoError(tb, d.timer.close())
		if d.holder != nil {
			require.NoError(tb, d.holder.control.Close())
		}
	})
	return d
}

// next waits for the timer and makes the tick.
func (d *Datapath) next(tb testing.TB) {
	tb.Helper()
	n, err := d.timer.wait()
	require.NoError(tb, err)
	d.pass(n)
	d.tick()
}

// remaining is what the timerfd itself says.
func (d *Datapath) remaining(tb testing.TB) (first, period time.Duration) {
	tb.Helper()
	var spec unix.ItimerSpec
	require.NoError(tb, unix.TimerfdGettime(d.timer.fd, &spec))
	return time.Duration(spec.Value.Nano()), time.Duration(spec.Interval.Nano())
}

// watched counts the reports of a leg.
func watched(c *Conn) (reports *int) {
	reports = new(int)
	c.Observe(func(flow.Report) flow.Limit {
		*reports++
		return flow.Limit{Cwnd: cc.MaxCwnd}
	}, datapath.HoldAll)
	return reports
}

func TestTheTickRunsWhileBytesAreUnderway(t *testing.T) {
	d := still(t, Config{})
	a, b := d.pair(t, loopback4)
	first, _ := d.remaining(t)
	require.Zero(t, first, "nothing to do: the timer is off")

	_, err := a.Write([]byte("not observed"))
	require.NoError(t, err)
	assert.Equal(t, disarmed, d.mode, "nobody asks what became of it")

	watched(a)
	_, err = a.Write([]byte("observed"))
	require.NoError(t, err)
	assert.Equal(t, ticking, d.mode)
	first, period := d.remaining(t)
	assert.LessOrEqual(t, first, Tick)
	assert.Equal(t, Tick, period)

	_, err = io.ReadFull(b, make([]byte, len("not observedobserved")))
	require.NoError(t, err)
	for d.mode == ticking {
		d.next(t)
	}
	first, period = d.remaining(t)
	assert.Zero(t, first, "drained: the timer is off again")
	assert.Zero(t, period)
	assert.Empty(t, d.active)

	_, err = a.Write([]byte("again"))
	require.NoError(t, err)
	assert.Equal(t, ticking, d.mode)
}

func TestTheHookIsCalledWhenItWants(t *testing.T) {
	var calls int
	var want cc.Time
	const now = cc.Time(time.Hour) // stands still, however long the machine keeps us waiting
	d := still(t, Config{Clock: func() cc.Time { return now }, OnTick: func(cc.Time) cc.Time {
		calls++
		return want
	}})
	d.Wake()
	require.Equal(t, ticking, d.mode)

	want = now.Add(time.Hour)
	d.next(t)
	assert.Equal(t, 1, calls)
	assert.Equal(t, sleeping, d.mode)
	first, period := d.remaining(t)
	assert.Greater(t, first, 59*time.Minute)
	assert.Zero(t, period, "one call was asked for")

	d.Wake()
	assert.Equal(t, ticking, d.mode, "an earlier call replaces the later one")
	want = now // due already
	d.next(t)
	assert.Equal(t, ticking, d.mode)
	want = now.Add(5 * Tick)
	wall := clock()
	since := wall()
	d.next(t)
	assert.Equal(t, sleeping, d.mode)
	want = cc.Never
	d.next(t)
	assert.Equal(t, 4, calls)
	assert.GreaterOrEqual(t, wall().Sub(since), 5*Tick, "never early")
	assert.Equal(t, disarmed, d.mode)
}

func TestAWakeDuringTheHookIsNotLost(t *testing.T) {
	var d *Datapath
	calls := 0
	d = still(t, Config{OnTick: func(cc.Time) cc.Time {
		if calls++; calls == 1 {
			d.Wake()
		}
		return cc.Never
	}})
	d.Wake()
	d.next(t)
	require.Equal(t, ticking, d.mode)
	d.next(t)
	assert.Equal(t, 2, calls)
	assert.Equal(t, disarmed, d.mode)
}

func TestABudgetIsSharedInTurns(t *testing.T) {
	d := still(t, Config{PollsPerTick: 2})
	var reports []*int
	for range 5 {
		a, _ := d.pair(t, loopback4)
		reports = append(reports, watched(a))
		a.begin() // a write that does not end keeps it busy
	}
	for range 5 {
		d.ticks++
		d.tick()
	}
	for _, n := range reports {
		assert.Equal(t, 1+2, *n, "one at Observe, then 5 ticks with 2 polls shared by 5")
	}
	assert.Equal(t, Status{Busy: 5, Interval: 3 * Tick}, d.Status())
}

func TestASilentConnIsLeftAloneForAWhile(t *testing.T) {
	d := still(t, Config{})
	a, _ := d.pair(t, loopback4)
	reports := watched(a)
	a.begin()
	d.ticks++
	d.tick()
	c := d.active[0]
	c.quiet, c.due = 640, d.ticks+pause(640)
	for range 9 {
		d.ticks++
		d.tick()
	}
	assert.Equal(t, 2, *reports)
	d.ticks++
	d.tick()
	assert.Equal(t, 3, *reports)

	c.quiet, c.due = 640, d.ticks+pause(640)
	a.writes.Add(1) // what end does
	d.ticks++
	d.tick()
	assert.Equal(t, 4, *reports, "a write ends the pause")
	assert.Zero(t, c.quiet)
}

func TestAWriteBetweenPollAndLeaveKeepsTheConn(t *testing.T) {
	d := still(t, Config{})
	a, _ := d.pair(t, loopback4)
	watched(a)
	a.active.Store(true)
	a.seen = a.writes.Load()

	a.writes.Add(1)
	assert.False(t, a.leave(), "a write came after the poll began")
	a.seen = a.writes.Load()
	a.writing.Add(1)
	assert.False(t, a.leave(), "a write is underway")
	a.writing.Add(-1)
	assert.True(t, a.leave())
	assert.False(t, a.active.Load())
}

func TestClosedConnsLeaveTheTick(t *testing.T) {
	d := still(t, Config{})
	a, b := d.pair(t, loopback4)
	for _, c := range []*Conn{a, b} {
		watched(c)
		c.begin()
	}
	d.ticks++
	d.tick()
	require.Len(t, d.active, 2)
	require.NoError(t, a.Close())
	require.NoError(t, b.Reset())
	d.ticks++
	d.tick()
	assert.Empty(t, d.active)
	assert.Zero(t, d.Status().Busy)
}

func TestCloseWaitsForTheTickAndLeavesTheLegsOpen(t *testing.T) {
	d, err := New(Config{Clock: clock()})
	require.NoError(t, err)
	a, b := d.pair(t, loopback4)
	reports := watched(a)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close(), "twice")
	goleak.VerifyNone(t)
	d.Wake()
	before := *reports
	_, err = a.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(b, make([]byte, 1))
	require.NoError(t, err)
	assert.Equal(t, before, *reports)
}

func TestAClockIsRequired(t *testing.T) {
	_, err := New(Config{})
	assert.EqualError(t, err, "kernel: Config.Clock is required")
}

func TestLimitsReachTheSocket(t *testing.T) {
	d := still(t, Config{})
	a, _ := d.pair(t, loopback4)
	limit := flow.Limit{Cwnd: 400_000}
	a.Observe(func(flow.Report) flow.Limit { return limit }, datapath.HoldAll)

	rate := func() (value uint64) {
		require.NoError(t, control(a.raw, func(fd int) (err error) {
			value, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
			return err
		}))
		return value
	}
	unsent := func() int { return a.option(t, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT) }
	assert.EqualValues(t, uint64(unlimited), rate(), "never limited")
	assert.Equal(t, 200_000, unsent(), "half a window may wait")

	limit = flow.Limit{Cwnd: 20_000, PacingRate: 100_000_000_000}
	a.poll()
	assert.EqualValues(t, 12_500_000_000, rate(), "more than 32 bits")
	assert.Equal(t, leastUnsent, unsent())
	limit.PacingRate -= 1_000_000_000
	a.poll()
	assert.EqualValues(t, 12_500_000_000, rate(), "one percent is not worth a system call")
	limit.PacingRate = 0
	a.poll()
	assert.EqualValues(t, uint64(unlimited), rate(), "lifted")
	assert.Zero(t, a.Info().SignalErrors)
}

func TestAPollAllocatesNothing(t *testing.T) {
	d := still(t, Config{})
	a, _ := d.pair(t, loopback4)
	limit := flow.Limit{Cwnd: 1 << 20}
	a.Observe(func(flow.Report) flow.Limit {
		limit.PacingRate = 1_000_000_000 - limit.PacingRate // a system call each time
		return limit
	}, datapath.HoldAll)
	assert.Zero(t, testing.AllocsPerRun(100, func() { a.poll() }))
}

func BenchmarkPoll(b *testing.B) {
	d := still(b, Config{})
	a, _ := d.pair(b, loopback4)
	a.Observe(func(flow.Report) flow.Limit { return flow.Limit{Cwnd: 1 << 20} }, datapath.HoldAll)
	b.ReportAllocs()
	for b.Loop() {
		a.poll()
	}
}

// BenchmarkTick is a second of ticking with one busy leg, told as CPU time.
func BenchmarkTick(b *testing.B) {
	ticks := make(chan struct{})
	n := 0
	d := start(b, Config{OnTick: func(cc.Time) cc.Time {
		if n++; n == b.N {
			close(ticks)
		}
		return cc.Never
	}})
	a, _ := d.pair(b, loopback4)
	watched(a)
	before := cpu(b)
	a.begin()
	<-ticks
	b.ReportMetric((cpu(b)-before).Seconds()*1e6/float64(b.N), "cpu-µs/tick")
	a.end()
}

func TestAConnectionTornDownHasNothingUnderway(t *testing.T) {
	d := still(t, Config{})
	a, b := d.pair(t, loopback4)
	var last flow.Report
	a.Observe(func(r flow.Report) flow.Limit {
		last = r
		return flow.Limit{Cwnd: cc.MaxCwnd}
	}, datapath.HoldAll)
	written := make(chan error, 1)
	go func() {
		_, err := a.Write(make([]byte, 64<<20)) // more than the buffers hold
		written <- err
	}()
	for last.Unsent == 0 {
		d.next(t)
	}
	require.NoError(t, b.Reset())
	require.Error(t, <-written)
	d.next(t)
	assert.Zero(t, last.Unsent)
	assert.Zero(t, last.Pipe)
}

func TestALegWithoutAWaitingSenderIsPolledLessOften(t *testing.T) {
	d := still(t, Config{})
	a, b := d.pair(t, loopback4)
	waiting := false
	reports := 0
	a.Observe(func(flow.Report) flow.Limit {
		reports++
		return flow.Limit{Cwnd: cc.MaxCwnd, Waiting: waiting}
	}, datapath.HoldAll)
	chunk := make([]byte, easyBytes)
	move := func() {
		_, err := a.Write(chunk)
		require.NoError(t, err)
		_, err = io.ReadFull(b, chunk)
		require.NoError(t, err)
	}
	for i := range easyPolls {
		move()
		d.next(t)
		if i%3 == 0 {
			d.next(t) // a source that writes a little less often than the tick comes
		}
	}
	_, period := d.remaining(t)
	require.Equal(t, easyPause*Tick, period)
	before := reports
	move()
	d.next(t)
	assert.Equal(t, before+1, reports, "one firing of the slow timer, one report")

	waiting = true
	move()
	d.next(t)
	_, period = d.remaining(t)
	assert.Equal(t, Tick, period, "as soon as somebody waits every tick counts")
}
