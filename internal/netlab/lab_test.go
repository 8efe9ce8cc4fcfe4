//go:build linux

package netlab

import (
	"bufio"
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/need"
)

// inode identifies the calling thread's network namespace.
func inode(tb testing.TB) string {
	tb.Helper()
	s, err := os.Readlink("/proc/thread-self/ns/net")
	require.NoError(tb, err)
	return s
}

// namespaces returns the network namespaces this process's threads are in.
func namespaces(tb testing.TB) map[string]bool {
	tb.Helper()
	links, err := filepath.Glob("/proc/self/task/*/ns/net")
	require.NoError(tb, err)
	got := map[string]bool{}
	for _, l := range links {
		if s, err := os.Readlink(l); err == nil { // the thread may have ended
			got[s] = true
		}
	}
	return got
}

func fds(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(tb, err)
	return len(entries)
}

func TestDo(t *testing.T) {
	lab := newLab(t)
	a, err := lab.Node("a")
	require.NoError(t, err)
	b, err := lab.Node("b")
	require.NoError(t, err)

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home := inode(t)
	var inA, inB, afterB string
	require.NoError(t, a.Do(func() error {
		inA = inode(t)
		err := b.Do(func() error { inB = inode(t); return nil })
		afterB = inode(t)
		return err
	}))
	assert.NotEqual(t, home, inA, "a node is a namespace of its own")
	assert.NotEqual(t, inA, inB, "two nodes are two namespaces")
	assert.Equal(t, inA, afterB, "one Do inside another leaves the outer where it was")
	assert.Equal(t, home, inode(t), "the caller never moves")

	boom := errors.New("boom")
	assert.ErrorIs(t, a.Do(func() error { return boom }), boom)
	assert.ErrorIs(t, a.Do(func() error { runtime.Goexit(); return nil }), errGoexit)
	assert.Equal(t, map[string]bool{home: true}, namespaces(t), "no thread is left inside a node")
}

func TestNodeNames(t *testing.T) {
	lab := newLab(t)
	_, err := lab.Node("a")
	require.NoError(t, err)
	_, err = lab.Node("a")
	assert.ErrorContains(t, err, `node "a" exists`)
}

func TestSysctlIsTheNodes(t *testing.T) {
	lab := newLab(t)
	n, err := lab.Node("n")
	require.NoError(t, err)
	const file = "/proc/sys/net/ipv4/ip_default_ttl"
	before, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, n.Sysctl("net.ipv4.ip_default_ttl", "17"))
	var inside []byte
	require.NoError(t, n.Do(func() error { inside, err = os.ReadFile(file); return err }))
	assert.Equal(t, "17", strings.TrimSpace(string(inside)))
	after, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, before, after, "the host's own setting must not move")
	assert.ErrorContains(t, n.Sysctl("net.ipv4.no_such_key", "1"), "net.ipv4.no_such_key")
}

func TestDialWantsAddresses(t *testing.T) {
	lab := newLab(t)
	n, err := lab.Node("n")
	require.NoError(t, err)
	_, err = n.Dial("tcp", "localhost:80")
	assert.ErrorContains(t, err, "want an IP address and port")
}

func TestCommand(t *testing.T) {
	lab := newLab(t)
	n, err := lab.Node("n")
	require.NoError(t, err)
	var inside string
	require.NoError(t, n.Do(func() error { inside = inode(t); return nil }))

	out, err := n.Command(context.Background(), "/bin/readlink", "/proc/self/ns/net").Output()
	require.NoError(t, err)
	assert.Equal(t, inside, strings.TrimSpace(string(out)))

	start := func(ctx context.Context) *Cmd {
		c := self(ctx, n, "wait")
		_, err := c.StdinPipe()
		require.NoError(t, err)
		stdout, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		line, err := bufio.NewReader(stdout).ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "ready\n", line)
		return c
	}
	ctx, cancel := context.WithCancel(context.Background())
	byContext, byLab := start(ctx), start(context.Background())
	cancel()
	assert.Error(t, byContext.Wait(), "the context's end kills the command")
	require.NoError(t, lab.Close())
	assert.Error(t, byLab.Wait(), "the lab's end kills the command")
	assert.ErrorIs(t, n.Command(context.Background(), "/bin/true").Run(), errClosed)
}

