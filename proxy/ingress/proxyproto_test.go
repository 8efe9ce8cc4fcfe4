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
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/greeting"
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
		{name: "v2 local of an unknown family", says: v2 + "\x20\x7f\x00\x03abc", source: peer},
		{name: "v2 unspecified", says: v2 + "\x21\x00\x00\x00", source: peer},
		{name: "v2 unspecified with something to skip", says: v2 + "\x21\x00\x00\x14" + strings.Repeat("q", 20), source: peer},
		{name: "v2 of UDP", says: v2 + "\x21\x12\x00\x0c" + strings.Repeat("\x00", 12), source: peer},
		{name: "v2 of UDP over IPv6", says: v2 + "\x21\x22\x00\x24" + strings.Repeat("\x00", 36), source: peer},
		{name: "v2 of a UNIX socket", says: v2 + "\x21\x31\x00\xd8" + strings.Repeat("\x00", 216), source: peer},
		{name: "v2 of a UNIX datagram", says: v2 + "\x21\x32\x00\xd8" + strings.Repeat("\x00", 216), source: peer},
		{
			name: "v2 of full length", says: v2IPv4[:14] + "\xff\xff" + v2IPv4[16:] + strings.Repeat("\x00", 65535-12),
			source: "203.0.113.5:1234",
		},
		{
			name: "v2 local of full length", says: v2 + "\x20\x00\xff\xff" + strings.Repeat("\x00", 65535), source: peer,
		},
		{
			name: "v1 unknown with any text", says: "PROXY UNKNOWN TCP4 \x00\xff  1 2 3 4 5 6\r\n", source: peer,
		},
		{name: "v1 of IPv4 in its IPv6 form", says: "PROXY TCP6 ::ffff:203.0.113.5 2001:db8::80 1234 443\r\n", source: "203.0.113.5:1234"},
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
		{
			name: "v2 with another command", says: v2 + "\x22\x11\x00\x0c" + strings.Repeat("\x00", 12),
			err: "version and command",
		},
		{
			name: "v2 of an unknown family", says: v2 + "\x21\x41\x00\x0c" + strings.Repeat("\x00", 12),
			err: "family and transport 0x41",
		},
		{
			name: "v2 of an unknown transport", says: v2 + "\x21\x13\x00\x0c" + strings.Repeat("\x00", 12),
			err: "family and transport 0x13",
		},
		{
			name: "v2 shorter than its addresses", says: v2 + "\x21\x11\x00\x04\xcb\x00\x71\x05",
			err: "4 bytes, where the addresses take 12",
		},
		{
			name: "v2 with IPv6 addresses cut", says: v2 + "\x21\x21\x00\x0c" + strings.Repeat("\x00", 12),
			err: "12 bytes, where the addresses take 36",
		},
		{name: "v2 cut in what follows the addresses", says: v2IPv4[:15] + "\x10" + v2IPv4[16:] + "abc", err: "EOF"},
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
	assert.Equal(t, "192.0.2.80:443", c.CameTo().String())
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
	ap := netip.MustParseAddrPort
	client4, client6 := ap("203.0.113.5:1234"), ap("[2001:db8::5]:1234")
	server4, server6 := ap("192.0.2.80:443"), ap("[2001:db8::80]:443")
	here4, here6 := ap("198.51.100.1:7000"), ap("[2001:db8::1]:7000")
	none := netip.AddrPort{}
	mapped := netip.AddrPortFrom(netip.AddrFrom16(client4.Addr().As16()), 1234)
	for _, row := range []struct {
		name                   string
		source, target, cameTo netip.AddrPort
		v1, v2                 string // of v2 what follows the signature and version: family, source, target
	}{
		{"IPv4", client4, server4, here4, "TCP4 203.0.113.5 192.0.2.80 1234 443", v2IPv4[len(v2):]},
		{"IPv4 in its IPv6 form", mapped, server4, here4, "TCP4 203.0.113.5 192.0.2.80 1234 443", v2IPv4[len(v2):]},
		{
			"IPv6", client6, server6, here6, "TCP6 2001:db8::5 2001:db8::80 1234 443",
			"\x21\x21\x00\x24" + bytesOf(client6, server6) + "\x04\xd2\x01\xbb",
		},
		{
			"IPv6 to an IPv4 server", client6, server4, here6, "TCP6 2001:db8::5 2001:db8::1 1234 7000",
			"\x21\x21\x00\x24" + bytesOf(client6, here6) + "\x04\xd2\x1b\x58",
		},
		{
			"IPv4 to an IPv6 server", client4, server6, here4, "TCP4 203.0.113.5 198.51.100.1 1234 7000",
			"\x21\x11\x00\x0c\xcb\x00\x71\x05\xc6\x33\x64\x01\x04\xd2\x1b\x58",
		},
		{
			"IPv4 to an IPv6 server, told where it came over IPv6", client4, server6, here6,
			"TCP6 ::ffff:203.0.113.5 2001:db8::1 1234 7000",
			"\x21\x21\x00\x24" + bytesOf(client4, here6) + "\x04\xd2\x1b\x58",
		},
		{
			"IPv6 to an IPv4 server, and nobody knows where it came to", client6, server4, none,
			"TCP6 2001:db8::5 ::ffff:192.0.2.80 1234 443",
			"\x21\x21\x00\x24" + bytesOf(client6, server4) + "\x04\xd2\x01\xbb",
		},
		{"unknown", none, server4, none, "UNKNOWN", "\x20\x00\x00\x00"},
		{"nothing", none, none, none, "UNKNOWN", "\x20\x00\x00\x00"},
	} {
		t.Run(row.name, func(t *testing.T) {
			for version, want := range map[int]string{1: "PROXY " + row.v1 + "\r\n", 2: v2 + row.v2} {
				var b bytes.Buffer
				require.NoError(t, WriteProxyHeader(&b, version, row.source, row.target, row.cameTo))
				assert.Equal(t, want, b.String())
				var got greeting.ProxyHeader
				n, done, err := got.Feed([]byte(want))
				require.NoError(t, err)
				assert.True(t, done && n == len(want))
				assert.Equal(t, datapath.PlainAddr(row.source).IsValid(), got.Source.IsValid())
				if got.Source.IsValid() {
					assert.Equal(t, datapath.PlainAddr(row.source), got.Source, "what is written is read")
				}
			}
		})
	}
	assert.ErrorContains(t, WriteProxyHeader(&bytes.Buffer{}, 3, client4, server4, here4), "version 3")
}

// bytesOf are IPv6 addresses on the wire.
func bytesOf(a, b netip.AddrPort) string {
	from, to := a.Addr().As16(), b.Addr().As16()
	return string(from[:]) + string(to[:])
}
