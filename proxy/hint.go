package proxy

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
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
