//go:build linux

package e2e

import (
	"io"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/sim"
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
