package flow

import (
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Flow is one sending direction of one connection. Its methods may be called from any goroutine.
type Flow struct {
	keeper flowKeeper
	home   atomic.Pointer[group] // changes with Move; see lockGroup
	member                       // guarded by the mutex of home

	closed bool // guarded by the mutex of home
}

// flowKeeper is the Manager, as far as flows need it.
type flowKeeper interface {
	moveFlow(f *Flow, now cc.Time, t Terms) error // see Flow.Move
	removeFlow(f *Flow, now cc.Time)              // f is closed and has left its group
}

// newFlow returns a flow that is in no group yet. limit is its group's maximum rate; nil: none.
func newFlow(keeper flowKeeper, id uint64, now cc.Time, t Terms, leg Leg, limit *rateLimit) *Flow {
	f := &Flow{keeper: keeper}
	m := &f.member
	m.id, m.leg, m.terms, m.allocation = id, leg, t, newAllocation(t)
	m.timer.owner, m.limits.since = f, now
	if m.enforced = leg.Enforces; m.enforced {
		m.startBytes = unpacedSegments * cc.DefaultMSS
	}
	m.setMaxRate(limit)
	return f
}

// NeedsGrants reports whether Take must be asked even where the transport enforces the window. That is so under a
// maximum rate, and at the start of a flow with a rate of its own. Transports do not pace its first segments.
func (f *Flow) NeedsGrants() bool { return f.needsGrants.Load() }

// Report takes in what became of the bytes. Stale and repeated reports are ignored.
func (f *Flow) Report(r Report) {
	g := f.lockGroup()
	var events [2]Event // at most a loss, then an acknowledgement
	n, news, doubts := 0, HintNews{}, false
	if !f.closed && r.At >= f.last.At {
		n = g.processReport(&f.member, r, &events)
		news, doubts = g.takeHintNews()
	}
	g.mu.Unlock()
	g.emitEvents(events[:n]...)
	if doubts && g.hintNews != nil {
		g.hintNews(news)
	}
}

// TakeForecast takes in what the receiver of the flow's bytes forecasts of the path, if the group's algorithm is fed by
// forecasts. next is how many bytes the sender has sent. The window of a group follows the forecasts of one flow, so a
// flow that is fed should be alone in its group.
func (f *Flow) TakeForecast(now cc.Time, next cc.Bytes, forecast cc.SproutForecast) {
	g := f.lockGroup()
	defer g.divideAndUnlock(now)
	if forecaster := cc.FindForecaster(g.algorithm); forecaster != nil && !f.closed {
		forecaster.OnForecast(g.algorithmState(now), next, forecast)
		g.adoptControl(now)
		g.sendNow = true
	}
}

// Take asks to send want bytes, and counts what it grants in the same step. Grants are whole segments unless want is
// smaller. After a Grant of 0, Leg.Wake is called when asking again may help. want 0 withdraws a request. Over a leg
// that enforces the window only a maximum rate refuses anything, and bytes count in flight once they leave.
func (f *Flow) Take(now cc.Time, want cc.Bytes) Grant {
	g := f.lockGroup()
	defer g.divideAndUnlock(now)
	m := &f.member
	var n cc.Bytes
	switch {
	case f.closed || want < 0:
		return Grant{}
	case want == 0:
		m.gate.waiting = false
		if !m.enforced {
			g.setWant(m, 0)
		}
		return Grant{}
	case m.enforced:
		n = g.takeEnforced(m, now, want)
	default:
		n = g.takeUnenforced(m, now, want)
	}
	m.gate.waiting = n == 0
	return Grant{n}
}

// setFollower makes f a follower, or makes f report its own bytes again. What is in flight counts as arrived. It
// returns how many bytes f has been granted in all.
func (f *Flow) setFollower(now cc.Time, follows bool) (taken cc.Bytes) {
	g := f.lockGroup()
	defer g.divideAndUnlock(now)
	f.legMeasuresRTT = true // the ledger would date bytes that an EchoFlow lends to their grant, which comes later
	if !f.closed {
		g.setFollows(&f.member, now, follows)
	}
	return f.taken
}

// passFollower calls group.passFollower for f. srtt is the group's, 0 before the first sample.
func (f *Flow) passFollower(now cc.Time, n cc.Bytes, sparse bool) (passes, isHeld bool, srtt time.Duration) {
	g := f.lockGroup()
	defer g.divideAndUnlock(now)
	if f.closed {
		return false, false, 0
	}
	passes, isHeld = g.passFollower(&f.member, now, n, sparse)
	return passes, isHeld, g.rtt.srtt
}

// Move gives f other terms from now on. Another group, algorithm or set of parameters leads to another group, made as
// Open makes it. What is in flight counts there, and f waits there for what it waited for. An algorithm that starts
// with f starts from the window and the round trips that f had. It hears only of what leaves from then on, because
// acknowledgements of another window would open its own. Members that arrive within one round trip add up their
// windows. The members that stay keep the whole of the old window. A closed flow stays where it was. Errors are those
// of Terms.Check.
func (f *Flow) Move(now cc.Time, t Terms) error { return f.keeper.moveFlow(f, now, t) }

// Close leaves the group. What was in flight no longer counts. A second call does nothing.
func (f *Flow) Close(now cc.Time) {
	g := f.lockGroup()
	if f.closed {
		g.mu.Unlock()
		return
	}
	f.closed = true
	f.maxRate.removeWaiter(&f.waiter)
	g.removeMember(&f.member, now)
	g.divideAndUnlock(now)
	f.keeper.removeFlow(f, now)
}

// markEchoed makes transportRTT of other flows leave f out.
func (f *Flow) markEchoed() {
	g := f.lockGroup()
	defer g.mu.Unlock()
	f.isEchoed = true
}

// transportRTT returns the least of the newest round trips that other flows to the same host have seen, as far as they
// are no older than within; false: there is none. A flow with less than two segments in flight does not count: its
// receiver delays acknowledgements. Neither do flows that echo requests acknowledge.
func (f *Flow) transportRTT(now cc.Time, within time.Duration) (rtt time.Duration, ok bool) {
	g := f.lockGroup()
	defer g.mu.Unlock()
	for _, m := range f.path.members {
		if m.isEchoed || m.rtt.latest == 0 || now.Sub(m.last.At) > within ||
			m.inflight < ackedTogether*m.segmentSize() {
			continue
		}
		if !ok || m.rtt.latest < rtt {
			rtt, ok = m.rtt.latest, true
		}
	}
	return rtt, ok
}

// lockGroup locks and returns f's group. f may move between the load and the lock, so the pointer is checked again.
func (f *Flow) lockGroup() *group {
	for {
		g := f.home.Load()
		g.mu.Lock()
		if f.home.Load() == g {
			return g
		}
		g.mu.Unlock()
	}
}

// onTimer wakes f's relay if its pacer, or its turn at the maximum rate, lets it send.
func (f *Flow) onTimer(now cc.Time) {
	g := f.lockGroup()
	defer g.mu.Unlock()
	if f.closed {
		return
	}
	g.wakeIfAllowed(&f.member, now)
}

// Dormant returns what Manager.Resume needs to go on with f elsewhere. Close f then. The window is the whole group's,
// because members that leave together share it there as they do here.
func (f *Flow) Dormant(now cc.Time) Dormant {
	g := f.lockGroup()
	defer g.mu.Unlock()
	return g.savedWindowOn(f.path, now)
}

// Snapshot is the state of one flow at one moment.
type Snapshot struct {
	ID        uint64
	Group     string
	Algorithm string
	Phase     string
	Members   int          // flows in the group
	Internals cc.Internals // in the order of the algorithm's Spec
	Class     Class
	Target    cc.Rate // 0: none

	Cwnd       cc.Bytes // the group's window
	Share      cc.Bytes // the flow's newest limit; 0: closed
	Lent       cc.Bytes // the part of Share that the flow does not want and leaves to others
	PacingRate cc.Rate  // of the group; 0: not paced
	Inflight   cc.Bytes // of this flow
	Unsent     cc.Bytes // in the transport's own queue; part of Inflight unless the leg enforces the window

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // LatestRTT − MinRTT
	ReverseQueue            time.Duration // the part of QueueingDelay on the way back
	OneWay                  bool          // ReverseQueue is known
	DeliveryRate            cc.Rate       // newest sample; 0: none

	Taken, Delivered, Lost, Marked cc.Bytes // Taken: granted, or gone where the leg enforces the window
	Timeouts                       int
	LossEvents                     int // OnLoss calls
	LimitedBy                      LimitedBy
	Limited                        LimitedTime // up to the last report
}

// Snapshot returns the flow's present state.
func (f *Flow) Snapshot() Snapshot {
	g := f.lockGroup()
	s := Snapshot{
		ID: f.id, Group: f.terms.Group, Algorithm: g.spec.Name, Phase: g.control.Phase, Members: len(g.members),
		Internals: g.algorithmInternals(), Class: f.terms.Class, Target: f.terms.Target,
		Cwnd: g.control.Cwnd, PacingRate: g.control.PacingRate, Inflight: f.inflight, Unsent: f.last.Unsent,
		SRTT: g.pathSRTT(&f.member), MinRTT: g.pathMinRTT(&f.member), LatestRTT: f.rtt.latest,
		DeliveryRate: f.deliveryRate, OneWay: f.oneWayKnown,
		Taken: f.taken, Delivered: f.last.Acked, Lost: f.last.Lost, Marked: f.last.Marked,
		Timeouts: f.last.Timeouts, LossEvents: f.lossEvents, LimitedBy: f.limits.by, Limited: f.limits.total,
	}
	if !f.closed {
		s.Share = f.limit.Cwnd
		if f.want == 0 {
			s.Lent = f.path.fromReference(max(0, f.inflightLimit-f.counted))
		}
	}
	reverse := f.reverseQueue
	g.mu.Unlock()
	if s.LatestRTT > 0 {
		s.QueueingDelay = max(0, s.LatestRTT-s.MinRTT)
		s.ReverseQueue = min(reverse, s.QueueingDelay)
	}
	return s
}

// Arrivals is what has come of a stream that the peer sends. Counters are cumulative; gauges are as of At.
type Arrivals struct {
	At       cc.Time
	Received cc.Bytes      // payload without a hole before it
	RTT      time.Duration // from an acknowledgement of ours until what it let out had come; 0: no sample yet
	Peer     PeerClock     // newest timestamp that came with data; zero value: none
	Window   cc.Bytes      // gauge: advertised beyond Received
	Unread   cc.Bytes      // gauge: the part of Received that our reader has not read yet
	Holes    int           // times something was missing, or overtaken
	MSS      cc.Bytes      // gauge: payload of a full segment; 0: unchanged
}

// Receiving is a flow with bytes that come here. What an unmodified peer may have in flight is bounded by the window
// that we advertise, so this window can be a congestion window. RFC 9840 uses it so for LEDBAT, and DRWA (Jiang et
// al., IMC 2012) against queues of cellular networks. Its algorithm takes arrivals as a sender's takes
// acknowledgements. A hole is a loss of one segment, the least that it can be. There are no timeouts, and no pacing
// rate is kept. It shares a window only with other flows that receive.
type Receiving struct {
	flow *Flow

	// Used by Arrived only, which one goroutine calls.
	origin     Arrivals      // the first ones
	holes      int           // of the newest ones
	report     Report        // the newest that flow got
	rtt        time.Duration // newest; 0: none
	round      roundTrip     // under way
	prevWindow cc.Bytes      // advertised when the round trip before that began
}

// roundTrip is a round trip of arrivals. What comes in it was in flight when it began.
type roundTrip struct {
	at       cc.Time
	received cc.Bytes // by then
	window   cc.Bytes // advertised when it began; 0: none has begun
}

// Arrived takes in what has come. The first call says where the stream stands, and its RTT the least known of the
// path.
func (r *Receiving) Arrived(a Arrivals) {
	if a.RTT > 0 {
		r.rtt = a.RTT
	}
	if r.report.At == 0 {
		r.origin, r.holes = a, a.Holes
		r.round = roundTrip{a.At, a.Received, a.Window}
	}
	flight, limited := r.estimateFlight(a)
	p := &r.report
	p.At, p.RTT, p.Peer, p.MSS = a.At, a.RTT, a.Peer, a.MSS
	if p.Acked == 0 {
		p.RTT = r.origin.RTT
	}
	p.Acked = a.Received - r.origin.Received
	p.Lost += cc.Bytes(a.Holes-r.holes) * max(a.MSS, 1) // each at the MSS of its time: the kernel estimates that
	r.holes = a.Holes
	p.Pipe, p.Unsent = flight, 0
	if limited { // one segment represents what the peer would send
		p.Unsent = a.MSS
	}
	p.Written = max(p.Written, p.Acked+p.Pipe+p.Unsent)
	r.flow.Report(*p)
}

// estimateFlight returns how many bytes are on their way, from what came during the last round trip. limited reports
// whether our window kept the peer from sending more: they fill most of it, and the cause is not a reader that lags.
func (r *Receiving) estimateFlight(a Arrivals) (n cc.Bytes, limited bool) {
	took := a.At.Sub(r.round.at)
	if r.rtt == 0 || took < max(r.rtt, time.Millisecond) {
		return r.report.Pipe, r.report.Unsent > 0
	}
	n = cc.Bytes(float64(a.Received-r.round.received) * r.rtt.Seconds() / took.Seconds())
	window := min(r.round.window, r.prevWindow)
	limited = n >= threeQuarters(window) && a.Unread <= window/4
	r.prevWindow = r.round.window
	r.round = roundTrip{a.At, a.Received, a.Window}
	return n, limited
}

// threeQuarters allows for late acknowledgements and for windows that grow in steps.
func threeQuarters(n cc.Bytes) cc.Bytes { return n - n/4 }

// Move gives the flow other terms, as Flow.Move does.
func (r *Receiving) Move(now cc.Time, t Terms) error {
	t.Receives = true
	return r.flow.Move(now, t)
}

// Close leaves the group.
func (r *Receiving) Close(now cc.Time) { r.flow.Close(now) }

// Snapshot returns the present state. Delivered is what has come, Share the window.
func (r *Receiving) Snapshot() Snapshot { return r.flow.Snapshot() }
