package alcc

import (
	"context"
	"fmt"
	"net"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Wrap puts a TCP connection under a congestion controller. It takes conn over: only the returned Conn may be used from
// then on. A connection that cannot be controlled here passes through, and Stats.Missing says why. Errors are those of
// opts, and of a conn that is no TCP connection; the caller then still has conn.
func Wrap(conn net.Conn, opts Options) (*Conn, error) {
	s, err := opts.check()
	if err != nil {
		return nil, err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return nil, notTCP(conn)
	}
	return s.wrap(tcp), nil
}

// notTCP says what to do with a connection that is not of TCP.
func notTCP(conn net.Conn) error {
	if below, ok := conn.(interface{ NetConn() net.Conn }); ok {
		return fmt.Errorf("alcc: a %T stands above the connection: wrap its %T, and put it above that", conn, below.NetConn())
	}
	return fmt.Errorf("alcc: a %T is no *net.TCPConn", conn)
}

// wrap puts a connection under the algorithm, as far as this machine allows it.
func (s *settings) wrap(conn *net.TCPConn) *Conn {
	if !s.isManaged() {
		return passThrough(conn, "")
	}
	e, err := sharedEngine()
	if err == nil {
		err = e.reachAgent(s)
	}
	if err != nil {
		return passThrough(conn, err.Error())
	}
	c, err := e.manage(conn, s)
	if err != nil {
		return passThrough(conn, err.Error())
	}
	return c
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
// Errors are those of opts, and of an ln that is no TCP listener.
func NewListener(ln net.Listener, opts Options) (net.Listener, error) {
	s, err := opts.check()
	if err != nil {
		return nil, err
	}
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return nil, fmt.Errorf("alcc: a %T is no *net.TCPListener; listeners such as tls.NewListener stand above", ln)
	}
	return &listener{tcp, s}, nil
}

// listener is a TCP listener with controlled connections.
type listener struct {
	*net.TCPListener
	settings *settings
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return l.settings.wrap(conn), nil
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
	s, err := d.Options.check()
	if err != nil {
		return nil, err
	}
	conn, err := d.Dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		_ = conn.Close()
		return nil, notTCP(conn)
	}
	return s.wrap(tcp), nil
}
