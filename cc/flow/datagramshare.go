package flow

import (
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

// datagramShare is the part of a group's window that some datagrams use beside its members.
// The group's mutex guards it.
type datagramShare struct {
	waiter
	share   float64   // of the window, at most, while members want it
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

// datagramWindow is what a group's window is to the datagrams beside its members at one moment.
type datagramWindow struct {
	known  bool          // something is known of the path: the algorithm has started
	usable cc.Bytes      // what the members can fill of the window
	mss    cc.Bytes      // of the members
	lasts  time.Duration // how long a datagram counts as in flight
	all    []*datagramShare
}

// shareOfWindow is d's part of what the members can use of the window.
func (d *datagramShare) shareOfWindow(w *datagramWindow) cc.Bytes {
	return cc.Bytes(d.share * float64(w.usable))
}

// addInflight counts n bytes in flight that leave now.
func (d *datagramShare) addInflight(now cc.Time, n cc.Bytes, w *datagramWindow) {
	if last := len(d.chunks) - 1; last >= 0 && now.Sub(d.chunks[last].at) < w.lasts/16 {
		d.chunks[last].n += n
	} else {
		d.chunks = append(d.chunks, granted{now, n})
	}
	d.loose += n
}

// nextRetirement is when what left first is gone; false: nothing is in flight.
func (d *datagramShare) nextRetirement(w *datagramWindow) (at cc.Time, ok bool) {
	if len(d.chunks) == 0 {
		return 0, false
	}
	return d.chunks[0].at.Add(w.lasts), true
}

// retireOld takes what left a round trip ago as gone, and reports whether anything did.
func (d *datagramShare) retireOld(now cc.Time, w *datagramWindow) bool {
	old := 0
	for old < len(d.chunks) && now.Sub(d.chunks[old].at) >= w.lasts {
		d.loose -= d.chunks[old].n
		old++
	}
	if old > 0 {
		d.chunks = append(d.chunks[:0], d.chunks[old:]...)
	}
	return old > 0
}

// nextTryAt is when what was refused may fit, by time alone.
func (d *datagramShare) nextTryAt(now cc.Time, w *datagramWindow) cc.Time {
	at := now.Add(w.lasts)
	if gone, ok := d.nextRetirement(w); ok {
		at = min(at, gone)
	}
	if rate := cc.RateOf(d.own, w.lasts); rate > 0 {
		at = min(at, now.Add(rate.TimeFor(min(d.waiting, d.own)-d.room)))
	}
	return max(at, now.Add(leastTick))
}

// allowedInflight is how much may be in flight while the members want the window. What left a round trip ago is
// retired before.
func (d *datagramShare) allowedInflight(now cc.Time, w *datagramWindow) cc.Bytes {
	due := d.shareOfWindow(w)
	if halvings := now.Sub(d.carryAt) / w.lasts; halvings < 32 {
		due = max(due, d.carry>>uint(halvings))
	}
	beside := cc.Bytes(0) // from others, which have as much by right
	for _, e := range w.all {
		if e != d {
			beside += e.loose
		}
	}
	return max(due-beside, due/cc.Bytes(len(w.all)))
}

// refillRoom adds to room what the time since the last call is worth: all of it in each
// round trip, evenly, so that what waits does not leave in bursts.
func (d *datagramShare) refillRoom(now cc.Time, w *datagramWindow) {
	if !w.known {
		return
	}
	d.own = d.allowedInflight(now, w)
	rate := cc.RateOf(d.own, w.lasts)
	if d.roomAt == 0 {
		d.room, d.usual = d.own, rate
	} else {
		elapsed := now.Sub(d.roomAt)
		d.room += min(rate.BytesIn(elapsed), d.own-d.room)
		d.usual += cc.Rate(float64(rate-d.usual) * min(1, elapsed.Seconds()/usualOver.Seconds()))
	}
	d.roomAt = now
}

// mayGo reports whether n more bytes may go while the members want the window.
func (d *datagramShare) mayGo(n cc.Bytes, sparse bool, w *datagramWindow) bool {
	if !w.known || d.loose+n <= floorSegments*w.mss { // nothing is known of the path yet, or little asked
		return true
	}
	room := d.room
	if sparse {
		room += d.lendingBound()
	}
	return room >= min(n, d.own) // one that is larger than all goes when nothing else does
}

// lendingBound is what sparse flows may be lent.
func (d *datagramShare) lendingBound() cc.Bytes { return d.usual.BytesIn(debtLasts) }
