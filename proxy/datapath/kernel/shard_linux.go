package kernel

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// shard is a part of the legs, and the tick that serves them. The package comment says when the tick comes.
//
// A leg that is on the tick is in one of two lists. Polled legs are in pollList, and are polled in turns. Enforced
// legs are in confirmList; the tick visits them when their cell has news, and otherwise seldom. A leg that went off
// the tick is dropped from its list when its turn comes.
//
// mu is held for a few instructions at a time, by writers and Apply too, and never during a report.
type shard struct {
	dp    *Datapath
	index int
	timer tickTimer
	done  chan struct{} // closed once the tick's thread has ended

	enforcedBusy atomic.Int64 // enforced legs on the tick
	pollCount    atomic.Int64 // len(pollList), for Status
	slow         atomic.Bool  // the tick may be more than bulkPause away although legs are busy: writers wake it

	mu          sync.Mutex
	tickAt      cc.Time   // for which the timer is set; cc.Never: it is not
	hasNewWork  bool      // a leg has become busy, or was written to while slow
	joining     []*sender // legs that have become busy
	optionsNext []*sender // legs with socket options that the next tick sets
	closed      bool

	// Only the tick touches these.
	tickTime    cc.Time   // for which the tick was set, or when it came if that was earlier
	pollList    []*sender // busy polled legs
	pollTurn    int       // in pollList: the next to be polled
	confirmList []*sender // busy enforced legs
	confirmTurn int       // in confirmList: the next to be looked at
	confirmedAt cc.Time   // when confirmQuietLegs was called last
	progressAt  cc.Time   // when a leg that the kernel enforces last made progress, bulk legs aside
	bulkAt      cc.Time   // when a bulk leg did
	optionsNow  []*sender // the other buffer of optionsNext
	warned      bool      // of the budget
}

// niceness of the tick's thread, where it may be raised. The tick must not wait behind threads that move bytes:
// sockets that are not answered in time fall back.
const niceness = -10

// tickLoop makes ticks until stopTicking.
func (s *shard) tickLoop() {
	defer close(s.done)
	runtime.LockOSThread()                               // and never unlocked: the thread ends with it
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, niceness) // of this thread; needs CAP_SYS_NICE
	var slice eventloop.Slice
	for s.waitForTick() {
		slice.Renew()
		s.runTick()
	}
}

// waitForTick waits for the next tick, and reports whether there is one.
func (s *shard) waitForTick() bool {
	err := s.timer.waitUntilFired()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && !s.closed {
		s.dp.log.Error("kernel: a shared tick has stopped", "shard", s.index, "err", err)
	}
	return err == nil && !s.closed
}

// stopTicking ends the tick and waits for it.
func (s *shard) stopTicking() error {
	s.mu.Lock()
	s.closed = true
	err := s.timer.fireAfter(0)
	s.mu.Unlock()
	if err == nil {
		<-s.done
	}
	if closing := s.timer.closeTimer(); err == nil {
		err = closing
	}
	return err
}

// armTimer sets the next tick to at, unless it is set to an earlier time. mu is held.
func (s *shard) armTimer(at cc.Time) {
	if s.closed || at >= s.tickAt {
		return
	}
	if err := s.timer.fireAfter(at.Sub(s.dp.clock())); err != nil {
		s.dp.log.Error("kernel: set timer", "shard", s.index, "err", err)
		return
	}
	s.tickAt = at
}

// wakeSoon makes the next tick come within Tick.
func (s *shard) wakeSoon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armTimer(s.dp.clock().Add(Tick))
}

// wakeForLeg makes the next tick come within Tick, because a leg has become busy (join), or was written to while the
// tick was slow (nil).
func (s *shard) wakeForLeg(join *sender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if join != nil && !s.closed {
		s.joining = append(s.joining, join)
	}
	s.hasNewWork = true
	s.slow.Store(false)
	s.armTimer(s.dp.clock().Add(Tick))
}

// enqueueForOptions makes the next tick set the leg's socket options.
func (s *shard) enqueueForOptions(c *sender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.optionsNext = append(s.optionsNext, c)
		s.armTimer(s.dp.clock().Add(Tick))
	}
}

