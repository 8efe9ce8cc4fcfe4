package flow

import "github.com/penstock-net/penstock/cc"

// floorSegments is what every member of a macroflow may have in flight however
// small its share: nobody starves (at the price of at most that much per
// member above the window).
const floorSegments = 2

func (f *Flow) floor() cc.Bytes { return f.route.shrink(floorSegments * f.mss()) }

// contends reports whether f wants more than it was granted. One that was
// granted a part and has not come back for a round trip is stuck in its
// transport, and lends what it cannot use.
func (f *Flow) contends(now cc.Time) bool {
	return f.parked || f.want > 0 && now.Sub(f.asked) <= f.macro.rtt.rto()
}

// starved reports whether f may send below its floor.
func (f *Flow) starved() bool {
	return len(f.macro.members) > 1 && f.route.shrink(f.inflight+f.quantum()) <= f.floor()
}

// room returns how many bytes f may still put in flight under the window, as
// they count in it.
//
// Flows that want to send share what the others leave unused, in proportion to
// their weights (weighted max-min): a flow that does not use its share lends
// it, and has it back within a round trip of asking, since from then on those
// above the common level get nothing until they have fallen below it. Shares
// are whole segments; the odd ones go round, to whoever got least so far.
// A flow with a lower Priority number goes first, all of it.
func (m *macroflow) room(f *Flow, now cc.Time) cc.Bytes {
	inflight := f.route.shrink(f.inflight)
	window := m.window()
	free := min(window-m.inflight, window-inflight)
	if len(m.members) == 1 {
		return free
	}
	floor := f.floor() - inflight
	if free <= 0 {
		return floor
	}
	pool, weights := m.pool(f, now)
	level := pool * f.weight() / weights
	part := level - inflight
	if odd := level % f.mss(); odd > 0 && part > 0 && part < f.mss() && m.leastServed(f, pool, weights) {
		part += f.mss() - odd
	}
	return max(min(free, part), floor)
}

// pool returns what f and those it contends with may have in flight together,
// and the sum of their weights; each is due pool·weight/weights.
func (m *macroflow) pool(f *Flow, now cc.Time) (pool, weights cc.Bytes) {
	pool = m.window()
	for _, g := range m.members {
		g.rival = g == f || g.terms.Priority == f.terms.Priority && g.contends(now)
		switch {
		case g.rival:
			weights += g.weight()
		case g.terms.Priority < f.terms.Priority && g.contends(now):
			return 0, f.weight()
		default:
			pool -= g.counted()
		}
	}
	// Those already above the level keep what they have; the rest share less.
	for changed := true; changed; {
		changed = false
		for _, g := range m.members {
			if g != f && g.rival && g.counted()*weights > pool*g.weight() {
				g.rival, changed = false, true
				pool -= g.counted()
				weights -= g.weight()
			}
		}
	}
	return max(0, pool), weights
}

// leastServed reports whether no rival of f that could use another segment has
// had less for its weight. It goes by the marks that pool left.
func (m *macroflow) leastServed(f *Flow, pool, weights cc.Bytes) bool {
	for _, g := range m.members {
		if g.rival && g != f && g.served < f.served && g.counted()*weights < pool*g.weight() {
			return false
		}
	}
	return true
}

// serve notes that f is granted n bytes. Service is counted by weight as in
// start-time fair queueing: who has been away starts level with the rest.
func (m *macroflow) serve(f *Flow, n cc.Bytes) {
	m.served = f.served
	f.served += float64(n) / float64(f.weight())
}

// next returns the parked flow that is owed most among those not yet seen in
// this pass: those below their floor first, then the lowest Priority, then the
// least served.
func (m *macroflow) next(now cc.Time, pass uint64) *Flow {
	var best *Flow
	for _, f := range m.members {
		if f.parked && f.pass != pass && f.ready <= now && (best == nil || f.before(best)) {
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
	return f.served < g.served
}

// wakeable unparks the flows that may take something now, until what is free
// has been promised, and puts their wake functions into out; the caller calls
// them once the lock is released.
func (m *macroflow) wakeable(now cc.Time, out []func()) int {
	m.pass++
	n := m.wakeDatagrams(now, out)
	promised := cc.Bytes(0)
	for n < len(out) {
		f := m.next(now, m.pass)
		if f == nil {
			break
		}
		f.pass = m.pass
		need := f.quantum()
		counts := min(f.route.shrink(need), max(m.ctl.Cwnd, 1))
		starved := f.starved()
		if m.window()-m.inflight-promised < counts && !starved {
			break // nothing is left, and whoever comes next is not starved either
		}
		if f.usable(now) < need {
			continue
		}
		if m.pacer.credit(now, m.segment(f))-promised < need {
			m.mgr.schedule(m, m.pacer.ready(now, promised+need, m.segment(f)))
			break
		}
		f.parked = false
		promised += counts
		out[n] = f.wake
		n++
	}
	return n
}
