// Package netstack is TCP in user space for what comes out of a tunnel. IP packets go in and out,
// and every TCP connection in them ends here, whatever address it is for. It is built on gVisor's
// stack.
//
// A tunnel passes the packets of its peers to Stack.Deliver, and collects those for its peers
// with Stack.Collect or from an Outlet. A client's SYN waits as a Conn, not answered, until the
// proxy has reached the server. Then Admit answers it, or Reset refuses it: a client so learns
// what became of its connection from TCP alone.
//
// # Who decides what is in flight
//
// The stack's own congestion control is Reno. There is no option to replace it, so its window is
// kept above the relay's (sender.widenCwnd) and does not bind. The stack enforces neither our
// window nor a rate: the relay calls flow.Take before every write.
//
// # Reports
//
// Two places see all segments of a connection. gVisor calls a probe with a copy of its state
// after each segment that came (Stack.onProbe). The link towards the tunnel sees each segment
// that leaves (wire.noteSent). Reports are therefore exact, and come with the segment that they
// are about. Only what changes without a segment is polled (poller).
//
// # Cost
//
// Segments that come together are merged before they go into the stack (GRO). What the stack
// sends as one packet is cut into segments when it is collected (GSO). Both save most of the work
// per segment.
//
// # Other protocols
//
// UDP and ICMP echo are handed to a Datagrams, which forwards them by sockets of its own.
package netstack

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/seqnum"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/stack/gro"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Config describes a Stack.
type Config struct {
	Clock func() cc.Time
	MTU   int // of the tunnel, in bytes of an IP packet: MinMTU to 65535

	// Handshakes bounds the connections that wait for their server to be dialled or for the end
	// of their handshake. One peer has at most half of them. Further SYNs are dropped, and
	// clients send them again. 0: 2048.
	Handshakes int

	timers tcpip.Clock // of the stack's timers; nil: the real one
}

// MinMTU is the least MTU of IPv6, in bytes (RFC 8200 §5).
const MinMTU = 1280

const (
	// nic is the number of the stack's one interface.
	nic = 1
	// queuePackets bounds the packets that wait for the tunnel outside of outlets. Further ones
	// are lost.
	queuePackets      = 4096
	defaultHandshakes = 2048

	// A buffer holds what a fast tunnel with a long round trip has in flight, and no more: 4 MiB
	// is 330 Mbit/s at 100 ms.
	minBuffer     = 4 << 10
	defaultBuffer = 256 << 10
	maxBuffer     = 4 << 20

	// timeWait is short, since clients behind a tunnel soon use a port again.
	timeWait = 5 * time.Second
)

// Stack ends the connections of one tunnel. All its methods may be called from any goroutine at
// any time.
//
// Locks, the outer ones first. A goroutine that holds one takes only those below it.
//
//	lock                    guards                           taken by
//	gVisor's, per endpoint  its state and sender             gVisor around the probe; Conn through LockUser
//	Conn.mu                 request, endpoint, closed        callers of Conn, the probe, the poller
//	signals.mu              what was sent and acknowledged   the probe, segments that leave, Conn,
//	                        (reports run in it)              the poller
//	incoming.mu             what has come, the window        the same
//	registry.mu             the table of connections         every packet (shared), opening and closing
//	requests.mu             SYNs that wait                   SYNs, Admit, Reset
//	poller.mu               connections to look at           Conn, the poller
//	wire.mu, queue.mu       outlets; packets that wait       segments that leave, Collect
//
// Goroutines: gVisor runs segments in the goroutine that calls Deliver, and in some of its own.
// The poller runs while a connection waits for an acknowledgement. Close ends all of them.
type Stack struct {
	clock    func() cc.Time
	net      *stack.Stack
	wire     *wire
	conns    *registry
	requests requests
	pending  chan *Conn // SYNs that wait for Accept

	gateway             atomic.Pointer[func(netip.Addr) netip.Addr]
	dropped             [verdicts]atomic.Uint64 // packets that came out of the tunnel, by what was wrong with them
	datagrams           atomic.Pointer[Datagrams]
	received, collected atomic.Uint64 // bytes

	draining chan struct{} // closed: no SYN is answered any more
	drain    sync.Once
	closed   chan struct{}
	closing  sync.Once
}

