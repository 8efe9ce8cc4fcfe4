package flow

import (
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Hint takes the network's word about the path to the hosts in p. Every
// macroflow all of whose members' bytes go to hosts in p hears it, and its
// algorithm sees it with its next event; one older than the last is ignored.
// Where it assigns no shares, the manager does, by Claims.
// Hint returns how many macroflows there are; for others nothing is kept, since
// who speaks of a path does so again soon. It may be called from any goroutine.
func (m *Manager) Hint(p netip.Prefix, h cc.Hint) (macroflows int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p = plainPrefix(p)
	all, assigns := Claims{}, h.Share == 0
	if assigns {
		all = m.claims(p).among(h.Flows)
	}
	m.eachIn(p, func(g *macroflow) {
		macroflows++
		if assigns {
			h.Share = g.claims().Of(all)
		}
		g.hear(h)
	})
	return macroflows
}

// plainPrefix is plain for a prefix.
func plainPrefix(p netip.Prefix) netip.Prefix {
	bits := p.Bits()
	if p.Addr().Is4In6() && bits >= 96 {
		bits -= 96
		return netip.PrefixFrom(p.Addr().Unmap(), bits)
	}
	return netip.PrefixFrom(p.Addr().WithZone(""), bits)
}

// eachIn calls do with each macroflow all of whose routes in use lead into p, and
// holds its mu meanwhile. The caller holds m.mu.
func (m *Manager) eachIn(p netip.Prefix, do func(*macroflow)) {
	if p.IsSingleIP() {
		for _, r := range m.hosts[p.Addr()] {
			r.within(p, do)
		}
		return
	}
	for host, routes := range m.hosts {
		if p.Contains(host) {
			for _, r := range routes {
				r.within(p, do)
			}
		}
	}
}

// within calls do if all routes in use lead into p and this is the first of them:
// so a macroflow is met once.
func (r *route) within(p netip.Prefix, do func(*macroflow)) {
	m := r.macro
	m.mu.Lock()
	defer m.mu.Unlock()
	first := true
	for _, each := range m.routes {
		if !m.inUse(each) {
			continue
		}
		if first && each != r || !p.Contains(each.host) {
			return
		}
		first = false
	}
	if !first {
		do(m)
	}
}

// hear takes note of a hint, unless m knows a newer one.
func (m *macroflow) hear(h cc.Hint) {
	if !m.hinted || h.At >= m.hint.At {
		m.hint, m.hinted = h, true
		if m.hintCap > 0 { // which does not wait for an event
			m.mgr.schedule(m, h.At)
		}
	}
}

// freshHint is how old a hint may be at the most and still say how the path is:
// the longer of this and three smoothed round trips.
const freshHint = time.Second

func (m *macroflow) patience() time.Duration { return max(freshHint, 3*m.rtt.srtt) }

// fresh reports whether m has heard of its path lately.
func (m *macroflow) fresh(now cc.Time) bool { return m.hinted && m.hint.Age(now) <= m.patience() }

// meet tells g, which is new, what others have heard lately whose bytes go along
// its routes and no others. The caller holds m.mu, and no macroflow's.
func (m *Manager) meet(now cc.Time, g *macroflow) {
	if len(g.routes) != 1 || !g.routes[0].host.IsValid() {
		return
	}
	host := g.routes[0].host
	var best cc.Hint
	m.eachIn(netip.PrefixFrom(host, host.BitLen()), func(other *macroflow) {
		if other.fresh(now) && other.hint.At > best.At {
			best = other.hint
		}
	})
	if best.At > 0 {
		g.mu.Lock()
		g.hear(best)
		g.mu.Unlock()
	}
}
