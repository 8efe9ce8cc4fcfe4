package ingress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// greeter runs the handshakes of a listener's clients by one configuration. It is never changed;
// Socket.Apply puts another in its place.
type greeter struct {
	cfg     Config
	users   users
	guesses *Guesses       // the listener's
	target  netip.AddrPort // of mode forward; invalid where host is set
	host    string         // of mode forward: "name:port"; empty where target is set
	self    netip.AddrPort // where we listen; unspecified: every local address
}

// newGreeter returns a greeter of cfg, which validateConfig has accepted. self is where the
// listener listens.
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

// isPrompt reports whether the handshake of conn reads nothing from the client.
func (l *greeter) isPrompt(conn datapath.Conn) bool {
	return !l.cfg.Mode.Asks() && !l.trustsPeer(addrPort(conn.RemoteAddr()).Addr())
}

// greetClient runs the handshake within the timeout. On an error it closes conn, with RST where
// the protocol has no answer.
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

// runHandshake runs the handshake of the listener's mode. Where it fails the client has its
// answer, if the protocol has one, and the connection is open.
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

// trustsPeer reports whether a peer must begin with a PROXY header, which is then believed.
func (l *greeter) trustsPeer(peer netip.Addr) bool {
	for _, p := range l.cfg.TrustedProxies {
		if p.Contains(peer) {
			return true
		}
	}
	return false
}

// setCapturedTarget sets the destination of a connection that was captured. It refuses a
// destination that would come back to this listener.
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

// reachesSelf reports whether dialling target would reach this listener, which would dial it
// again, without end.
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

// answerWithReset is Answer for clients that speak no protocol with us. The kernel has completed
// their handshake, and RST is the only refusal left.
func answerWithReset(conn datapath.Conn) func(netip.AddrPort, error) error {
	return func(_ netip.AddrPort, err error) error {
		if err == nil {
			return nil
		}
		return conn.Reset()
	}
}

// serveMixed serves SOCKS5 and HTTP on one port. A SOCKS5 client opens with its version, an HTTP
// client with the first letter of a method.
func (l *greeter) serveMixed(ctx context.Context, in *input, c *Client) error {
	first, err := in.Peek(1)
	if err != nil {
		return fmt.Errorf("mixed: %w", err)
	}
	switch b := first[0]; {
	case b == socksVersion:
		return l.serveSOCKS5(ctx, in, c)
	case b >= 'A' && b <= 'Z', b >= 'a' && b <= 'z':
		return l.serveHTTP(ctx, in, c)
	default:
		return fmt.Errorf("mixed: first byte %#02x is neither SOCKS5 nor HTTP", b)
	}
}

// serveSOCKS5 is the server's side of the handshake, up to and without the reply: that is
// Answer's.
//
//	client: version, methods        server: method
//	client: name, password          server: status        (method 2)
//	client: CONNECT address port    server: reply         (after the dial)
func (l *greeter) serveSOCKS5(ctx context.Context, in *input, c *Client) error {
	in.left = maxHandshake
	if err := l.socksMethod(ctx, in, c.Source.Addr()); err != nil {
		return fmt.Errorf("socks5: %w", err)
	}
	host, port, code, err := socksRequest(in)
	if err == nil {
		if c.Target, c.Host, err = destinationOf(host, port); err != nil {
			code = replyFailure
		}
	}
	if err != nil {
		if code != replyDone {
			_, _ = in.conn.Write(socksReply(code, netip.AddrPort{}))
		}
		return fmt.Errorf("socks5: %w", err)
	}
	c.Answer = func(bound netip.AddrPort, err error) error {
		if err == nil {
			_, err = in.conn.Write(socksReply(replyDone, bound))
			return err
		}
		_, err = in.conn.Write(socksReply(failureOf(err).socks, netip.AddrPort{}))
		return errors.Join(err, closeAfterAnswer(in.conn))
	}
	return nil
}

// socksMethod agrees on a method and, where there are users, checks the client's name and
// password.
func (l *greeter) socksMethod(ctx context.Context, in *input, from netip.Addr) error {
	var head [2]byte
	if _, err := io.ReadFull(in, head[:1]); err != nil {
		return err
	}
	if head[0] != socksVersion {
		return fmt.Errorf("version %d is not 5", head[0])
	}
	if _, err := io.ReadFull(in, head[1:]); err != nil {
		return err
	}
	methods := make([]byte, head[1])
	if _, err := io.ReadFull(in, methods); err != nil {
		return err
	}
	method := byte(methodNone)
	if len(l.users) > 0 {
		method = methodPassword
	}
	if bytes.IndexByte(methods, method) < 0 {
		_, _ = in.conn.Write([]byte{socksVersion, methodRefused})
		return fmt.Errorf("client does not offer method %d", method)
	}
	if _, err := in.conn.Write([]byte{socksVersion, method}); err != nil {
		return err
	}
	if method == methodNone {
		return nil
	}
	return l.socksPassword(ctx, in, from)
}

// socksPassword runs the sub-negotiation of RFC 1929.
func (l *greeter) socksPassword(ctx context.Context, in *input, from netip.Addr) error {
	version, err := in.ReadByte()
	if err != nil {
		return err
	}
	if version != socksAuthVersion {
		_, _ = in.conn.Write([]byte{socksAuthVersion, authNotAccepted})
		return fmt.Errorf("password version %d is not 1", version)
	}
	name, err := readCounted(in)
	if err != nil {
		return err
	}
	password, err := readCounted(in)
	if err != nil {
		return err
	}
	if err := l.checkPassword(ctx, from, name, password); err != nil {
		_, _ = in.conn.Write([]byte{socksAuthVersion, authNotAccepted})
		return err
	}
	_, err = in.conn.Write([]byte{socksAuthVersion, authAccepted})
	return err
}

