//go:build linux

package kernel

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// patience bounds a failure; nothing waits for it.
const patience = 10 * time.Second

// eachSide runs a test with either leg of a pair as the one that ends.
func eachSide(t *testing.T, test func(t *testing.T, leg, peer *Conn)) {
	d := still(t, Config{})
	dialled, accepted := d.pair(t, loopback4)
	t.Run("dialled", func(t *testing.T) { test(t, dialled, accepted) })
	dialled, accepted = d.pair(t, loopback4)
	t.Run("accepted", func(t *testing.T) { test(t, accepted, dialled) })
}

// crash closes the socket as the kernel does when the process dies.
func (c *Conn) crash(t *testing.T) {
	t.Helper()
	require.NoError(t, c.raw.Close())
}

// stuff writes until the socket takes no more.
func (c *Conn) stuff(t *testing.T) (total int) {
	t.Helper()
	b := make([]byte, 64<<10)
	require.NoError(t, c.raw.Write(func(fd uintptr) bool {
		for {
			n, err := unix.Write(int(fd), b)
			if err != nil {
				return assert.ErrorIs(t, err, unix.EAGAIN)
			}
			total += n
		}
	}))
	return total
}

func TestACrashDoesNotLookLikeTheEnd(t *testing.T) {
	for name, first := range map[string]func(t *testing.T, leg, peer *Conn){
		"in an open connection":         func(*testing.T, *Conn, *Conn) {},
		"after the peer's end":          func(t *testing.T, _, peer *Conn) { require.NoError(t, peer.CloseWrite()) },
		"with bytes that wait to leave": func(t *testing.T, leg, _ *Conn) { leg.stuff(t) },
	} {
		t.Run(name, func(t *testing.T) {
			eachSide(t, func(t *testing.T, leg, peer *Conn) {
				first(t, leg, peer)
				leg.crash(t)
				_, err := io.Copy(io.Discard, peer)
				assert.ErrorIs(t, err, unix.ECONNRESET)
			})
		})
	}
}

func TestACrashAfterOurEndResetsThePeerThatGoesOn(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		_, err := leg.Write([]byte("whole"))
		require.NoError(t, err)
		require.NoError(t, leg.CloseWrite())
		got, err := io.ReadAll(peer)
		require.NoError(t, err)
		require.Equal(t, "whole", string(got))
		assert.False(t, peer.Aborted())
		leg.crash(t)
		assert.True(t, peer.Aborted())
	})
}

func TestCloseDeliversWhatWaits(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		total := leg.stuff(t)
		require.NoError(t, leg.Close())
		_ = leg.Reset() // comes too late
		got, err := io.Copy(io.Discard, peer)
		require.NoError(t, err)
		assert.Equal(t, int64(total), got)
	})
}

func TestAResetDiscardsWhatWaits(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		leg.stuff(t)
		require.NoError(t, leg.Reset())
		_, err := io.Copy(io.Discard, peer)
		assert.ErrorIs(t, err, unix.ECONNRESET)
	})
}

func TestNothingIsUndeliveredToAPeerThatHasReset(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		leg.stuff(t)
		n, err := leg.Undelivered()
		require.NoError(t, err)
		require.Positive(t, n)
		require.NoError(t, peer.Reset())
		require.Eventually(t, func() bool {
			n, err := leg.Undelivered()
			return err == nil && n == 0
		}, patience, time.Millisecond)
	})
}