// New starts a stack that accepts TCP to any address. Close ends it.
func New(cfg Config) (*Stack, error) {
	if cfg.MTU < MinMTU || cfg.MTU > 65535 {
		return nil, fmt.Errorf("netstack: an MTU of %d is not between %d and 65535", cfg.MTU, MinMTU)
	}
	if cfg.Handshakes == 0 {
		cfg.Handshakes = defaultHandshakes
	}
	// The stack would log odd packets to standard error, as often as a peer sends them.
	log.SetLevel(log.Warning)
	s := &Stack{
		clock: cfg.Clock, draining: make(chan struct{}), closed: make(chan struct{}),
		conns: newRegistry(cfg.Clock), pending: make(chan *Conn, cfg.Handshakes),
	}
	s.requests.places = datapath.NewPlaces(cfg.Handshakes)
	s.requests.waiting = map[stack.TransportEndpointID]synInfo{}
	s.SetPeer(netip.Addr.String)
	s.SetGateway(func(netip.Addr) netip.Addr { return netip.Addr{} })
	s.SetDatagrams(nil)
	s.wire = newWire(s.conns, cfg.MTU)
	s.net = stack.New(stack.Options{
		NetworkProtocols: []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{
			tcp.NewProtocolProbe(s.onProbe), udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6,
		},
		Clock: cfg.timers,
	})
	if err := s.configure(cfg); err != nil {
		s.net.Destroy()
		return nil, fmt.Errorf("netstack: %w", err)
	}
	return s, nil
}

// configure sets the stack's options, makes it receive for all addresses, and sets the handlers of
// packets that belong to no connection.
func (s *Stack) configure(cfg Config) error {
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(true)
	below := tcpip.CongestionControlOption(stackAlgorithm)
	recovery, wait := tcpip.TCPRACKLossDetection, tcpip.TCPTimeWaitTimeoutOption(timeWait)
	sending := tcpip.TCPSendBufferSizeRangeOption{Min: minBuffer, Default: defaultBuffer, Max: maxBuffer}
	receiving := tcpip.TCPReceiveBufferSizeRangeOption{Min: minBuffer, Default: defaultBuffer, Max: maxBuffer}
	for _, o := range []tcpip.SettableTransportProtocolOption{
		&sack, &moderate, &below, &recovery, &wait, &sending,
		&receiving,
	} {
		if err := s.net.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fmt.Errorf("set %T: %w", o, kernelError(err))
		}
	}
	if err := s.net.CreateNIC(nic, s.wire); err != nil {
		return fmt.Errorf("create the interface: %w", kernelError(err))
	}
	// Every address is ours, to receive for and to send from.
	if err := s.net.SetPromiscuousMode(nic, true); err != nil {
		return kernelError(err)
	}
	if err := s.net.SetSpoofing(nic, true); err != nil {
		return kernelError(err)
	}
	s.net.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nic},
		{Destination: header.IPv6EmptySubnet, NIC: nic},
	})
	s.requests.forwarder = tcp.NewForwarder(s.net, 0, cfg.Handshakes, s.queueRequest)
	s.net.SetTransportProtocolHandler(tcp.ProtocolNumber, s.requests.handleNewSegment)
	s.net.SetTransportProtocolHandler(udp.ProtocolNumber, s.handleUDP)
	s.net.SetTransportProtocolHandler(icmp.ProtocolNumber4, s.handleEcho)
	s.net.SetTransportProtocolHandler(icmp.ProtocolNumber6, s.handleEcho)
	return nil
}

// SetPeer sets the function that returns the name of the peer that has an address inside the
// tunnel. Before, each address is a peer of its own.
func (s *Stack) SetPeer(of func(inner netip.Addr) string) { s.requests.peer.Store(&of) }

// SetGateway sets the function that returns our own address in the network of an address inside
// the tunnel; invalid: we have none.
func (s *Stack) SetGateway(of func(inner netip.Addr) netip.Addr) { s.gateway.Store(&of) }

// SetDatagrams makes h handle datagrams from now on. Without it, and with nil, the stack answers
// UDP as a closed port does, and drops echo requests, since their target is never the stack's own
// address.
func (s *Stack) SetDatagrams(h Datagrams) { s.datagrams.Store(&h) }

// MTU returns the tunnel's MTU, in bytes of an IP packet.
func (s *Stack) MTU() int { return int(s.wire.MTU()) }

