//go:build linux

package netlab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
)

// Listen listens inside the node; the listener works from any goroutine.
// address is an IP literal with a port, or ":port" for every address.
func (n *Node) Listen(network, address string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return n.ListenWith(&lc, network, address)
}

// ListenWith is Listen with the caller's options.
func (n *Node) ListenWith(lc *net.ListenConfig, network, address string) (ln net.Listener, err error) {
	err = n.Do(func() error {
		ln, err = lc.Listen(context.Background(), network, address)
		return err
	})
	return ln, err
}

// Dial connects from inside the node.
func (n *Node) Dial(network, address string) (net.Conn, error) {
	return n.DialContext(context.Background(), network, address)
}

// DialContext connects from inside the node; it fits http.Transport.
func (n *Node) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	d.SetMultipathTCP(false)
	return n.DialWith(ctx, &d, network, address)
}

// DialWith is DialContext with the caller's options. address must be an IP
// literal with a port: a name would be resolved, and raced, by goroutines that
// are not in the namespace.
func (n *Node) DialWith(ctx context.Context, d *net.Dialer, network, address string) (conn net.Conn, err error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("netlab: dial from %s: want an IP address and port: %w", n.name, err)
	}
	err = n.Do(func() error {
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}
