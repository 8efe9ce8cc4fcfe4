// Package userspace ends VPN tunnels in this process: it takes IP packets out of them, whatever
// carried them here, and gives the connections that are in these packets to the
// proxy as any other ingress would, each with the peer it came from.
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

// flushWithin is for how long what is sent at the very end may take to leave. Neither
// WireGuard nor QUIC tells when it has.
const flushWithin = 100 * time.Millisecond

// linger waits for what has just been sent to leave.
func linger() {
	timer := time.NewTimer(flushWithin)
	defer timer.Stop()
	<-timer.C
}

// Outside is what carries a tunnel's packets.
type Outside interface {
	tunnel.Inside
	// Addr is where peers reach us; nil where they do not by themselves.
	Addr() net.Addr
	// Requests are connections that come beside the packets; nil: none do.
	Requests() <-chan datapath.Conn
	// Forward hands over who forwards datagrams that come beside the packets.
	Forward(*Datagrams)
	// Apply puts into force what of the settings is its kind's; an error changes
	// nothing.
	Apply(tunnel.Settings) error
	// Resume has peers found where a process before this one heard from them last.
	Resume(map[access.Key]netip.AddrPort)
	// Yield makes room for another tunnel until retake.
	Yield() (retake func(), err error)
	// Report adds to a status what it knows itself.
	Report(*tunnel.Status) error
	// Health says why no packets come or go at present; nil: they do. What has
	// failed is opened again by itself.
	Health() error
	// Drain takes nobody further in; packets and streams go on.
	Drain()
	// Close sends what it has been given, and ends.
	Close() error
}

// Listener implements tunnel.Listener by a stack that terminates TCP.
type Listener struct {
	name    string
	stack   *netstack.Stack
	outside Outside
	streams <-chan datapath.Conn // that come beside the packets; nil: none do
	packets chan datapath.Conn   // what the stack accepts, where there are streams too
	drained chan struct{}
	drain   sync.Once
	done    sync.WaitGroup
	forward *Datagrams // nil: datagrams end here
	once    sync.Once
	err     error
}

var _ tunnel.Listener = (*Listener)(nil)

// Listen makes an ingress of a tunnel. It owns both; Close ends them.
func Listen(name string, stack *netstack.Stack, outside Outside) *Listener {
	l := &Listener{name: name, stack: stack, outside: outside, drained: make(chan struct{})}
	stack.SetGateway(outside.Gateway)
	stack.SetPeer(outside.Peer)
	if l.streams = outside.Requests(); l.streams != nil {
		l.packets = make(chan datapath.Conn)
		l.done.Go(l.pass)
	}
	return l
}

// pass moves what the stack accepts to where accept waits for streams too.
func (l *Listener) pass() {
	for {
		c, err := l.stack.Accept()
		if err != nil {
			return
		}
		select {
		case l.packets <- c:
		case <-l.drained:
			c.Leave()
			return
		}
	}
}

// Forward implements tunnel.Listener.
func (l *Listener) Forward(cfg access.Datagrams, with tunnel.Forwarding) {
	l.forward = ForwardDatagrams(l.name, l.stack, l.outside, cfg, with)
	l.outside.Forward(l.forward)
}

// Apply puts settings into force; an error changes nothing.
func (l *Listener) Apply(s tunnel.Settings) error {
	if err := l.outside.Apply(s); err != nil {
		return fmt.Errorf("tunnel: listener %q: %w", l.name, err)
	}
	if l.forward != nil {
		l.forward.Configure(s.Datagrams)
	}
	return nil
}

// Serve implements ingress.Listener.
func (l *Listener) Serve(take func(datapath.Conn)) error {
	for {
		c, err := l.accept()
		if err != nil {
			return err
		}
		take(c)
	}
}

// Prompt implements ingress.Listener: where a connection goes is known, but Answer may wait.
func (l *Listener) Prompt(datapath.Conn) bool { return false }

