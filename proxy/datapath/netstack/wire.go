package netstack

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// wire is the stack's interface towards the tunnel. It shows each segment that leaves to its
// connection, since the probe sees only incoming ones. Packets wait in wire's own queues, because
// that of channel.Endpoint copies every packet's headers and passes packets one by one.
type wire struct {
	*channel.Endpoint
	conns *registry
	queue *queue // of packets to addresses without an outlet

	// An unchecked packet is delivered alone, with unchecked set. Capabilities then makes the stack
	// verify its checksum.
	delivering sync.RWMutex // locked for writing to deliver an unchecked packet, else for reading
	unchecked  atomic.Bool

	mu      sync.RWMutex
	outlets map[tcpip.Address]*queue
	drops   atomic.Uint64 // packets for which a queue had no room
}

// newWire returns the interface of a stack with these connections; mtu is in bytes of an IP
// packet.
func newWire(conns *registry, mtu int) *wire {
	e := channel.New(0, uint32(mtu), "")
	// Segments go through the stack together, and are cut as they are collected.
	e.SupportedGSOKind = stack.HostGSOSupported
	w := &wire{Endpoint: e, conns: conns, outlets: map[tcpip.Address]*queue{}}
	w.queue = newQueue(queuePackets, &w.drops)
	return w
}

// Capabilities implements stack.LinkEndpoint. The stack asks with every packet whether it has to
// verify the checksum.
func (w *wire) Capabilities() stack.LinkEndpointCapabilities {
	if w.unchecked.Load() {
		return 0
	}
	return stack.CapabilityRXChecksumOffload
}

// WritePackets implements stack.LinkWriter. A packet for which there is no room is lost. Segments
// that need not be sent again are left out, and count as written.
func (w *wire) WritePackets(pkts stack.PacketBufferList) (written int, _ tcpip.Error) {
	for _, p := range pkts.AsSlice() {
		o := w.noteSent(p)
		fits, closed := w.queueFor(p).enqueue(o)
		if closed {
			return written, &tcpip.ErrClosedForSend{}
		}
		if fits {
			written++
		}
	}
	return written, nil
}

// noteSent shows a packet to its connection, and returns the segments that should leave. The packet
// itself stays the caller's.
func (w *wire) noteSent(p *stack.PacketBuffer) segmentRange {
	o := segmentRange{pkt: p, end: 1}
	if p.TransportProtocolNumber != header.TCPProtocolNumber {
		return o
	}
	size := p.Data().Size()
	mss := size
	if most := int(p.GSOOptions.MSS); p.GSOOptions.Type != stack.GSONone && most > 0 && size > most {
		mss, o.end = most, (size+most-1)/most
	}
	segment, id := header.TCP(p.TransportHeader().Slice()), endpointOf(p)
	id.LocalPort, id.RemotePort = segment.SourcePort(), segment.DestinationPort()
	conn := w.conns.findConn(id)
	if conn == nil {
		return o
	}
	now, syn := w.conns.clock(), segment.Flags().Contains(header.TCPFlagSyn)
	if syn {
		conn.signals.updateTimestamp(segment, now)
	}
	conn.incoming.onSegmentSent(segment, now)
	o.omit = conn.signals.onSegmentsSent(now, segment.SequenceNumber(), size, mss, syn)
	if o.omit != nil && !slices.Contains(o.omit, false) {
		o.end = 0
	}
	return o
}

// queueFor returns the queue for a packet.
func (w *wire) queueFor(p *stack.PacketBuffer) *queue {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if len(w.outlets) > 0 {
		if q := w.outlets[endpointOf(p).RemoteAddress]; q != nil {
			return q
		}
	}
	return w.queue
}

// endpointOf returns a packet's addresses as its connection sees them, without ports. A packet of
// neither IP version has none.
func endpointOf(p *stack.PacketBuffer) (id stack.TransportEndpointID) {
	switch p.NetworkProtocolNumber {
	case header.IPv4ProtocolNumber:
		ip := header.IPv4(p.NetworkHeader().Slice())
		id.LocalAddress, id.RemoteAddress = ip.SourceAddress(), ip.DestinationAddress()
	case header.IPv6ProtocolNumber:
		ip := header.IPv6(p.NetworkHeader().Slice())
		id.LocalAddress, id.RemoteAddress = ip.SourceAddress(), ip.DestinationAddress()
	}
	return id
}

// DeliverNetworkPacket implements stack.NetworkDispatcher, for packets from the tunnel that have
// been checked and merged.
func (w *wire) DeliverNetworkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	w.delivering.RLock()
	defer w.delivering.RUnlock()
	w.InjectInbound(protocol, pkt)
}

// deliverUnchecked delivers a packet with a checksum that the stack has to verify: a fragment, or
// a packet with a routing header. All others wait in the meantime, since such packets are rare.
func (w *wire) deliverUnchecked(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	w.delivering.Lock()
	defer w.delivering.Unlock()
	w.unchecked.Store(true)
	defer w.unchecked.Store(false)
	w.InjectInbound(protocol, pkt)
}

// DeliverLinkPacket implements stack.NetworkDispatcher: a tunnel has no such packets.
func (w *wire) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) {}

// isEmpty reports whether no packet waits.
func (w *wire) isEmpty() bool {
	return !slices.ContainsFunc(w.allQueues(), func(q *queue) bool { return !q.isEmpty() })
}

// Close implements stack.LinkEndpoint. Packets that wait are lost.
func (w *wire) Close() {
	for _, q := range w.allQueues() {
		if q.closeQueue() && q == w.queue {
			w.Endpoint.Close()
		}
	}
}

// allQueues returns the queues of all outlets, and that of the packets that no outlet is for.
func (w *wire) allQueues() []*queue {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return append(slices.Collect(maps.Values(w.outlets)), w.queue)
}

// Outlet is a separate queue for packets to some addresses.
type Outlet struct {
	*queue
	wire      *wire
	collected *atomic.Uint64 // the Stack's
	addrs     []tcpip.Address
}

// Close ends an outlet. Packets that wait are lost, and further ones to its addresses go to
// Stack.Collect.
func (o *Outlet) Close() {
	o.wire.mu.Lock()
	for _, a := range o.addrs {
		delete(o.wire.outlets, a)
	}
	o.wire.mu.Unlock()
	o.closeQueue()
}

// Collect waits for packets that are to go into the tunnel and copies as many as there are, at
// most len(bufs), each into its buffer from offset on. It sets their lengths in sizes, in bytes,
// and returns how many there are. It fails with os.ErrClosed once the queue is closed, or ctx is
// done.
func (o *Outlet) Collect(ctx context.Context, bufs [][]byte, sizes []int, offset int) (n int, err error) {
	return o.collectPackets(ctx, bufs, sizes, offset, o.collected)
}
