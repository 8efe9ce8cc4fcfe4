package userspace

import (
	"encoding/binary"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

const (
	protocolTCP = uint8(header.TCPProtocolNumber)
	tcpHeader   = header.TCPMinimumSize // without options
)

// synOf returns the TCP segment of an IP packet that endsOf has accepted, and the length of its IP header. The segment
// is nil unless it is a whole SYN.
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

// isTCP reports whether an IP packet that endsOf has accepted has TCP right behind its IP header.
func isTCP(p []byte) bool {
	if p[0]>>4 == 4 {
		return header.IPv4(p).Protocol() == protocolTCP
	}
	return header.IPv6(p).NextHeader() == protocolTCP
}

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
