package flow

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// unknownRTT is for how long a datagram counts before there is a round trip.
const unknownRTT = 100 * time.Millisecond

// A radio link fades for fractions of a second, and its window with it. Sparse flows
// are not held back by that: they are lent what the usual share is worth over
// debtLasts, and the others make up for it.
const (
	debtLasts = 500 * time.Millisecond
	usualOver = 2 * time.Second // what is usual is smoothed over
)

// Datagrams are bytes in the window of a group that nobody acknowledges: the
// UDP and ICMP of the same peer. What was granted counts for one round trip of
// the flows beside it, and is then taken as gone, at the pace at which theirs
// arrive; they make no event.
//
// They are held back only while one of these flows wants more than it has: what
// a window is worth that nobody wants to fill, nobody knows. Then they have their
// share of it in each round trip, and at least two segments, so that a name is found
// whatever else goes on. Towards that share they fall by half with each round trip,
// which is how fast a flow that starts beside them can grow.
type Datagrams struct {
	mgr   *Manager
	key   string
	share float64
	wake  func()
	home  atomic.Pointer[group] // nil while there is none: nobody to give way to

	maxRate *rateLimit // of the group; nil: none
	turn    cc.Time    // at maxRate, while they wait there; guarded by its mu
	passed  cc.Bytes   // what maxRate has let pass beyond what has gone; likewise

	// Guarded by the mutex of home.
	group   *group
	chunks  []granted // in flight, the oldest first
	loose   cc.Bytes  // their sum
	waiting cc.Bytes  // asked for and refused; 0: nothing
	sparse  bool      // what was refused is of a sparse flow
	own     cc.Bytes  // what they may have in flight while the flows want the window
	room    cc.Bytes  // of that, what they may send now; below 0: what sparse flows were lent
	roomAt  cc.Time   // when own and room were; 0: never
	usual   cc.Rate   // own in each round trip, smoothed; 0: not known
	carry   cc.Bytes  // in flight when they were last free to go
	carryAt cc.Time
}

// granted is what was granted within a short time.
type granted struct {
	at cc.Time
	n  cc.Bytes
}

// OpenDatagrams adds datagrams to the group that t leads to; of its window
// they get share at most (above 0, up to 1) while its flows want it, and of a maximum
// rate what the flows leave. wake is called as a flow's is.
func (m *Manager) OpenDatagrams(now cc.Time, t Terms, share float64, wake func()) (*Datagrams, error) {
	if !(share > 0 && share <= 1) {
		return nil, fmt.Errorf("flow: datagrams' share %v is not above 0 and up to 1", share)
	}
	r, err := t.resolve()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &Datagrams{mgr: m, key: r.key, share: share, wake: wake, maxRate: m.rateLimit(now, t)}
	if m.datagrams == nil {
		m.datagrams = map[string][]*Datagrams{}
	}
	m.datagrams[d.key] = append(m.datagrams[d.key], d)
	if g := m.groups[d.key]; g != nil {
		g.mu.Lock()
		g.accompany(m.datagrams[d.key])
		g.mu.Unlock()
	}
	return d, nil
}

// accompany has all go beside g; none where g is forgotten. The caller holds g.mu
// and the manager's.
func (g *group) accompany(all []*Datagrams) {
	for _, d := range g.datagrams {
		d.home.Store(nil)
	}
	g.datagrams = append(g.datagrams[:0], all...)
	for _, d := range g.datagrams {
		d.group = g
		d.home.Store(g)
	}
}

// lock returns d's group, locked; nil if there is none.
func (d *Datagrams) lock() *group {
	for {
		g := d.home.Load()
		if g == nil {
			return nil
		}
		g.mu.Lock()
		if d.home.Load() == g {
			return g
		}
		g.mu.Unlock() // it has been forgotten in the meantime
	}
}

