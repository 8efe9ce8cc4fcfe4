package ingress

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// wholeURL serves a request for a whole http:// URL, as clients with http_proxy set send it (RFC 9112 §3.2.2), and
// only one on a connection, since the next may be for another server: see Exchange.
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

// wholeURL is a URL of scheme http, or ws.
type wholeURL struct {
	authority *url.URL // its authority alone; nil: it is malformed
	origin    string   // what follows the authority, but for the fragment
}

// parseWholeURL reads the target of a request by a version of HTTP that we speak; not ok: it is of another form.
// Only the authority is looked into. The rest is for the server to judge.
func parseWholeURL(req request) (to wholeURL, ok bool) {
	scheme, rest, _ := strings.Cut(req.target, "://")
	if !strings.EqualFold(scheme, "http") && !strings.EqualFold(scheme, "ws") || req.parsed.ProtoMajor != 1 {
		return to, false
	}
	rest, _, _ = strings.Cut(rest, "#")
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	to.origin = rest[end:]
	if u, err := url.Parse("http://" + rest[:end]); err == nil {
		to.authority = u
	}
	return to, end > 0
}

// originRequest is the head of req as the server is to see it (RFC 9112 §3.2.1). What follows it is the client's own
// bytes.
func originRequest(req request, to wholeURL, upgrades bool) []byte {
	h := head{fmt.Sprintf("%s %s HTTP/1.%d", req.method, to.path(req.method), min(req.parsed.ProtoMinor, 1)), nil}
	host := field{"Host", hostField(to.authority)}
	fields := req.endToEnd()
	if !slices.ContainsFunc(fields, func(f field) bool { return f.is("Host") }) {
		h.fields = append(h.fields, host)
	}
	// Package net/http has found one that tells the length, perhaps among others.
	length := "Content-Length"
	if len(req.parsed.TransferEncoding) > 0 {
		length = "Transfer-Encoding"
	}
	for _, f := range fields {
		switch {
		case f.is("Host"):
			f.value = host.value
		case f.is(length):
			length = ""
		case f.is("Content-Length", "Transfer-Encoding"):
			continue
		}
		h.fields = append(h.fields, f)
	}
	via := fmt.Sprintf("%d.%d penstock", req.parsed.ProtoMajor, req.parsed.ProtoMinor)
	h.fields = append(h.fields, field{"Via", via})
	if upgrades {
		h.fields = append(h.fields, field{"Upgrade", "websocket"}, field{"Connection", "upgrade"})
	} else {
		h.fields = append(h.fields, field{"Connection", "close"})
	}
	return h.bytes()
}

// path is the target of the request for the server.
func (u wholeURL) path(method string) string {
	switch {
	case u.origin == "" && method == http.MethodOptions:
		return "*" // RFC 9112 §3.2.4
	case u.origin == "" || u.origin[0] == '?':
		return "/" + u.origin
	}
	return u.origin
}

// hostField is the value of Host for the server: the URL's host and port, whatever the client's Host
// says (RFC 9112 §3.2.2), without user information, and without a zone, which only this host knows.
func hostField(u *url.URL) string {
	host, _, zone := strings.Cut(u.Hostname(), "%")
	if port := u.Port(); port != "" {
		return net.JoinHostPort(host, port)
	}
	if zone {
		return "[" + host + "]"
	}
	return strings.TrimSuffix(u.Host, ":")
}
