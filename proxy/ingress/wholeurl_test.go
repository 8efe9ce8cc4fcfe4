package ingress

import (
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
)

func TestRequestsForWholeURLs(t *testing.T) {
	const ends = "Via: 1.1 penstock\r\nConnection: close\r\n\r\n"
	const refused, notWhole = "HTTP/1.1 405 Method Not Allowed\r\nAllow: CONNECT\r\n", "without an http:// URL"
	const chunks = "5\r\nhello\r\n0\r\n\r\n"
	for _, row := range []handshake{
		{
			name: "a page", says: "GET http://a.test/page?q=1 HTTP/1.1\r\nHost: a.test\r\nAccept: */*\r\n\r\n",
			host: "a.test:80", early: "GET /page?q=1 HTTP/1.1\r\nHost: a.test\r\nAccept: */*\r\n" + ends,
		},
		{
			name: "a port, and no path", says: "HEAD http://a.test:8080 HTTP/1.1\r\nHost: b.test\r\n\r\n",
			host: "a.test:8080", early: "HEAD / HTTP/1.1\r\nHost: a.test:8080\r\n" + ends,
		},
		{
			name: "a path in letters of its own", says: "GET http://a.test/a%2Fb|c^[d]/../e//?q=%|x HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET /a%2Fb|c^[d]/../e//?q=%|x HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "a stray percent sign", says: "GET http://a.test/100%zz%?%q HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET /100%zz%?%q HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "bytes beyond ASCII", says: "GET http://a.test/\xc3\xbc\xff HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET /\xc3\xbc\xff HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "a fragment goes no further", says: "GET http://a.test/a?b#c/d?e HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET /a?b HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "a fragment and no path", says: "GET http://a.test#/b HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET / HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "fields keep their order and spelling", host: "A.test:80",
			says:  "GET HTTP://A.test/ HTTP/1.1\r\nx-b: 1\r\nHOST: z\r\nX-A:2\r\naccept:\t*/* \r\nX-A: 3\n\r\n",
			early: "GET / HTTP/1.1\r\nx-b: 1\r\nHOST: A.test\r\nX-A: 2\r\naccept: */*\r\nX-A: 3\r\n" + ends,
		},
		{
			name: "an empty line first", says: "\r\n\r\nGET http://a.test/ HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET / HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "a WebSocket", host: "a.test:80",
			says: "GET ws://a.test/chat HTTP/1.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n" +
				"Sec-WebSocket-Key: k\r\n\r\nearly",
			early: "GET /chat HTTP/1.1\r\nHost: a.test\r\nSec-WebSocket-Key: k\r\nVia: 1.1 penstock\r\n" +
				"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
		},
		{
			name: "HTTP/2 without TLS is no WebSocket", host: "a.test:80",
			says: "GET http://a.test/ HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" +
				"HTTP2-Settings: x\r\n\r\n",
			early: "GET / HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "a length that is told twice", host: "a.test:80",
			says:  "POST http://a.test/ HTTP/1.1\r\nContent-Length: 5\r\ncontent-length: 5\r\n\r\nhello",
			early: "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n" + ends + "hello",
		},
		{
			name: "chunks to an old server are none", host: "a.test:80",
			says:  "PUT http://a.test/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
			early: "PUT / HTTP/1.0\r\nHost: a.test\r\nVia: 1.0 penstock\r\nConnection: close\r\n\r\n",
		},
		{
			name: "a query, and no path", says: "GET http://a.test?http://b/ HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET /?http://b/ HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "an address", says: "GET http://[2001:db8::1]/ HTTP/1.1\r\n\r\n",
			target: "[2001:db8::1]:80", early: "GET / HTTP/1.1\r\nHost: [2001:db8::1]\r\n" + ends,
		},
		{
			name: "HTTP/1.0", says: "GET http://192.0.2.80/ HTTP/1.0\r\n\r\n", target: "192.0.2.80:80",
			early: "GET / HTTP/1.0\r\nHost: 192.0.2.80\r\nVia: 1.0 penstock\r\nConnection: close\r\n\r\n",
		},
		{
			name: "content", says: "POST http://a.test/ HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", host: "a.test:80",
			early: "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n" + ends + "hello",
		},
		{
			name: "content in chunks", host: "a.test:80",
			says:  "PUT http://a.test/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
			early: "PUT / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n" + ends + chunks,
		},
		{
			name: "requests behind it go nowhere", host: "a.test:80",
			says: "GET http://a.test/ HTTP/1.1\r\n\r\n" +
				"GET http://b.test/ HTTP/1.1\r\nProxy-Authorization: Basic YWxpY2U6c2VjcmV0\r\n\r\n",
			early: "GET / HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "nor do they behind content", host: "a.test:80",
			says:  "POST http://a.test/ HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloGET http://b.test/ HTTP/1.1\r\n\r\n",
			early: "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n" + ends + "hello",
		},
		{
			name: "nor behind chunks", host: "a.test:80",
			says: "PUT http://a.test/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" +
				"0c;x=\"y\"\r\nhello\r\n0\r\n\r\n\r\n0\r\nA: b\r\n\r\nGET http://b.test/ HTTP/1.1\r\n\r\n",
			early: "PUT / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n" + ends +
				"0c;x=\"y\"\r\nhello\r\n0\r\n\r\n\r\n0\r\nA: b\r\n\r\n",
		},
		{
			name: "a zone goes no further", says: "GET http://[fe80::1%25lo]/ HTTP/1.1\r\n\r\n",
			target: "[fe80::1]:80", early: "GET / HTTP/1.1\r\nHost: [fe80::1]\r\n" + ends,
		},
		{
			name: "a version that is not there yet", says: "GET http://a.test/ HTTP/1.9\r\n\r\n", host: "a.test:80",
			early: "GET / HTTP/1.1\r\nHost: a.test\r\nVia: 1.9 penstock\r\nConnection: close\r\n\r\n",
		},
		{
			name: "fields between client and proxy", host: "a.test:80",
			says: "GET http://a.test/ HTTP/1.1\r\nConnection: keep-alive, X-Mine\r\n" +
				"Connection: content-length, host\r\nContent-Length: 0\r\n" +
				"Keep-Alive: 5\r\nProxy-Connection: keep-alive\r\nX-Mine: 1\r\nTE: trailers\r\nUpgrade: " +
				"h2c\r\nCookie: c=1\r\n\r\n",
			early: "GET / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\nCookie: c=1\r\n" + ends,
		},
		{
			name: "all of a server", says: "OPTIONS http://a.test HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "OPTIONS * HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{
			name: "a name and a password in the URL go no further", says: "GET http://me:secret@a.test/ " +
				"HTTP/1.1\r\n\r\n",
			host: "a.test:80", early: "GET / HTTP/1.1\r\nHost: a.test\r\n" + ends,
		},
		{name: "no URL", says: "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", hears: refused, err: notWhole},
		{name: "https", says: "GET https://a.test/ HTTP/1.1\r\n\r\n", hears: refused, err: notWhole},
		{name: "ftp", says: "GET ftp://a.test/ HTTP/1.1\r\n\r\n", hears: refused, err: notWhole},
		{name: "no host", says: "GET http:///page HTTP/1.1\r\n\r\n", hears: refused, err: notWhole},
		{name: "port 0", says: "GET http://a.test:0/ HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ", err: "not in 1..65535"},
		{
			name: "no such name", says: "GET http://a!b/ HTTP/1.1\r\n\r\n", hears: "HTTP/1.1 400 ",
			err: "no host name has",
		},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, Config{Mode: access.Connect}) })
	}

	locked := Config{Mode: access.Mixed, Auth: []User{{"alice", "secret"}}}
	for _, row := range []handshake{
		{
			name: "a name and a password for the proxy go no further", host: "a.test:80",
			says: "GET http://a.test/ HTTP/1.1\r\nProxy-Authorization: Basic YWxpY2U6c2VjcmV0\r\n" +
				"Authorization: Basic Zm9v\r\n\r\n",
			early: "GET / HTTP/1.1\r\nHost: a.test\r\nAuthorization: Basic Zm9v\r\n" + ends,
		},
		{
			name: "none", says: "GET http://a.test/ HTTP/1.1\r\n\r\n",
			hears: "HTTP/1.1 407 Proxy Authentication Required\r\n", err: "no name",
		},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, locked) })
	}
}

