package flow

import (
	"slices"

	"github.com/penstock-net/penstock/cc"
)

// Hint takes the network's word about the path to a group, which the group's
// algorithms see with their next event; one older than the last is ignored. It
// reports whether the group has a macroflow: for others nothing is kept, since
// who speaks of a path does so again soon. It may be called from any goroutine.
func (m *Manager) Hint(group string, h cc.Hint) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, g := range m.hosts[group] {
		g.mu.Lock()
		if !g.hinted || h.At >= g.hint.At {
			g.hint, g.hinted = h, true
		}
		g.mu.Unlock()
	}
	return len(m.hosts[group]) > 0
}

// meet makes g known to hints for its group, with what the others have heard.
// The caller holds m.mu.
func (m *Manager) meet(g *macroflow) {
	for _, other := range m.hosts[g.group] {
		other.mu.Lock()
		if other.hinted {
			g.hint, g.hinted = other.hint, true
		}
		other.mu.Unlock()
	}
	m.hosts[g.group] = append(m.hosts[g.group], g)
}

// part is the opposite of meet.
func (m *Manager) part(g *macroflow) {
	rest := slices.DeleteFunc(m.hosts[g.group], func(other *macroflow) bool { return other == g })
	if len(rest) == 0 {
		delete(m.hosts, g.group)
		return
	}
	m.hosts[g.group] = rest
}
