package kernel

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// shard is a part of the legs, served by a tick of its own. The tick comes each Tick
// while there is progress, less often the longer there is none, and not at all while
// nothing is in flight and OnTick wants no call.
type shard struct {
	dp    *Datapath
	index int
	timer tickTimer
	done  chan struct{}

	enforcedBusy atomic.Int64 // of those, whose window the kernel enforces and that have bytes unsent or unacknowledged
	pollCount    atomic.Int64 // len(list), for Status
	slow         atomic.Bool  // the tick may be more than bulkPause away, although legs are busy

	mu         sync.Mutex
	tickAt     cc.Time // when the tick comes; cc.Never: nothing has it come
	hasNewWork bool    // a leg has become busy, or was written to while slow
	joining    []*Conn // legs that have become busy
	settleNext []*Conn // legs that have to settle
	closed     bool

	// Only the tick touches these.
	tickTime    cc.Time // for which the tick was set, or when it came if that was earlier
	pollList    []*Conn // busy legs whose windows the relay keeps; polled in turns
	pollTurn    int     // in list: whose turn it is
	confirmList []*Conn // busy legs whose windows the kernel enforces, and some that are busy no more; see confirm
	confirmTurn int     // in watched: who is looked at next
	confirmedAt cc.Time // when confirm was called last
	progressAt  cc.Time // when a leg that the kernel enforces last made progress, bulk legs aside
	bulkAt      cc.Time // when a bulk leg did
	settleNow   []*Conn // the other buffer of queued
	warned      bool
}

// niceness of the tick's thread, where it is allowed: sockets that are not answered
// in time fall back, so it must not wait behind those that move bytes.
const niceness = -10

// tickLoop makes ticks until close.
func (s *shard) tickLoop() {
	defer close(s.done)
	runtime.LockOSThread()                               // and never unlocked: the thread ends with it
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, niceness) // of this thread; needs CAP_SYS_NICE
	for s.waitForTick() {
		s.runTick()
	}
}

// waitForTick waits for the tick; false: there are no more.
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

// armTimer has the tick come by at. s.mu is held.
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

// wakeSoon has the tick come within Tick.
func (s *shard) wakeSoon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armTimer(s.dp.clock().Add(Tick))
}

// wakeForLeg is wake for a leg that was written to while the tick was slow; join: or that has
// become busy.
func (s *shard) wakeForLeg(join *Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if join != nil && !s.closed {
		s.joining = append(s.joining, join)
	}
	s.hasNewWork = true
	s.slow.Store(false)
	s.armTimer(s.dp.clock().Add(Tick))
}

// enqueueSettling has c settle with the next tick.
func (s *shard) enqueueForOptions(c *Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.settleNext = append(s.settleNext, c)
		s.armTimer(s.dp.clock().Add(Tick))
	}
}

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

// addLeg puts a leg on the list of its kind.
func (s *shard) addLeg(c *Conn) {
	c.listed = true
	if c.enforced.Load() != nil {
		c.nextPoll = s.tickTime.Add(confirmAfter)
		s.confirmList = append(s.confirmList, c)
	} else {
		s.pollList = append(s.pollList, c)
	}
}

// settleLegs has the legs settle whose limits have changed.
func (s *shard) setQueuedOptions() {
	s.mu.Lock()
	s.settleNext, s.settleNow = s.settleNow, s.settleNext
	s.mu.Unlock()
	for _, c := range s.settleNow {
		if c.setQueuedOptions() {
			s.progressAt = s.tickTime
		}
	}
	clear(s.settleNow)
	s.settleNow = s.settleNow[:0]
}

// nextDue is when legs whose windows the kernel enforces are to be served next.
func (s *shard) nextDue() cc.Time {
	if s.enforcedBusy.Load() <= 0 {
		return cc.Never
	}
	after := min(pollPause(s.tickTime.Sub(s.progressAt)), max(bulkPause, pollPause(s.tickTime.Sub(s.bulkAt))))
	return s.tickTime.Add(after)
}

// logOverload logs once that the budget is what sets the polling interval.
func (s *shard) logOverload() {
	if !s.warned {
		s.warned = true
		s.dp.log.Warn("kernel: more busy connections than are polled in one tick; each is polled less often",
			"shard", s.index, "busy", len(s.pollList), "polls_per_tick", s.dp.pollBudget)
	}
}

// mostPause bounds how long news may wait. A socket that is not answered for 100 ms falls back.
const maxPause = 64 * Tick

// pollPause is how long to wait for news where there has been none for so long: a reader
// that has stalled should not cost a tick every millisecond. It is at most 1/64 of the
// silence.
func pollPause(silence time.Duration) time.Duration { return min(max(Tick, silence/64), maxPause) }
