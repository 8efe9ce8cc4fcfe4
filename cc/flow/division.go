package flow

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// turnRTTs is for how many round trips the odd pairs of segments stay with the same members.
const turnRTTs = 8

// perMember bounds the cost of divisions among many members: two of them are at least this far apart for each active
// member. With a thousand members a division takes about a microsecond for each, mostly to put limits into force.
const (
	perMember    = 30 * time.Microsecond
	perMemberCut = perMember / 8 // after a loss or a mark that has reduced the window
)

// followerPace is how fast a follower may send, in quarters of its part of the window per round trip.
const followerPace = 5

// division shares the window among the members that are active, and puts their limits into force. A member is active
// from when it sends or wants to, until it has been silent for a retransmission timeout.
//
//	           onSendStart           acknowledged        silent for a timeout
//	inactive ──────────────▶ active, ramping ────▶ active ──────────▶ inactive
//	limit ≤ 10 segments      paced to its share    in each division
//
// The group's mutex guards it.
type division struct {
	window
	allocator allocator // has the list of active members
	sendNow   bool      // limits of the next division may be used without waiting for an acknowledgement
	divideAt  cc.Time   // among many members, no division before this
	dividedAt cc.Time   // the newest division
	wantedAt  cc.Time   // when a member last got less than it wanted; 0: never
}

// addMember adds m on path p. It is inactive at first.
func (d *division) addMember(m *member, p *path) {
	m.groupIndex = len(d.members)
	d.members = append(d.members, m)
	d.weights += m.weight
	p.routeMember(m)
	if m.follows { // it comes from another group
		d.followers = append(d.followers, m)
	}
	d.caps.countCaps(m)
	d.needsDivision = true
}

// removeMember removes m. What it had in flight no longer counts.
func (d *division) removeMember(m *member, now cc.Time) {
	d.setWant(m, 0)
	m.inflight, m.sampler.rwndBlocked = 0, 0
	d.countInflight(m)
	d.deactivateMember(m)
	m.path.unrouteMember(m, now)
	last := d.members[len(d.members)-1]
	d.members[m.groupIndex], last.groupIndex = last, m.groupIndex
	d.members[len(d.members)-1] = nil
	d.members = d.members[:len(d.members)-1]
	d.followers = slices.DeleteFunc(d.followers, func(f *member) bool { return f == m })
	d.weights -= m.weight
	d.caps.uncountCaps(m)
	d.reapplyCaps(now)
	d.timers.cancelTimer(&m.timer)
	d.needsDivision, d.sendNow = true, true
}

// setWant stores how much m wants beyond what it has.
func (d *division) setWant(m *member, want cc.Bytes) {
	if (want > 0) != (m.want > 0) {
		d.needsDivision = true
		if want > 0 {
			if m.active && !m.contends { // its limit is that of a single newcomer
				m.contends = true
				d.allocator.newcomers++
			}
			d.wanting++
		} else {
			d.wanting--
		}
	}
	m.want = want
}

// onSendStart is called when m is about to send. It starts the algorithm if there is none, and activates m. After a
// silence m is paced to its share for a round trip: other members need that long to give way, and if the whole group
// was silent, the path may have changed (RFC 7661 §4.4.3). A DelaySensitive flow does not wait for others.
func (d *division) onSendStart(m *member, now cc.Time) {
	wasIdle := d.endIdle(m.path, now)
	d.startAlgorithm(now)
	others := d.inflight > m.counted || d.wanting > 0 && m.want == 0
	isSilent := others && m.terms.Class != DelaySensitive && m.isSilent(now, d.rtt.rto())
	if m.want == 0 && !m.follows && (wasIdle || isSilent) {
		m.ramping = true
	}
	if !m.active {
		d.activateMember(m)
		d.updateLimit(m, now, true)
	}
}

// activateMember puts m into the list of active members, if it is not in it.
func (d *division) activateMember(m *member) {
	if m.active {
		return
	}
	m.active, m.allotted, m.inflightLimit = true, 0, 0
	d.allocator.newcomers++
	i, _ := slices.BinarySearchFunc(d.allocator.active, m, compareMembers)
	d.allocator.active = slices.Insert(d.allocator.active, i, m)
	d.needsDivision = true
}

// deactivateMember takes m out of the list of active members.
func (d *division) deactivateMember(m *member) {
	if !m.active {
		return
	}
	m.active = false
	if i, ok := slices.BinarySearchFunc(d.allocator.active, m, compareMembers); ok {
		d.allocator.active = slices.Delete(d.allocator.active, i, i+1)
	}
}

