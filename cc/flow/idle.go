package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// A group keeps its window for linger after the last byte arrived, or for three
// retransmission timeouts if those are longer, whether it has members or not: what
// begins then is paced over a round trip (RFC 7661 §4.4.3 preserves a window that may
// not have been validated, and wants its bursts mitigated). From then on the window
// halves with every timeout, down to the initial one (RFC 2861), and the algorithm's
// state is given back; with Terms.Restarts it does so from the first timeout on. After
// memoryLasts nothing is known of a group without members. An algorithm that somebody
// outside knows of goes with the last member.
const (
	linger      = 10 * time.Second
	memoryLasts = 5 * time.Minute
)

// noteIdle notes when nothing is in flight and nobody wants to send, and gives back in
// time what an idle group does not need.
func (g *group) noteIdle(now cc.Time) {
	if g.inflight > 0 || g.wanting > 0 {
		return
	}
	if len(g.members) == 0 && cc.Closes(g.alg) {
		g.saveWindow() // whoever knows of it outside hears at once that the last connection has ended
	}
	if g.idle.since == 0 {
		g.idle.since = max(now, 1)
		g.timers.scheduleAt(g, now.Add(g.rtt.rto()))
		return
	}
	if g.alg == nil {
		return
	}
	rto := g.rtt.rto()
	rested := g.idle.since.Add(rto)
	if now >= rested {
		for _, m := range g.alloc.members {
			rested = max(rested, m.pacer.tat.Add(rto)) // it has sent ahead of its rate
		}
	}
	if now < rested {
		g.timers.scheduleAt(g, rested)
		return
	}
	active := g.alloc.members
	g.alloc.members = nil
	g.deactivateAll(active, now)
	if !g.forgetAfterIdle(now) {
		g.timers.scheduleAt(g, g.idle.since.Add(g.lingerTime()+1))
	}
}

// deactivateAll has members be active no more, and tells each what it may burst when it sends
// again. They are not in the allocator's list.
func (g *group) deactivateAll(members []*member, now cc.Time) {
	for _, m := range members {
		m.active = false
	}
	for _, m := range members {
		m.ledger.releaseRing()
		g.updateLimit(m, now, false)
	}
}

// endIdle ends an idle time for a member on path p, and reports whether it was longer
// than a retransmission timeout.
func (g *group) endIdle(p *path, now cc.Time) bool {
	if g.idle.since == 0 {
		return false
	}
	long := now.Sub(g.idle.since) > g.rtt.rto() && g.rtt.srtt > 0
	g.restartFromMemory(p, now)
	g.idle.since = 0
	return long
}

// forgetAfterIdle drops the algorithm of a group that has been idle for so long that it would not
// go on from where it was, and reports whether it has been.
func (g *group) forgetAfterIdle(now cc.Time) bool {
	if g.idle.since == 0 || now.Sub(g.idle.since) <= g.lingerTime() {
		return false
	}
	g.saveWindow()
	return true
}

// saveWindow drops the algorithm, if there is one, and keeps its window.
func (g *group) saveWindow() {
	if g.alg == nil {
		return
	}
	g.idle.cwnd = g.alg.Control().Cwnd
	g.closeAlgorithm()
	g.initial, g.ssthresh, g.takenAway = 0, 0, 0
	g.ctl = cc.Control{}
}

// lingerTime is how long an idle group stays as it is.
func (g *group) lingerTime() time.Duration {
	if g.restartsAfterIdle() {
		return g.rtt.rto()
	}
	return max(linger, 3*g.rtt.rto())
}

// restartsAfterIdle is Terms.Restarts.
func (g *group) restartsAfterIdle() bool { return len(g.members) > 0 && g.members[0].terms.Restarts }

// rememberedWindow is the window with which a group would start at now whose algorithm is
// forgotten: at least the usual first one, unless it was less.
func (g *group) rememberedWindow(now cc.Time) cc.Bytes {
	idle := now.Sub(g.idle.since) - g.lingerTime()
	halvings := min(max(0, idle/g.rtt.rto()), 62)
	if g.restartsAfterIdle() {
		halvings++ // for the timeout that it lingered
	}
	return max(g.idle.cwnd>>halvings, min(g.idle.cwnd, cc.InitialCwndPackets*g.mss))
}

// restartFromMemory readies a group that has forgotten its algorithm for a member on path p: it
// starts anew from what is left of the window, up to which the path is known, and with
// p's base round trip. Of a path that is new nothing is known.
func (g *group) restartFromMemory(p *path, now cc.Time) {
	g.forgetAfterIdle(now)
	if g.idle.cwnd == 0 {
		return
	}
	initial, ssthresh := p.fromReference(g.rememberedWindow(now)), p.fromReference(g.idle.cwnd)
	if p.base == 0 {
		initial, ssthresh = 0, 0
	}
	g.initial, g.ssthresh, g.idle.cwnd = initial, ssthresh, 0
	g.rtt = rttEstimator{srtt: p.base, rttvar: p.base / 2, min: p.base}
	g.cwndFullAt = 0
	g.setReferencePath(p)
}

// divideIfDue divides the window if something has changed, now or when it is time to. Each
// call into the group that may change anything ends with it.
func (g *group) divideIfDue(now cc.Time) {
	g.noteIdle(now)
	switch {
	case !g.changed || g.alg == nil:
	case now < g.divideAt && len(g.alloc.members) > fewMembers*max(1, g.alloc.fresh):
		g.timers.scheduleAt(g, g.divideAt)
	default:
		g.divideWindow(now)
	}
}

// divideAndUnlock divides the window anew where that is due, and releases the lock.
func (g *group) divideAndUnlock(now cc.Time) {
	g.divideIfDue(now)
	g.mu.Unlock()
}
