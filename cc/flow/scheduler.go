package flow

import "github.com/penstock-net/penstock/cc"

// floorSegments is what every member of a macroflow may have in flight however
// small its share: nobody starves (at the price of at most that much per
// member above the window).
const floorSegments = 2

// room returns how many bytes f may still put in flight under the window.
//
// Flows that want to send share what the others leave unused, in proportion to
// their weights (weighted max-min): a flow that does not use its share lends
// it, and has it back within a round trip of asking, since from then on those
// above the common level get nothing until they have fallen below it.
// A flow with a lower Priority number goes first, all of it.
func (m *macroflow) room(f *Flow) cc.Bytes {
	free := m.ctl.Cwnd - m.inflight
	if len(m.members) == 1 {
		return free
	}
	floor := floorSegments*f.mss() - f.inflight
	return max(min(free, f.roundUp(m.level(f)-f.inflight)), floor)
}

// level returns how much f may have in flight in all.
func (m *macroflow) level(f *Flow) cc.Bytes {
	pool, weights := m.ctl.Cwnd, 0
	for _, g := range m.members {
		switch {
		case g == f || g.want > 0 && g.terms.Priority == f.terms.Priority:
			weights += g.weight()
		case g.want > 0 && g.terms.Priority < f.terms.Priority:
			return 0
		default:
			pool -= g.inflight
		}
	}
	// Those already above the level keep what they have; the rest share less.
	for {
		over, overWeights := cc.Bytes(0), 0
		for _, g := range m.members {
			if g != f && g.want > 0 && g.terms.Priority == f.terms.Priority && !g.above &&
				g.inflight*cc.Bytes(weights) > pool*cc.Bytes(g.weight()) {
				g.above = true
				over += g.inflight
				overWeights += g.weight()
			}
		}
		if overWeights == 0 {
			break
		}
		pool -= over
		weights -= overWeights
	}
	for _, g := range m.members {
		g.above = false
	}
	return max(0, pool*cc.Bytes(f.weight())/cc.Bytes(weights))
}

// share is the part of the window that is f's by right, were all active
// members to use theirs.
func (m *macroflow) share(f *Flow) cc.Bytes {
	weights := 0
	for _, g := range m.members {
		if g == f || g.want > 0 || g.inflight > 0 {
			weights += g.weight()
		}
	}
	return max(m.ctl.Cwnd*cc.Bytes(f.weight())/cc.Bytes(weights), min(m.ctl.Cwnd, floorSegments*f.mss()))
}

// starved reports whether f may send below its floor.
func (f *Flow) starved() bool {
	return len(f.macro.members) > 1 && f.inflight+f.quantum() <= floorSegments*f.mss()
}

// next returns the parked flow that is owed most: those below their floor
// first, then the lowest Priority, then the least in flight for its weight.
func (m *macroflow) next(now cc.Time) *Flow {
	var best *Flow
	for _, f := range m.members {
		if f.parked && f.ready <= now && (best == nil || f.before(best)) {
			best = f
		}
	}
	return best
}

func (f *Flow) before(g *Flow) bool {
	if a, b := f.starved(), g.starved(); a != b {
		return a
	}
	if f.terms.Priority != g.terms.Priority {
		return f.terms.Priority < g.terms.Priority
	}
	return f.inflight*cc.Bytes(g.weight()) < g.inflight*cc.Bytes(f.weight())
}

// wakeable unparks the flows that may take something now, until what is free
// has been promised, and puts their wake functions into out; the caller calls
// them once the lock is released.
func (m *macroflow) wakeable(now cc.Time, out []func()) int {
	n := 0
	promised := cc.Bytes(0)
	for n < len(out) {
		f := m.next(now)
		if f == nil {
			break
		}
		need := f.quantum()
		if m.room(f)-promised < need && !f.starved() {
			break
		}
		if m.pacer.credit(now, m.mss)-promised < need {
			m.mgr.schedule(m, m.pacer.ready(now, promised+need, m.mss))
			break
		}
		f.parked = false
		promised += need
		out[n] = f.wake
		n++
	}
	return n
}
