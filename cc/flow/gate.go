package flow

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// gate has the limit of a flow, and keeps it where the leg does not enforce it: the
// relay asks it before every write. It does what a kernel-enforced leg does by itself.
type gate struct {
	limit   Limit
	pacer   pacer
	blocked bool    // a Take was refused and nobody has been woken since
	retryAt cc.Time // pacing does not let the flow send before this; 0: pacing holds nothing back
}

// setLimit puts a limit into force.
func (g *gate) setLimit(now cc.Time, l Limit) {
	if l.PacingRate != g.limit.PacingRate {
		g.retryAt = 0 // it was for the old rate
	}
	g.limit = l
	g.pacer.setRate(now, l.PacingRate)
}

// grantQuantum is the least worth waking for: a segment, or all that is wanted; never more
// than a window that is smaller than a segment.
func (g *gate) grantQuantum(want, mss cc.Bytes) cc.Bytes { return min(want, mss, max(g.limit.Cwnd, 1)) }

// grantBytes returns how many of want bytes may go now, in whole quanta or all of them, and
// what holds the rest back.
func (g *gate) grantBytes(now cc.Time, want, inflight, mss cc.Bytes) (n cc.Bytes, by LimitedBy) {
	quantum, room, credit := g.grantQuantum(want, mss), g.limit.Cwnd-inflight, g.pacer.creditBytes(now, mss)
	g.retryAt = 0
	switch n = min(want, room, credit); n {
	case want:
		return n, LimitedByApplication
	case room:
		by = LimitedByCwnd
	default:
		by = LimitedByPacing
	}
	if n >= quantum {
		return n - n%quantum, by
	}
	if room >= quantum {
		g.retryAt = g.pacer.readyAt(now, quantum, mss)
	}
	return 0, by
}

// mayOpen reports whether a refused Take may succeed now. If only pacing refuses it,
// retryAt says until when.
func (g *gate) mayOpen(now cc.Time, want, inflight, mss cc.Bytes) bool {
	if !g.blocked || g.retryAt > now {
		return false
	}
	quantum := g.grantQuantum(want, mss)
	if g.limit.Cwnd-inflight < quantum {
		return false
	}
	if g.retryAt = g.pacer.readyAt(now, quantum, mss); g.retryAt > now {
		return false
	}
	g.retryAt = 0
	return true
}

// pacerBurst is how much sending time a pacer lets accumulate: a driver that
// ticks every millisecond, and is sometimes late, must not lose rate.
const pacerBurst = 4 * time.Millisecond

// limitBurst is the same for the maximum rate of a group, which promises a sum rather
// than short queues, and holds it on a busy machine, too.
const limitBurst = 20 * time.Millisecond

// pacer spreads bytes over time: a virtual-scheduling leaky bucket. Rate 0 does not
// pace. setRate changes the rate.
type pacer struct {
	rate cc.Rate
	tat  cc.Time       // when the bytes sent so far would have left at exactly rate
	most time.Duration // sending time that may accumulate; 0: pacerBurst
}

// setRate paces at rate from now on. Bytes that were sent ahead of the old rate take
// the new rate's time: a raise is in force at once.
func (p *pacer) setRate(now cc.Time, rate cc.Rate) {
	if rate != p.rate {
		p.tat, p.rate = cc.Repace(now, p.tat, p.rate, rate), rate
	}
}

func (p *pacer) burstTime(mss cc.Bytes) time.Duration {
	if p.most == 0 {
		return max(pacerBurst, p.rate.TimeFor(2*mss))
	}
	// At a low rate four segments, or one and time to be late.
	return max(p.most, min(p.rate.TimeFor(4*mss), p.rate.TimeFor(mss)+2*p.most))
}

// creditBytes returns how many bytes may leave now.
func (p *pacer) creditBytes(now cc.Time, mss cc.Bytes) cc.Bytes {
	if p.rate == 0 {
		return cc.MaxCwnd
	}
	return p.rate.BytesIn(now.Add(p.burstTime(mss)).Sub(max(p.tat, now)))
}

