package userspace

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	connectip "github.com/quic-go/connect-ip-go"

	"github.com/penstock-net/penstock/proxy/access"
)

// ipPath is the path of a CONNECT-IP request by the default template of RFC 9484 §3, before
// target and protocol.
const ipPath = "/.well-known/masque/ip/"

// ipScope is what a CONNECT-IP session reaches (RFC 9484 §4.6).
type ipScope struct {
	prefixes []netip.Prefix // of destinations; nil: all
	protocol uint8          // of the packets, besides ICMP; 0: all
}

// scopeOf reads what a request's path asks for. A name is looked up.
func scopeOf(r *http.Request, lookup func(ctx context.Context, name string) ([]netip.Addr, error)) (
	s ipScope, err error,
) {
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), ipPath)
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || parts[2] != "" {
		return s, fmt.Errorf("packets are taken at %sTARGET/PROTOCOL/, such as %[1]s*/*/", ipPath)
	}
	for i := range parts {
		if parts[i], err = url.PathUnescape(parts[i]); err != nil {
			return s, err
		}
	}
	if protocol := parts[1]; protocol != "*" {
		n, err := strconv.ParseUint(protocol, 10, 8)
		if err != nil || n == 0 {
			return s, fmt.Errorf("%q is no protocol: write *, or a number from 1 to 255", protocol)
		}
		s.protocol = uint8(n)
	}
	target := parts[0]
	if target == "*" {
		return s, nil
	}
	if p, err := netip.ParsePrefix(target); err == nil && p == p.Masked() {
		s.prefixes = []netip.Prefix{p}
		return s, nil
	}
	if a, err := netip.ParseAddr(target); err == nil && a.Zone() == "" {
		s.prefixes = []netip.Prefix{prefixOf(a.Unmap())}
		return s, nil
	}
	if target == "" || strings.ContainsAny(target, "/: ") {
		return s, fmt.Errorf("%q is no target: write *, an address, a prefix or a name", target)
	}
	addrs, err := lookup(r.Context(), target)
	s.prefixes = make([]netip.Prefix, len(addrs))
	for i, a := range addrs {
		s.prefixes[i] = prefixOf(a)
	}
	return s, err
}

// containsPacket reports whether a packet for an address, which endsOf has accepted, is in it.
func (s ipScope) containsPacket(p []byte, to netip.Addr) bool {
	if s.prefixes != nil && !slices.ContainsFunc(s.prefixes, func(f netip.Prefix) bool { return f.Contains(to) }) {
		return false
	}
	if s.protocol == 0 {
		return true
	}
	protocol := protocolOf(p)
	return protocol == s.protocol || protocol == protocolICMP || protocol == protocolICMPv6
}

// advertisedRoutes are those advertised to a session with these addresses, in the order that RFC 9484
// §4.7.3 asks for; none: it reaches nothing.
func (s ipScope) advertisedRoutes(addrs []netip.Addr) (routes []connectip.IPRoute) {
	prefixes := slices.Clone(s.prefixes)
	if prefixes == nil {
		prefixes = []netip.Prefix{
			netip.PrefixFrom(netip.IPv4Unspecified(), 0),
			netip.PrefixFrom(netip.IPv6Unspecified(), 0),
		}
	}
	slices.SortFunc(prefixes, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	for _, p := range slices.Compact(prefixes) {
		if slices.ContainsFunc(addrs, func(a netip.Addr) bool { return a.Is4() == p.Addr().Is4() }) {
			routes = append(routes, connectip.IPRoute{
				StartIP: p.Addr(), EndIP: access.LastOf(p), IPProtocol: s.protocol,
			})
		}
	}
	return routes
}

// protocolOf is a packet's transport protocol, behind the extension headers of IPv6.
func protocolOf(p []byte) uint8 {
	const hopByHop, routing, fragment, options = 0, 43, 44, 60
	if p[0]>>4 == 4 {
		return p[9]
	}
	next := p[6]
	for at := ipv6Header; len(p) >= at+8; {
		size := 8 * (int(p[at+1]) + 1)
		switch next {
		case hopByHop, routing, options:
		case fragment:
			size = 8
		default:
			return next
		}
		next, at = p[at], at+size
	}
	return next
}