// serveHTTP reads what a client asks of an HTTP proxy: a CONNECT, or a request for a whole
// http:// URL.
func (l *greeter) serveHTTP(ctx context.Context, in *input, c *Client) error {
	in.left = maxRequestHeader
	req, err := readRequest(in)
	if err != nil {
		switch {
		case errors.Is(in.err, errTooLong):
			_ = refuseHTTP(in, http.StatusRequestHeaderFieldsTooLarge, "", "the request header is too long")
			err = errTooLong
		case in.err != nil: // the client is gone; what is wrong with a torn line is no news
			err = in.err
		default:
			_ = refuseHTTP(in, http.StatusBadRequest, "", "this is not an HTTP request")
		}
		return fmt.Errorf("connect: %w", err)
	}
	tunnel := req.method == http.MethodConnect
	to, whole := parseWholeURL(req)
	if !tunnel && !whole {
		_ = refuseHTTP(in, http.StatusMethodNotAllowed, "Allow: CONNECT\r\n",
			"this is a proxy: it serves CONNECT, and requests for whole http:// URLs")
		return fmt.Errorf("connect: method %.24q without an http:// URL", req.method)
	}
	if err := l.httpUser(ctx, c.Source.Addr(), req.parsed); err != nil {
		_ = refuseHTTP(in, http.StatusProxyAuthRequired, "Proxy-Authenticate: Basic realm=\"penstock\"\r\n",
			"a name and a password are needed")
		return fmt.Errorf("connect: %w", err)
	}
	if !tunnel {
		return l.wholeURL(in, c, req, to)
	}
	return l.serveConnect(in, c, req)
}

// serveConnect serves a CONNECT request. It has no content (RFC 9110 §9.3.6), so the bytes behind
// the empty line are for the server.
func (l *greeter) serveConnect(in *input, c *Client, req request) (err error) {
	// The request line alone says where to; a Host header is ignored.
	c.Target, c.Host, err = Destination(req.target)
	if err == nil && (req.parsed.ContentLength != 0 || len(req.parsed.TransferEncoding) > 0) {
		err = errors.New("a CONNECT cannot have content")
	}
	if err != nil {
		_ = refuseHTTP(in, http.StatusBadRequest, "", "CONNECT needs host:port and no content")
		return fmt.Errorf("connect: %w", err)
	}
	c.Answer = func(_ netip.AddrPort, err error) error {
		if err == nil {
			_, err = in.conn.Write([]byte("HTTP/1.1 200 Connection established\r\n\r\n"))
			return err
		}
		return failHTTP(in, err)
	}
	return nil
}

// wholeURL serves a request for a whole http:// URL, as clients with http_proxy set send it (RFC
// 9112 §3.2.2). It serves only one on a connection, since the next may be for another server: see
// Exchange.
func (l *greeter) wholeURL(in *input, c *Client, req request, to wholeURL) (err error) {
	if to.authority == nil {
		_ = refuseHTTP(in, http.StatusBadRequest, "", "the URL is malformed")
		return errors.New("connect: malformed URL")
	}
	port := to.authority.Port()
	if port == "" {
		port = "80"
	}
	if c.Target, c.Host, err = destinationOf(to.authority.Hostname(), port); err != nil {
		_ = refuseHTTP(in, http.StatusBadRequest, "", "the URL needs a host, and a port in 1..65535 if any")
		return fmt.Errorf("connect: %w", err)
	}
	c.Exchange = newExchange(req)
	early, _ := in.Peek(in.Buffered())
	n, err := c.Exchange.content.take(early)
	if err != nil {
		_ = refuseHTTP(in, http.StatusBadRequest, "", "the content is malformed")
		return fmt.Errorf("connect: %w", err)
	}
	in.ahead = append(originRequest(req, to, c.Exchange.upgrades), early[:n]...)
	_, _ = in.Discard(len(early))
	c.Answer = func(_ netip.AddrPort, err error) error {
		if err == nil {
			return nil // the server answers
		}
		return failHTTP(in, err)
	}
	return nil
}

// httpUser returns why the client of a request may not use the listener. A request without a
// password is no wrong guess: the client was not asked for one yet.
func (l *greeter) httpUser(ctx context.Context, from netip.Addr, req *http.Request) error {
	if len(l.users) == 0 {
		return nil
	}
	// BasicAuth reads the one header; a proxy's credentials are in the other.
	asked := http.Request{Header: http.Header{"Authorization": req.Header["Proxy-Authorization"]}}
	name, password, ok := asked.BasicAuth()
	if !ok {
		return errors.New("no name and password")
	}
	return l.checkPassword(ctx, from, []byte(name), []byte(password))
}

// checkPassword returns why the client at from may not use the listener. With a wrong password
// that may take most of the handshake timeout (Guesses.Wrong).
func (l *greeter) checkPassword(ctx context.Context, from netip.Addr, name, password []byte) error {
	if !l.guesses.May(from) {
		return errGuessing
	}
	if !l.users.allowUser(name, password) {
		l.guesses.Wrong(ctx, from, l.cfg.HandshakeTimeout*9/10) // so that the answer is in time
		return errWrongPassword
	}
	return nil
}
