package ingress

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/penstock-net/penstock/proxy/access"
)

// play greets a client that says data in pieces of chunk bytes and hangs up.
// Whatever it says: one of an error with a closed connection, or a destination
// and every byte behind the handshake.
func play(t *testing.T, l *Socket, data []byte, chunk uint8) {
	t.Helper()
	conn := newFakeConn(string(data))
	conn.chunk, conn.hangUp = int(chunk), true
	c, err := l.Greet(t.Context(), conn)
	closed, _ := conn.isClosed()
	if err != nil {
		if !closed {
			t.Fatal("refused, but left open")
		}
		return
	}
	if closed {
		t.Fatal("understood, but closed")
	}
	if c.Target.IsValid() == (c.Host != "") {
		t.Fatalf("target %v and host %q", c.Target, c.Host)
	}
	if c.Target.Addr().Is4In6() || c.Target.Addr().Zone() != "" {
		t.Fatalf("target %v would slip past a prefix", c.Target)
	}
	rest, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, errChunk) {
		t.Fatal(err)
	}
	if c.Exchange != nil {
		_, rest, _ = bytes.Cut(rest, []byte("\r\n\r\n"))
		if !bytes.Contains(data, rest) {
			t.Fatalf("content %q is not in %q", rest, data)
		}
	} else if len(rest) > len(data) || string(rest) != string(data[len(data)-len(rest):]) {
		t.Fatalf("early data %q is not the end of %q", rest, data)
	}
	if err := c.Answer(netip.AddrPort{}, ErrNotAllowed); err != nil {
		t.Fatal(err)
	}
	if closed, _ := conn.isClosed(); !closed {
		t.Fatal("open after a failed dial")
	}
}

func FuzzSocks5(f *testing.F) {
	f.Add([]byte(hello+connect4+someone+"early"), uint8(0))
	open, locked := testListener(f, Config{Mode: access.SOCKS5}), testListener(f,
		Config{Mode: access.SOCKS5, Auth: []User{{"a", "b"}}})
	f.Fuzz(func(t *testing.T, data []byte, chunk uint8) {
		play(t, open, data, chunk)
		play(t, locked, data, chunk)
	})
}

func FuzzConnect(f *testing.F) {
	f.Add([]byte("CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\nearly"), uint8(0))
	f.Add([]byte("POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nearly"), uint8(0))
	open, locked := testListener(f, Config{Mode: access.Connect}), testListener(f,
		Config{Mode: access.Mixed, Auth: []User{{"a", "b"}}})
	f.Fuzz(func(t *testing.T, data []byte, chunk uint8) {
		play(t, open, data, chunk)
		play(t, locked, data, chunk)
	})
}

// FuzzWholeURL holds what a server makes of a forwarded request against what is known of it: it sees one request, with
// the path that the client wrote.
func FuzzWholeURL(f *testing.F) {
	f.Add([]byte("GET http://a.test/b%zz?c#d HTTP/1.1\r\nx: y\r\n\r\n"))
	f.Add([]byte("POST http://a.test/ HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte("PUT http://a.test HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n1\r\na\r\n0\r\n\r\nG"))
	f.Add([]byte("GET ws://a.test/ HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nG"))
	l := testListener(f, Config{Mode: access.Connect})
	f.Fuzz(func(t *testing.T, data []byte) {
		conn := newFakeConn(string(data))
		conn.hangUp = true
		c, err := l.Greet(t.Context(), conn)
		if err != nil || c.Exchange == nil {
			return
		}
		sent, err := io.ReadAll(c)
		if err != nil {
			return // chunks are cut or malformed
		}
		server := bufio.NewReader(bytes.NewReader(sent))
		req, err := http.ReadRequest(server)
		if err != nil {
			if bytes.Contains(bytes.SplitN(sent, []byte("\r\n"), 2)[0], []byte("%")) || !utf8.Valid(sent) {
				return // package net/http judges the path, which is for the server to do
			}
			t.Fatalf("%q: %v", sent, err)
		}
		target := strings.Fields(string(bytes.TrimLeft(data, "\r\n")))[1]
		if path, _, _ := strings.Cut(req.RequestURI, "#"); !strings.Contains(target, strings.TrimLeft(path, "/*")) {
			t.Fatalf("path %q of %q", path, target)
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			if strings.Contains(err.Error(), "unexpected EOF") {
				return // the client hung up in it
			}
			t.Fatalf("%q: content: %v", sent, err)
		}
		if rest, _ := io.ReadAll(server); len(rest) > 0 {
			t.Fatalf("%q follows the request", rest)
		}
	})
}

func FuzzProxyHeader(f *testing.F) {
	f.Add([]byte("PROXY TCP4 203.0.113.5 192.0.2.80 1234 443\r\nearly"), uint8(0))
	f.Add([]byte(v2IPv4+"early"), uint8(1))
	l := testListener(f, Config{
		Mode: access.Forward, Target: "a.test:1",
		TrustedProxies: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")},
	})
	f.Fuzz(func(t *testing.T, data []byte, chunk uint8) { play(t, l, data, chunk) })
}
