package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
)

// maxRequestHeader bounds the request line and header fields of a request, in bytes.
const maxRequestHeader = 16 << 10

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

// serveConnect serves a CONNECT request. It has no content (RFC 9110 §9.3.6), so what follows the empty
// line is for the server.
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

// failHTTP tells a client why the dial failed, and closes its connection.
func failHTTP(in *input, err error) error {
	status, why, reason := HTTPFailure(err)
	err = refuseHTTP(in, status, "Proxy-Status: "+why+"\r\n", reason)
	return errors.Join(err, closeAfterAnswer(in.conn))
}

// httpUser says why the client of a request may not use the listener. Without a password it was not asked for
// one yet, so that is no wrong one.
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

// refuseHTTP writes an answer after which the caller closes the connection. header is whole lines.
func refuseHTTP(in *input, status int, header, reason string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n%s", status, http.StatusText(status), header)
	fmt.Fprintf(&b, "Content-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s\n",
		len(reason)+1, reason)
	_, err := in.conn.Write([]byte(b.String()))
	return err
}
