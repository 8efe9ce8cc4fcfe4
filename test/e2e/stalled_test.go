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
)

// TestAReaderThatNeverReadsHoldsLittleKernelMemory: what its server pushes must not
// pile up in the edge's receive buffers.
func TestAReaderThatNeverReadsHoldsLittleKernelMemory(t *testing.T) {
	for _, algorithm := range []string{"copa", "none"} {
		t.Run(algorithm, func(t *testing.T) {
			w := present.way()
			s := w.open(t, "defaults: {algorithm: "+algorithm+"}\n")
			client, server := w.pair(s)
			require.NoError(t, client.SetReadBuffer(8<<10))
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
			assert.LessOrEqual(t, last, max(256<<10, 8*taken)+(128<<10), "%d bytes were taken; the last segment may go beyond", taken)
			_ = server.Close()
			_ = client.Close()
		})
	}
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
