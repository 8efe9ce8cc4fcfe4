//go:build linux

package cost

import (
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// asking exchanges messages on many connections by one thread that waits for all of them,
// so that what is measured is not how goroutines take turns.
type asking struct {
	epoll int
	conns []asker
}

// asker is one connection of an asking.
type asker struct {
	file *os.File
	fd   int
	at   time.Time // when it asked
	left int       // bytes of the answer that have not come
}

func newAsking(b *testing.B, conns []*net.TCPConn) *asking {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	require.NoError(b, err)
	a := &asking{epoll: epoll}
	for i, conn := range conns {
		file, err := conn.File()
		require.NoError(b, err)
		fd := int(file.Fd())
		require.NoError(b, unix.SetNonblock(fd, true))
		a.conns = append(a.conns, asker{file: file, fd: fd})
		require.NoError(b, unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd,
			&unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)}))
	}
	return a
}

func (a *asking) close() {
	_ = unix.Close(a.epoll)
	for _, c := range a.conns {
		_ = c.file.Close()
	}
}

// run asks for so long, has all be answered, and returns how long the answers took, in order.
func (a *asking) run(b *testing.B, wall time.Duration) (took latencies) {
	ask := make([]byte, message)
	ask[0] = askEcho
	answer := make([]byte, message)
	send := func(c *asker) {
		c.at, c.left = time.Now(), message
		n, err := unix.Write(c.fd, ask)
		require.NoError(b, err)
		require.Equal(b, message, n)
	}
	for i := range a.conns {
		send(&a.conns[i])
	}
	events := make([]unix.EpollEvent, len(a.conns))
	end := time.Now().Add(wall)
	for open := len(a.conns); open > 0; {
		n, err := unix.EpollWait(a.epoll, events, int(patience.Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		require.NoError(b, err)
		require.NotZero(b, n, "no answer")
		for _, e := range events[:n] {
			c := &a.conns[e.Fd]
			got, err := unix.Read(c.fd, answer)
			require.NoError(b, err)
			require.Positive(b, got, "the connection has ended")
			if c.left -= got; c.left > 0 {
				continue
			}
			took = append(took, time.Since(c.at))
			if time.Now().Before(end) {
				send(c)
			} else {
				open--
			}
		}
	}
	slices.Sort(took)
	return took
}
