// Package userspace terminates VPN tunnels in this process: it takes IP packets out of them and
// gives the connections in these packets to the proxy as any other ingress would, each with the
// peer it came from.
//
//	peer ══ WireGuard, TUN device, MASQUE ══▶ link ──▶ netstack ──▶ listener ──▶ proxy
package userspace

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Outside carries a tunnel's packets: a WireGuard endpoint, a MASQUE listener or a TUN device.
type Outside interface {
	tunnel.Inside
	// Addr returns the address that peers send to; nil: there is none.
	Addr() net.Addr
	// Requests returns connections that come beside the packets; nil: none do.
	Requests() <-chan datapath.Conn
	// Forward sets the forwarder of datagrams that come beside the packets.
	Forward(*Datagrams)
	// Apply puts the settings of this kind of tunnel into force. After an error nothing has
	// changed.
	Apply(tunnel.Settings) error
	// Resume sets the addresses at which an earlier process last heard from peers.
	Resume(map[access.Key]netip.AddrPort)
	// Report adds the counters of the tunnel to a status. The stack has added its own.
	Report(*tunnel.Status) error
	// Health returns why no packets come or go at present; nil: they do. The Outside opens what has
	// failed again by itself.
	Health() error
	// Drain accepts no further clients. Packets and streams go on.
	Drain()
	// Close sends what was given to it, and ends the tunnel.
	Close() error
}

// Listener implements tunnel.Listener by a stack that terminates TCP.
type Listener struct {
	name    string
	stack   *netstack.Stack
	outside Outside
	// requests are connections that come beside the packets; nil: none do.
	requests <-chan datapath.Conn
	// stackConns has the stack's connections where there are requests too, so that one select waits
	// for both.
	stackConns chan datapath.Conn
	// drained is closed by Drain.
	drained   chan struct{}
	drainOnce sync.Once
	done      sync.WaitGroup
	// datagrams is nil until Forward. Datagrams end at the stack until then.
	datagrams *Datagrams
	closeOnce sync.Once
	// closeErr is the result of the first Close. closeOnce guards it.
	closeErr error
}

// Listen makes a Listener of a tunnel. It owns stack and outside; Close ends them.
func Listen(name string, stack *netstack.Stack, outside Outside) *Listener {
	l := &Listener{name: name, stack: stack, outside: outside, drained: make(chan struct{})}
	stack.SetGateway(outside.Gateway)
	stack.SetPeer(outside.Peer)
	if l.requests = outside.Requests(); l.requests != nil {
		l.stackConns = make(chan datapath.Conn)
		l.done.Go(l.queueConnections)
	}
	return l
}

// Serve implements ingress.Listener.
func (l *Listener) Serve(take func(datapath.Conn)) error {
	for {
		c, err := l.acceptNext()
		if err != nil {
			return err
		}
		take(c)
	}
}

// acceptNext waits for a connection of the stack or a request. Drain ends the wait.
func (l *Listener) acceptNext() (datapath.Conn, error) {
	if l.requests == nil {
		c, err := l.stack.Accept()
		if err != nil {
			return nil, fmt.Errorf("tunnel: listener %q: %w", l.name, err)
		}
		return c, nil
	}
	select {
	case c := <-l.stackConns:
		return c, nil
	case c := <-l.requests:
		return c, nil
	case <-l.drained:
		return nil, fmt.Errorf("tunnel: listener %q: accept: %w", l.name, os.ErrClosed)
	}
}

// queueConnections moves the stack's connections to stackConns until Drain.
func (l *Listener) queueConnections() {
	for {
		c, err := l.stack.Accept()
		if err != nil {
			return
		}
		select {
		case l.stackConns <- c:
		case <-l.drained:
			c.Leave()
			return
		}
	}
}

// Greet implements ingress.Listener. The stack answers the SYN only in Answer, once there is a
// server. A client that no server accepts then sees a refusal.
func (l *Listener) Greet(ctx context.Context, conn datapath.Conn) (ingress.Client, error) {
	if r, ok := conn.(*request); ok {
		return r.ingressClient(), nil
	}
	c, ok := conn.(*netstack.Conn)
	if !ok {
		return ingress.Client{}, fmt.Errorf("tunnel: listener %q: a connection of another kind: %T", l.name, conn)
	}
	from := c.RemoteAddrPort()
	peer := l.outside.Peer(from.Addr())
	current := func() bool { return l.outside.Peer(from.Addr()) == peer }
	return ingress.Client{
		Conn: c, Source: from, Target: l.targetOf(c.LocalAddrPort()), Peer: peer, Hops: c.Hops(),
		Current: current,
		Answer: func(_ netip.AddrPort, err error) error {
			if err != nil {
				return c.Reset()
			}
			if !current() {
				return fmt.Errorf("tunnel: listener %q: %v has gone while its server was dialled", l.name, peer)
			}
			return c.Admit(context.WithoutCancel(ctx))
		},
	}, nil
}

