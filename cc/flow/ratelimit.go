package flow

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// rateLimitSlack is how far above its rate a rateLimit lets bytes pass. The gates
// of flows hold the rate itself, and divide it by class and weight. The limit
// holds the sum where they cannot, and there serves flows in the order in which
// they ask. It must not come first where the pacers can.
const rateLimitSlack = 1.01

// rateLimit is the maximum rate of a group. All flows of the group that have the
// same Terms.MaxRate share it, whatever their algorithms are. It is a leaky bucket,
// and every byte passes it before it reaches a transport. A flow that finds no credit
// gets a turn: a time that is its own, after those of all that asked before. So
// flows that wait are served in order, and each turn wakes one of them.
type rateLimit struct {
	timers *timers
	key    limitKey
	users  atomic.Int32 // flows and datagrams that share it; the manager's mu is held for a change
	timer

	mu      sync.Mutex // taken after a group's
	bucket  pacer
	tail    cc.Time   // the newest turn that was given
	waiting []*waiter // datagrams that wait for their turns
}

// limitKey tells rateLimits apart.
type limitKey struct {
	group string
	rate  cc.Rate
}

// waiter is datagrams at a rateLimit, whose mutex guards turn and passed.
type waiter struct {
	wake   func()
	turn   cc.Time  // while they wait there; 0: they do not
	passed cc.Bytes // what it has let pass beyond what has gone
}

// take lets up to want bytes pass and returns how many: all of them, or whole quanta.
// If it returns 0, it also returns the caller's turn, which the caller hands back when
// it asks again. The caller holds l.mu.
func (l *rateLimit) take(now cc.Time, want, quantum, mss cc.Bytes, turn cc.Time) (cc.Bytes, cc.Time) {
	due := turn != 0 && turn <= now
	n := min(want, l.bucket.credit(now, mss))
	if n < want {
		n -= n % quantum
	}
	if n > 0 && (due || l.tail <= now) {
		l.bucket.spend(now, n)
		return n, 0
	}
	if turn == 0 || due {
		rate := l.bucket.rate
		piece := rate.BytesIn(l.bucket.burst(mss)) // the most that a turn lets pass
		if piece -= piece % quantum; want < piece {
			piece = want
		}
		turn = max(l.bucket.ready(now, quantum, mss), l.tail.Add(rate.TimeFor(piece)), now+1)
		l.tail = turn
	}
	return 0, turn
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
		l.bucket.spend(now, n)
		l.mu.Unlock()
		return true
	}
	if w.passed < n { // a turn lets as much pass as one of a flow
		segment := max(n, cc.DefaultMSS)
		w.passed, w.turn = l.take(now, l.bucket.rate.BytesIn(l.bucket.burst(segment)), n, segment, w.turn)
	}
	passes, turn := w.passed >= n, w.turn
	if passes {
		w.passed -= n
	} else if !slices.Contains(l.waiting, w) {
		l.waiting = append(l.waiting, w)
	}
	l.mu.Unlock()
	if !passes {
		l.timers.schedule(l, turn)
	}
	return passes
}

// tick wakes the datagrams whose turns have come.
func (l *rateLimit) tick(now cc.Time) {
	var due []*waiter
	next := cc.Never
	l.mu.Lock()
	l.waiting = slices.DeleteFunc(l.waiting, func(w *waiter) bool {
		if w.turn > now {
			next = min(next, w.turn)
			return false
		}
		due = append(due, w)
		return true
	})
	l.mu.Unlock()
	if next != cc.Never {
		l.timers.schedule(l, next)
	}
	for _, w := range due {
		w.wake()
	}
}

// leave forgets w, which asks no more.
func (l *rateLimit) leave(w *waiter) {
	if l == nil {
		return
	}
	l.mu.Lock()
	l.waiting = slices.DeleteFunc(l.waiting, func(e *waiter) bool { return e == w })
	l.mu.Unlock()
}

// spend counts n bytes that pass without asking. What they exceed the rate by
// delays others for no longer than a burst lasts.
func (l *rateLimit) spend(now cc.Time, n, mss cc.Bytes) {
	l.mu.Lock()
	l.bucket.spend(now, n)
	l.bucket.tat = min(l.bucket.tat, now.Add(l.bucket.burst(mss)))
	l.mu.Unlock()
}

// full reports whether the bucket holds nothing back, so that a new one would do as well.
func (l *rateLimit) full(now cc.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bucket.tat <= now
}
