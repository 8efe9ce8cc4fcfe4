package flow

import (
	"slices"
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

// setDatagrams has all go beside g; none where g is forgotten. The caller holds g.mu
// and the manager's.
func (g *group) setDatagrams(all []*Datagrams) {
	for _, d := range g.datagrams {
		d.home.Store(nil)
	}
	g.datagrams = append(g.datagrams[:0], all...)
	for _, d := range g.datagrams {
		d.group = g
		d.home.Store(g)
	}
}

// lockGroup returns d's group, locked; nil if there is none.
func (d *Datagrams) lockGroup() *group {
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
	g := d.lockGroup()
	if g == nil {
		return d.maxRate.takeDatagram(now, &d.waiter, n, sparse)
	}
	defer g.divideAndUnlock(now)
	d.retireOld(now)
	d.refillRoom(now)
	wanted := g.membersWantWindow(now)
	if wanted && !d.mayGo(n, sparse) {
		d.waiting, d.sparse = n, sparse
		g.cwndFullAt = now
		g.timers.scheduleAt(g, d.nextTryAt(now))
		return false
	}
	d.waiting = 0
	if !d.maxRate.takeDatagram(now, &d.waiter, n, sparse) {
		return false
	}
	if !wanted {
		d.carry, d.carryAt = d.loose+n, now
	} else {
		d.room = max(d.room-n, -d.lendingBound())
	}
	d.addInflight(now, n)
	g.changed = true // the flows make room
	return true
}

// Usual is the rate of the datagrams' share, smoothed over some seconds; 0: not known.
func (d *Datagrams) Usual() cc.Rate {
	g := d.lockGroup()
	if g == nil {
		return 0
	}
	defer g.mu.Unlock()
	return d.usual
}

// addInflight counts n bytes in flight that leave now.
func (d *Datagrams) addInflight(now cc.Time, n cc.Bytes) {
	if last := len(d.chunks) - 1; last >= 0 && now.Sub(d.chunks[last].at) < d.inflightTime()/16 {
		d.chunks[last].n += n
	} else {
		d.chunks = append(d.chunks, granted{now, n})
	}
	d.loose += n
	d.scheduleRetiring()
}

// scheduleRetiring has the group's tick come when what left first is gone.
func (d *Datagrams) scheduleRetiring() {
	if len(d.chunks) > 0 {
		d.group.timers.scheduleAt(d.group, d.chunks[0].at.Add(d.inflightTime()))
	}
}

// inflightTime is for how long a datagram counts.
func (d *Datagrams) inflightTime() time.Duration {
	if rtt := d.group.rtt.srtt; rtt > 0 {
		return rtt
	}
	return unknownRTT
}

// retireOld takes what left a round trip ago as gone.
func (d *Datagrams) retireOld(now cc.Time) {
	old, lasts := 0, d.inflightTime()
	for old < len(d.chunks) && now.Sub(d.chunks[old].at) >= lasts {
		d.loose -= d.chunks[old].n
		old++
	}
	if old > 0 {
		d.chunks = append(d.chunks[:0], d.chunks[old:]...)
		d.group.changed = true // the flows have the window back
	}
}

// nextTryAt is when what was refused may fit, by time alone.
func (d *Datagrams) nextTryAt(now cc.Time) cc.Time {
	at := now.Add(d.inflightTime())
	if len(d.chunks) > 0 {
		at = min(at, d.chunks[0].at.Add(d.inflightTime()))
	}
	if rate := cc.RateOf(d.own, d.inflightTime()); rate > 0 {
		at = min(at, now.Add(rate.TimeFor(min(d.waiting, d.own)-d.room)))
	}
	return max(at, now.Add(leastTick))
}

// allowedInflight is how much may be in flight while the flows want the window.
func (d *Datagrams) allowedInflight(now cc.Time) cc.Bytes {
	g := d.group
	due := d.shareOfWindow()
	if halvings := now.Sub(d.carryAt) / d.inflightTime(); halvings < 32 {
		due = max(due, d.carry>>uint(halvings))
	}
	beside := cc.Bytes(0) // from others, which have as much by right
	for _, e := range g.datagrams {
		if e != d {
			e.retireOld(now)
			beside += e.loose
		}
	}
	return max(due-beside, due/cc.Bytes(len(g.datagrams)))
}

// refillRoom adds to room what the time since the last call is worth: all of it in each
// round trip, evenly, so that what waits does not leave in bursts.
func (d *Datagrams) refillRoom(now cc.Time) {
	if d.group.alg == nil {
		return // nothing is known of the path
	}
	d.own = d.allowedInflight(now)
	rate := cc.RateOf(d.own, d.inflightTime())
	if d.roomAt == 0 {
		d.room, d.usual = d.own, rate
	} else {
		elapsed := now.Sub(d.roomAt)
		d.room += min(rate.BytesIn(elapsed), d.own-d.room)
		d.usual += cc.Rate(float64(rate-d.usual) * min(1, elapsed.Seconds()/usualOver.Seconds()))
	}
	d.roomAt = now
}

// mayGo reports whether n more bytes may go while the flows want the window.
func (d *Datagrams) mayGo(n cc.Bytes, sparse bool) bool {
	g := d.group
	if g.alg == nil || d.loose+n <= floorSegments*g.mss { // nothing is known of the path yet, or little asked
		return true
	}
	room := d.room
	if sparse {
		room += d.lendingBound()
	}
	return room >= min(n, d.own) // one that is larger than all goes when nothing else does
}

// lendingBound is what sparse flows may be lent.
func (d *Datagrams) lendingBound() cc.Bytes { return d.usual.BytesIn(debtLasts) }

// membersWantWindow reports whether a member wants more of the window than it has, or did
// within the last round trip: a relay reads between two writes. One that waits for
// its retransmission timer does not ask, but has not given up the window.
func (g *group) membersWantWindow(now cc.Time) bool {
	if g.wantedAt != 0 && now.Sub(g.wantedAt) <= max(g.rtt.srtt, leastTick) {
		return true
	}
	return slices.ContainsFunc(g.alloc.members, func(m *member) bool { return m.wantsMore(now, &g.rtt) || m.timedOut })
}

// datagramsDelivered is how many bytes of datagrams in the window have been delivered
// while acked bytes of the members were: on one path both fare alike. An algorithm
// that took the members' rate for the path's would give the datagrams their share
// of that, and then of what is left; and one that grows by what is acknowledged
// would hardly do so beside many of them.
func (g *group) datagramsDelivered(now cc.Time, acked cc.Bytes) cc.Bytes {
	if len(g.datagrams) == 0 {
		return 0
	}
	for _, d := range g.datagrams {
		d.retireOld(now)
	}
	return cc.Bytes(float64(acked) / float64(g.inflight+acked) * float64(g.datagramBytes(false)))
}

// wakeDatagrams wakes the datagrams that may go now.
func (g *group) wakeDatagrams(now cc.Time) {
	for _, d := range g.datagrams {
		d.retireOld(now)
		d.scheduleRetiring()
		if d.waiting == 0 {
			continue
		}
		d.refillRoom(now)
		if g.membersWantWindow(now) && !d.mayGo(d.waiting, d.sparse) {
			g.timers.scheduleAt(g, d.nextTryAt(now))
			continue
		}
		d.waiting = 0
		d.wake(now)
	}
}

// Close leaves the group.
func (d *Datagrams) Close() { d.closeFunc(d) }
