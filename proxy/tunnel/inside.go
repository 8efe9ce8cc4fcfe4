package tunnel

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Place is what an address is to a tunnel.
type Place int

// The places of addresses.
const (
	Elsewhere Place = iota // outside the tunnel, or nobody knows
	OfPeer                 // a peer's
	OfGateway              // the first of the pool, which answers pings, and names where there is a server for them
	Unused                 // of the pool, and no peer's at present
)

// space is the addresses that a tunnel's peers get theirs from.
type space struct {
	mu       sync.RWMutex
	prefixes []netip.Prefix
}

// SetPool replaces the prefixes.
func (s *space) SetPool(prefixes []netip.Prefix) {
	s.mu.Lock()
	s.prefixes = prefixes
	s.mu.Unlock()
}

// place is what an address is that no peer has.
func (s *space) place(inner netip.Addr) Place {
	switch gateway := s.Gateway(inner); {
	case !gateway.IsValid():
		return Elsewhere
	case inner == gateway:
		return OfGateway
	}
	return Unused
}

// Gateway implements Inside.
func (s *space) Gateway(inner netip.Addr) netip.Addr {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, p := range s.prefixes {
		if p.Contains(inner) {
			return p.Masked().Addr().Next()
		}
	}
	return netip.Addr{}
}

// Own implements Inside.
func (s *space) Own(like netip.Addr) netip.Addr {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, p := range s.prefixes {
		if p.Addr().Is4() == like.Is4() {
			return p.Masked().Addr().Next()
		}
	}
	return netip.Addr{}
}

// Place returns what an address is to the tunnel.
func (l *Listener) Place(addr netip.Addr) Place { return l.outside.Place(addr) }

// Name is the listener's.
func (l *Listener) Name() string { return l.name }

// Holds reports whether an address is a peer's.
func (l *Listener) Holds(addr netip.Addr) bool { return l.outside.Place(addr) == OfPeer }

// Peer returns the name of the peer that an inner address is of; empty: nobody's.
func (l *Listener) Peer(inner netip.Addr) string { return l.outside.Peer(inner) }

// Dial opens a connection to a peer, which sees source as whom it is from, or the
// gateway where source is not inside the tunnel.
func (l *Listener) Dial(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error) {
	if source.Is4() != target.Addr().Is4() || l.outside.Place(source) != OfPeer {
		source = l.outside.Gateway(target.Addr())
		if !source.IsValid() { // of a network behind a peer
			source = l.outside.Own(target.Addr())
		}
		if !source.IsValid() {
			return nil, fmt.Errorf("tunnel: listener %q: dial %v: the gateway has no address inside", l.name, target)
		}
	}
	c, err := l.stack.Dial(ctx, source, target)
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: %w", l.name, err) // not a nil *netstack.Conn in an interface
	}
	return c, nil
}
