package flow

import (
	"net/netip"
	"slices"

	"github.com/penstock-net/penstock/cc"
)

// maxIdleRoutes bounds the hosts that a macroflow remembers without a member
// whose bytes go there.
const maxIdleRoutes = 16

// route is the way to one host, as the members of a macroflow see it whose bytes
// go there.
type route struct {
	macro   *macroflow
	host    netip.Addr // invalid: not known
	members int        // guarded by the macroflow's mu
	left    cc.Time    // when the last of them did; likewise
	slot    int        // in the manager's index of hosts; guarded by its mu
}

// plain is a host's address as paths and hints are told apart by it.
func plain(host netip.Addr) netip.Addr { return host.Unmap().WithZone("") }

// route returns g's route to host, a new one if need be. The caller holds m.mu and g.mu.
func (m *Manager) route(g *macroflow, host netip.Addr) *route {
	host = plain(host)
	known := m.hosts[host]
	if len(g.routes) < len(known) {
		known = g.routes
	}
	for _, r := range known {
		if r.macro == g && r.host == host {
			return r
		}
	}
	r := &route{macro: g, host: host, slot: len(m.hosts[host])}
	g.routes = append(g.routes, r)
	m.hosts[host] = append(m.hosts[host], r)
	return r
}

// dropRoute forgets the i-th route of g. The caller holds m.mu and g.mu.
func (m *Manager) dropRoute(g *macroflow, i int) {
	r := g.routes[i]
	g.routes = slices.Delete(g.routes, i, i+1)
	all := m.hosts[r.host]
	last := all[len(all)-1]
	all[r.slot], last.slot = last, r.slot
	all[len(all)-1] = nil
	if all = all[:len(all)-1]; len(all) == 0 {
		delete(m.hosts, r.host)
		return
	}
	m.hosts[r.host] = all
}

// trimRoutes forgets the route that has been without members for longest, where
// there are too many of them. The caller holds m.mu and g.mu.
func (m *Manager) trimRoutes(g *macroflow) {
	idle, oldest := 0, -1
	for i, r := range g.routes {
		if r.members > 0 {
			continue
		}
		if idle++; oldest < 0 || r.left < g.routes[oldest].left {
			oldest = i
		}
	}
	if idle > maxIdleRoutes {
		m.dropRoute(g, oldest)
	}
}

// inUse reports whether m's bytes go along r: as long as m has members, theirs
// do; one that lingers waits for all that it remembers.
func (m *macroflow) inUse(r *route) bool { return r.members > 0 || len(m.members) == 0 }
