package ingress

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
)

func TestCONNECTHandshake(t *testing.T) {
	for _, row := range []handshake{
		{
			name: "name", says: "CONNECT origin.test:443 HTTP/1.1\r\nHost: origin.test:443\r\n\r\n",
			host: "origin.test:443",
		},
		{name: "no headers", says: "CONNECT origin.test:443 HTTP/1.1\r\n\r\n", host: "origin.test:443"},
		{name: "HTTP/1.0", says: "CONNECT origin.test:443 HTTP/1.0\r\n\r\n", host: "origin.test:443"},
		{name: "bare newlines", says: "CONNECT origin.test:443 HTTP/1.1\nHost: x\n\n", host: "origin.test:443"},
		{name: "IPv4", says: "CONNECT 192.0.2.80:443 HTTP/1.1\r\n\r\n", target: "192.0.2.80:443"},
		{name: "IPv6", says: "CONNECT [2001:db8::1]:443 HTTP/1.1\r\n\r\n", target: "[2001:db8::1]:443"},
		{
			name: "the request line counts, not Host", says: "CONNECT a.test:443 HTTP/1.1\r\nHost: b.test:80\r\n\r\n",
			host: "a.test:443",
		},
		{
			name: "early data", says: "CONNECT a.test:443 HTTP/1.1\r\n\r\n\x16\x03\x01early", host: "a.test:443",
			early: "\x16\x03\x01early",
		},
		{name: "empty content", says: "CONNECT a.test:443 HTTP/1.1\r\nContent-Length: 0\r\n\r\n", host: "a.test:443"},
		{
			name: "long header", says: "CONNECT a.test:443 HTTP/1.1\r\nX: " + strings.Repeat("x",
				12_000) + "\r\n\r\nearly",
			host: "a.test:443", early: "early",
		},

		{name: "nothing", err: "EOF"},
		{name: "gone within the request", says: "CONNECT a.te", err: "EOF"},
		{name: "gone within the headers", says: "CONNECT a.test:443 HTTP/1.1\r\nHost: a", err: "EOF"},
		{
			name: "endless header", says: "CONNECT a.test:443 HTTP/1.1\r\nX: " + strings.Repeat("x", 100_000),
			hears: "HTTP/1.1 431 ", err: "too long",
		},
		{name: "endless request line", says: strings.Repeat("C", 100_000), hears: "HTTP/1.1 431 ", err: "too long"},
		{
			name: "TLS", says: "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
			hears: "HTTP/1.1 400 Bad Request\r\n", err: "malformed",
		},
		{name: "no version", says: "CONNECT a.test:443\r\n\r\n", hears: "HTTP/1.1 400 ", err: "malformed"},
		{name: "no port", says: "CONNECT a.test HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ", err: "missing port"},
		{name: "port 0", says: "CONNECT a.test:0 HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ", err: "not in 1..65535"},
		{
			name: "port too large", says: "CONNECT a.test:65536 HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ",
			err: "not in 1..65535",
		},
		{name: "no host", says: "CONNECT :443 HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ", err: "host name of 0 bytes"},
		{
			name: "user in the host", says: "CONNECT me@a.test:443 HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ",
			err: "no host name has",
		},
		{
			name: "path behind the port", says: "CONNECT a.test:443/x HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ",
			err: "not in 1..65535",
		},
		{
			name: "content", says: "CONNECT a.test:443 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
			hears: "HTTP/1.1 400 ", err: "cannot have content",
		},
		{
			name: "chunked content", says: "CONNECT a.test:443 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
			hears: "HTTP/1.1 400 ", err: "cannot have content",
		},
		{
			name: "bad header", says: "CONNECT a.test:443 HTTP/1.1\r\nno colon\r\n\r\n", hears: "HTTP/1.1 400 ",
			err: "malformed",
		},
		{
			name: "GET", says: "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
			hears: "HTTP/1.1 405 Method Not Allowed\r\nAllow: CONNECT\r\n", err: `method "GET"`,
		},
		{name: "HTTP/2", says: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", hears: "HTTP/1.1 405 ", err: `method "PRI"`},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, Config{Mode: access.Connect}) })
	}
}

func TestCONNECTPassword(t *testing.T) {
	cfg := Config{Mode: access.Connect, Auth: []User{{"alice", "secret"}}}
	const line, need = "CONNECT a.test:443 HTTP/1.1\r\n", "HTTP/1.1 407 Proxy Authentication " +
		"Required\r\nProxy-Authenticate: Basic realm=\"penstock\"\r\n"
	for _, row := range []handshake{
		{
			name: "right", says: line + "Proxy-Authorization: Basic YWxpY2U6c2VjcmV0\r\n\r\nearly", host: "a.test:443",
			early: "early",
		},
		{name: "none", says: line + "\r\n", hears: need, err: "no name"},
		{
			name: "wrong password", says: line + "Proxy-Authorization: Basic YWxpY2U6c2VjcmVU\r\n\r\n", hears: need,
			err: "wrong password",
		},
		{name: "not base64", says: line + "Proxy-Authorization: Basic !!!\r\n\r\n", hears: need, err: "no name"},
		{
			name: "another scheme", says: line + "Proxy-Authorization: Bearer YWxpY2U6c2VjcmV0\r\n\r\n", hears: need,
			err: "no name",
		},
		{
			name: "meant for the server", says: line + "Authorization: Basic YWxpY2U6c2VjcmV0\r\n\r\n", hears: need,
			err: "no name",
		},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, cfg) })
	}
}

func TestCONNECTAnswers(t *testing.T) {
	greet := func(t *testing.T) (Client, *fakeConn) {
		t.Helper()
		conn := newFakeConn("CONNECT a.test:443 HTTP/1.1\r\n\r\n")
		c, err := testListener(t, Config{Mode: access.Connect}).Greet(t.Context(), conn)
		require.NoError(t, err)
		return c, conn
	}
	c, conn := greet(t)
	require.NoError(t, c.Answer(netip.MustParseAddrPort("192.0.2.1:4000"), nil))
	assert.Equal(t, "HTTP/1.1 200 Connection established\r\n\r\n", conn.heard())
	for _, row := range dialErrors {
		t.Run(row.name, func(t *testing.T) {
			c, conn := greet(t)
			require.NoError(t, c.Answer(netip.AddrPort{}, row.err))
			assert.True(t, strings.HasPrefix(conn.heard(),
				"HTTP/1.1 "+row.status+"\r\nProxy-Status: penstock; error="), conn.heard())
			closed, reset := conn.isClosed()
			assert.True(t, closed && !reset)
		})
	}
}

func TestMixedTellsProtocolsApart(t *testing.T) {
	for _, row := range []handshake{
		{
			name: "SOCKS5", says: hello + connect4 + someone + "early", hears: accepted, target: "192.0.2.80:443",
			early: "early",
		},
		{name: "CONNECT", says: "CONNECT a.test:443 HTTP/1.1\r\n\r\nearly", host: "a.test:443", early: "early"},
		{name: "GET", says: "GET / HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 405 ", err: "method"},
		{name: "nothing", err: "EOF"},
		{name: "SOCKS4", says: "\x04\x01", err: "neither SOCKS5 nor HTTP"},
		{name: "TLS", says: "\x16\x03\x01", err: "neither SOCKS5 nor HTTP"},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, Config{Mode: access.Mixed}) })
	}
}
