package ingress

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Bounds of what a client may make us read and hold before its destination is known, in bytes.
const (
	inputBuffer  = 4096        // read at once
	maxHandshake = 4096        // SOCKS5: its longest messages are of 255+2, 513 and 262 bytes
	maxAuthority = 300         // longer than any name or address with a port
	lingerTime   = time.Second // for a refused client to take its answer
	lingerBytes  = 256 << 10   // of unread input thrown away meanwhile
)

// expired is a deadline in the past.
var expired = time.Unix(1, 0)

var errTooLong = errors.New("handshake too long")

// input reads what a client sends in a handshake, buffered and up to a bound.
type input struct {
	*bufio.Reader
	conn  datapath.Conn
	left  int    // bytes that may still be read from conn
	err   error  // that conn's Read returned, or errTooLong
	ahead []byte // what the server is sent before the bytes in the buffer
}

func newInput(conn datapath.Conn) *input {
	in := &input{conn: conn, left: maxHandshake}
	in.Reader = bufio.NewReaderSize(source{in}, inputBuffer)
	return in
}

// source is the reader from which input's buffer is filled.
type source struct{ in *input }

func (s source) Read(b []byte) (int, error) {
	if s.in.left <= 0 {
		s.in.err = errTooLong
		return 0, errTooLong
	}
	n, err := s.in.conn.Read(b[:min(len(b), s.in.left)])
	s.in.left -= n
	if err != nil {
		s.in.err = err
	}
	return n, err
}

// remainingConn is the connection for the relay: it begins with what was read beyond the handshake.
func (in *input) remainingConn(exchange *Exchange) datapath.Conn {
	early, _ := in.Peek(in.Buffered())
	if len(in.ahead)+len(early) == 0 {
		return in.conn
	}
	return &prefixed{Conn: in.conn, rest: slices.Concat(in.ahead, early), exchange: exchange}
}

// Prompt implements Listener.
func (l *Socket) Prompt(conn datapath.Conn) bool { return l.arrivalOf(conn).by.isPrompt(conn) }

func (l *greeter) isPrompt(conn datapath.Conn) bool {
	return !l.cfg.Mode.Asks() && !l.trustsPeer(addrPort(conn.RemoteAddr()).Addr())
}

// Greet implements Listener.
func (l *Socket) Greet(ctx context.Context, conn datapath.Conn) (Client, error) {
	a := l.arrivalOf(conn)
	return a.by.greetClient(ctx, a.Conn, a.original)
}

// greeter runs the handshakes of a listener's clients by one configuration. It is never changed;
// Apply puts another in its place.
type greeter struct {
	cfg     Config
	users   users
	guesses *Guesses       // the listener's
	target  netip.AddrPort // of mode forward; invalid where host is set
	host    string         // likewise, "name:port"
	self    netip.AddrPort // where we listen; unspecified: every local address
}

func newGreeter(cfg Config, self netip.AddrPort, guesses *Guesses) (*greeter, error) {
	if cfg.HandshakeTimeout == 0 {
		cfg.HandshakeTimeout = defaultHandshakeTimeout
	}
	g := &greeter{cfg: cfg, users: newUsers(cfg.Auth), self: self, guesses: guesses}
	if cfg.Mode != access.Forward {
		return g, nil
	}
	host, port, err := net.SplitHostPort(cfg.Target)
	if err == nil {
		g.target, g.host, err = destinationOf(host, port)
	}
	if err != nil {
		return nil, fmt.Errorf("target %q: %w", cfg.Target, err)
	}
	return g, nil
}

func (l *greeter) greetClient(ctx context.Context, conn datapath.Conn, original netip.AddrPort) (Client, error) {
	if l.isPrompt(conn) { // nothing is read, so nothing waits
		client, err := l.runHandshake(ctx, conn, original)
		if err != nil {
			_ = conn.Reset()
			return Client{}, fmt.Errorf("ingress: listener %q: %w", l.cfg.Name, err)
		}
		return client, nil
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.HandshakeTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(expired) })

	client, err := l.runHandshake(ctx, conn, original)
	if err != nil {
		if l.cfg.Mode.Asks() {
			_ = closeAfterAnswer(conn)
		} else {
			_ = conn.Reset()
		}
		stop()
		if ctx.Err() != nil {
			err = errors.Join(context.Cause(ctx), err)
		}
		return Client{}, fmt.Errorf("ingress: listener %q: %w", l.cfg.Name, err)
	}
	if !stop() { // the deadline is set or about to be
		_ = conn.Reset()
		return Client{}, fmt.Errorf("ingress: listener %q: %w", l.cfg.Name, context.Cause(ctx))
	}
	return client, nil
}

