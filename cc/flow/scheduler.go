package flow

import "github.com/penstock-net/penstock/cc"

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

// room returns how many bytes f may still put in flight, as they count in the
// window and by its last division, while so many are promised to others. Who has
// more in flight than its share gets nothing until it has fallen below, so that a
// share is there within a round trip of asking for it. A DelaySensitive flow does
// not wait for that.
func (m *macroflow) room(f *Flow, promised cc.Bytes) cc.Bytes {
	inflight := f.route.shrink(f.inflight)
	window := m.window()
	free := min(window-m.inflight, window-inflight) - promised
	if len(m.members) == 1 {
		return free
	}
	part := f.claim.share - inflight
	if f.terms.Class != DelaySensitive {
		part = min(part, free)
	}
	return max(part, f.floor()-inflight)
}

// concerned reports whether room(f) depends on f's share: unless there are n
// bytes left in the window, it does so for a DelaySensitive flow alone.
func (m *macroflow) concerned(f *Flow, n cc.Bytes) bool {
	return m.window()-m.inflight >= n || f.terms.Class == DelaySensitive
}

// serve notes that f is granted n bytes. Service is counted by weight, as in
// start-time fair queueing: who has been away starts level with the rest.
// Deficit round robin would need a queue's head for each member, where there are
// none, and would be as fair as its quantum, not as a segment.
func (m *macroflow) serve(f *Flow, n cc.Bytes) {
	m.served = f.served
	f.served += float64(n) / float64(f.weight)
}

// line has the members stand in line: by their place, then by who was served
// least. They stood so a moment ago, but for one or two: this takes a step for
// each, and one for each place that somebody moves.
func (m *macroflow) line() {
	for i := 1; i < len(m.members); i++ {
		f := m.members[i]
		j := i
		for ; j > 0 && f.before(m.members[j-1]); j-- {
			m.members[j] = m.members[j-1]
		}
		if j < i {
			m.members[j] = f
		}
	}
}

func (f *Flow) before(g *Flow) bool {
	if f.place != g.place {
		return f.place < g.place
	}
	return f.served < g.served || f.served == g.served && f.id < g.id
}

// wakeable unparks the flows that may take something now, until what is free
// has been promised, and puts their wake functions into out; the caller calls
// them once the lock is released. Those below their floor come first.
func (m *macroflow) wakeable(now cc.Time, out []func()) (n int) {
	divided := m.divided
	m.divided = false
	n = m.wakeDatagrams(now, out)
	if n == len(out) || !m.anyParked() {
		return n
	}
	m.line()
	promised := cc.Bytes(0)
	for _, starved := range [...]bool{true, false} {
		for _, f := range m.members {
			if !f.parked || f.ready > now || f.starved() != starved {
				continue
			}
			if f.last.Held { // its turn at the maximum rate has come
				f.parked = false
				out[n] = f.wake
				if n++; n == len(out) {
					return n
				}
				continue
			}
			need := f.quantum()
			counts := min(f.route.shrink(need), max(m.ctl.Cwnd, 1))
			if !starved {
				if !m.concerned(f, promised+counts) {
					continue
				}
				if !divided {
					m.allot(now, nil)
					divided = true
				}
				if f.usable(promised) < need {
					continue
				}
			}
			if m.pacer.credit(now, m.segment(f))-promised < need {
				m.mgr.schedule(m, m.pacer.ready(now, promised+need, m.segment(f)))
				return n
			}
			f.parked = false
			promised += counts
			out[n] = f.wake
			if n++; n == len(out) {
				return n
			}
		}
	}
	return n
}

func (m *macroflow) anyParked() bool {
	for _, f := range m.members {
		if f.parked {
			return true
		}
	}
	return false
}
