package flow

import (
	"maps"
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// fairQuantum is the quantum of FQ-CoDel: one Ethernet frame (RFC 8290 §5.2.1).
const fairQuantum cc.Bytes = 1514

// Targets of CoDel: for which packets of a flow may stand in its queue.
const (
	// queueTargetLeast leaves senders enough packets in the queue to fill a radio link when it becomes faster. Only the
	// flow itself waits there: the path behind has no queue of it.
	queueTargetLeast = 60 * time.Millisecond
	queueTargetMost  = 300 * time.Millisecond
	// shallowTarget is for packets that say ECT(1): their senders want marks early and answer them gently (RFC 9331).
	shallowTarget = 5 * time.Millisecond
	// Packets that say ECT and stand for excessTargets although they are marked have a sender that ignores marks, and
	// are dropped (RFC 8290 §9).
	excessTargets = 2
)

// A flow is sparse while it uses at most sparseShare of what packets usually get, measured over sparseTime. Two
// frames are always sparse. Flows that began within sparseTime are so together, as one flow: a flood from many ports
// would be sparse otherwise.
const (
	sparseShare = 1.0 / 3
	sparseTime  = 500 * time.Millisecond
)

// QueuedPackets and QueuedBytes bound what waits for one host.
const (
	QueuedPackets          = 1024
	QueuedBytes   cc.Bytes = 1 << 20
)

// Above meteredFlows a queue forgets flows without packets that are silent or new, every forgetEvery; at
// maxMeteredFlows all without packets.
const (
	meteredFlows    = 256
	maxMeteredFlows = 8 * meteredFlows
	forgetEvery     = 50 * time.Millisecond
)

// FairQueue queues the packets of several flows until the window that they share has room: FQ-CoDel (RFC 8290) with a
// queue for each key instead of a hash. Sparse flows come first, the others take turns by deficit round robin, and
// CoDel (RFC 8289) drops from each queue by how long packets stand in it. RFC 8290 recognizes sparse flows by a queue
// that is empty at their turn. Here no flow has a turn while the window is closed, so sparse flows are recognized by
// their rate. Calls must not overlap.
type FairQueue[K comparable, P any] struct {
	cfg QueueConfig[P]

	flows       map[K]*fairFlow[K, P]
	sparseFlows fairList[K, P] // with packets
	otherFlows  fairList[K, P] // with packets
	newcomers   sparseMeter    // of the sparse flows that began within sparseTime
	forgotAt    cc.Time        // when flows were forgotten last
	packets     int
	bytes       cc.Bytes
}

// QueueConfig says what a FairQueue stands in front of. Window and Dropped are required.
type QueueConfig[P any] struct {
	Window  PacketWindow
	Dropped func(P, Drop) // called with each packet that the queue will not return
	// ECN returns the codepoint of a packet, and Mark sets it to CE: where CoDel would drop a packet that says ECT, it is
	// marked instead (RFC 3168 §5). nil: packets are dropped.
	ECN  func(P) ECN
	Mark func(*P)
}

// ECN is a codepoint of the IP header (RFC 3168 §5).
type ECN uint8

// The codepoints.
const (
	NotECT ECN = iota
	ECT1
	ECT0
	CE
)

// Drop is why a FairQueue dropped a packet.
type Drop uint8

// The reasons of a Drop.
const (
	DroppedLate     Drop = iota // by CoDel: the flow's queue stood for too long
	DroppedOverflow             // the queue was full, and this flow had the most in it
)

// fairFlow is a flow's queue.
type fairFlow[K comparable, P any] struct {
	key    K
	queue  []fairPacket[P]
	bytes  cc.Bytes
	credit cc.Bytes // of the round robin
	codel  CoDel
	excess CoDel   // of packets that say ECT
	since  cc.Time // when its first packet came
	meter  sparseMeter
	busy   bool // by itself, it is not sparse
	sparse bool
	listed bool            // it is in a list: it has packets, or had some a moment ago
	next   *fairFlow[K, P] // in its list
}

// sparseMeter is a leaky bucket that measures a rate.
type sparseMeter struct {
	level cc.Bytes
	at    cc.Time // when it was computed
}

// addBytes measures size bytes and reports whether they are sparse, where rate always is.
func (m *sparseMeter) addBytes(now cc.Time, size cc.Bytes, rate cc.Rate) (isSparse bool) {
	most := max(2*fairQuantum, rate.BytesIn(sparseTime))
	level := max(0, m.level-rate.BytesIn(now.Sub(m.at))) + size
	m.level, m.at = min(level, 2*most), now // bounded, so that a flow can become sparse again soon
	return level <= most
}

// fairPacket is a packet that waits.
type fairPacket[P any] struct {
	at      cc.Time // when it came
	size    cc.Bytes
	payload P
}

// NewFairQueue returns an empty queue.
func NewFairQueue[K comparable, P any](cfg QueueConfig[P]) *FairQueue[K, P] {
	return &FairQueue[K, P]{cfg: cfg, flows: map[K]*fairFlow[K, P]{}}
}

// Len returns the number of packets that wait, and their bytes.
func (q *FairQueue[K, P]) Len() (packets int, bytes cc.Bytes) { return q.packets, q.bytes }

// HasPackets reports whether packets of a flow wait.
func (q *FairQueue[K, P]) HasPackets(key K) bool {
	f := q.flows[key]
	return f != nil && len(f.queue) > 0
}

// Pass reports whether a packet of size bytes of the flow key may go at once, and counts it if so. Otherwise Push it.
func (q *FairQueue[K, P]) Pass(now cc.Time, key K, size cc.Bytes) bool {
	f := q.meterFlow(now, key, size)
	return q.packets == 0 && q.cfg.Window.Take(now, size, f.sparse)
}

// Push queues a packet that Pass has refused.
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

// meterFlow measures size bytes of a flow, and decides whether the flow is sparse.
func (q *FairQueue[K, P]) meterFlow(now cc.Time, key K, size cc.Bytes) *fairFlow[K, P] {
	f := q.flows[key]
	if f == nil {
		if len(q.flows) >= meteredFlows {
			q.forgetFlows(now, len(q.flows) >= maxMeteredFlows)
		}
		f = &fairFlow[K, P]{key: key, since: now}
		f.meter.at = now
		q.flows[key] = f
	}
	rate := cc.Rate(sparseShare * float64(q.cfg.Window.UsualRate()))
	f.sparse = f.meter.addBytes(now, size, rate)
	f.busy = !f.sparse
	if f.sparse && rate > 0 && now.Sub(f.since) < sparseTime {
		f.sparse = q.newcomers.addBytes(now, size, rate)
	}
	return f
}

// forgetFlows forgets flows without packets: those that are silent or new, or all.
func (q *FairQueue[K, P]) forgetFlows(now cc.Time, all bool) {
	if !all && now.Sub(q.forgotAt) < forgetEvery {
		return
	}
	q.forgotAt = now
	maps.DeleteFunc(q.flows, func(_ K, f *fairFlow[K, P]) bool {
		return len(f.queue) == 0 && (all || now.Sub(f.meter.at) >= sparseTime || now.Sub(f.since) < sparseTime)
	})
}

// listFor returns the list that f belongs to.
func (q *FairQueue[K, P]) listFor(f *fairFlow[K, P]) *fairList[K, P] {
	if f.sparse {
		return &q.sparseFlows
	}
	return &q.otherFlows
}

// Trim drops packets from the head of the longest queue (in bytes) until at most packets and bytes are left
// (RFC 8290 §4.1).
func (q *FairQueue[K, P]) Trim(packets int, bytes cc.Bytes) {
	for q.packets > max(packets, 0) || q.packets > 0 && q.bytes > bytes {
		var fattest *fairFlow[K, P]
		for _, list := range [...]fairList[K, P]{q.sparseFlows, q.otherFlows} {
			for f := list.head; f != nil; f = f.next {
				if fattest == nil || f.bytes > fattest.bytes {
					fattest = f
				}
			}
		}
		q.cfg.Dropped(q.takeHead(fattest), DroppedOverflow)
	}
}

// Pop returns the packet that may go now; false: none may.
func (q *FairQueue[K, P]) Pop(now cc.Time) (what P, ok bool) {
	for f := q.nextFlow(); f != nil; f = q.nextFlow() {
		head := f.queue[0]
		if q.signalsHead(now, f) && !q.markHead(now, f) {
			q.cfg.Dropped(q.takeHead(f), DroppedLate)
			continue
		}
		if !q.cfg.Window.Take(now, head.size, f.sparse) {
			return what, false
		}
		f.credit -= head.size
		return q.takeHead(f), true
	}
	return what, false
}

// signalsHead reports whether the packet at the head of f's queue must signal congestion to its sender.
func (q *FairQueue[K, P]) signalsHead(now cc.Time, f *fairFlow[K, P]) bool {
	head := &f.queue[0]
	sojourn := now.Sub(head.at)
	f.codel.Target = q.cfg.Window.QueueTarget()
	f.excess.Target = excessTargets * f.codel.Target
	if q.cfg.ECN != nil && q.cfg.ECN(head.payload) == ECT1 && sojourn >= shallowTarget {
		return true
	}
	return f.codel.Signals(now, sojourn, f.bytes-head.size)
}

// markHead marks the packet at the head of f's queue; false: it does not say ECT, or marks do not help.
func (q *FairQueue[K, P]) markHead(now cc.Time, f *fairFlow[K, P]) bool {
	head := &f.queue[0]
	if q.cfg.ECN == nil || q.cfg.ECN(head.payload) == NotECT ||
		f.excess.Signals(now, now.Sub(head.at), f.bytes-head.size) {
		return false
	}
	q.cfg.Mark(&head.payload)
	return true
}

// BusyFlows returns the number of flows that have sent within sparseTime, more than a sparse flow does.
func (q *FairQueue[K, P]) BusyFlows(now cc.Time) (n int) {
	for _, f := range q.flows {
		if f.busy && (len(f.queue) > 0 || now.Sub(f.meter.at) < sparseTime) {
			n++
		}
	}
	return n
}

// nextFlow returns the flow with the next turn (RFC 8290 §4.2); nil: nothing waits.
func (q *FairQueue[K, P]) nextFlow() *fairFlow[K, P] {
	for {
		list := &q.sparseFlows
		if list.head == nil {
			list = &q.otherFlows
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
	return p.payload
}

// fairList is a list of flows, first in, first out.
type fairList[K comparable, P any] struct{ head, tail *fairFlow[K, P] }

// pushFlow appends f.
func (l *fairList[K, P]) pushFlow(f *fairFlow[K, P]) {
	if l.head == nil {
		l.head = f
	} else {
		l.tail.next = f
	}
	l.tail, f.listed = f, true
}

// popFlow removes the first flow.
func (l *fairList[K, P]) popFlow() {
	f := l.head
	l.head, f.next, f.listed = f.next, nil, false
}

// CoDelInterval is the usual interval of CoDel (RFC 8289 §4.2): a long round trip.
const CoDelInterval = 100 * time.Millisecond

// CoDel is the state of RFC 8289 §5 for one queue.
type CoDel struct {
	Target time.Duration // for which packets may stand in the queue
	Spare  cc.Bytes      // a queue with no more than this behind a packet does not stand

	firstAbove cc.Time // when the delay will have been above Target for an interval; 0: it is not above
	signalNext cc.Time // when to signal again, while signalling
	count      int     // signals since signalling began
	lastCount  int     // count when signalling last began
	signalling bool
}

// Signals reports whether the packet at the head must signal congestion to its sender, by a drop or a mark. sojourn is
// how long it has waited, behind the number of bytes queued after it.
func (c *CoDel) Signals(now cc.Time, sojourn time.Duration, behind cc.Bytes) bool {
	if sojourn < c.Target || behind <= c.Spare {
		c.firstAbove, c.signalling = 0, false
		return false
	}
	if c.firstAbove == 0 {
		c.firstAbove = now.Add(CoDelInterval)
	}
	switch {
	case now < c.firstAbove:
		c.signalling = false
		return false
	case !c.signalling:
		c.signalling = true
		since := c.count - c.lastCount
		c.count = 1
		if since > 1 && now.Sub(c.signalNext) < 16*CoDelInterval { // it signalled a moment ago: continue at that rate
			c.count = since
		}
		c.lastCount = c.count
		c.signalNext = now
	case now < c.signalNext:
		return false
	default:
		c.count++
	}
	c.signalNext = c.signalNext.Add(time.Duration(float64(CoDelInterval) / math.Sqrt(float64(c.count))))
	return true
}
