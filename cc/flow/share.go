package flow

import "github.com/penstock-net/penstock/cc"

// lendPasses bounds how often share looks for members that lend, each time at
// the level that the last ones raised. One that is missed is due a little more
// than it uses.
const lendPasses = 3

// share is what f may have in flight over a transport that holds the window by
// itself: its weighted max-min level as room has it, in whole segments. Unlike
// room it does not wait for the others to fall back to theirs, since a transport
// acts on a raise only when it next hears from its peer.
//
// The shares of the members that contend add up to the window, or to their
// floors; the others are due what they use, but not more than their level. All of
// it is as bytes count in the window.
func (m *macroflow) share(f *Flow, now cc.Time) cc.Bytes {
	if len(m.members) == 1 {
		return m.window()
	}
	floor := min(m.ctl.Cwnd, f.floor())
	pool, weights, lenders := m.window(), cc.Bytes(0), 0
	for _, g := range m.members {
		contends := g == f || g.contends(now)
		g.rival = g.terms.Priority == f.terms.Priority
		g.lends = g.rival && !contends
		switch {
		case g.rival:
			weights += g.weight()
			if g.lends {
				lenders++
			}
		case g.terms.Priority < f.terms.Priority && contends:
			return floor
		case g.terms.Priority < f.terms.Priority:
			pool -= g.counted()
		case contends:
			pool -= g.floor()
		default:
			pool -= min(g.counted(), g.floor())
		}
	}
	for pass, changed := 0, lenders > 0; changed && pass < lendPasses; pass++ {
		changed = false
		for _, g := range m.members {
			if g.lends && g.rival && g.counted()*weights < pool*g.weight() {
				g.rival, changed = false, true
				pool -= g.counted()
				weights -= g.weight()
			}
		}
	}
	// Who is due less than the floor has the floor, and the rest share less: a
	// pass for each weight that turns out to be too small.
	for changed := true; changed; {
		changed = false
		for _, g := range m.members {
			if !g.rival || pool*g.weight() >= g.floor()*weights {
				continue
			}
			if g == f {
				return floor
			}
			g.rival, changed = false, true
			pool -= g.floor()
			weights -= g.weight()
		}
	}
	level := pool * f.weight() / weights
	odd := level % f.mss()
	if odd > 0 && m.oddFor(f, pool, weights) {
		return level - odd + f.mss()
	}
	return level - odd
}

// oddFor reports whether one of the segments that are left when every rival's
// level is cut to whole ones is f's: they go to whoever got least so far.
func (m *macroflow) oddFor(f *Flow, pool, weights cc.Bytes) bool {
	left := pool
	var mss, weight, level, odd cc.Bytes
	for _, g := range m.members {
		if !g.rival {
			continue
		}
		if g.mss() != mss || g.weight() != weight { // as a rule all are alike
			mss, weight = g.mss(), g.weight()
			level = pool * weight / weights
			odd = level % mss
		}
		left -= level - odd
		if odd > 0 && (g.served < f.served || g.served == f.served && g.id < f.id) {
			left -= mss
		}
	}
	return left >= f.mss()
}

// part is what f's macroflow leaves it: what its transport was told, where that
// holds the window; otherwise what is its by right, were all active members to
// use theirs.
func (f *Flow) part() cc.Bytes {
	if f.last.Held && !f.closed {
		return f.told.Cwnd
	}
	m := f.macro
	weights := f.weight() // by itself, since a closed flow is no member any more
	for _, g := range m.members {
		if g != f && (g.want > 0 || g.inflight > 0) {
			weights += g.weight()
		}
	}
	return f.route.expand(max(m.ctl.Cwnd*f.weight()/weights, min(m.ctl.Cwnd, f.floor())))
}
