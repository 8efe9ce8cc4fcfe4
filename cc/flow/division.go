package flow

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// turnRTTs is for how many round trips the odd pairs of segments stay with the same members.
const turnRTTs = 8

// perMember bounds what divisions among many members cost: two of them are at least so far
// apart, times the number of active members. With a thousand and more members a division takes
// about a microsecond for each, most of it to put their limits into force.
const (
	perMember    = 30 * time.Microsecond
	perMemberCut = perMember / 8 // after a loss or a mark that has made the window smaller
)

// division shares a window among the members of a group, puts their limits into force, and knows which of
// them are active. The group's mutex guards it.
type division struct {
	window
	alloc     allocator
	sendNow   bool    // divide anew, and what the limits let out is not to wait for acknowledgements
	divideAt  cc.Time // not before this, unless it is urgent
	dividedAt cc.Time // the newest division
	wantedAt  cc.Time // when a member last got less than it wanted; 0: never
}

// addMember has m be a member on path p.
func (d *division) addMember(m *member, p *path) {
	m.place = len(d.members)
	d.members = append(d.members, m)
	d.weights += m.weight
	p.addMember(m)
	d.caps.addMember(m)
	d.changed = true
}

// removeMember has m be a member no more.
func (d *division) removeMember(m *member, now cc.Time) {
	d.setWant(m, 0)
	m.inflight, m.sampler.blocked = 0, 0
	d.countInflight(m)
	d.deactivateMember(m)
	m.path.removeMember(m, now)
	last := d.members[len(d.members)-1]
	d.members[m.place], last.place = last, m.place
	d.members[len(d.members)-1] = nil
	d.members = d.members[:len(d.members)-1]
	d.weights -= m.weight
	d.caps.removeMember(m)
	d.reapplyCaps(now)
	d.timers.cancelTimer(&m.timer)
	d.changed, d.sendNow = true, true
}

// setWant notes how much m wants beyond what it has.
func (d *division) setWant(m *member, want cc.Bytes) {
	if (want > 0) != (m.want > 0) {
		d.changed = true
		if want > 0 {
			if m.active && !m.wants { // it was told what one such member would have
				m.wants = true
				d.alloc.fresh++
			}
			d.wanting++
		} else {
			d.wanting--
		}
	}
	m.want = want
}

// onSendStart notes that m begins to send or to want to, if it did neither. One that comes
// after silence, its own among others that send or the group's, gets up to its share
// over a round trip: what others leave to it they leave over a round trip, and the path
// may have changed (RFC 7661 §4.4.3). A DelaySensitive flow does not wait for others.
func (d *division) onSendStart(m *member, now cc.Time) {
	wasIdle := d.endIdle(m.path, now)
	d.startAlgorithm(now)
	others := d.inflight > m.counts || d.wanting > 0 && m.want == 0
	if m.want == 0 && (wasIdle || m.isSilent(now, d.rtt.rto()) && others && m.terms.Class != DelaySensitive) {
		m.rampEnd = now.Add(d.rtt.srtt)
	}
	if !m.active {
		d.activateMember(m)
		d.updateLimit(m, now, true)
	}
}

// activateMember puts m into the list of active members, if it is not there.
func (d *division) activateMember(m *member) {
	if m.active {
		return
	}
	m.active, m.due, m.share = true, 0, 0
	d.alloc.fresh++
	i, _ := slices.BinarySearchFunc(d.alloc.members, m, compareMembers)
	d.alloc.members = slices.Insert(d.alloc.members, i, m)
	d.changed = true
}

// deactivateMember takes m out of the list of active members.
func (d *division) deactivateMember(m *member) {
	if !m.active {
		return
	}
	m.active = false
	if i, ok := slices.BinarySearchFunc(d.alloc.members, m, compareMembers); ok {
		d.alloc.members = slices.Delete(d.alloc.members, i, i+1)
	}
}

// deactivateAll has members be active no more, and tells each what it may burst when it sends
// again. They are not in the allocator's list.
func (d *division) deactivateAll(members []*member, now cc.Time) {
	for _, m := range members {
		m.active = false
	}
	for _, m := range members {
		m.ledger.releaseRing()
		d.updateLimit(m, now, false)
	}
}

// noteIdle notes when nothing is in flight and nobody wants to send, and gives back in
// time what an idle group does not need.
func (d *division) noteIdle(now cc.Time) {
	if d.inflight > 0 || d.wanting > 0 {
		return
	}
	if len(d.members) == 0 && cc.Closes(d.alg) {
		d.saveWindow() // whoever knows of it outside hears at once that the last connection has ended
	}
	if d.idle.since == 0 {
		d.idle.since = max(now, 1)
		d.scheduleTick(now.Add(d.rtt.rto()))
		return
	}
	if d.alg == nil {
		return
	}
	rto := d.rtt.rto()
	rested := d.idle.since.Add(rto)
	if now >= rested {
		for _, m := range d.alloc.members {
			rested = max(rested, m.pacer.tat.Add(rto)) // it has sent ahead of its rate
		}
	}
	if now < rested {
		d.scheduleTick(rested)
		return
	}
	active := d.alloc.members
	d.alloc.members = nil
	d.deactivateAll(active, now)
	if !d.forgetAfterIdle(now) {
		d.scheduleTick(d.idle.since.Add(d.lingerTime() + 1))
	}
}

