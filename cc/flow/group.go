package flow

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// group is the flows that share one algorithm and one window: a macroflow of RFC 3124. It takes in what happens (a
// report, a request, a tick, a move) and lets the window and the division beneath it answer.
//
// Four kinds of locks, always taken in this order:
//
//	lock                  guards                                         what runs under it
//	1 Manager.mu          maps and lists of groups, paths,               opening, moving, closing, hints;
//	                      rate limits; path.hostIndex                    never a report or a Take
//	2 group.mu            the group, its members (also Flow.closed),     algorithms, Leg.Apply, Leg.Wake: they neither
//	                      its paths                                      block nor call back
//	  two of them         both groups of a move                          only with Manager.mu held
//	3 rateLimit.mu        bucket, queue and turns of a maximum rate      nothing else; waiters are woken without it
//	  hostQueue.mu        the queue on the way to a host                 nothing else
//	4 timers.mu           one shard's heap of timers                     Manager.Arm
//
// Timers, Manager.Trace and Manager.HintNews run without any of these locks.
//
//	atomic                written with             read without the lock by
//	Flow.home             both groups' mu          lockGroup: load, lock, load again, because the flow may have moved
//	member.needsGrants    group.mu                 Flow.NeedsGrants, before each write over an enforcing leg
//	waiter.turn           rateLimit.mu             division.wakeIfAllowed, updateLimit
//	rateLimit.users       Manager.mu               member.passMaxRate
//	path.queue            Manager.mu               members on the path
//	delivery.edgeTotal    (added to)               all groups with the same algorithm
type group struct {
	hintNews func(HintNews) // Manager.HintNews; nil: not called

	mu sync.Mutex
	division
}

// newGroup returns a group without members. edge counts the bytes that all groups with its algorithm deliver.
func newGroup(r groupTerms, timers *timers, seed uint64, now cc.Time, edge *atomic.Int64) *group {
	g := &group{}
	g.key, g.name, g.spec, g.params, g.receives, g.seed = r.key, r.name, r.spec, r.params, r.receives, seed
	g.timers, g.timer.owner, g.onWake = timers, g, g.wakeAlgorithm
	g.idle.since, g.delivered.edgeTotal = max(now, 1), edge
	return g
}

// divideAndUnlock divides the window if that is due, and releases the lock.
func (g *group) divideAndUnlock(now cc.Time) {
	g.divideIfDue(now)
	g.mu.Unlock()
}

// onTimer does what is due: the algorithm's tick, the end of an old hint's cap, idleness, a division.
func (g *group) onTimer(now cc.Time) {
	var events [1]Event
	n := 0
	g.mu.Lock()
	if g.reapplyCaps(now) {
		g.sendNow = true
	}
	if len(g.members) > 0 && g.algorithm != nil && g.control.NextTick != 0 {
		if g.control.NextTick <= now {
			events[0], n, g.sendNow = g.tickAlgorithm(now), 1, true
		} else {
			g.scheduleTick(g.control.NextTick)
		}
	}
	g.needsDivision = g.needsDivision || len(g.allocator.active) > 1 // some may have ceased to contend or to send
	g.wakeFollowers(now)
	g.divideIfDue(now)
	g.mu.Unlock()
	g.emitEvents(events[:n]...)
}

// smallRaise is the part of a window, one in smallRaise, below which a raise waits for an acknowledgement of the rest.
// A window of this many segments always has one in flight.
const smallRaise = 8

// wakeAlgorithm calls OnTick of algorithm number if it is still the group's, because something outside has changed. It
// runs on the goroutine that called cc.Config.Wake. Making the transport send what a small raise lets out would cost
// as much as the rest of a decision, so that waits for an acknowledgement.
func (g *group) wakeAlgorithm(number uint64, now cc.Time) {
	g.mu.Lock()
	if g.algorithm == nil || g.startCount != number || len(g.members) == 0 {
		g.mu.Unlock()
		return
	}
	cwnd := g.control.Cwnd
	event := g.tickAlgorithm(now)
	g.sendNow = g.sendNow || g.control.Cwnd-cwnd >= cwnd/smallRaise
	g.divideAndUnlock(now)
	g.emitEvents(event)
}

// isBusyTowards reports whether members send over a path.
func (g *group) isBusyTowards(p *path) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.receives {
		return false
	}
	for _, m := range p.members {
		if m.isBusy() {
			return true
		}
	}
	return false
}

