package netstack

import (
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// wire is the stack's interface towards the tunnel. It tells each connection
// what leaves of it, and when: the probe only sees what comes.
type wire struct {
	*channel.Endpoint
	stack *Stack
	drops atomic.Uint64
}

func newWire(s *Stack, mtu int) *wire {
	e := channel.New(queuePackets, uint32(mtu), "")
	// Segments are cut once they have been through the stack together.
	e.SupportedGSOKind = stack.GVisorGSOSupported
	e.LinkEPCapabilities = stack.CapabilityRXChecksumOffload // the tunnel has authenticated it
	return &wire{Endpoint: e, stack: s}
}

// WritePackets implements stack.LinkWriter.
func (w *wire) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for _, p := range pkts.AsSlice() {
		if p.TransportProtocolNumber == header.TCPProtocolNumber {
			w.note(p)
		}
	}
	n, err := w.Endpoint.WritePackets(pkts)
	if lost := pkts.Len() - n; lost > 0 {
		w.drops.Add(uint64(lost))
	}
	return n, err
}

// note tells the connection that p is of.
func (w *wire) note(p *stack.PacketBuffer) {
	segment := header.TCP(p.TransportHeader().Slice())
	id := stack.TransportEndpointID{LocalPort: segment.SourcePort(), RemotePort: segment.DestinationPort()}
	switch p.NetworkProtocolNumber {
	case header.IPv4ProtocolNumber:
		ip := header.IPv4(p.NetworkHeader().Slice())
		id.LocalAddress, id.RemoteAddress = ip.SourceAddress(), ip.DestinationAddress()
	case header.IPv6ProtocolNumber:
		ip := header.IPv6(p.NetworkHeader().Slice())
		id.LocalAddress, id.RemoteAddress = ip.SourceAddress(), ip.DestinationAddress()
	}
	if c, ok := w.stack.conns.Load(id); ok {
		c.(*Conn).signals.sent(segment.SequenceNumber(), p.Data().Size(), segment.Flags().Contains(header.TCPFlagSyn))
	}
}

// MTU is that of the tunnel, for IP packets.
func (s *Stack) MTU() int { return int(s.wire.MTU()) }
