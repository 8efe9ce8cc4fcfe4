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
		f.accept(t)
		m.mu.Unlock()
		from.unlockAndWake(now)
		return nil
	}
	m.nextID++ // for the seed: an algorithm's luck is its own
	to := m.macroflow(r)
	from.mu.Lock()
	if f.closed {
		from.mu.Unlock()
		m.vacated(to) // it may be new
		m.mu.Unlock()
		return nil
	}
	to.mu.Lock()
	f.shift(now, to)
	f.accept(t)
	to.mu.Unlock()
	from.mu.Unlock()
	m.occupied(to)
	m.vacated(from)
	m.mu.Unlock()
	for _, g := range []*macroflow{from, to} {
		g.mu.Lock()
		g.unlockAndWake(now)
	}
	return nil
}

// accept puts terms into force within f's macroflow.
func (f *Flow) accept(t Terms) {
	f.terms, f.standing, f.ready = t, t.standing(), 0 // it may ask once more than it needs to
}

// shift takes f from its macroflow to another. The caller holds the mutexes of both.
func (f *Flow) shift(now cc.Time, to *macroflow) {
	from := f.macro
	window := from.takeAway(f, now)
	from.lose(f, now)

	if len(to.members) == 0 && from.alg != nil {
		// What lingers there is older than what f knows.
		to.alg, to.initial, to.gone, to.rtt = nil, 0, 0, from.rtt
	}
	if to.rtt.srtt == 0 {
		to.rtt = from.rtt
	}
	if to.inflight == 0 {
		to.deliveredAt, to.firstSent, to.cwndFullAt = now, from.firstSent, 0
	}
	to.members = append(to.members, f)
	to.inflight += f.counted()
	f.ledger.rebase(now, to.delivered)
	f.served = to.served
	f.inherited = f.taken
	f.macro = to
	f.home.Store(to)

	if window > 0 && (to.alg == nil || now.Sub(to.started) <= to.rtt.srtt) {
		// Within a round trip it has seen nothing come of its own doing: it forgets little.
		to.initial = min(to.initial+window, cc.MaxCwnd)
		to.alg = nil
		to.start(now)
	}
}

// takeAway returns the window that f takes with it: its part of m's, were all
// active members to use theirs, but no more than it needs by what has arrived of
// late, or ten segments. Those that leave together take no part twice.
func (m *macroflow) takeAway(f *Flow, now cc.Time) cc.Bytes {
	if m.alg == nil {
		return 0
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
	window := min(m.ctl.Cwnd, f.rate.BytesIn(m.rtt.min)) // f's samples of the rate are of all m delivers
	least := min(cc.InitialCwndPackets*f.mss(), m.ctl.Cwnd)
	return max(1, cc.Bytes(part*float64(max(window, least))))
}