// Accept returns the next connection that a client asks for. Its SYN is not answered yet: Admit,
// Reset or Leave it. It fails with os.ErrClosed after Drain.
func (s *Stack) Accept() (*Conn, error) {
	select {
	case c := <-s.pending:
		return c, nil
	case <-s.draining:
		return nil, fmt.Errorf("netstack: accept: %w", os.ErrClosed)
	}
}

// Dial opens a connection into the tunnel, with the source address from. It is given up when ctx
// ends.
func (s *Stack) Dial(ctx context.Context, from netip.Addr, to netip.AddrPort) (_ *Conn, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("netstack: dial %v: %w", to, err)
		}
	}()
	if datapath.IsClosed(s.closed) {
		return nil, os.ErrClosed
	}
	c := newConn(s.conns, stack.TransportEndpointID{})
	endpoint, failed := s.net.NewEndpoint(tcp.ProtocolNumber, networkOf(from), &c.events)
	if failed != nil {
		return nil, kernelError(failed)
	}
	remote := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(to.Addr().AsSlice()), Port: to.Port()}
	failed = endpoint.Bind(tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(from.AsSlice())})
	var local tcpip.FullAddress
	if failed == nil {
		local, failed = endpoint.GetLocalAddress()
	}
	if failed != nil {
		endpoint.Close()
		return nil, kernelError(failed)
	}
	c.id = stack.TransportEndpointID{
		LocalAddress: local.Addr, LocalPort: local.Port, RemoteAddress: remote.Addr, RemotePort: remote.Port,
	}
	s.conns.addConn(c) // before its SYN leaves: the signals then see the whole handshake
	entry, connected := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventHUp | waiter.EventErr)
	c.events.EventRegister(&entry)
	defer c.events.EventUnregister(&entry)
	failed = endpoint.Connect(remote)
	if _, started := failed.(*tcpip.ErrConnectStarted); started {
		select {
		case <-connected:
			failed = endpoint.LastError()
		case <-ctx.Done():
			c.removeFromTable()
			endpoint.Abort()
			return nil, ctx.Err()
		}
	}
	if failed != nil {
		c.removeFromTable()
		endpoint.Close()
		return nil, kernelError(failed)
	}
	if err := c.adoptEndpoint(ctx, endpoint); err != nil {
		return nil, err
	}
	return c, nil
}

// Drain leaves new SYNs unanswered, and those that wait for Accept. Clients send them again, and
// may then reach the process that replaces this one. A RST would say that there is no server.
// Connections continue.
func (s *Stack) Drain() {
	s.drain.Do(func() { close(s.draining) })
	for {
		select {
		case c := <-s.pending:
			c.Leave()
		default:
			return
		}
	}
}

// Abort resets every connection, and answers no further SYN. The resets still have to be
// collected.
func (s *Stack) Abort() {
	s.Drain()
	for _, c := range s.conns.allConns() {
		_ = c.Reset()
	}
}

// AbortFor resets every connection with these addresses inside, even closed ones that have yet to
// send something. The resets still have to be collected.
func (s *Stack) AbortFor(inner []netip.Addr) {
	for _, c := range s.conns.allConns() {
		if !slices.Contains(inner, addrPortOf(c.id.RemoteAddress, 0).Addr()) {
			continue
		}
		if e := c.tcpEndpoint(); e != nil {
			e.Abort()
		} else {
			_ = c.Reset() // it is being opened
		}
	}
}

// flushEvery is how often Flush checks whether packets wait. It runs once, at the end of a tunnel.
const flushEvery = time.Millisecond

