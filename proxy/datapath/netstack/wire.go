package netstack

import (
	"context"
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
// in a queue of its own, as the endpoint's would copy every packet's head and
// take and give packets one by one.
type wire struct {
	*channel.Endpoint
	stack *Stack
	ready chan struct{} // one is in it while packets wait
	ended chan struct{}

	delivering sync.RWMutex // written: by who delivers what has not been checked
	unchecked  atomic.Bool  // what is being delivered has not been

	mu      sync.Mutex
	waiting [queuePackets]*stack.PacketBuffer // a ring
	first   int
	count   int
	drops   uint64
	over    bool
}

func newWire(s *Stack, mtu int) *wire {
	e := channel.New(0, uint32(mtu), "")
	// Segments are cut once they have been through the stack together.
	e.SupportedGSOKind = stack.GVisorGSOSupported
	return &wire{Endpoint: e, stack: s, ready: make(chan struct{}, 1), ended: make(chan struct{})}
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
func (w *wire) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	written := pkts.Len()
	all := w.note(pkts.AsSlice())
	w.mu.Lock()
	if w.over {
		w.mu.Unlock()
		return 0, &tcpip.ErrClosedForSend{}
	}
	n := min(len(all), queuePackets-w.count)
	for _, p := range all[:n] {
		w.waiting[(w.first+w.count)%queuePackets] = p.IncRef()
		w.count++
	}
	w.drops += uint64(len(all) - n)
	w.mu.Unlock()
	if n > 0 {
		w.wake()
	}
	return written - (len(all) - n), nil
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

func (w *wire) wake() {
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// take moves as many packets as wait into pkts, which own them then.
func (w *wire) take(pkts []*stack.PacketBuffer) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(pkts), w.count)
	for i := range n {
		pkts[i], w.waiting[w.first] = w.waiting[w.first], nil
		w.first = (w.first + 1) % queuePackets
	}
	if w.count -= n; w.count > 0 {
		w.wake() // another may collect, too
	}
	return n
}

// await is take once there is something; 0: it is over.
func (w *wire) await(ctx context.Context, pkts []*stack.PacketBuffer) int {
	for {
		if n := w.take(pkts); n > 0 {
			return n
		}
		select {
		case <-w.ready:
		case <-w.ended:
			return 0
		case <-ctx.Done():
			return 0
		}
	}
}

// empty tells whether nothing waits.
func (w *wire) empty() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count == 0
}

// lost counts packets for which the queue had no room.
func (w *wire) lost() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.drops
}

// Close implements stack.LinkEndpoint: the stack calls it. What waits is gone.
func (w *wire) Close() {
	w.mu.Lock()
	again := w.over
	w.over = true
	w.mu.Unlock()
	if again {
		return
	}
	w.discard()
	close(w.ended)
	w.Endpoint.Close()
}

// discard loses what waits, and tells how many packets that was.
func (w *wire) discard() (n int) {
	var p [1]*stack.PacketBuffer
	for ; w.take(p[:]) > 0; n++ {
		p[0].DecRef()
	}
	return n
}

// note tells the connections that packets are of, and returns those that should
// leave. The list itself stays the caller's.
func (w *wire) note(pkts []*stack.PacketBuffer) []*stack.PacketBuffer {
	var last stack.TransportEndpointID
	var conn *Conn // of last: packets of a connection come together
	leave, whole := pkts, true
	for i, p := range pkts {
		goes := true
		if p.TransportProtocolNumber == header.TCPProtocolNumber {
			segment := header.TCP(p.TransportHeader().Slice())
			if id := endpointOf(p, segment); id != last {
				last, conn = id, w.stack.conns.find(id)
			}
			if conn != nil {
				syn := segment.Flags().Contains(header.TCPFlagSyn)
				if syn {
					conn.signals.restamp(segment, w.stack.clock())
				}
				conn.incoming.leaves(segment, w.stack.clock())
				goes = conn.signals.sent(segment.SequenceNumber(), p.Data().Size(), syn)
			}
		}
		switch {
		case !goes && whole:
			leave, whole = slices.Clone(pkts[:i]), false
		case goes && !whole:
			leave = append(leave, p)
		}
	}
	return leave
}

// endpointOf is the connection, by its ends, that sends a segment.
func endpointOf(p *stack.PacketBuffer, segment header.TCP) stack.TransportEndpointID {
	id := stack.TransportEndpointID{LocalPort: segment.SourcePort(), RemotePort: segment.DestinationPort()}
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