// deactivateAll makes members inactive, and limits each to the burst that it may send when it starts again. The caller
// has taken them out of the allocator's list.
func (d *division) deactivateAll(members []*member, now cc.Time) {
	for _, m := range members {
		m.active = false
	}
	for _, m := range members {
		m.ledger.releaseRing()
		d.updateLimit(m, now, false)
	}
}

// releaseIfIdle does nothing while a member sends or wants to. It records when the group became idle, makes the members
// inactive after a retransmission timeout, and releases the algorithm after lingerTime.
func (d *division) releaseIfIdle(now cc.Time) {
	if d.inflight > 0 || d.wanting > 0 {
		return
	}
	if len(d.members) == 0 && cc.Closes(d.algorithm) {
		d.saveWindow() // an agent must hear at once that the last connection has ended
	}
	if d.idle.since == 0 {
		d.idle.since = max(now, 1)
		d.scheduleTick(now.Add(d.rtt.rto()))
		return
	}
	if d.algorithm == nil {
		return
	}
	rto := d.rtt.rto()
	inactiveAt := d.idle.since.Add(rto)
	if now >= inactiveAt {
		for _, m := range d.allocator.active {
			inactiveAt = max(inactiveAt, m.pacer.tat.Add(rto)) // it may have sent ahead of its rate
		}
	}
	if now < inactiveAt {
		d.scheduleTick(inactiveAt)
		return
	}
	active := d.allocator.active
	d.allocator.active = nil
	d.deactivateAll(active, now)
	if !d.forgetAfterIdle(now) {
		d.scheduleTick(d.idle.since.Add(d.lingerTime() + 1))
	}
}

// adoptReduction calls adoptControl after a loss or a mark. If the window or the rate has become smaller, it brings the
// next division forward, but does not divide for each loss: many members lose packets in the same round trip.
func (d *division) adoptReduction(now cc.Time) {
	before := d.control
	d.adoptControl(now)
	if d.control.Cwnd < before.Cwnd || d.control.PacingRate < before.PacingRate {
		d.divideAt = min(d.divideAt, d.dividedAt.Add(time.Duration(len(d.allocator.active))*perMemberCut))
	}
}

// divideIfDue divides the window if something has changed: now, or at divideAt. Each call into the group that may
// change something ends with it.
func (d *division) divideIfDue(now cc.Time) {
	d.releaseIfIdle(now)
	switch {
	case !d.needsDivision || d.algorithm == nil:
	case now < d.divideAt && len(d.allocator.active) > fewMembers*max(1, d.allocator.newcomers):
		d.scheduleTick(d.divideAt)
	default:
		d.divideWindow(now)
	}
}

// divideWindow divides the window among the active members and puts the limits that change into force. Members that
// have become silent are made inactive.
func (d *division) divideWindow(now cc.Time) {
	atOnce := d.sendNow || d.control.PacingRate > 0
	d.needsDivision, d.sendNow = false, false
	rto := d.rtt.rto()
	kept := d.allocator.active[:0]
	var silent []*member
	for _, m := range d.allocator.active {
		if m.isSilent(now, rto) {
			silent = append(silent, m)
			continue
		}
		m.contends = m.wantsMore(now, &d.rtt)
		d.setBounds(m)
		kept = append(kept, m)
	}
	clear(d.allocator.active[len(kept):])
	d.allocator.active, d.allocator.newcomers = kept, 0
	d.allocator.hasOddPairs = false
	if now >= d.allocator.pairTurnEnds {
		d.allocator.pairTurn++
		d.allocator.pairTurnEnds = now.Add(turnRTTs * max(d.rtt.srtt, time.Millisecond))
	}
	if len(kept) > 1 {
		unpaced := d.unpacedWindow()
		if d.caps.rateBinds {
			unpaced = 0
		}
		d.allocator.allotWindow(d.control.Cwnd, unpaced)
		d.scheduleTick(now.Add(rto)) // by then members may have ceased to contend or to send
	}
	if d.allocator.hasOddPairs {
		d.scheduleTick(d.allocator.pairTurnEnds)
	}
	anyContends, satisfied := false, true
	for _, m := range kept {
		d.updateLimit(m, now, atOnce)
		anyContends, satisfied = anyContends || m.contends, satisfied && (!m.contends || d.hasAllItMayUse(m))
	}
	d.allSatisfied = anyContends && satisfied
	d.deactivateAll(silent, now)
	d.dividedAt = now
	d.divideAt = now.Add(max(tickInterval, d.rtt.srtt/4, time.Duration(len(kept))*perMember))
}

