//go:build linux

package proxy_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/config"
)

// keeping serves requests one after another on each connection, which it keeps whatever they ask. An answer is as long
// as the request's X-Length says.
func keeping(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	need.Serve(t, ln, func(c net.Conn) {
		for r := bufio.NewReader(c); ; {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			if strings.EqualFold(req.Header.Get("Upgrade"), "websocket") {
				_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
				_, _ = io.Copy(c, r)
				return
			}
			content, _ := io.ReadAll(req.Body)
			length := 0
			_, _ = fmt.Sscan(req.Header.Get("X-Length"), &length)
			content = append(content, bytes.Repeat([]byte("x"), length)...)
			_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%s",
				len(content), content)
		}
	})
	return ln.Addr().String()
}

// A server may keep a connection that it was asked to close. The client then must not wait for a second answer.
func TestAConnectionForAWholeURLEndsWithItsAnswer(t *testing.T) {
	r := newRig(t, asking(func(cfg *config.Config) { cfg.Listeners[0].Allow = loopbackAllowed }))
	server := keeping(t)
	t.Run("one request", func(t *testing.T) {
		conn, err := net.Dial("tcp", r.addr())
		require.NoError(t, err)
		defer conn.Close() //nolint:errcheck // it was read to its end
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		send(t, conn, "GET http://"+server+"/1 HTTP/1.1\r\n\r\n"+"GET http://"+server+"/2 HTTP/1.1\r\n\r\n")
		assert.Equal(t, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", receive(t, conn))
	})
	t.Run("many requests", func(t *testing.T) {
		proxy, err := url.Parse("http://" + r.addr())
		require.NoError(t, err)
		transport := &http.Transport{Proxy: http.ProxyURL(proxy)}
		defer transport.CloseIdleConnections()
		client := http.Client{Transport: transport, Timeout: patience}
		for _, length := range []int{0, 1, 100_000, 3_000_000} {
			for range 5 {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+server+"/", strings.NewReader("sent"))
				require.NoError(t, err)
				req.Header.Set("X-Length", fmt.Sprint(length))
				resp, err := client.Do(req)
				require.NoError(t, err)
				content, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				assert.Len(t, content, len("sent")+length)
			}
		}
	})
	t.Run("a WebSocket", func(t *testing.T) {
		conn, err := net.Dial("tcp", r.addr())
		require.NoError(t, err)
		defer conn.Close() //nolint:errcheck // it was read to its end
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		send(t, conn, "GET http://"+server+"/ HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		answer := bufio.NewReader(conn)
		resp, err := http.ReadResponse(answer, nil)
		require.NoError(t, err)
		defer resp.Body.Close() //nolint:errcheck // it has none
		require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
		send(t, conn, "frames")
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
		said, err := io.ReadAll(answer)
		require.NoError(t, err)
		assert.Equal(t, "frames", string(said))
	})
}
