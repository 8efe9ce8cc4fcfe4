package hold

import (
	"encoding/binary"
	"net/netip"

	"github.com/penstock-net/penstock/cc/flow"
)

// Protocol numbers of IP that carry ports in their first four bytes (IANA).
const (
	protocolTCP     = 6
	protocolUDP     = 17
	protocolDCCP    = 33
	protocolSCTP    = 132
	protocolUDPLite = 136
)

// FlowKey names the flow of a packet: its packets keep their order.
// Ports are 0 where the packet shows none: another protocol, a fragment, an encrypted header.
type FlowKey struct {
	Source, Target netip.AddrPort
	Protocol       uint8 // IANA's number of the last header that was read
}

// header is what the beginning of an IP packet says.
type header struct {
	flow FlowKey
	ecn  flow.ECN
	// payload follows the header of UDP, as far as it is there. Empty for other protocols and for fragments.
	payload []byte
}

// parseHeader reads the beginning of an IP packet.
// It returns false for what is no IPv4 or IPv6 packet, or is cut within its fixed header.
func parseHeader(packet []byte) (header, bool) {
	if len(packet) == 0 {
		return header{}, false
	}
	switch packet[0] >> 4 {
	case 4:
		return parseIPv4(packet)
	case 6:
		return parseIPv6(packet)
	}
	return header{}, false
}

// parseIPv4 reads an IPv4 header (RFC 791 §3.1).
func parseIPv4(packet []byte) (header, bool) {
	if len(packet) < 20 {
		return header{}, false
	}
	length := int(packet[0]&0xf) * 4
	if length < 20 {
		return header{}, false
	}
	source := netip.AddrFrom4([4]byte(packet[12:16]))
	target := netip.AddrFrom4([4]byte(packet[16:20]))
	h := header{ecn: flow.ECN(packet[1] & 3)}
	h.flow = FlowKey{netip.AddrPortFrom(source, 0), netip.AddrPortFrom(target, 0), packet[9]}
	// A later fragment has no ports. The first one is left without them too: both belong to one flow.
	const moreFragmentsAndOffset = 0x3fff
	isFragment := binary.BigEndian.Uint16(packet[6:])&moreFragmentsAndOffset != 0
	if !isFragment && len(packet) > length {
		h.readPorts(packet[length:])
	}
	return h, true
}

// IPv6 extension headers that may stand before the transport's (RFC 8200 §4.1).
const (
	hopByHopHeader    = 0
	routingHeader     = 43
	fragmentHeader    = 44
	destinationHeader = 60
)

// parseIPv6 reads an IPv6 header and its extension headers (RFC 8200 §3, §4).
func parseIPv6(packet []byte) (header, bool) {
	if len(packet) < 40 {
		return header{}, false
	}
	source := netip.AddrFrom16([16]byte(packet[8:24]))
	target := netip.AddrFrom16([16]byte(packet[24:40]))
	h := header{ecn: flow.ECN(packet[1] >> 4 & 3)}
	h.flow = FlowKey{netip.AddrPortFrom(source, 0), netip.AddrPortFrom(target, 0), packet[6]}
	rest := packet[40:]
	for len(rest) >= 8 {
		switch h.flow.Protocol {
		case hopByHopHeader, routingHeader, destinationHeader:
			length := 8 + int(rest[1])*8
			h.flow.Protocol = rest[0]
			if length > len(rest) {
				return h, true
			}
			rest = rest[length:]
		case fragmentHeader:
			h.flow.Protocol = rest[0]
			return h, true
		default:
			h.readPorts(rest)
			return h, true
		}
	}
	return h, true
}

// readPorts reads the ports that the transport header begins with, and remembers a UDP packet's payload.
func (h *header) readPorts(transport []byte) {
	switch h.flow.Protocol {
	case protocolTCP, protocolUDP, protocolDCCP, protocolSCTP, protocolUDPLite:
	default:
		return
	}
	if len(transport) < 8 {
		return
	}
	h.flow.Source = netip.AddrPortFrom(h.flow.Source.Addr(), binary.BigEndian.Uint16(transport))
	h.flow.Target = netip.AddrPortFrom(h.flow.Target.Addr(), binary.BigEndian.Uint16(transport[2:]))
	if h.flow.Protocol == protocolUDP {
		h.payload = transport[8:]
	}
}
