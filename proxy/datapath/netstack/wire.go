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
	waiting [queuePackets]outgoing // a ring
	first   int
	count   int
	packets int // that they leave as
	drops   uint64
	over    bool
}

func newWire(s *Stack, mtu int) *wire {
	e := channel.New(0, uint32(mtu), "")
	// Segments go through the stack together, and are cut as they are collected.
	e.SupportedGSOKind = stack.HostGSOSupported
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
func (w *wire) WritePackets(pkts stack.PacketBufferList) (written int, _ tcpip.Error) {
	for _, p := range pkts.AsSlice() {
		o := w.note(p)
		fits, over := w.put(o)
		if over {
			return written, &tcpip.ErrClosedForSend{}
		}
		if fits {
			written++
		}
	}
	return written, nil
}

// put has a packet wait, or as many of its segments as there is room for.
func (w *wire) put(o outgoing) (fits, over bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return false, true
	}
	n := o.end
	if o.end = min(n, queuePackets-w.packets); o.end < n {
		w.drops += uint64(n - o.end)
	}
	if o.end > 0 {
		o.pkt.IncRef()
		w.waiting[(w.first+w.count)%queuePackets] = o
		w.count++
		w.packets += o.end
		w.wake()
	}
	return o.end > 0 || n == 0, false
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

// take moves as many packets as wait into pieces, which own them then, at most so many
// segments.
func (w *wire) take(pieces []outgoing, most int) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n < len(pieces) && w.count > 0 && most > 0 {
		o := &w.waiting[w.first]
		p := *o
		p.end = min(o.end, o.next+most)
		most -= p.end - p.next
		w.packets -= p.end - p.next
		pieces[n] = p
		n++
		if p.end < o.end {
			o.pkt.IncRef()
			o.next = p.end
			break
		}
		*o = outgoing{}
		w.first = (w.first + 1) % queuePackets
		w.count--
	}
	if w.count > 0 {
		w.wake() // another may collect, too
	}
	return n
}

// await is take once there is something; 0: it is over.
func (w *wire) await(ctx context.Context, pieces []outgoing, most int) int {
	for {
		if n := w.take(pieces, most); n > 0 {
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
	var p [1]outgoing
	for w.take(p[:], queuePackets) > 0 {
		n += p[0].end - p[0].next
		p[0].pkt.DecRef()
	}
	return n
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
	segment := header.TCP(p.TransportHeader().Slice())
	conn := w.stack.conns.find(endpointOf(p, segment))
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
