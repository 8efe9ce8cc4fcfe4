//go:build linux

package kernel

import (
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// peeking is a Peek underway: what it has shown so far, and its end.
type peeking struct {
	shown chan string
	ended chan error
}

// peekUntil peeks into n bytes until it sees want.
func (c *Conn) peekUntil(n int, want string) peeking {
	p := peeking{make(chan string, n), make(chan error, 1)}
	go func() {
		p.ended <- c.Peek(make([]byte, n), func(b []byte) bool {
			p.shown <- string(b)
			return string(b) == want
		})
	}()
	return p
}

func TestPeekShowsWhatComesAndLeavesItThere(t *testing.T) {
	far, near := start(t, Config{}).pair(t, loopback4)
	const said = "spoken slowly"
	p := near.peekUntil(100, said)
	for i := range len(said) {
		_, err := far.Write([]byte(said[i : i+1]))
		require.NoError(t, err)
		assert.Equal(t, said[:i+1], <-p.shown, "each segment is shown, with those before it")
	}
	require.NoError(t, <-p.ended)
	again := near.peekUntil(5, "never")
	assert.Equal(t, said[:5], <-again.shown)
	require.NoError(t, <-again.ended, "there is no room for more")
	require.NoError(t, far.CloseWrite())
	all, err := io.ReadAll(near)
	require.NoError(t, err)
	assert.Equal(t, said, string(all))
}

func TestPeekEndsWithThePeer(t *testing.T) {
	for _, row := range []struct {
		name, said string
		end        func(*Conn) error
		read       error
	}{
		{"that has said nothing", "", (*Conn).CloseWrite, nil},
		{"that has said too little", "half", (*Conn).CloseWrite, nil},
		{"that has gone away", "", (*Conn).Reset, syscall.ECONNRESET},
	} {
		t.Run(row.name, func(t *testing.T) {
			far, near := start(t, Config{}).pair(t, loopback4)
			p := near.peekUntil(100, "never")
			if row.said != "" {
				_, err := far.Write([]byte(row.said))
				require.NoError(t, err)
				assert.Equal(t, row.said, <-p.shown)
			}
			require.NoError(t, row.end(far))
			require.NoError(t, <-p.ended)
			assert.Empty(t, p.shown, "what was shown is not shown again")
			all, err := io.ReadAll(near)
			require.ErrorIs(t, err, row.read, "the error is left for the reader")
			assert.Equal(t, row.said, string(all))
		})
	}
}

func TestPeekIsEndedByADeadlineAndByClose(t *testing.T) {
	for _, row := range []struct {
		name string
		end  func(*Conn) error
		says error
	}{
		{"a deadline", func(c *Conn) error { return c.SetReadDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		{"a reset", (*Conn).Reset, net.ErrClosed},
	} {
		t.Run(row.name, func(t *testing.T) {
			far, near := start(t, Config{}).pair(t, loopback4)
			p := near.peekUntil(100, "never")
			_, err := far.Write([]byte("half"))
			require.NoError(t, err)
			assert.Equal(t, "half", <-p.shown)
			require.NoError(t, row.end(near))
			assert.ErrorIs(t, <-p.ended, row.says)
		})
	}
	far, near := start(t, Config{}).pair(t, loopback4)
	require.NoError(t, near.SetReadDeadline(time.Unix(1, 0)))
	assert.ErrorIs(t, <-near.peekUntil(1, "").ended, os.ErrDeadlineExceeded)
	require.NoError(t, near.SetReadDeadline(time.Time{}))
	_, err := far.Write([]byte("x"))
	require.NoError(t, err)
	b := make([]byte, 1)
	_, err = near.Read(b)
	require.NoError(t, err, "a deadline that is taken back has ended nothing for good")
}
