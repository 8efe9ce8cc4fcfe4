package udpbatch

import (
	"bytes"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// What arrives is read as the packets that were sent, with their control messages,
// however the sender and the kernel have put them together and however many are read at once.
func TestPacketsAreReadAsTheyWereSent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		network, here := "udp4", net.IPv4(127, 0, 0, 1)
		if rapid.Bool().Draw(t, "6") {
			network, here = "udp6", net.IPv6loopback
		}
		near, err := net.ListenUDP(network, &net.UDPAddr{IP: here})
		require.NoError(t, err)
		defer near.Close()
		s, err := net.ListenUDP(network, &net.UDPAddr{IP: here})
		require.NoError(t, err)
		defer s.Close()
		require.NoError(t, s.SetReadDeadline(time.Now().Add(time.Minute))) //nolint:forbidigo // net.Conn's deadlines are of the real clock
		raw, err := s.SyscallConn()
		require.NoError(t, err)
		require.NoError(t, raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVTOS, 1)
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1)
		}))
		reader := NewReader(s)
		var want [][]byte
		for range rapid.IntRange(1, 3).Draw(t, "trains") {
			size := rapid.IntRange(1, 1452).Draw(t, "size")
			n := rapid.IntRange(1, min(32, 16<<10/size)).Draw(t, "segments") // the socket keeps all of them
			last := rapid.IntRange(1, size).Draw(t, "last")
			var train []byte
			for i := range n {
				p := bytes.Repeat([]byte{byte(len(want))}, size)
				if i == n-1 {
					p = p[:last]
				}
				want, train = append(want, p), append(train, p...)
			}
			_, _, err := near.WriteMsgUDP(train, AppendSegmentSize(nil, size), s.LocalAddr().(*net.UDPAddr))
			require.NoError(t, err)
		}
		ms := make([]ipv4.Message, rapid.IntRange(1, 16).Draw(t, "at once"))
		for i := range ms {
			ms[i] = ipv4.Message{Buffers: [][]byte{make([]byte, 1452)}, OOB: make([]byte, 128)}
		}
		for len(want) > 0 {
			n, err := reader.ReadBatch(ms, 0)
			require.NoError(t, err)
			require.Positive(t, n)
			require.LessOrEqual(t, n, len(want))
			for i, m := range ms[:n] {
				require.Equal(t, want[i], m.Buffers[0][:m.N])
				require.Equal(t, near.LocalAddr().(*net.UDPAddr).Port, m.Addr.(*net.UDPAddr).Port)
				told, err := unix.ParseSocketControlMessage(m.OOB[:m.NN])
				require.NoError(t, err)
				require.True(t, slices.ContainsFunc(told, func(c unix.SocketControlMessage) bool {
					return c.Header.Level == unix.IPPROTO_IP && c.Header.Type == unix.IP_TOS ||
						c.Header.Level == unix.IPPROTO_IPV6 && c.Header.Type == unix.IPV6_TCLASS
				}), "the class of traffic")
			}
			want = want[n:]
		}
	})
}
