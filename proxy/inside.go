package proxy

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// tunnelFor is the Server's for the connection.
func (c *connection) tunnelFor(target netip.Addr) (tunnel.Listener, error) {
	return c.srv.tunnelTo(c.listener, target, c.chosen.Fixed)
}

// tunnelTo returns the tunnel that leads to an address; nil: none does, and it is to be
// dialled from this machine. What is inside a tunnel is reached by the tunnel's own
// peers, by whom the configuration lets, and never through another network: an error
// refuses it. A fixed target is the configuration's own.
func (s *Server) tunnelTo(l *listenerState, target netip.Addr, fixed bool) (tunnel.Listener, error) {
	target = target.Unmap().WithZone("")
	all := s.currentSettings().listeners
	own := func(other *listenerState) bool { return other.entrance == l.entrance }
	if l.Tunnel() != nil && !slices.ContainsFunc(all, own) { // it drains
		all = append(slices.Clip(all), l)
	}
	for _, other := range all {
		t := other.Tunnel()
		if t == nil {
			continue
		}
		place := t.Place(target)
		if place == tunnel.OfGateway || place == tunnel.Unused {
			own, err := s.parts.Local(target)
			if err != nil {
				return nil, fmt.Errorf("proxy: whether destination %v is this machine's: %w", target, err)
			}
			if own {
				continue // the guard decides
			}
		}
		switch {
		case place == tunnel.Elsewhere:
		case !own(other) && !fixed && !policy.Contains(l.cfg.Allow, target):
			return nil, &refusal{RejectedDenied, fmt.Errorf("destination %v is inside the tunnel of listener %q; "+
				"its peers reach it, targets of mode forward, and what allow lists", target, other.cfg.Name)}
		case place == tunnel.OfPeer:
			return t, nil
		case place == tunnel.OfGateway:
			return nil, fmt.Errorf("destination %v is the gateway's inside the tunnel, where no service is: %w",
				target, syscall.ECONNREFUSED)
		default:
			return nil, fmt.Errorf("destination %v is inside the tunnel, and no peer's: %w", target,
				syscall.EHOSTUNREACH)
		}
	}
	return nil, nil
}
