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

// wire is the stack's interface towards the tunnel. It tells each connection
// what leaves of it, and when: the probe only sees what comes. What leaves waits
// in queues of its own, as the endpoint's would copy every packet's head and
// take and give packets one by one.
type wire struct {
	*channel.Endpoint
	stack *Stack
	queue *queue // of what no outlet is for

	delivering sync.RWMutex // written: by who delivers what has not been checked
	unchecked  atomic.Bool  // what is being delivered has not been

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

// Capabilities implements stack.LinkEndpoint. The stack asks for them with every
// packet, whether it has to check it or that has been done.
func (w *wire) Capabilities() stack.LinkEndpointCapabilities {
	if w.unchecked.Load() {
		return 0
	}
	return stack.CapabilityRXChecksumOffload
}

// WritePackets implements stack.LinkWriter. What there is no room for is lost; what
// need not be sent again passes for sent.
func (w *wire) WritePackets(pkts stack.PacketBufferList) (written int, _ tcpip.Error) {
	for _, p := range pkts.AsSlice() {
		o := w.note(p)
		fits, over := w.towards(p).put(o)
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

// deliverUnchecked has the stack check a packet.
func (w *wire) deliverUnchecked(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	w.delivering.Lock()
	defer w.delivering.Unlock()
	w.unchecked.Store(true)
	defer w.unchecked.Store(false)
	w.InjectInbound(protocol, pkt)
}

// DeliverLinkPacket implements stack.NetworkDispatcher: a tunnel has no such packets.
func (w *wire) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) {}

// towards is where a packet waits.
func (w *wire) towards(p *stack.PacketBuffer) *queue {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if len(w.outlets) > 0 {
		if q := w.outlets[endpointOf(p).RemoteAddress]; q != nil {
			return q
		}
	}
	return w.queue
}

// queues are all there are.
func (w *wire) queues() []*queue {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return append(slices.Collect(maps.Values(w.outlets)), w.queue)
}

// empty tells whether nothing waits.
func (w *wire) empty() bool {
	return !slices.ContainsFunc(w.queues(), func(q *queue) bool { return !q.empty() })
}

// Close implements stack.LinkEndpoint: the stack calls it. What waits is gone.
func (w *wire) Close() {
	for _, q := range w.queues() {
		if q.close() && q == w.queue {
			w.Endpoint.Close()
		}
	}
}

// note tells the connection that a packet is of, and returns what should leave of it. The
// packet itself stays the caller's.
func (w *wire) note(p *stack.PacketBuffer) outgoing {
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
	conn := w.stack.conns.find(id)
	if conn == nil {
		return o
	}
	now, syn := w.stack.clock(), segment.Flags().Contains(header.TCPFlagSyn)
	if syn {
		conn.signals.restamp(segment, now)
	}
	conn.incoming.leaves(segment, now)
	o.omit = conn.signals.sent(now, segment.SequenceNumber(), size, mss, syn)
	if o.omit != nil && !slices.Contains(o.omit, false) {
		o.end = 0
	}
	return o
}

// endpointOf is where a packet comes from and goes to, but for ports.
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

// MTU is that of the tunnel, for IP packets.
func (s *Stack) MTU() int { return int(s.wire.MTU()) }
