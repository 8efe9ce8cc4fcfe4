//go:build linux

package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

// TestAReaderThatNeverReadsHoldsLittleKernelMemory: what its server pushes must not
// pile up in the edge's receive buffers.
func TestAReaderThatNeverReadsHoldsLittleKernelMemory(t *testing.T) {
	for _, algorithm := range []string{"copa", "none"} {
		t.Run(algorithm, func(t *testing.T) {
			w := present.way()
			s := w.open(t, "defaults: {algorithm: "+algorithm+"}\n")
			require.NoError(t, s.Client.Sysctl("net.ipv4.tcp_rmem", "4096 8192 8192")) // it takes nearly nothing
			client, server := w.pair(s)
			fd := s.proxy.borrow(addrPort(server.LocalAddr()))
			defer unix.Close(fd) //nolint:errcheck // a copy
			go func() { _, _ = io.Copy(struct{ io.Writer }{server}, random(7, 64*megabyte)) }()
			last, since := -1, time.Now()
			for time.Since(since) < time.Second {
				held := inReceiveQueue(t, fd)
				if held != last {
					last, since = held, time.Now()
				}
				time.Sleep(5 * time.Millisecond)
			}
			taken := int(s.proxy.metric("penstock_bytes_total", `direction="down"`))
			assert.Positive(t, last)
			assert.LessOrEqual(t, last, max(256<<10, 4*taken)+(128<<10),
				"%d bytes were taken; the last segment may go beyond", taken)
			_ = server.Close()
			_ = client.Close()
		})
	}
}

// TestAReaderThatStallsHoldsNoPipeAndLittleOfItsServers has clients read for a while and then no more, which must not
// leave pipes behind, nor let their servers go on sending.
func TestAReaderThatStallsHoldsNoPipeAndLittleOfItsServers(t *testing.T) {
	const clients, first, most = 20, 3 * megabyte, 2 * megabyte
	w := present.way()
	s := w.open(t, "defaults: {algorithm: none}\n")
	for _, h := range []*netlab.Node{s.Client, s.Server, s.Edge} {
		require.NoError(t, h.Sysctl("net.ipv4.tcp_rmem", "4096 131072 33554432"))
		require.NoError(t, h.Sysctl("net.ipv4.tcp_wmem", "4096 65536 33554432"))
	}
	before := s.proxy.pipes()
	var servers, readers []*net.TCPConn
	for range clients {
		client, server := w.pair(s)
		servers, readers = append(servers, server), append(readers, client)
		go func() { _, _ = io.Copy(struct{ io.Writer }{server}, random(7, 64*megabyte)) }()
		_, err := io.CopyN(io.Discard, client, first)
		require.NoError(t, err)
	}
	held := func() (sum int64) { // by the proxy
		for i := range clients {
			sum += acked(t, servers[i]) - first - int64(unread(t, readers[i]))
		}
		return sum
	}
	last := held()
	assert.Eventually(t, func() bool {
		was := last
		last = held()
		return was == last
	}, 20*time.Second, time.Second)
	t.Logf("%d bytes and %.2f pipes of each", last/clients, float64(s.proxy.pipes()-before)/clients/2)
	assert.LessOrEqual(t, last/clients, int64(most))
	assert.LessOrEqual(t, s.proxy.pipes()-before, clients/2*2, "some are kept for the next that streams")
	for i := range clients {
		_ = servers[i].Close()
		_ = readers[i].Close()
	}
}

// acked is what the peer has acknowledged of what a connection was given.
func acked(t *testing.T, c *net.TCPConn) (n int64) {
	t.Helper()
	raw, err := c.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		require.NoError(t, err)
		n = int64(info.Bytes_acked)
	}))
	return n
}

// unread is what has come and waits to be read.
func unread(t *testing.T, c *net.TCPConn) (n int) {
	t.Helper()
	raw, err := c.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		n, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ)
		require.NoError(t, err)
	}))
	return n
}

// pipes counts the ends of pipes that the program has.
func (p *program) pipes() (n int) {
	dir := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
	entries, err := os.ReadDir(dir)
	require.NoError(p.t, err)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.HasPrefix(to, "pipe:") {
			n++
		}
	}
	return n
}

// TestALongPathGetsTheWindowThatItNeeds: 64 MB over a round trip of 100 ms take 1.4 s
// where the kernel sizes the buffer, and 42 s in a window that does not grow.
func TestALongPathGetsTheWindowThatItNeeds(t *testing.T) {
	const size = 64 * megabyte
	s, _ := newCellular(t, sim.LinkConfig{Delay: 50 * time.Millisecond})
	require.NoError(t, s.Client.Sysctl("net.ipv4.tcp_wmem", "4096 16384 33554432"))
	w := present.way()
	s.start(w.yaml("defaults: {algorithm: none}\n"))
	s.capture(w)
	client, server := w.pair(s)
	defer server.Close()
	defer client.Close()
	go func() { _, _ = io.Copy(struct{ io.Writer }{client}, random(8, size)) }()
	began := time.Now()
	_, err := io.CopyN(io.Discard, server, size)
	require.NoError(t, err)
	assert.Less(t, time.Since(began), 15*time.Second)
}

// inReceiveQueue is the kernel memory of what waits to be read.
func inReceiveQueue(t *testing.T, fd int) int {
	t.Helper()
	var vars [9]uint32 // SK_MEMINFO_RMEM_ALLOC is the first
	size := uint32(unsafe.Sizeof(vars))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&vars)), uintptr(unsafe.Pointer(&size)), 0)
	require.Zero(t, errno)
	return int(vars[0])
}
