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
	timer timer
	done  chan struct{}

	enforced atomic.Int64 // of those, whose window the kernel enforces and that have bytes unsent or unacknowledged
	polled   atomic.Int64 // len(list), for Status
	slow     atomic.Bool  // the tick may be more than bulkPause away, although legs are busy

	mu      sync.Mutex
	at      cc.Time // when the tick comes; cc.Never: nothing has it come
	stirred bool    // a leg has become busy, or was written to while slow
	joining []*Conn // legs that have become busy
	queued  []*Conn // legs that have to settle
	closed  bool

	// Only the tick touches these.
	now      cc.Time // for which the tick was set, or when it came if that was earlier
	list     []*Conn // busy legs whose windows the relay keeps; polled in turns
	cursor   int     // in list: whose turn it is
	watched  []*Conn // busy legs whose windows the kernel enforces, and some that are busy no more; see confirm
	turn     int     // in watched: who is looked at next
	turned   cc.Time // when confirm was called last
	moved    cc.Time // when a leg that the kernel enforces last made progress, bulk legs aside
	bulk     cc.Time // when a bulk leg did
	settling []*Conn // the other buffer of queued
	warned   bool
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
	if s.closed || at >= s.at {
		return
	}
	if err := s.timer.fireAfter(at.Sub(s.dp.clock())); err != nil {
		s.dp.log.Error("kernel: set timer", "shard", s.index, "err", err)
		return
	}
	s.at = at
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
	s.stirred = true
	s.slow.Store(false)
	s.armTimer(s.dp.clock().Add(Tick))
}

// enqueueSettling has c settle with the next tick.
func (s *shard) enqueueSettling(c *Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.queued = append(s.queued, c)
		s.armTimer(s.dp.clock().Add(Tick))
	}
}

func (s *shard) runTick() {
	s.beginTick()
	if s.dp.before != nil {
		s.dp.before()
	}
	if o := s.dp.enforcer; o != nil {
		o.eachWithNews(s.index, s.dp.budget, s.visitLeg)
		s.confirmWatched()
	}
	next := min(s.pollLegs(), s.nextDue())
	if s.dp.onTick != nil {
		next = min(next, s.dp.onTick(s.index, s.dp.clock()))
	}
	s.settleLegs()
	s.polled.Store(int64(len(s.list)))

	// Ticks are Tick apart, unless they are late.
	next = max(next, s.now.Add(Tick), s.dp.clock())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slow.Store(!s.stirred && next > s.now.Add(bulkPause))
	s.armTimer(next)
}

func (s *shard) beginTick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = min(s.at, s.dp.clock())
	s.at = cc.Never
	if s.stirred {
		s.stirred, s.moved = false, s.now
	}
	for _, c := range s.joining {
		c.progress, c.due, c.bulk, c.gap = s.now, s.now, 0, 0
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
		c.due = s.now.Add(confirmAfter)
		s.watched = append(s.watched, c)
	} else {
		s.list = append(s.list, c)
	}
}

// settleLegs has the legs settle whose limits have changed.
func (s *shard) settleLegs() {
	s.mu.Lock()
	s.queued, s.settling = s.settling, s.queued
	s.mu.Unlock()
	for _, c := range s.settling {
		if c.settleQueued() {
			s.moved = s.now
		}
	}
	clear(s.settling)
	s.settling = s.settling[:0]
}

// nextDue is when legs whose windows the kernel enforces are to be served next.
func (s *shard) nextDue() cc.Time {
	if s.enforced.Load() <= 0 {
		return cc.Never
	}
	after := min(pollPause(s.now.Sub(s.moved)), max(bulkPause, pollPause(s.now.Sub(s.bulk))))
	return s.now.Add(after)
}

// logOverload logs once that the budget is what sets the polling interval.
func (s *shard) logOverload() {
	if !s.warned {
		s.warned = true
		s.dp.log.Warn("kernel: more busy connections than are polled in one tick; each is polled less often",
			"shard", s.index, "busy", len(s.list), "polls_per_tick", s.dp.budget)
	}
}

// mostPause bounds how long news may wait. A socket that is not answered for 100 ms falls back.
const mostPause = 64 * Tick

// pollPause is how long to wait for news where there has been none for so long: a reader
// that has stalled should not cost a tick every millisecond. It is at most 1/64 of the
// silence.
func pollPause(silence time.Duration) time.Duration { return min(max(Tick, silence/64), mostPause) }
