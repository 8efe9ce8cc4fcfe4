package linkstat

import "net/netip"

// prefixesBehind returns prefixes without the networks of other interfaces within them. With
// 0.0.0.0/0, every host is behind the interface towards the internet, except those on this
// machine's other interfaces.
func prefixesBehind(prefixes, others []netip.Prefix) (rest []netip.Prefix) {
	for _, p := range prefixes {
		var parts []netip.Prefix
		for _, other := range others {
			if p.Overlaps(other) && other.Bits() > p.Bits() {
				parts = append(parts, other)
			}
		}
		rest = append(rest, subtractPrefixes(p, parts)...)
	}
	return rest
}

// subtractPrefixes returns p without some parts.
func subtractPrefixes(p netip.Prefix, parts []netip.Prefix) []netip.Prefix {
	for _, part := range parts {
		switch {
		case !p.Overlaps(part):
		case part.Bits() <= p.Bits(): // all of it
			return nil
		default:
			low, high := splitPrefix(p)
			return append(subtractPrefixes(low, parts), subtractPrefixes(high, parts)...)
		}
	}
	return []netip.Prefix{p}
}

// splitPrefix returns the halves of p.
func splitPrefix(p netip.Prefix) (low, high netip.Prefix) {
	bits := p.Bits()
	upper := p.Addr().AsSlice()
	upper[bits/8] |= 0x80 >> (bits % 8)
	at, _ := netip.AddrFromSlice(upper) // as long as the other's
	return netip.PrefixFrom(p.Addr(), bits+1), netip.PrefixFrom(at, bits+1)
}
