package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/greeting"
)

// Pause is a datapath.ErrWait with a time limit. The caller repeats the call at the next event of the connection, and
// after this time at the latest.
type Pause time.Duration

// Error implements error.
func (p Pause) Error() string { return fmt.Sprintf("ingress: not yet, for %v", time.Duration(p)) }

// Is has errors.Is find a datapath.ErrWait.
func (p Pause) Is(target error) bool { return target == datapath.ErrWait } //nolint:errorlint // ErrWait wraps none

// greetClient implements Listener.Greet.
func (g *greeter) greetClient(ctx context.Context, conn datapath.Conn) (Client, error) {
	client := Client{Conn: conn, Source: datapath.RemoteOf(conn)}
	isTrusted := g.trustsPeer(client.Source.Addr())
	if !isTrusted && !g.cfg.Mode.Asks() {
		if err := g.setTarget(&client); err != nil {
			_ = conn.Reset()
			return Client{}, g.wrapError(err)
		}
		return client, nil
	}
	h := &conversation{conn: conn, greeter: g, client: client}
	h.socks.NeedsPassword = len(g.users) > 0
	if !isTrusted {
		h.stage = firstStage(g.cfg.Mode)
	}
	if d, ok := conn.(datapath.Driven); ok && d.Driven() {
		h.driven = true
		c, err := h.proceed(ctx)
		if err == datapath.ErrWait { //nolint:errorlint // a Pause is shorter
			err = Pause(g.cfg.HandshakeTimeout)
		}
		return c, err
	}
	ctx, cancel := context.WithTimeout(ctx, g.cfg.HandshakeTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(datapath.Expired) })
	c, err := h.proceed(ctx)
	switch {
	case !stop() && err == nil: // the deadline is set or about to be
		_ = conn.Reset()
		return Client{}, g.wrapError(context.Cause(ctx))
	case err != nil && ctx.Err() != nil:
		err = errors.Join(context.Cause(ctx), err)
	}
	return c, err
}

// Bounds of the input of a client.
const (
	inputBuffer = 4096        // bytes read at once
	lingerTime  = time.Second // how long a refused client may take to read its answer
	lingerBytes = 256 << 10   // of its input discarded in this time
)

// inputs are the buffers of reads.
var inputs = sync.Pool{New: func() any { return new([inputBuffer]byte) }}

// errMore says that a message of the client is not complete yet.
var errMore = errors.New("ingress: more bytes are needed")

// conversation asks a client where it wants to go, with the parsers of package greeting. Where a loop drives the
// connection, a call that would block returns datapath.ErrWait, and the loop repeats it. Elsewhere the call blocks.
//
//	readHeader ──▶ readFirst ──▶ readSOCKS ──▶ the destination is known
//	  │    │             └─────▶ readHTTP  ──▶
//	  │    └ a mode that asks nothing ───────▶
//	  └─ any ──▶ delayAnswer: a password was wrong ──▶ err is set, and the connection is closed
type conversation struct {
	conn    datapath.Conn
	greeter *greeter
	driven  bool // by a loop
	stage   stage
	in      []byte // read and not parsed yet
	client  Client
	header  greeting.ProxyHeader
	socks   greeting.SOCKS5
	head    greeting.HTTPHead

	delayedAnswer []byte // sent at the end of delayAnswer
	delayedErr    error  // returned at the end of delayAnswer
	err           error  // why the client is refused; nil: it is not, or not yet
	closing       bool   // CloseWrite was called
	lingerLeft    int    // bytes that may still be discarded
}

// stage is what a conversation waits for.
type stage uint8

const (
	readHeader stage = iota // the PROXY header
	readFirst               // the byte that tells SOCKS5 from HTTP
	readSOCKS
	readHTTP
	delayAnswer // the time at which the answer to a wrong password may be sent
	knowTarget  // nothing
)

// firstStage returns the stage that follows the PROXY header.
func firstStage(mode access.Mode) stage {
	switch mode {
	case access.SOCKS5:
		return readSOCKS
	case access.Connect:
		return readHTTP
	case access.Mixed:
		return readFirst
	}
	return knowTarget
}

// proceed continues until the destination is known or the client is refused. Once ctx has ended, it waits no longer.
// After an error other than ErrWait the connection is closed, with RST where the protocol has no answer.
func (h *conversation) proceed(ctx context.Context) (Client, error) {
	if h.err == nil {
		err := h.readTarget(ctx)
		switch {
		case err == nil:
			if len(h.in) > 0 {
				h.client.Conn = &prefixed{Conn: h.conn, rest: h.in, exchange: h.client.Exchange}
			}
			return h.client, nil
		case errors.Is(err, datapath.ErrWait):
			return Client{Again: h.proceed}, err
		}
		h.err = h.greeter.wrapError(err)
	}
	if !h.greeter.cfg.Mode.Asks() || h.closing && ctx.Err() != nil {
		_ = h.conn.Reset()
	} else if err := h.closeAfterAnswer(); errors.Is(err, datapath.ErrWait) {
		return Client{Again: h.proceed}, err
	}
	return Client{}, h.err
}

