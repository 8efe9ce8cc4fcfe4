package flow

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// group is the flows that share one algorithm and one window: a macroflow of RFC 3124.
// Its mutex guards everything in it and in its members.
type group struct {
	hintNews func(HintNews) // is told which hints are doubted; nil: nobody is

	mu sync.Mutex
	division
}

// newGroup returns a group without members to which r leads.
func newGroup(r resolved, timers *timers, seed uint64, now cc.Time, edge *atomic.Int64) *group {
	g := &group{}
	g.key, g.name, g.spec, g.params, g.receives, g.seed = r.key, r.name, r.spec, r.params, r.receives, seed
	g.timers, g.timer.owner, g.onWake = timers, g, g.wakeAlgorithm
	g.idle.since, g.delivered.edge = max(now, 1), edge
	return g
}

// divideAndUnlock divides the window anew where that is due, and releases the lock.
func (g *group) divideAndUnlock(now cc.Time) {
	g.divideIfDue(now)
	g.mu.Unlock()
}

// onTimer serves what has become due: the algorithm's clock, a hint that grows old, an idle
// group, a division.
func (g *group) onTimer(now cc.Time) {
	var events [1]Event
	n := 0
	g.mu.Lock()
	if g.reapplyCaps(now) {
		g.sendNow = true
	}
	if len(g.members) > 0 && g.alg != nil && g.ctl.NextTick != 0 {
		if g.ctl.NextTick <= now {
			events[0], n, g.sendNow = g.tickAlgorithm(now), 1, true
		} else {
			g.scheduleTick(g.ctl.NextTick)
		}
	}
	g.changed = g.changed || len(g.alloc.members) > 1
	g.wakeDatagrams(now)
	g.divideIfDue(now)
	g.mu.Unlock()
	g.emitEvents(events[:n]...)
}

// smallRaise is the part of a window, one in so many, that an acknowledgement of the rest comes soon
// enough for: a window of as many segments has one in flight at any time.
const smallRaise = 8

// wakeAlgorithm has the number-th algorithm look at what has changed outside it. Having the
// transport send what a small raise lets out costs as much as the rest of a decision, so that waits
// for an acknowledgement, as it does where the algorithm has decided by itself.
func (g *group) wakeAlgorithm(number uint64, now cc.Time) {
	g.mu.Lock()
	if g.alg == nil || g.starts != number || len(g.members) == 0 {
		g.mu.Unlock()
		return
	}
	cwnd := g.ctl.Cwnd
	event := g.tickAlgorithm(now)
	g.sendNow = g.sendNow || g.ctl.Cwnd-cwnd >= cwnd/smallRaise
	g.divideAndUnlock(now)
	g.emitEvents(event)
}

// emitEvents emits events, outside all locks.
func (g *group) emitEvents(events ...Event) {
	if g.emit == nil {
		return
	}
	for _, e := range events {
		g.emit(e)
	}
}

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

// takeBytes grants m up to want bytes, over a leg that does not enforce the window, and counts them in flight.
func (g *group) takeBytes(m *member, now cc.Time, want cc.Bytes) (n cc.Bytes) {
	m.noteLossEpoch(g.lossEpoch, g.lossAt)
	g.onSendStart(m, now)
	m.asked, m.lastBusy = now, now
	quantum := m.grantQuantum(want, m.segmentSize())
	if m.limit.Cwnd-m.inflight < want && !g.hasAllItMayUse(m) {
		g.cwndFullAt = now
	}
	n, by := m.grantBytes(now, want, m.inflight, m.segmentSize())
	m.limits.enterState(now, by)
	if n = m.passMaxRate(now, n, quantum); n > 0 {
		g.noteSent(m, now, n)
		m.pacer.spendBytes(now, n)
	} else if m.retryAt > now {
		g.timers.scheduleAt(&m.timer, m.retryAt)
	}
	if g.setWant(m, want-n); n < want {
		g.wantedAt = now
	}
	return n
}

// takeEnforced is takeBytes over a leg that enforces the window.
func (g *group) takeEnforced(m *member, now cc.Time, want cc.Bytes) (n cc.Bytes) {
	quantum := min(want, m.segmentSize())
	n = want
	if m.startsPaced() {
		if n = g.startCredit(m, now, want, quantum); n == 0 {
			return 0
		}
	}
	n = m.passMaxRate(now, n, quantum)
	if m.unpaced > 0 && n > 0 {
		m.starting.spendBytes(now, n)
		m.unpaced = max(0, m.unpaced-n)
		m.notePermits()
	}
	return n
}

