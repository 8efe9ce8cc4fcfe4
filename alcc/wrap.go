package alcc

import (
	"context"
	"fmt"
	"net"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Wrap puts a connection under a congestion controller. It takes conn over: only the returned Conn may be used from
// then on. A connection that cannot be controlled here passes through, and Stats.Missing says why. Errors are those of
// opts, and of a conn that is no TCP connection where Options.OwnAcks is not set; the caller then still has conn.
func Wrap(conn net.Conn, opts Options) (*Conn, error) {
	s, err := opts.resolve()
	if err != nil {
		return nil, err
	}
	return s.wrap(conn)
}

// wrap is Wrap with options that have been checked.
func (s *settings) wrap(conn net.Conn) (*Conn, error) {
	tcp, isTCP := conn.(*net.TCPConn)
	switch {
	case s.ownAcks:
		f, err := newFramed(sharedEngine(), conn, s)
		if err != nil {
			return nil, err
		}
		return newConn(f), nil
	case !isTCP:
		return nil, explainNotTCP(conn)
	case !s.isManaged():
		return passThrough(tcp, ""), nil
	}
	e := sharedEngine()
	if e.sockets == nil {
		return passThrough(tcp, e.missing), nil
	}
	if err := e.reachAgent(s); err != nil {
		return passThrough(tcp, err.Error()), nil
	}
	c, err := e.manage(tcp, s)
	if err != nil {
		return passThrough(tcp, err.Error()), nil
	}
	return c, nil
}

// explainNotTCP says what to do with a connection that is not of TCP.
func explainNotTCP(conn net.Conn) error {
	if below, ok := conn.(interface{ NetConn() net.Conn }); ok {
		return fmt.Errorf("alcc: a %T stands above the connection: wrap its %T, and put it above that", conn,
			below.NetConn())
	}
	return fmt.Errorf("alcc: a %T is no *net.TCPConn; with Options.OwnAcks at both ends it may be any", conn)
}

// passThrough returns a Conn that controls nothing. missing says why.
func passThrough(conn *net.TCPConn, missing string) *Conn {
	c := newConn(plainLeg{conn})
	c.missing = missing
	return c
}

// newConn returns a Conn over a leg, without a flow.
func newConn(l leg) *Conn {
	return &Conn{leg: l, room: make(chan struct{}, 1), deadline: datapath.NewDeadline(), closed: make(chan struct{})}
}

// NewListener returns a listener that puts the connections of ln under a congestion controller. It takes ln over.
// Errors are those of opts, and of an ln that is no TCP listener where Options.OwnAcks is not set.
func NewListener(ln net.Listener, opts Options) (net.Listener, error) {
	s, err := opts.resolve()
	if err != nil {
		return nil, err
	}
	if _, ok := ln.(*net.TCPListener); !ok && !s.ownAcks {
		return nil, fmt.Errorf("alcc: a %T is no *net.TCPListener; listeners such as tls.NewListener stand above", ln)
	}
	return &listener{ln, s}, nil
}

// listener is a listener with controlled connections.
type listener struct {
	net.Listener
	settings *settings
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.settings.wrapOrClose(conn)
}

// wrapOrClose calls wrap, and closes conn if that returns an error.
func (s *settings) wrapOrClose(conn net.Conn) (net.Conn, error) {
	c, err := s.wrap(conn)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return c, nil
}

// Dialer opens connections under a congestion controller. Its zero value is ready to use.
type Dialer struct {
	net.Dialer
	Options Options
}

// Dial is DialContext without a context.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext is net.Dialer's. network is tcp, tcp4 or tcp6.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	s, err := d.Options.resolve()
	if err != nil {
		return nil, err
	}
	conn, err := d.Dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return s.wrapOrClose(conn)
}
