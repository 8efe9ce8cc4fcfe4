package ingress

import (
	"bytes"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
)

const (
	v2      = "\r\n\r\n\x00\r\nQUIT\n"
	v2IPv4  = v2 + "\x21\x11\x00\x0c\xcb\x00\x71\x05\xc0\x00\x02\x50\x04\xd2\x01\xbb"
	trailer = "hello"
)

func TestProxyHeader(t *testing.T) {
	cfg := Config{
		Mode: access.Forward, Target: "a.test:1",
		TrustedProxies: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
	}
	const peer = "198.51.100.7:40000"
	for _, row := range []struct{ name, says, source, err string }{
		{name: "v1 IPv4", says: "PROXY TCP4 203.0.113.5 192.0.2.80 1234 443\r\n", source: "203.0.113.5:1234"},
		{name: "v1 IPv6", says: "PROXY TCP6 2001:db8::5 2001:db8::80 1234 443\r\n", source: "[2001:db8::5]:1234"},
		{name: "v1 unknown speaks for the peer", says: "PROXY UNKNOWN\r\n", source: peer},
		{name: "v1 unknown of full length", says: "PROXY UNKNOWN " + strings.Repeat("f", 91) + "\r\n", source: peer},
		{name: "v2 IPv4", says: v2IPv4, source: "203.0.113.5:1234"},
		{
			name: "v2 IPv6", says: v2 + "\x21\x21\x00\x24\x20\x01\x0d\xb8" + strings.Repeat("\x00", 11) + "\x05" +
				"\x20\x01\x0d\xb8" + strings.Repeat("\x00",
				11) + "\x80" + "\x04\xd2\x01\xbb", source: "[2001:db8::5]:1234",
		},
		{name: "v2 local speaks for the peer", says: v2 + "\x20\x00\x00\x00", source: peer},
		{name: "v2 local with something to skip", says: v2 + "\x20\x11\x00\x03abc", source: peer},
		{name: "v2 with a TLV", says: v2 + "\x21\x11\x00\x11\xcb\x00\x71\x05\xc0\x00\x02\x50\x04\xd2\x01\xbb\x04\x00\x02hi", source: "203.0.113.5:1234"},

		{name: "nothing", err: "EOF"},
		{name: "no header", says: "GET / HTTP/1.1\r\n\r\n", err: "this is none"},
		{name: "nearly v1", says: "PROXZ TCP4 203.0.113.5 192.0.2.80 1234 443\r\n", err: "this is none"},
		{name: "nearly v2", says: "\r\n\r\n\x00\r\nQUIX\n", err: "this is none"},
		{name: "v1 cut", says: "PROXY TCP4 203.0", err: "EOF"},
		{name: "v1 without a space", says: "PROXYX TCP4 203.0.113.5 192.0.2.80 1234 443\r\n", err: "version 1"},
		{name: "v1 without return", says: "PROXY TCP4 203.0.113.5 192.0.2.80 1234 443\n", err: "\\r\\n"},
		{name: "v1 too long", says: "PROXY UNKNOWN " + strings.Repeat("f", 200) + "\r\n", err: "without an end"},
		{name: "v1 of UDP", says: "PROXY UDP4 203.0.113.5 192.0.2.80 1234 443\r\n", err: "family"},
		{
			name: "v1 of the wrong family", says: "PROXY TCP4 2001:db8::5 2001:db8::80 1234 443\r\n",
			err: "invalid address",
		},
		{name: "v1 with a bad port", says: "PROXY TCP4 203.0.113.5 192.0.2.80 65536 443\r\n", err: "invalid port"},
		{name: "v1 with a word too many", says: "PROXY TCP4 203.0.113.5 192.0.2.80 1234 443 x\r\n", err: "family"},
		{name: "v2 cut in the fixed part", says: v2 + "\x21", err: "EOF"},
		{name: "v2 cut in the addresses", says: v2 + "\x21\x11\x00\x0c\xcb", err: "EOF"},
		{
			name: "v2 of version 3", says: v2 + "\x31\x11\x00\x0c" + strings.Repeat("\x00", 12),
			err: "version and command",
		},
		{name: "v2 of UDP", says: v2 + "\x21\x12\x00\x0c" + strings.Repeat("\x00", 12), err: "not of a TCP connection"},
		{
			name: "v2 of a UNIX socket", says: v2 + "\x21\x31\x00\xd8" + strings.Repeat("\x00", 216),
			err: "not of a TCP connection",
		},
		{name: "v2 shorter than its addresses", says: v2 + "\x21\x11\x00\x04\xcb\x00\x71\x05", err: "invalid length"},
		{name: "v2 too long", says: v2 + "\x21\x11\xff\xff" + strings.Repeat("\x00", 65535), err: "65535 bytes"},
	} {
		t.Run(row.name, func(t *testing.T) {
			for _, chunk := range []int{0, 1} {
				conn := newFakeConn(row.says)
				conn.chunk, conn.hangUp = chunk, true
				if row.err == "" {
					conn.in = append(conn.in, trailer...)
				}
				c, err := testListener(t, cfg).Greet(t.Context(), conn)
				if row.err != "" {
					assert.ErrorContains(t, err, row.err)
					_, reset := conn.isClosed()
					assert.True(t, reset)
					assert.Empty(t, conn.heard(), "the protocol has no answer")
					continue
				}
				require.NoError(t, err)
				assert.Equal(t, row.source, c.Source.String())
				got := make([]byte, len(trailer))
				_, err = readFull(c, got)
				require.NoError(t, err)
				assert.Equal(t, trailer, string(got))
			}
		})
	}
}

