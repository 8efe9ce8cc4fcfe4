package flow

import (
	"slices"

	"github.com/penstock-net/penstock/cc"
)

// addMember has m be a member on path p.
func (g *group) addMember(m *member, p *path) {
	m.place = len(g.members)
	g.members = append(g.members, m)
	g.weights += m.weight
	p.addMember(m)
	g.caps.addMember(m)
	g.changed = true
}

// removeMember has m be a member no more.
func (g *group) removeMember(m *member, now cc.Time) {
	g.setWant(m, 0)
	m.inflight, m.sampler.blocked = 0, 0
	g.countInflight(m)
	g.deactivateMember(m)
	m.path.removeMember(m, now)
	last := g.members[len(g.members)-1]
	g.members[m.place], last.place = last, m.place
	g.members[len(g.members)-1] = nil
	g.members = g.members[:len(g.members)-1]
	g.weights -= m.weight
	g.caps.removeMember(m)
	g.reapplyCaps(now)
	g.timers.cancelTimer(m.clock)
	g.changed, g.sendNow = true, true
}

// onSendStart notes that m begins to send or to want to, if it did neither. One that comes
// after silence, its own among others that send or the group's, gets up to its share
// over a round trip: what others leave to it they leave over a round trip, and the path
// may have changed (RFC 7661 §4.4.3). A DelaySensitive flow does not wait for others.
func (g *group) onSendStart(m *member, now cc.Time) {
	wasIdle := g.endIdle(m.path, now)
	g.startAlgorithm(now)
	others := g.inflight > m.counts || g.wanting > 0 && m.want == 0
	if m.want == 0 && (wasIdle || m.isSilent(now, g.rtt.rto()) && others && m.terms.Class != DelaySensitive) {
		m.rampEnd = now.Add(g.rtt.srtt)
	}
	if !m.active {
		g.activateMember(m)
		g.updateLimit(m, now, true)
	}
}

// activateMember puts m into the list of active members, if it is not there.
func (g *group) activateMember(m *member) {
	if m.active {
		return
	}
	m.active, m.due, m.share = true, 0, 0
	g.alloc.fresh++
	i, _ := slices.BinarySearchFunc(g.alloc.members, m, compareMembers)
	g.alloc.members = slices.Insert(g.alloc.members, i, m)
	g.changed = true
}

// deactivateMember takes m out of the list of active members.
func (g *group) deactivateMember(m *member) {
	if !m.active {
		return
	}
	m.active = false
	if i, ok := slices.BinarySearchFunc(g.alloc.members, m, compareMembers); ok {
		g.alloc.members = slices.Delete(g.alloc.members, i, i+1)
	}
}
