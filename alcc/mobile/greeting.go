package mobile

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"

	"github.com/penstock-net/penstock/alcc/relay"
	greets "github.com/penstock-net/penstock/proxy/greeting"
)

// Replies of RFC 1928 §6 that depend on the relay.
const (
	replyForbidden = 2 // the relay does not reach such addresses
	replyHost      = 4 // there is no connection, for whatever reason
)

// greeting is the request of an app.
type greeting struct {
	destination string // HOST:PORT
	socks       bool   // it is SOCKS5; otherwise CONNECT of HTTP/1.1
	early       []byte // what was read of the app and follows the request
}

// readGreeting reads the request of an app, and answers one of another kind with a refusal and an error. The caller
// then closes the app.
func readGreeting(app io.ReadWriter) (*greeting, error) {
	g := &greeting{}
	err := g.readUntil(app, func(b []byte) (int, []byte, bool, error) {
		g.socks = len(b) > 0 && b[0] == greets.SOCKSVersion
		return 0, nil, len(b) > 0, nil
	})
	switch {
	case err != nil:
	case g.socks:
		err = g.readSOCKS(app)
	default:
		err = g.readHTTP(app)
	}
	return g, err
}

// readUntil calls feed with what it has read of the app, until feed is done. feed returns how many bytes it has
// consumed, and an answer for the app, also with an error.
func (g *greeting) readUntil(
	app io.ReadWriter, feed func(b []byte) (n int, reply []byte, done bool, err error),
) error {
	for {
		n, reply, done, err := feed(g.early)
		g.early = g.early[n:]
		if len(reply) > 0 {
			_, failed := app.Write(reply)
			err = errors.Join(err, failed)
		}
		if err != nil || done {
			return err
		}
		var more [1 << 10]byte
		n, err = app.Read(more[:])
		if g.early = append(g.early, more[:n]...); n == 0 && err != nil {
			return err
		}
	}
}

// readSOCKS reads a request of SOCKS5, which must be CONNECT without a password. A name goes to the relay as it is,
// because the phone may not be able to look it up.
func (g *greeting) readSOCKS(app io.ReadWriter) error {
	var s greets.SOCKS5
	err := g.readUntil(app, func(b []byte) (int, []byte, bool, error) {
		n, reply, next, err := s.Feed(b)
		return n, reply, next == greets.Done, err
	})
	g.destination = net.JoinHostPort(s.Host, strconv.Itoa(int(s.Port)))
	return err
}

// readHTTP reads a request of HTTP/1.1, which must be CONNECT (RFC 9110 §9.3.6), because other requests would need
// their headers rewritten.
func (g *greeting) readHTTP(app io.ReadWriter) error {
	var h greets.HTTPHead
	return g.readUntil(app, func(b []byte) (n int, reply []byte, done bool, err error) {
		head, n, err := h.Feed(b)
		if n == 0 || err != nil {
			return 0, nil, false, err
		}
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		switch {
		case err != nil:
			return n, nil, true, err
		case r.Method != http.MethodConnect:
			return n, []byte("HTTP/1.1 405 Method Not Allowed\r\nAllow: CONNECT\r\nContent-Length: 0\r\n\r\n"), true,
				fmt.Errorf("%s is not CONNECT", r.Method)
		}
		g.destination = r.Host
		return n, nil, true, nil
	})
}

// answerApp answers the app that there is a connection, or if err is not nil that there is none.
func (g *greeting) answerApp(app io.Writer, err error) error {
	var refused relay.StatusError
	isRefused := errors.As(err, &refused) && refused == http.StatusForbidden
	socks, status := byte(greets.ReplyDone), "200 OK\r\n"
	switch {
	case isRefused:
		socks, status = replyForbidden, "403 Forbidden\r\nContent-Length: 0\r\n"
	case err != nil:
		socks, status = replyHost, "502 Bad Gateway\r\nContent-Length: 0\r\n"
	}
	if g.socks {
		_, err = app.Write(greets.SOCKSReply(socks, netip.AddrPort{}))
	} else {
		_, err = io.WriteString(app, "HTTP/1.1 "+status+"\r\n")
	}
	return err
}

// resumed is a connection of an app. Read returns first what was read with the request.
type resumed struct {
	net.Conn
	early []byte
}

// Read implements net.Conn.
func (r *resumed) Read(b []byte) (int, error) {
	if len(r.early) > 0 {
		n := copy(b, r.early)
		r.early = r.early[n:]
		return n, nil
	}
	return r.Conn.Read(b)
}

// CloseWrite passes the end of the other direction on.
func (r *resumed) CloseWrite() error {
	return r.Conn.(interface{ CloseWrite() error }).CloseWrite() //nolint:forcetypeassert // of TCP
}