func readFull(c Client, b []byte) (int, error) {
	n := 0
	for n < len(b) {
		m, err := c.Read(b[n:])
		n += m
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func TestOnlyListedPeersMaySpeakForOthers(t *testing.T) {
	cfg := Config{Mode: access.Mixed, TrustedProxies: []netip.Prefix{netip.MustParsePrefix("198.51.100.7/32")}}
	l := testListener(t, cfg)

	conn := newFakeConn(v2IPv4 + hello + connect4 + someone + "early")
	c, err := l.Greet(t.Context(), conn)
	require.NoError(t, err)
	assert.Equal(t, "203.0.113.5:1234", c.Source.String())
	assert.Equal(t, "192.0.2.80:443", c.Target.String(), "the header's destination is not the client's wish")
	early, _ := c.Detach()
	assert.Equal(t, "early", string(early))

	stranger := newFakeConn(v2IPv4 + hello + connect4 + someone)
	stranger.remote = net.TCPAddrFromAddrPort(netip.MustParseAddrPort("198.51.100.8:40000"))
	stranger.hangUp = true
	_, err = l.Greet(t.Context(), stranger)
	assert.ErrorContains(t, err, "neither SOCKS5 nor HTTP", "a stranger's header is data")

	mapped := newFakeConn(hello + connect4 + someone)
	mapped.remote = net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[::ffff:198.51.100.7]:40000"))
	mapped.hangUp = true
	_, err = l.Greet(t.Context(), mapped)
	assert.ErrorContains(t, err, "this is none", "a listed peer must send one, also over a dual-stack socket")
}

func TestWriteProxyHeader(t *testing.T) {
	source, target := netip.MustParseAddrPort("203.0.113.5:1234"), netip.MustParseAddrPort("192.0.2.80:443")
	for _, row := range []struct {
		name           string
		version        int
		source, target netip.AddrPort
		want           string
	}{
		{"v1", 1, source, target, "PROXY TCP4 203.0.113.5 192.0.2.80 1234 443\r\n"},
		{
			"v1 between families", 1, source, netip.MustParseAddrPort("[2001:db8::80]:443"),
			"PROXY UNKNOWN\r\n",
		},
		{"v1 unknown", 1, netip.AddrPort{}, target, "PROXY UNKNOWN\r\n"},
		{"v2", 2, source, target, v2IPv4},
		{"v2 of mapped addresses", 2, netip.AddrPortFrom(netip.AddrFrom16(source.Addr().As16()), 1234), target, v2IPv4},
		{"v2 local", 2, netip.AddrPort{}, netip.AddrPort{}, v2 + "\x20\x00\x00\x00"},
	} {
		var b bytes.Buffer
		require.NoError(t, WriteProxyHeader(&b, row.version, row.source, row.target), row.name)
		assert.Equal(t, row.want, b.String(), row.name)
	}
	assert.ErrorContains(t, WriteProxyHeader(&bytes.Buffer{}, 3, source, target), "version 3")
}
