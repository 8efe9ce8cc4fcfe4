package flow

import (
	"fmt"

	"github.com/penstock-net/penstock/cc"
)

// Move gives f other terms from now on. Another group, algorithm or set of
// parameters leads to another macroflow, made as Open makes it: what is in flight
// goes along and counts there, f waits there for what it waited for, and an
// algorithm that starts with it starts from the window and the round trips that
// f had. It hears only of what leaves from then on: acknowledgements of what
// another window sent would open its own, which has to wait until what stood in a
// queue has gone. Members that go there within one round trip bring their windows
// together. Who stays behind keeps the whole of the old one. A closed flow stays
// where it was.
func (f *Flow) Move(now cc.Time, t Terms) error {
	r, err := t.resolve()
	if err != nil {
		return fmt.Errorf("flow: %w", err)
	}
	m := f.home.Load().mgr
	m.mu.Lock() // so that nobody else moves f
	m.forget(now)
	from := f.home.Load()
	if from.key == r.key {
		from.mu.Lock()
		if !f.closed {
			f.redirect(now, m.route(from, t.Host))
			f.accept(now, t)
			m.trimRoutes(from)
		}
		m.mu.Unlock()
		from.unlockAndWake(now)
		return nil
	}
	m.nextID++ // for the seed: an algorithm's luck is its own
	to, fresh := m.macroflow(r)
	from.mu.Lock()
	if f.closed {
		from.mu.Unlock()
		m.vacated(to) // it may be new
		m.mu.Unlock()
		return nil
	}
	to.mu.Lock()
	f.shift(now, to, m.route(to, t.Host))
	f.accept(now, t)
	to.mu.Unlock()
	from.mu.Unlock()
	if fresh {
		m.meet(now, to)
	}
	m.occupied(to)
	m.vacated(from)
	m.mu.Unlock()
	for _, g := range []*macroflow{from, to} {
		g.mu.Lock()
		g.unlockAndWake(now)
	}
	return nil
}

// accept puts terms into force within f's macroflow. The caller holds the manager's mu.
func (f *Flow) accept(now cc.Time, t Terms) {
	mgr := f.macro.mgr
	before := f.maxRate
	f.limitTo(mgr.rateLimit(now, t))
	mgr.release(now, before)
	f.terms, f.standing = t, t.standing()
	f.ready, f.turn = 0, 0 // it may ask once more than it needs to
	f.macro.noteCap()
	if f.macro.alg != nil {
		f.macro.adopt(now)
	}
}

// redirect has f's bytes go along another route of its macroflow.
func (f *Flow) redirect(now cc.Time, r *route) {
	f.route.members--
	f.route.left = now
	r.members++
	f.route = r
	f.recount()
}

// shift takes f from its macroflow to another, where it goes along r. The caller
// holds the mutexes of both.
func (f *Flow) shift(now cc.Time, to *macroflow, r *route) {
	from := f.macro
	part, known := from.takeAway(f, now)
	window := f.route.expand(part)
	base, rtt := f.route.base, from.rtt
	if f.route.far() {
		rtt = rtt.along(base - from.ref.base)
	}
	from.lose(f, now)

	if r.base == 0 && r.host == f.route.host {
		r.base = base
	}
	if len(to.members) == 0 && from.alg != nil {
		// What lingers there is older than what f knows.
		to.alg, to.initial, to.memory, to.gone, to.rtt = nil, 0, 0, 0, rtt
		to.anchor(r)
	}
	to.revive(now, r)
	if to.rtt.srtt == 0 {
		to.rtt = rtt
		to.anchor(r)
	}
	if to.inflight == 0 {
		to.deliveredAt, to.firstSent, to.cwndFullAt = now, from.firstSent, 0
	}
	to.join(f, r)
	f.recount()
	f.ledger.rebase(now, to.delivered)
	f.served = to.served
	f.inherited = f.taken

	if window > 0 && (to.alg == nil || now.Sub(to.started) <= to.rtt.srtt) {
		// Within a round trip it has seen nothing come of its own doing: it forgets little.
		to.initial = min(to.initial+r.shrink(window), cc.MaxCwnd)
		if to.alg, to.ssthresh = nil, 0; known {
			to.ssthresh = to.initial
		}
		to.start(now)
	}
}

// takeAway returns the window that f takes with it: its part of m's, were all
// active members to use theirs, but no more than it needs by what has arrived of
// late, or ten segments. Those that leave together take no part twice. The path is
// known to carry that window if it is what has arrived.
func (m *macroflow) takeAway(f *Flow, now cc.Time) (window cc.Bytes, known bool) {
	if m.alg == nil {
		return 0, false
	}
	if now.Sub(m.goneAt) > m.rtt.rto() {
		m.gone = 0
	}
	weights := f.weight
	for _, g := range m.members {
		if g != f && (g.want > 0 || g.inflight > 0) {
			weights += g.weight
		}
	}
	part := float64(f.weight) / float64(weights) * (1 - m.gone)
	m.gone, m.goneAt = m.gone+part, now
	window = min(m.ctl.Cwnd, f.rate.BytesIn(m.rtt.min)) // f's samples of the rate are of all m delivers
	least := min(cc.InitialCwndPackets*f.mss(), m.ctl.Cwnd)
	return max(1, cc.Bytes(part*float64(max(window, least)))), window >= least
}
