package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// unknownRTT is how long a datagram counts as in flight before a round trip is known.
const unknownRTT = 100 * time.Millisecond

// A radio link fades for fractions of a second, and its window with it. Sparse flows are not held back by that: they
// may borrow what the usual share is worth during loanTime, and the other datagrams make up for it.
const (
	loanTime      = 500 * time.Millisecond
	usualRateTime = 2 * time.Second // over which the usual share is smoothed
)

// datagramShare counts the part of a group's window that some datagrams use beside its members. What leaves counts for
// one round trip. The quota, what may be in flight while members want the window, falls by half with each round trip
// towards the share: a flow that starts beside the datagrams cannot grow faster. The group's mutex guards it.
type datagramShare struct {
	waiter                         // at the maximum rate; its wake is called when refused datagrams may go
	share          float64         // most of the window while members want it, above 0 and up to 1
	chunks         []sentDatagrams // in flight, the oldest first
	inflight       cc.Bytes        // sum of chunks
	refused        cc.Bytes        // size of the datagram that waits for room; 0: none waits
	refusedSparse  bool            // it is of a sparse flow
	quota          cc.Bytes        // what may be in flight while members want the window
	credit         cc.Bytes        // part of quota that may be sent now; below 0: what sparse flows have borrowed
	creditAt       cc.Time         // when quota and credit were computed; 0: never
	usualRate      cc.Rate         // quota per round trip, smoothed; 0: not known
	freeInflight   cc.Bytes        // inflight when no member wanted the window
	freeInflightAt cc.Time
}

// sentDatagrams are the bytes granted within a short time.
type sentDatagrams struct {
	at cc.Time
	n  cc.Bytes
}

// datagramWindow is a group's window as the datagrams beside its members see it at one moment.
type datagramWindow struct {
	known    bool          // the algorithm has started, so something is known of the path
	usable   cc.Bytes      // the part of the window that the pacing rate lets members fill
	mss      cc.Bytes      // of the members
	lifetime time.Duration // how long a datagram counts as in flight: a round trip
	all      []*datagramShare
}

// shareOfWindow returns d's share in bytes.
func (d *datagramShare) shareOfWindow(w *datagramWindow) cc.Bytes {
	return cc.Bytes(d.share * float64(w.usable))
}

// addInflight counts n bytes in flight that leave now.
func (d *datagramShare) addInflight(now cc.Time, n cc.Bytes, w *datagramWindow) {
	if last := len(d.chunks) - 1; last >= 0 && now.Sub(d.chunks[last].at) < w.lifetime/16 {
		d.chunks[last].n += n
	} else {
		d.chunks = append(d.chunks, sentDatagrams{now, n})
	}
	d.inflight += n
}

// nextRetirement returns when the oldest bytes count no more; false: nothing is in flight.
func (d *datagramShare) nextRetirement(w *datagramWindow) (at cc.Time, ok bool) {
	if len(d.chunks) == 0 {
		return 0, false
	}
	return d.chunks[0].at.Add(w.lifetime), true
}

// retireOld drops what left a round trip ago, and reports whether there was any.
func (d *datagramShare) retireOld(now cc.Time, w *datagramWindow) bool {
	old := 0
	for old < len(d.chunks) && now.Sub(d.chunks[old].at) >= w.lifetime {
		d.inflight -= d.chunks[old].n
		old++
	}
	if old > 0 {
		d.chunks = append(d.chunks[:0], d.chunks[old:]...)
	}
	return old > 0
}

// nextTryAt returns when a refused datagram may fit through the passing of time alone.
func (d *datagramShare) nextTryAt(now cc.Time, w *datagramWindow) cc.Time {
	at := now.Add(w.lifetime)
	if gone, ok := d.nextRetirement(w); ok {
		at = min(at, gone)
	}
	if rate := cc.RateOf(d.quota, w.lifetime); rate > 0 {
		at = min(at, now.Add(rate.TimeFor(min(d.refused, d.quota)-d.credit)))
	}
	return max(at, now.Add(leastTick))
}

// allowedInflight returns what may be in flight while members want the window. Call retireOld first. Other datagrams
// have equal rights, so what they have in flight is subtracted, down to an equal part.
func (d *datagramShare) allowedInflight(now cc.Time, w *datagramWindow) cc.Bytes {
	due := d.shareOfWindow(w)
	if halvings := now.Sub(d.freeInflightAt) / w.lifetime; halvings < 32 {
		due = max(due, d.freeInflight>>uint(halvings))
	}
	beside := cc.Bytes(0) // what the others have in flight
	for _, e := range w.all {
		if e != d {
			beside += e.inflight
		}
	}
	return max(due-beside, due/cc.Bytes(len(w.all)))
}

// refillCredit adds to credit what the time since the last call is worth: the quota per round trip, evenly, so that
// what waits does not leave in bursts.
func (d *datagramShare) refillCredit(now cc.Time, w *datagramWindow) {
	if !w.known {
		return
	}
	d.quota = d.allowedInflight(now, w)
	rate := cc.RateOf(d.quota, w.lifetime)
	if d.creditAt == 0 {
		d.credit, d.usualRate = d.quota, rate
	} else {
		elapsed := now.Sub(d.creditAt)
		d.credit += min(rate.BytesIn(elapsed), d.quota-d.credit)
		d.usualRate += cc.Rate(float64(rate-d.usualRate) * min(1, elapsed.Seconds()/usualRateTime.Seconds()))
	}
	d.creditAt = now
}

// hasRoom reports whether n more bytes may go while members want the window. Two segments always may, so that names
// are resolved whatever else goes on.
func (d *datagramShare) hasRoom(n cc.Bytes, sparse bool, w *datagramWindow) bool {
	if !w.known || d.inflight+n <= floorSegments*w.mss {
		return true
	}
	room := d.credit
	if sparse {
		room += d.maxLoan()
	}
	return room >= min(n, d.quota) // one larger than the quota goes when nothing else is in flight
}

// maxLoan returns what sparse flows may borrow.
func (d *datagramShare) maxLoan() cc.Bytes { return d.usualRate.BytesIn(loanTime) }
