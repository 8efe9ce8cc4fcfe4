package access

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Peer is one client of a WireGuard tunnel.
type Peer struct {
	Name       string // for groups, logs and metrics
	PublicKey  Key
	Preshared  Key            // zero: none
	AllowedIPs []netip.Prefix // its addresses inside the tunnel: no other is taken from it, or sent to it
	Keepalive  time.Duration  // of ours, in whole seconds; 0: none, clients behind NAT send their own
}

// Equal reports whether nothing differs.
func (p Peer) Equal(q Peer) bool {
	return p.Name == q.Name && p.PublicKey == q.PublicKey && p.Preshared == q.Preshared &&
		p.Keepalive == q.Keepalive && slices.Equal(p.AllowedIPs, q.AllowedIPs)
}

// CheckPeers finds what keeps peers from standing side by side.
func CheckPeers(peers []Peer) error {
	names, keys, owners := map[string]bool{}, map[Key]string{}, map[netip.Prefix]string{}
	for _, p := range peers {
		if other, twice := keys[p.PublicKey]; twice {
			return fmt.Errorf("peers %q and %q have the same public key; each device needs a key of its own", other,
				p.Name)
		}
		keys[p.PublicKey] = p.Name
		if names[p.Name] {
			return fmt.Errorf("two peers are called %q; they would share one window", p.Name)
		}
		names[p.Name] = true
		if len(p.AllowedIPs) == 0 {
			return fmt.Errorf("peer %q has no address in the tunnel; give it allowed_ips such as 10.9.0.2/32", p.Name)
		}
		for _, a := range p.AllowedIPs {
			if other, taken := owners[a.Masked()]; taken {
				return fmt.Errorf("peers %q and %q both have %v in their allowed_ips; only one can", other, p.Name,
					a.Masked())
			}
			owners[a.Masked()] = p.Name
		}
	}
	return nil
}

// Overlap returns a peer whose addresses lie within those of another; empty:
// there is none. WireGuard lets the narrower one have them.
func Overlap(peers []Peer) (inner, outer string) {
	for i, p := range peers {
		for _, q := range peers[i+1:] {
			for _, a := range p.AllowedIPs {
				for _, b := range q.AllowedIPs {
					switch {
					case !a.Overlaps(b):
					case a.Bits() > b.Bits():
						return p.Name, q.Name
					default:
						return q.Name, p.Name
					}
				}
			}
		}
	}
	return "", ""
}
