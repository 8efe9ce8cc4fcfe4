//go:build linux

package netlab

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/cc"
)

// Packet is one TCP packet as it passed a device.
type Packet struct {
	At       time.Duration // since the sniffer started, by the kernel's own stamp; never less than the one before
	Out      bool          // left the node
	Src, Dst netip.AddrPort
	Seq, Ack uint32
	Flags    Flags
	Window   uint16   // as written in the header, unscaled
	Payload  cc.Bytes // bytes of data
	Size     cc.Bytes // of the IP packet

	sacks  [maxSACKs]SACKBlock
	sacked int
}

// SACK returns the packet's selective acknowledgements, in their order.
func (p *Packet) SACK() []SACKBlock { return p.sacks[:p.sacked] }

// AddSACK adds a block. A header has room for maxSACKs: more are left out.
func (p *Packet) AddSACK(block SACKBlock) {
	if p.sacked < maxSACKs {
		p.sacks[p.sacked] = block
		p.sacked++
	}
}

// SACKBlock is a run of bytes that arrived ahead of a hole, Right excluded (RFC 2018 §3).
type SACKBlock struct{ Left, Right uint32 }

// maxSACKs is what 40 bytes of options have room for.
const maxSACKs = 4

// Flags are a TCP header's control bits (RFC 9293 §3.1).
type Flags uint8

// The bits that tell packets of a connection apart.
const (
	FIN Flags = 1 << iota
	SYN
	RST
	PSH
	ACK
)

// decodePacket reads the first bytes b of an IP packet of size bytes. It returns false unless b holds a whole TCP
// header. Fragments have none.
func decodePacket(b []byte, size int) (p Packet, ok bool) {
	head, total := readIPHeader(b)
	if head == 0 || len(b) < head+header.TCPMinimumSize {
		return p, false
	}
	if total == 0 { // the device will segment this packet and write the lengths itself
		total = size
	}
	tcp := header.TCP(b[head:])
	data := head + int(tcp.DataOffset())
	if tcp.DataOffset() < header.TCPMinimumSize || data > min(len(b), total) {
		return p, false
	}
	src, dst := addresses(b)
	p.Src, p.Dst = netip.AddrPortFrom(src, tcp.SourcePort()), netip.AddrPortFrom(dst, tcp.DestinationPort())
	p.Seq, p.Ack, p.Window = tcp.SequenceNumber(), tcp.AckNumber(), tcp.WindowSize()
	p.Flags = Flags(tcp[header.TCPFlagsOffset])
	p.Payload, p.Size = cc.Bytes(total-data), cc.Bytes(total)
	p.readSACK(tcp.Options())
	return p, true
}

// readIPHeader returns where the TCP header begins, and the packet's total length as its header gives it. head is 0
// for fragments, for other protocols, and for headers that are cut short.
func readIPHeader(b []byte) (head, total int) {
	switch {
	case len(b) >= header.IPv4MinimumSize && b[0]>>4 == 4:
		ip := header.IPv4(b)
		if ip.More() || ip.FragmentOffset() != 0 || ip.TransportProtocol() != header.TCPProtocolNumber ||
			ip.HeaderLength() < header.IPv4MinimumSize {
			return 0, 0
		}
		return int(ip.HeaderLength()), int(ip.TotalLength())
	case len(b) >= header.IPv6MinimumSize && b[0]>>4 == 6:
		ip := header.IPv6(b)
		if n := int(ip.PayloadLength()); n > 0 {
			total = header.IPv6MinimumSize + n
		}
		return skipExtensions(b, ip.NextHeader()), total
	}
	return 0, 0
}

// skipExtensions returns where the TCP header of an IPv6 packet begins; 0: there is none. next is the type of the
// header behind the fixed one (RFC 8200 section 4).
func skipExtensions(b []byte, next uint8) int {
	head := header.IPv6MinimumSize
	for tcpip.TransportProtocolNumber(next) != header.TCPProtocolNumber {
		switch header.IPv6ExtensionHeaderIdentifier(next) {
		case header.IPv6HopByHopOptionsExtHdrIdentifier, header.IPv6RoutingExtHdrIdentifier,
			header.IPv6DestinationOptionsExtHdrIdentifier:
		default:
			return 0
		}
		if len(b) < head+2 {
			return 0
		}
		next, head = b[head], head+8*(1+int(b[head+1]))
	}
	return head
}

// addresses returns an IP packet's source and destination; both are invalid when its header is cut short.
func addresses(b []byte) (src, dst netip.Addr) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	case len(b) >= 40 && b[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	}
	return src, dst
}

// flowOf is a number that the packets of one flow share: a hash of addresses, protocol and
// ports (FNV-1a).
func flowOf(b []byte) uint32 {
	var parts [][]byte
	switch {
	case len(b) >= 24 && b[0]>>4 == 4:
		head := int(b[0]&0xf) * 4
		parts = [][]byte{b[9:10], b[12:20], b[min(head, len(b)-4):][:4]}
	case len(b) >= 44 && b[0]>>4 == 6:
		parts = [][]byte{b[6:7], b[8:44]}
	}
	hash := fnv.New32a()
	for _, part := range parts {
		_, _ = hash.Write(part) // never fails
	}
	return hash.Sum32()
}

// readSACK takes the selective acknowledgements out of a TCP header's options.
func (p *Packet) readSACK(options []byte) {
	for len(options) > 0 && options[0] != header.TCPOptionEOL {
		if options[0] == header.TCPOptionNOP {
			options = options[1:]
			continue
		}
		if len(options) < 2 || int(options[1]) < 2 || int(options[1]) > len(options) {
			return
		}
		option := options[:options[1]]
		options = options[len(option):]
		if option[0] != header.TCPOptionSACK {
			continue
		}
		for b := option[2:]; len(b) >= 8; b = b[8:] {
			p.AddSACK(SACKBlock{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])})
		}
	}
}
