package flow

import (
	"maps"
	"math"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
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
	datagramShare // guarded by the mutex of home

	closeFunc func(*Datagrams) // the manager's
	key       string
	home      atomic.Pointer[group] // nil while there is none: nobody to give way to
	maxRate   *rateLimit            // of the group; nil: none
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
	return g.takeDatagram(&d.datagramShare, d.maxRate, now, n, sparse)
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

// Close leaves the group.
func (d *Datagrams) Close() { d.closeFunc(d) }

// The parameters of FQ-CoDel: a quantum of one Ethernet frame (RFC 8290 §5.2.1) and
// mac80211's target, for hops that are served in bursts.
const (
	fairQuantum cc.Bytes = 1514
	codelTarget          = 20 * time.Millisecond
)

// A flow is sparse while it takes at most this part of what datagrams usually may,
// measured over sparseOver; two frames always pass for that.
const (
	sparsePart = 1.0 / 3
	sparseOver = 500 * time.Millisecond
)

// QueuedPackets and QueuedBytes are what a gateway lets wait of one peer's datagrams.
const (
	QueuedPackets          = 128
	QueuedBytes   cc.Bytes = QueuedPackets * fairQuantum
)

// meteredFlows is of how many flows a queue knows the rate at once.
const meteredFlows = 256

// FairQueue holds the packets of several flows until the window that they share has
// room: FQ-CoDel (RFC 8290) with a queue for each key instead of a hash. Sparse
// flows come first, the others take turns by deficit round robin, and CoDel
// (RFC 8289) drops from each queue by how long packets stand in it. RFC 8290 tells
// sparse flows by their queues, which are empty once it is their turn. Here nobody
// has a turn while the window is closed, so they are told by their rates. Calls
// must not overlap.
type FairQueue[K comparable, P any] struct {
	window  *Datagrams
	dropped func(P, Drop)

	flows      map[K]*fairFlow[K, P]
	fresh, old fairList[K, P] // those with packets: the sparse ones, the others
	packets    int
	bytes      cc.Bytes
}

// Drop says why a FairQueue dropped a packet.
type Drop uint8

// The reasons.
const (
	DroppedLate     Drop = iota // by CoDel: its flow's queue stood for too long
	DroppedOverflow             // the queue was full, and its flow had the most in it
)

// fairFlow is a flow's queue.
type fairFlow[K comparable, P any] struct {
	key    K
	queue  []fairPacket[P]
	bytes  cc.Bytes
	credit cc.Bytes // of the round robin
	codel  CoDel
	level  cc.Bytes // of a leaky bucket, filled by what the flow sends
	at     cc.Time  // when it was filled last
	sparse bool
	listed bool            // in a list: it has packets, or had some a moment ago
	next   *fairFlow[K, P] // in its list
}

type fairPacket[P any] struct {
	at   cc.Time
	size cc.Bytes
	what P
}

// NewFairQueue returns an empty queue before a window. It calls dropped with each
// packet that it will not return.
func NewFairQueue[K comparable, P any](window *Datagrams, dropped func(P, Drop)) *FairQueue[K, P] {
	return &FairQueue[K, P]{window: window, dropped: dropped, flows: map[K]*fairFlow[K, P]{}}
}

// Len returns how many packets wait, and their bytes.
func (q *FairQueue[K, P]) Len() (packets int, bytes cc.Bytes) { return q.packets, q.bytes }

// Pass reports whether a packet of size bytes of the flow key may go at once, and
// accounts for it. Otherwise it is to be pushed.
func (q *FairQueue[K, P]) Pass(now cc.Time, key K, size cc.Bytes) bool {
	f := q.meterFlow(now, key, size)
	return q.packets == 0 && q.window.Take(now, size, f.sparse)
}

// Push adds a packet that Pass has refused.
func (q *FairQueue[K, P]) Push(now cc.Time, key K, size cc.Bytes, what P) {
	f := q.flows[key]
	if !f.listed {
		f.credit = fairQuantum
		q.listFor(f).pushFlow(f)
	}
	f.queue = append(f.queue, fairPacket[P]{now, size, what})
	f.bytes += size
	q.packets++
	q.bytes += size
}

// meterFlow notes that a flow sends size bytes.
func (q *FairQueue[K, P]) meterFlow(now cc.Time, key K, size cc.Bytes) *fairFlow[K, P] {
	f := q.flows[key]
	if f == nil {
		if len(q.flows) >= meteredFlows {
			maps.DeleteFunc(q.flows, func(_ K, f *fairFlow[K, P]) bool { return len(f.queue) == 0 })
		}
		f = &fairFlow[K, P]{key: key, at: now, codel: CoDel{Target: codelTarget}}
		q.flows[key] = f
	}
	rate := cc.Rate(sparsePart * float64(q.window.Usual()))
	most := max(2*fairQuantum, rate.BytesIn(sparseOver))
	level := max(0, f.level-rate.BytesIn(now.Sub(f.at))) + size
	f.sparse = level <= most
	f.level, f.at = min(level, 2*most), now // so that it is forgotten soon
	return f
}

// listFor is where f belongs.
func (q *FairQueue[K, P]) listFor(f *fairFlow[K, P]) *fairList[K, P] {
	if f.sparse {
		return &q.fresh
	}
	return &q.old
}

// Trim drops packets from the head of the fattest flow's queue until at most so
// many, of at most so many bytes, are left (RFC 8290 §4.1).
func (q *FairQueue[K, P]) Trim(packets int, bytes cc.Bytes) {
	for q.packets > max(packets, 0) || q.packets > 0 && q.bytes > bytes {
		var fattest *fairFlow[K, P]
		for _, list := range [...]fairList[K, P]{q.fresh, q.old} {
			for f := list.head; f != nil; f = f.next {
				if fattest == nil || f.bytes > fattest.bytes {
					fattest = f
				}
			}
		}
		q.dropped(q.takeHead(fattest), DroppedOverflow)
	}
}

// Pop returns the packet that may go now; false: none does.
func (q *FairQueue[K, P]) Pop(now cc.Time) (what P, ok bool) {
	for f := q.nextFlow(); f != nil; f = q.nextFlow() {
		head := f.queue[0]
		if f.codel.Signals(now, now.Sub(head.at), f.bytes-head.size) {
			q.dropped(q.takeHead(f), DroppedLate)
			continue
		}
		if !q.window.Take(now, head.size, f.sparse) {
			return what, false
		}
		f.credit -= head.size
		return q.takeHead(f), true
	}
	return what, false
}

// nextFlow returns the flow whose turn it is (RFC 8290 §4.2); nil: nothing waits.
func (q *FairQueue[K, P]) nextFlow() *fairFlow[K, P] {
	for {
		list := &q.fresh
		if list.head == nil {
			list = &q.old
		}
		f := list.head
		switch {
		case f == nil:
			return nil
		case len(f.queue) == 0:
			list.popFlow()
		case f.credit <= 0:
			f.credit += fairQuantum
			list.popFlow()
			q.listFor(f).pushFlow(f)
		default:
			return f
		}
	}
}

// takeHead removes the head of f's queue.
func (q *FairQueue[K, P]) takeHead(f *fairFlow[K, P]) P {
	p := f.queue[0]
	f.queue[0] = fairPacket[P]{}
	if f.queue = f.queue[1:]; len(f.queue) == 0 {
		f.queue = nil
	}
	f.bytes -= p.size
	q.packets--
	q.bytes -= p.size
	return p.what
}

// fairList is a list of flows, first in, first out.
type fairList[K comparable, P any] struct{ head, tail *fairFlow[K, P] }

func (l *fairList[K, P]) pushFlow(f *fairFlow[K, P]) {
	if l.head == nil {
		l.head = f
	} else {
		l.tail.next = f
	}
	l.tail, f.listed = f, true
}

func (l *fairList[K, P]) popFlow() {
	f := l.head
	l.head, f.next, f.listed = f.next, nil, false
}

// CoDelInterval is the usual interval of CoDel (RFC 8289 §4.2): a long round trip.
const CoDelInterval = 100 * time.Millisecond

// CoDel is the state of RFC 8289 §5 for one queue.
type CoDel struct {
	Target time.Duration // that packets may stand for
	Spare  cc.Bytes      // a queue with no more behind a packet is no standing one

	above      cc.Time // when the delay will have been above the target for an interval; 0: it is not
	next       cc.Time // when to signal again, while signalling
	count      int     // signals since it began
	last       int     // count when it last began
	signalling bool
}

// Signals reports whether the packet at the head, which has waited for sojourn in a
// queue with so many bytes behind it, is to tell its sender of congestion: by a drop
// or, where it allows that, a mark.
func (c *CoDel) Signals(now cc.Time, sojourn time.Duration, behind cc.Bytes) bool {
	if sojourn < c.Target || behind <= c.Spare {
		c.above, c.signalling = 0, false
		return false
	}
	if c.above == 0 {
		c.above = now.Add(CoDelInterval)
	}
	switch {
	case now < c.above:
		c.signalling = false
		return false
	case !c.signalling:
		c.signalling = true
		since := c.count - c.last
		c.count = 1
		if since > 1 && now.Sub(c.next) < 16*CoDelInterval { // it did so a moment ago: go on from there
			c.count = since
		}
		c.last = c.count
		c.next = now
	case now < c.next:
		return false
	default:
		c.count++
	}
	c.next = c.next.Add(time.Duration(float64(CoDelInterval) / math.Sqrt(float64(c.count))))
	return true
}
