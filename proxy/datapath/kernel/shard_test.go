//go:build linux

package kernel

import (
	"io"
	"log/slog"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/logqueue"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// still returns a datapath of one shard whose ticks the test makes; without a choice of
// envelope it is one that enforces no window.
func still(tb testing.TB, cfg Config) *Datapath {
	tb.Helper()
	if cfg.Envelope == "" {
		cfg.Envelope = "cubic"
	}
	if cfg.Clock == nil {
		cfg.Clock = clock()
	}
	cfg.Shards = max(1, cfg.Shards)
	d, err := newDatapath(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, d.releaseAll()) })
	return d
}

// hands is a clock that only the test moves.
type hands struct{ now cc.Time }

func (h *hands) clock() cc.Time { return h.now }

// step lets a time pass and has the tick come.
func (h *hands) step(s *shard, d time.Duration) {
	h.now = h.now.Add(d)
	s.runTick()
}

// next waits for the timer and makes the tick.
func (s *shard) next(tb testing.TB) {
	tb.Helper()
	require.NoError(tb, s.timer.waitUntilFired())
	s.runTick()
}

// remaining is what the timerfd itself says; 0: it is off.
func (s *shard) remaining(tb testing.TB) time.Duration {
	tb.Helper()
	var spec unix.ItimerSpec
	require.NoError(tb, unix.TimerfdGettime(s.timer.fd, &spec))
	assert.Zero(tb, spec.Interval.Nano())
	return time.Duration(spec.Value.Nano())
}

// manage has a leg keep to a limit.
func (c *Conn) manage(limit flow.Limit, report func(flow.Report)) {
	c.Enforce(datapath.HoldAll, 0)
	c.Apply(limit)
	c.Observe(report)
}

// watched counts the reports of a leg.
func watched(c *Conn) (reports *int) {
	reports = new(int)
	c.manage(flow.Limit{Cwnd: cc.MaxCwnd}, func(flow.Report) { *reports++ })
	return reports
}

func TestTheTickRunsWhileBytesAreUnderway(t *testing.T) {
	d := still(t, Config{})
	s := d.shards[0]
	a, b := d.pair(t, loopback4)
	require.Zero(t, s.remaining(t), "nothing to do: the timer is off")

	_, err := a.Write([]byte("not observed"))
	require.NoError(t, err)
	assert.Zero(t, s.remaining(t), "nobody asks what became of it")

	watched(a)
	_, err = a.Write([]byte("observed"))
	require.NoError(t, err)
	assert.NotEqual(t, cc.Never, s.tickAt)
	assert.LessOrEqual(t, s.remaining(t), Tick)

	_, err = io.ReadFull(b, make([]byte, len("not observedobserved")))
	require.NoError(t, err)
	for s.tickAt != cc.Never {
		s.next(t)
	}
	assert.Zero(t, s.remaining(t), "drained: the timer is off again")
	assert.Empty(t, s.pollList)

	_, err = a.Write([]byte("again"))
	require.NoError(t, err)
	assert.NotEqual(t, cc.Never, s.tickAt)
}

func TestTheHookIsCalledWhenItWants(t *testing.T) {
	var calls int
	var want cc.Time
	h := hands{cc.Time(time.Hour)} // stands still, however long the machine keeps us waiting
	d := still(t, Config{Clock: h.clock, OnTick: func(shard int, _ cc.Time) cc.Time {
		assert.Zero(t, shard)
		calls++
		return want
	}})
	s := d.shards[0]
	d.Wake(0)
	require.Equal(t, h.now.Add(Tick), s.tickAt)

	want = h.now.Add(time.Hour)
	s.next(t)
	assert.Equal(t, 1, calls)
	assert.Equal(t, want, s.tickAt)
	assert.Greater(t, s.remaining(t), 59*time.Minute)

	d.Wake(0)
	assert.Equal(t, h.now.Add(Tick), s.tickAt, "an earlier call replaces the later one")
	want = h.now // due already
	s.next(t)
	assert.Equal(t, h.now.Add(Tick), s.tickAt)
	want = h.now.Add(5 * Tick)
	wall := clock()
	since := wall()
	s.next(t)
	assert.Equal(t, want, s.tickAt)
	want = cc.Never
	s.next(t)
	assert.Equal(t, 4, calls)
	assert.GreaterOrEqual(t, wall().Sub(since), 5*Tick, "never early")
	assert.Equal(t, cc.Never, s.tickAt)
	assert.Zero(t, s.remaining(t))
}

