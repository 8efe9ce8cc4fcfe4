package tunnel

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/penstock-net/penstock/proxy/access"
)

// Inside is whose the addresses inside a tunnel are.
type Inside interface {
	// Peer returns the name of the peer that an inner address is of; empty:
	// nobody's.
	Peer(inner netip.Addr) string
	// Place returns what an address is to the tunnel.
	Place(netip.Addr) Place
	// Gateway returns the gateway's own address of the prefix that an inner one is
	// in; invalid: it has none there.
	Gateway(inner netip.Addr) netip.Addr
	// Own returns an address of the gateway inside that is of the same family;
	// invalid: it has none.
	Own(like netip.Addr) netip.Addr
}

// Place is what an address is to a tunnel.
type Place int

// The places of addresses.
const (
	Elsewhere Place = iota // outside the tunnel, or nobody knows
	OfPeer                 // a peer's
	OfGateway              // the first of the pool, which answers pings, and names where there is a server for them
	Unused                 // of the pool, and no peer's at present
)

// Pool is the prefixes that a tunnel's peers get their addresses from.
type Pool struct {
	mu       sync.RWMutex
	prefixes []netip.Prefix
}

// SetPool replaces the prefixes.
func (s *Pool) SetPool(prefixes []netip.Prefix) {
	s.mu.Lock()
	s.prefixes = prefixes
	s.mu.Unlock()
}

// Vacant returns the place of an address that no peer has.
func (s *Pool) Vacant(inner netip.Addr) Place {
	switch gateway := s.Gateway(inner); {
	case !gateway.IsValid():
		return Elsewhere
	case inner == gateway:
		return OfGateway
	}
	return Unused
}

// Gateway implements Inside.
func (s *Pool) Gateway(inner netip.Addr) netip.Addr {
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
func (s *Pool) Own(like netip.Addr) netip.Addr {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, p := range s.prefixes {
		if p.Addr().Is4() == like.Is4() {
			return p.Masked().Addr().Next()
		}
	}
	return netip.Addr{}
}

// Owners are the names of the peers that addresses are of. It is never changed.
type Owners struct {
	names map[netip.Prefix]string
	bits  []int // lengths of the prefixes, the longest first
}

// OwnersOf notes the peers' addresses.
func OwnersOf(peers []access.Peer) *Owners {
	o := &Owners{names: map[netip.Prefix]string{}}
	for _, p := range peers {
		for _, a := range p.AllowedIPs {
			o.names[a.Masked()] = p.Name
			o.bits = append(o.bits, a.Bits())
		}
	}
	slices.Sort(o.bits)
	slices.Reverse(o.bits)
	o.bits = slices.Compact(o.bits)
	return o
}

// Peer returns the name of the peer that an address is of, by the longest prefix; empty:
// nobody's.
func (o *Owners) Peer(inner netip.Addr) string {
	for _, bits := range o.bits {
		if p, err := inner.Prefix(bits); err == nil { // the family has such a length
			if name, ok := o.names[p]; ok {
				return name
			}
		}
	}
	return ""
}
