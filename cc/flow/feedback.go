package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// absorb takes in a report of m, tells the algorithm what is new in it, and puts what
// the algorithm was told into events.
func (g *group) absorb(m *member, r Report, events *[2]Event) (n int) {
	before := m.last.At
	m.lossBegan(g.lossEpoch, g.lossAt)
	now := r.At
	news := m.read(r)
	g.begun(m, now)
	if m.enforced {
		g.depart(m, before)
	}
	m.settle(news)
	g.recount(m)
	last := &m.last
	g.limitedBelow = last.RwndFull || !m.enforced && last.Unsent > max(4*m.mss(), m.inflight/4)
	m.noteLimit(now, g.limitedBelow)
	if g.alg == nil { // it is forgotten, and nothing has been sent since
		return 0
	}

	if news.timeouts > 0 || news.lost > 0 && last.Acked-last.Sacked >= m.before {
		m.losses++
		loss := cc.Loss{State: g.state(now), Lost: news.lost, SentAt: g.lostSince(m, news), Timeout: news.timeouts > 0}
		g.alg.OnLoss(loss)
		g.adoptCut(now)
		events[n] = g.event(m, KindLoss, loss.State, 0, news.lost)
		n++
	}
	if news.acked > 0 {
		ack, beside := g.ack(m, news)
		if own := min(news.acked, last.Acked-m.before); own > 0 {
			ack.Acked, ack.Marked = own+beside, min(ack.Marked, own)
			g.alg.OnAck(ack)
			if ack.Marked > 0 {
				g.adoptCut(now)
			} else {
				g.adopt(now)
			}
			events[n] = g.event(m, KindAck, ack.State, ack.RTT, own)
			events[n].Reverse = ack.ReverseQueue
			n++
		}
		if m.rampEnd != 0 { // what it held back may go
			m.rampEnd = 0
			g.provide(m, now, true)
		}
	}
	m.timedOut = news.acked == 0 && (m.timedOut || news.timeouts > 0)
	g.noteAppLimited()
	if m.want > 0 || m.inflight > 0 || news.acked > 0 {
		m.lastBusy = now
	}
	return n
}

// begun has the algorithm be there for the first report, and m be active if it sends.
func (g *group) begun(m *member, now cc.Time) {
	if m.left() > 0 || m.enforced && m.last.Unsent > 0 && !m.last.RwndFull {
		g.begin(m, now)
	}
	if g.alg == nil && g.idle.cwnd == 0 {
		g.start(now)
	}
	if !m.told {
		g.provide(m, now, false)
	}
}

// depart takes in what an enforcing leg says has left. Nobody asks for grants there:
// bytes that have not left are what the flow wants to send.
func (g *group) depart(m *member, before cc.Time) {
	r := &m.last
	now := r.At
	if left := m.left(); left > 0 {
		g.send(m, m.departure(before, left, m.path.expand(g.ctl.Cwnd)), left)
		m.pacer.spend(now, left)
	}
	want := r.Unsent
	if r.RwndFull { // no share of the window would help
		want = 0
	} else if want >= m.mss() && !g.content(m) {
		g.cwndFullAt, g.wantedAt = now, now
	}
	m.asked = now
	g.setWant(m, want)
}

// lostSince says when the newest lost byte left. The transport hides it: a round trip
// ago, unless the hole of an earlier loss is still open. Then it is one event until all
// that had been sent when it began has arrived; and one for all members, whose packets
// the same full queue drops, though the last of them learns of it more than a round trip
// later than the first. A timeout has all that was sent until then sent again (RFC 6582
// §3.2): it begins the event anew for its flow.
func (g *group) lostSince(m *member, n news) cc.Time {
	now := m.last.At
	if m.recovering() {
		since := m.lossAt
		if n.timeouts > 0 {
			m.recover, m.lossAt = m.sent(), now
		}
		return since
	}
	g.lossEpoch++
	g.lossAt = now
	m.lossBegan(g.lossEpoch, now)
	return max(1, now.Add(-g.srtt(m)))
}

// ack composes the event for newly delivered bytes, and for those of datagrams beside them.
func (g *group) ack(m *member, n news) (ev cc.Ack, beside cc.Bytes) {
	now := m.last.At
	beside = g.alongside(now, n.acked)
	sent, rtt, rate := m.arrived(n, &g.delivered, beside, g.leastRTT(m))
	reverse, oneWay := m.ways.read(m.last.Peer, now, rtt, m.rtt.min)
	if rtt > 0 {
		rtt = g.sample(m, now, rtt)
		reverse, oneWay = g.wayBack(m, now, max(0, rtt-g.rtt.min), reverse, oneWay)
		m.reverse, m.oneWay = reverse, oneWay
	}
	g.oneWay = oneWay
	if rate > 0 {
		g.rate = rate
	}
	ev = cc.Ack{
		Acked: n.acked + beside, Marked: min(n.marked, n.acked), RTT: rtt, DeliveryRate: rate, Sent: g.seen(sent),
		L4S: m.last.L4S, ReverseQueue: reverse,
	}
	ev.State = g.state(now)
	g.checkHint(&ev)
	return ev, beside
}

// wayBack is how much of queueing, a round trip's delay beyond the least, was on the way back,
// if that is known: from the peer's clock, which says that reverse was on the way from it.
func (g *group) wayBack(
	m *member, now cc.Time, queueing, reverse time.Duration, oneWay bool,
) (back time.Duration, known bool) {
	reverse = min(reverse, queueing)
	shared := m.path.queue.Load()
	switch {
	case g.receives && oneWay: // data takes the way from it, and our acknowledgements the other
		return queueing - reverse, true
	case g.receives:
		there, known := shared.lately(now, 2*m.rtt.srtt)
		return min(there, queueing), known
	case oneWay && shared != nil:
		shared.note(now, queueing-reverse)
	}
	return reverse, oneWay
}

// sample takes in a round trip of m, and returns what it would have been on the group's
// reference path.
func (g *group) sample(m *member, now cc.Time, rtt time.Duration) time.Duration {
	rtt, changed := g.paths.sample(now, m.path, rtt, g.rtt.srtt)
	if changed {
		g.recountAll(m.path.members)
	}
	before := g.rtt.srtt
	g.rtt.add(rtt)
	g.changed = g.changed || changed || g.rtt.srtt != before // what rates and paths are worth in the window
	return rtt
}

// noteLimit records what holds m back, as far as its last report shows it.
func (m *member) noteLimit(now cc.Time, below bool) {
	r := &m.last
	m.limits.settle(now)
	switch {
	case r.RwndFull:
		m.limits.enter(now, LimitedByReceiver)
	case m.enforced && r.Unsent < m.mss():
		m.limits.enter(now, LimitedByApplication)
	case m.enforced && m.limit.PacingRate > 0 && m.inflight+2*m.mss() <= m.limit.Cwnd:
		m.limits.enter(now, LimitedByPacing)
	case m.enforced:
		m.limits.enter(now, LimitedByCwnd)
	case below:
		m.limits.enter(now, LimitedByTransport)
	case m.want > 0 && (m.limits.by == LimitedByReceiver || m.limits.by == LimitedByTransport):
		m.limits.enter(now, LimitedByCwnd)
	case m.want == 0:
		m.limits.enter(now, LimitedByApplication)
	}
}
