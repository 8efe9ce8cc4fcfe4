package netstack

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// queue holds the packets that wait to be collected. Any goroutine may append, and several may
// collect.
type queue struct {
	maxPackets int           // further ones are lost
	ready      chan struct{} // one is in it while packets wait
	ended      chan struct{}
	drops      *atomic.Uint64 // counts lost packets

	mu      sync.Mutex
	waiting []segmentRange
	packets int // once cut into segments
	closed  bool
}

// newQueue returns an empty queue. drops counts the packets that it has no room for.
func newQueue(most int, drops *atomic.Uint64) *queue {
	return &queue{maxPackets: most, ready: make(chan struct{}, 1), ended: make(chan struct{}), drops: drops}
}

// enqueue appends a packet, or as many of its segments as there is room for. fits: some of them
// were appended, or there were none.
func (q *queue) enqueue(o segmentRange) (fits, closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false, true
	}
	n := o.end
	if o.end = min(n, q.maxPackets-q.packets); o.end < n {
		q.drops.Add(uint64(n - o.end))
	}
	if o.end > 0 {
		o.pkt.IncRef()
		q.waiting = append(q.waiting, o)
		q.packets += o.end
		datapath.Signal(q.ready)
	}
	return o.end > 0 || n == 0, false
}

// collectPackets copies packets into bufs from offset on, as Outlet.Collect does, and adds their
// bytes to collected.
func (q *queue) collectPackets(
	ctx context.Context, bufs [][]byte, sizes []int, offset int, collected *atomic.Uint64,
) (n int, err error) {
	var batch [128]segmentRange
	took := q.waitAndDequeue(ctx, batch[:], len(bufs))
	if took == 0 {
		return 0, fmt.Errorf("netstack: collect: %w", os.ErrClosed)
	}
	for _, o := range batch[:took] {
		for range o.copySegments(bufs[n:], sizes[n:], offset) {
			collected.Add(uint64(sizes[n]))
			n++
		}
		o.pkt.DecRef()
	}
	return n, nil
}

// waitAndDequeue waits for packets and dequeues them; 0: the queue is closed, or ctx is done.
func (q *queue) waitAndDequeue(ctx context.Context, pieces []segmentRange, most int) int {
	for {
		if n := q.dequeue(pieces, most); n > 0 {
			return n
		}
		select {
		case <-q.ready:
		case <-q.ended:
			return 0
		case <-ctx.Done():
			return 0
		}
	}
}

// dequeue moves packets of up to most segments into pieces, and returns how many pieces it has
// filled. The caller owns the packets then.
func (q *queue) dequeue(pieces []segmentRange, most int) (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	whole := 0
	for n < len(pieces) && n < len(q.waiting) && most > 0 {
		o := &q.waiting[n]
		p := *o
		p.end = min(o.end, o.next+most)
		most -= p.end - p.next
		q.packets -= p.end - p.next
		pieces[n] = p
		n++
		if p.end < o.end {
			o.pkt.IncRef()
			o.next = p.end
			break
		}
		whole++
	}
	q.waiting = slices.Delete(q.waiting, 0, whole)
	if len(q.waiting) > 0 {
		datapath.Signal(q.ready) // for another collector
	}
	return n
}

// isEmpty reports whether no packet waits.
func (q *queue) isEmpty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) == 0
}

// closeQueue closes the queue and drops its packets; false: the queue was closed before.
func (q *queue) closeQueue() bool {
	q.mu.Lock()
	wasClosed := q.closed
	q.closed = true
	q.mu.Unlock()
	if wasClosed {
		return false
	}
	q.dropAll()
	close(q.ended)
	return true
}

// dropAll drops the waiting packets, and returns how many there were.
func (q *queue) dropAll() (n int) {
	var p [1]segmentRange
	for q.dequeue(p[:], q.maxPackets) > 0 {
		n += p[0].end - p[0].next
		p[0].pkt.DecRef()
	}
	return n
}

// segmentRange is a packet that waits for the tunnel, or some of its segments. The stack sends
// several segments of a connection as one packet (GSO). copySegments cuts them.
type segmentRange struct {
	pkt       *stack.PacketBuffer
	next, end int    // numbers of the segments to be collected; end is not among them
	omit      []bool // by number: the segment need not leave; nil: all are to leave
}

// copySegments copies each segment into a buffer of its own, from offset on. It sets the lengths in
// sizes, and returns the number of copies. A segment that does not fit its buffer is lost.
func (o segmentRange) copySegments(bufs [][]byte, sizes []int, offset int) (n int) {
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

// finishSegment makes p a packet of its own: segment number i, with a payload that begins at byte
// from of what the stack has sent as one. last: it is the last segment.
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

// newCursor returns a cursor at the payload, behind head bytes of IP and TCP headers.
func newCursor(pkt *stack.PacketBuffer, head int) *cursor {
	views, before := pkt.AsViewList()
	c := &cursor{view: views.Front()}
	if c.view != nil {
		c.part = c.view.AsSlice()
	}
	c.skipBytes(before + head)
	return c
}

// nextPart moves to the next buffer that is not empty, if part is; false: nothing is left.
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

// skipBytes passes over n bytes, or over as many as there are.
func (c *cursor) skipBytes(n int) {
	for n > 0 && c.nextPart() {
		k := min(n, len(c.part))
		c.part, n = c.part[k:], n-k
	}
}

// readBytes fills b. A payload that is shorter leaves the rest of b as it was.
func (c *cursor) readBytes(b []byte) {
	for len(b) > 0 && c.nextPart() {
		k := copy(b, c.part)
		c.part, b = c.part[k:], b[k:]
	}
}