// Flush waits until all packets for the tunnel have been collected, or ctx is done.
func (s *Stack) Flush(ctx context.Context) {
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for !s.wire.isEmpty() {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Close aborts every connection and ends the stack.
func (s *Stack) Close() error {
	s.closing.Do(func() {
		close(s.closed)
		s.Abort()
		s.conns.poller.stopAndWait()
		s.net.Destroy()
		s.wire.Close()
	})
	return nil
}

// Deliver passes IP packets that came out of the tunnel to the stack. The memory stays the
// caller's. Invalid packets are dropped, and a packet that has reached its hop limit is answered.
// Segments of a connection that follow each other go through the stack as one.
func (s *Stack) Deliver(packets ...[]byte) {
	var merged *gro.GRO // nil: there is only one packet
	if len(packets) > 1 {
		merged = mergers.Get().(*gro.GRO)
		merged.Dispatcher = s.wire
	}
	for _, p := range packets {
		p, v := s.judgePacket(p)
		s.received.Add(uint64(len(p)))
		if v > unchecked {
			s.dropped[v].Add(1)
			if v == expired {
				s.sendTimeExceeded(p)
			}
			continue
		}
		if v == valid && s.conns.counting.Load() > 0 {
			s.noteIncoming(p)
		}
		protocol := header.IPv4ProtocolNumber
		if p[0]>>4 == 6 {
			protocol = header.IPv6ProtocolNumber
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(p)})
		switch {
		case v == unchecked:
			s.wire.deliverUnchecked(protocol, pkt)
		case merged != nil:
			pkt.NetworkProtocolNumber = protocol
			pkt.RXChecksumValidated = true
			merged.Enqueue(pkt)
		default:
			s.wire.DeliverNetworkPacket(protocol, pkt)
		}
		pkt.DecRef()
	}
	if merged != nil {
		for range mergerDepth {
			merged.Flush()
		}
		merged.Dispatcher = nil
		mergers.Put(merged)
	}
}

// judgePacket inspects a packet, and checks its hop limit and whether an ICMP error is to be
// trusted. It returns the packet without the bytes behind its end.
func (s *Stack) judgePacket(p []byte) ([]byte, verdict) {
	p, v := inspectPacket(p)
	if v == icmpError {
		if v = icmpErrorUnfounded; s.isErrorInFlight(p) {
			v = valid
		}
	}
	if v <= unchecked && s.hopLimitIsSpent(p) {
		v = expired
	}
	return p, v
}

// mergers are GRO instances, empty between uses. Flush takes only the first packet off each of
// their lists.
var mergers = sync.Pool{New: func() any {
	g := new(gro.GRO)
	g.Init(true)
	return g
}}

// mergerDepth is how many packets a list of a merger has at most, and so how often it is flushed.
const mergerDepth = 8

// isErrorInFlight reports whether a packet with an ICMP message other than echoes is an error
// about a segment that a connection has in flight (RFC 5927 §4.1). The stack itself would believe
// any sender. After an error with an MTU that no segment fits it would send one byte in each
// segment.
func (s *Stack) isErrorInFlight(p []byte) bool {
	var id stack.TransportEndpointID
	var segment []byte
	if p[0]>>4 == 6 {
		plain := header.IPv6(p).NextHeader() == uint8(icmp.ProtocolNumber6)
		p = p[header.IPv6MinimumSize:]
		if !plain || len(p) < echoHeader+header.IPv6MinimumSize+echoHeader {
			return false
		}
		quoted := header.IPv6(p[echoHeader:])
		small := header.ICMPv6Type(p[0]) == header.ICMPv6PacketTooBig && binary.BigEndian.Uint32(p[4:]) < MinMTU
		if small || quoted.NextHeader() != uint8(tcp.ProtocolNumber) {
			return false // RFC 8201 §4
		}
		id.LocalAddress, id.RemoteAddress = quoted.SourceAddress(), quoted.DestinationAddress()
		segment = quoted[header.IPv6MinimumSize:]
	} else {
		p = p[header.IPv4(p).HeaderLength():]
		if len(p) < echoHeader+header.IPv4MinimumSize+echoHeader {
			return false
		}
		quoted := header.IPv4(p[echoHeader:])
		small := header.ICMPv4Type(p[0]) == header.ICMPv4DstUnreachable &&
			header.ICMPv4Code(p[1]) == header.ICMPv4FragmentationNeeded && binary.BigEndian.Uint16(p[6:]) < minBelievedMTU
		options := int(quoted.HeaderLength()) != header.IPv4MinimumSize
		if small || options || quoted.Protocol() != uint8(tcp.ProtocolNumber) {
			return false // packets that we send have no options
		}
		id.LocalAddress, id.RemoteAddress = quoted.SourceAddress(), quoted.DestinationAddress()
		segment = quoted[header.IPv4MinimumSize:]
	}
	id.LocalPort, id.RemotePort = header.TCP(segment).SourcePort(), header.TCP(segment).DestinationPort()
	c := s.conns.findConn(id)
	return c != nil && c.signals.isInFlight(seqnum.Value(header.TCP(segment).SequenceNumber()))
}

// noteIncoming passes a valid packet's data to its connection's incoming, if there is such a
// connection.
func (s *Stack) noteIncoming(p []byte) {
	var id stack.TransportEndpointID
	var segment header.TCP
	if p[0]>>4 == 6 {
		if ip := header.IPv6(p); ip.NextHeader() == uint8(tcp.ProtocolNumber) {
			id.LocalAddress, id.RemoteAddress, segment = ip.DestinationAddress(), ip.SourceAddress(), ip.Payload()
		}
	} else if ip := header.IPv4(p); ip.TransportProtocol() == tcp.ProtocolNumber {
		id.LocalAddress, id.RemoteAddress, segment = ip.DestinationAddress(), ip.SourceAddress(), ip.Payload()
	}
	if len(segment) < header.TCPMinimumSize {
		return
	}
	head := int(segment.DataOffset())
	if head < header.TCPMinimumSize || head >= len(segment) || segment.Flags().Contains(header.TCPFlagSyn) {
		return
	}
	id.LocalPort, id.RemotePort = segment.DestinationPort(), segment.SourcePort()
	if c := s.conns.findConn(id); c != nil {
		c.incoming.onSegmentReceived(segment, cc.Bytes(len(segment)-head), s.clock())
	}
}

// hopLimitIsSpent reports whether a packet's hop limit is 0, or is 1 and the packet is not for
// us.
func (s *Stack) hopLimitIsSpent(p []byte) bool {
	if p[0]>>4 == 6 {
		hops, target := header.IPv6(p).HopLimit(), netip.AddrFrom16([16]byte(p[24:40]))
		return hops == 0 || hops == 1 && s.gatewayFor(target) != target
	}
	hops, target := header.IPv4(p).TTL(), netip.AddrFrom4([4]byte(p[16:20]))
	return hops == 0 || hops == 1 && s.gatewayFor(target) != target
}

// gatewayFor returns our own address in the network of inner; invalid: there is none.
func (s *Stack) gatewayFor(inner netip.Addr) netip.Addr { return (*s.gateway.Load())(inner) }

// Source addresses of Time Exceeded messages if we have no address in the tunnel: the IPv4 dummy
// address (RFC 7600 §4.8) and a link-local one.
var (
	routerIPv4 = netip.AddrFrom4([4]byte{192, 0, 0, 8})
	routerIPv6 = netip.MustParseAddr("fe80::1")
)

// sendTimeExceeded answers a packet that has reached its hop limit, as a router does, as far as
// the rate limit of ICMP errors allows (RFC 1812 §4.3.2, RFC 4443 §2.4 and 3.3).
func (s *Stack) sendTimeExceeded(p []byte) {
	var to netip.Addr
	var answerable bool
	from, quotable := routerIPv4, 576-header.IPv4MinimumSize-echoHeader
	message := [echoHeader]byte{uint8(header.ICMPv4TimeExceeded), uint8(header.ICMPv4TTLExceeded)}
	if p[0]>>4 == 6 {
		to, from, answerable = netip.AddrFrom16([16]byte(p[8:24])), routerIPv6, mayAnswerIPv6(p)
		quotable = MinMTU - header.IPv6MinimumSize - echoHeader
		message = [echoHeader]byte{uint8(header.ICMPv6TimeExceeded), uint8(header.ICMPv6HopLimitExceeded)}
	} else {
		to, answerable = netip.AddrFrom4([4]byte(p[12:16])), mayAnswerIPv4(p)
	}
	if own := s.gatewayFor(to); own.IsValid() {
		from = own
	}
	if answerable && (to.IsGlobalUnicast() || to.IsLinkLocalUnicast()) && s.net.AllowICMPMessage() {
		_ = s.SendICMP(from, to, append(message[:], p[:min(len(p), quotable)]...)) // it may be lost like any packet
	}
}

// queueRequest makes a SYN wait for Accept.
func (s *Stack) queueRequest(asked *tcp.ForwarderRequest) {
	r := &request{ForwarderRequest: asked, requests: &s.requests}
	s.requests.mu.Lock()
	r.synInfo = s.requests.waiting[asked.ID()]
	s.requests.mu.Unlock()
	if datapath.IsClosed(s.draining) {
		r.Complete(false)
		return
	}
	c := newConn(s.conns, r.ID())
	c.request, c.hops, c.dscp = r, r.hops, r.dscp
	select {
	case s.pending <- c:
	default: // Config.Handshakes wait already
		r.Complete(false)
	}
}

// onProbe is called by gVisor after each segment that came, with a copy of the endpoint's state
// and its lock held.
func (s *Stack) onProbe(state *tcp.TCPEndpointState) {
	id := stack.TransportEndpointID{
		LocalPort: state.ID.LocalPort, LocalAddress: state.ID.LocalAddress,
		RemotePort: state.ID.RemotePort, RemoteAddress: state.ID.RemoteAddress,
	}
	if c := s.conns.findConn(id); c != nil {
		c.onProbe(state)
	}
}

// handleUDP is called by gVisor with a UDP datagram; false: the stack is to answer or count it.
func (s *Stack) handleUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	h := *s.datagrams.Load()
	if h == nil {
		return false
	}
	segment, ip := header.UDP(pkt.TransportHeader().Slice()), pkt.Network()
	lengthValid, sumValid := header.UDPValid(segment, pkt.Data().Checksum, uint16(pkt.Data().Size()),
		pkt.NetworkProtocolNumber, ip.SourceAddress(), ip.DestinationAddress(), pkt.RXChecksumValidated)
	if !lengthValid || !sumValid {
		return false // the stack counts it
	}
	// The packet may be longer than the datagram. Its length includes its header (RFC 768).
	payload := pkt.Data().AsRange().ToSlice()
	payload = payload[:min(len(payload), int(segment.Length())-header.UDPMinimumSize)]
	source, target := addrPortOf(id.RemoteAddress, id.RemotePort), addrPortOf(id.LocalAddress, id.LocalPort)
	if isSameFamily(source.Addr(), target.Addr()) {
		h.UDP(source, target, hopsOf(pkt), payload)
	}
	return true
}

