package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// turnRTTs is for how many round trips the odd pairs of segments stay with the same members.
const turnRTTs = 8

// fewMembers is among how many active members a window is divided with each change: it
// costs about as much as the report. Among more it is divided once in a tick, or four
// times in a round trip if that is less often: each acknowledges about once in that time.
// Before that it is divided when one in so many is new: each of these uses what the last
// division would have left to one.
const fewMembers = 8

// perMember bounds what divisions among many members cost: two of them are at least so far
// apart, times the number of active members. With a thousand and more members a division takes
// about a microsecond for each, most of it to put their limits into force.
const (
	perMember    = 30 * time.Microsecond
	perMemberCut = perMember / 8 // after a loss or a mark that has made the window smaller
)

// divideWindow divides the window among the active members and tells those whose limits change.
func (g *group) divideWindow(now cc.Time) {
	atOnce := g.sendNow || g.ctl.PacingRate > 0
	g.changed, g.sendNow = false, false
	rto := g.rtt.rto()
	kept := g.alloc.members[:0]
	var resting []*member
	for _, m := range g.alloc.members {
		if m.isSilent(now, rto) {
			resting = append(resting, m)
			continue
		}
		m.wants = m.wantsMore(now, &g.rtt)
		g.setBounds(m)
		kept = append(kept, m)
	}
	clear(g.alloc.members[len(kept):])
	g.alloc.members, g.alloc.fresh = kept, 0
	g.alloc.odd = false
	if now >= g.alloc.turnEnds {
		g.alloc.turn++
		g.alloc.turnEnds = now.Add(turnRTTs * max(g.rtt.srtt, time.Millisecond))
	}
	if len(kept) > 1 {
		unpaced := g.unpacedWindow()
		if g.caps.rateBound {
			unpaced = 0
		}
		g.alloc.divideWindow(g.memberWindow(), unpaced)
		g.timers.scheduleAt(g, now.Add(rto)) // some may have ceased to contend by then, or to send
	}
	if g.alloc.odd {
		g.timers.scheduleAt(g, g.alloc.turnEnds)
	}
	contend, content := false, true
	for _, m := range kept {
		g.updateLimit(m, now, atOnce)
		contend, content = contend || m.wants, content && (!m.wants || g.hasAllItMayUse(m))
	}
	g.allContent = contend && content
	g.deactivateAll(resting, now)
	g.dividedAt = now
	g.divideAt = now.Add(max(tickInterval, g.rtt.srtt/4, time.Duration(len(kept))*perMember))
}

// hasWindowAlone reports whether m has the window for itself: no other member is active.
func (g *group) hasWindowAlone(m *member) bool {
	active := g.alloc.members
	return len(active) == 0 || len(active) == 1 && active[0] == m
}

// setBounds sets what m may have at least and at most.
func (g *group) setBounds(m *member) {
	window, least := g.memberWindow(), m.leastWindow()
	m.unit, m.used, m.segments = m.segmentSize(), m.counts, least
	m.floor, m.goal, m.bound = least, 0, window
	if m.terms.MinRate > 0 {
		m.floor = max(m.floor, roundUp(g.windowFor(m.terms.MinRate), m.unit))
	}
	if m.ceiling > 0 && g.rttIsKnown() {
		m.bound = roundUp(g.windowFor(m.ceiling), m.unit)
		if m.target > 0 {
			m.goal = roundUp(g.windowFor(m.target), m.unit)
		} else {
			m.bound += least // its pacer lets that much go at once
		}
		m.bound = min(max(m.bound, least), window)
	}
	m.most = m.bound
	if !m.wants {
		m.most = min(m.most, m.used)
	}
	m.floor = min(m.floor, m.bound)
	m.least = min(m.floor, m.most)
}