// startCredit returns how many of want bytes m's own rates let pass at its start. After 0 m is woken when some may.
func (g *group) startCredit(m *member, now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	rate := m.own
	if m.terms.HintCap > 0 {
		g.onSendStart(m, now) // so that there is a limit
		rate = lesserRate(rate, m.limit.PacingRate)
	}
	m.starting.setRate(now, rate)
	if n = min(want, m.starting.creditBytes(now, m.segmentSize())); n < want {
		n -= n % quantum
	}
	if n == 0 {
		m.retryAt = m.starting.readyAt(now, quantum, m.segmentSize())
		g.timers.scheduleAt(&m.timer, m.retryAt)
		m.limits.enterState(now, LimitedByPacing)
	}
	return n
}

// takeDatagram lets a datagram of n bytes go, or notes that it waits.
func (g *group) takeDatagram(d *datagramShare, limit *rateLimit, now cc.Time, n cc.Bytes, sparse bool) bool {
	g.retireDatagrams(now)
	view := g.datagramWindow()
	d.refillRoom(now, &view)
	wanted := g.membersWantWindow(now)
	if wanted && !d.mayGo(n, sparse, &view) {
		d.waiting, d.sparse = n, sparse
		g.cwndFullAt = now
		g.scheduleTick(d.nextTryAt(now, &view))
		return false
	}
	d.waiting = 0
	if !limit.takeDatagram(now, &d.waiter, n, sparse) {
		return false
	}
	if !wanted {
		d.carry, d.carryAt = d.loose+n, now
	} else {
		d.room = max(d.room-n, -d.lendingBound())
	}
	d.addInflight(now, n, &view)
	g.scheduleRetiring(d, &view)
	g.changed = true // the members make room
	return true
}

// moveMember takes m from another group to this one, where it goes along p. The caller holds the
// mutexes of both.
func (g *group) moveMember(m *member, from *group, now cc.Time, p *path) {
	part, known := from.takeWindowAway(m, now)
	window := m.path.fromReference(part)
	base, rtt := m.path.base, from.rtt
	if m.path.isFar() {
		rtt = rtt.shiftedBy(base - from.paths.ref.base)
	}
	inflight, blocked, want, host := m.inflight, m.sampler.blocked, m.want, m.path.host
	from.removeMember(m, now)

	if p.base == 0 && p.host == host {
		p.base = base
	}
	if len(g.members) == 0 && from.alg != nil {
		// What is remembered there is older than what f knows.
		g.closeAlgorithm()
		g.initial, g.ssthresh, g.idle.cwnd, g.takenAway, g.rtt = 0, 0, 0, 0, rtt
		g.setReferencePath(p)
	}
	g.restartFromMemory(p, now)
	if g.rtt.srtt == 0 {
		g.rtt = rtt
		g.setReferencePath(p)
	}
	if g.inflight == 0 {
		g.delivered.restartMeasuring(now)
		g.delivered.firstSent, g.cwndFullAt = from.delivered.firstSent, 0
	}
	m.inflight, m.sampler.blocked = inflight, blocked
	g.addMember(m, p)
	g.countInflight(m)
	g.setWant(m, want)
	m.ledger.rebaseRates(now, g.delivered.total)
	m.before = m.taken
	m.lossEpoch = g.lossEpoch
	if m.isBusy() {
		g.idle.since = 0
		g.activateMember(m)
	}

	if window > 0 && (g.alg == nil || now.Sub(g.started) <= g.rtt.srtt) {
		// Within a round trip it has seen nothing come of its own doing: it forgets little.
		g.initial = min(g.initial+p.toReference(window), cc.MaxCwnd)
		g.closeAlgorithm()
		if g.ssthresh = 0; known {
			g.ssthresh = g.initial
		}
		g.startAlgorithm(now)
	}
}

