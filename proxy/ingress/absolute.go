package ingress

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// absolute serves a request for a whole http:// URL, as clients with http_proxy set send it
// (RFC 9112 §3.2.2), and only one on a connection, since the next may be for another server: the
// request that the server gets asks it to close. What the client sends behind it is dropped.
func (l *greeter) absolute(in *input, c *Client, req *http.Request) (err error) {
	host, port := req.URL.Hostname(), req.URL.Port()
	if port == "" {
		port = "80"
	}
	if c.Target, c.Host, err = destination(host, port); err != nil {
		_ = refuseHTTP(in, http.StatusBadRequest, "", "the URL needs a host, and a port in 1..65535 if any")
		return fmt.Errorf("connect: %w", err)
	}
	c.Content = newContent(req)
	early, _ := in.Peek(in.Buffered())
	n, err := c.Content.take(early)
	if err != nil {
		_ = refuseHTTP(in, http.StatusBadRequest, "", "the content is malformed")
		return fmt.Errorf("connect: %w", err)
	}
	in.ahead = append(originRequest(req), early[:n]...)
	_, _ = in.Discard(len(early))
	c.Answer = func(_ netip.AddrPort, err error) error {
		if err == nil {
			return nil // the server answers
		}
		return failHTTP(in, err)
	}
	return nil
}

// hopByHop are the header fields that a proxy does not forward, beside those that the request's
// Connection field names (RFC 9110 §7.6.1).
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "Te", "Upgrade",
}

// originRequest is the head of req as the server is to see it (RFC 9112 §3.2.1). What
// follows it is the client's own bytes.
func originRequest(req *http.Request) []byte {
	fields := req.Header.Clone()
	for _, named := range req.Header["Connection"] {
		for name := range strings.SplitSeq(named, ",") {
			if name = strings.TrimSpace(name); !strings.EqualFold(name, "Content-Length") { // or content would be a request
				fields.Del(name)
			}
		}
	}
	for _, name := range hopByHop {
		fields.Del(name)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.%d\r\nHost: %s\r\n", req.Method, originTarget(req), min(req.ProtoMinor, 1),
		hostField(req))
	if len(req.TransferEncoding) > 0 { // the reader takes it out of the fields
		fmt.Fprintf(&b, "Transfer-Encoding: %s\r\n", strings.Join(req.TransferEncoding, ", "))
	}
	_ = fields.Write(&b)
	fmt.Fprintf(&b, "Via: %d.%d penstock\r\nConnection: close\r\n\r\n", req.ProtoMajor, req.ProtoMinor)
	return b.Bytes()
}

// originTarget is the path and query of the URL as the client wrote them: net/url might write another
// name, as "/a/b%7C" for "/a%2Fb|" (RFC 9110 §7.7).
func originTarget(req *http.Request) string {
	_, url, _ := strings.Cut(req.RequestURI, "://")
	i := strings.IndexAny(url, "/?")
	switch {
	case i < 0 && req.Method == http.MethodOptions:
		return "*" // RFC 9112 §3.2.4
	case i < 0:
		return "/"
	case url[i] == '?':
		return "/" + url[i:]
	}
	return url[i:]
}

// hostField is the value of Host for the server: the URL's host and port, whatever the client's Host
// says (RFC 9112 §3.2.2), without user information, and without a zone, which only this host knows.
func hostField(req *http.Request) string {
	host, _, zone := strings.Cut(req.URL.Hostname(), "%")
	if port := req.URL.Port(); port != "" {
		return net.JoinHostPort(host, port)
	}
	if zone {
		return "[" + host + "]"
	}
	return strings.TrimSuffix(req.URL.Host, ":")
}

// wholeURL tells whether a request is for an http:// URL, by a version that we speak.
func wholeURL(req *http.Request) bool {
	return req.URL.Scheme == "http" && req.URL.Host != "" && req.ProtoMajor == 1
}
