package netstack

import (
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"os"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// verdict is the result of inspecting a packet that comes out of the tunnel.
type verdict uint8

const (
	valid              verdict = iota // its checksums are right
	unchecked                         // the stack is to check it: a fragment, or with a routing header
	icmpError                         // an ICMP message other than echoes, with a right checksum
	icmpErrorUnfounded                // the same, but about no segment in flight
	malformed                         // no IP packet, or one that is shorter than it says
	badChecksum                       // a checksum is wrong
	badFlags                          // TCP flags that no sender uses together
	expired                           // it has reached its hop limit
	verdicts
)

// inspectPacket judges a packet, and returns it without the bytes behind its end. The tunnel
// authenticates its peer's packets, but a network behind the peer may have damaged them. Without
// this check such a packet would be forwarded with a right checksum.
func inspectPacket(p []byte) ([]byte, verdict) {
	if len(p) == 0 {
		return p, malformed
	}
	switch p[0] >> 4 {
	case 4:
		return inspectIPv4(p)
	case 6:
		return inspectIPv6(p)
	default:
		return p, malformed
	}
}

// inspectIPv4 is inspectPacket for IPv4. The header has a checksum of its own (RFC 791 §3.1).
func inspectIPv4(p []byte) ([]byte, verdict) {
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
		return p, badChecksum
	}
	first, part := ip.FragmentOffset() == 0, ip.More() || ip.FragmentOffset() != 0
	protocol := ip.TransportProtocol()
	if part {
		return p, inspectFragment(p[head:], uint8(protocol), first)
	}
	return p, inspectTransport(p[head:], uint8(protocol), p[12:20], false)
}

// inspectIPv6 is inspectPacket for IPv6. It skips the extension headers that the stack skips (RFC
// 8200 §4). Otherwise a packet could hide a segment behind them that was not judged.
func inspectIPv6(p []byte) ([]byte, verdict) {
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
		case header.IPv6HopByHopOptionsExtHdrIdentifier, header.IPv6RoutingExtHdrIdentifier,
			header.IPv6DestinationOptionsExtHdrIdentifier:
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
			switch header.IPv6ExtensionHeaderIdentifier(rest[0]) { // those that the stack would skip
			case header.IPv6HopByHopOptionsExtHdrIdentifier, header.IPv6RoutingExtHdrIdentifier,
				header.IPv6FragmentExtHdrIdentifier, header.IPv6DestinationOptionsExtHdrIdentifier,
				header.IPv6ExperimentExtHdrIdentifier:
				return p, malformed
			}
			first := binary.BigEndian.Uint16(rest[2:])>>3 == 0
			return p, inspectFragment(rest[header.IPv6FragmentExtHdrLength:], rest[0], first)
		case header.IPv6ExperimentExtHdrIdentifier: // the stack would skip it
			return p, malformed
		default:
			return p, inspectTransport(rest, next, p[8:40], true)
		}
	}
}

// inspectFragment judges a fragment's payload. The first fragment must have a segment's flags,
// which the second must not overwrite (RFC 3128), or an ICMP message's type.
func inspectFragment(b []byte, protocol uint8, first bool) verdict {
	if protocol == uint8(tcp.ProtocolNumber) && first {
		if len(b) < header.TCPMinimumSize {
			return malformed
		}
		if !flagsAreSensible(header.TCP(b).Flags()) {
			return badFlags
		}
	}
	icmps := protocol == uint8(icmp.ProtocolNumber4) || protocol == uint8(icmp.ProtocolNumber6)
	if icmps && first && (len(b) == 0 || !isEcho(b, protocol)) {
		return malformed // no ICMP error is large enough for fragments
	}
	return unchecked
}

// inspectTransport judges the payload of a whole packet between two addresses. six: it is an IPv6
// packet.
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
			return badChecksum
		}
		if !flagsAreSensible(header.TCP(b).Flags()) {
			return badFlags
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
			return badChecksum
		}
	case uint8(icmp.ProtocolNumber4):
		return inspectICMP(b, protocol, !six, 0)
	case uint8(icmp.ProtocolNumber6):
		return inspectICMP(b, protocol, six, pseudo(len(b)))
	}
	return valid
}

// inspectICMP judges an ICMP message. family: it is of the packet's IP version. sum is the
// checksum of the pseudo-header, or 0.
func inspectICMP(b []byte, protocol uint8, family bool, sum uint16) verdict {
	switch {
	case !family:
		return valid // the stack has no such protocol
	case checksum.Checksum(b, sum) != 0xffff || len(b) == 0:
		return badChecksum
	case isEcho(b, protocol):
		return valid
	}
	return icmpError
}

// isEcho reports whether an ICMP message, of at least one byte, is an echo request or a reply.
func isEcho(b []byte, protocol uint8) bool {
	if protocol == uint8(icmp.ProtocolNumber6) {
		kind := header.ICMPv6Type(b[0])
		return kind == header.ICMPv6EchoRequest || kind == header.ICMPv6EchoReply
	}
	kind := header.ICMPv4Type(b[0])
	return kind == header.ICMPv4Echo || kind == header.ICMPv4EchoReply
}

// flagsAreSensible reports whether a TCP sends such flags together (RFC 9293 §3.10). PSH, URG and
// the ECN flags may go with any.
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

