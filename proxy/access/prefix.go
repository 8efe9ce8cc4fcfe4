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

// GatewayIn returns the gateway's own address in a prefix of a tunnel's pool: the one after the first.
func GatewayIn(pool netip.Prefix) netip.Addr { return pool.Masked().Addr().Next() }