// emitEvents passes events to Manager.Trace. It is called without locks.
func (g *group) emitEvents(events ...Event) {
	if g.emit == nil {
		return
	}
	for _, e := range events {
		g.emit(e)
	}
}

// processReport takes in a report of m and does everything that follows from it:
//
//  1. updateFromReport: what arrived, was lost, and is in flight and wanted by m now;
//  2. informAlgorithm: losses, then acknowledgements, whereupon the window may change;
//  3. divideIfDue: shares of the window, pushed to the legs with a limit that changes;
//  4. relays and followers that now have room are woken.
//
// It puts what the algorithm learnt into events and returns how many there are.
func (g *group) processReport(m *member, r Report, events *[2]Event) (n int) {
	delta := g.updateFromReport(m, r)
	if g.algorithm != nil { // nil: it was released, and nothing has been sent since
		n = g.informAlgorithm(m, delta, events)
	}
	g.divideIfDue(r.At)
	g.wakeIfAllowed(m, r.At)
	g.wakeFollowers(r.At)
	return n
}

// updateFromReport updates what m has in flight and wants, and returns what is new in the report.
func (g *group) updateFromReport(m *member, r Report) reportDelta {
	before := m.last.At
	m.joinLossEpoch(g.lossEpoch, g.lossEpochAt)
	delta := m.readReport(r)
	g.prepareForReport(m, r.At)
	if m.enforced {
		g.countDepartures(m, before)
	}
	m.updateInflight(delta)
	g.countInflight(m)
	if m.inflight > 0 { // a flow that goes on from elsewhere has sent before: its room is not for the others
		g.activateMember(m)
	}
	last := &m.last
	g.limitedBelow = last.RwndFull || !m.enforced && last.Unsent > max(4*m.segmentSize(), m.inflight/4)
	m.updateLimitedBy(r.At, g.limitedBelow)
	return delta
}

// informAlgorithm calls OnLoss and OnAck for what is new, as far as it left since m joined the group. It puts what the
// algorithm learnt into events and returns how many there are.
func (g *group) informAlgorithm(m *member, delta reportDelta, events *[2]Event) (n int) {
	last := &m.last
	if delta.timeouts > 0 || delta.lost > 0 && last.Acked-last.Sacked >= m.joinOffset {
		g.informOfLoss(m, delta, &events[n])
		n++
	}
	if delta.acked > 0 {
		if g.informOfAck(m, delta, &events[n]) {
			n++
		}
		if m.ramping { // what pacing to the share held back may go
			m.ramping = false
			g.updateLimit(m, last.At, true)
		}
	}
	m.timedOut = delta.acked == 0 && (m.timedOut || delta.timeouts > 0)
	g.updateAppLimited()
	if m.want > 0 || m.inflight > 0 || delta.acked > 0 {
		m.lastBusy = last.At
	}
	return n
}

// informOfLoss calls OnLoss and adopts the control.
func (g *group) informOfLoss(m *member, delta reportDelta, event *Event) {
	now := m.last.At
	m.lossEvents++
	loss := cc.Loss{
		State: g.algorithmState(now), Lost: delta.lost, SentAt: g.lossEpochStart(m, delta), Timeout: delta.timeouts > 0,
	}
	g.algorithm.OnLoss(loss)
	g.adoptReduction(now)
	*event = g.makeEvent(m, KindLoss, loss.State, 0, delta.lost)
}

// informOfAck counts what has arrived, calls OnAck for the part that left since m joined the group, and adopts the
// control. It reports whether there was such a part.
func (g *group) informOfAck(m *member, delta reportDelta, event *Event) bool {
	now := m.last.At
	ack, followed := g.makeAck(m, delta)
	sinceJoin := min(delta.acked, m.last.Acked-m.joinOffset)
	if sinceJoin <= 0 {
		return false
	}
	ack.Acked, ack.Marked = sinceJoin+followed, min(ack.Marked, sinceJoin)
	g.algorithm.OnAck(ack)
	if ack.Marked > 0 {
		g.adoptReduction(now)
	} else {
		g.adoptControl(now)
	}
	*event = g.makeEvent(m, KindAck, ack.State, ack.RTT, sinceJoin)
	event.Reverse = ack.ReverseQueue
	return true
}

