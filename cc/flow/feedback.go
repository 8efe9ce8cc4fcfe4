package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// processReport takes in a report of m, tells the algorithm what is new in it, and puts what
// the algorithm was told into events.
func (g *group) processReport(m *member, r Report, events *[2]Event) (n int) {
	before := m.last.At
	m.noteLossEpoch(g.lossEpoch, g.lossAt)
	now := r.At
	news := m.readReport(r)
	g.prepareForReport(m, now)
	if m.enforced {
		g.noteDepartures(m, before)
	}
	m.updateInflight(news)
	g.countInflight(m)
	last := &m.last
	g.limitedBelow = last.RwndFull || !m.enforced && last.Unsent > max(4*m.segmentSize(), m.inflight/4)
	m.noteLimitedBy(now, g.limitedBelow)
	if g.alg == nil { // it is forgotten, and nothing has been sent since
		return 0
	}

	if news.timeouts > 0 || news.lost > 0 && last.Acked-last.Sacked >= m.before {
		m.losses++
		loss := cc.Loss{
			State: g.algorithmState(now), Lost: news.lost, SentAt: g.lossEpochStart(m, news), Timeout: news.timeouts > 0,
		}
		g.alg.OnLoss(loss)
		g.adoptReduction(now)
		events[n] = g.makeEvent(m, KindLoss, loss.State, 0, news.lost)
		n++
	}
	if news.acked > 0 {
		ack, beside := g.makeAck(m, news)
		if own := min(news.acked, last.Acked-m.before); own > 0 {
			ack.Acked, ack.Marked = own+beside, min(ack.Marked, own)
			g.alg.OnAck(ack)
			if ack.Marked > 0 {
				g.adoptReduction(now)
			} else {
				g.adoptControl(now)
			}
			events[n] = g.makeEvent(m, KindAck, ack.State, ack.RTT, own)
			events[n].Reverse = ack.ReverseQueue
			n++
		}
		if m.rampEnd != 0 { // what it held back may go
			m.rampEnd = 0
			g.updateLimit(m, now, true)
		}
	}
	m.timedOut = news.acked == 0 && (m.timedOut || news.timeouts > 0)
	g.noteAppLimited()
	if m.want > 0 || m.inflight > 0 || news.acked > 0 {
		m.lastBusy = now
	}
	return n
}

// prepareForReport has the algorithm be there for the first report, and m be active if it sends.
func (g *group) prepareForReport(m *member, now cc.Time) {
	if m.newlyDeparted() > 0 || m.enforced && m.last.Unsent > 0 && !m.last.RwndFull {
		g.onSendStart(m, now)
	}
	if g.alg == nil && g.idle.cwnd == 0 {
		g.startAlgorithm(now)
	}
	if !m.told {
		g.updateLimit(m, now, false)
	}
}

// noteDepartures takes in what an enforcing leg says has left. Nobody asks for grants there:
// bytes that have not left are what the flow wants to send.
func (g *group) noteDepartures(m *member, before cc.Time) {
	r := &m.last
	now := r.At
	if left := m.newlyDeparted(); left > 0 {
		g.noteSent(m, m.departureTime(before, left, m.path.fromReference(g.ctl.Cwnd)), left)
		m.pacer.spendBytes(now, left)
	}
	want := r.Unsent
	if r.RwndFull { // no share of the window would help
		want = 0
	} else if want >= m.segmentSize() && !g.hasAllItMayUse(m) {
		g.cwndFullAt, g.wantedAt = now, now
	}
	m.asked = now
	g.setWant(m, want)
}