func TestRequestsThatServersUnderstandInDifferentWaysAreRefused(t *testing.T) {
	for name, fields := range map[string]string{
		"a blank before the colon":  "Transfer-Encoding : chunked\r\n",
		"a tab before the colon":    "Transfer-Encoding\t: chunked\r\n",
		"a continued line":          "X: 1\r\n Transfer-Encoding: chunked\r\n",
		"a first line that is one":  " Transfer-Encoding: chunked\r\n",
		"no name":                   ": chunked\r\n",
		"no colon":                  "Transfer-Encoding\r\n",
		"a return in a line":        "X: 1\rTransfer-Encoding: chunked\r\n",
		"NUL":                       "X: \x00\r\n",
		"two lengths":               "Content-Length: 1\r\nContent-Length: 2\r\n",
		"a list of lengths":         "Content-Length: 1, 1\r\n",
		"a length with a sign":      "Content-Length: +1\r\n",
		"another transfer encoding": "Transfer-Encoding: gzip, chunked\r\n",
		"two transfer encodings":    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
		"two hosts":                 "Host: a\r\nHost: b\r\n",
	} {
		for _, target := range []string{"GET http://a.test/", "CONNECT a.test:443"} {
			conn := newFakeConn(target + " HTTP/1.1\r\n" + fields + "\r\nG")
			conn.hangUp = true
			_, err := testListener(t, Config{Mode: access.Connect}).Greet(t.Context(), conn)
			require.ErrorIs(t, err, errNotHTTP, name)
			assert.True(t, strings.HasPrefix(conn.heard(), "HTTP/1.1 400 "), name)
		}
	}
}

