package ingress

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// exchangeOf is that of a request with these fields.
func exchangeOf(tb testing.TB, method, fields string) *Exchange {
	tb.Helper()
	req, err := parseRequest([]byte(method + " http://a.test/ HTTP/1.1\r\n" + fields + "\r\n"))
	require.NoError(tb, err)
	return newExchange(req)
}

func TestAnAnswerSaysThatItIsTheLastAndIs(t *testing.T) {
	const ok, kept, closes = "HTTP/1.1 200 OK\r\n", "Connection: keep-alive\r\n", "Connection: close\r\n\r\n"
	const closed = "Connection: close\r\n"
	for _, row := range []struct {
		name, method, server, client string
		untilItEnds                  bool // the answer is as long as the connection
	}{
		{
			name: "with a length", server: ok + "Content-Length: 2\r\n" + kept + "\r\nokHTTP/1.1 200 OK",
			client: ok + "Content-Length: 2\r\n" + closes + "ok",
		},
		{
			name: "in chunks", server: ok + "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nA: b\r\n\r\nmore",
			client: ok + "Transfer-Encoding: chunked\r\n" + closes + "2\r\nok\r\n0\r\nA: b\r\n\r\n",
		},
		{
			name: "without content", server: "HTTP/1.1 204 No Content\r\n" + kept + "\r\nmore",
			client: "HTTP/1.1 204 No Content\r\n" + closes,
		},
		{
			name: "to HEAD", method: http.MethodHead, server: ok + "Content-Length: 2\r\n\r\nmore",
			client: ok + "Content-Length: 2\r\n" + closes,
		},
		{
			name: "not modified", server: "HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\nmore",
			client: "HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n" + closes,
		},
		{
			name: "that ends with the connection", server: ok + "\r\nall of it", untilItEnds: true,
			client: ok + closes + "all of it",
		},
		{
			name: "of HTTP/1.0", server: "HTTP/1.0 200 OK\r\n" + kept + "Content-Length: 2\r\n\r\nokmore",
			client: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n" + closes + "ok",
		},
		{
			name: "behind interim answers",
			server: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok +
				"Content-Length: 0\r\n\r\nmore",
			client: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok +
				"Content-Length: 0\r\n" + closes,
		},
		{
			name: "with fields for the proxy",
			server: ok + "x-b: 1\r\nKeep-Alive: 5\r\nConnection: X-A\r\nX-A: 1\r\nX-C : 2\r\nX-D: 3\r\n  4\r\n" +
				"Content-Length: 0\r\n\r\n",
			client: ok + "x-b: 1\r\nX-C : 2\r\nX-D: 3 4\r\nContent-Length: 0\r\n" + closes,
		},
		{
			name: "with lines that end with LF", server: "HTTP/1.1 200 OK\nContent-Length: 2\n\nokmore",
			client: ok + "Content-Length: 2\r\n" + closes + "ok",
		},
		{name: "of HTTP/0.9", server: "<html>", client: "<html>", untilItEnds: true},
		{
			name: "of two lengths", server: ok + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nok", untilItEnds: true,
			client: ok + closed + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nok",
		},
		{
			name: "with chunks that are malformed", server: ok + "Transfer-Encoding: chunked\r\n\r\n2\nok\n0\n\n",
			client: ok + "Transfer-Encoding: chunked\r\n" + closes + "2\nok\n0\n\n", untilItEnds: true,
		},
		{
			name: "that switches to what nobody asked for", client: "HTTP/1.1 101 Switching Protocols\r\n" + closes,
			server: "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nmore",
		},
		{
			name: "with its length in a list", server: ok + kept + "Content-Length: 2, 2\r\n\r\nokmore",
			client: ok + "Content-Length: 2, 2\r\n" + closes + "ok",
		},
		{
			name: "with a sign before its length", server: ok + "Content-Length: +2\r\n\r\nokmore",
			client: ok + "Content-Length: +2\r\n" + closes + "ok",
		},
		{
			name: "with a line without a colon", server: ok + kept + " x\r\nFoo\r\nContent-Length: 2\r\n\r\nokmore",
			client: ok + closed + "Foo\r\nContent-Length: 2\r\n\r\nok",
		},
		{
			name: "with a control byte in a value", server: ok + "A: \x01\r\nContent-Length: 2\r\n" + kept + "\r\nokmore",
			client: ok + "A: \x01\r\nContent-Length: 2\r\n" + closes + "ok",
		},
		{
			name:   "in chunks of a coding",
			server: ok + "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nmore",
			client: ok + "Transfer-Encoding: gzip, chunked\r\n" + closes + "2\r\nok\r\n0\r\n\r\n",
		},
		{
			name: "of a version that was not asked for", server: "HTTP/2 200\r\nContent-Length: 2\r\n\r\nokmore",
			client: "HTTP/2 200\r\nContent-Length: 2\r\n" + closes + "ok",
		},
		{
			name: "behind an interim answer that is malformed", server: "HTTP/1.1 103 Early Hints\r\nFoo\r\n\r\n" + ok +
				"Content-Length: 0\r\n\r\nmore",
			client: "HTTP/1.1 103 Early Hints\r\nFoo\r\n\r\n" + ok + "Content-Length: 0\r\n" + closes,
		},
		{name: "that is cut", server: "HTTP/1.1 200 OK\r\nConte", client: "HTTP/1.1 200 OK\r\nConte", untilItEnds: true},
		{
			name: "with too long a head", untilItEnds: true,
			server: ok + "X: " + strings.Repeat("x", maxAnswerHead) + "\r\n\r\n",
			client: ok + closed + "X: " + strings.Repeat("x", maxAnswerHead) + "\r\n\r\n",
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			if row.method == "" {
				row.method = http.MethodGet
			}
			for _, chunk := range []int{0, 1, 3} {
				conn := newFakeConn(row.server)
				conn.chunk, conn.hangUp = chunk, row.untilItEnds
				got, err := io.ReadAll(exchangeOf(t, row.method, kept).AnswerFrom(conn))
				require.NoError(t, err)
				assert.Equal(t, row.client, string(got))
			}
		})
	}
}

