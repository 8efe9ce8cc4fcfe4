package tunnel

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/penstock-net/penstock/proxy/access"
)

// Inside knows the addresses inside a tunnel. Its methods are safe for concurrent use.
type Inside interface {
	// Peer returns the name of the peer that has an inner address; empty: no peer has it.
	Peer(inner netip.Addr) string
	// Place returns the place of an address as the tunnel sees it.
	Place(netip.Addr) Place
	// Gateway returns the gateway's own address in the prefix of an inner one; invalid: it has none
	// there.
	Gateway(inner netip.Addr) netip.Addr
	// Own returns an address of the gateway inside, of the family of like; invalid: it has none.
	Own(like netip.Addr) netip.Addr
}

// Place is the place of an address as a tunnel sees it.
type Place int

// The places of addresses.
const (
	// Elsewhere is outside the tunnel, or not known.
	Elsewhere Place = iota
	// OfPeer is an address of a peer.
	OfPeer
	// OfGateway is the first address of a pool's prefix. It answers pings, and names where a name
	// server is configured.
	OfGateway
	// Unused is an address of the pool that no peer has at present.
	Unused
)

// Pool has the prefixes of peers' addresses. It is safe for concurrent use.
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
			return access.GatewayIn(p)
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
			return access.GatewayIn(p)
		}
	}
	return netip.Addr{}
}

// Owners maps addresses to the names of peers. It is immutable.
type Owners struct {
	names map[netip.Prefix]string
	// bits are the lengths of the prefixes, the longest first.
	bits []int
}

// OwnersOf returns the owners of the peers' addresses.
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

// Peer returns the name of the peer with the longest prefix that has an address; empty: none has
// it.
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
