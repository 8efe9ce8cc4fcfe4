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
	tail    cc.Time      // the newest turn that was given
	waiting []*Datagrams // those that wait for their turns
}

// limitKey tells rateLimits apart.
type limitKey struct {
	group string
	rate  cc.Rate
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

// takeDatagram lets a datagram of n bytes pass, or has d woken in its turn. One of a
// sparse flow does not wait for a turn. Without a limit all pass.
func (l *rateLimit) takeDatagram(now cc.Time, d *Datagrams, n cc.Bytes, sparse bool) bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	if sparse && l.bucket.tat <= now.Add(sparseAhead) {
		l.bucket.spend(now, n)
		l.mu.Unlock()
		return true
	}
	if d.passed < n { // a turn lets as much pass as one of a flow
		segment := max(n, cc.DefaultMSS)
		d.passed, d.turn = l.take(now, l.bucket.rate.BytesIn(l.bucket.burst(segment)), n, segment, d.turn)
	}
	passes, turn := d.passed >= n, d.turn
	if passes {
		d.passed -= n
	} else if !slices.Contains(l.waiting, d) {
		l.waiting = append(l.waiting, d)
	}
	l.mu.Unlock()
	if !passes {
		l.timers.schedule(l, turn)
	}
	return passes
}

// tick wakes the datagrams whose turns have come.
func (l *rateLimit) tick(now cc.Time) {
	var due []*Datagrams
	next := cc.Never
	l.mu.Lock()
	l.waiting = slices.DeleteFunc(l.waiting, func(d *Datagrams) bool {
		if d.turn > now {
			next = min(next, d.turn)
			return false
		}
		due = append(due, d)
		return true
	})
	l.mu.Unlock()
	if next != cc.Never {
		l.timers.schedule(l, next)
	}
	for _, d := range due {
		d.wake()
	}
}

// leave forgets d, which asks no more.
func (l *rateLimit) leave(d *Datagrams) {
	if l == nil {
		return
	}
	l.mu.Lock()
	l.waiting = slices.DeleteFunc(l.waiting, func(e *Datagrams) bool { return e == d })
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

// limitTo has f keep to l; nil: to none. The caller holds the mutex of f's group,
// if it has one.
func (f *Flow) limitTo(l *rateLimit) {
	f.maxRate = l
	f.limited.Store(l != nil)
}

// rateLimit returns the one that t leads to, counted as used once more; nil if t
// has none. The caller holds m.mu.
func (m *Manager) rateLimit(now cc.Time, t Terms) *rateLimit {
	m.forgetLimits(now)
	if t.MaxRate == 0 {
		return nil
	}
	key := limitKey{t.Group, t.MaxRate}
	l := m.limits[key]
	if l == nil {
		if m.limits == nil {
			m.limits = map[limitKey]*rateLimit{}
		}
		l = &rateLimit{timers: m.shard(0), key: key, bucket: pacer{rate: cc.Rate(rateLimitSlack * float64(t.MaxRate)), most: limitBurst}}
		m.limits[key] = l
	}
	l.users.Add(1)
	return l
}

// release undoes one call of rateLimit. A rateLimit without users is kept until its
// bucket is full: a client that opens a connection for each object gains nothing. The
// caller holds m.mu.
func (m *Manager) release(now cc.Time, l *rateLimit) {
	if l != nil && l.users.Add(-1) == 0 {
		m.unused = append(m.unused, l)
	}
	m.forgetLimits(now)
}

// forgetLimits drops the rateLimits that have no users and a full bucket. The caller
// holds m.mu.
func (m *Manager) forgetLimits(now cc.Time) {
	kept := m.unused[:0]
	for _, l := range m.unused {
		switch {
		case l.users.Load() > 0:
		case l.full(now):
			delete(m.limits, l.key)
		default:
			kept = append(kept, l)
		}
	}
	clear(m.unused[len(kept):])
	m.unused = kept
}
