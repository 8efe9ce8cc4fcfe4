// Package tunnel ends VPN tunnels: it takes IP packets out of them, whatever
// carried them here, and gives the connections that are in these packets to the
// proxy as any other ingress would, each with the peer it came from.
//
//	peer ══ WireGuard, TUN device, MASQUE ══▶ link ──▶ netstack ──▶ listener ──▶ proxy
package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// Inside is whose the addresses inside a tunnel are.
type Inside interface {
	// Peer returns the name of the peer that an inner address is of; empty:
	// nobody's.
	Peer(inner netip.Addr) string
	// Place returns what an address is to the tunnel.
	Place(netip.Addr) Place
	// Gateway returns the gateway's own address of the prefix that an inner one is
	// in; invalid: it has none there.
	Gateway(inner netip.Addr) netip.Addr
	// Own returns an address of the gateway inside that is of the same family;
	// invalid: it has none.
	Own(like netip.Addr) netip.Addr
}

// Outside is what carries a tunnel's packets.
type Outside interface {
	Inside
	// Addr is where peers reach us; nil where they do not by themselves.
	Addr() net.Addr
	// Requests are connections that come beside the packets; nil: none do.
	Requests() <-chan datapath.Conn
	// Forward hands over who forwards datagrams that come beside the packets.
	Forward(*Datagrams)
	// Apply puts into force what of the settings is its kind's; an error changes
	// nothing.
	Apply(Settings) error
	// Resume has peers found where a process before this one heard from them last.
	Resume(map[access.Key]netip.AddrPort)
	// Report adds to a status what it knows itself.
	Report(*Status) error
	// Health says why no packets come or go at present; nil: they do. What has
	// failed is opened again by itself.
	Health() error
	// Drain takes nobody further in; packets and streams go on.
	Drain()
	// Close sends what it has been given, and ends.
	Close() error
}

// Settings are what may change of a tunnel while it runs.
type Settings struct {
	Datagrams   access.Datagrams
	Pool        []netip.Prefix  // WireGuard's: where its peers' addresses are from
	Peers       []access.Peer   // WireGuard's
	Tokens      []access.Token  // MASQUE's, as is the rest
	Certificate tls.Certificate // for clients that come from now on
	Authorities *x509.CertPool  // likewise; nil: certificates are not asked for
}

// Listener is a tunnel as the proxy sees it.
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

var _ ingress.Listener = (*Listener)(nil)

// Listen makes an ingress of a tunnel. It owns both; Close ends them.
func Listen(name string, stack *netstack.Stack, outside Outside) *Listener {
	l := &Listener{name: name, stack: stack, outside: outside, drained: make(chan struct{})}
	stack.SetGateway(outside.Gateway)
	if l.streams = outside.Requests(); l.streams != nil {
		l.packets = make(chan datapath.Conn)
		l.done.Go(l.pass)
	}
	return l
}

// pass moves what the stack accepts to where Accept waits for streams too.
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

// Forward has the tunnel's datagrams forwarded; once, before the first Accept.
func (l *Listener) Forward(cfg access.Datagrams, with Forwarding) {
	with.Listener, with.Inside = l.name, l.outside
	l.forward = ForwardDatagrams(l.stack, cfg, with)
	l.outside.Forward(l.forward)
}

// Apply puts settings into force; an error changes nothing.
func (l *Listener) Apply(s Settings) error {
	if err := l.outside.Apply(s); err != nil {
		return fmt.Errorf("tunnel: listener %q: %w", l.name, err)
	}
	if l.forward != nil {
		l.forward.Configure(s.Datagrams)
	}
	return nil
}

// Accept implements ingress.Listener.
func (l *Listener) Accept() (datapath.Conn, error) {
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
	if l.forward == nil || to.Port() != dnsPort || l.outside.Place(to.Addr()) != OfGateway {
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

// Resume has peers found where a process before this one heard from them last: they
// are sent to at once, and need not find out by themselves that it has gone.
func (l *Listener) Resume(at map[access.Key]netip.AddrPort) { l.outside.Resume(at) }

// Status is how it goes with a tunnel.
type Status struct {
	Received, Sent uint64 // bytes of inner packets that came out of it and went into it
	Refused        uint64 // packets that were no peer's, or not from the peer's addresses
	Lost           uint64 // packets to peers that the queue had no room for
	Handshakes     uint64 // SYNs dropped, since as many waited as may
	Stalls         uint64 // how often a connection had stopped retransmitting, and was made to go on
	// Packets that came out of it and were dropped: shorter than they said, with a
	// wrong checksum, with TCP flags that make no sense, and those whose hop limit had
	// run out.
	Malformed, Damaged, Senseless, Expired uint64
	Peers                                  []PeerState
	Sessions                               []SessionState     // CONNECT-IP's
	Clients                                map[string]Traffic // by all CONNECT-IP sessions of a peer, past ones too
	Datagrams                              DatagramStats
}

// Status returns how it goes; peers are of those tunnels that know them.
func (l *Listener) Status() (Status, error) {
	var s Status
	s.Received, s.Sent = l.stack.Traffic()
	c := l.stack.Counts()
	s.Lost, s.Handshakes, s.Stalls = c.Lost, c.Handshakes, c.Stalls
	s.Malformed, s.Damaged, s.Senseless, s.Expired = c.Malformed, c.Damaged, c.Senseless, c.Expired
	if l.forward != nil {
		s.Datagrams = l.forward.Stats()
	}
	return s, l.outside.Report(&s)
}
