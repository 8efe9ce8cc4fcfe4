package flow

import (
	"slices"

	"github.com/penstock-net/penstock/cc"
)

// join has m be a member on path p.
func (g *group) join(m *member, p *path) {
	m.place = len(g.members)
	g.members = append(g.members, m)
	g.weights += m.weight
	p.join(m)
	g.caps.add(m)
	g.changed = true
}

// leave has m be a member no more.
func (g *group) leave(m *member, now cc.Time) {
	g.setWant(m, 0)
	m.inflight, m.sampler.blocked = 0, 0
	g.recount(m)
	g.deactivate(m)
	m.path.leave(m, now)
	last := g.members[len(g.members)-1]
	g.members[m.place], last.place = last, m.place
	g.members[len(g.members)-1] = nil
	g.members = g.members[:len(g.members)-1]
	g.weights -= m.weight
	g.caps.remove(m)
	g.recap(now)
	g.timers.cancel(m.clock)
	g.changed, g.now = true, true
}

// begin notes that m begins to send or to want to, if it did neither. One that comes
// after silence, its own among others that send or the group's, gets up to its share
// over a round trip: what others leave to it they leave over a round trip, and the path
// may have changed (RFC 7661 §4.4.3). A DelaySensitive flow does not wait for others.
func (g *group) begin(m *member, now cc.Time) {
	wasIdle := g.resume(m.path, now)
	g.start(now)
	others := g.inflight > m.counts || g.wanting > 0 && m.want == 0
	if m.want == 0 && (wasIdle || m.silent(now, g.rtt.rto()) && others && m.terms.Class != DelaySensitive) {
		m.rampEnd = now.Add(g.rtt.srtt)
	}
	if !m.active {
		g.activate(m)
		g.provide(m, now, true)
	}
}

// activate puts m into the list of active members, if it is not there.
func (g *group) activate(m *member) {
	if m.active {
		return
	}
	m.active, m.due, m.share = true, 0, 0
	g.alloc.fresh++
	i, _ := slices.BinarySearchFunc(g.alloc.members, m, compareMembers)
	g.alloc.members = slices.Insert(g.alloc.members, i, m)
	g.changed = true
}

// deactivate takes m out of the list of active members.
func (g *group) deactivate(m *member) {
	if !m.active {
		return
	}
	m.active = false
	if i, ok := slices.BinarySearchFunc(g.alloc.members, m, compareMembers); ok {
		g.alloc.members = slices.Delete(g.alloc.members, i, i+1)
	}
}