// hasWindowAlone reports whether no other member than m is active.
func (d *division) hasWindowAlone(m *member) bool {
	active := d.allocator.active
	return len(active) == 0 || len(active) == 1 && active[0] == m
}

// setBounds sets the inputs of a division for m: what it may have at least and at most.
func (d *division) setBounds(m *member) {
	window, least := d.control.Cwnd, m.leastWindow()
	m.segment, m.used, m.minimum = m.segmentSize(), m.counted, least
	m.floor, m.targetBytes, m.allowed = least, 0, window
	if m.terms.MinRate > 0 {
		m.floor = max(m.floor, roundUp(d.windowFor(m.terms.MinRate), m.segment))
	}
	if m.ceilingRate > 0 && d.rttIsKnown() {
		m.allowed = roundUp(d.windowFor(m.ceilingRate), m.segment)
		if m.targetRate > 0 {
			m.targetBytes = roundUp(d.windowFor(m.targetRate), m.segment)
		} else {
			m.allowed += least // its pacer lets this much go at once
		}
		m.allowed = min(max(m.allowed, least), window)
	}
	m.usable = m.allowed
	if !m.contends {
		m.usable = min(m.usable, m.used)
	}
	m.floor = min(m.floor, m.allowed)
	m.usableFloor = min(m.floor, m.usable)
}

// updateLimit computes m's limit and puts it into force. With atOnce, what a raise lets out goes at once (Limit.Now).
// A raise that more than doubles the limit also does, because acknowledgements of what is in flight would not let it
// out. Otherwise acknowledgements let it out: members that share a window, and all send when it grows, send in bursts.
func (d *division) updateLimit(m *member, now cc.Time, atOnce bool) {
	if d.algorithm == nil {
		return
	}
	switch {
	case d.hasWindowAlone(m):
		m.contends = m.wantsMore(now, &d.rtt)
		d.setBounds(m)
		d.allocator.allotToOne(&m.allocation, d.control.Cwnd)
	case !m.active || m.inflightLimit == 0: // no division has included it yet
		m.contends = true
		d.setBounds(m)
		m.allotted = 0
		m.inflightLimit = d.allocator.limitIfContending(&m.allocation)
		m.allotted = m.inflightLimit
	}
	l := d.computeLimit(m)
	l.Now = atOnce || l.Cwnd > 2*max(m.inflight, m.limit.Cwnd)
	m.applyLimit(now, l)
	m.pacer.maxBurst = d.caps.burstTime
	if atOnce || m.inflight == 0 || m.waiter.turn.Load() != noTurn {
		d.wakeIfAllowed(m, now)
	}
}

// computeLimit returns what m may use from now on: its share of the window and the same part of the pacing rate.
func (d *division) computeLimit(m *member) Limit {
	share := m.inflightLimit
	if !m.active { // its first burst is at most that of a new connection
		burst := cc.InitialCwndPackets * m.segmentSize()
		if d.receives {
			burst = ReceiveBulk
		}
		share = min(share, m.path.toReference(burst))
	}
	l := Limit{Cwnd: share, PacingRate: d.control.PacingRate}
	if m.path.isFar() {
		l.Cwnd = max(m.path.fromReference(share)/m.segmentSize(), 1) * m.segmentSize()
	}
	if m.allotted < d.control.Cwnd && l.PacingRate > 0 { // at least 1, because 0 would not pace
		l.PacingRate = max(1, cc.Rate(float64(l.PacingRate)*float64(m.allotted)/float64(d.control.Cwnd)))
	}
	l.PacingRate = lesserRate(lesserRate(l.PacingRate, m.ceilingRate), m.ownRate)
	if m.ramping && d.rttIsKnown() {
		l.PacingRate = lesserRate(l.PacingRate, max(1, cc.RateOf(m.inflightLimit, d.rtt.srtt)))
	}
	if m.follows && d.rttIsKnown() { // one acknowledgement of another member may free all that m has in flight
		l.PacingRate = lesserRate(l.PacingRate, max(1, cc.RateOf(followerPace*m.inflightLimit/4, d.rtt.srtt)))
	}
	return l
}

// windowFor returns what is in flight at rate r; 0 before the round trip is known. Where a maximum rate binds, the
// parts of the window are the parts of that rate.
func (d *division) windowFor(r cc.Rate) cc.Bytes {
	if d.caps.rateBinds {
		return cc.Bytes(float64(d.control.Cwnd) * min(1, float64(r)/float64(d.control.PacingRate)))
	}
	return min(r.BytesIn(d.rtt.srtt), cc.MaxCwnd)
}