// prepareForReport starts the algorithm for the first report, activates m if it has data to send, and pushes m's first
// limit.
func (g *group) prepareForReport(m *member, now cc.Time) {
	if m.newlyDeparted() > 0 || m.enforced && m.last.Unsent > 0 && !m.last.RwndFull {
		g.onSendStart(m, now)
	}
	if g.algorithm == nil && g.idle.saved.Cwnd == 0 {
		g.startAlgorithm(now)
	}
	if !m.hasLimit {
		g.updateLimit(m, now, false)
	}
}

// countDepartures counts what an enforcing leg has sent since the report at before. No grants are asked for there:
// bytes that have not left are what the flow wants to send.
func (g *group) countDepartures(m *member, before cc.Time) {
	r := &m.last
	now := r.At
	if left := m.newlyDeparted(); left > 0 {
		g.countSent(m, m.departureTime(before, left, m.path.fromReference(g.control.Cwnd)), left)
		m.pacer.spendBytes(now, left)
	}
	want := r.Unsent
	if r.RwndFull { // a larger share of the window would not help
		want = 0
	} else if want >= m.segmentSize() && !g.hasAllItMayUse(m) {
		g.cwndFullAt, g.wantedAt = now, now
	}
	m.askedAt = now
	g.setWant(m, want)
}

// takeUnenforced grants m up to want bytes over a leg that does not enforce the window, and counts them in flight.
func (g *group) takeUnenforced(m *member, now cc.Time, want cc.Bytes) (n cc.Bytes) {
	m.joinLossEpoch(g.lossEpoch, g.lossEpochAt)
	g.onSendStart(m, now)
	m.askedAt, m.lastBusy = now, now
	quantum := m.grantQuantum(want, m.segmentSize())
	if m.limit.Cwnd-m.inflight < want && !g.hasAllItMayUse(m) {
		g.cwndFullAt = now
	}
	n, by := m.grantBytes(now, want, m.inflight, m.segmentSize())
	m.limits.enterState(now, by)
	if n = m.passMaxRate(now, n, quantum); n > 0 {
		g.countSent(m, now, n)
		m.pacer.spendBytes(now, n)
	} else if m.retryAt > now {
		g.timers.scheduleAt(&m.timer, m.retryAt)
	}
	if g.setWant(m, want-n); n < want && !m.follows {
		g.wantedAt = now
	}
	return n
}

// takeEnforced returns how many of want bytes may be written to a leg that enforces the window. Only a maximum rate,
// or pacing at the start, refuses any.
func (g *group) takeEnforced(m *member, now cc.Time, want cc.Bytes) (n cc.Bytes) {
	quantum := min(want, m.segmentSize())
	n = want
	if m.isStartPaced() {
		if n = g.startCredit(m, now, want, quantum); n == 0 {
			return 0
		}
	}
	n = m.passMaxRate(now, n, quantum)
	if m.startBytes > 0 && n > 0 {
		m.startPacer.spendBytes(now, n)
		m.startBytes = max(0, m.startBytes-n)
		m.updateNeedsGrants()
	}
	return n
}

// startCredit returns how many of want bytes m's own rates let pass at its start. After 0 m is woken when some may.
func (g *group) startCredit(m *member, now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	rate := m.ownRate
	if m.terms.HintCap > 0 {
		g.onSendStart(m, now) // sets the limit that is read below
		rate = lesserRate(rate, m.limit.PacingRate)
	}
	m.startPacer.setRate(now, rate)
	if n = min(want, m.startPacer.creditBytes(now, m.segmentSize())); n < want {
		n -= n % quantum
	}
	if n == 0 {
		m.retryAt = m.startPacer.readyAt(now, quantum, m.segmentSize())
		g.timers.scheduleAt(&m.timer, m.retryAt)
		m.limits.enterState(now, LimitedByPacing)
	}
	return n
}

// passFollower lets a packet of n bytes of m, a follower, pass the window while no other member wants it, because
// nothing shows then what the path carries. Only a maximum rate refuses the packet, and m is woken at its turn. isHeld
// reports that another member wants the window, so that the packet must ask for its part.
func (g *group) passFollower(m *member, now cc.Time, n cc.Bytes, sparse bool) (passes, isHeld bool) {
	if g.membersWantWindow(now) {
		g.scheduleTick(now.Add(max(g.rtt.srtt, leastTick))) // by then they may have ceased to want it
		return false, true
	}
	g.releaseInflight(m, now)
	passes = m.maxRate.passPacket(now, &m.waiter, n, sparse)
	m.gate.waiting = !passes
	return passes, false
}

