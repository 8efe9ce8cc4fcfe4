package ccpagent

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// full is a listener that has no descriptor left first. It hands out one end of each of pipes.
type full struct {
	net.Listener
	failed atomic.Bool
	conns  chan net.Conn
	closed chan struct{}
}

func (l *full) Accept() (net.Conn, error) {
	if !l.failed.Swap(true) {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	select {
	case conn := <-l.conns:
		return tls.Server(conn, &tls.Config{MinVersion: tls.VersionTLS13}), nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *full) Close() error {
	close(l.closed)
	return nil
}

// Whoever can reach the port may connect and say nothing.
func TestStrangersHoldAnAgentUpForABoundedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &full{conns: make(chan net.Conn), closed: make(chan struct{})}
		a, _ := start(t, func(*Flow) Controller { return nil })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.ServeListener(ctx, l) }()

		began := time.Now()
		ended := func(silent net.Conn) time.Duration {
			_, err := silent.Read(make([]byte, 1))
			require.Error(t, err)
			return time.Since(began).Truncate(time.Second)
		}
		var silent []net.Conn
		for range strangers + 1 {
			ours, its := net.Pipe()
			silent = append(silent, ours)
			l.conns <- its
		}
		assert.GreaterOrEqual(t, time.Since(began), handshake, "the last had to wait for room")
		assert.Equal(t, handshake, ended(silent[0]))
		assert.Equal(t, 2*handshake, ended(silent[strangers]))
		cancel()
		require.NoError(t, <-done)
	})
}