// mayAnswerIPv4 reports whether an ICMP error may be sent about a packet: not if it is an ICMP
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

// mayAnswerIPv6 is mayAnswerIPv4 for IPv6 (RFC 4443 §2.4 e).
func mayAnswerIPv6(p []byte) bool {
	b := p[header.IPv6MinimumSize:]
	failure := p[6] == uint8(icmp.ProtocolNumber6) && (len(b) == 0 ||
		header.ICMPv6Type(b[0]) < header.ICMPv6EchoRequest)
	return !failure && !netip.AddrFrom16([16]byte(p[24:40])).IsMulticast()
}

// broadcast is the limited broadcast address (RFC 919 §7).
var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// minBelievedMTU is the least MTU of an IPv4 path, in bytes, that an ICMP error is believed
// about: the default of Linux's net.ipv4.route.min_pmtu.
const minBelievedMTU = 552

// echoHeader is type, code, checksum, identifier and sequence number.
const echoHeader = 8

// isSameFamily is false for an IPv6 packet with one IPv4-mapped address (RFC 4291 §2.5.5.2),
// which belongs in sockets, not in packets: forwarded, it would leave with another address.
func isSameFamily(source, target netip.Addr) bool { return source.Is4() == target.Is4() }

// hopsOf returns the hop limit that a packet is to be forwarded with.
func hopsOf(pkt *stack.PacketBuffer) uint8 {
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		return header.IPv6(pkt.NetworkHeader().Slice()).HopLimit() - 1
	}
	return header.IPv4(pkt.NetworkHeader().Slice()).TTL() - 1
}

// dscpShift is how many bits of the TOS byte, or traffic class, are the ECN field (RFC 3168 §5).
const dscpShift = 2

// dscpOf returns the DSCP of a packet.
func dscpOf(pkt *stack.PacketBuffer) uint8 {
	var tos uint8
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		tos, _ = header.IPv6(pkt.NetworkHeader().Slice()).TOS()
	} else {
		tos, _ = header.IPv4(pkt.NetworkHeader().Slice()).TOS()
	}
	return tos >> dscpShift
}

// OptionIndex returns the index in segment of an option's value (RFC 9293 §3.1), behind its kind
// and its length; -1: the segment has no such option of length bytes, or its options are
// malformed before it. The segment's header is whole.
func OptionIndex(segment header.TCP, kind byte, length int) int {
	options := segment.Options()
	for i := 0; i < len(options); {
		switch options[i] {
		case header.TCPOptionEOL:
			return -1
		case header.TCPOptionNOP:
			i++
			continue
		}
		if i+1 >= len(options) || options[i+1] < 2 || i+int(options[i+1]) > len(options) {
			return -1
		}
		if options[i] == kind && int(options[i+1]) == length {
			return header.TCPMinimumSize + i + 2
		}
		i += int(options[i+1])
	}
	return -1
}

// timestampIndex is OptionIndex of the timestamps (RFC 7323 §3.2): four bytes of the sender's,
// and four that it echoes.
func timestampIndex(segment header.TCP) int {
	return OptionIndex(segment, header.TCPOptionTS, header.TCPOptionTSLength)
}

// RewriteSegment overwrites a part of a segment from index at on. It corrects the checksum for
// the change alone (RFC 1624 §3): a segment that arrived damaged stays damaged.
func RewriteSegment(segment header.TCP, at int, value []byte) {
	words := segment[at&^1 : min((at+len(value)+1)&^1, len(segment))] // the checksum is of words at even offsets
	others := checksum.Combine(^segment.Checksum(), ^checksum.Checksum(words, 0))
	copy(segment[at:], value)
	segment.SetChecksum(^checksum.Combine(others, checksum.Checksum(words, 0)))
}

// addrPortOf turns an address and a port of the stack into a netip.AddrPort.
func addrPortOf(a tcpip.Address, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return netip.AddrPortFrom(addr.Unmap(), port)
}

// networkOf returns the network protocol of an address.
func networkOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is6() {
		return header.IPv6ProtocolNumber
	}
	return header.IPv4ProtocolNumber
}

// kernelError turns an error of the stack into the one that a kernel socket would return, so that
// readers of errors need not know which transport is below.
func kernelError(err tcpip.Error) error {
	switch err.(type) {
	case nil:
		return nil
	case *tcpip.ErrConnectionReset:
		return syscall.ECONNRESET
	case *tcpip.ErrConnectionAborted, *tcpip.ErrAborted:
		return syscall.ECONNABORTED
	case *tcpip.ErrConnectionRefused:
		return syscall.ECONNREFUSED
	case *tcpip.ErrTimeout:
		return syscall.ETIMEDOUT
	case *tcpip.ErrNetworkUnreachable:
		return syscall.ENETUNREACH
	case *tcpip.ErrHostUnreachable:
		return syscall.EHOSTUNREACH
	case *tcpip.ErrClosedForReceive:
		return io.EOF
	case *tcpip.ErrClosedForSend:
		return syscall.EPIPE
	case *tcpip.ErrNotConnected:
		return syscall.ENOTCONN
	case *tcpip.ErrInvalidEndpointState:
		return os.ErrClosed
	}
	return errors.New(err.String())
}