// moveMember moves m from another group to path p of this one. Its bytes in flight move along. A new algorithm starts
// with m's part of the old window and the round trips that are known. The caller holds the mutexes of both groups and
// of the manager.
func (g *group) moveMember(m *member, from *group, now cc.Time, p *path) {
	part, known := from.takeWindowAway(m, now)
	window := m.path.fromReference(part)
	base, rtt := m.path.baseRTT, from.rtt
	if m.path.isFar() {
		rtt = rtt.shiftedBy(base - from.paths.reference.baseRTT)
	}
	inflight, blocked, want, host := m.inflight, m.sampler.rwndBlocked, m.want, m.path.host
	from.removeMember(m, now)

	if p.baseRTT == 0 && p.host == host {
		p.baseRTT = base
	}
	if len(g.members) == 0 && from.algorithm != nil {
		// What g remembers is older than what m knows.
		g.closeAlgorithm()
		g.initialCwnd, g.ssthresh, g.idle.saved, g.movedPart, g.rtt = 0, 0, Dormant{}, 0, rtt
		g.setReferencePath(p)
	}
	g.restartFromMemory(p, now)
	if g.rtt.srtt == 0 {
		g.rtt = rtt
		g.setReferencePath(p)
	}
	if g.inflight == 0 {
		g.delivered.restartMeasuring(now)
		g.delivered.firstSentAt, g.cwndFullAt = from.delivered.firstSentAt, 0
	}
	m.inflight, m.sampler.rwndBlocked = inflight, blocked
	g.addMember(m, p)
	g.countInflight(m)
	g.setWant(m, want)
	m.ledger.rebaseRates(now, g.delivered.total)
	m.joinOffset = m.taken
	m.lossEpoch = g.lossEpoch
	if m.isBusy() {
		g.idle.since = 0
		g.activateMember(m)
	}

	if window > 0 && (g.algorithm == nil || now.Sub(g.startedAt) <= g.rtt.srtt) {
		// Within a round trip the algorithm has seen no effect of its own: a new start loses little.
		g.initialCwnd = min(g.initialCwnd+p.toReference(window), cc.MaxCwnd)
		g.closeAlgorithm()
		if g.ssthresh = 0; known {
			g.ssthresh = g.initialCwnd
		}
		g.startAlgorithm(now)
	}
}

// changeTerms puts terms into force for m, with the maximum rate that they lead to. It returns the maximum rate that m
// had.
func (g *group) changeTerms(m *member, now cc.Time, t Terms, limit *rateLimit) (before *rateLimit) {
	before = m.maxRate
	g.caps.uncountCaps(m)
	wasActive := m.active
	g.deactivateMember(m) // its place in the list depends on its priority
	m.setMaxRate(limit)
	g.weights -= m.weight
	m.terms, m.allocation = t, newAllocation(t)
	m.updateNeedsGrants()
	g.weights += m.weight
	before.removeWaiter(&m.waiter)
	m.retryAt = 0 // the pacing rate may have changed
	g.caps.countCaps(m)
	if wasActive {
		g.activateMember(m)
	}
	if g.algorithm != nil {
		g.adoptControl(now)
	}
	g.needsDivision, g.sendNow, g.divideAt = true, true, 0
	g.updateLimit(m, now, true)
	if g.algorithm == nil && m.gate.waiting { // no limit will wake it, and its old turn is gone
		m.wakeRelay()
	}
	return before
}

// addWeights adds the weights of busy members to the shared limits that they have.
func (g *group) addWeights(limits map[*rateLimit]*SharedLimit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for l := range g.caps.maxRates {
		if limits[l] == nil {
			continue
		}
		for _, m := range g.allocator.active {
			if m.maxRate == l && m.isBusy() {
				limits[l].Weight += int(m.weight)
				wants := m.want > 0 && g.caps.rateBinds || m.waiter.turn.Load() != noTurn
				limits[l].Held = limits[l].Held || wants
			}
		}
	}
}

// appendMemories appends what g knows about the hosts that it sends to. It leaves out windows without a bound, which
// say nothing about a path.
func (g *group) appendMemories(all []Memory, now cc.Time) []Memory {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.receives || len(g.members) > 0 && g.members[0].terms.Alone {
		return all
	}
	for _, p := range g.paths.all {
		d := g.savedWindowOn(p, now)
		if p.host.IsValid() && g.pathInUse(p) && d.Cwnd > 0 && d.Cwnd < cc.MaxCwnd && d.BaseRTT > 0 {
			t := Terms{Group: g.name, Host: p.host, Algorithm: g.spec.Name, Params: g.params}
			all = append(all, Memory{t, d})
		}
	}
	return all
}