// targetOf returns the destination of a connection. The DNS port of the gateway's own address leads
// to the configured name server.
func (l *Listener) targetOf(to netip.AddrPort) netip.AddrPort {
	if l.datagrams == nil || to.Port() != dnsPort || l.outside.Place(to.Addr()) != tunnel.OfGateway {
		return to
	}
	if server := l.datagrams.cfg.Load().DNS; server.IsValid() {
		return server
	}
	return to
}

// flushWait is how long Close waits for the last packets to leave. Neither WireGuard nor QUIC
// reports when they have left.
const flushWait = 100 * time.Millisecond

// waitForSending waits flushWait for packets to leave.
func waitForSending() {
	timer := time.NewTimer(flushWait)
	defer timer.Stop()
	<-timer.C
}

var _ tunnel.Listener = (*Listener)(nil)

// Forward implements tunnel.Listener.
func (l *Listener) Forward(cfg access.Datagrams, with tunnel.Forwarding) {
	l.datagrams = forwardDatagrams(l.name, l.stack, l.outside, cfg, with)
	l.outside.Forward(l.datagrams)
}

// Apply puts settings into force; an error changes nothing.
func (l *Listener) Apply(s tunnel.Settings) error {
	if err := l.outside.Apply(s); err != nil {
		return fmt.Errorf("tunnel: listener %q: %w", l.name, err)
	}
	if l.datagrams != nil {
		l.datagrams.Configure(s.Datagrams)
	}
	return nil
}

// Addr implements ingress.Listener.
func (l *Listener) Addr() net.Addr { return l.outside.Addr() }

// Health implements ingress.Listener.
func (l *Listener) Health() error { return l.outside.Health() }

// Drain implements ingress.Listener. The tunnel goes on, with its datagrams. SYNs stay unanswered,
// so that clients send them again, to the next process.
func (l *Listener) Drain() {
	l.drainOnce.Do(func() {
		close(l.drained)
		l.stack.Drain()
		l.outside.Drain()
		for isQueued := l.requests != nil; isQueued; {
			select {
			case c := <-l.requests:
				_ = c.Reset() // the client is sent a refusal
			default:
				isQueued = false
			}
		}
	})
}

// Close implements ingress.Listener. It resets the connections that are left, and waits for the
// RSTs to leave before the tunnel ends.
func (l *Listener) Close() error {
	l.closeOnce.Do(func() {
		l.Drain()
		if l.datagrams != nil {
			_ = l.datagrams.Close() // it has none
		}
		l.stack.Abort()
		ctx, cancel := context.WithTimeout(context.Background(), flushWait)
		l.stack.Flush(ctx)
		cancel()
		l.closeErr = l.outside.Close()
		if err := l.stack.Close(); l.closeErr == nil {
			l.closeErr = err
		}
		l.done.Wait()
	})
	return l.closeErr
}

// Resume implements tunnel.Listener.
func (l *Listener) Resume(at map[access.Key]netip.AddrPort) { l.outside.Resume(at) }

// Status implements tunnel.Listener.
func (l *Listener) Status() (tunnel.Status, error) {
	var s tunnel.Status
	s.Received, s.Sent = l.stack.Traffic()
	c := l.stack.Counts()
	s.Lost, s.Handshakes, s.Stalls = c.Lost, c.Handshakes, c.Stalls
	s.Malformed, s.Damaged, s.Senseless, s.Expired = c.Malformed, c.Damaged, c.Senseless, c.Expired
	if l.datagrams != nil {
		s.Datagrams = l.datagrams.Stats()
	}
	return s, l.outside.Report(&s)
}

// Place implements tunnel.Inside.
func (l *Listener) Place(addr netip.Addr) tunnel.Place { return l.outside.Place(addr) }

// Name implements tunnel.Listener.
func (l *Listener) Name() string { return l.name }

// Peer implements tunnel.Inside.
func (l *Listener) Peer(inner netip.Addr) string { return l.outside.Peer(inner) }

// Gateway implements tunnel.Inside.
func (l *Listener) Gateway(inner netip.Addr) netip.Addr { return l.outside.Gateway(inner) }

// Own implements tunnel.Inside.
func (l *Listener) Own(like netip.Addr) netip.Addr { return l.outside.Own(like) }

// Dial implements tunnel.Listener. A source outside the tunnel is replaced by the gateway's
// address.
func (l *Listener) Dial(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error) {
	if source.Is4() != target.Addr().Is4() || l.outside.Place(source) != tunnel.OfPeer {
		source = l.outside.Gateway(target.Addr())
		if !source.IsValid() { // of a network behind a peer
			source = l.outside.Own(target.Addr())
		}
		if !source.IsValid() {
			return nil, fmt.Errorf("tunnel: listener %q: dial %v: the gateway has no address inside", l.name, target)
		}
	}
	c, err := l.stack.Dial(ctx, source, target)
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: %w", l.name, err) // not a nil *netstack.Conn in an interface
	}
	return c, nil
}
