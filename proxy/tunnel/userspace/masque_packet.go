package userspace

import (
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
