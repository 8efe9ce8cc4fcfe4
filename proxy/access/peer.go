package access

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Peer is one client of a WireGuard tunnel.
type Peer struct {
	// For groups, logs and lists; unique.
	Name string `yaml:"name" required:"yes"`
	// As wg pubkey prints it.
	PublicKey Key `yaml:"public_key" required:"yes"`
	// As wg genpsk prints it, if both ends have one.
	Preshared Key `yaml:"preshared_key" secret:"true"`
	// A file that holds that key in its first line, closed to others; relative to the configuration file.
	PresharedKeyFile string `yaml:"preshared_key_file"`
	// The client's addresses inside the tunnel: no others are taken from it, or sent to it.
	AllowedIPs []netip.Prefix `yaml:"allowed_ips" required:"yes"`
	// Send something this often, in whole seconds; 0s: only clients do, where they need to.
	Keepalive time.Duration `yaml:"keepalive"`
	// allowed_ips may have 0.0.0.0/0, ::/0 and other prefixes that take what is for everybody: its side is the way
	// out. Others reach it with tunnel.isolate: false.
	Exit bool `yaml:"exit"`
}

// Equal reports whether nothing differs.
func (p Peer) Equal(q Peer) bool {
	return p.Name == q.Name && p.PublicKey == q.PublicKey && p.Preshared == q.Preshared &&
		p.Keepalive == q.Keepalive && p.Exit == q.Exit && slices.Equal(p.AllowedIPs, q.AllowedIPs)
}

// minSiteBits is the shortest prefix length of a network behind a peer that is no exit. A shorter prefix was probably
// copied from the client's configuration.
const minSiteBits = 8

// CheckExit refuses a prefix that routes the Internet, or the pool with the other peers' addresses, to a peer that is
// no exit. mark is how the configuration makes a peer an exit.
func (p Peer) CheckExit(pool []netip.Prefix, mark string) error {
	if p.Exit {
		return nil
	}
	for _, a := range p.AllowedIPs {
		covers := func(other netip.Prefix) bool { return a.Bits() <= other.Bits() && a.Overlaps(other) }
		what := "most destinations outside"
		switch {
		case a.Bits() < minSiteBits:
			if a.Bits() == 0 {
				what = "all destinations"
			}
		case slices.ContainsFunc(pool, covers):
			what = "the addresses of other peers"
		default:
			continue
		}
		return fmt.Errorf("peer %q has %v in its allowed_ips: %s would lie behind it, out of everybody else's reach; "+
			"write its own addresses, such as 10.9.0.2/32 (%v belongs into the client's configuration), or mark it as an "+
			"exit with %s", p.Name, a, what, a, mark)
	}
	return nil
}

// CheckPeers checks that peers have names, keys and addresses of their own.
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

// Overlap returns a peer with addresses that lie within those of another peer that is no exit; empty: there is none.
// WireGuard routes such addresses to the narrower prefix.
func Overlap(peers []Peer) (inner, outer string) {
	for i, p := range peers {
		for _, q := range peers[i+1:] {
			for _, a := range p.AllowedIPs {
				for _, b := range q.AllowedIPs {
					switch {
					case !a.Overlaps(b), a.Bits() < b.Bits() && p.Exit, b.Bits() < a.Bits() && q.Exit:
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
