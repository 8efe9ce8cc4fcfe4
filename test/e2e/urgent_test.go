//go:build linux

package e2e

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestUrgentBytesAreDelivered sends urgent bytes (MSG_OOB) over connections that
// stay open. Stacks in user space know no urgency: there the bytes are like any other.
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
			inline(t, client)
			inline(t, server)
			for _, way := range []struct {
				name     string
				from, to *net.TCPConn
				said     string
			}{
				{"up", client, server, "^1abc^2def"},
				{"down", server, client, "abc^1^2def^3"},
			} {
				want := way.said
				if w.tunnel != nil {
					want = strings.ReplaceAll(want, "^", "")
				}
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

func TestAnUrgentByteCanBeTakenOutOfTurn(t *testing.T) {
	w := ways[0]
	s := w.open(t, "")
	client, server := w.pair(s)
	_, err := io.WriteString(client, "abc")
	require.NoError(t, err)
	sendUrgent(t, client, '!')
	_, err = io.WriteString(client, "def")
	require.NoError(t, err)

	var urgent [1]byte
	control(t, server, func(fd int) {
		await(t, fd, unix.POLLPRI)
		_, _, err := unix.Recvfrom(fd, urgent[:], unix.MSG_OOB)
		require.NoError(t, err)
	})
	assert.Equal(t, "!", string(urgent[:]))
	got := make([]byte, 6)
	_, err = io.ReadFull(server, got)
	require.NoError(t, err)
	assert.Equal(t, "abcdef", string(got))
}

func control(t *testing.T, conn *net.TCPConn, f func(fd int)) {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { f(int(fd)) }))
}

// inline has urgent bytes stay in their place of what conn receives.
func inline(t *testing.T, conn *net.TCPConn) {
	t.Helper()
	control(t, conn, func(fd int) {
		require.NoError(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1))
	})
}

func sendUrgent(t *testing.T, conn *net.TCPConn, b byte) {
	t.Helper()
	control(t, conn, func(fd int) { require.NoError(t, unix.Send(fd, []byte{b}, unix.MSG_OOB)) })
}

// await waits for events of a socket.
func await(t *testing.T, fd int, events int16) {
	t.Helper()
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(patience.Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			require.NoError(t, err)
			return
		}
	}
}

// hear reads n bytes, with a ^ before those that are urgent.
func hear(t *testing.T, conn *net.TCPConn, n int) string {
	t.Helper()
	var said strings.Builder
	for range n {
		control(t, conn, func(fd int) {
			await(t, fd, unix.POLLIN)
			mark, err := unix.IoctlGetInt(fd, unix.SIOCATMARK)
			require.NoError(t, err)
			if mark != 0 {
				said.WriteByte('^')
			}
		})
		var b [1]byte
		_, err := io.ReadFull(conn, b[:])
		require.NoError(t, err)
		said.WriteByte(b[0])
	}
	return said.String()
}