// rttIsKnown reports whether rates can be converted to windows yet.
func (d *division) rttIsKnown() bool { return d.rtt.srtt > 0 }

// hasAllItMayUse reports whether m has all that its terms allow, so that it has no use for a wider window. It compares
// with the last division, before that was cut to whole pairs of segments.
func (d *division) hasAllItMayUse(m *member) bool {
	return d.rttIsKnown() && m.ceilingRate > 0 && m.allotted >= m.allowed && m.allowed < d.control.Cwnd
}

// wakeIfAllowed wakes m's relay if a refused Take may succeed now, or schedules that for when pacing lets it.
func (d *division) wakeIfAllowed(m *member, now cc.Time) {
	if turn := m.waiter.turn.Load(); turn != noTurn { // it waits, or may pass, at the maximum rate
		if m.gate.waiting && turn == turnCame {
			m.wakeRelay()
		}
		return
	}
	if m.enforced || m.gate.mayOpen(now, m.want, m.inflight, m.segmentSize()) {
		if m.gate.waiting {
			m.wakeRelay()
		}
		return
	}
	if m.gate.waiting && m.gate.retryAt > now {
		d.timers.scheduleAt(&m.timer, m.gate.retryAt)
	}
}

// membersWantWindow reports whether a member that does not follow wants more of the window than it has, or did within
// the last round trip: a relay reads between two writes. A member that waits for its retransmission timer does not ask,
// but still wants its part.
func (d *division) membersWantWindow(now cc.Time) bool {
	if d.wantedAt != 0 && now.Sub(d.wantedAt) <= max(d.rtt.srtt, leastTick) {
		return true
	}
	return slices.ContainsFunc(d.allocator.active, func(m *member) bool {
		return !m.follows && (m.wantsMore(now, &d.rtt) || m.timedOut)
	})
}

// setFollows makes m a follower, or a member that reports its own bytes.
func (d *division) setFollows(m *member, now cc.Time, follows bool) {
	d.releaseInflight(m, now)
	d.followers = slices.DeleteFunc(d.followers, func(f *member) bool { return f == m })
	if m.follows = follows; follows {
		d.followers = append(d.followers, m)
	}
}

// releaseInflight counts what m has in flight as arrived, and makes m want nothing of the window.
func (d *division) releaseInflight(m *member, now cc.Time) {
	if m.inflight > 0 {
		m.ackSentBy(now, now)
		d.countInflight(m)
		d.needsDivision = true
	}
	d.setWant(m, 0)
}

// wakeFollowers wakes the followers that may send by now: they have room, or no other member wants the window.
func (d *division) wakeFollowers(now cc.Time) {
	if len(d.followers) == 0 {
		return
	}
	isHeld := d.membersWantWindow(now)
	for _, m := range d.followers {
		if isHeld {
			d.wakeIfAllowed(m, now)
		} else {
			if m.gate.waiting && m.waiter.turn.Load() == noTurn {
				m.wakeRelay()
			}
			d.releaseInflight(m, now)
		}
		if m.isBusy() {
			d.scheduleTick(now.Add(max(d.rtt.srtt, leastTick)))
		}
	}
}

// takeWindowAway returns the window that m takes to another group: its part by weight of a window that is at most what
// the group's delivery rate fills, or ten segments. What members took within the last timeout is not given again.
// known reports whether the path is known to carry that window, because as much has been delivered.
func (d *division) takeWindowAway(m *member, now cc.Time) (window cc.Bytes, known bool) {
	if d.algorithm == nil {
		return 0, false
	}
	if now.Sub(d.movedAt) > d.rtt.rto() {
		d.movedPart = 0
	}
	weights := m.weight
	for _, other := range d.allocator.active {
		if other != m && (other.want > 0 || other.inflight > 0) {
			weights += other.weight
		}
	}
	part := float64(m.weight) / float64(weights) * (1 - d.movedPart)
	d.movedPart, d.movedAt = d.movedPart+part, now
	window = min(d.control.Cwnd, m.deliveryRate.BytesIn(d.rtt.min)) // m's samples are of the group's rate
	least := min(cc.InitialCwndPackets*m.segmentSize(), d.control.Cwnd)
	return max(1, cc.Bytes(part*float64(max(window, least)))), window >= least
}
