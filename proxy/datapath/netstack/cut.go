package netstack

import (
	"encoding/binary"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// outgoing is a packet that waits for the tunnel, or part of it: the stack sends several
// segments of a connection as one packet (GSO), and we cut it and compute the checksums.
type outgoing struct {
	pkt       *stack.PacketBuffer
	next, end int    // numbers of the segments to be collected: from next until before end
	omit      []bool // segments that need not leave, by their numbers; nil: all should
}

// copySegments copies each segment into a buffer of its own, from offset on, sets its length in
// sizes, and returns how many there were. One that does not fit its buffer is lost.
func (o outgoing) copySegments(bufs [][]byte, sizes []int, offset int) (n int) {
	network, transport := o.pkt.NetworkHeader().Slice(), o.pkt.TransportHeader().Slice()
	head, size, mss := len(network)+len(transport), o.pkt.Data().Size(), 0
	if gso := o.pkt.GSOOptions; gso.Type != stack.GSONone && gso.NeedsCsum {
		if mss = int(gso.MSS); mss == 0 {
			mss = max(1, size)
		}
	}
	payload := newCursor(o.pkt, head)
	if mss > 0 {
		payload.skipBytes(o.next * mss)
	}
	for i := o.next; i < o.end; i++ {
		from, to := 0, size
		if mss > 0 {
			from, to = i*mss, min(size, (i+1)*mss)
		}
		if o.omit != nil && o.omit[i] || offset+head+to-from > len(bufs[n]) {
			payload.skipBytes(to - from)
			continue
		}
		p := bufs[n][offset : offset+head+to-from]
		copy(p[copy(p, network):], transport)
		payload.readBytes(p[head:])
		if mss > 0 {
			finishSegment(p, len(network), i, from, to == size)
		}
		sizes[n] = len(p)
		n++
	}
	return n
}

// finishSegment makes p a packet of its own: segment number i, whose payload begins at byte from of the
// payload that the stack has sent as one.
func finishSegment(p []byte, network, i, from int, last bool) {
	var source, target tcpip.Address
	if p[0]>>4 == 4 {
		ip := header.IPv4(p)
		ip.SetTotalLength(uint16(len(p)))
		ip.SetID(ip.ID() + uint16(i))
		ip.SetChecksum(0)
		ip.SetChecksum(^ip.CalculateChecksum())
		source, target = ip.SourceAddress(), ip.DestinationAddress()
	} else {
		ip := header.IPv6(p)
		ip.SetPayloadLength(uint16(len(p) - header.IPv6MinimumSize))
		source, target = ip.SourceAddress(), ip.DestinationAddress()
	}
	tcp := header.TCP(p[network:])
	tcp.SetSequenceNumber(tcp.SequenceNumber() + uint32(from))
	if !last {
		tcp.SetFlags(uint8(tcp.Flags() &^ (header.TCPFlagFin | header.TCPFlagPsh)))
	}
	tcp.SetChecksum(0)
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, source, target, uint16(len(tcp)))
	binary.BigEndian.PutUint16(tcp[header.TCPChecksumOffset:], ^checksum.Checksum(tcp, sum))
}

// cursor reads a packet's payload from the buffers that it is spread over.
type cursor struct {
	view *buffer.View
	part []byte
}

func newCursor(pkt *stack.PacketBuffer, head int) *cursor {
	views, before := pkt.AsViewList()
	c := &cursor{view: views.Front()}
	if c.view != nil {
		c.part = c.view.AsSlice()
	}
	c.skipBytes(before + head)
	return c
}

// nextPart makes sure that part is not empty where there is something left.
func (c *cursor) nextPart() bool {
	for len(c.part) == 0 {
		if c.view == nil {
			return false
		}
		if c.view = c.view.Next(); c.view != nil {
			c.part = c.view.AsSlice()
		}
	}
	return true
}

func (c *cursor) skipBytes(n int) {
	for n > 0 && c.nextPart() {
		k := min(n, len(c.part))
		c.part, n = c.part[k:], n-k
	}
}

func (c *cursor) readBytes(b []byte) {
	for len(b) > 0 && c.nextPart() {
		k := copy(b, c.part)
		c.part, b = c.part[k:], b[k:]
	}
}
