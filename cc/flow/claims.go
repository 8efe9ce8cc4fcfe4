package flow

import "net/netip"

// Claims is what flows may ask for of a link that they share (NACC, equation 8):
// each its priority times what its application sends, where that is known of all,
// or else its priority alone. The priority is the setting of that name, or 1 for
// an algorithm that has none.
type Claims struct {
	flows, rated int     // how many there are, and of those with a Target
	priority     float64 // sum
	traffic      float64 // sum of priority times Target, of those that have one
}

// Claims adds up those of all flows whose groups' bytes go to hosts in p and
// nowhere else. With the address of a host it is for who tells of a link host by
// host, and so has to divide it by itself.
func (m *Manager) Claims(p netip.Prefix) Claims {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.claimsIn(plainPrefix(p))
}

// claimsIn is Claims for who holds m.mu.
func (m *Manager) claimsIn(p netip.Prefix) (c Claims) {
	m.eachIn(p, func(g *group) { c = c.addClaims(g.memberClaims()) })
	return c
}

// memberClaims adds up those of g's members. The caller holds m.mu.
func (g *group) memberClaims() (c Claims) {
	priority := g.params["priority"]
	if priority == 0 {
		priority = 1
	}
	c.flows, c.priority = len(g.members), priority*float64(len(g.members))
	for _, f := range g.members {
		if f.terms.Target > 0 {
			c.rated++
			c.traffic += priority * float64(f.terms.Target)
		}
	}
	return c
}

func (c Claims) addClaims(d Claims) Claims {
	return Claims{c.flows + d.flows, c.rated + d.rated, c.priority + d.priority, c.traffic + d.traffic}
}

// withUnknown is c with others of which nothing is known, for so many flows in all.
func (c Claims) withUnknown(flows int) Claims {
	others := max(0, flows-c.flows)
	return c.addClaims(Claims{flows: others, priority: float64(others)})
}

// Of is c's part of all, which it is among; 0 where all is nothing.
func (c Claims) Of(all Claims) float64 {
	switch {
	case all.flows == 0:
		return 0
	case all.rated == all.flows:
		return c.traffic / all.traffic
	}
	return c.priority / all.priority
}