// adoptReduction is adopt after a loss or a mark. Where the window or the rate is smaller by now, it is
// divided soon, but not for each loss: many members lose packets in the same round trip.
func (d *division) adoptReduction(now cc.Time) {
	before := d.ctl
	d.adoptControl(now)
	if d.ctl.Cwnd < before.Cwnd || d.ctl.PacingRate < before.PacingRate {
		d.divideAt = min(d.divideAt, d.dividedAt.Add(time.Duration(len(d.alloc.members))*perMemberCut))
	}
}

// divideIfDue divides the window if something has changed, now or when it is time to. Each
// call into the group that may change anything ends with it.
func (d *division) divideIfDue(now cc.Time) {
	d.noteIdle(now)
	switch {
	case !d.changed || d.alg == nil:
	case now < d.divideAt && len(d.alloc.members) > fewMembers*max(1, d.alloc.fresh):
		d.scheduleTick(d.divideAt)
	default:
		d.divideWindow(now)
	}
}

// divideWindow divides the window among the active members and tells those whose limits change.
func (d *division) divideWindow(now cc.Time) {
	atOnce := d.sendNow || d.ctl.PacingRate > 0
	d.changed, d.sendNow = false, false
	rto := d.rtt.rto()
	kept := d.alloc.members[:0]
	var resting []*member
	for _, m := range d.alloc.members {
		if m.isSilent(now, rto) {
			resting = append(resting, m)
			continue
		}
		m.wants = m.wantsMore(now, &d.rtt)
		d.setBounds(m)
		kept = append(kept, m)
	}
	clear(d.alloc.members[len(kept):])
	d.alloc.members, d.alloc.fresh = kept, 0
	d.alloc.odd = false
	if now >= d.alloc.turnEnds {
		d.alloc.turn++
		d.alloc.turnEnds = now.Add(turnRTTs * max(d.rtt.srtt, time.Millisecond))
	}
	if len(kept) > 1 {
		unpaced := d.unpacedWindow()
		if d.caps.rateBound {
			unpaced = 0
		}
		d.alloc.divideWindow(d.memberWindow(), unpaced)
		d.scheduleTick(now.Add(rto)) // some may have ceased to contend by then, or to send
	}
	if d.alloc.odd {
		d.scheduleTick(d.alloc.turnEnds)
	}
	contend, content := false, true
	for _, m := range kept {
		d.updateLimit(m, now, atOnce)
		contend, content = contend || m.wants, content && (!m.wants || d.hasAllItMayUse(m))
	}
	d.allContent = contend && content
	d.deactivateAll(resting, now)
	d.dividedAt = now
	d.divideAt = now.Add(max(tickInterval, d.rtt.srtt/4, time.Duration(len(kept))*perMember))
}

// hasWindowAlone reports whether m has the window for itself: no other member is active.
func (d *division) hasWindowAlone(m *member) bool {
	active := d.alloc.members
	return len(active) == 0 || len(active) == 1 && active[0] == m
}