func TestAWakeDuringTheHookIsNotLost(t *testing.T) {
	var d *Datapath
	calls := 0
	d = still(t, Config{OnTick: func(int, cc.Time) cc.Time {
		if calls++; calls == 1 {
			d.Wake(0)
		}
		return cc.Never
	}})
	s := d.shards[0]
	d.Wake(0)
	s.next(t)
	require.NotEqual(t, cc.Never, s.tickAt)
	s.next(t)
	assert.Equal(t, 2, calls)
	assert.Equal(t, cc.Never, s.tickAt)
}

func TestEachShardHasATickOfItsOwn(t *testing.T) {
	var calls [3]int
	d := still(t, Config{Shards: 3, OnTick: func(shard int, _ cc.Time) cc.Time {
		calls[shard]++
		return cc.Never
	}})
	require.Equal(t, 3, d.Shards())
	d.Wake(2)
	d.shards[2].next(t)
	assert.Equal(t, [3]int{0, 0, 1}, calls)
	for i, s := range d.shards {
		a, _ := d.pair(t, loopback4) // only one end of which is managed
		a.Enforce(datapath.HoldAll, i)
		a.Observe(func(flow.Report) {})
		require.Same(t, s, a.shard)
		a.beginWrite()
		require.NotEqual(t, cc.Never, s.tickAt)
		s.next(t)
		assert.Equal(t, []*sender{&a.sender}, s.pollList)
	}
	assert.Equal(t, Status{Busy: 3, Interval: Tick}, d.Status())
}

func TestABudgetIsSharedInTurns(t *testing.T) {
	h := hands{cc.Time(time.Hour)}
	d := still(t, Config{Clock: h.clock})
	d.pollBudget = 2
	var reports []*int
	for range 5 {
		a, _ := d.pair(t, loopback4)
		reports = append(reports, watched(a))
		a.beginWrite() // a write that does not end keeps it busy
	}
	for range 5 {
		h.step(d.shards[0], Tick)
	}
	for _, n := range reports {
		assert.Equal(t, 1+2, *n, "one at Observe, then 5 ticks with 2 polls shared by 5")
	}
	assert.Equal(t, Status{Busy: 5, Interval: 3 * Tick}, d.Status())
}

func TestASilentLegIsPolledLessOften(t *testing.T) {
	h := hands{cc.Time(time.Hour)}
	d := still(t, Config{Clock: h.clock})
	s := d.shards[0]
	a, _ := d.pair(t, loopback4)
	reports := watched(a)
	a.beginWrite()
	h.step(s, Tick)
	assert.Equal(t, h.now.Add(Tick), s.tickAt)
	for silence := Tick; silence < 5*time.Second; {
		before, pause := *reports, s.tickAt.Sub(h.now)
		assert.LessOrEqual(t, pause, max(Tick, silence/64))
		assert.LessOrEqual(t, pause, maxPause)
		silence += pause
		h.step(s, pause)
		assert.Equal(t, before+1, *reports)
	}
	assert.Less(t, *reports, 450)
	assert.Equal(t, h.now.Add(maxPause), s.tickAt)

	a.countAccepted(1) // a piece of the write
	assert.Equal(t, h.now.Add(Tick), s.tickAt, "ends the pause")
	before := *reports
	h.step(s, Tick)
	assert.Equal(t, before+1, *reports)
	assert.Equal(t, h.now.Add(Tick), s.tickAt)
}

func TestAWriteBetweenPollAndLeaveKeepsTheConn(t *testing.T) {
	d := still(t, Config{})
	a, _ := d.pair(t, loopback4)
	watched(a)
	a.onTick.Store(true)
	a.seenWrites = a.writeCount.Load()

	a.writeCount.Add(1)
	assert.False(t, a.tryRetire(), "a write came after the poll began")
	a.seenWrites = a.writeCount.Load()
	a.writersInside.Add(1)
	assert.False(t, a.tryRetire(), "a write is underway")
	a.writersInside.Add(-1)
	assert.True(t, a.tryRetire())
	assert.False(t, a.onTick.Load())
}