// handleEcho is called by gVisor with an ICMP message.
func (s *Stack) handleEcho(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	message := stack.PayloadSince(pkt.TransportHeader())
	defer message.Release()
	b := message.AsSlice()
	request, reply := uint8(header.ICMPv4Echo), uint8(header.ICMPv4EchoReply)
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		request, reply = uint8(header.ICMPv6EchoRequest), uint8(header.ICMPv6EchoReply)
	}
	// Of a reassembled packet the stack has checked the checksum of ICMPv6, but not of ICMP.
	if request == uint8(header.ICMPv4Echo) && !pkt.RXChecksumValidated && checksum.Checksum(b, 0) != 0xffff {
		s.dropped[badChecksum].Add(1)
		return true
	}
	source, target := addrPortOf(id.RemoteAddress, 0).Addr(), addrPortOf(id.LocalAddress, 0).Addr()
	h := *s.datagrams.Load()
	if h == nil || len(b) < echoHeader || !isSameFamily(source, target) {
		return true
	}
	switch b[0] {
	case request:
		h.Echo(source, target, hopsOf(pkt), append([]byte(nil), b...))
	case reply:
		h.EchoReply(source, target, append([]byte(nil), b...))
	}
	return true
}

// SendUDP sends a datagram into the tunnel, in fragments where it does not fit.
func (s *Stack) SendUDP(source, target netip.AddrPort, payload []byte) error {
	return s.sendDatagram(source.Addr(), target.Addr(), udp.ProtocolNumber, header.UDPMinimumSize, payload,
		func(r *stack.Route, h []byte, sum uint16) {
			segment := header.UDP(h)
			length := uint16(len(h) + len(payload))
			segment.Encode(&header.UDPFields{SrcPort: source.Port(), DstPort: target.Port(), Length: length})
			sum = checksum.Combine(r.PseudoHeaderChecksum(udp.ProtocolNumber, length), sum)
			if sum = ^segment.CalculateChecksum(sum); sum == 0 {
				sum = 0xffff // 0 is for none (RFC 768)
			}
			segment.SetChecksum(sum)
		})
}