func (l *Listener) accept() (datapath.Conn, error) {
	if l.streams == nil {
		c, err := l.stack.Accept()
		if err != nil {
			return nil, fmt.Errorf("tunnel: listener %q: %w", l.name, err)
		}
		return c, nil
	}
	select {
	case c := <-l.packets:
		return c, nil
	case c := <-l.streams:
		return c, nil
	case <-l.drained:
		return nil, fmt.Errorf("tunnel: listener %q: accept: %w", l.name, os.ErrClosed)
	}
}

// Greet implements ingress.Listener. The SYN is answered only by Answer, once
// there is a server.
func (l *Listener) Greet(ctx context.Context, conn datapath.Conn) (ingress.Client, error) {
	if r, ok := conn.(*request); ok {
		return r.client(l.name), nil
	}
	c, ok := conn.(*netstack.Conn)
	if !ok {
		return ingress.Client{}, fmt.Errorf("tunnel: listener %q: a connection of another kind: %T", l.name, conn)
	}
	from := c.Source()
	peer := l.outside.Peer(from.Addr())
	return ingress.Client{
		Conn: c, Listener: l.name, Source: from, Target: l.target(c.Target()), Peer: peer, Hops: c.Hops(),
		Current: func() bool { return l.outside.Peer(from.Addr()) == peer },
		Answer: func(_ netip.AddrPort, err error) error {
			if err != nil {
				return c.Reset()
			}
			return c.Admit(context.WithoutCancel(ctx))
		},
	}, nil
}

// target is where what is for an address goes: the name server's, where it is asked for
// at the gateway's own.
func (l *Listener) target(to netip.AddrPort) netip.AddrPort {
	if l.forward == nil || to.Port() != dnsPort || l.outside.Place(to.Addr()) != tunnel.OfGateway {
		return to
	}
	if server := l.forward.cfg.Load().DNS; server.IsValid() {
		return server
	}
	return to
}

// Addr implements ingress.Listener.
func (l *Listener) Addr() net.Addr { return l.outside.Addr() }

// Health implements ingress.Listener.
func (l *Listener) Health() error { return l.outside.Health() }

// Drain implements ingress.Listener. The tunnel carries on, datagrams included; who
// asks for a connection hears nothing, and asks again.
func (l *Listener) Drain() {
	l.drain.Do(func() {
		close(l.drained)
		l.stack.Drain()
		l.outside.Drain()
		for waits := l.streams != nil; waits; {
			select {
			case c := <-l.streams:
				_ = c.Reset() // answered with a refusal
			default:
				waits = false
			}
		}
	})
}

// Close implements ingress.Listener. What is left is reset, and the peers are told
// before the tunnel ends.
func (l *Listener) Close() error {
	l.once.Do(func() {
		l.Drain()
		if l.forward != nil {
			_ = l.forward.Close() // it has none
		}
		l.stack.Abort()
		ctx, cancel := context.WithTimeout(context.Background(), flushWithin)
		l.stack.Flush(ctx)
		cancel()
		l.err = l.outside.Close()
		if err := l.stack.Close(); l.err == nil {
			l.err = err
		}
		l.done.Wait()
	})
	return l.err
}

// Resume implements tunnel.Listener.
func (l *Listener) Resume(at map[access.Key]netip.AddrPort) { l.outside.Resume(at) }

// Yield implements tunnel.Listener.
func (l *Listener) Yield() (retake func(), err error) { return l.outside.Yield() }

// Status implements tunnel.Listener.
func (l *Listener) Status() (tunnel.Status, error) {
	var s tunnel.Status
	s.Received, s.Sent = l.stack.Traffic()
	c := l.stack.Counts()
	s.Lost, s.Handshakes, s.Stalls = c.Lost, c.Handshakes, c.Stalls
	s.Malformed, s.Damaged, s.Senseless, s.Expired = c.Malformed, c.Damaged, c.Senseless, c.Expired
	if l.forward != nil {
		s.Datagrams = l.forward.Stats()
	}
	return s, l.outside.Report(&s)
}
