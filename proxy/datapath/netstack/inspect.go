package netstack

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// verdict is what becomes of a packet that comes out of the tunnel.
type verdict uint8

const (
	valid     verdict = iota // its checksums are right
	unchecked                // the stack is to check it: a fragment, or with a routing header
	notice                   // an ICMP message other than echoes, whose checksum is right
	unfounded                // the same, but about no segment in flight
	malformed                // no IP packet, or one that is shorter than it says
	damaged                  // a checksum is wrong
	senseless                // TCP flags that no sender uses together
	expired                  // its hop limit has run out
	verdicts
)

// inspectPacket judges a packet, and returns it without the bytes behind its end. The tunnel
// authenticates what its peer sent, but that may have been damaged in a network behind the
// peer; and what is damaged must not leave with a right checksum.
func inspectPacket(p []byte) ([]byte, verdict) {
	if len(p) == 0 {
		return p, malformed
	}
	switch p[0] >> 4 {
	case 4:
		return inspect4(p)
	case 6:
		return inspect6(p)
	default:
		return p, malformed
	}
}

func inspect4(p []byte) ([]byte, verdict) {
	if len(p) < header.IPv4MinimumSize {
		return p, malformed
	}
	ip := header.IPv4(p)
	head, total := int(ip.HeaderLength()), int(ip.TotalLength())
	if head < header.IPv4MinimumSize || head > total || total > len(p) {
		return p, malformed
	}
	p = p[:total]
	if checksum.Checksum(p[:head], 0) != 0xffff {
		return p, damaged
	}
	first, part := ip.FragmentOffset() == 0, ip.More() || ip.FragmentOffset() != 0
	protocol := ip.TransportProtocol()
	if part {
		return p, inspectPart(p[head:], uint8(protocol), first)
	}
	return p, inspectTransport(p[head:], uint8(protocol), p[12:20], false)
}

func inspect6(p []byte) ([]byte, verdict) {
	if len(p) < header.IPv6MinimumSize {
		return p, malformed
	}
	ip := header.IPv6(p)
	total := header.IPv6MinimumSize + int(ip.PayloadLength())
	if total > len(p) {
		return p, malformed
	}
	p = p[:total]
	next, rest := ip.NextHeader(), p[header.IPv6MinimumSize:]
	for {
		switch header.IPv6ExtensionHeaderIdentifier(next) {
		case header.IPv6HopByHopOptionsExtHdrIdentifier, header.IPv6RoutingExtHdrIdentifier, header.IPv6DestinationOptionsExtHdrIdentifier:
			if len(rest) < 8 || len(rest) < 8*(1+int(rest[1])) {
				return p, malformed
			}
			if next == uint8(header.IPv6RoutingExtHdrIdentifier) && rest[3] > 0 {
				return p, unchecked // its checksum is computed with the last address of the route
			}
			next, rest = rest[0], rest[8*(1+int(rest[1])):]
		case header.IPv6FragmentExtHdrIdentifier:
			if len(rest) < header.IPv6FragmentExtHdrLength {
				return p, malformed
			}
			switch header.IPv6ExtensionHeaderIdentifier(rest[0]) { // behind which the stack would look
			case header.IPv6HopByHopOptionsExtHdrIdentifier, header.IPv6RoutingExtHdrIdentifier,
				header.IPv6FragmentExtHdrIdentifier, header.IPv6DestinationOptionsExtHdrIdentifier,
				header.IPv6ExperimentExtHdrIdentifier:
				return p, malformed
			}
			first := binary.BigEndian.Uint16(rest[2:])>>3 == 0
			return p, inspectPart(rest[header.IPv6FragmentExtHdrLength:], rest[0], first)
		case header.IPv6ExperimentExtHdrIdentifier: // likewise
			return p, malformed
		default:
			return p, inspectTransport(rest, next, p[8:40], true)
		}
	}
}

// inspectPart judges a fragment's payload. The first fragment must have a segment's flags,
// which the second must not overwrite (RFC 3128), or an ICMP message's type.
func inspectPart(b []byte, protocol uint8, first bool) verdict {
	if protocol == uint8(tcp.ProtocolNumber) && first {
		if len(b) < header.TCPMinimumSize {
			return malformed
		}
		if !flagsAreSensible(header.TCP(b).Flags()) {
			return senseless
		}
	}
	icmps := protocol == uint8(icmp.ProtocolNumber4) || protocol == uint8(icmp.ProtocolNumber6)
	if icmps && first && (len(b) == 0 || !isEcho(b, protocol)) {
		return malformed // nobody sends errors in fragments
	}
	return unchecked
}

// inspectTransport judges the payload of a whole packet between two addresses.
func inspectTransport(b []byte, protocol uint8, addresses []byte, six bool) verdict {
	pseudo := func(length int) uint16 { // RFC 9293 §3.1, RFC 8200 §8.1
		return checksum.Combine(checksum.Checksum(addresses, uint16(protocol)), uint16(length))
	}
	switch protocol {
	case uint8(tcp.ProtocolNumber):
		if len(b) < header.TCPMinimumSize {
			return malformed
		}
		if checksum.Checksum(b, pseudo(len(b))) != 0xffff {
			return damaged
		}
		if !flagsAreSensible(header.TCP(b).Flags()) {
			return senseless
		}
	case uint8(udp.ProtocolNumber):
		if len(b) < header.UDPMinimumSize {
			return malformed
		}
		length := int(header.UDP(b).Length())
		if length < header.UDPMinimumSize || length > len(b) {
			return malformed
		}
		if header.UDP(b).Checksum() == 0 && !six { // RFC 768: there is none
			return valid
		}
		if header.UDP(b).Checksum() == 0 || checksum.Checksum(b[:length], pseudo(length)) != 0xffff {
			return damaged
		}
	case uint8(icmp.ProtocolNumber4):
		return inspectICMP(b, protocol, !six, 0)
	case uint8(icmp.ProtocolNumber6):
		return inspectICMP(b, protocol, six, pseudo(len(b)))
	}
	return valid
}

