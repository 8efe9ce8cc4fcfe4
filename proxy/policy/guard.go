package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// Guard refuses destinations that a client who may name any address could
// abuse: the proxy's own machine, its link, cloud metadata services, and what
// is no single host at all. Private ranges pass: on an edge router they are
// what the proxy is for; a rule refuses them where they are not. Check the
// address that is about to be dialled, never a name.
type Guard struct {
	Allow []netip.Prefix // exceptions
}

// class is one kind of destination that is refused.
type class struct {
	what     string
	prefixes []netip.Prefix
}

// The first class that contains an address names it. Ranges: IANA's
// special-purpose address registries; metadata addresses: the providers' own
// documentation.
var classes = []class{
	{"a cloud metadata service", prefixes(
		"169.254.169.254/32", "fd00:ec2::254/128", // most clouds; AWS over IPv6
		"169.254.170.2/32", "fd00:ec2::23/128", // AWS container credentials
		"100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", // Alibaba; Azure; Oracle
		"fd20:ce::254/128", // Google over IPv6
	)},
	{"unspecified", prefixes("0.0.0.0/8", "::/128")},
	{"loopback", prefixes("127.0.0.0/8", "::1/128")},
	{"link-local", prefixes("169.254.0.0/16", "fe80::/10", "fec0::/10")},
	{"shared carrier-grade NAT space (100.64.0.0/10)", prefixes("100.64.0.0/10")},
	{"multicast", prefixes("224.0.0.0/4", "ff00::/8")},
	{"broadcast or reserved", prefixes("240.0.0.0/4")},
	{"for protocol assignments only", prefixes("192.0.0.0/24")},
}

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// Check returns why addr must not be dialled, or nil.
func (g Guard) Check(addr netip.Addr) error {
	if !addr.IsValid() {
		return fmt.Errorf("policy: no destination address")
	}
	plain := addr.Unmap().WithZone("")
	if containsAddr(g.Allow, plain) {
		return nil
	}
	candidates := []netip.Addr{plain}
	if inner, ok := embedded(plain); ok && !containsAddr(g.Allow, inner) {
		candidates = append(candidates, inner)
	}
	for _, c := range candidates {
		for _, k := range classes {
			if slices.ContainsFunc(k.prefixes, func(p netip.Prefix) bool { return p.Contains(c) }) {
				return fmt.Errorf("policy: destination %v is %s; list it under the listener's allow if clients may reach it", addr, k.what)
			}
		}
	}
	return nil
}

var (
	nat64     = netip.MustParsePrefix("64:ff9b::/96")
	nat64Priv = netip.MustParsePrefix("64:ff9b:1::/48") // any /96 of it is a translator's
	sixToFour = netip.MustParsePrefix("2002::/16")
	v4Compat  = netip.MustParsePrefix("::/96")
	siit      = netip.MustParsePrefix("::ffff:0:0:0/96")
)

// embedded returns the IPv4 address that a translator or tunnel on the way
// would turn addr into (RFC 6052, RFC 8215, RFC 3056, RFC 4291 §2.5.5.1, and
// RFC 2765's form, which translators still know).
func embedded(addr netip.Addr) (netip.Addr, bool) {
	b := addr.As16()
	switch {
	case !addr.Is6():
		return netip.Addr{}, false
	case nat64.Contains(addr), nat64Priv.Contains(addr), siit.Contains(addr), v4Compat.Contains(addr) && !addr.IsUnspecified() && !addr.IsLoopback():
		return netip.AddrFrom4([4]byte(b[12:16])), true
	case sixToFour.Contains(addr):
		return netip.AddrFrom4([4]byte(b[2:6])), true
	}
	return netip.Addr{}, false
}
