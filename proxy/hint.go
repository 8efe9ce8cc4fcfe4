package proxy

import (
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Groups returns the flows that share a window, group by group, those that linger
// without members included, by their names; and as of when.
func (s *Server) Groups() ([]flow.Group, cc.Time) {
	now := s.clock()
	return s.parts.Flows.Groups(now), now
}

// Hint passes on what the network says about the path to the hosts in p, and
// reports how many groups of flows have heard it: those whose bytes go nowhere
// else, clients' downloads and uploads to servers.
func (s *Server) Hint(p netip.Prefix, h cc.Hint) (groups int) { return s.parts.Flows.Hint(p, h) }

// Toward counts the connections with a byte moved in the time before now whose
// bytes go to hosts in any of the prefixes, down or up, and these hosts.
func (s *Server) Toward(within []netip.Prefix, lately time.Duration) (flows, hosts int) {
	now := s.clock()
	seen := map[netip.Addr]bool{}
	for _, c := range s.liveConnections() {
		if now.Sub(cc.Time(c.active.Load())) > lately {
			continue
		}
		found := false
		for _, host := range c.destinationHosts() {
			if host.IsValid() && policy.Contains(within, host) {
				found, seen[host] = true, true
			}
		}
		if found {
			flows++
		}
	}
	return flows, len(seen)
}

// destinationHosts are where its bytes go to: the client's and, once it is reached, the server's.
func (c *connection) destinationHosts() [2]netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := [2]netip.Addr{c.clientAddress().Addr().Unmap().WithZone("")}
	if c.state != StateGreeting && c.state != StateDialing {
		out[1] = addrPort(c.server.conn.RemoteAddr()).Addr().Unmap().WithZone("")
	}
	return out
}
