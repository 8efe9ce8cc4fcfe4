package traffic

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/netlab"
)

const (
	outsidePort   = 7001
	dialTimeout   = 30 * time.Second
	datagramsIdle = 2 * time.Minute // a flow of datagrams ends after this time without any
	mostDatagrams = 4096            // flows of datagrams at once; packets of further ones are dropped
	mostEarly     = 16              // datagrams that a flow keeps until its socket is open
	largest       = 64 << 10        // bytes of a datagram
	resolverPort  = 53
)

// ResolverFile names the machine's resolvers.
const ResolverFile = "/etc/resolv.conf"

// Outside stands for the world in an emulated network: it ends the connections and flows of datagrams that come to
// one node, for whatever address, and goes on with them from this process, in the machine's own network. It needs no
// rights there. The addresses of Host are the machine's own loopback addresses.
type Outside struct {
	Host netlab.Addrs
	// Resolver is for the emulated network in place of the machine's /etc/resolv.conf, where that names a resolver on
	// the machine itself. Empty: the machine's serves there, too.
	Resolver string
	// IPv6 says that the machine has a way to IPv6 addresses.
	IPv6 bool

	node      *netlab.Node
	resolver  netip.Addr // on the machine itself
	streams   *Server
	datagrams *net.UDPConn
	done      sync.WaitGroup

	conns connections // of flows, both sides
	mu    sync.Mutex
	flows map[[2]netip.AddrPort]chan []byte // datagrams that came before the flow's own socket, by client and target
}

// ServeOutside starts at the server of a network, where the kernel's algorithm sends towards the clients.
func ServeOutside(lab *netlab.Routed, algorithm string) (*Outside, error) {
	o := &Outside{
		Host: lab.ServerAddr, node: lab.Server, resolver: netip.MustParseAddr("127.0.0.1"),
		flows: map[[2]netip.AddrPort]chan []byte{},
	}
	o.readResolver()
	if probe, err := net.Dial("udp6", "[2001:db8::1]:9"); err == nil { // which sends nothing
		o.IPv6 = true
		_ = probe.Close() // nothing was sent
	}
	if err := o.node.Catch(netlab.FarDevice, outsidePort); err != nil {
		return nil, err
	}
	address := fmt.Sprintf("[::]:%d", outsidePort)
	var err error
	control := func(network, address string, c syscall.RawConn) error {
		return errors.Join(Control(algorithm)(network, address, c), transparent(network, address, c))
	}
	if o.streams, err = serve(o.node, "tcp", address, control, o.forward); err != nil {
		return nil, err
	}
	err = o.node.Do(func() error {
		lc := net.ListenConfig{Control: transparent}
		socket, err := lc.ListenPacket(context.Background(), "udp", address)
		if err == nil {
			o.datagrams, _ = socket.(*net.UDPConn) // it is one
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(err, o.streams.Close())
	}
	o.done.Go(o.acceptDatagrams)
	return o, nil
}

// readResolver makes Resolver of the machine's configuration. glibc asks 127.0.0.1 where none is named.
func (o *Outside) readResolver() {
	text, err := os.ReadFile(ResolverFile)
	if err != nil {
		return // there is nothing to cover, either
	}
	named, loopback := false, false
	var lines []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			lines = append(lines, line)
			continue
		}
		named = true
		addr, err := netip.ParseAddr(fields[1])
		if err != nil || !addr.IsLoopback() {
			lines = append(lines, line)
		} else if !loopback {
			loopback, o.resolver = true, addr
		}
	}
	if loopback || !named {
		o.Resolver = fmt.Sprintf("nameserver %s\n%s", o.Host.V4, strings.Join(lines, ""))
	}
}

// target returns where this process finds what the clients know by an address.
func (o *Outside) target(asked netip.AddrPort) string {
	asked = netip.AddrPortFrom(asked.Addr().Unmap(), asked.Port())
	switch {
	case asked.Addr() != o.Host.V4 && asked.Addr() != o.Host.V6:
		return asked.String()
	case asked.Port() == resolverPort:
		return netip.AddrPortFrom(o.resolver, resolverPort).String()
	case asked.Addr() == o.Host.V6:
		return netip.AddrPortFrom(netip.IPv6Loopback(), asked.Port()).String()
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), asked.Port()).String()
}

// forward joins a client's connection to one of this process. Where that fails, the client's is reset.
func (o *Outside) forward(near net.Conn) {
	asked, _ := near.LocalAddr().(*net.TCPAddr) // it is one
	far, err := net.DialTimeout("tcp", o.target(asked.AddrPort()), dialTimeout)
	if err != nil {
		reset(near)
		return
	}
	defer far.Close()
	var up sync.WaitGroup
	up.Go(func() { pass(far, near) })
	pass(near, far)
	up.Wait()
}