// Take asks to send a datagram of n bytes and accounts for it if it may go. One of
// a sparse flow may be lent room. After a refusal wake is called when asking again
// may help.
func (d *Datagrams) Take(now cc.Time, n cc.Bytes, sparse bool) bool {
	g := d.lock()
	if g == nil {
		return d.maxRate.takeDatagram(now, d, n, sparse)
	}
	defer g.unlock(now)
	d.retire(now)
	d.refill(now)
	wanted := g.wanted(now)
	if wanted && !d.fits(n, sparse) {
		d.waiting, d.sparse = n, sparse
		g.cwndFullAt = now
		g.timers.schedule(g, d.next(now))
		return false
	}
	d.waiting = 0
	if !d.maxRate.takeDatagram(now, d, n, sparse) {
		return false
	}
	if !wanted {
		d.carry, d.carryAt = d.loose+n, now
	} else {
		d.room = max(d.room-n, -d.mayOwe())
	}
	d.count(now, n)
	g.changed = true // the flows make room
	return true
}

// Usual is the rate of the datagrams' share, smoothed over some seconds; 0: not known.
func (d *Datagrams) Usual() cc.Rate {
	g := d.lock()
	if g == nil {
		return 0
	}
	defer g.mu.Unlock()
	return d.usual
}

// count counts n bytes in flight that leave now.
func (d *Datagrams) count(now cc.Time, n cc.Bytes) {
	if last := len(d.chunks) - 1; last >= 0 && now.Sub(d.chunks[last].at) < d.lasts()/16 {
		d.chunks[last].n += n
	} else {
		d.chunks = append(d.chunks, granted{now, n})
	}
	d.loose += n
	d.planRetiring()
}

// planRetiring has the group's tick come when what left first is gone.
func (d *Datagrams) planRetiring() {
	if len(d.chunks) > 0 {
		d.group.timers.schedule(d.group, d.chunks[0].at.Add(d.lasts()))
	}
}

// lasts is for how long a datagram counts.
func (d *Datagrams) lasts() time.Duration {
	if rtt := d.group.rtt.srtt; rtt > 0 {
		return rtt
	}
	return unknownRTT
}

// retire takes what left a round trip ago as gone.
func (d *Datagrams) retire(now cc.Time) {
	old, lasts := 0, d.lasts()
	for old < len(d.chunks) && now.Sub(d.chunks[old].at) >= lasts {
		d.loose -= d.chunks[old].n
		old++
	}
	if old > 0 {
		d.chunks = append(d.chunks[:0], d.chunks[old:]...)
		d.group.changed = true // the flows have the window back
	}
}

// next is when what was refused may fit, by time alone.
func (d *Datagrams) next(now cc.Time) cc.Time {
	at := now.Add(d.lasts())
	if len(d.chunks) > 0 {
		at = min(at, d.chunks[0].at.Add(d.lasts()))
	}
	if rate := cc.RateOf(d.own, d.lasts()); rate > 0 {
		at = min(at, now.Add(rate.TimeFor(min(d.waiting, d.own)-d.room)))
	}
	return max(at, now.Add(leastTick))
}

// due is d's share of what the members can use of the window: a pacer may not let
// them fill it.
func (d *Datagrams) due() cc.Bytes {
	g := d.group
	return cc.Bytes(d.share * float64(g.ctl.Cwnd-g.unpaced()))
}

// allowance is how much may be in flight while the flows want the window.
func (d *Datagrams) allowance(now cc.Time) cc.Bytes {
	g := d.group
	due := d.due()
	if halvings := now.Sub(d.carryAt) / d.lasts(); halvings < 32 {
		due = max(due, d.carry>>uint(halvings))
	}
	beside := cc.Bytes(0) // from others, which have as much by right
	for _, e := range g.datagrams {
		if e != d {
			e.retire(now)
			beside += e.loose
		}
	}
	return max(due-beside, due/cc.Bytes(len(g.datagrams)))
}

