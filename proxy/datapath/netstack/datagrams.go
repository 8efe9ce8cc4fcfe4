package netstack

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// Datagrams takes the UDP datagrams and ICMP echo messages that come out of the tunnel,
// reassembled from fragments. Calls may overlap; the bytes are the callee's. hops is the
// hop limit to forward it with, at least one.
type Datagrams interface {
	// UDP takes a datagram.
	UDP(source, target netip.AddrPort, hops uint8, payload []byte)
	// Echo takes an ICMP echo request, of the version that its addresses are of.
	Echo(source, target netip.Addr, hops uint8, message []byte)
	// EchoReply takes the answer to one that was sent into the tunnel.
	EchoReply(source, target netip.Addr, message []byte)
}

// Handle makes h take datagrams from now on. Before it, and with nil, they end
// here: UDP finds its port closed, and no echo request is answered, since its target
// is never the stack's own address.
func (s *Stack) Handle(h Datagrams) { s.datagrams.Store(&h) }

func (s *Stack) datagramHandler() Datagrams {
	if h := s.datagrams.Load(); h != nil {
		return *h
	}
	return nil
}

// interceptDatagrams makes the stack hand over UDP and ICMP.
func (s *Stack) interceptDatagrams() {
	s.net.SetTransportProtocolHandler(udp.ProtocolNumber, s.takeUDP)
	s.net.SetTransportProtocolHandler(icmp.ProtocolNumber4, s.takeEcho)
	s.net.SetTransportProtocolHandler(icmp.ProtocolNumber6, s.takeEcho)
}

func (s *Stack) takeUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	h := s.datagramHandler()
	if h == nil {
		return false
	}
	segment, ip := header.UDP(pkt.TransportHeader().Slice()), pkt.Network()
	lengthValid, sumValid := header.UDPValid(segment, pkt.Data().Checksum, uint16(pkt.Data().Size()),
		pkt.NetworkProtocolNumber, ip.SourceAddress(), ip.DestinationAddress(), pkt.RXChecksumValidated)
	if !lengthValid || !sumValid {
		return false // the stack counts it
	}
	// The packet may be longer than the datagram, whose length includes its header (RFC 768).
	payload := pkt.Data().AsRange().ToSlice()
	payload = payload[:min(len(payload), int(segment.Length())-header.UDPMinimumSize)]
	source, target := addrPortOf(id.RemoteAddress, id.RemotePort), addrPortOf(id.LocalAddress, id.LocalPort)
	if isOneFamily(source.Addr(), target.Addr()) {
		h.UDP(source, target, hopsOf(pkt), payload)
	}
	return true
}

func (s *Stack) takeEcho(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	message := stack.PayloadSince(pkt.TransportHeader())
	defer message.Release()
	b := message.AsSlice()
	request, reply := uint8(header.ICMPv4Echo), uint8(header.ICMPv4EchoReply)
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		request, reply = uint8(header.ICMPv6EchoRequest), uint8(header.ICMPv6EchoReply)
	}
	// Of a reassembled packet the stack has checked the checksum of ICMPv6, but not of ICMP.
	if request == uint8(header.ICMPv4Echo) && !pkt.RXChecksumValidated && checksum.Checksum(b, 0) != 0xffff {
		s.dropped[damaged].Add(1)
		return true
	}
	source, target := addrPortOf(id.RemoteAddress, 0).Addr(), addrPortOf(id.LocalAddress, 0).Addr()
	h := s.datagramHandler()
	if h == nil || len(b) < echoHeader || !isOneFamily(source, target) {
		return true
	}
	switch b[0] {
	case request:
		h.Echo(source, target, hopsOf(pkt), append([]byte(nil), b...))
	case reply:
		h.EchoReply(source, target, append([]byte(nil), b...))
	}
	return true
}

// hopsOf is the hop limit that a packet is to be forwarded with.
func hopsOf(pkt *stack.PacketBuffer) uint8 {
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		return header.IPv6(pkt.NetworkHeader().Slice()).HopLimit() - 1
	}
	return header.IPv4(pkt.NetworkHeader().Slice()).TTL() - 1
}

// isOneFamily is false for an IPv6 packet with one IPv4-mapped address (RFC 4291 §2.5.5.2),
// which belongs in sockets, not in packets: forwarded, it would leave with another address.
func isOneFamily(source, target netip.Addr) bool { return source.Is4() == target.Is4() }

// echoHeader is type, code, checksum, identifier and sequence number.
const echoHeader = 8