func TestCloseLeavesNothing(t *testing.T) {
	needPath(t)
	need.OverLink(t)
	link := sim.LinkConfig{Rate: 100e6, Delay: time.Millisecond}
	build := func() {
		c, err := NewCellular(CellularConfig{Down: link, Up: link})
		require.NoError(t, err)
		c.Path.Start()
		out, in := connect(t, c.Client, c.Server, c.ServerAddr.V4)
		sent, received, err := transfer(in, out, 100_000, 1)
		require.NoError(t, err)
		require.Equal(t, sent, received)
		require.NoError(t, out.Close())
		require.NoError(t, in.Close())
		require.NoError(t, c.Server.Command(context.Background(), "/bin/true").Run())
		require.NoError(t, c.Close())
		require.NoError(t, c.Close(), "closing again changes nothing")
		_, err = c.Server.Listen("tcp", ":0")
		assert.ErrorIs(t, err, errClosed)
		_, err = c.Node("late")
		assert.ErrorIs(t, err, errClosed)
		assert.Positive(t, c.Path.Report(0, time.Hour).Down.Delivered, "the record outlives the lab")
	}
	build() // opens what the runtime keeps: its poller, for one
	before := fds(t)
	for range 3 {
		build()
	}
	assert.Equal(t, before, fds(t), "no descriptor stays open, so no namespace stays alive")
	// A locked thread ends a moment after its goroutine.
	assert.Eventually(t, func() bool { return len(namespaces(t)) == 1 }, 5*time.Second, 5*time.Millisecond)
}

func TestFailedBuildLeavesNothing(t *testing.T) {
	needNamespaces(t)
	saved := tunDevice
	t.Cleanup(func() { tunDevice = saved })
	tunDevice = filepath.Join(t.TempDir(), "tun")
	_, err := NewCellular(CellularConfig{})
	require.ErrorContains(t, err, "is missing")
	before := fds(t)
	_, err = NewCellular(CellularConfig{})
	require.ErrorContains(t, err, "modprobe tun")
	require.ErrorIs(t, err, ErrNoTUN)
	assert.Equal(t, before, fds(t))

	for _, bad := range []sim.LinkConfig{{Rate: -1}, {Delay: -1}, {QueueBytes: -1}, {QueuePackets: -1}, {Loss: 1.5}} {
		_, err := NewCellular(CellularConfig{Up: bad})
		assert.ErrorContains(t, err, "path, up: ")
	}
}

func TestRoutedForwardsBothFamilies(t *testing.T) {
	needNamespaces(t)
	r, err := NewRouted()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	for _, addr := range []netip.Addr{r.ServerAddr.V4, r.ServerAddr.V6} {
		out, in := connect(t, r.Client, r.Server, addr)
		sent, received, err := transfer(in, out, 10<<20, 2)
		require.NoError(t, err)
		assert.Equal(t, sent, received)
		local := netip.MustParseAddrPort(in.RemoteAddr().String()).Addr()
		assert.Contains(t, []netip.Addr{r.ClientAddr.V4, r.ClientAddr.V6}, local, "no address is translated")
	}
}

func TestTwoLabsAtOnce(t *testing.T) {
	link := sim.LinkConfig{Rate: 100e6, Delay: time.Millisecond}
	a := newCellular(t, CellularConfig{Down: link, Up: link})
	b := newCellular(t, CellularConfig{Down: link, Up: link})
	errs := make(chan error, 2)
	for i, c := range []*Cellular{a, b} {
		c.Path.Start()
		out, in := connect(t, c.Client, c.Server, c.ServerAddr.V4)
		go func() {
			sent, received, err := transfer(in, out, 1<<20, uint64(i))
			if err == nil && sent != received {
				err = errors.New("the hash differs")
			}
			errs <- err
		}()
	}
	require.NoError(t, <-errs)
	require.NoError(t, <-errs)
	for _, c := range []*Cellular{a, b} {
		r := c.Path.Report(0, c.Path.Elapsed())
		assert.GreaterOrEqual(t, int(r.Down.Bytes), 1<<20)
		assert.Less(t, int(r.Down.Bytes), 3<<19, "only its own lab's packets cross a path")
	}
	require.NoError(t, a.Close())
	out, in := connect(t, b.Client, b.Server, b.ServerAddr.V6)
	sent, received, err := transfer(out, in, 1000, 3)
	require.NoError(t, err, "one lab's end is nothing to the other")
	assert.Equal(t, sent, received)
}

func TestIdleLabIsSilent(t *testing.T) {
	c := newCellular(t, CellularConfig{})
	c.Path.Start()
	// Neighbour discovery and multicast reports would show up at once; a round
	// trip stands behind them.
	out, in := connect(t, c.Client, c.Server, c.ServerAddr.V6)
	sent, received, err := transfer(out, in, 1, 1)
	require.NoError(t, err)
	require.Equal(t, sent, received)
	r := c.Path.Report(0, c.Path.Elapsed())
	assert.LessOrEqual(t, r.Up.Sent+r.Down.Sent, 8, "handshake, one byte, a FIN and their acknowledgements")
	missed, err := c.Path.Missed()
	require.NoError(t, err)
	assert.Zero(t, missed)
}