// inspectICMP judges an ICMP message. family tells whether it is of the packet's IP version;
// sum is the checksum of the pseudo-header, if there is one.
func inspectICMP(b []byte, protocol uint8, family bool, sum uint16) verdict {
	switch {
	case !family:
		return valid // the stack has no such protocol
	case checksum.Checksum(b, sum) != 0xffff || len(b) == 0:
		return damaged
	case isEcho(b, protocol):
		return valid
	}
	return notice
}

// flagsAreSensible tells whether a TCP sends such flags together (RFC 9293 §3.10). PSH, URG
// and the ECN flags may go with any.
func flagsAreSensible(f header.TCPFlags) bool {
	switch f & (header.TCPFlagSyn | header.TCPFlagAck | header.TCPFlagFin | header.TCPFlagRst) {
	case header.TCPFlagSyn, header.TCPFlagSyn | header.TCPFlagAck,
		header.TCPFlagAck, header.TCPFlagAck | header.TCPFlagFin,
		header.TCPFlagRst, header.TCPFlagRst | header.TCPFlagAck:
		return true
	default:
		return false
	}
}

// SetGateway sets the function that returns our own address in the network of an address
// inside the tunnel; invalid: we have none.
func (s *Stack) SetGateway(of func(inner netip.Addr) netip.Addr) { s.gateway.Store(&of) }

// ownBeside returns what SetGateway's function does; invalid: there is none.
func (s *Stack) ownBeside(inner netip.Addr) netip.Addr {
	if of := s.gateway.Load(); of != nil {
		return (*of)(inner)
	}
	return netip.Addr{}
}

// hopLimitIsSpent tells whether a packet's hop limit is 0, or is 1 and the packet is not for us.
func (s *Stack) hopLimitIsSpent(p []byte) bool {
	if p[0]>>4 == 6 {
		hops, target := header.IPv6(p).HopLimit(), netip.AddrFrom16([16]byte(p[24:40]))
		return hops == 0 || hops == 1 && s.ownBeside(target) != target
	}
	hops, target := header.IPv4(p).TTL(), netip.AddrFrom4([4]byte(p[16:20]))
	return hops == 0 || hops == 1 && s.ownBeside(target) != target
}

// Source addresses of Time Exceeded messages if we have no address in the tunnel: the IPv4
// dummy address (RFC 7600 §4.8) and a link-local one.
var (
	dummy4 = netip.AddrFrom4([4]byte{192, 0, 0, 8})
	dummy6 = netip.MustParseAddr("fe80::1")
)

// sendTimeExceeded answers a packet whose hop limit has run out, as a router does, unless
// there have been many such answers of late (RFC 1812 §4.3.2, RFC 4443 §2.4 and 3.3).
func (s *Stack) sendTimeExceeded(p []byte) {
	var to netip.Addr
	var answerable bool
	from, quotable := dummy4, 576-header.IPv4MinimumSize-echoHeader
	message := [echoHeader]byte{uint8(header.ICMPv4TimeExceeded), uint8(header.ICMPv4TTLExceeded)}
	if p[0]>>4 == 6 {
		to, from, answerable = netip.AddrFrom16([16]byte(p[8:24])), dummy6, mayAnswerIPv6(p)
		quotable = MinMTU - header.IPv6MinimumSize - echoHeader
		message = [echoHeader]byte{uint8(header.ICMPv6TimeExceeded), uint8(header.ICMPv6HopLimitExceeded)}
	} else {
		to, answerable = netip.AddrFrom4([4]byte(p[12:16])), mayAnswerIPv4(p)
	}
	if own := s.ownBeside(to); own.IsValid() {
		from = own
	}
	if answerable && (to.IsGlobalUnicast() || to.IsLinkLocalUnicast()) && s.net.AllowICMPMessage() {
		_ = s.SendICMP(from, to, append(message[:], p[:min(len(p), quotable)]...)) // it may be lost like any packet
	}
}

// mayAnswerIPv4 tells whether an ICMP error may be sent about a packet: not if it is an ICMP
// error, was sent to many, or is a fragment but the first (RFC 1122 §3.2.2).
func mayAnswerIPv4(p []byte) bool {
	ip := header.IPv4(p)
	if ip.Protocol() == uint8(icmp.ProtocolNumber4) {
		b := p[ip.HeaderLength():]
		if len(b) == 0 || header.ICMPv4Type(b[0]) != header.ICMPv4Echo {
			return false
		}
	}
	target := netip.AddrFrom4([4]byte(p[16:20]))
	return ip.FragmentOffset() == 0 && !target.IsMulticast() && target != broadcast
}

// mayAnswerIPv6 is answerable4 for IPv6 (RFC 4443 §2.4 e).
func mayAnswerIPv6(p []byte) bool {
	b := p[header.IPv6MinimumSize:]
	failure := p[6] == uint8(icmp.ProtocolNumber6) && (len(b) == 0 ||
		header.ICMPv6Type(b[0]) < header.ICMPv6EchoRequest)
	return !failure && !netip.AddrFrom16([16]byte(p[24:40])).IsMulticast()
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})
