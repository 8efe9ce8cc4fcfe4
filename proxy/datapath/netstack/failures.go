package netstack

import (
	"encoding/binary"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/seqnum"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// leastMTU is the least MTU of an IPv4 path, in bytes, that an ICMP error is believed about: the
// default of Linux's net.ipv4.route.min_pmtu.
const leastMTU = 552

// isEcho tells whether an ICMP message, of at least one byte, is an echo request or a reply.
func isEcho(b []byte, protocol uint8) bool {
	if protocol == uint8(icmp.ProtocolNumber6) {
		kind := header.ICMPv6Type(b[0])
		return kind == header.ICMPv6EchoRequest || kind == header.ICMPv6EchoReply
	}
	kind := header.ICMPv4Type(b[0])
	return kind == header.ICMPv4Echo || kind == header.ICMPv4EchoReply
}

// errorIsFounded tells whether a packet with an ICMP message other than echoes is an error about a
// segment that a connection has in flight (RFC 5927 §4.1). The stack would believe anybody, and
// send one byte in each segment after an error with an MTU that no segment fits.
func (s *Stack) errorIsFounded(p []byte) bool {
	var id stack.TransportEndpointID
	var segment []byte
	if p[0]>>4 == 6 {
		plain := header.IPv6(p).NextHeader() == uint8(icmp.ProtocolNumber6)
		p = p[header.IPv6MinimumSize:]
		if !plain || len(p) < echoHeader+header.IPv6MinimumSize+echoHeader {
			return false
		}
		quoted := header.IPv6(p[echoHeader:])
		small := header.ICMPv6Type(p[0]) == header.ICMPv6PacketTooBig && binary.BigEndian.Uint32(p[4:]) < MinMTU
		if small || quoted.NextHeader() != uint8(tcp.ProtocolNumber) {
			return false // RFC 8201 §4
		}
		id.LocalAddress, id.RemoteAddress = quoted.SourceAddress(), quoted.DestinationAddress()
		segment = quoted[header.IPv6MinimumSize:]
	} else {
		p = p[header.IPv4(p).HeaderLength():]
		if len(p) < echoHeader+header.IPv4MinimumSize+echoHeader {
			return false
		}
		quoted := header.IPv4(p[echoHeader:])
		small := header.ICMPv4Type(p[0]) == header.ICMPv4DstUnreachable &&
			header.ICMPv4Code(p[1]) == header.ICMPv4FragmentationNeeded && binary.BigEndian.Uint16(p[6:]) < leastMTU
		options := int(quoted.HeaderLength()) != header.IPv4MinimumSize
		if small || options || quoted.Protocol() != uint8(tcp.ProtocolNumber) {
			return false // packets that we send have no options
		}
		id.LocalAddress, id.RemoteAddress = quoted.SourceAddress(), quoted.DestinationAddress()
		segment = quoted[header.IPv4MinimumSize:]
	}
	id.LocalPort, id.RemotePort = header.TCP(segment).SourcePort(), header.TCP(segment).DestinationPort()
	c := s.conns.findConn(id)
	return c != nil && c.signals.isInFlight(seqnum.Value(header.TCP(segment).SequenceNumber()))
}

// isInFlight tells whether a segment that begins at seq may be in flight.
func (g *signals) isInFlight(seq seqnum.Value) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := g.offsetOf(seq)
	return g.started && g.una-1 <= at && at <= g.sndMax // a SYN lies before the stream
}