// runTick serves the legs once, and sets the timer for the next tick.
func (s *shard) runTick() {
	s.beginTick()
	if s.dp.beforeTick != nil {
		s.dp.beforeTick()
	}
	if o := s.dp.enforcer; o != nil {
		o.visitLegsWithNews(s.index, s.dp.pollBudget, s.visitLeg)
		s.confirmQuietLegs()
	}
	next := min(s.pollLegs(), s.nextDue())
	if s.dp.onTick != nil {
		next = min(next, s.dp.onTick(s.index, s.dp.clock()))
	}
	s.setQueuedOptions()
	s.pollCount.Store(int64(len(s.pollList)))

	// Ticks are Tick apart, unless they are late.
	next = max(next, s.tickTime.Add(Tick), s.dp.clock())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slow.Store(!s.hasNewWork && next > s.tickTime.Add(bulkPause))
	s.armTimer(next)
}

// beginTick takes in the legs that have become busy.
func (s *shard) beginTick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tickTime = min(s.tickAt, s.dp.clock())
	s.tickAt = cc.Never
	if s.hasNewWork {
		s.hasNewWork, s.progressAt = false, s.tickTime
	}
	for _, c := range s.joining {
		c.progressAt, c.nextPoll, c.bulkStreak, c.gapStreak = s.tickTime, s.tickTime, 0, 0
		if !c.listed {
			s.addLeg(c)
		}
	}
	clear(s.joining)
	s.joining = s.joining[:0]
}

// addLeg puts a leg on the list of its tier.
func (s *shard) addLeg(c *sender) {
	c.listed = true
	if c.enforced.Load() != nil {
		c.nextPoll = s.tickTime.Add(confirmAfter)
		s.confirmList = append(s.confirmList, c)
	} else {
		s.pollList = append(s.pollList, c)
	}
}

// removeLeg takes the leg at i off a list. The last one takes its place.
func removeLeg(list []*sender, i int) []*sender {
	last := len(list) - 1
	list[i].listed = false
	list[i] = list[last]
	list[last] = nil
	return list[:last]
}

// pollLegs polls the legs of pollList that are due, up to the budget, and drops those that are busy no more. It
// returns when it wants to be called next.
func (s *shard) pollLegs() (next cc.Time) {
	next = cc.Never
	if len(s.pollList) > 0 {
		s.dp.peerClocks.readRings()
	}
	budget := s.dp.pollBudget
	for scan := len(s.pollList); scan > 0; scan-- {
		if s.pollTurn >= len(s.pollList) {
			s.pollTurn = 0
		}
		c := s.pollList[s.pollTurn]
		switch {
		case !c.onTick.Load(): // its observation has ended
			s.pollList = removeLeg(s.pollList, s.pollTurn)
			continue
		case c.enforced.Load() != nil: // since it was listed
			s.pollList = removeLeg(s.pollList, s.pollTurn)
			s.addLeg(c)
			continue
		case s.tickTime.Add(Tick/2) < c.nextPoll && (c.writeCount.Load() == c.seenWrites || c.isBulk()):
		case budget == 0:
			s.logOverload()
			return s.tickTime
		default:
			budget--
			if c.pollLeg(s.tickTime) == polledGone {
				s.pollList = removeLeg(s.pollList, s.pollTurn)
				continue
			}
			c.nextPoll = s.tickTime.Add(pollPause(s.tickTime.Sub(c.progressAt)))
			if c.isBulk() {
				c.nextPoll = s.tickTime.Add(bulkPause)
			}
		}
		next = min(next, c.nextPoll)
		s.pollTurn++
	}
	return next
}

// visitLeg serves an enforced leg with news in its cell.
func (s *shard) visitLeg(c *sender) {
	if !c.onTick.Load() {
		return
	}
	o := c.pollLeg(s.tickTime)
	c.nextPoll = s.tickTime.Add(confirmAfter + c.pacedRest())
	switch {
	case o == polledQuiet, o == polledGone:
	case c.isBulk():
		s.bulkAt = s.tickTime
	default:
		s.progressAt = s.tickTime
	}
}

