package flow

import (
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Flow is one sending direction of one connection. Its methods may be called
// from any goroutine.
type Flow struct {
	keeper flowKeeper
	home   atomic.Pointer[group]
	member

	closed bool // guarded by the group's mutex, as member is
	gone   bool // not in Snapshots any more; guarded by the manager's flowsMu
}

// flowKeeper is what a flow asks of its manager.
type flowKeeper interface {
	moveFlow(f *Flow, now cc.Time, t Terms) error
	removeFlow(f *Flow, now cc.Time)
}

// newFlow returns a flow that is in no group yet.
func newFlow(keeper flowKeeper, id uint64, now cc.Time, t Terms, leg Leg, limit *rateLimit) *Flow {
	f := &Flow{keeper: keeper}
	m := &f.member
	m.id, m.leg, m.terms, m.allocation = id, leg, t, newAllocation(t)
	m.timer.owner, m.limits.since = f, now
	if m.enforced = leg.Enforces; m.enforced {
		m.unpaced = unpacedSegments * cc.DefaultMSS
	}
	m.setMaxRate(limit)
	return f
}

// NeedsGrants reports whether Take is to be asked even where the transport enforces the window: there
// is a maximum rate, or one of f's own at the start, when the transport does not keep it.
func (f *Flow) NeedsGrants() bool { return f.asks.Load() }

// Report tells what became of the bytes. Stale and repeated reports are ignored.
func (f *Flow) Report(r Report) {
	g := f.lockGroup()
	var events [2]Event // at most a loss, then an acknowledgement
	n, news, doubts := 0, HintNews{}, false
	if !f.closed && r.At >= f.last.At {
		n = g.processReport(&f.member, r, &events)
		g.wakeDatagrams(r.At)
		g.divideIfDue(r.At)
		g.wakeIfAllowed(&f.member, r.At)
		news, doubts = g.takeHintNews()
	}
	g.mu.Unlock()
	g.emitEvents(events[:n]...)
	if doubts && g.hintNews != nil {
		g.hintNews(news)
	}
}

// Take asks to send want bytes and accounts for what it grants in the same step. Grants
// are whole segments unless want is smaller. After a Grant of 0 the leg's Wake is called
// when asking again may help. One that asks for 0 takes back what it asked for. Over a
// leg that enforces the window only a maximum rate refuses anything, and bytes count once
// they leave.
func (f *Flow) Take(now cc.Time, want cc.Bytes) Grant {
	g := f.lockGroup()
	defer g.divideAndUnlock(now)
	m := &f.member
	var n cc.Bytes
	switch {
	case f.closed || want < 0:
		return Grant{}
	case want == 0:
		m.gate.blocked = false
		if !m.enforced {
			g.setWant(m, 0)
		}
		return Grant{}
	case m.enforced:
		n = g.takeEnforced(m, now, want)
	default:
		n = g.takeBytes(m, now, want)
	}
	m.gate.blocked = n == 0
	return Grant{n}
}

// Move gives f other terms from now on. Another group, algorithm or set of
// parameters leads to another group, made as Open makes it: what is in flight
// goes along and counts there, f waits there for what it waited for, and an
// algorithm that starts with it starts from the window and the round trips that
// f had. It hears only of what leaves from then on: acknowledgements of what
// another window sent would open its own, which has to wait until what stood in a
// queue has gone. Members that go there within one round trip bring their windows
// together. Who stays behind keeps the whole of the old one. A closed flow stays
// where it was.
func (f *Flow) Move(now cc.Time, t Terms) error { return f.keeper.moveFlow(f, now, t) }

// Close leaves the group; what was in flight no longer counts.
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

// lockGroup returns f's group, locked.
func (f *Flow) lockGroup() *group {
	for {
		g := f.home.Load()
		g.mu.Lock()
		if f.home.Load() == g {
			return g
		}
		g.mu.Unlock() // f has moved in the meantime
	}
}

// onTimer wakes f if its pacer, or its turn at the maximum rate, lets it send.
func (f *Flow) onTimer(now cc.Time) {
	g := f.lockGroup()
	defer g.mu.Unlock()
	if f.closed {
		return
	}
	g.wakeIfAllowed(&f.member, now)
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
	Share      cc.Bytes // this flow's part of it: the window that it was told last
	Lent       cc.Bytes // what it is due of the window, does not want and leaves to others
	PacingRate cc.Rate  // 0: not paced
	Inflight   cc.Bytes // this flow's
	Unsent     cc.Bytes // in the transport's own queue; part of Inflight unless the leg enforces the window

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // LatestRTT − MinRTT
	ReverseQueue            time.Duration // of that, on the way back
	OneWay                  bool          // which is known
	DeliveryRate            cc.Rate       // newest sample

	Taken, Delivered, Lost, Marked cc.Bytes // Taken: granted, or gone where the leg enforces the window
	Timeouts                       int
	LossEvents                     int // OnLoss calls
	LimitedBy                      LimitedBy
	Limited                        LimitedTime // up to the last report
}

// Snapshot returns the flow's present state.
func (f *Flow) Snapshot() Snapshot {
	s, _ := f.takeSnapshot()
	return s
}

func (f *Flow) takeSnapshot() (s Snapshot, open bool) {
	g := f.lockGroup()
	s = Snapshot{
		ID: f.id, Group: f.terms.Group, Algorithm: g.spec.Name, Phase: g.ctl.Phase, Members: len(g.members),
		Internals: g.algorithmInternals(), Class: f.terms.Class, Target: f.terms.Target,
		Cwnd: g.ctl.Cwnd, PacingRate: g.ctl.PacingRate, Inflight: f.inflight, Unsent: f.last.Unsent,
		SRTT: g.srtt(&f.member), MinRTT: g.leastRTT(&f.member), LatestRTT: f.rtt.latest,
		DeliveryRate: f.rate, OneWay: f.oneWay,
		Taken: f.taken, Delivered: f.last.Acked, Lost: f.last.Lost, Marked: f.last.Marked,
		Timeouts: f.last.Timeouts, LossEvents: f.losses, LimitedBy: f.limits.by, Limited: f.limits.spent,
	}
	if open = !f.closed; open {
		s.Share = f.limit.Cwnd
		if f.want == 0 {
			s.Lent = f.path.fromReference(max(0, f.share-f.counts))
		}
	}
	reverse := f.reverse
	g.mu.Unlock()
	if s.LatestRTT > 0 {
		s.QueueingDelay = max(0, s.LatestRTT-s.MinRTT)
		s.ReverseQueue = min(reverse, s.QueueingDelay)
	}
	return s, open
}

// Arrivals is what has come of a stream that the peer sends. Counters are cumulative.
type Arrivals struct {
	At       cc.Time
	Received cc.Bytes      // payload without a hole before it
	RTT      time.Duration // from an acknowledgement of ours until what it let out had come; 0: no sample yet
	Peer     PeerClock     // newest timestamp that came with data; the zero value: none
	Window   cc.Bytes      // gauge: advertised beyond Received
	Unread   cc.Bytes      // gauge: of Received, what nobody has read yet
	Holes    int           // times something was missing, or overtaken
	MSS      cc.Bytes      // gauge: payload of a full segment; 0: unchanged
}

// Receiving is a flow whose bytes come here. What a peer that knows nothing of us may
// have in flight is bounded by the window that we advertise, so this window is a
// congestion window (RFC 9840 uses it so for LEDBAT, DRWA of Jiang et al. (IMC 2012)
// against queues of cellular networks). Arrivals are to its algorithm what acknowledgements
// are to a sender's. It is told of holes as of losses of one segment each, the least that
// they can be, and of no timeouts; nobody keeps a pacing rate. Flows that receive share
// windows only with each other.
type Receiving struct {
	flow *Flow

	// Of Arrived, which one goroutine calls.
	origin Arrivals // as the first were
	report Report
	rtt    time.Duration // the newest known
	round  roundTrip     // under way
	before cc.Bytes      // the window that was advertised when the one before it began
}

// roundTrip is one of arrivals: what comes in it was in flight when it began.
type roundTrip struct {
	at       cc.Time
	received cc.Bytes
	window   cc.Bytes // advertised when it began; 0: none has begun
}

// Arrived tells what has come. The first call says where the stream stands, and its RTT
// what is known of the path's least.
func (r *Receiving) Arrived(a Arrivals) {
	if a.RTT > 0 {
		r.rtt = a.RTT
	}
	if r.report.At == 0 {
		r.origin = a
		r.round = roundTrip{a.At, a.Received, a.Window}
	}
	flight, limited := r.estimateFlight(a)
	p := &r.report
	p.At, p.RTT, p.Peer, p.MSS = a.At, a.RTT, a.Peer, a.MSS
	if p.Acked == 0 {
		p.RTT = r.origin.RTT
	}
	p.Acked = a.Received - r.origin.Received
	p.Lost = cc.Bytes(a.Holes-r.origin.Holes) * max(a.MSS, 1)
	p.Pipe = flight
	p.Unsent = 0
	if limited { // a segment stands for what the peer would send
		p.Unsent = a.MSS
	}
	p.Written = max(p.Written, p.Acked+p.Pipe+p.Unsent)
	r.flow.Report(*p)
}

// estimateFlight is how many bytes are on their way, by what came in the last round trip, and
// whether our window kept the peer from sending more: then they fill most of it, and it
// is not a reader that lags behind which keeps it small.
func (r *Receiving) estimateFlight(a Arrivals) (n cc.Bytes, limited bool) {
	took := a.At.Sub(r.round.at)
	if r.rtt == 0 || took < max(r.rtt, time.Millisecond) {
		return r.report.Pipe, r.report.Unsent > 0
	}
	n = cc.Bytes(float64(a.Received-r.round.received) * r.rtt.Seconds() / took.Seconds())
	window := min(r.round.window, r.before)
	limited = n >= threeQuarters(window) && a.Unread <= window/4
	r.before = r.round.window
	r.round = roundTrip{a.At, a.Received, a.Window}
	return n, limited
}

// threeQuarters is three quarters: acknowledgements are late, and windows are in steps.
func threeQuarters(n cc.Bytes) cc.Bytes { return n - n/4 }

// Move gives the flow other terms.
func (r *Receiving) Move(now cc.Time, t Terms) error {
	t.Receives = true
	return r.flow.Move(now, t)
}

// Close leaves the group.
func (r *Receiving) Close(now cc.Time) { r.flow.Close(now) }

// Snapshot returns the present state: Delivered is what has come, Share the window.
func (r *Receiving) Snapshot() Snapshot { return r.flow.Snapshot() }
