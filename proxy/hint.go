package proxy

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Hint passes on what the network says about the path to a host, and reports
// how many groups of flows have heard it: of each listener those whose bytes go
// to that host, a client's downloads or uploads to a server, where the host is
// what flows are grouped by. A group that is wider has no one path.
func (s *Server) Hint(host netip.Addr, h cc.Hint) (groups int) {
	for _, l := range s.lanes {
		for _, group := range policy.PeerGroups(l.cfg.Name, host) {
			if s.parts.Flows.Hint(group, h) {
				groups++
			}
		}
	}
	return groups
}