// The kernel can take in an acknowledgement without calling the congestion control, as Linux 6.18 does now and then
// where many come at once. The next one makes up for it, but after the last bytes there is none: they would seem to be
// in flight for ever. So TCP_INFO is asked about a leg that has said nothing for confirmAfter, beyond the time that
// its pacing takes. If bytes are missing, it is asked again after as long as the leg was silent, up to maxConfirm.
const (
	confirmAfter = 256 * Tick
	maxConfirm   = 16 * time.Second
)

// confirmQuietLegs looks at part of confirmList, so that each leg is looked at once in confirmAfter. It drops legs that
// are busy no more.
func (s *shard) confirmQuietLegs() {
	turns := len(s.confirmList)
	if passed := s.tickTime.Sub(s.confirmedAt); s.enforcedBusy.Load() > 0 && passed < confirmAfter {
		turns = int((time.Duration(turns)*passed + confirmAfter - 1) / confirmAfter)
	}
	s.confirmedAt = s.tickTime
	for ; turns > 0; turns-- {
		if s.confirmTurn >= len(s.confirmList) {
			s.confirmTurn = 0
		}
		c := s.confirmList[s.confirmTurn]
		switch {
		case !c.onTick.Load():
			s.confirmList = removeLeg(s.confirmList, s.confirmTurn)
			continue
		case c.enforced.Load() == nil: // since it was listed
			s.confirmList = removeLeg(s.confirmList, s.confirmTurn)
			s.addLeg(c)
			continue
		case s.tickTime >= c.nextPoll:
			c.confirmArrivals()
			c.nextPoll = s.tickTime.Add(min(max(confirmAfter, s.tickTime.Sub(c.progressAt)), maxConfirm))
		}
		s.confirmTurn++
	}
}

// setQueuedOptions sets the socket options of the legs in optionsNext. It does so without mu.
func (s *shard) setQueuedOptions() {
	s.mu.Lock()
	s.optionsNext, s.optionsNow = s.optionsNow, s.optionsNext
	s.mu.Unlock()
	for _, c := range s.optionsNow {
		if c.setQueuedOptions() {
			s.progressAt = s.tickTime
		}
	}
	clear(s.optionsNow)
	s.optionsNow = s.optionsNow[:0]
}

// nextDue returns when the enforced legs want the next tick; cc.Never: none is busy.
func (s *shard) nextDue() cc.Time {
	if s.enforcedBusy.Load() <= 0 {
		return cc.Never
	}
	after := min(pollPause(s.tickTime.Sub(s.progressAt)), max(bulkPause, pollPause(s.tickTime.Sub(s.bulkAt))))
	return s.tickTime.Add(after)
}

// logOverload warns once that the budget sets the interval between two polls of a leg.
func (s *shard) logOverload() {
	if !s.warned {
		s.warned = true
		s.dp.log.Warn("kernel: more busy connections than are polled in one tick; each is polled less often",
			"shard", s.index, "busy", len(s.pollList), "polls_per_tick", s.dp.pollBudget)
	}
}

// maxPause bounds how long news may wait. A socket that is not answered for 100 ms may fall back.
const maxPause = 64 * Tick

// pollPause returns how long to wait for news after a silence: a 64th of it, so that a reader that has stalled does
// not cost a tick every millisecond.
func pollPause(silence time.Duration) time.Duration { return min(max(Tick, silence/64), maxPause) }

// tickTimer is a timerfd, read by a thread that blocks in the call. Go's poller, and its own timers, would only make a
// goroutine runnable, behind all that are runnable already.
type tickTimer struct{ fd int }

// newTimer returns a timer that is not set.
func newTimer() (tickTimer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	if err != nil {
		return tickTimer{}, fmt.Errorf("create timerfd: %w", err)
	}
	return tickTimer{fd}, nil
}

// fireAfter sets the timer to fire once, and forgets what was set before.
func (t tickTimer) fireAfter(after time.Duration) error {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(1, after)))}
	return unix.TimerfdSettime(t.fd, 0, &spec, nil)
}

// waitUntilFired blocks until the timer has fired.
func (t tickTimer) waitUntilFired() error {
	var count [8]byte
	for {
		_, err := unix.Read(t.fd, count[:])
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// closeTimer closes the timer. No thread may wait for it.
func (t tickTimer) closeTimer() error { return unix.Close(t.fd) }