// refill adds to room what the time since the last call is worth: all of it in each
// round trip, evenly, so that what waits does not leave in bursts.
func (d *Datagrams) refill(now cc.Time) {
	if d.group.alg == nil {
		return // nothing is known of the path
	}
	d.own = d.allowance(now)
	rate := cc.RateOf(d.own, d.lasts())
	if d.roomAt == 0 {
		d.room, d.usual = d.own, rate
	} else {
		elapsed := now.Sub(d.roomAt)
		d.room += min(rate.BytesIn(elapsed), d.own-d.room)
		d.usual += cc.Rate(float64(rate-d.usual) * min(1, elapsed.Seconds()/usualOver.Seconds()))
	}
	d.roomAt = now
}

// fits reports whether n more bytes may go while the flows want the window.
func (d *Datagrams) fits(n cc.Bytes, sparse bool) bool {
	g := d.group
	if g.alg == nil || d.loose+n <= floorSegments*g.mss { // nothing is known of the path yet, or little asked
		return true
	}
	room := d.room
	if sparse {
		room += d.mayOwe()
	}
	return room >= min(n, d.own) // one that is larger than all goes when nothing else does
}

// mayOwe is what sparse flows may be lent.
func (d *Datagrams) mayOwe() cc.Bytes { return d.usual.BytesIn(debtLasts) }

// Close leaves the group.
func (d *Datagrams) Close() {
	d.mgr.mu.Lock()
	defer d.mgr.mu.Unlock()
	d.maxRate.leave(d)
	d.mgr.release(0, d.maxRate)
	rest := slices.DeleteFunc(d.mgr.datagrams[d.key], func(e *Datagrams) bool { return e == d })
	d.mgr.datagrams[d.key] = rest
	if len(rest) == 0 {
		delete(d.mgr.datagrams, d.key)
	}
	if g := d.mgr.groups[d.key]; g != nil {
		g.mu.Lock()
		g.accompany(rest)
		g.changed = true // the flows have the window back
		g.timers.schedule(g.group, 0)
		g.mu.Unlock()
	}
}

// wanted reports whether a member wants more of the window than it has, or did
// within the last round trip: a relay reads between two writes. One that waits for
// its retransmission timer does not ask, but has not given up the window.
func (g *group) wanted(now cc.Time) bool {
	if g.wantedAt != 0 && now.Sub(g.wantedAt) <= max(g.rtt.srtt, leastTick) {
		return true
	}
	return slices.ContainsFunc(g.alloc.members, func(m *member) bool { return m.contends(now, &g.rtt) || m.timedOut })
}

// lent is what datagrams have in flight of the window, with those that wait or not.
func (g *group) lent(waiting bool) cc.Bytes {
	var loose, most cc.Bytes
	for _, d := range g.datagrams {
		loose += d.loose
		if waiting {
			loose += d.waiting
		}
		most = max(most, d.due())
	}
	return min(loose, most)
}

// alongside is how many bytes of datagrams in the window have been delivered
// while acked bytes of the members were: on one path both fare alike. An algorithm
// that took the members' rate for the path's would give the datagrams their share
// of that, and then of what is left; and one that grows by what is acknowledged
// would hardly do so beside many of them.
func (g *group) alongside(now cc.Time, acked cc.Bytes) cc.Bytes {
	if len(g.datagrams) == 0 {
		return 0
	}
	for _, d := range g.datagrams {
		d.retire(now)
	}
	return cc.Bytes(float64(acked) / float64(g.inflight+acked) * float64(g.lent(false)))
}

// wakeDatagrams wakes the datagrams that may go now.
func (g *group) wakeDatagrams(now cc.Time) {
	for _, d := range g.datagrams {
		d.retire(now)
		d.planRetiring()
		if d.waiting == 0 {
			continue
		}
		d.refill(now)
		if g.wanted(now) && !d.fits(d.waiting, d.sparse) {
			g.timers.schedule(g, d.next(now))
			continue
		}
		d.waiting = 0
		d.wake()
	}
}