// changeTerms puts terms into force for m, with the maximum rate that they lead to, and returns the one it had.
func (g *group) changeTerms(m *member, now cc.Time, t Terms, limit *rateLimit) (before *rateLimit) {
	before = m.maxRate
	g.caps.removeMember(m)
	wasActive := m.active
	g.deactivateMember(m) // its priority may change
	m.setMaxRate(limit)
	g.weights -= m.weight
	m.terms, m.allocation = t, newAllocation(t)
	m.notePermits()
	g.weights += m.weight
	before.removeWaiter(&m.waiter)
	m.retryAt = 0 // it may ask once more than it needs to
	g.caps.addMember(m)
	if wasActive {
		g.activateMember(m)
	}
	if g.alg != nil {
		g.adoptControl(now)
	}
	g.changed, g.sendNow, g.divideAt = true, true, 0
	g.updateLimit(m, now, true)
	if g.alg == nil && m.gate.blocked { // it has no window yet, and before has forgotten its turn
		m.wakeRelay()
	}
	return before
}

// maxGroupHosts bounds the hosts that a Group names.
const maxGroupHosts = 64

// Group is the state of one group at one moment.
//
// Members are due their part of the window by weight alone. Lent is what some
// have in flight beyond theirs, as far as others have less; Unused is what is
// free while no member waits for any.
type Group struct {
	Key       string // no other has it; of the name, the algorithm and its parameters
	Name      string // Terms.Group
	Algorithm string
	Receives  bool // it is of windows that hosts are let send in
	Phase     string
	// where its members' bytes go, in order, at most maxGroupHosts of them; of one that lingers, where they went of
	// late
	Hosts   []netip.Addr
	Members int           // 0: it lingers, its window waits for the next
	Active  int           // members with something in flight, or waiting to be
	Idle    time.Duration // since the last member left; 0 with members

	Cwnd       cc.Bytes // all members' together; 0 before the first event
	Inflight   cc.Bytes
	Lent       cc.Bytes // of the window, what members are due and leave to others
	Unused     cc.Bytes // of the window, what nobody wants
	PacingRate cc.Rate  // 0: not paced

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // newest sample above the least
	DeliveryRate            cc.Rate       // newest sample
	Delivered               cc.Bytes      // by members past and present
	LimitedBy               LimitedBy     // what holds most of the active members back
	Hint                    *cc.Hint      // the network's newest word; nil: none
	HintDoubt               HintDoubt     // how delivery contradicts it; empty: it does not
	Believed                float64       // of the rates it says, the part that is believed
	Capped                  bool          // that word holds window or rate below what the algorithm asks for
	Internals               cc.Internals  // in the order of the algorithm's Spec
}

// describeGroup is g's state at now.
func (g *group) describeGroup(now cc.Time) Group {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := Group{
		Name: g.name, Algorithm: g.spec.Name, Receives: g.receives, Phase: g.ctl.Phase, Members: len(g.members),
		Cwnd: g.ctl.Cwnd, Inflight: g.inflight, PacingRate: g.ctl.PacingRate,
		SRTT: g.rtt.srtt, MinRTT: g.rtt.min, LatestRTT: g.rtt.latest, QueueingDelay: g.rtt.latest - g.rtt.min,
		DeliveryRate: g.rate, Delivered: g.delivered.total, Capped: g.caps.bind, Internals: g.algorithmInternals(),
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
	if g.idle.cwnd > 0 {
		d.Cwnd = g.rememberedWindow(now)
	}
	if g.hints.known {
		hint := g.hints.newest
		d.Hint, d.HintDoubt, d.Believed = &hint, g.hints.check.certainDoubt(), g.hints.check.believedPart()
	}
	g.fillUsage(now, &d)
	return d
}

// fillUsage fills in who uses how much of the window. It looks at active members alone:
// the others have nothing in flight.
func (g *group) fillUsage(now cc.Time, d *Group) {
	var over cc.Bytes // what members have in flight above their parts by weight
	var limited [numLimits]int
	waiting := false
	for _, m := range g.alloc.members {
		over += max(0, m.counts-g.ctl.Cwnd*m.weight/g.weights)
		waiting = waiting || m.wantsMore(now, &g.rtt)
		if m.want > 0 || m.inflight > 0 {
			d.Active++
			limited[m.limits.by]++
		}
	}
	d.Lent = max(0, min(over, over+g.ctl.Cwnd-g.inflight)) // the others have so much less than theirs
	if !waiting {
		d.Unused = max(0, g.ctl.Cwnd-g.inflight)
	}
	for by, n := range limited {
		if n > limited[d.LimitedBy] {
			d.LimitedBy = LimitedBy(by)
		}
	}
}