// readyAt returns when n bytes may leave.
func (p *pacer) readyAt(now cc.Time, n, mss cc.Bytes) cc.Time {
	if p.rate == 0 {
		return now
	}
	return max(now, max(p.tat, now).Add(p.rate.TimeFor(n)-p.burstTime(mss)))
}

func (p *pacer) spendBytes(now cc.Time, n cc.Bytes) {
	if p.rate != 0 {
		p.tat = max(p.tat, now).Add(p.rate.TimeFor(n))
	}
}

// rateLimitSlack is how far above its rate a rateLimit lets bytes pass. The gates
// of flows hold the rate itself, and divide it by class and weight. The limit
// holds the sum where they cannot, and there serves flows in the order in which
// they ask. It must not come first where the pacers can.
const rateLimitSlack = 1.01

// rateLimit is the maximum rate of a group. All flows of the group that have the
// same Terms.MaxRate share it, whatever their algorithms are. It is a leaky bucket,
// and every byte passes it before it reaches a transport. A flow that finds no credit
// waits for its turn, which comes after those of all that asked before and wait still. So
// flows that wait are served in order, each turn wakes one of them, and who gives up delays
// nobody.
type rateLimit struct {
	timers *timers
	key    limitKey
	users  atomic.Int32 // flows and datagrams that share it; the manager's mu is held for a change
	parked bool         // it is in Manager.unused; the manager's mu guards it
	timer  timer

	mu      sync.Mutex // taken after a group's
	bucket  pacer
	newest  cc.Time   // when the newest turn came
	waiting []*waiter // for their turns, in order
	due     []*waiter // whose turns have come, and who are to be woken
}

// limitKey tells rateLimits apart.
type limitKey struct {
	group string
	rate  cc.Rate
}

// waiter is a flow, or datagrams, at a rateLimit, whose mutex guards what changes.
type waiter struct {
	wake   func(now cc.Time)
	turn   atomic.Uint32 // noTurn, turnWaits or turnCame; may be read without the mutex
	from   cc.Time       // its turn does not come before; once it has come, when that was
	after  time.Duration // nor does it come earlier than so long after the one before it
	passed cc.Bytes      // what datagrams' turns have let pass beyond what has gone
}

// What a waiter has at a rateLimit.
const (
	noTurn    uint32 = iota
	turnWaits        // it waits for its turn
	turnCame         // it may pass before those that wait
)

// newRateLimit returns the limit with a key, which is 1 % above its rate.
func newRateLimit(timers *timers, key limitKey) *rateLimit {
	l := &rateLimit{timers: timers, key: key}
	l.bucket = pacer{rate: cc.Rate(rateLimitSlack * float64(key.rate)), most: limitBurst}
	l.timer.owner = l
	return l
}

// takeBytes lets up to want bytes of w pass and returns how many: all of them, or whole quanta.
// If it returns 0, w waits for its turn, and is woken then to ask again. Of a w that may be ahead of the rate
// it is when half of that is used up. The caller holds l.mu.
func (l *rateLimit) takeBytes(now cc.Time, w *waiter, want, quantum, mss cc.Bytes, ahead time.Duration) cc.Bytes {
	l.startDueTurns(now)
	n := min(want, l.bucket.creditBytes(now.Add(ahead), mss))
	if n < want {
		n -= n % quantum
	}
	turn := w.turn.Load()
	if n > 0 && (turn == turnCame || len(l.waiting) == 0) {
		l.bucket.spendBytes(now, n)
		w.turn.Store(noTurn)
		return n
	}
	if turn != turnWaits {
		rate := l.bucket.rate
		piece := rate.BytesIn(l.bucket.burstTime(mss)) // the most that a turn lets pass
		if piece -= piece % quantum; want < piece {
			piece = want
		}
		ready := l.bucket.readyAt(now.Add(ahead), quantum, mss).Add(-ahead / 2)
		w.from, w.after = max(ready, now+1), rate.TimeFor(piece)
		w.turn.Store(turnWaits)
		l.waiting = append(l.waiting, w)
		l.scheduleNextTurn()
	}
	return 0
}

// nextTurnAt is when the first turn comes of those who wait; there are some.
func (l *rateLimit) nextTurnAt() cc.Time {
	return max(l.waiting[0].from, l.newest.Add(l.waiting[0].after))
}