// setBounds sets what m may have at least and at most.
func (d *division) setBounds(m *member) {
	window, least := d.memberWindow(), m.leastWindow()
	m.unit, m.used, m.segments = m.segmentSize(), m.counts, least
	m.floor, m.goal, m.bound = least, 0, window
	if m.terms.MinRate > 0 {
		m.floor = max(m.floor, roundUp(d.windowFor(m.terms.MinRate), m.unit))
	}
	if m.ceiling > 0 && d.rttIsKnown() {
		m.bound = roundUp(d.windowFor(m.ceiling), m.unit)
		if m.target > 0 {
			m.goal = roundUp(d.windowFor(m.target), m.unit)
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
func (d *division) updateLimit(m *member, now cc.Time, atOnce bool) {
	if d.alg == nil {
		return
	}
	switch {
	case d.hasWindowAlone(m):
		m.wants = m.wantsMore(now, &d.rtt)
		d.setBounds(m)
		d.alloc.giveWhole(&m.allocation, d.memberWindow())
	case !m.active || m.share == 0: // no division knows it yet
		m.wants = true
		d.setBounds(m)
		m.due = 0
		m.share = d.alloc.shareIfActive(&m.allocation)
		m.due = m.share
	}
	l := d.computeLimit(m)
	l.Now = atOnce || l.Cwnd > 2*max(m.inflight, m.limit.Cwnd)
	m.applyLimit(now, l)
	m.pacer.most = d.caps.burst
	if atOnce || m.inflight == 0 || m.waiter.turn.Load() != noTurn {
		d.wakeIfAllowed(m, now)
	}
}

// computeLimit is what m may use from now on: its share of the window, all of it if it is the
// only member, and the same part of the pacing rate.
func (d *division) computeLimit(m *member) Limit {
	share := m.share
	if !m.active { // a burst after silence is no longer than that of a new connection
		burst := cc.InitialCwndPackets * m.segmentSize()
		if d.receives {
			burst = ReceiveBulk
		}
		share = min(share, m.path.toReference(burst))
	}
	l := Limit{Cwnd: share, PacingRate: d.ctl.PacingRate}
	if m.path.isFar() {
		l.Cwnd = max(m.path.fromReference(share)/m.segmentSize(), 1) * m.segmentSize()
	}
	if m.due < d.ctl.Cwnd && l.PacingRate > 0 { // 0 would not pace
		l.PacingRate = max(1, cc.Rate(float64(l.PacingRate)*float64(m.due)/float64(d.ctl.Cwnd)))
	}
	l.PacingRate = lesserRate(lesserRate(l.PacingRate, m.ceiling), m.own)
	if m.rampEnd != 0 && d.rttIsKnown() {
		l.PacingRate = lesserRate(l.PacingRate, max(1, cc.RateOf(m.share, d.rtt.srtt)))
	}
	return l
}

// windowFor is what is in flight at rate r; 0 before the round trip is known. Where a
// maximum rate binds, the parts of the window are the parts of that rate.
func (d *division) windowFor(r cc.Rate) cc.Bytes {
	if d.caps.rateBound {
		return cc.Bytes(float64(d.ctl.Cwnd) * min(1, float64(r)/float64(d.ctl.PacingRate)))
	}
	return min(r.BytesIn(d.rtt.srtt), cc.MaxCwnd)
}

// rttIsKnown reports whether windows can be had from rates yet.
func (d *division) rttIsKnown() bool { return d.rtt.srtt > 0 }

// hasAllItMayUse reports whether m has all that its terms allow, so that a wider window would
// be none to it. It goes by what the last division gave it, before that was cut to whole
// pairs of segments.
func (d *division) hasAllItMayUse(m *member) bool {
	return d.rttIsKnown() && m.ceiling > 0 && m.due >= m.bound && m.bound < d.memberWindow()
}

// wakeIfAllowed wakes m if a refused Take may succeed now, or plans to once pacing lets it.
func (d *division) wakeIfAllowed(m *member, now cc.Time) {
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
		d.timers.scheduleAt(&m.timer, m.gate.retryAt)
	}
}

// membersWantWindow reports whether a member wants more of the window than it has, or did
// within the last round trip: a relay reads between two writes. One that waits for
// its retransmission timer does not ask, but has not given up the window.
func (d *division) membersWantWindow(now cc.Time) bool {
	if d.wantedAt != 0 && now.Sub(d.wantedAt) <= max(d.rtt.srtt, leastTick) {
		return true
	}
	return slices.ContainsFunc(d.alloc.members, func(m *member) bool { return m.wantsMore(now, &d.rtt) || m.timedOut })
}

// wakeDatagrams wakes the datagrams that may go now.
func (d *division) wakeDatagrams(now cc.Time) {
	if len(d.datagrams) == 0 {
		return
	}
	d.retireDatagrams(now)
	view := d.datagramWindow()
	for _, s := range d.datagrams {
		d.scheduleRetiring(s, &view)
		if s.waiting == 0 {
			continue
		}
		s.refillRoom(now, &view)
		if d.membersWantWindow(now) && !s.mayGo(s.waiting, s.sparse, &view) {
			d.scheduleTick(s.nextTryAt(now, &view))
			continue
		}
		s.waiting = 0
		s.wake(now)
	}
}

// takeWindowAway returns the window that m takes with it: its part of d's, were all active
// members to use theirs, but no more than it needs by what has arrived of late, or ten
// segments. Those that leave together take no part twice. The path is known to carry
// that window if it is what has arrived.
func (d *division) takeWindowAway(m *member, now cc.Time) (window cc.Bytes, known bool) {
	if d.alg == nil {
		return 0, false
	}
	if now.Sub(d.takenAt) > d.rtt.rto() {
		d.takenAway = 0
	}
	weights := m.weight
	for _, other := range d.alloc.members {
		if other != m && (other.want > 0 || other.inflight > 0) {
			weights += other.weight
		}
	}
	part := float64(m.weight) / float64(weights) * (1 - d.takenAway)
	d.takenAway, d.takenAt = d.takenAway+part, now
	window = min(d.ctl.Cwnd, m.rate.BytesIn(d.rtt.min)) // m's samples of the rate are of all that d delivers
	least := min(cc.InitialCwndPackets*m.segmentSize(), d.ctl.Cwnd)
	return max(1, cc.Bytes(part*float64(max(window, least)))), window >= least
}