func TestClosedConnsLeaveTheTick(t *testing.T) {
	h := hands{cc.Time(time.Hour)}
	d := still(t, Config{Clock: h.clock})
	s := d.shards[0]
	a, b := d.pair(t, loopback4)
	for _, c := range []*Conn{a, b} {
		watched(c)
		c.beginWrite()
	}
	h.step(s, Tick)
	require.Len(t, s.pollList, 2)
	require.NoError(t, a.Close())
	require.NoError(t, b.Reset())
	h.step(s, Tick)
	assert.Empty(t, s.pollList)
	assert.Zero(t, d.Status().Busy)
	assert.Equal(t, cc.Never, s.tickAt)
	a.endWrite()
	assert.Equal(t, cc.Never, s.tickAt, "a write that ends behind it changes nothing")
	a.beginWrite()
	assert.Equal(t, cc.Never, s.tickAt, "nor does one that begins")
}

func TestALegThatIsObservedAnewIsPolledOnce(t *testing.T) {
	h := hands{cc.Time(time.Hour)}
	d := still(t, Config{Clock: h.clock})
	s := d.shards[0]
	a, _ := d.pair(t, loopback4)
	watched(a)
	a.write(t, 1)
	h.step(s, Tick)
	reports := watched(a)
	a.write(t, 1)
	before := *reports
	h.step(s, Tick)
	assert.Equal(t, before+1, *reports)
	assert.LessOrEqual(t, len(s.pollList), 1)
}

// write writes n bytes.
func (c *Conn) write(t *testing.T, n int) {
	t.Helper()
	_, err := c.Write(make([]byte, n))
	require.NoError(t, err)
}

func TestCloseWaitsForTheTicksAndLeavesTheLegsOpen(t *testing.T) {
	d, err := New(Config{Clock: clock()})
	require.NoError(t, err)
	a, b := d.pair(t, loopback4)
	reports := watched(a)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close(), "twice")
	require.NoError(t, need.Leaks())
	d.Wake(0)
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
	s := d.shards[0]
	a, b := d.pair(t, loopback4)
	a.manage(flow.Limit{Cwnd: 400_000}, func(flow.Report) {})

	rate := func() (value uint64) {
		require.NoError(t, a.raw.Visit(func(fd int) (err error) {
			value, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
			return err
		}))
		return value
	}
	unsent := func() int { return a.option(t, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT) }
	assert.EqualValues(t, uint64(math.MaxUint64), rate(), "never limited")
	assert.Equal(t, 200_000, unsent(), "half a window may wait")

	limit := flow.Limit{Cwnd: 20_000, PacingRate: 100_000_000_000}
	a.Apply(limit)
	assert.Zero(t, s.remaining(t), "nobody is waiting for it")
	a.beginWrite() // a write, after which it is busy
	assert.EqualValues(t, min(uint64(pacingHeadroom*12_500_000_000), unlimited-1), rate(),
		"more than 32 bits, where they go")
	assert.Equal(t, minUnsent, unsent())
	limit.PacingRate -= 1_000_000_000
	a.Apply(limit)
	assert.Empty(t, s.optionsNext, "one percent is not worth a system call")
	limit.PacingRate = 0
	a.Apply(limit)
	a.Apply(flow.Limit{Cwnd: 400_000})
	assert.Len(t, s.optionsNext, 1)
	assert.NotEqual(t, cc.Never, s.tickAt)
	s.next(t)
	assert.EqualValues(t, uint64(math.MaxUint64), rate(), "lifted")
	assert.Equal(t, 200_000, unsent())
	assert.Empty(t, s.optionsNext)
	assert.Zero(t, a.Info().SignalErrors)
	a.endWrite()

	a.Apply(flow.Limit{Cwnd: 400_000, PacingRate: 80_000_000})
	a.Observe(nil)
	assert.EqualValues(t, uint64(math.MaxUint64), rate())
	a.Apply(flow.Limit{Cwnd: 400_000, PacingRate: 80_000_000})
	pass(t, a, b, 1000)
	s.runTick()
	assert.EqualValues(t, uint64(math.MaxUint64), rate(), "it is not ours any more")
}

func TestALimitOfAClosedLegGoesNowhere(t *testing.T) {
	d := still(t, Config{})
	a, _ := d.pair(t, loopback4)
	watched(a)
	a.beginWrite()
	a.Apply(flow.Limit{Cwnd: 100_000, PacingRate: 80_000_000})
	require.NoError(t, a.Close())
	d.shards[0].next(t)
	a.Apply(flow.Limit{Cwnd: 200_000, PacingRate: 160_000_000})
	assert.Empty(t, d.shards[0].optionsNext)
	assert.Zero(t, a.Info().SignalErrors)
}