// lossEpochStart says when the newest lost byte left. The transport hides it: a round trip
// ago, unless the hole of an earlier loss is still open. Then it is one event until all
// that had been sent when it began has arrived; and one for all members, whose packets
// the same full queue drops, though the last of them learns of it more than a round trip
// later than the first. A timeout has all that was sent until then sent again (RFC 6582
// §3.2): it begins the event anew for its flow.
func (g *group) lossEpochStart(m *member, n news) cc.Time {
	now := m.last.At
	if m.isRecovering() {
		since := m.lossAt
		if n.timeouts > 0 {
			m.recover, m.lossAt = m.sentOffset(), now
		}
		return since
	}
	g.lossEpoch++
	g.lossAt = now
	m.noteLossEpoch(g.lossEpoch, now)
	return max(1, now.Add(-g.srtt(m)))
}

// makeAck composes the event for newly delivered bytes, and for those of datagrams beside them.
func (g *group) makeAck(m *member, n news) (ev cc.Ack, beside cc.Bytes) {
	now := m.last.At
	beside = g.datagramsDelivered(now, n.acked)
	sent, rtt, rate := m.takeDelivered(n, &g.delivered, beside, g.leastRTT(m))
	reverse, oneWay := m.ways.addReading(m.last.Peer, now, rtt, m.rtt.min)
	if rtt > 0 {
		rtt = g.addRTTSample(m, now, rtt)
		reverse, oneWay = g.reverseQueue(m, now, max(0, rtt-g.rtt.min), reverse, oneWay)
		m.reverse, m.oneWay = reverse, oneWay
	}
	g.oneWay = oneWay
	if rate > 0 {
		g.rate = rate
	}
	ev = cc.Ack{
		Acked: n.acked + beside, Marked: min(n.marked, n.acked), RTT: rtt, DeliveryRate: rate, Sent: g.sinceStart(sent),
		L4S: m.last.L4S, ReverseQueue: reverse,
	}
	ev.State = g.algorithmState(now)
	g.checkHint(&ev)
	return ev, beside
}

// reverseQueue is how much of queueing, a round trip's delay beyond the least, was on the way back,
// if that is known: from the peer's clock, which says that reverse was on the way from it.
func (g *group) reverseQueue(
	m *member, now cc.Time, queueing, reverse time.Duration, oneWay bool,
) (back time.Duration, known bool) {
	reverse = min(reverse, queueing)
	shared := m.path.queue.Load()
	switch {
	case g.receives && oneWay: // data takes the way from it, and our acknowledgements the other
		return queueing - reverse, true
	case g.receives:
		there, known := shared.recentLeast(now, 2*m.rtt.srtt)
		return min(there, queueing), known
	case oneWay && shared != nil:
		shared.addDelay(now, queueing-reverse)
	}
	return reverse, oneWay
}

// addRTTSample takes in a round trip of m, and returns what it would have been on the group's
// reference path.
func (g *group) addRTTSample(m *member, now cc.Time, rtt time.Duration) time.Duration {
	rtt, changed := g.paths.addRTTSample(now, m.path, rtt, g.rtt.srtt)
	if changed {
		g.countInflightOf(m.path.members)
	}
	before := g.rtt.srtt
	g.rtt.addSample(rtt)
	g.changed = g.changed || changed || g.rtt.srtt != before // what rates and paths are worth in the window
	return rtt
}

// noteLimitedBy records what holds m back, as far as its last report shows it.
func (m *member) noteLimitedBy(now cc.Time, below bool) {
	r := &m.last
	m.limits.addElapsed(now)
	switch {
	case r.RwndFull:
		m.limits.enterState(now, LimitedByReceiver)
	case m.enforced && r.Unsent < m.segmentSize():
		m.limits.enterState(now, LimitedByApplication)
	case m.enforced && m.limit.PacingRate > 0 && m.inflight+2*m.segmentSize() <= m.limit.Cwnd:
		m.limits.enterState(now, LimitedByPacing)
	case m.enforced:
		m.limits.enterState(now, LimitedByCwnd)
	case below:
		m.limits.enterState(now, LimitedByTransport)
	case m.want > 0 && (m.limits.by == LimitedByReceiver || m.limits.by == LimitedByTransport):
		m.limits.enterState(now, LimitedByCwnd)
	case m.want == 0:
		m.limits.enterState(now, LimitedByApplication)
	}
}
