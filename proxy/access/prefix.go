package access

import "net/netip"

// LastOf returns the last address of a prefix.
func LastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return last
}