// maxGroupHosts bounds Group.Hosts.
const maxGroupHosts = 64

// Group is the state of one group at one moment.
//
// By weight alone, each member has a part of the window. Lent is what some have in flight above their parts, as far as
// others have less. Unused is what is free while no member waits.
type Group struct {
	Key       string // unique: from the name, the algorithm and its parameters
	Name      string // Terms.Group
	Algorithm string
	Receives  bool // the windows are advertised to hosts that send
	Phase     string
	// Hosts are where the bytes of the members go, in order, at most 64. Without members: where they went lately.
	Hosts   []netip.Addr
	Members int           // 0: the window is kept for the next one
	Active  int           // members with something in flight, or waiting to be
	Idle    time.Duration // since the last member left; 0 with members

	Cwnd       cc.Bytes // of all members together; 0 before the first event
	Inflight   cc.Bytes
	Lent       cc.Bytes // the part of the window that some members leave to others
	Unused     cc.Bytes // the part of the window that no member wants
	PacingRate cc.Rate  // 0: not paced

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // newest sample above the least
	DeliveryRate            cc.Rate       // newest sample; 0: none
	Delivered               cc.Bytes      // by members past and present
	RivalRate               cc.Rate       // what goes to the host beside the group; 0: nothing, or nothing counts it
	LimitedBy               LimitedBy     // what holds most of the active members back
	Hint                    *cc.Hint      // the newest hint, as received; nil: none
	HintDoubt               HintDoubt     // how delivery contradicts it; empty: it does not
	Believed                float64       // the part of its rates that is believed, 1: all
	Capped                  bool          // a cap holds the window or the rate below what the algorithm asks for
	Internals               cc.Internals  // in the order of the algorithm's Spec
}

// describeGroup returns g's state at now.
func (g *group) describeGroup(now cc.Time) Group {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := Group{
		Name: g.name, Algorithm: g.spec.Name, Receives: g.receives, Phase: g.control.Phase, Members: len(g.members),
		Cwnd: g.control.Cwnd, Inflight: g.inflight, PacingRate: g.control.PacingRate,
		SRTT: g.rtt.srtt, MinRTT: g.rtt.min, LatestRTT: g.rtt.latest, QueueingDelay: g.rtt.latest - g.rtt.min,
		DeliveryRate: g.deliveryRate, Delivered: g.delivered.total, Capped: g.caps.binds, Internals: g.algorithmInternals(),
		RivalRate: g.passing.rateAt(now),
	}
	for _, p := range g.paths.all {
		if g.pathInUse(p) && p.host.IsValid() {
			d.Hosts = append(d.Hosts, p.host)
		}
	}
	slices.SortFunc(d.Hosts, netip.Addr.Compare)
	d.Hosts = d.Hosts[:min(len(d.Hosts), maxGroupHosts)]
	if len(g.members) == 0 {
		g.forgetAfterIdle(now)
		d.Idle = max(0, now.Sub(g.idle.since))
	}
	if g.idle.saved.Cwnd > 0 {
		d.Cwnd = g.rememberedWindow(now)
	}
	if g.hints.known {
		hint := g.hints.newest
		d.Hint, d.HintDoubt, d.Believed = &hint, g.hints.check.certainDoubt(), g.hints.check.believedPart()
	}
	g.fillUsage(now, &d)
	return d
}

// fillUsage fills in who uses how much of the window. It visits active members only, because the others have nothing
// in flight.
func (g *group) fillUsage(now cc.Time, d *Group) {
	var over cc.Bytes // what members have in flight above their parts
	var limited [numLimits]int
	waiting := false
	for _, m := range g.allocator.active {
		over += max(0, m.counted-g.control.Cwnd*m.weight/g.weights)
		waiting = waiting || m.wantsMore(now, &g.rtt)
		if m.want > 0 || m.inflight > 0 {
			d.Active++
			limited[m.limits.by]++
		}
	}
	d.Lent = max(0, min(over, over+g.control.Cwnd-g.inflight)) // as far as others have less than theirs
	if !waiting {
		d.Unused = max(0, g.control.Cwnd-g.inflight)
	}
	for by, n := range limited {
		if n > limited[d.LimitedBy] {
			d.LimitedBy = LimitedBy(by)
		}
	}
}
