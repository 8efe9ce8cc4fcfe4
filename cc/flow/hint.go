package flow

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc"
)

// Hint takes the network's word about the path to the hosts in p. Every
// group all of whose members' bytes go to hosts in p hears it, and its
// algorithm sees it with its next event; one older than the last is ignored.
// Where it assigns no shares, the manager does, by Claims.
// Hint returns how many groups there are; for others nothing is kept, since
// who speaks of a path does so again soon. It may be called from any goroutine.
func (m *Manager) Hint(p netip.Prefix, h cc.Hint) (groups int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hinted = true
	p = plainPrefix(p)
	all, assigns := Claims{}, h.Share == 0
	if assigns {
		all = m.claimsIn(p).withUnknown(h.Flows)
	}
	host := cc.Rate(0) // delivered to the host, if p is one
	if p.IsSingleIP() {
		m.eachIn(p, func(g *group) { host += g.caps.check.recentRate(h.At) })
	}
	m.eachIn(p, func(g *group) {
		groups++
		if assigns {
			h.Share = g.memberClaims().Of(all)
		}
		g.addHint(h, max(0, host-g.caps.check.recentRate(h.At)))
	})
	return groups
}
