package ccpagent

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/ccp"
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

// A proxy announces all its flows as it connects.
func TestAnAgentReadsNoFasterThanItsAnswersLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := start(t, func(f *Flow) Controller {
			f.Run("folds", nil)
			return &double{flow: f}
		})
		ours, its := net.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			a.serveConnection(ctx, its)
		}()
		const flows = 4 * waiting
		go func() {
			for i := range uint32(flows) {
				if _, err := ours.Write(create(i + 1)); err != nil {
					return
				}
			}
		}()
		synctest.Wait() // nobody reads what it answers
		r, buf := bufio.NewReader(ours), make([]byte, ccp.MaxFromAgent)
		for answered := 0; answered < flows; {
			_, err := io.ReadFull(r, buf[:ccp.HeaderLen])
			require.NoError(t, err)
			n, err := ccp.Length(buf)
			require.NoError(t, err)
			_, err = io.ReadFull(r, buf[ccp.HeaderLen:n])
			require.NoError(t, err)
			m, _, err := ccp.Next(buf[:n])
			require.NoError(t, err)
			if m.Kind == ccp.KindChange {
				answered++
			}
		}
		cancel()
		<-done
	})
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