// runHandshake runs the handshake of the listener's mode. Where it fails the
// client has its answer, if the protocol has one, and the connection is open.
func (l *greeter) runHandshake(ctx context.Context, conn datapath.Conn, original netip.AddrPort) (Client, error) {
	c := Client{Conn: conn, Listener: l.cfg.Name, Source: addrPort(conn.RemoteAddr())}
	var in *input
	if l.trustsPeer(c.Source.Addr()) {
		in = newInput(conn)
		told, err := readProxyHeader(in)
		if err != nil {
			return c, err
		}
		if told.source.IsValid() {
			c.Source, c.cameTo = told.source, &told.destination
		}
	}
	var err error
	switch l.cfg.Mode {
	case access.TPROXY:
		err = l.setCapturedTarget(&c, addrPort(conn.LocalAddr()))
	case access.Redirect:
		err = l.setCapturedTarget(&c, original)
	case access.Forward:
		c.Target, c.Host, c.Fixed, c.Answer = l.target, l.host, true, answerWithReset(conn)
	default:
		if in == nil {
			in = newInput(conn)
		}
		switch l.cfg.Mode {
		case access.SOCKS5:
			err = l.serveSOCKS5(ctx, in, &c)
		case access.Connect:
			err = l.serveHTTP(ctx, in, &c)
		default:
			err = l.serveMixed(ctx, in, &c)
		}
	}
	if err != nil {
		return c, err
	}
	if in != nil {
		c.Conn = in.remainingConn(c.Exchange)
	}
	return c, nil
}

func (l *greeter) trustsPeer(peer netip.Addr) bool {
	for _, p := range l.cfg.TrustedProxies {
		if p.Contains(peer) {
			return true
		}
	}
	return false
}

// setCapturedTarget sets the destination of a connection whose client did not ask.
func (l *greeter) setCapturedTarget(c *Client, target netip.AddrPort) error {
	if !target.IsValid() {
		return fmt.Errorf("%s: no original destination: the connection came here without a capture rule", l.cfg.Mode)
	}
	if l.reachesSelf(target) {
		return fmt.Errorf("%s: destination %v is this listener: dialling it would loop", l.cfg.Mode, target)
	}
	c.Target, c.Answer = target, answerWithReset(c.Conn)
	return nil
}

// reachesSelf reports whether dialling target would reach this listener, which would
// dial it again, without end.
func (l *greeter) reachesSelf(target netip.AddrPort) bool {
	if target.Port() != l.self.Port() {
		return false
	}
	if !l.self.Addr().IsUnspecified() {
		return target.Addr() == l.self.Addr()
	}
	if target.Addr().IsLoopback() || target.Addr().IsUnspecified() {
		return true
	}
	local, err := new(Routes).Local(target.Addr()) // rarely: it is for our very port
	return err != nil || local                     // cannot tell: a refused connection is cheaper than a loop
}

// answerWithReset is Answer for clients that speak no protocol with us: their
// handshake was completed by the kernel, and RST is the only refusal left.
func answerWithReset(conn datapath.Conn) func(netip.AddrPort, error) error {
	return func(_ netip.AddrPort, err error) error {
		if err == nil {
			return nil
		}
		return conn.Reset()
	}
}

// closeAfterAnswer closes conn once the client has had time to read the answer just written: to close it with
// unread input sends RST, at which the client drops the answer.
func closeAfterAnswer(conn datapath.Conn) error {
	if conn.CloseWrite() == nil {
		timer := time.AfterFunc(lingerTime, func() { _ = conn.SetReadDeadline(expired) })
		_, _ = io.CopyN(io.Discard, conn, lingerBytes)
		timer.Stop()
	}
	return conn.Close()
}

// Destination reads "host:port" as a client asks for it: an address, or a name
// with its port.
func Destination(authority string) (netip.AddrPort, string, error) {
	if len(authority) > maxAuthority {
		return netip.AddrPort{}, "", fmt.Errorf("host and port of %d bytes", len(authority))
	}
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	return destinationOf(host, port)
}

// destinationOf makes an address or a "name:port" of what a client asked for. An address that a client
// sends in the place of a name is an address, so that policy's rules for addresses apply.
func destinationOf(host, port string) (netip.AddrPort, string, error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || port[0] == '+' {
		return netip.AddrPort{}, "", fmt.Errorf("port %.8q is not in 1..65535", port)
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return plainAddrPort(netip.AddrPortFrom(addr, uint16(n))), "", nil
	}
	if len(host) == 0 || len(host) > 255 {
		return netip.AddrPort{}, "", fmt.Errorf("host name of %d bytes", len(host))
	}
	if !access.HostBytes(host) {
		return netip.AddrPort{}, "", fmt.Errorf("host name %q has a byte that no host name has", host)
	}
	return netip.AddrPort{}, net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}
