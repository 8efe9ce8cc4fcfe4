//go:build linux

package netlab

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

// roles are what this test binary does when a test starts it again.
const roleEnv = "PENSTOCK_NETLAB_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(play(role))
	}
	os.Exit(need.Run(m))
}

// needNamespaces skips a test where labs cannot be built.
func needNamespaces(tb testing.TB) {
	tb.Helper()
	if err := probeNamespaces(); err != nil {
		need.Namespaces(tb, err)
	}
}

// needPath skips a test where a path cannot be opened.
func needPath(tb testing.TB) {
	tb.Helper()
	needNamespaces(tb)
	need.TUN(tb)
}

func newLab(tb testing.TB) *Lab {
	tb.Helper()
	needNamespaces(tb)
	l := New()
	tb.Cleanup(func() { require.NoError(tb, l.Close()) })
	return l
}

func newCellular(tb testing.TB, cfg CellularConfig) *Cellular {
	tb.Helper()
	needPath(tb)
	need.OverLink(tb)
	c, err := NewCellular(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return c
}

func port(a netip.Addr, p uint16) string { return netip.AddrPortFrom(a, p).String() }

// connect returns both ends of a TCP connection from one node to another's address.
func connect(tb testing.TB, from, to *Node, addr netip.Addr) (dialled, accepted *net.TCPConn) {
	tb.Helper()
	ln, err := to.Listen("tcp", port(addr, 0))
	require.NoError(tb, err)
	defer ln.Close()
	type result struct {
		net.Conn
		error
	}
	got := make(chan result, 1)
	go func() {
		c, err := ln.Accept()
		got <- result{c, err}
	}()
	out, err := from.Dial("tcp", ln.Addr().String())
	require.NoError(tb, err)
	in := <-got
	require.NoError(tb, in.error)
	tb.Cleanup(func() {
		_ = out.Close()
		_ = in.Close()
	})
	return out.(*net.TCPConn), in.Conn.(*net.TCPConn)
}

// congestion selects the kernel's congestion control for one socket.
func congestion(tb testing.TB, c *net.TCPConn, name string) {
	tb.Helper()
	raw, err := c.SyscallConn()
	require.NoError(tb, err)
	var set error
	require.NoError(tb, raw.Control(func(fd uintptr) {
		set = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
	}))
	require.NoError(tb, set, "the kernel must offer "+name)
}

// transfer sends n random bytes, half-closes, and returns what was sent and what
// came out, as hashes.
func transfer(from, to *net.TCPConn, n int64, seed uint64) (sent, received [sha256.Size]byte, err error) {
	var key [32]byte
	key[0] = byte(seed)
	errs := make(chan error, 1)
	go func() {
		h := sha256.New()
		_, err := io.CopyN(io.MultiWriter(from, h), rand.NewChaCha8(key), n)
		if err == nil {
			err = from.CloseWrite()
		}
		h.Sum(sent[:0])
		errs <- err
	}()
	h := sha256.New()
	got, err := io.Copy(h, to)
	h.Sum(received[:0])
	if e := <-errs; err == nil {
		err = e
	}
	if err == nil && got != n {
		err = fmt.Errorf("received %d bytes of %d", got, n)
	}
	return sent, received, err
}

// play is the other end of the tests that start this binary again.
func play(role string) int {
	err := func() error {
		switch role {
		case "lab":
			return playLab()
		case "enter":
			return playEnter(playLab)
		case "user-namespace":
			return playUserNamespace()
		case "nothing":
			return nil
		case "enter-without-quota":
			return playWithoutQuota()
		case "wait":
			fmt.Println("ready")
			_, err := io.Copy(io.Discard, os.Stdin)
			return err
		default:
			return fmt.Errorf("no role %q", role)
		}
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// self prepares this test binary for another role, inside a node.
func self(ctx context.Context, n *Node, role string) *Cmd {
	c := n.Command(ctx, "/proc/self/exe")
	c.Env = append(os.Environ(), roleEnv+"="+role)
	return c
}
