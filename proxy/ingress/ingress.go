// Package ingress accepts clients' connections and finds out where each is meant to go: from the
// kernel where it was captured, or from the client by SOCKS5 or HTTP.
//
// A Socket accepts; its greeter runs the handshake of the listener's mode, and returns a Client.
// The relay dials Client.Target or Client.Host, calls Client.Answer with the outcome, and then
// moves bytes between Client.Detach and the server. Connections of tunnels come by a Listener of
// package tunnel.
//
//	mode              where the destination comes from              read from the client
//	tproxy            the local address of the connection           nothing
//	redirect          conntrack (SO_ORIGINAL_DST)                   nothing
//	forward           the configuration                             nothing
//	socks5            the request (RFC 1928)                        the handshake
//	connect           CONNECT, or a whole http:// URL (RFC 9112)    the head of a request
//	mixed             either, by the first byte                     one of them
//
// Before each, a peer among Config.TrustedProxies sends a PROXY header.
package ingress

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Listener accepts and greets connections in two steps, so that a client that is slow to say what
// it wants never delays the next one.
type Listener interface {
	// Serve calls take for each accepted connection, before its destination is known. It returns
	// an error once it accepts no more: net.ErrClosed after Drain. Where descriptors or memory are
	// short it waits and tries again. take must not block.
	Serve(take func(datapath.Conn)) error

	// Greet finds out where the connection is meant to go. It takes no longer than the configured
	// handshake timeout. Before it returns an error it sends the client the answer that the
	// protocol has for it, and closes the connection.
	//
	// Where a loop drives the connection, Greet does not wait: instead it returns
	// datapath.ErrWait and a Client with nothing but Again. Elsewhere it ends with ctx.
	Greet(ctx context.Context, conn datapath.Conn) (Client, error)

	Addr() net.Addr

	// Health says why clients do not reach the listener at present; nil: they do.
	Health() error

	// Drain ends accepting. Accepted connections continue until Close.
	Drain()

	Close() error
}

// Client is the client leg with its destination.
type Client struct {
	// Conn is the accepted connection. A wrapper returns the bytes first that the client sent
	// behind its handshake (see Detach).
	datapath.Conn
	Source   netip.AddrPort  // the client's own address: from PROXY protocol where it was used
	Target   netip.AddrPort  // invalid when the client named a Host; never with a zone
	Host     string          // "name:port" when the client named it
	Fixed    bool            // Target or Host is the listener's own, and not the client's choice
	Peer     string          // of the tunnel that it came through; empty: through none
	Current  func() bool     // reports whether the Peer still has the Source; nil: its connections end with it
	Hops     uint8           // hop limit of the packets towards the server; 0: the system's default
	cameTo   *netip.AddrPort // the destination in the PROXY header; nil: there was none
	Exchange *Exchange       // bounds what passes behind the early bytes; nil: everything passes

	// Again continues a Greet that has returned datapath.ErrWait. Call it at the next event of
	// the connection. Where the error is a Pause, call it after that time with a ctx that has ended.
	Again func(ctx context.Context) (Client, error)

	// Answer tells the client how the dial went, in its protocol: bound is the local address of
	// the server leg, err why there is none (wrap ErrNotAllowed where policy refused). Call it
	// once, and once more at each event where it returns datapath.ErrWait; where that is a Pause,
	// close the connection after that time. After an error the connection is closed: with RST
	// where it was captured, since its handshake was answered before the dial could be tried.
	Answer func(bound netip.AddrPort, err error) error
}

// CameTo returns the address that the client connected to, from PROXY protocol where it was used;
// invalid: it is not known.
func (c Client) CameTo() netip.AddrPort {
	if c.cameTo != nil {
		return *c.cameTo
	}
	return datapath.LocalOf(c.Conn)
}

// Detach returns the bytes that the client sent behind its handshake, already read from the
// connection, and the transport's connection itself. A relay writes early to the server first and
// then works on conn, which it may splice unless there is an Exchange. Without Detach, Read
// returns the early bytes before any others. A byte comes out only once, through the one way or
// the other.
func (c Client) Detach() (early []byte, conn datapath.Conn) {
	if p, ok := c.Conn.(*prefixed); ok {
		early, p.rest = p.rest, nil
		return early, p.Conn
	}
	return nil, c.Conn
}

// prefixed is a connection that begins with rest: those bytes have been read already.
type prefixed struct {
	datapath.Conn
	rest     []byte
	exchange *Exchange // bounds what is read behind rest; nil: no bound
}

// Read implements net.Conn.
func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.rest) == 0 && p.exchange != nil {
		return p.exchange.RequestFrom(p.Conn).Read(b)
	}
	if len(p.rest) == 0 {
		return p.Conn.Read(b)
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// ErrNotAllowed is wrapped by the error given to Answer when policy refused the destination.
// SOCKS5 and HTTP have an answer of their own for it.
var ErrNotAllowed = errors.New("destination not allowed")
