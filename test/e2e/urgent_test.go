//go:build linux

package e2e

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestUrgentBytesAreDelivered sends urgent bytes (MSG_OOB) over connections that stay open. They arrive in their place,
// as bytes like any other.
func TestUrgentBytesAreDelivered(t *testing.T) {
	for _, c := range []struct{ way, extra string }{
		{"tproxy over IPv4", ""},
		{"tproxy over IPv4", "defaults: {algorithm: none}\n"},
		{"tproxy over IPv4", "defaults: {algorithm: none, max_rate: 100mbit}\n"},
		{"tproxy over IPv4", "rules: [{name: named, match: {server_name: [a.example]}, algorithm: cubic}]\n"},
		{"redirect over IPv6", ""},
		{"socks5", ""},
		{"connect", ""},
		{"forward", ""},
		{"wireguard over IPv4", ""},
		{"tun over IPv6", ""},
		{"masque over IPv4", ""},
	} {
		t.Run(c.way+" "+strings.TrimSpace(c.extra), func(t *testing.T) {
			w := named(c.way)
			s := w.open(t, c.extra)
			client, server := w.pair(s)
			for _, way := range []struct {
				name     string
				from, to *net.TCPConn
				said     string
			}{
				{"up", client, server, "^1abc^2def"},
				{"down", server, client, "abc^1^2def^3"},
			} {
				want := strings.ReplaceAll(way.said, "^", "")
				got := ""
				for i, text := range strings.Split(way.said, "^") { // one at a time, so that each has its mark
					if i > 0 {
						sendUrgent(t, way.from, text[0])
						got += hear(t, way.to, 1)
						text = text[1:]
					}
					_, err := io.WriteString(way.from, text)
					require.NoError(t, err)
					got += hear(t, way.to, len(text))
				}
				assert.Equal(t, want, got, way.name)
			}
			_, err := io.Copy(struct{ io.Writer }{client}, random(7, megabyte))
			require.NoError(t, err)
			require.NoError(t, client.CloseWrite())
			sum, n, err := digest(server)
			require.NoError(t, err)
			assert.Equal(t, int64(megabyte), n)
			assert.Equal(t, digestOf(7, megabyte), sum)
		})
	}
}

func control(t *testing.T, conn *net.TCPConn, f func(fd int)) {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { f(int(fd)) }))
}

func sendUrgent(t *testing.T, conn *net.TCPConn, b byte) {
	t.Helper()
	control(t, conn, func(fd int) { require.NoError(t, unix.Send(fd, []byte{b}, unix.MSG_OOB)) })
}

// hear reads n bytes.
func hear(t *testing.T, conn *net.TCPConn, n int) string {
	t.Helper()
	b := make([]byte, n)
	_, err := io.ReadFull(conn, b)
	require.NoError(t, err)
	return string(b)
}
