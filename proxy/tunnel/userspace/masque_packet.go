package userspace

import (
	"bytes"
	"encoding/binary"
	"net/netip"
)

const (
	ipv4Header = 20 // without options
	ipv6Header = 40

	protocolICMP   = 1
	protocolICMPv6 = 58

	mostQuotedIPv4 = 576 - ipv4Header - 8  // of a packet, in an ICMP about it (RFC 1812 §4.3.2.3)
	mostQuotedIPv6 = 1280 - ipv6Header - 8 // RFC 4443 §2.4
	icmpHops       = 64                    // of an ICMP of ours
	unreachable    = 3                     // ICMP: type of "fragmentation needed"
	needsFragments = 4                     // and its code
	packetTooBig   = 2                     // ICMPv6: its type
	icmpv6Info     = 128                   // ICMPv6 types from here on are no errors
)

// icmpErrors are ICMP's types that are about another packet (RFC 1122 §3.2.2).
var icmpErrors = []byte{unreachable, 4, 5, 11, 12}

// endsOf returns the source and destination address of an IP packet.
func endsOf(p []byte) (from, to netip.Addr, ok bool) {
	switch {
	case len(p) >= ipv4Header && p[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20])), true
	case len(p) >= ipv6Header && p[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40])), true
	}
	return netip.Addr{}, netip.Addr{}, false
}

// tooBig is the ICMP error that tells the sender of p, which endsOf has accepted,
// that packets may have mtu bytes at most; nil if p is itself an ICMP error, about
// which none may be sent.
func tooBig(p []byte, mtu int) []byte {
	if p[0]>>4 == 4 {
		header := int(p[0]&0xf) * 4
		if p[9] == protocolICMP && len(p) > header && bytes.IndexByte(icmpErrors, p[header]) >= 0 {
			return nil
		}
		quoted := p[:min(len(p), mostQuotedIPv4)]
		b := make([]byte, ipv4Header+8, ipv4Header+8+len(quoted))
		b[0], b[8], b[9] = 4<<4|ipv4Header/4, icmpHops, protocolICMP
		binary.BigEndian.PutUint16(b[2:], uint16(cap(b)))
		copy(b[12:16], p[16:20])
		copy(b[16:20], p[12:16])
		binary.BigEndian.PutUint16(b[10:], internetChecksum(0, b[:ipv4Header]))
		icmp := b[ipv4Header:]
		icmp[0], icmp[1] = unreachable, needsFragments
		binary.BigEndian.PutUint16(icmp[6:], uint16(mtu)) // RFC 1191 §4
		b = append(b, quoted...)
		binary.BigEndian.PutUint16(b[ipv4Header+2:], internetChecksum(0, b[ipv4Header:]))
		return b
	}
	if p[6] == protocolICMPv6 && len(p) > ipv6Header && p[ipv6Header] < icmpv6Info {
		return nil
	}
	quoted := p[:min(len(p), mostQuotedIPv6)]
	b := make([]byte, ipv6Header+8, ipv6Header+8+len(quoted))
	b[0], b[6], b[7] = 6<<4, protocolICMPv6, icmpHops
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(quoted)))
	copy(b[8:24], p[24:40])
	copy(b[24:40], p[8:24])
	b[ipv6Header] = packetTooBig
	binary.BigEndian.PutUint32(b[ipv6Header+4:], uint32(mtu))
	b = append(b, quoted...)
	pseudo := uint32(8+len(quoted)) + protocolICMPv6 // RFC 8200 §8.1
	binary.BigEndian.PutUint16(b[ipv6Header+2:], internetChecksum(pseudo, b[8:]))
	return b
}

// internetChecksum is the Internet checksum (RFC 1071) of b, added to sum.
func internetChecksum(sum uint32, b []byte) uint16 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