// readTarget reads until the destination is known.
func (h *conversation) readTarget(ctx context.Context) error {
	if h.stage == delayAnswer {
		if ctx.Err() == nil {
			return datapath.ErrWait
		}
		_, _ = h.conn.Write(h.delayedAnswer)
		return h.delayedErr
	}
	for {
		if err := h.parseInput(ctx); !errors.Is(err, errMore) {
			return err
		}
		protocol := [...]string{"proxy protocol", "mixed", "socks5", "connect"}[h.stage]
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", protocol, context.Cause(ctx))
		}
		if err := h.readMore(); err != nil {
			if errors.Is(err, datapath.ErrWait) {
				return err
			}
			return fmt.Errorf("%s: %w", protocol, err)
		}
	}
}

// readMore appends the next bytes of the client to in.
func (h *conversation) readMore() error {
	buf := inputs.Get().(*[inputBuffer]byte)
	defer inputs.Put(buf)
	n, err := h.conn.Read(buf[:])
	if n > 0 {
		h.in = append(h.in, buf[:n]...)
		return nil
	}
	return err
}

// parseInput parses in until the destination is known; errMore: more bytes are needed.
func (h *conversation) parseInput(ctx context.Context) error {
	if h.stage == readHeader {
		n, done, err := h.header.Feed(h.in)
		h.in = h.in[n:]
		switch {
		case err != nil:
			return fmt.Errorf("proxy protocol: %w", err)
		case !done:
			return errMore
		case h.header.Source.IsValid():
			h.client.Source, h.client.cameTo = h.header.Source, &h.header.Destination
		}
		h.stage = firstStage(h.greeter.cfg.Mode)
	}
	if h.stage == readFirst {
		if len(h.in) == 0 {
			return errMore
		}
		switch b := h.in[0]; {
		case b == greeting.SOCKSVersion:
			h.stage = readSOCKS
		case b >= 'A' && b <= 'Z', b >= 'a' && b <= 'z':
			h.stage = readHTTP
		default:
			return fmt.Errorf("mixed: first byte %#02x is neither SOCKS5 nor HTTP", b)
		}
	}
	switch h.stage {
	case readSOCKS:
		return h.parseSOCKS(ctx)
	case readHTTP:
		return h.parseHTTP(ctx)
	}
	return h.greeter.setTarget(&h.client)
}

