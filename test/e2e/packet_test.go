//go:build linux

package e2e

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/netlab"
)

// Packet is one TCP packet as it passed a device.
type Packet struct {
	At       time.Duration // since the record began, by the kernel's own stamp; never less than the one before
	Out      bool          // towards the client
	Src, Dst netip.AddrPort
	Seq, Ack uint32
	Acks     bool // Ack says something
	Payload  cc.Bytes
	Size     cc.Bytes // of the IP packet
	SACK     []SACKBlock
}

// SACKBlock is a run of bytes that arrived ahead of a hole, Right excluded (RFC 2018 §3).
type SACKBlock struct{ Left, Right uint32 }

// readPackets reads the TCP packets of a file in the format pcap, which began at a time; those to the client's
// addresses are on their way out.
func readPackets(t *testing.T, pcap []byte, began time.Time, client netlab.Addrs) (all []Packet) {
	t.Helper()
	last := time.Duration(0)
	for pcap = pcap[24:]; len(pcap) > 0; {
		field := func(i int) int64 { return int64(binary.NativeEndian.Uint32(pcap[4*i:])) }
		p, ok := decodePacket(pcap[16:16+field(2)], int(field(3)))
		if ok {
			// Two processors that write at once may stamp out of their turn.
			last = max(last, time.Unix(field(0), field(1)).Sub(began.Round(0)))
			p.At, p.Out = last, p.Dst.Addr() == client.V4 || p.Dst.Addr() == client.V6
			all = append(all, p)
		}
		pcap = pcap[16+field(2):]
	}
	require.NotEmpty(t, all)
	return all
}

// decodePacket reads the first bytes b of an IP packet of size bytes; false: it is no TCP, or its headers are cut.
func decodePacket(b []byte, size int) (p Packet, ok bool) {
	var src, dst netip.Addr
	head, protocol := 0, uint8(0)
	switch {
	case len(b) > 0 && b[0]>>4 == 4 && len(b) >= header.IPv4MinimumSize:
		ip := header.IPv4(b)
		src, dst = netip.AddrFrom4(ip.SourceAddress().As4()), netip.AddrFrom4(ip.DestinationAddress().As4())
		head, protocol = int(ip.HeaderLength()), ip.Protocol()
	case len(b) > 0 && b[0]>>4 == 6 && len(b) >= header.IPv6MinimumSize:
		ip := header.IPv6(b)
		src, dst = netip.AddrFrom16(ip.SourceAddress().As16()), netip.AddrFrom16(ip.DestinationAddress().As16())
		head, protocol = header.IPv6MinimumSize, ip.NextHeader()
	}
	if protocol != uint8(header.TCPProtocolNumber) || len(b) < head+header.TCPMinimumSize {
		return p, false
	}
	tcp := header.TCP(b[head:])
	data := int(tcp.DataOffset())
	if data < header.TCPMinimumSize || data > len(tcp) {
		return p, false
	}
	p = Packet{
		Src: netip.AddrPortFrom(src, tcp.SourcePort()), Dst: netip.AddrPortFrom(dst, tcp.DestinationPort()),
		Seq: tcp.SequenceNumber(), Ack: tcp.AckNumber(), Acks: tcp.Flags().Contains(header.TCPFlagAck),
		Payload: cc.Bytes(size - head - data), Size: cc.Bytes(size),
	}
	options := header.ParseTCPOptions(tcp.Options())
	for _, block := range options.SACKBlocks {
		p.SACK = append(p.SACK, SACKBlock{uint32(block.Start), uint32(block.End)})
	}
	return p, true
}