func TestNoPasswordIsInAnError(t *testing.T) {
	for _, says := range []string{
		"GET http://me:secret%zz@a.test/ HTTP/1.1\r\n\r\n",
		"GET http://me:x secret@a.test/ HTTP/1.1\r\n\r\n",
		"GET http://a.test/ HTTP/1.1\r\nProxy-Authorization: secret\x00\r\n\r\n",
	} {
		conn := newFakeConn(says)
		conn.hangUp = true
		_, err := testListener(t, Config{Mode: access.Connect}).Greet(t.Context(), conn)
		assert.ErrorContains(t, err, "malformed")
		assert.NotContains(t, err.Error(), "secret")
	}
}

// Errors go to the log.
func TestNoErrorIsAsLongAsTheClientLikes(t *testing.T) {
	long := strings.Repeat("9", 10_000)
	for _, says := range []string{
		"M" + strings.Repeat("A", 10_000) + " /", "CONNECT a:" + long, "CONNECT " + long, "GET http://a:" + long,
	} {
		conn := newFakeConn(says + " HTTP/1.1\r\n\r\n")
		conn.hangUp = true
		_, err := testListener(t, Config{Mode: access.Connect}).Greet(t.Context(), conn)
		require.Error(t, err)
		assert.Less(t, len(err.Error()), 500)
	}
}

func TestChunksThatAreNoneAreRefused(t *testing.T) {
	conn := newFakeConn("PUT http://a.test/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno")
	conn.hangUp = true
	_, err := testListener(t, Config{Mode: access.Connect}).Greet(t.Context(), conn)
	assert.ErrorIs(t, err, errChunk)
	assert.True(t, strings.HasPrefix(conn.heard(), "HTTP/1.1 400 "))
}

func TestContentInChunks(t *testing.T) {
	for _, row := range []struct {
		name, says, want string
		err              bool
	}{
		{"whole", "A\r\n0123456789\r\n0\r\n\r\nmore", "A\r\n0123456789\r\n0\r\n\r\n", false},
		{"no size", "\r\n", "", true},
		{"no number", "-1\r\n", "", true},
		{"a number in Go alone", "0x1\r\na", "0", true},
		{"more than 63 bits", "0000000000000001\r\na\r\n", "000000000000000", true},
		{"a line that ends with LF", "1\na\r\n", "1", true},
		{"an extension that ends with LF", "1;a\na\r\n", "1;a", true},
		{"an extension that ends with CR", "1;a\rb\r\n", "1;a\r", true},
		{"a chunk that goes on", "1\r\nab\r\n", "1\r\na", true},
		{"a trailer that ends with LF", "0\r\nA: b\n\r\n", "0\r\nA: b", true},
	} {
		for _, chunk := range []int{0, 1, 3} {
			conn := newFakeConn(row.says)
			conn.chunk, conn.hangUp = chunk, true
			got, err := io.ReadAll(&contentReader{content: &content{chunked: true}, src: conn})
			assert.Equal(t, row.want, string(got), row.name)
			assert.Equal(t, row.err, err != nil, row.name)
		}
	}
}

func TestARequestForAURLIsAnsweredByTheServerAlone(t *testing.T) {
	for _, row := range dialErrors {
		conn := newFakeConn("GET http://a.test/ HTTP/1.1\r\n\r\n")
		c, err := testListener(t, Config{Mode: access.Mixed}).Greet(t.Context(), conn)
		require.NoError(t, err)
		require.NoError(t, c.Answer(netip.AddrPort{}, row.err), row.name)
		assert.True(t, strings.HasPrefix(conn.heard(), "HTTP/1.1 "+row.status+"\r\nProxy-Status: penstock; error="),
			row.name)
	}
	conn := newFakeConn("GET http://a.test/ HTTP/1.1\r\n\r\n")
	c, err := testListener(t, Config{Mode: access.Mixed}).Greet(t.Context(), conn)
	require.NoError(t, err)
	require.NoError(t, c.Answer(netip.MustParseAddrPort("192.0.2.1:4000"), nil))
	assert.Empty(t, conn.heard())
}