// parseSOCKS parses a SOCKS5 greeting and answers it, up to the request. Client.Answer replies to the request.
func (h *conversation) parseSOCKS(ctx context.Context) error {
	n, reply, next, err := h.socks.Feed(h.in)
	h.in = h.in[n:]
	if len(reply) > 0 {
		if _, failed := h.conn.Write(reply); err == nil {
			err = failed
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("socks5: %w", err)
	case next == greeting.More:
		return errMore
	case next == greeting.CheckUser:
		pause, err := h.greeter.checkPassword(h.client.Source.Addr(), h.socks.Name, h.socks.Password)
		if err != nil {
			return h.refuse(ctx, pause, h.socks.DenyUser(), fmt.Errorf("socks5: %w", err))
		}
		if _, err := h.conn.Write(h.socks.AllowUser()); err != nil {
			return fmt.Errorf("socks5: %w", err)
		}
		return h.parseSOCKS(ctx)
	}
	h.client.Target, h.client.Host, err = destinationOf(h.socks.Host, strconv.Itoa(int(h.socks.Port)))
	if err != nil {
		failure := greeting.SOCKSReply(greeting.ReplyFailure, netip.AddrPort{})
		return h.refuse(ctx, 0, failure, fmt.Errorf("socks5: %w", err))
	}
	h.client.Answer = func(bound netip.AddrPort, err error) error {
		if err != nil {
			return h.answerFailure(greeting.SOCKSReply(failureOf(err).socks, netip.AddrPort{}))
		}
		_, err = h.conn.Write(greeting.SOCKSReply(greeting.ReplyDone, bound))
		return err
	}
	return nil
}

// parseHTTP parses the request to an HTTP proxy once its head is complete: a CONNECT, or a request for a whole http://
// URL.
func (h *conversation) parseHTTP(ctx context.Context) error {
	raw, n, err := h.head.Feed(h.in)
	if err != nil {
		return h.refuseHTTP(ctx, http.StatusRequestHeaderFieldsTooLarge, "the request header is too long", err)
	}
	if n == 0 {
		return errMore
	}
	h.in = h.in[n:]
	req, err := parseRequest(raw)
	if err != nil {
		return h.refuseHTTP(ctx, http.StatusBadRequest, "this is not an HTTP request", err)
	}
	tunnel := req.method == http.MethodConnect
	to, whole := parseWholeURL(req)
	if !tunnel && !whole {
		answer := httpRefusal(http.StatusMethodNotAllowed, "Allow: CONNECT\r\n",
			"this is a proxy: it serves CONNECT, and requests for whole http:// URLs")
		return h.refuse(ctx, 0, answer, fmt.Errorf("connect: method %.24q without an http:// URL", req.method))
	}
	if pause, err := h.greeter.checkHTTPUser(h.client.Source.Addr(), req.parsed); err != nil {
		answer := httpRefusal(http.StatusProxyAuthRequired, "Proxy-Authenticate: Basic realm=\"penstock\"\r\n",
			"a name and a password are needed")
		return h.refuse(ctx, pause, answer, fmt.Errorf("connect: %w", err))
	}
	established := []byte("HTTP/1.1 200 Connection established\r\n\r\n")
	if !tunnel {
		established = nil // the server answers
		err = h.takeWholeURL(ctx, req, to)
	} else {
		err = h.takeConnect(ctx, req)
	}
	h.client.Answer = func(_ netip.AddrPort, err error) error {
		if err != nil {
			status, why, reason := HTTPFailure(err)
			return h.answerFailure(httpRefusal(status, "Proxy-Status: "+why+"\r\n", reason))
		}
		if established != nil {
			_, err = h.conn.Write(established)
		}
		return err
	}
	return err
}

// takeConnect takes a CONNECT request. It has no content (RFC 9110 §9.3.6), so the bytes behind the empty line are for
// the server.
func (h *conversation) takeConnect(ctx context.Context, req request) (err error) {
	// The request line alone says where to; a Host header is ignored.
	h.client.Target, h.client.Host, err = Destination(req.target)
	if err == nil && (req.parsed.ContentLength != 0 || len(req.parsed.TransferEncoding) > 0) {
		err = errors.New("a CONNECT cannot have content")
	}
	if err != nil {
		return h.refuseHTTP(ctx, http.StatusBadRequest, "CONNECT needs host:port and no content", err)
	}
	return nil
}

// takeWholeURL takes a request for a whole http:// URL, as clients with http_proxy set send it (RFC 9112 §3.2.2). It
// serves only one on a connection, since the next may be for another server: see Exchange.
func (h *conversation) takeWholeURL(ctx context.Context, req request, to wholeURL) (err error) {
	if to.authority == nil {
		return h.refuseHTTP(ctx, http.StatusBadRequest, "the URL is malformed", errors.New("malformed URL"))
	}
	port := to.authority.Port()
	if port == "" {
		port = "80"
	}
	if h.client.Target, h.client.Host, err = destinationOf(to.authority.Hostname(), port); err != nil {
		return h.refuseHTTP(ctx, http.StatusBadRequest, "the URL needs a host, and a port in 1..65535 if any", err)
	}
	h.client.Exchange = newExchange(req)
	n, err := h.client.Exchange.content.advance(h.in)
	if err != nil {
		return h.refuseHTTP(ctx, http.StatusBadRequest, "the content is malformed", err)
	}
	h.in = append(originRequest(req, to, h.client.Exchange.upgrades), h.in[:n]...)
	return nil
}

// refuseHTTP sends an HTTP client an answer with the status and the reason, and returns err.
func (h *conversation) refuseHTTP(ctx context.Context, status int, reason string, err error) error {
	return h.refuse(ctx, 0, httpRefusal(status, "", reason), fmt.Errorf("connect: %w", err))
}

// refuse sends the client an answer after a pause, and returns err, or ErrWait until then.
func (h *conversation) refuse(ctx context.Context, pause time.Duration, answer []byte, err error) error {
	if pause > 0 && h.driven {
		h.stage, h.delayedAnswer, h.delayedErr = delayAnswer, answer, err
		return Pause(pause)
	}
	if pause > 0 {
		waitFor(ctx, pause)
	}
	_, _ = h.conn.Write(answer)
	return err
}

// answerFailure tells the client that there is no server, and closes the connection as closeAfterAnswer does. The call
// is made again after an ErrWait.
func (h *conversation) answerFailure(answer []byte) (err error) {
	if !h.closing {
		_, err = h.conn.Write(answer)
	}
	return errors.Join(err, h.closeAfterAnswer())
}

// closeAfterAnswer closes the connection once the client has had time to read the answer just written. It reads the
// client's input first, because a close with unread input sends RST, at which the client drops the answer (RFC 9112
// §9.6).
func (h *conversation) closeAfterAnswer() error {
	isFirst := !h.closing
	if isFirst {
		h.closing, h.lingerLeft = true, lingerBytes
		if h.conn.CloseWrite() != nil {
			return h.conn.Close()
		}
		if !h.driven {
			timer := time.AfterFunc(lingerTime, func() { _ = h.conn.SetReadDeadline(datapath.Expired) })
			defer timer.Stop()
		}
	}
	buf := inputs.Get().(*[inputBuffer]byte)
	defer inputs.Put(buf)
	for h.lingerLeft > 0 {
		n, err := h.conn.Read(buf[:])
		h.lingerLeft -= n
		switch {
		case errors.Is(err, datapath.ErrWait) && isFirst:
			return Pause(lingerTime)
		case errors.Is(err, datapath.ErrWait):
			return err
		case err != nil:
			h.lingerLeft = 0
		}
	}
	return h.conn.Close()
}