// updateLimit works out m's limit and puts it into force. What a raise lets out goes at once
// where time brought it about, where it is paced, or where it is more than double, so that
// acknowledgements of what is in flight would not let it out. Otherwise it waits for them:
// members that share a window, and all send when it grows, send in bursts.
func (g *group) updateLimit(m *member, now cc.Time, atOnce bool) {
	if g.alg == nil {
		return
	}
	switch {
	case g.hasWindowAlone(m):
		m.wants = m.wantsMore(now, &g.rtt)
		g.setBounds(m)
		g.alloc.giveWhole(&m.allocation, g.memberWindow())
	case !m.active || m.share == 0: // no division knows it yet
		m.wants = true
		g.setBounds(m)
		m.due = 0
		m.share = g.alloc.shareIfActive(&m.allocation)
		m.due = m.share
	}
	l := g.computeLimit(m)
	l.Now = atOnce || l.Cwnd > 2*max(m.inflight, m.limit.Cwnd)
	m.applyLimit(now, l)
	m.pacer.most = g.caps.burst
	if atOnce || m.inflight == 0 || m.waiter.turn.Load() != noTurn {
		g.wakeIfAllowed(m, now)
	}
}

// wakeIfAllowed wakes m if a refused Take may succeed now, or plans to once pacing lets it.
func (g *group) wakeIfAllowed(m *member, now cc.Time) {
	if turn := m.waiter.turn.Load(); turn != noTurn { // at the maximum rate
		if m.gate.blocked && turn == turnCame {
			m.wakeRelay()
		}
		return
	}
	if m.enforced || m.gate.mayOpen(now, m.want, m.inflight, m.segmentSize()) {
		if m.gate.blocked {
			m.wakeRelay()
		}
		return
	}
	if m.gate.blocked && m.gate.retryAt > now {
		g.timers.scheduleAt(m.clock, m.gate.retryAt)
	}
}

// computeLimit is what m may use from now on: its share of the window, all of it if it is the
// only member, and the same part of the pacing rate.
func (g *group) computeLimit(m *member) Limit {
	share := m.share
	if !m.active { // a burst after silence is no longer than that of a new connection
		burst := cc.InitialCwndPackets * m.segmentSize()
		if g.receives {
			burst = ReceiveBulk
		}
		share = min(share, m.path.toReference(burst))
	}
	l := Limit{Cwnd: share, PacingRate: g.ctl.PacingRate}
	if m.path.isFar() {
		l.Cwnd = max(m.path.fromReference(share)/m.segmentSize(), 1) * m.segmentSize()
	}
	if m.due < g.ctl.Cwnd && l.PacingRate > 0 { // 0 would not pace
		l.PacingRate = max(1, cc.Rate(float64(l.PacingRate)*float64(m.due)/float64(g.ctl.Cwnd)))
	}
	l.PacingRate = lesserRate(lesserRate(l.PacingRate, m.ceiling), m.own)
	if m.rampEnd != 0 && g.rttIsKnown() {
		l.PacingRate = lesserRate(l.PacingRate, max(1, cc.RateOf(m.share, g.rtt.srtt)))
	}
	return l
}

// windowFor is what is in flight at rate r; 0 before the round trip is known. Where a
// maximum rate binds, the parts of the window are the parts of that rate.
func (g *group) windowFor(r cc.Rate) cc.Bytes {
	if g.caps.rateBound {
		return cc.Bytes(float64(g.ctl.Cwnd) * min(1, float64(r)/float64(g.ctl.PacingRate)))
	}
	return min(r.BytesIn(g.rtt.srtt), cc.MaxCwnd)
}

// rttIsKnown reports whether windows can be had from rates yet.
func (g *group) rttIsKnown() bool { return g.rtt.srtt > 0 }

// hasAllItMayUse reports whether m has all that its terms allow, so that a wider window would
// be none to it. It goes by what the last division gave it, before that was cut to whole
// pairs of segments.
func (g *group) hasAllItMayUse(m *member) bool {
	return g.rttIsKnown() && m.ceiling > 0 && m.due >= m.bound && m.bound < g.memberWindow()
}
