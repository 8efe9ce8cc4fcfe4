package ingress

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/access"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(starvedChild())
	}
	os.Exit(need.Run(m))
}

func testListener(tb testing.TB, cfg Config) *Socket {
	tb.Helper()
	cfg.Name = "test"
	require.NoError(tb, cfg.validateConfig())
	l, err := newSocket(cfg, &fakeAcceptor{})
	require.NoError(tb, err)
	return l
}

// handshake is one row: what a client says, and what comes of it.
type handshake struct {
	name  string
	says  string
	hears string // before any Answer
	// of a good one
	target string // of an address
	host   string
	early  string // what follows the handshake
	// of a bad one
	err string // what the error contains
}

// run plays the row in one piece, byte by byte and in threes.
func (h handshake) run(t *testing.T, cfg Config) {
	t.Helper()
	l := testListener(t, cfg)
	for _, chunk := range []int{0, 1, 3} {
		conn := newFakeConn(h.says)
		conn.chunk = chunk
		conn.hangUp = h.err != ""
		c, err := l.Greet(t.Context(), conn)
		if h.err != "" {
			assert.ErrorContains(t, err, h.err, "chunks of %d", chunk)
			assert.True(t, strings.HasPrefix(conn.heard(), h.hears) && (h.hears != "" || conn.heard() == ""),
				"chunks of %d: heard %q", chunk, conn.heard())
			closed, _ := conn.isClosed()
			assert.True(t, closed, "a refused connection is closed")
			continue
		}
		require.NoError(t, err, "chunks of %d", chunk)
		assert.Equal(t, h.hears, conn.heard())
		if h.target != "" {
			assert.Equal(t, h.target, c.Target.String())
		} else {
			assert.False(t, c.Target.IsValid(), "a named host is not an address too")
		}
		assert.Equal(t, h.host, c.Host)

		// What was read and what was not, in order, in both ways of reading.
		conn.hangUp = true
		if chunk == 3 {
			got, err := io.ReadAll(c)
			require.NoError(t, err)
			assert.Equal(t, h.early, string(got))
			continue
		}
		early, raw := c.Detach()
		assert.Same(t, conn, raw)
		rest := io.Reader(raw)
		if c.Exchange != nil {
			rest = c.Exchange.RequestFrom(raw)
		}
		got, err := io.ReadAll(rest)
		require.NoError(t, err)
		assert.Equal(t, h.early, string(early)+string(got))
		if h.early == "" {
			assert.Same(t, conn, c.Conn, "no early bytes: nothing stands between the relay and the leg")
		}
	}
}

func TestSilentClientIsDroppedWhenItsTimeIsUp(t *testing.T) {
	for _, mode := range []access.Mode{access.SOCKS5, access.Connect, access.Mixed} {
		conn := newFakeConn("")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := testListener(t, Config{Mode: mode}).Greet(ctx, conn)
		assert.ErrorIs(t, err, context.Canceled)
		closed, _ := conn.isClosed()
		assert.True(t, closed)
	}
}

func TestHandshakeTimeoutEndsASilentClient(t *testing.T) {
	conn := newFakeConn("\x05\x01")
	_, err := testListener(t, Config{Mode: access.SOCKS5, HandshakeTimeout: 1}).Greet(t.Context(), conn)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	closed, _ := conn.isClosed()
	assert.True(t, closed)
}

func TestCapturedClientGoesWhereItsPacketWent(t *testing.T) {
	l := testListener(t, Config{Mode: access.TPROXY})
	conn := newFakeConn("hello")
	conn.local = net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[::ffff:203.0.113.9]:443"))
	c, err := l.Greet(t.Context(), conn)
	require.NoError(t, err)
	assert.Equal(t, "203.0.113.9:443", c.Target.String(), "IPv4 is not left in its IPv6 disguise")
	assert.Equal(t, "198.51.100.7:40000", c.Source.String())
	assert.Empty(t, conn.heard())
	require.NoError(t, c.Answer(netip.AddrPort{}, nil))
	closed, _ := conn.isClosed()
	assert.False(t, closed)
	require.NoError(t, c.Answer(netip.AddrPort{}, syscall.ECONNREFUSED))
	_, reset := conn.isClosed()
	assert.True(t, reset, "the handshake was answered already: only RST says that the dial failed")
}