func TestAWebSocketGoesOnInBothDirections(t *testing.T) {
	const switches = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
	for _, row := range []struct{ name, server, answer, request string }{
		{"the server switches", switches + "from the server", switches + "from the server", "from the client"},
		{
			"it does not", "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\nmore",
			"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "",
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			e := exchangeOf(t, http.MethodGet, "Connection: upgrade\r\nUpgrade: websocket\r\n")
			server, client := newFakeConn(row.server), newFakeConn("from the client")
			server.hangUp, client.hangUp = true, true
			answer, err := io.ReadAll(e.AnswerFrom(server))
			require.NoError(t, err)
			assert.Equal(t, row.answer, string(answer))
			request, err := io.ReadAll(e.RequestFrom(client))
			require.NoError(t, err)
			assert.Equal(t, row.request, string(request))
		})
	}
}

// FuzzAnswer has an answer come in pieces: what the client gets does not depend on these, nothing of it is made up but
// the connection's end, and all of it comes before that.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"), uint8(1))
	f.Add([]byte("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), uint8(2))
	f.Add([]byte("HTTP/1.0 200 OK\r\nKeep-Alive: 1\r\n\r\nx"), uint8(3))
	f.Fuzz(func(t *testing.T, server []byte, chunk uint8) {
		read := func(chunk int) string {
			conn := newFakeConn(string(server))
			conn.chunk, conn.hangUp = chunk, true
			got, err := io.ReadAll(exchangeOf(t, http.MethodGet, "").AnswerFrom(conn))
			require.NoError(t, err)
			return string(got)
		}
		whole := read(0)
		require.Equal(t, whole, read(int(chunk)))
		answer, err := http.ReadResponse(bufio.NewReader(strings.NewReader(whole)), nil) //nolint:bodyclose // it is memory
		if err != nil || answer.StatusCode < http.StatusOK {
			return
		}
		content, err := io.ReadAll(answer.Body)
		original, wrong := http.ReadResponse(bufio.NewReader(bytes.NewReader(server)), nil) //nolint:bodyclose // it is memory
		if wrong != nil {                                                                   // it was forwarded in the form that it should have
			return
		}
		first, cut := io.ReadAll(original.Body)
		require.Equal(t, string(first), string(content))
		require.Equal(t, cut, err)
	})
}
