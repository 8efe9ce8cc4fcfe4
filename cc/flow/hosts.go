package flow

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc"
)

// plainPrefix is plain for a prefix.
func plainPrefix(p netip.Prefix) netip.Prefix {
	bits := p.Bits()
	if p.Addr().Is4In6() && bits >= 96 {
		bits -= 96
		return netip.PrefixFrom(p.Addr().Unmap(), bits)
	}
	return netip.PrefixFrom(p.Addr().WithZone(""), bits)
}

// eachIn calls do with each group all of whose paths in use lead into p, and holds its
// mutex meanwhile. The caller holds m.mu.
func (m *Manager) eachIn(p netip.Prefix, do func(*group)) {
	if p.IsSingleIP() {
		for _, l := range m.hosts[p.Addr()] {
			l.callIfWithin(p, do)
		}
		return
	}
	for host, all := range m.hosts {
		if p.Contains(host) {
			for _, l := range all {
				l.callIfWithin(p, do)
			}
		}
	}
}

// callIfWithin calls do if all paths of the group that are in use lead into p, and this is the
// first of them: so a group is met once. Of a group without members all paths are in use.
func (l hostPath) callIfWithin(p netip.Prefix, do func(*group)) {
	g := l.group.group
	if g.receives { // hints are about the way to a host
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	first := true
	for _, each := range g.paths.all {
		if !g.pathInUse(each) {
			continue
		}
		if first && each != l.path || !p.Contains(each.host) {
			return
		}
		first = false
	}
	if !first {
		do(g)
	}
}

// pathInUse reports whether g's bytes go along p: as long as g has members, theirs do; one
// without members waits for all that it remembers.
func (g *group) pathInUse(p *path) bool { return len(p.members) > 0 || len(g.members) == 0 }

// shareHints tells g, which is new, what others have heard lately whose bytes go along its
// path and no other. The caller holds m.mu, and no group's.
func (m *Manager) shareHints(now cc.Time, g *managedGroup) {
	if !m.hinted || g.receives || len(g.paths.all) != 1 || !g.paths.all[0].host.IsValid() {
		return
	}
	host := g.paths.all[0].host
	var best cc.Hint
	m.eachIn(netip.PrefixFrom(host, host.BitLen()), func(other *group) {
		if other.hintIsFresh(now) && other.caps.hint.At > best.At {
			best = other.caps.hint
		}
	})
	if best.At > 0 {
		g.mu.Lock()
		g.addHint(best, 0)
		g.mu.Unlock()
	}
}