func TestLoopsAreRefused(t *testing.T) {
	for _, row := range []struct {
		name, listen, target string
		refused              bool
	}{
		{"the listener's own address", "192.0.2.1:1080", "192.0.2.1:1080", true},
		{"its address, another port", "192.0.2.1:1080", "192.0.2.1:443", false},
		{"its port on another host", "192.0.2.1:1080", "203.0.113.9:1080", false},
		{"wildcard: loopback is ours", "0.0.0.0:1080", "127.0.0.1:1080", true},
		{"wildcard: IPv6 loopback is ours", "[::]:1080", "[::1]:1080", true},
		{"wildcard: a server that uses the same port", "[::]:1080", "203.0.113.9:1080", false},
		{"a link-local listener with a zone", "[fe80::1%eth0]:1080", "[fe80::1]:1080", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			l, err := newSocket(Config{Name: "test", Mode: access.TPROXY},
				&fakeAcceptor{addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(row.listen))})
			require.NoError(t, err)
			conn := newFakeConn("")
			conn.local = net.TCPAddrFromAddrPort(netip.MustParseAddrPort(row.target))
			_, err = l.Greet(t.Context(), conn)
			_, reset := conn.isClosed()
			if row.refused {
				assert.ErrorContains(t, err, "would loop")
				assert.True(t, reset)
			} else {
				assert.NoError(t, err)
			}
		})
	}
}

func TestRedirectWithoutConntrackEntryIsRefused(t *testing.T) {
	conn := newFakeConn("")
	_, err := testListener(t, Config{Mode: access.Redirect}).Greet(t.Context(), conn)
	assert.ErrorContains(t, err, "without a capture rule")
	_, reset := conn.isClosed()
	assert.True(t, reset)
}

func TestForwardGoesToItsOneTarget(t *testing.T) {
	for target, want := range map[string]handshake{
		"192.0.2.80:443":   {target: "192.0.2.80:443"},
		"[2001:db8::1]:22": {target: "[2001:db8::1]:22"},
		"origin.test:8080": {host: "origin.test:8080"},
	} {
		conn := newFakeConn("early")
		c, err := testListener(t, Config{Mode: access.Forward, Target: target}).Greet(t.Context(), conn)
		require.NoError(t, err)
		assert.True(t, c.Fixed)
		assert.Equal(t, want.host, c.Host)
		if want.target != "" {
			assert.Equal(t, want.target, c.Target.String())
		}
		require.NoError(t, c.Answer(netip.AddrPort{}, errors.New("no")))
		_, reset := conn.isClosed()
		assert.True(t, reset)
	}
}

func TestAnAddressWrittenAsANameIsAnAddress(t *testing.T) {
	for _, row := range []struct{ host, port, target, name, err string }{
		{host: "127.0.0.1", port: "80", target: "127.0.0.1:80"},
		{host: "::ffff:127.0.0.1", port: "80", target: "127.0.0.1:80"},
		{host: "fe80::1%eth0", port: "80", target: "[fe80::1]:80"},
		{host: "Example.ORG", port: "00080", name: "Example.ORG:80"},
		{host: "a_b-c.d", port: "65535", name: "a_b-c.d:65535"},
		{host: "", port: "80", err: "host name of 0 bytes"},
		{host: "a b", port: "80", err: "no host name has"},
		{host: "a\x00.test", port: "80", err: "no host name has"},
		{host: "user@host", port: "80", err: "no host name has"},
		{host: "bücher.test", port: "80", err: "no host name has"},
		{host: strings.Repeat("a", 256), port: "80", err: "256 bytes"},
		{host: "a.test", port: "0", err: "not in 1..65535"},
		{host: "a.test", port: "65536", err: "not in 1..65535"},
		{host: "a.test", port: "", err: "not in 1..65535"},
		{host: "a.test", port: "-1", err: "not in 1..65535"},
		{host: "a.test", port: "http", err: "not in 1..65535"},
	} {
		target, name, err := destinationOf(row.host, row.port)
		if row.err != "" {
			assert.ErrorContains(t, err, row.err)
			continue
		}
		assert.NoError(t, err)
		assert.Equal(t, row.name, name)
		if row.target != "" {
			assert.Equal(t, row.target, target.String())
		}
	}
}
