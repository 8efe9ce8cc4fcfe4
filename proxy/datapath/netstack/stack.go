// Package netstack is TCP in user space, for what comes out of a tunnel: IP
// packets go in and out, and every connection in them ends here, whatever
// address it is for. It uses gVisor's stack.
//
// That stack's own congestion control is Reno, whose window is opened so that ours
// binds. The stack's probe and the packets that it sends show what became of each byte.
// It enforces neither our window nor a rate, so the relay calls flow.Take before every write.
package netstack

import (
	"context"
	"errors"
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
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/stack/gro"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Config describes a Stack.
type Config struct {
	Clock func() cc.Time
	MTU   int // of the tunnel, in bytes of an IP packet: MinMTU to 65535
	// Handshakes bounds the connections that wait for their server to be dialled
	// or for the end of their handshake, of which one peer has at most half;
	// further SYNs are dropped, and clients send them again. 0: 2048.
	Handshakes int

	timers tcpip.Clock // of the stack's timers; nil: the real one
}

// MinMTU is the least MTU of IPv6, in bytes (RFC 8200 §5).
const MinMTU = 1280

const (
	nic               = 1
	queuePackets      = 4096 // towards the tunnel; what comes beyond it is lost
	defaultHandshakes = 2048

	// A buffer holds what a fast tunnel with a long round trip has in flight,
	// and no more: 4 MiB is 330 Mbit/s at 100 ms.
	leastBuffer   = 4 << 10
	defaultBuffer = 256 << 10
	mostBuffer    = 4 << 20

	// timeWait is short: clients behind a tunnel soon use a port again.
	timeWait = 5 * time.Second
)

// Stack ends the connections of one tunnel.
type Stack struct {
	clock    func() cc.Time
	net      *stack.Stack
	wire     *wire
	conns    table
	requests requests
	syns     chan *Conn
	asked    atomic.Int64 // connections whose incoming.asked is set

	gateway             atomic.Pointer[func(netip.Addr) netip.Addr]
	dropped             [verdicts]atomic.Uint64 // packets that came out of the tunnel
	datagrams           atomic.Pointer[Datagrams]
	received, collected atomic.Uint64 // bytes
	stalls              atomic.Uint64 // of connections that had stopped retransmitting

	draining chan struct{} // closed: no SYN is answered any more
	drain    sync.Once
	closed   chan struct{}
	closing  sync.Once
	poller   poller
}

// New starts a stack that accepts TCP to any address. Close ends it.
func New(cfg Config) (*Stack, error) {
	if cfg.MTU < MinMTU || cfg.MTU > 65535 {
		return nil, fmt.Errorf("netstack: an MTU of %d is not between %d and 65535", cfg.MTU, MinMTU)
	}
	if cfg.Handshakes == 0 {
		cfg.Handshakes = defaultHandshakes
	}
	// The stack would log odd packets to standard error, as many as somebody sends.
	log.SetLevel(log.Warning)
	s := &Stack{
		clock: cfg.Clock, draining: make(chan struct{}), closed: make(chan struct{}),
		syns: make(chan *Conn, cfg.Handshakes),
	}
	s.requests.places = datapath.NewPlaces(cfg.Handshakes)
	s.requests.asked = map[stack.TransportEndpointID]asked{}
	s.conns.conns = map[stack.TransportEndpointID]*Conn{}
	s.poller.clock, s.poller.kick, s.poller.closed = cfg.Clock, make(chan struct{}, 1), make(chan struct{})
	s.wire = newWire(s, cfg.MTU)
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

func (s *Stack) configure(cfg Config) error {
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(true)
	below := tcpip.CongestionControlOption(envelope)
	recovery, wait := tcpip.TCPRACKLossDetection, tcpip.TCPTimeWaitTimeoutOption(timeWait)
	sending := tcpip.TCPSendBufferSizeRangeOption{Min: leastBuffer, Default: defaultBuffer, Max: mostBuffer}
	receiving := tcpip.TCPReceiveBufferSizeRangeOption{Min: leastBuffer, Default: defaultBuffer, Max: mostBuffer}
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
	s.net.SetTransportProtocolHandler(tcp.ProtocolNumber, s.requests.takeSegment)
	s.interceptDatagrams()
	return nil
}

// Accept returns the next connection that a client asks for, its SYN not
// answered yet: Admit or Reset it.
func (s *Stack) Accept() (*Conn, error) {
	select {
	case c := <-s.syns:
		return c, nil
	case <-s.draining:
		return nil, fmt.Errorf("netstack: accept: %w", os.ErrClosed)
	}
}

// Drain leaves SYNs unanswered from now on, and those that nobody has accepted:
// clients send them again, and may reach the process that takes our place. A RST would
// tell them that there is no server. Connections go on.
func (s *Stack) Drain() {
	s.drain.Do(func() { close(s.draining) })
	for {
		select {
		case c := <-s.syns:
			c.Leave()
		default:
			return
		}
	}
}

// Abort resets every connection. The resets still have to be collected.
func (s *Stack) Abort() {
	s.Drain()
	for _, c := range s.conns.allConns() {
		_ = c.Reset()
	}
}

// AbortFor resets every connection with these addresses inside, and those that were closed and
// have yet to send something. The resets still have to be collected.
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

// flushEvery is how often Flush looks.
const flushEvery = time.Millisecond

// Flush waits until all that is to go into the tunnel has been collected, or ctx
// is done.
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

// Deliver takes IP packets that came out of the tunnel; the memory stays the
// caller's. Invalid packets are dropped; one whose hop limit has run out is answered.
// Segments of a connection that follow each other go through the stack as one.
func (s *Stack) Deliver(packets ...[]byte) {
	var merged *gro.GRO // nil: there is only one packet
	if len(packets) > 1 {
		merged = mergers.Get().(*gro.GRO)
		merged.Dispatcher = s.wire
	}
	for _, p := range packets {
		p, v := inspectPacket(p)
		s.received.Add(uint64(len(p)))
		if v == notice {
			if v = unfounded; s.errorIsFounded(p) {
				v = valid
			}
		}
		if v <= unchecked && s.hopLimitIsSpent(p) {
			v = expired
		}
		if v > unchecked {
			s.dropped[v].Add(1)
			if v == expired {
				s.sendTimeExceeded(p)
			}
			continue
		}
		if v == valid && s.asked.Load() > 0 {
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

// mergers are empty between uses. Flush takes only the first packet off each of their
// lists, which have at most mergerDepth.
var mergers = sync.Pool{New: func() any {
	g := new(gro.GRO)
	g.Init(true)
	return g
}}

const mergerDepth = 8

// Counts are counters of a stack since its start.
type Counts struct {
	Lost       uint64 // packets towards the tunnel for which the queue had no room
	Handshakes uint64 // SYNs dropped beyond Config.Handshakes
	Stalls     uint64 // how often a connection had stopped retransmitting, and was made to go on
	// Packets that came out of the tunnel and were dropped: no IP packet or a truncated
	// one, a wrong checksum, TCP flags that no sender uses together, and a hop limit
	// that had run out.
	Malformed, Damaged, Senseless, Expired uint64
}

// Counts returns the counters.
func (s *Stack) Counts() Counts {
	stats := s.net.Stats()
	return Counts{
		Lost: s.wire.drops.Load(), Handshakes: s.requests.dropped.Load(), Stalls: s.stalls.Load(),
		Malformed: s.dropped[malformed].Load(), Senseless: s.dropped[senseless].Load(), Expired: s.dropped[expired].Load(),
		Damaged: s.dropped[damaged].Load() + stats.TCP.ChecksumErrors.Value() + stats.UDP.ChecksumErrors.Value(),
	}
}

// Traffic counts the bytes of the packets that came out of the tunnel and that
// were collected for it, their headers included.
func (s *Stack) Traffic() (received, collected uint64) {
	return s.received.Load(), s.collected.Load()
}

// Close aborts every connection and ends the stack.
func (s *Stack) Close() error {
	s.closing.Do(func() {
		close(s.closed)
		s.Abort()
		s.poller.stopAndWait()
		s.net.Destroy()
		s.wire.Close()
	})
	return nil
}

// addrPortOf turns an address and a port of the stack into a netip.AddrPort.
func addrPortOf(a tcpip.Address, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return netip.AddrPortFrom(addr.Unmap(), port)
}

var errNotAdmitted = errors.New("the handshake has not been answered yet")
