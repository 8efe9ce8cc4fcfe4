package netstack

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// Datagrams handles the UDP datagrams and ICMP echo messages that come out of the tunnel,
// reassembled from fragments. Calls may overlap. The callee owns the bytes. hops is the hop limit
// to forward a message with, at least one.
type Datagrams interface {
	// UDP handles a datagram.
	UDP(source, target netip.AddrPort, hops uint8, payload []byte)
	// Echo handles an ICMP echo request of the addresses' version.
	Echo(source, target netip.Addr, hops uint8, message []byte)
	// EchoReply handles the answer to a request that was sent into the tunnel.
	EchoReply(source, target netip.Addr, message []byte)
}

// Unreachable describes an ICMP error from the network outside about a packet that came out of
// the tunnel. Its ICMP version is that of the packet's addresses.
type Unreachable struct {
	Type, Code uint8
	MTU        uint32         // in bytes, if the packet was too big; 0 otherwise
	From       netip.Addr     // sender of the error; invalid: Target itself
	Source     netip.AddrPort // of the packet; the port of an echo request is its identifier
	Target     netip.AddrPort
	Echo       bool // it was an echo request, otherwise a UDP datagram
	Sequence   uint16
	Length     int // bytes of its payload
}

// icmpMessage returns the ICMP message. It quotes the packet's IP header and the first eight bytes
// behind that (RFC 792).
func (u Unreachable) icmpMessage() []byte {
	var quoted [8]byte
	if u.Echo {
		quoted[0] = uint8(header.ICMPv4Echo)
		if u.Source.Addr().Is6() {
			quoted[0] = uint8(header.ICMPv6EchoRequest)
		}
		binary.BigEndian.PutUint16(quoted[4:], u.Source.Port())
		binary.BigEndian.PutUint16(quoted[6:], u.Sequence)
	} else {
		header.UDP(quoted[:]).Encode(&header.UDPFields{
			SrcPort: u.Source.Port(), DstPort: u.Target.Port(), Length: uint16(min(len(quoted)+u.Length, 0xffff)),
		})
	}
	source, target := tcpip.AddrFromSlice(u.Source.Addr().AsSlice()), tcpip.AddrFromSlice(u.Target.Addr().AsSlice())
	protocol := udp.ProtocolNumber
	switch {
	case u.Echo && u.Source.Addr().Is6():
		protocol = icmp.ProtocolNumber6
	case u.Echo:
		protocol = icmp.ProtocolNumber4
	}
	if u.Source.Addr().Is6() {
		b := make([]byte, echoHeader+header.IPv6MinimumSize, echoHeader+header.IPv6MinimumSize+len(quoted))
		b[0], b[1] = u.Type, u.Code
		binary.BigEndian.PutUint32(b[4:], u.MTU)
		header.IPv6(b[echoHeader:]).Encode(&header.IPv6Fields{
			PayloadLength: uint16(min(len(quoted)+u.Length, 0xffff)), TransportProtocol: protocol, HopLimit: 1,
			SrcAddr: source, DstAddr: target,
		})
		return append(b, quoted[:]...)
	}
	b := make([]byte, echoHeader+header.IPv4MinimumSize, echoHeader+header.IPv4MinimumSize+len(quoted))
	b[0], b[1] = u.Type, u.Code
	binary.BigEndian.PutUint16(b[6:], uint16(min(u.MTU, 0xffff)))
	ip := header.IPv4(b[echoHeader:])
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(min(header.IPv4MinimumSize+len(quoted)+u.Length,
			0xffff)), Protocol: uint8(protocol), TTL: 1,
		SrcAddr: source, DstAddr: target,
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	return append(b, quoted[:]...)
}
