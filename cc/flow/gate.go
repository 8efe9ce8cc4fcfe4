package flow

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// gate keeps the limit of a flow where its leg does not enforce it: the relay asks before each write. A transport that
// enforces the window does the same by itself, so the gate then only stores the limit.
type gate struct {
	limit   Limit
	pacer   pacer
	waiting bool    // a Take was refused, and the relay has not been woken since
	retryAt cc.Time // pacing lets nothing pass before this; 0: pacing holds nothing back
}

// setLimit puts a limit into force.
func (g *gate) setLimit(now cc.Time, l Limit) {
	if l.PacingRate != g.limit.PacingRate {
		g.retryAt = 0 // it is a time at the old rate
	}
	g.limit = l
	g.pacer.setRate(now, l.PacingRate)
}

// grantQuantum returns the least grant that is worth waking the relay for: a segment or all that is wanted, but never
// more than a window that is smaller than a segment.
func (g *gate) grantQuantum(want, mss cc.Bytes) cc.Bytes { return min(want, mss, max(g.limit.Cwnd, 1)) }

// grantBytes returns how many of want bytes may go now, in whole quanta or all of them, and what holds the rest back.
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

// mayOpen reports whether a refused Take may succeed now. If only pacing refuses it, retryAt is when that ends.
func (g *gate) mayOpen(now cc.Time, want, inflight, mss cc.Bytes) bool {
	if !g.waiting || g.retryAt > now {
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

// pacerBurst is how much sending time a pacer lets accumulate. A driver that ticks every millisecond, and is sometimes
// late, must not lose rate.
const pacerBurst = 4 * time.Millisecond

// limitBurst is pacerBurst for a group's maximum rate. It may be longer, because a maximum promises a sum and not a
// short queue, and must be reached on a busy machine too.
const limitBurst = 20 * time.Millisecond

// pacer spreads bytes over time: a leaky bucket as virtual scheduling (GCRA, ITU-T I.371). The zero value does not
// pace.
type pacer struct {
	rate     cc.Rate       // 0: not paced
	tat      cc.Time       // theoretical arrival time: when the bytes sent so far would have left at exactly rate
	maxBurst time.Duration // sending time that may accumulate; 0: pacerBurst
}

// setRate changes the rate. Bytes that were sent ahead of the old rate take the time of the new one, so a raise is in
// force at once.
func (p *pacer) setRate(now cc.Time, rate cc.Rate) {
	if rate != p.rate {
		p.tat, p.rate = cc.Repace(now, p.tat, p.rate, rate), rate
	}
}

// burstTime returns how much sending time may accumulate: at least two segments' worth.
func (p *pacer) burstTime(mss cc.Bytes) time.Duration {
	if p.maxBurst == 0 {
		return max(pacerBurst, p.rate.TimeFor(2*mss))
	}
	// At a low rate: four segments, or one plus the time that a driver may be late.
	return max(p.maxBurst, min(p.rate.TimeFor(4*mss), p.rate.TimeFor(mss)+2*p.maxBurst))
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

// spendBytes counts n bytes that leave now.
func (p *pacer) spendBytes(now cc.Time, n cc.Bytes) {
	if p.rate != 0 {
		p.tat = max(p.tat, now).Add(p.rate.TimeFor(n))
	}
}

// rateLimitSlack is the factor by which a rateLimit exceeds its rate. The gates of flows keep the exact rate, divided
// by class and weight. The rateLimit holds the sum where they cannot, and serves flows in the order in which they ask.
// It must not take effect before the gates where they can.
const rateLimitSlack = 1.01

// rateLimit is the maximum rate of a group: a leaky bucket that each byte passes before it reaches a transport. All
// flows of the group with the same Terms.MaxRate share it, whatever their algorithms are.
//
// A flow that finds no credit waits for its turn, which comes after the turns of all that asked before and still wait.
// Flows that wait are served in order, each turn wakes one of them, and one that gives up delays no other.
type rateLimit struct {
	timers  *timers
	key     limitKey
	users   atomic.Int32 // flows that share it; changed with the manager's mu held
	parked  bool         // it is in Manager.unusedLimits; the manager's mu guards it
	timer   timer        // of the next turn
	inForce atomic.Int64 // the rate; less than that of key if other edges have the rest

	mu         sync.Mutex // taken after a group's
	bucket     pacer
	passed     cc.Bytes  // so far
	lastTurnAt cc.Time   // when the newest turn came
	queue      []*waiter // waiting for their turns, in order
	toWake     []*waiter // their turns have come; the timer wakes them
}

// limitKey identifies a rateLimit.
type limitKey struct {
	group  string
	rate   cc.Rate
	shared bool // Terms.Shared
}

// waiter is a flow at a rateLimit. The mutex of the rateLimit guards all fields but wake.
type waiter struct {
	wake    func(now cc.Time)
	turn    atomic.Uint32 // noTurn, turnWaits or turnCame; may be read without the mutex
	turnAt  cc.Time       // the turn comes not before this; once it has come, when that was
	turnGap time.Duration // nor earlier than this after the turn before it
	prepaid cc.Bytes      // bytes that turns of passPacket have let pass and that have not gone yet
}

// The values of waiter.turn.
const (
	noTurn    uint32 = iota
	turnWaits        // it waits for its turn
	turnCame         // it may pass before those that wait
)

// SharedLimit is a maximum rate that flows here share with other edges.
type SharedLimit struct {
	Group   string
	MaxRate cc.Rate  // of all edges together
	Rate    cc.Rate  // the part that is in force here
	Passed  cc.Bytes // so far; it begins anew when the limit has had no users for a while
	Weight  int      // sum over the flows that have bytes in flight, or waiting
	// Held reports that the rate holds a flow back that wants to send, or that bytes have passed ahead of the rate. The
	// latter counts because at a low rate no flow asks for seconds after one write, and waiting flows become inactive.
	Held bool
}

// newRateLimit returns a limit with a key. Its bucket is one hundredth wider than the rate.
func newRateLimit(timers *timers, key limitKey) *rateLimit {
	l := &rateLimit{timers: timers, key: key, bucket: pacer{maxBurst: limitBurst}}
	l.timer.owner = l
	l.setRate(0, key.rate)
	return l
}

// rate returns the rate in force.
func (l *rateLimit) rate() cc.Rate { return cc.Rate(l.inForce.Load()) }

// setRate puts a rate into force. The pauses of flows that wait take the new rate's time.
func (l *rateLimit) setRate(now cc.Time, rate cc.Rate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.bucket.rate
	if cc.Rate(l.inForce.Swap(int64(rate))) == rate {
		return
	}
	l.bucket.setRate(now, cc.Rate(rateLimitSlack*float64(rate)))
	for _, w := range l.queue {
		w.turnAt = max(cc.Repace(now, w.turnAt, before, l.bucket.rate), now+1)
		w.turnGap = l.bucket.rate.TimeFor(before.BytesIn(w.turnGap))
	}
	l.scheduleNextTurn()
}

// spendBytes counts n bytes that pass now. The caller holds l.mu.
func (l *rateLimit) spendBytes(now cc.Time, n cc.Bytes) {
	l.bucket.spendBytes(now, n)
	l.passed += n
}

// passBytes lets up to want bytes of w pass and returns how many: all of them, or whole quanta. After 0 w waits for
// its turn and is woken then to ask again. A w that may be ahead of the rate is woken when half of ahead is used up.
// The caller holds l.mu.
func (l *rateLimit) passBytes(now cc.Time, w *waiter, want, quantum, mss cc.Bytes, ahead time.Duration) cc.Bytes {
	l.startDueTurns(now)
	n := min(want, l.bucket.creditBytes(now.Add(ahead), mss))
	if n < want {
		n -= n % quantum
	}
	turn := w.turn.Load()
	if n > 0 && (turn == turnCame || len(l.queue) == 0) {
		l.spendBytes(now, n)
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
		w.turnAt, w.turnGap = max(ready, now+1), rate.TimeFor(piece)
		w.turn.Store(turnWaits)
		l.queue = append(l.queue, w)
		l.scheduleNextTurn()
	}
	return 0
}

// nextTurnAt returns when the first waiting turn comes. The queue must not be empty.
func (l *rateLimit) nextTurnAt() cc.Time {
	return max(l.queue[0].turnAt, l.lastTurnAt.Add(l.queue[0].turnGap))
}

// startDueTurns moves the waiters with turns that are due from queue to toWake.
func (l *rateLimit) startDueTurns(now cc.Time) {
	for len(l.queue) > 0 && l.nextTurnAt() <= now {
		w := l.queue[0]
		w.turnAt = l.nextTurnAt()
		l.lastTurnAt = w.turnAt
		l.queue[0] = nil
		l.queue = l.queue[1:]
		w.turn.Store(turnCame)
		l.toWake = append(l.toWake, w)
	}
}

// scheduleNextTurn schedules the timer for the next turn, if any waits.
func (l *rateLimit) scheduleNextTurn() {
	if len(l.queue) > 0 {
		l.timers.scheduleAt(&l.timer, l.nextTurnAt())
	}
}

// sparseAhead is how far sparse flows' packets may exceed the rate at once. The others make up for it.
const sparseAhead = 100 * time.Millisecond

// passPacket lets a packet of n bytes pass and reports whether it did; otherwise w is woken at its turn. A packet of a
// sparse flow needs no turn. A nil limit lets everything pass.
func (l *rateLimit) passPacket(now cc.Time, w *waiter, n cc.Bytes, sparse bool) bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	if sparse && l.bucket.tat <= now.Add(sparseAhead) {
		l.spendBytes(now, n)
		l.mu.Unlock()
		return true
	}
	if w.prepaid < n { // a turn lets as much pass as the turn of a flow
		segment := max(n, cc.DefaultMSS)
		w.prepaid = l.passBytes(now, w, l.bucket.rate.BytesIn(l.bucket.burstTime(segment)), n, segment, 0)
	}
	passes := w.prepaid >= n
	if passes {
		w.prepaid -= n
	}
	l.mu.Unlock()
	return passes
}

// onTimer wakes the waiters with turns that have come. It does so without the mutex, because they lock their groups.
func (l *rateLimit) onTimer(now cc.Time) {
	l.mu.Lock()
	l.startDueTurns(now)
	due := l.toWake
	l.toWake = nil
	l.scheduleNextTurn()
	l.mu.Unlock()
	for _, w := range due {
		w.wake(now)
	}
}

// removeWaiter removes w, which asks no more. Its turn goes to the ones behind it. A nil limit has no waiters.
func (l *rateLimit) removeWaiter(w *waiter) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	is := func(e *waiter) bool { return e == w }
	switch w.turn.Swap(noTurn) {
	case turnWaits:
		l.queue = slices.DeleteFunc(l.queue, is)
	case turnCame:
		if w.turnAt == l.lastTurnAt {
			l.lastTurnAt = l.lastTurnAt.Add(-w.turnGap)
		}
	}
	l.toWake = slices.DeleteFunc(l.toWake, is)
	l.scheduleNextTurn()
}

// isFull reports whether the bucket holds nothing back, so that a new one would behave the same.
func (l *rateLimit) isFull(now cc.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bucket.tat <= now
}

// LimitedBy is what holds a flow back at the moment.
type LimitedBy uint8

// The reasons why a flow is not sending more.
const (
	LimitedByApplication LimitedBy = iota // nothing to send
	LimitedByCwnd                         // the algorithm's window, or this flow's share of it
	LimitedByPacing                       // the algorithm's pacing rate or the policy's maximum rate
	LimitedByTransport                    // the transport below holds bytes back: its own window or pacing
	LimitedByReceiver                     // the peer's receive window
	numLimits
)

// LimitedTime is the time that a flow has spent limited by each cause.
type LimitedTime [numLimits]time.Duration

// String returns the name that is used in metrics, logs and JSON.
func (l LimitedBy) String() string {
	return [...]string{"application", "cwnd", "pacing", "transport", "receiver"}[l]
}

// MarshalText returns String.
func (l LimitedBy) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// limitTimes keeps what holds a flow back, and for how long each cause has.
type limitTimes struct {
	by    LimitedBy
	since cc.Time // total includes the time until this
	total LimitedTime
}

// enterState records that by holds the flow back from now on.
func (l *limitTimes) enterState(now cc.Time, by LimitedBy) {
	if by == l.by {
		return
	}
	l.addElapsed(now)
	l.by = by
}

// addElapsed adds the time until now to the present cause.
func (l *limitTimes) addElapsed(now cc.Time) {
	if now > l.since {
		l.total[l.by] += now.Sub(l.since)
	}
	l.since = max(now, l.since)
}