// SendICMP sends an ICMP message into the tunnel, of the version that the addresses are of. It
// sets the checksum.
func (s *Stack) SendICMP(source, target netip.Addr, message []byte) error {
	if len(message) < echoHeader {
		return fmt.Errorf("netstack: an ICMP message of %d bytes", len(message))
	}
	protocol := icmp.ProtocolNumber4
	if target.Is6() {
		protocol = icmp.ProtocolNumber6
	}
	return s.sendDatagram(source, target, protocol, echoHeader, message[echoHeader:],
		func(r *stack.Route, h []byte, sum uint16) {
			copy(h, message)
			binary.BigEndian.PutUint16(h[2:], 0)
			if target.Is6() {
				sum = checksum.Combine(r.PseudoHeaderChecksum(icmp.ProtocolNumber6, uint16(len(message))), sum)
			}
			binary.BigEndian.PutUint16(h[2:], ^checksum.Checksum(h, sum))
		})
}

// sendDatagram sends a packet with a transport header of n bytes. encode writes the header, given
// the payload's checksum.
func (s *Stack) sendDatagram(source, target netip.Addr, protocol tcpip.TransportProtocolNumber, n int, payload []byte,
	encode func(r *stack.Route, h []byte, sum uint16),
) error {
	if datapath.IsClosed(s.closed) {
		return fmt.Errorf("netstack: send: %w", os.ErrClosed)
	}
	r, err := s.net.FindRoute(nic, tcpip.AddrFromSlice(source.AsSlice()), tcpip.AddrFromSlice(target.AsSlice()),
		networkOf(target), false)
	if err != nil {
		return fmt.Errorf("netstack: send to %v: %w", target, kernelError(err))
	}
	defer r.Release()
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: n + int(r.MaxHeaderLength()), Payload: buffer.MakeWithData(payload),
	})
	defer pkt.DecRef()
	pkt.TransportProtocolNumber = protocol
	encode(r, pkt.TransportHeader().Push(n), checksum.Checksum(payload, 0))
	if err := r.WritePacket(stack.NetworkHeaderParams{Protocol: protocol, TTL: r.DefaultTTL()}, pkt); err != nil {
		return fmt.Errorf("netstack: send to %v: %w", target, kernelError(err))
	}
	return nil
}

