package userspace

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

const (
	ipv4Header = header.IPv4MinimumSize // without options
	ipv6Header = header.IPv6MinimumSize

	protocolICMP   = uint8(header.ICMPv4ProtocolNumber)
	protocolICMPv6 = uint8(header.ICMPv6ProtocolNumber)

	mostQuotedIPv4 = 576 - ipv4Header - icmpHeader             // of a packet, in an ICMP about it (RFC 1812 §4.3.2.3)
	mostQuotedIPv6 = netstack.MinMTU - ipv6Header - icmpHeader // RFC 4443 §2.4
	icmpHops       = 64                                        // of an ICMP of ours
)

// icmpErrors are ICMP's types that are about another packet (RFC 1122 §3.2.2).
var icmpErrors = []header.ICMPv4Type{
	header.ICMPv4DstUnreachable, header.ICMPv4SrcQuench, header.ICMPv4Redirect, header.ICMPv4TimeExceeded,
	header.ICMPv4ParamProblem,
}

// endsOf returns the source and destination address of an IP packet; false: it is none.
func endsOf(p []byte) (from, to netip.Addr, ok bool) {
	switch {
	case len(p) >= ipv4Header && p[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20])), true
	case len(p) >= ipv6Header && p[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40])), true
	}
	return netip.Addr{}, netip.Addr{}, false
}

// tooBig returns the ICMP error that tells the sender of p, which endsOf has accepted, that packets may have mtu bytes
// at most. It is nil if p is itself an ICMP error, since no error may be sent about one.
func tooBig(p []byte, mtu int) []byte {
	if p[0]>>4 == 4 {
		return tooBigIPv4(header.IPv4(p), mtu)
	}
	return tooBigIPv6(header.IPv6(p), mtu)
}

func tooBigIPv4(p header.IPv4, mtu int) []byte {
	head := int(p.HeaderLength())
	if p.Protocol() == protocolICMP && len(p) > head && slices.Contains(icmpErrors, header.ICMPv4Type(p[head])) {
		return nil
	}
	quoted := p[:min(len(p), mostQuotedIPv4)]
	b := header.IPv4(make([]byte, ipv4Header+icmpHeader+len(quoted)))
	b.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(b)), TTL: icmpHops, Protocol: protocolICMP,
		SrcAddr: p.DestinationAddress(), DstAddr: p.SourceAddress(),
	})
	b.SetChecksum(^b.CalculateChecksum())
	icmp := header.ICMPv4(b[ipv4Header:])
	icmp.SetType(header.ICMPv4DstUnreachable)
	icmp.SetCode(header.ICMPv4FragmentationNeeded)
	icmp.SetMTU(uint16(mtu)) // RFC 1191 §4
	copy(icmp.Payload(), quoted)
	icmp.SetChecksum(^checksum.Checksum(icmp, 0))
	return b
}

func tooBigIPv6(p header.IPv6, mtu int) []byte {
	if p.NextHeader() == protocolICMPv6 && len(p) > ipv6Header &&
		header.ICMPv6Type(p[ipv6Header]) < header.ICMPv6EchoRequest { // RFC 4443 §2.1: those above are no errors
		return nil
	}
	quoted := p[:min(len(p), mostQuotedIPv6)]
	b := header.IPv6(make([]byte, ipv6Header+icmpHeader+len(quoted)))
	b.Encode(&header.IPv6Fields{
		PayloadLength: uint16(icmpHeader + len(quoted)), TransportProtocol: header.ICMPv6ProtocolNumber, HopLimit: icmpHops,
		SrcAddr: p.DestinationAddress(), DstAddr: p.SourceAddress(),
	})
	icmp := header.ICMPv6(b[ipv6Header:])
	icmp.SetType(header.ICMPv6PacketTooBig)
	icmp.SetMTU(uint32(mtu))
	copy(icmp.Payload(), quoted)
	icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{
		Header: icmp, Src: b.SourceAddress(), Dst: b.DestinationAddress(),
	}))
	return b
}

const (
	protocolTCP = uint8(header.TCPProtocolNumber)
	tcpHeader   = header.TCPMinimumSize // without options
)

// synOf returns the TCP segment of an IP packet, and the lengths of its IP and TCP headers, if it
// is a whole SYN. endsOf has accepted the packet.
func synOf(p []byte) (segment header.TCP, head int) {
	head = ipv6Header
	if p[0]>>4 == 4 {
		ip := header.IPv4(p)
		if head = int(ip.HeaderLength()); head < ipv4Header || ip.FragmentOffset() != 0 {
			return nil, 0
		}
	}
	if !isTCP(p) || len(p) < head+tcpHeader {
		return nil, 0
	}
	segment = p[head:]
	end := int(segment.DataOffset())
	if !segment.Flags().Contains(header.TCPFlagSyn) || end < tcpHeader || end > len(segment) {
		return nil, 0
	}
	return segment, head
}

// isTCP reports whether TCP follows right behind the IP header. endsOf has accepted the packet.
func isTCP(p []byte) bool {
	if p[0]>>4 == 4 {
		return header.IPv4(p).Protocol() == protocolTCP
	}
	return header.IPv6(p).NextHeader() == protocolTCP
}

// isSYN reports whether an IP packet is a whole SYN. endsOf has accepted the packet.
func isSYN(p []byte) bool {
	segment, _ := synOf(p)
	return segment != nil
}

// clampMSS lowers the MSS option of a SYN to what packets of mtu bytes carry: a Packet Too Big costs a connection its
// first seconds, and some clients ignore it. p is an IP packet that endsOf has accepted; anything but a SYN with a
// larger MSS stays as it is.
func clampMSS(p []byte, mtu int) {
	segment, head := synOf(p)
	if segment == nil {
		return
	}
	at, most := netstack.OptionIndex(segment, header.TCPOptionMSS, header.TCPOptionMSSLength), mtu-head-tcpHeader
	if at < 0 || most < 1 || int(binary.BigEndian.Uint16(segment[at:])) <= most {
		return
	}
	var mss [2]byte
	binary.BigEndian.PutUint16(mss[:], uint16(most))
	netstack.RewriteSegment(segment, at, mss[:])
}

// protocolOf returns a packet's transport protocol, behind the extension headers of IPv6.
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

// prefixOf returns the prefix that has one address.
func prefixOf(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// makeBuffers returns n buffers of size bytes, and room for the lengths of packets.
func makeBuffers(n, size int) ([][]byte, []int) {
	bufs := make([][]byte, n)
	for i := range bufs {
		bufs[i] = make([]byte, size)
	}
	return bufs, make([]int, n)
}
