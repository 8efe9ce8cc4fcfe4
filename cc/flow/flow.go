package flow

import (
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Flow is one sending direction of one connection. Its methods may be called
// from any goroutine.
type Flow struct {
	id      uint64
	wake    func()
	home    atomic.Pointer[macroflow] // macro, for those who do not hold its mu yet
	limited atomic.Bool               // maxRate is set, likewise

	// Guarded by macro.mu; macro itself by that of the old and of the new one.
	macro     *macroflow
	route     *route // of macro
	terms     Terms
	standing  // what terms come to
	ledger    ledger
	last      Report
	newest    cc.Bytes // highest offset known to have arrived
	inherited cc.Bytes // stream offset of what left before f came here: the algorithm is not told of it
	taken     cc.Bytes
	inflight  cc.Bytes
	counts    cc.Bytes // of the macroflow's window; see recount
	stuck     cc.Bytes // of those, unsent behind a closed receive window
	want      cc.Bytes // asked for and not granted: the flow wants to send
	parked    bool     // waits for wake
	ready     cc.Time  // not before this does its own rate let it send
	asked     cc.Time  // when it last called Take, or its transport told what it wants; 0: never
	freely    bool     // its transport has held the window: bytes may be written without asking
	measured  bool     // and has measured round trips: where it has no sample, the ledger's would be worse
	told      Limit    // the answer to the last report
	served    float64  // bytes granted, over weight; see serve
	claim     claim
	busy      cc.Time    // when it last had something to send, or in flight, or acknowledged; 0: never
	ramp      cc.Time    // until then it is paced to its share
	pacer     pacer      // to its ownRate
	maxRate   *rateLimit // of its group; nil: none
	turn      cc.Time    // at maxRate, while it waits there; 0: it does not
	rtt       rttEstimator
	rate      cc.Rate // newest delivery-rate sample
	timedOut  bool    // its retransmission timer fired, and nothing has been acknowledged since
	losses    int
	recover   cc.Bytes // what had been sent when the present loss event began
	lossAt    cc.Time  // when it did
	limits    limits
	closed    bool
}

// HasMaxRate reports whether f's group has a maximum rate, so that Take is to be asked
// even where the transport holds the window.
func (f *Flow) HasMaxRate() bool { return f.limited.Load() }

// lock returns f's macroflow, locked.
func (f *Flow) lock() *macroflow {
	for {
		m := f.home.Load()
		m.mu.Lock()
		if f.home.Load() == m {
			return m
		}
		m.mu.Unlock() // f has moved in the meantime
	}
}

func (f *Flow) mss() cc.Bytes {
	if f.last.MSS > 0 {
		return f.last.MSS
	}
	return cc.DefaultMSS
}

// Report tells what became of the bytes and returns the limits now in force.
// Stale and repeated reports are ignored.
func (f *Flow) Report(r Report) Limit {
	m := f.lock()
	if f.closed {
		m.mu.Unlock()
		return Limit{}
	}
	var events [2]Event // at most a loss, then an acknowledgement
	n, parked := 0, f.parked
	if r.At >= f.last.At {
		n = f.absorb(r, events[:])
	}
	freed := parked && !f.parked
	limit := f.limit(r.At)
	f.told = limit
	m.unlockAndWake(r.At)
	if freed { // it waits for a grant that its transport no longer needs
		f.wake()
	}
	m.mgr.trace(events[:n])
	return limit
}

// absorb takes in what changed since the last report and tells the algorithm.
func (f *Flow) absorb(r Report, events []Event) (n int) {
	m := f.macro
	before := f.last
	f.last = r
	if r.MSS == 0 {
		f.last.MSS = before.MSS
	}
	m.start(r.At)
	m.held = r.Held
	if r.Held {
		f.hold(r, before)
	} else {
		if over := max(r.Written, r.Acked) - f.taken; f.freely && over > 0 {
			f.count(r.At, over)
		}
		// It has got no more than was granted; the rest is its estimate's, and would stay in flight for ever.
		r.Written = min(r.Written, f.taken)
	}

	acked := max(0, r.Acked-before.Acked)
	lost := max(0, r.Lost-before.Lost)
	marked := max(0, r.Marked-before.Marked)
	timeouts := max(0, r.Timeouts-before.Timeouts)
	f.last.Acked = max(r.Acked, before.Acked)
	if timeouts > 0 || lost > 0 && r.Newest == 0 {
		f.ledger.taint(timeouts > 0)
	}
	f.ledger.waiting(r.Written-r.Unsent, r.At)
	f.setInflight(r)
	m.heldBelow = r.RwndFull || !r.Held && r.Unsent > max(4*f.mss(), f.inflight/4)
	f.noteLimit(r)

	if timeouts > 0 || lost > 0 && r.Acked-r.Sacked >= f.inherited {
		f.losses++
		loss := cc.Loss{State: m.state(r.At), Lost: lost, SentAt: f.lostSince(r), Timeout: timeouts > 0}
		m.alg.OnLoss(loss)
		m.adopt(r.At)
		events[n] = m.event(f, KindLoss, loss.State, 0, lost)
		n++
	}
	if acked > 0 {
		ack, beside := f.ack(r, acked, marked)
		if own := min(acked, f.last.Acked-f.inherited); own > 0 {
			ack.Acked, ack.Marked = own+beside, min(ack.Marked, own)
			m.alg.OnAck(ack)
			m.adopt(r.At)
			events[n] = m.event(f, KindAck, ack.State, ack.RTT, own)
			n++
		}
	}
	f.timedOut = acked == 0 && (f.timedOut || timeouts > 0)
	if acked > 0 {
		f.arrived(r.At)
	}
	m.noteAppLimited()
	if f.want > 0 || f.inflight > 0 || acked > 0 {
		f.busy = r.At
	}
	return n
}

// lostSince says when the newest lost byte left. The transport hides it: a round
// trip ago, unless the hole of an earlier loss is still open. Then it is one
// event until all that had been sent when it began has arrived (RFC 6582's
// recovery point), however many round trips that takes; and one for all members,
// whose packets the same full queue drops, though the last of them learns of it
// more than a round trip later than the first.
func (f *Flow) lostSince(r Report) cc.Time {
	if f.lossAt != 0 && r.Acked-r.Sacked < f.recover {
		return f.lossAt
	}
	for _, g := range f.macro.members {
		g.recover, g.lossAt = g.sent(), r.At
	}
	return max(1, r.At.Add(-f.srtt()))
}

// srtt and leastRTT are the round trips of f's own path.
func (f *Flow) srtt() time.Duration {
	if f.route.far() && f.rtt.srtt > 0 {
		return f.rtt.srtt
	}
	return f.macro.rtt.srtt
}

func (f *Flow) leastRTT() time.Duration {
	if f.route.far() {
		return f.route.base
	}
	return f.macro.rtt.min
}

// sent is the stream offset of what has left so far.
func (f *Flow) sent() cc.Bytes {
	if f.last.Held {
		return f.taken
	}
	return f.taken - f.last.Unsent
}

// setInflight recounts f's bytes in flight. What the transport holds, on the
// wire or before it, is its word; what was taken but has not reached it yet is
// ours. Where it holds the window, only what is on the wire counts. Counting by acknowledgements alone would stall in every recovery and
// then release a burst.
func (f *Flow) setInflight(r Report) {
	inflight := f.taken - r.Acked
	switch {
	case r.Held && r.Pipe >= 0:
		inflight = r.Pipe
	case r.Pipe >= 0:
		inflight = f.taken - r.Written + r.Pipe + r.Unsent
	}
	f.inflight, f.stuck = max(0, inflight), 0
	if r.RwndFull && !r.Held {
		f.stuck = min(r.Unsent, f.inflight)
	}
	f.recount()
}

// counted is what f takes of the macroflow's window.
func (f *Flow) counted() cc.Bytes { return f.counts }

// recount works out anew what f takes of the macroflow's window. Bytes that wait
// for the peer to open its own load no path, and must not keep the others from
// theirs; those on a longer way count less.
func (f *Flow) recount() {
	before := f.counts
	f.counts = f.route.shrink(f.inflight - f.stuck)
	f.macro.inflight += f.counts - before
}

// ack composes the event for acked newly delivered bytes, and for those of
// datagrams beside them.
func (f *Flow) ack(r Report, acked, marked cc.Bytes) (ev cc.Ack, beside cc.Bytes) {
	m := f.macro
	beside = m.alongside(r.At, acked)
	m.delivered += acked + beside
	f.newest = max(f.newest, r.Newest, r.Acked)
	c, ok := f.ledger.advance(f.newest)
	if ok && r.RTT > 0 { // known exactly, where the ledger knows the report that first showed it
		c.sent.At = min(r.At, max(m.firstSent, r.At.Add(-r.RTT)))
		m.firstSent = c.sent.At
	}
	ev = cc.Ack{Acked: acked + beside, Marked: min(marked, acked), Sent: m.seen(c.sent)}
	if ok && !c.resent {
		if !r.Held || !f.measured {
			ev.RTT = r.At.Sub(c.sent.At)
		}
		ev.DeliveryRate = m.deliveryRate(r.At, c, f.leastRTT())
		m.firstSent = c.sent.At
	}
	if r.RTT > 0 {
		ev.RTT = r.RTT
	}
	m.deliveredAt = r.At
	if ev.RTT > 0 {
		f.rtt.add(ev.RTT)
		ev.RTT = m.sample(r.At, f.route, ev.RTT)
	}
	if ev.DeliveryRate > 0 {
		f.rate, m.rate = ev.DeliveryRate, ev.DeliveryRate
	}
	ev.State = m.state(r.At)
	return ev, beside
}

// noteLimit records what holds the flow back, as far as a report shows it.
func (f *Flow) noteLimit(r Report) {
	f.limits.settle(r.At)
	switch {
	case r.Held:
		f.limits.enter(r.At, f.heldBy(r))
	case r.RwndFull:
		f.limits.enter(r.At, LimitedByReceiver)
	case f.macro.heldBelow:
		f.limits.enter(r.At, LimitedByTransport)
	case f.want > 0 && (f.limits.by == LimitedByReceiver || f.limits.by == LimitedByTransport):
		f.limits.enter(r.At, LimitedByCwnd)
	case f.want == 0:
		f.limits.enter(r.At, LimitedByApplication)
	}
}

// Close leaves the macroflow; what was in flight no longer counts.
func (f *Flow) Close(now cc.Time) {
	m := f.lock()
	if f.closed {
		m.mu.Unlock()
		return
	}
	f.closed = true
	m.lose(f, now)
	m.unlockAndWake(now)
	m.mgr.left(f, now)
}

// wakeBatch is how many flows are woken between two acquisitions of the lock.
const wakeBatch = 16

// unlockAndWake releases the lock and wakes whoever may send now.
func (m *macroflow) unlockAndWake(now cc.Time) {
	for {
		var wakes [wakeBatch]func()
		n := 0
		if m.alg != nil {
			n = m.wakeable(now, wakes[:])
		}
		m.mu.Unlock()
		for _, wake := range wakes[:n] {
			wake()
		}
		if n < wakeBatch {
			return
		}
		m.mu.Lock()
	}
}

// limits tells what held a flow back, and for how long so far.
type limits struct {
	by    LimitedBy
	since cc.Time
	spent [numLimits]time.Duration
}

func (l *limits) enter(now cc.Time, by LimitedBy) {
	if by == l.by {
		return
	}
	l.settle(now)
	l.by = by
}

func (l *limits) settle(now cc.Time) {
	if now > l.since {
		l.spent[l.by] += now.Sub(l.since)
	}
	l.since = max(now, l.since)
}