// SendUnreachable sends the ICMP error to the packet's sender, as far as the rate limit of ICMP
// errors allows (RFC 1812 §4.3.2.8, RFC 4443 §2.4 f). It reports whether it did.
func (s *Stack) SendUnreachable(u Unreachable) (bool, error) {
	if !s.net.AllowICMPMessage() {
		return false, nil
	}
	from := u.From
	if from.Is4() != u.Target.Addr().Is4() || !from.IsValid() {
		from = u.Target.Addr()
	}
	err := s.SendICMP(from, u.Source.Addr(), u.icmpMessage())
	return err == nil, err
}

// Outlet opens an outlet in which at most most packets wait. An address has one outlet at a time.
func (s *Stack) Outlet(most int, addrs []netip.Addr) *Outlet {
	o := &Outlet{queue: newQueue(most, &s.wire.drops), wire: s.wire, collected: &s.collected}
	s.wire.mu.Lock()
	defer s.wire.mu.Unlock()
	for _, a := range addrs {
		o.addrs = append(o.addrs, tcpip.AddrFromSlice(a.AsSlice()))
		s.wire.outlets[o.addrs[len(o.addrs)-1]] = o.queue
	}
	return o
}

// Collect is like Outlet.Collect, for packets to addresses without an outlet.
func (s *Stack) Collect(ctx context.Context, bufs [][]byte, sizes []int, offset int) (n int, err error) {
	return s.wire.queue.collectPackets(ctx, bufs, sizes, offset, &s.collected)
}

// Counts are counters of a stack since its start.
type Counts struct {
	Lost       uint64 // packets towards the tunnel for which the queue had no room
	Handshakes uint64 // SYNs dropped beyond Config.Handshakes
	Stalls     uint64 // how often a connection had stopped retransmitting, and was restarted

	// Packets that came out of the tunnel and were dropped. Malformed is no IP packet or a
	// truncated one, Damaged has a wrong checksum, Senseless has TCP flags that no sender uses
	// together, Expired has reached its hop limit.
	Malformed, Damaged, Senseless, Expired uint64
}

// Counts returns the counters.
func (s *Stack) Counts() Counts {
	stats := s.net.Stats()
	return Counts{
		Lost: s.wire.drops.Load(), Handshakes: s.requests.dropped.Load(), Stalls: s.conns.stalls.Load(),
		Malformed: s.dropped[malformed].Load(), Senseless: s.dropped[badFlags].Load(), Expired: s.dropped[expired].Load(),
		Damaged: s.dropped[badChecksum].Load() + stats.TCP.ChecksumErrors.Value() + stats.UDP.ChecksumErrors.Value(),
	}
}

// Traffic returns the bytes of packets that came out of the tunnel, and of packets that were
// collected for it. Headers are included.
func (s *Stack) Traffic() (received, collected uint64) {
	return s.received.Load(), s.collected.Load()
}