// startDueTurns has those turns come that are due.
func (l *rateLimit) startDueTurns(now cc.Time) {
	for len(l.waiting) > 0 && l.nextTurnAt() <= now {
		w := l.waiting[0]
		w.from = l.nextTurnAt()
		l.newest = w.from
		l.waiting[0] = nil
		l.waiting = l.waiting[1:]
		w.turn.Store(turnCame)
		l.due = append(l.due, w)
	}
}

// scheduleNextTurn has tick be called for the next turn, if anybody waits for one.
func (l *rateLimit) scheduleNextTurn() {
	if len(l.waiting) > 0 {
		l.timers.scheduleAt(&l.timer, l.nextTurnAt())
	}
}

// sparseAhead is for how long the others make up for what sparse datagrams take at once.
const sparseAhead = 100 * time.Millisecond

// takeDatagram lets a datagram of n bytes pass, or has w woken in its turn. One of a
// sparse flow does not wait for a turn. Without a limit all pass.
func (l *rateLimit) takeDatagram(now cc.Time, w *waiter, n cc.Bytes, sparse bool) bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	if sparse && l.bucket.tat <= now.Add(sparseAhead) {
		l.bucket.spendBytes(now, n)
		l.mu.Unlock()
		return true
	}
	if w.passed < n { // a turn lets as much pass as one of a flow
		segment := max(n, cc.DefaultMSS)
		w.passed = l.takeBytes(now, w, l.bucket.rate.BytesIn(l.bucket.burstTime(segment)), n, segment, 0)
	}
	passes := w.passed >= n
	if passes {
		w.passed -= n
	}
	l.mu.Unlock()
	return passes
}

// onTimer wakes those whose turns have come.
func (l *rateLimit) onTimer(now cc.Time) {
	l.mu.Lock()
	l.startDueTurns(now)
	due := l.due
	l.due = nil
	l.scheduleNextTurn()
	l.mu.Unlock()
	for _, w := range due {
		w.wake(now)
	}
}

// removeWaiter forgets w, which asks no more: its turn is that of those behind it.
func (l *rateLimit) removeWaiter(w *waiter) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	is := func(e *waiter) bool { return e == w }
	switch w.turn.Swap(noTurn) {
	case turnWaits:
		l.waiting = slices.DeleteFunc(l.waiting, is)
	case turnCame:
		if w.from == l.newest {
			l.newest = l.newest.Add(-w.after)
		}
	}
	l.due = slices.DeleteFunc(l.due, is)
	l.scheduleNextTurn()
}

// isFull reports whether the bucket holds nothing back, so that a new one would do as well.
func (l *rateLimit) isFull(now cc.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bucket.tat <= now
}

// LimitedBy names what holds a flow back at the moment.
type LimitedBy uint8

// The reasons a flow is not sending more.
const (
	LimitedByApplication LimitedBy = iota // nothing to send
	LimitedByCwnd                         // the algorithm's window, or this flow's share of it
	LimitedByPacing                       // the algorithm's pacing rate or the policy's maximum rate
	LimitedByTransport                    // the transport below holds bytes back: its own window or pacing
	LimitedByReceiver                     // the peer's receive window
	numLimits
)

// LimitedTime is the time that was spent limited by each cause.
type LimitedTime [numLimits]time.Duration

// String returns the name used in metrics, logs and JSON.
func (l LimitedBy) String() string {
	return [...]string{"application", "cwnd", "pacing", "transport", "receiver"}[l]
}

// MarshalText returns String.
func (l LimitedBy) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// limitTimes tells what held a flow back, and for how long so far.
type limitTimes struct {
	by    LimitedBy
	since cc.Time
	spent LimitedTime
}

func (l *limitTimes) enterState(now cc.Time, by LimitedBy) {
	if by == l.by {
		return
	}
	l.addElapsed(now)
	l.by = by
}

func (l *limitTimes) addElapsed(now cc.Time) {
	if now > l.since {
		l.spent[l.by] += now.Sub(l.since)
	}
	l.since = max(now, l.since)
}
