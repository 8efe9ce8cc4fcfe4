package ingress

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"testing"

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
	if c.Content != nil {
		_, rest, _ = bytes.Cut(rest, []byte("Connection: close\r\n\r\n"))
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

func FuzzProxyHeader(f *testing.F) {
	f.Add([]byte("PROXY TCP4 203.0.113.5 192.0.2.80 1234 443\r\nearly"), uint8(0))
	f.Add([]byte(v2IPv4+"early"), uint8(1))
	l := testListener(f, Config{
		Mode: access.Forward, Target: "a.test:1",
		TrustedProxies: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")},
	})
	f.Fuzz(func(t *testing.T, data []byte, chunk uint8) { play(t, l, data, chunk) })
}
