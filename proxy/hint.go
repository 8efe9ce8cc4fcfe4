package proxy

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc"
)

// Hint passes on what the network says about the path to the hosts in p, and
// reports how many groups of flows have heard it: those whose bytes go nowhere
// else, clients' downloads and uploads to servers.
func (s *Server) Hint(p netip.Prefix, h cc.Hint) (groups int) { return s.parts.Flows.Hint(p, h) }
