package flow

import (
	"fmt"

	"github.com/penstock-net/penstock/cc"
)

// Move gives f other terms from now on. Another group, algorithm or set of
// parameters leads to another group, made as Open makes it: what is in flight
// goes along and counts there, f waits there for what it waited for, and an
// algorithm that starts with it starts from the window and the round trips that
// f had. It hears only of what leaves from then on: acknowledgements of what
// another window sent would open its own, which has to wait until what stood in a
// queue has gone. Members that go there within one round trip bring their windows
// together. Who stays behind keeps the whole of the old one. A closed flow stays
// where it was.
func (f *Flow) Move(now cc.Time, t Terms) error {
	m := f.mgr
	r, err := m.resolveTerms(t)
	if err != nil {
		return fmt.Errorf("flow: %w", err)
	}
	m.mu.Lock() // so that nobody else moves f
	defer m.mu.Unlock()
	m.forgetIdleGroups(now)
	from := m.groups[f.home.Load().key]
	if from == nil { // f is closed, and its group forgotten
		return nil
	}
	if from.key == r.key {
		from.mu.Lock()
		defer from.divideAndUnlock(now)
		if !f.closed {
			from.changePath(&f.member, now, m.findOrMakePath(from, t.Host))
			f.applyTerms(from.group, now, t)
			m.trimPaths(from)
		}
		return nil
	}
	m.nextID++ // for the seed: an algorithm's luck is its own
	to, fresh := m.findOrMakeGroup(now, r)
	from.mu.Lock()
	if f.closed {
		from.mu.Unlock()
		m.noteFewerMembers(to.key) // it may be new
		return nil
	}
	to.mu.Lock()
	f.moveBetween(from.group, to.group, now, m.findOrMakePath(to, t.Host))
	f.applyTerms(to.group, now, t)
	to.divideAndUnlock(now)
	from.divideAndUnlock(now)
	if fresh {
		m.shareHints(now, to)
	}
	m.removeFromIdle(to)
	m.noteFewerMembers(from.key)
	return nil
}

// applyTerms puts terms into force within f's group. The caller holds the manager's mutex.
func (f *Flow) applyTerms(g *group, now cc.Time, t Terms) {
	before := f.maxRate
	g.caps.removeMember(&f.member)
	wasActive := f.active
	g.deactivateMember(&f.member) // its priority may change
	f.setMaxRate(f.mgr.acquireRateLimit(now, t))
	f.mgr.releaseRateLimit(now, before)
	g.weights -= f.weight
	f.terms, f.allocation = t, t.newAllocation()
	f.notePermits()
	g.weights += f.weight
	before.removeWaiter(&f.waiter)
	f.retryAt = 0 // it may ask once more than it needs to
	g.caps.addMember(&f.member)
	if wasActive {
		g.activateMember(&f.member)
	}
	if g.alg != nil {
		g.adoptControl(now)
	}
	g.changed, g.sendNow, g.divideAt = true, true, 0
	g.updateLimit(&f.member, now, true)
	if g.alg == nil && f.gate.blocked { // it has no window yet, and before has forgotten its turn
		f.wakeRelay()
	}
}

// changePath has m's bytes go along another path of the group.
func (g *group) changePath(m *member, now cc.Time, p *path) {
	m.path.removeMember(m, now)
	p.addMember(m)
	g.countInflight(m)
}

// moveBetween takes f from its group to another, where it goes along p. The caller holds the
// mutexes of both.
func (f *Flow) moveBetween(from, to *group, now cc.Time, p *path) {
	m := &f.member
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
	if len(to.members) == 0 && from.alg != nil {
		// What is remembered there is older than what f knows.
		to.closeAlgorithm()
		to.initial, to.ssthresh, to.idle.cwnd, to.takenAway, to.rtt = 0, 0, 0, 0, rtt
		to.setReferencePath(p)
	}
	to.restartFromMemory(p, now)
	if to.rtt.srtt == 0 {
		to.rtt = rtt
		to.setReferencePath(p)
	}
	if to.inflight == 0 {
		to.delivered.restartMeasuring(now)
		to.delivered.firstSent, to.cwndFullAt = from.delivered.firstSent, 0
	}
	m.inflight, m.sampler.blocked = inflight, blocked
	to.addMember(m, p)
	to.countInflight(m)
	to.setWant(m, want)
	f.home.Store(to)
	m.ledger.rebaseRates(now, to.delivered.total)
	m.before = m.taken
	m.lossEpoch = to.lossEpoch
	if m.isBusy() {
		to.idle.since = 0
		to.activateMember(m)
	}

	if window > 0 && (to.alg == nil || now.Sub(to.started) <= to.rtt.srtt) {
		// Within a round trip it has seen nothing come of its own doing: it forgets little.
		to.initial = min(to.initial+p.toReference(window), cc.MaxCwnd)
		to.closeAlgorithm()
		if to.ssthresh = 0; known {
			to.ssthresh = to.initial
		}
		to.startAlgorithm(now)
	}
}

// takeWindowAway returns the window that m takes with it: its part of g's, were all active
// members to use theirs, but no more than it needs by what has arrived of late, or ten
// segments. Those that leave together take no part twice. The path is known to carry
// that window if it is what has arrived.
func (g *group) takeWindowAway(m *member, now cc.Time) (window cc.Bytes, known bool) {
	if g.alg == nil {
		return 0, false
	}
	if now.Sub(g.takenAt) > g.rtt.rto() {
		g.takenAway = 0
	}
	weights := m.weight
	for _, other := range g.alloc.members {
		if other != m && (other.want > 0 || other.inflight > 0) {
			weights += other.weight
		}
	}
	part := float64(m.weight) / float64(weights) * (1 - g.takenAway)
	g.takenAway, g.takenAt = g.takenAway+part, now
	window = min(g.ctl.Cwnd, m.rate.BytesIn(g.rtt.min)) // m's samples of the rate are of all that g delivers
	least := min(cc.InitialCwndPackets*m.segmentSize(), g.ctl.Cwnd)
	return max(1, cc.Bytes(part*float64(max(window, least)))), window >= least
}
