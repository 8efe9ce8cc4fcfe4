package netstack

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// wire is the stack's interface towards the tunnel. It tells each connection which
// of its segments leave, and when: the probe only sees those that come. What leaves waits
// in queues of wire's own, since that of channel.Endpoint would copy every packet's
// headers and pass packets one by one.
type wire struct {
	*channel.Endpoint
	stack *Stack
	queue *queue // of what no outlet is for

	delivering sync.RWMutex // locked for writing to deliver an unchecked packet, for reading else
	unchecked  atomic.Bool  // an unchecked packet is being delivered

	mu      sync.RWMutex
	outlets map[tcpip.Address]*queue
	drops   atomic.Uint64
}

func newWire(s *Stack, mtu int) *wire {
	e := channel.New(0, uint32(mtu), "")
	// Segments go through the stack together, and are cut as they are collected.
	e.SupportedGSOKind = stack.HostGSOSupported
	w := &wire{Endpoint: e, stack: s, outlets: map[tcpip.Address]*queue{}}
	w.queue = newQueue(queuePackets, &w.drops)
	return w
}

// Capabilities implements stack.LinkEndpoint. With every packet the stack asks here whether
// it has to verify the checksum.
func (w *wire) Capabilities() stack.LinkEndpointCapabilities {
	if w.unchecked.Load() {
		return 0
	}
	return stack.CapabilityRXChecksumOffload
}

// WritePackets implements stack.LinkWriter. What there is no room for is lost. What need
// not be sent again is left out, and counts as written.
func (w *wire) WritePackets(pkts stack.PacketBufferList) (written int, _ tcpip.Error) {
	for _, p := range pkts.AsSlice() {
		o := w.noteSent(p)
		fits, over := w.queueFor(p).enqueue(o)
		if over {
			return written, &tcpip.ErrClosedForSend{}
		}
		if fits {
			written++
		}
	}
	return written, nil
}

// DeliverNetworkPacket implements stack.NetworkDispatcher, for packets from the
// tunnel that have been checked, and merged.
func (w *wire) DeliverNetworkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	w.delivering.RLock()
	defer w.delivering.RUnlock()
	w.InjectInbound(protocol, pkt)
}

// deliverUnchecked delivers a packet whose checksum the stack is to verify.
func (w *wire) deliverUnchecked(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	w.delivering.Lock()
	defer w.delivering.Unlock()
	w.unchecked.Store(true)
	defer w.unchecked.Store(false)
	w.InjectInbound(protocol, pkt)
}

// DeliverLinkPacket implements stack.NetworkDispatcher: a tunnel has no such packets.
func (w *wire) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) {}

// queueFor is the queue for a packet.
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

// allQueues returns all queues.
func (w *wire) allQueues() []*queue {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return append(slices.Collect(maps.Values(w.outlets)), w.queue)
}

// isEmpty tells whether no packet waits.
func (w *wire) isEmpty() bool {
	return !slices.ContainsFunc(w.allQueues(), func(q *queue) bool { return !q.isEmpty() })
}

// Close implements stack.LinkEndpoint. What waits is lost.
func (w *wire) Close() {
	for _, q := range w.allQueues() {
		if q.closeQueue() && q == w.queue {
			w.Endpoint.Close()
		}
	}
}

// noteSent tells a packet's connection that it leaves, and returns the segments that should leave.
// The packet itself stays the caller's.
func (w *wire) noteSent(p *stack.PacketBuffer) outgoing {
	o := outgoing{pkt: p, end: 1}
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
	conn := w.stack.conns.findConn(id)
	if conn == nil {
		return o
	}
	now, syn := w.stack.clock(), segment.Flags().Contains(header.TCPFlagSyn)
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

// endpointOf returns a packet's addresses, without ports.
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

// MTU is the tunnel's, in bytes of an IP packet.
func (s *Stack) MTU() int { return int(s.wire.MTU()) }