func TestAPollAllocatesNothing(t *testing.T) {
	d := still(t, Config{})
	a, _ := d.pair(t, loopback4)
	limit := flow.Limit{Cwnd: 1 << 20}
	a.manage(limit, func(flow.Report) {
		limit.PacingRate = 1_000_000_000 - limit.PacingRate // a system call each time
		a.Apply(limit)
	})
	assert.Zero(t, testing.AllocsPerRun(100, func() { a.pollSocket() }))
}

func BenchmarkPoll(b *testing.B) {
	d := still(b, Config{})
	a, _ := d.pair(b, loopback4)
	a.manage(flow.Limit{Cwnd: 1 << 20}, func(flow.Report) {})
	b.ReportAllocs()
	for b.Loop() {
		a.pollSocket()
	}
}

// BenchmarkStalledReader is the CPU time of ticks for a leg whose reader has stalled,
// as a part of a core.
func BenchmarkStalledReader(b *testing.B) {
	for _, envelope := range []string{EBPF, "cubic"} {
		b.Run(envelope, func(b *testing.B) {
			if envelope == EBPF {
				needsEBPF(b)
			}
			d := start(b, Config{Envelope: envelope})
			a, _ := d.pair(b, loopback4)
			stalled := make(chan struct{})
			var once sync.Once
			a.manage(flow.Limit{Cwnd: cc.MaxCwnd}, func(r flow.Report) {
				if r.RwndFull {
					once.Do(func() { close(stalled) })
				}
			})
			go func() { _, _ = a.Write(make([]byte, 64<<20)) }()
			<-stalled
			before, wall := need.CPU(b), clock()
			for b.Loop() {
				time.Sleep(time.Second) //nolint:forbidigo // what it costs in that time is measured
			}
			b.ReportMetric(100*float64(need.CPU(b)-before)/float64(wall()), "%core")
		})
	}
}

func TestAConnectionTornDownHasNothingUnderway(t *testing.T) {
	d := still(t, Config{})
	a, b := d.pair(t, loopback4)
	var last flow.Report
	a.manage(flow.Limit{Cwnd: cc.MaxCwnd}, func(r flow.Report) { last = r })
	written := make(chan error, 1)
	go func() {
		_, err := a.Write(make([]byte, 64<<20)) // more than the buffers hold
		written <- err
	}()
	for last.Unsent == 0 {
		d.shards[0].next(t)
	}
	require.NoError(t, b.Reset())
	require.Error(t, <-written)
	d.shards[0].next(t)
	assert.Zero(t, last.Unsent)
	assert.Zero(t, last.Pipe)
}

func TestABulkLegIsPolledLessOften(t *testing.T) {
	h := hands{cc.Time(time.Hour)}
	d := still(t, Config{Clock: h.clock})
	s := d.shards[0]
	a, b := d.pair(t, loopback4)
	reports := watched(a)
	chunk := make([]byte, bulkBytes)
	move := func() {
		_, err := a.Write(chunk)
		require.NoError(t, err)
		_, err = io.ReadFull(b, chunk)
		require.NoError(t, err)
	}
	for i := range bulkPolls {
		move()
		h.step(s, Tick)
		if i%3 == 0 {
			h.step(s, Tick) // a source that writes a little less often than the tick comes
		}
	}
	require.Equal(t, h.now.Add(bulkPause), s.tickAt)
	before := *reports
	move()
	assert.Equal(t, h.now.Add(bulkPause), s.tickAt, "a write does not bring it forward")
	h.step(s, bulkPause)
	assert.Equal(t, before+1, *reports, "one firing of the slow timer, one report")
	assert.Equal(t, h.now.Add(bulkPause), s.tickAt)

	a.Apply(flow.Limit{Cwnd: bulkBytes})
	move()
	h.step(s, Tick) // to settle
	h.step(s, bulkPause-Tick)
	assert.Equal(t, h.now.Add(Tick), s.tickAt, "once its window is full, every tick counts")
}

func TestATickDoesNotWaitForWhoReadsTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nobody, end := io.Pipe()
		queue := &logqueue.Writer{To: end}
		queue.Detach(func(int) {})
		s := &shard{dp: &Datapath{log: slog.New(slog.NewTextHandler(queue, nil))}}
		s.logOverload()
		assert.True(t, s.warned)
		assert.NoError(t, nobody.Close())
	})
}