// SendUDP sends a datagram into the tunnel, in fragments where it does not fit.
func (s *Stack) SendUDP(source, target netip.AddrPort, payload []byte) error {
	return s.sendDatagram(source.Addr(), target.Addr(), udp.ProtocolNumber, header.UDPMinimumSize, payload,
		func(r *stack.Route, h []byte, sum uint16) {
			segment := header.UDP(h)
			length := uint16(len(h) + len(payload))
			segment.Encode(&header.UDPFields{SrcPort: source.Port(), DstPort: target.Port(), Length: length})
			sum = checksum.Combine(r.PseudoHeaderChecksum(udp.ProtocolNumber, length), sum)
			if sum = ^segment.CalculateChecksum(sum); sum == 0 {
				sum = 0xffff // 0 is for none (RFC 768)
			}
			segment.SetChecksum(sum)
		})
}

// SendICMP sends an ICMP message into the tunnel, of the version that the
// addresses are of. It sets the checksum.
func (s *Stack) SendICMP(source, target netip.Addr, message []byte) error {
	if len(message) < echoHeader {
		return fmt.Errorf("netstack: an ICMP message of %d bytes", len(message))
	}
	protocol := icmp.ProtocolNumber4
	if target.Is6() {
		protocol = icmp.ProtocolNumber6
	}
	return s.sendDatagram(source, target, protocol, echoHeader, message[echoHeader:],
		func(r *stack.Route, h []byte, sum uint16) {
			copy(h, message)
			binary.BigEndian.PutUint16(h[2:], 0)
			if target.Is6() {
				sum = checksum.Combine(r.PseudoHeaderChecksum(icmp.ProtocolNumber6, uint16(len(message))), sum)
			}
			binary.BigEndian.PutUint16(h[2:], ^checksum.Checksum(h, sum))
		})
}

// sendDatagram sends a packet with a transport header of n bytes, which encode writes, given the
// payload's checksum.
func (s *Stack) sendDatagram(source, target netip.Addr, protocol tcpip.TransportProtocolNumber, n int, payload []byte,
	encode func(r *stack.Route, h []byte, sum uint16),
) error {
	select {
	case <-s.closed:
		return fmt.Errorf("netstack: send: %w", os.ErrClosed)
	default:
	}
	network := header.IPv4ProtocolNumber
	if target.Is6() {
		network = header.IPv6ProtocolNumber
	}
	r, err := s.net.FindRoute(nic, tcpip.AddrFromSlice(source.AsSlice()), tcpip.AddrFromSlice(target.AsSlice()),
		network, false)
	if err != nil {
		return fmt.Errorf("netstack: send to %v: %w", target, kernelError(err))
	}
	defer r.Release()
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: n + int(r.MaxHeaderLength()), Payload: buffer.MakeWithData(payload),
	})
	defer pkt.DecRef()
	pkt.TransportProtocolNumber = protocol
	encode(r, pkt.TransportHeader().Push(n), checksum.Checksum(payload, 0))
	if err := r.WritePacket(stack.NetworkHeaderParams{Protocol: protocol, TTL: r.DefaultTTL()}, pkt); err != nil {
		return fmt.Errorf("netstack: send to %v: %w", target, kernelError(err))
	}
	return nil
}

// Unreachable describes an ICMP error from the network outside about a packet that came
// out of the tunnel. It is of the ICMP version that the packet's addresses are of.
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

// SendUnreachable tells the packet's sender, unless there have been many such
// messages of late (RFC 1812 §4.3.2.8, RFC 4443 §2.4 f), and reports whether it did.
func (s *Stack) SendUnreachable(u Unreachable) (bool, error) {
	if !s.net.AllowICMPMessage() {
		return false, nil
	}
	from := u.From
	if from.Is4() != u.Target.Addr().Is4() || !from.IsValid() {
		from = u.Target.Addr()
	}
	err := s.SendICMP(from, u.Source.Addr(), u.icmpMessage())
	return err == nil, err
}

// icmpMessage is the ICMP message, with the first eight bytes of the packet it is about.
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
	if u.Source.Addr().Is6() {
		protocol := udp.ProtocolNumber
		if u.Echo {
			protocol = icmp.ProtocolNumber6
		}
		b := make([]byte, echoHeader+header.IPv6MinimumSize, echoHeader+header.IPv6MinimumSize+len(quoted))
		b[0], b[1] = u.Type, u.Code
		binary.BigEndian.PutUint32(b[4:], u.MTU)
		header.IPv6(b[echoHeader:]).Encode(&header.IPv6Fields{
			PayloadLength: uint16(min(len(quoted)+u.Length, 0xffff)), TransportProtocol: protocol, HopLimit: 1,
			SrcAddr: source, DstAddr: target,
		})
		return append(b, quoted[:]...)
	}
	protocol := udp.ProtocolNumber
	if u.Echo {
		protocol = icmp.ProtocolNumber4
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
