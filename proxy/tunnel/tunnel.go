// Package tunnel ends VPN tunnels: it takes IP packets out of them, whatever
// carried them here, and gives the connections that are in these packets to the
// proxy as any other ingress would, each with the peer it came from.
//
//	peer ══ WireGuard, TUN device, MASQUE ══▶ link ──▶ netstack ──▶ listener ──▶ proxy
package tunnel

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// Outside is what carries a tunnel's packets.
type Outside interface {
	// Peer returns the name of the peer that an inner address is of; empty:
	// nobody's.
	Peer(inner netip.Addr) string
	// Addr is where peers reach us; nil where they do not by themselves.
	Addr() net.Addr
	Close() error
}

// listener is a tunnel as the proxy sees it.
type listener struct {
	name    string
	stack   *netstack.Stack
	outside Outside
	once    sync.Once
	err     error
}

// Listen makes an ingress of a tunnel. It owns both; Close ends them.
func Listen(name string, stack *netstack.Stack, outside Outside) ingress.Listener {
	return &listener{name: name, stack: stack, outside: outside}
}

// Accept implements ingress.Listener.
func (l *listener) Accept() (datapath.Conn, error) {
	c, err := l.stack.Accept()
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: %w", l.name, err)
	}
	return c, nil
}

// Greet implements ingress.Listener. The SYN is answered only by Answer, once
// there is a server.
func (l *listener) Greet(ctx context.Context, conn datapath.Conn) (ingress.Client, error) {
	c, ok := conn.(*netstack.Conn)
	if !ok {
		return ingress.Client{}, fmt.Errorf("tunnel: listener %q: a connection of another kind: %T", l.name, conn)
	}
	return ingress.Client{
		Conn: c, Listener: l.name, Source: c.Source(), Target: c.Target(), Peer: l.outside.Peer(c.Source().Addr()),
		Answer: func(_ netip.AddrPort, err error) error {
			if err != nil {
				return c.Reset()
			}
			return c.Admit(context.WithoutCancel(ctx))
		},
	}, nil
}

// Addr implements ingress.Listener.
func (l *listener) Addr() net.Addr { return l.outside.Addr() }

// Close implements ingress.Listener.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.err = l.outside.Close()
		if err := l.stack.Close(); l.err == nil {
			l.err = err
		}
	})
	return l.err
}
