// Package ingress holds the ways a client's connection reaches the proxy:
// captured transparently, or asked for with an explicit protocol.
package ingress

import (
	"context"
	"net"
	"net/netip"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Listener takes connections in two steps, so that a client that is slow to
// say what it wants never delays the next one.
type Listener interface {
	// Accept returns the next connection, not yet understood.
	Accept() (datapath.Conn, error)

	// Greet finds out where the connection is meant to go. It runs on the
	// connection's own goroutine, and ctx bounds it. On an error it has told
	// the client what the protocol allows and closed the connection.
	Greet(ctx context.Context, conn datapath.Conn) (Client, error)

	Addr() net.Addr
	Close() error
}

// Client is the client leg, and where it meant to go.
type Client struct {
	datapath.Conn
	Listener string
	Source   netip.AddrPort // the client's own address: from PROXY protocol where it was used
	Target   netip.AddrPort // invalid when the client named a Host
	Host     string         // "name:port" when the client named it

	// Answer tells the client how the dial went, in its protocol: bound is the
	// local address of the server leg, err why there is none. Call it once.
	// After an error the connection is closed: with RST where it was captured,
	// since its handshake was answered before the dial could be tried.
	Answer func(bound netip.AddrPort, err error) error
}
