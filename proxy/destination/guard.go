// Package destination says which addresses clients must not reach through a process of ours. It opens nothing, so that
// the library's relay decides by the same addresses as the proxy.
package destination

import (
	"fmt"
	"net/netip"
	"slices"
)

// Guard refuses destinations that clients must not reach through the proxy,
// since its own connections begin on its machine: that machine, its link, and
// cloud metadata services, which answer as they would answer the proxy. Clients
// who may name any address are kept from what is no single host at all, too.
// Private ranges pass: on an edge router they are what the proxy is for; a rule
// refuses them where they are not. Check the address that is about to be
// dialled, never a name.
type Guard struct {
	Allow    []netip.Prefix                 // exceptions
	Captured bool                           // the clients were captured: they did not choose the proxy
	Own      func(netip.Addr) (bool, error) // reports whether an address is this machine's
	Inner    func(netip.Addr) bool          // reports whether it is another peer's of the same tunnel; nil: none is
}

// class is one kind of destination that is refused.
type class struct {
	what     string
	captured bool // to captured clients as well: they would not have got there by themselves
	prefixes []netip.Prefix
}

// The first class that contains an address names it. Ranges: IANA's
// special-purpose address registries; metadata addresses: the providers' own
// documentation and cloud-init's data sources.
var classes = []class{
	{"a cloud metadata service", true, mustPrefixes(
		"169.254.169.254/32", "fd00:ec2::254/128", // most clouds; AWS over IPv6
		"169.254.170.2/32", "169.254.170.23/32", "fd00:ec2::23/128", // AWS container credentials
		"168.63.129.16/32",                            // Azure
		"100.100.100.200/32", "fd00:100::100:200/128", // Alibaba
		"192.0.0.192/32", "fd00:c1::a9fe:a9fe/128", // Oracle
		"fd20:ce::254/128",                    // Google over IPv6
		"169.254.42.42/32", "fd00:42::42/128", // Scaleway
		"169.254.0.23/32", "169.254.10.10/32", // Tencent
		"fe80::a9fe:a9fe/128", "fd00:a9fe:a9fe::1/128", // OpenStack; Akamai
	)},
	{"unspecified", true, mustPrefixes("0.0.0.0/8", "::/128")},
	{"loopback", true, mustPrefixes("127.0.0.0/8", "::1/128")},
	{"link-local", true, mustPrefixes("169.254.0.0/16", "fe80::/10", "fec0::/10")},
	{"shared carrier-grade NAT space (100.64.0.0/10)", false, mustPrefixes("100.64.0.0/10")},
	{"multicast", false, mustPrefixes("224.0.0.0/4", "ff00::/8")},
	{"broadcast or reserved", false, mustPrefixes("240.0.0.0/4")},
	{"for protocol assignments only", false, mustPrefixes("192.0.0.0/24")},
}

// mustPrefixes parses constants.
func mustPrefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// Closed returns all that a Guard refuses by the address alone, the machine's own aside, and but for
// what a translator of a network's own (RFC 8215) would make of an address.
func Closed() []netip.Prefix {
	var all []netip.Prefix
	for _, k := range classes {
		all = append(all, Refused(k.prefixes)...)
	}
	return all
}

// Refused returns all that a rule refuses which refuses destinations, by the address alone, with the same
// exception.
func Refused(destinations []netip.Prefix) (all []netip.Prefix) {
	for _, p := range destinations {
		all = append(all, p)
		if p.Addr().Is4() {
			all = append(all, embeddingPrefixes(p)...)
		}
	}
	return all
}

// Contains reports whether one of the prefixes contains a, whatever its zone, which netip.Prefix never matches.
func Contains(prefixes []netip.Prefix, a netip.Addr) bool {
	a = a.WithZone("")
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Check returns why addr must not be dialled, or nil.
func (g Guard) Check(addr netip.Addr) error {
	if !addr.IsValid() {
		return fmt.Errorf("destination: there is no address")
	}
	plain := addr.Unmap().WithZone("")
	if Contains(g.Allow, plain) {
		return nil
	}
	for i, c := range append([]netip.Addr{plain}, EmbeddedIPv4(plain)...) {
		if i > 0 && Contains(g.Allow, c) {
			continue
		}
		what, err := g.refusedAs(c)
		switch {
		case err != nil: // what cannot be told apart is not let through
			return fmt.Errorf("whether destination %v is this machine's: %w", addr, err)
		case what != "":
			return fmt.Errorf("destination %v is %s; list it under the listener's allow if clients may "+
				"reach it", addr, what)
		}
	}
	return nil
}

// refusedAs returns what addr is, if it is refused.
func (g Guard) refusedAs(addr netip.Addr) (what string, err error) {
	for _, k := range classes {
		if (k.captured || !g.Captured) && Contains(k.prefixes, addr) {
			return k.what, nil
		}
	}
	if g.Inner != nil && g.Inner(addr) {
		return "another peer's", nil
	}
	own, err := g.Own(addr)
	if own {
		what = "the proxy's own machine"
	}
	return what, err
}

var (
	nat64     = netip.MustParsePrefix("64:ff9b::/96")
	nat64Priv = netip.MustParsePrefix("64:ff9b:1::/48") // any /96 or /64 of it is a translator's
	sixToFour = netip.MustParsePrefix("2002::/16")
	v4Compat  = netip.MustParsePrefix("::/96")
	siit      = netip.MustParsePrefix("::ffff:0:0:0/96")
)

// embeddingPrefixes are the prefixes that EmbeddedIPv4 looks for an IPv4 address in.
func embeddingPrefixes(p netip.Prefix) (all []netip.Prefix) {
	v4 := p.Addr().As4()
	for into, at := range map[netip.Prefix]int{nat64: 12, siit: 12, v4Compat: 12, sixToFour: 2} {
		b := into.Addr().As16()
		copy(b[at:], v4[:])
		all = append(all, netip.PrefixFrom(netip.AddrFrom16(b), 8*at+p.Bits()))
	}
	return all
}

// EmbeddedIPv4 returns the IPv4 addresses that a translator or tunnel on the way may turn addr
// into (RFC 6052, RFC 8215, RFC 3056, RFC 4291 §2.5.5.1, and RFC 2765's form, which
// translators still know).
func EmbeddedIPv4(addr netip.Addr) (all []netip.Addr) {
	if !addr.Is6() {
		return nil
	}
	b := addr.As16()
	add := func(at int) { all = append(all, netip.AddrFrom4([4]byte(b[at:]))) }
	switch {
	case sixToFour.Contains(addr):
		add(2)
	case nat64Priv.Contains(addr):
		if b[8] == 0 && b[9] != 0 { // of a /64 (RFC 6052 §2.2): in a /96 these bytes are the translator's
			add(9)
			if [3]byte(b[13:]) == [3]byte{} { // as a /64 ends; in a /96 no host's
				break
			}
		}
		add(12)
	case addr.IsUnspecified(), addr.IsLoopback():
	case nat64.Contains(addr), siit.Contains(addr), v4Compat.Contains(addr):
		add(12)
	}
	return all
}