// pass copies until the end of from, which it passes on; an error ends both.
func pass(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		reset(to)
		reset(from)
	} else if half, ok := to.(*net.TCPConn); ok {
		_ = half.CloseWrite() // the other side may have gone
	}
}

// reset closes a connection so that its peer sees that it was cut.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // it is closed at once
	}
	_ = c.Close() // nothing is left to lose
}

// acceptDatagrams begins a flow for each pair of addresses. Later datagrams of the pair come to the flow's socket.
func (o *Outside) acceptDatagrams() {
	data, control := make([]byte, largest), make([]byte, 256)
	for {
		n, oob, _, client, err := o.datagrams.ReadMsgUDPAddrPort(data, control)
		if err != nil {
			return
		}
		client = netip.AddrPortFrom(client.Addr().Unmap(), client.Port())
		asked, ok := originalDestination(control[:oob])
		if pair := [2]netip.AddrPort{client, asked}; ok {
			o.addDatagram(pair, append([]byte(nil), data[:n]...))
		}
	}
}

// addDatagram gives a datagram to its flow, which begins with the first.
func (o *Outside) addDatagram(pair [2]netip.AddrPort, data []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	early, begun := o.flows[pair]
	if !begun {
		if len(o.flows) >= mostDatagrams {
			return
		}
		early = make(chan []byte, mostEarly)
		o.flows[pair] = early
		o.done.Go(func() {
			o.forwardDatagrams(pair, early)
			o.mu.Lock()
			defer o.mu.Unlock()
			delete(o.flows, pair)
			close(early)
		})
	}
	select {
	case early <- data:
	default: // it is lost, as any datagram may be
	}
}

// forwardDatagrams is a flow, until it is idle.
func (o *Outside) forwardDatagrams(pair [2]netip.AddrPort, early <-chan []byte) {
	dialer := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(pair[1]), Control: transparent}
	near, err := o.node.DialWith(context.Background(), &dialer, "udp", pair[0].String())
	if err != nil || !o.conns.keep(near) {
		return
	}
	defer o.conns.end(near)
	far, err := net.Dial("udp", o.target(pair[1]))
	if err != nil || !o.conns.keep(far) {
		return
	}
	defer o.conns.end(far)
	o.done.Go(func() {
		for data := range early {
			_, _ = far.Write(data) // it may be lost, as any datagram
		}
	})
	var up sync.WaitGroup
	up.Go(func() { passDatagrams(far, near) })
	passDatagrams(near, far)
	o.conns.end(near) // which ends the other way
	up.Wait()
}

// passDatagrams copies until from is idle or closed. What the network refuses is lost, as any datagram.
func passDatagrams(to, from net.Conn) {
	data := make([]byte, largest)
	for {
		_ = from.SetReadDeadline(time.Now().Add(datagramsIdle)) // a closed one ends the loop below
		n, err := from.Read(data)
		switch {
		case errors.Is(err, unix.ECONNREFUSED):
			continue
		case err != nil:
			return
		}
		_, _ = to.Write(data[:n])
	}
}

// Close ends all connections and flows.
func (o *Outside) Close() error {
	o.conns.close()
	err := errors.Join(o.streams.Close(), o.datagrams.Close())
	o.done.Wait()
	return err
}

// originalDestination reads which address a caught datagram was sent to, out of its control messages.
func originalDestination(control []byte) (netip.AddrPort, bool) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.AddrPort{}, false
	}
	for i := range messages {
		switch sa, err := unix.ParseOrigDstAddr(&messages[i]); sa := sa.(type) {
		case *unix.SockaddrInet4:
			return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), err == nil
		case *unix.SockaddrInet6:
			return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port)), err == nil
		}
	}
	return netip.AddrPort{}, false
}

// transparent lets a socket have any address, and say which one a datagram was for.
func transparent(network, _ string, c syscall.RawConn) error {
	var errs []error
	err := c.Control(func(fd uintptr) {
		set := func(level, option int) { errs = append(errs, unix.SetsockoptInt(int(fd), level, option, 1)) }
		set(unix.SOL_SOCKET, unix.SO_REUSEADDR)
		set(unix.SOL_IP, unix.IP_TRANSPARENT)
		if strings.HasPrefix(network, "udp") {
			set(unix.SOL_IP, unix.IP_RECVORIGDSTADDR)
		}
		if network == "udp6" {
			set(unix.SOL_IPV6, unix.IPV6_RECVORIGDSTADDR)
		}
	})
	return errors.Join(err, errors.Join(errs...))
}
