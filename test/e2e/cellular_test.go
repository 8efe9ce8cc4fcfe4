//go:build linux

package e2e

import (
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

// downloadTime is long enough for Cubic to fill a buffer of 2 MB.
const downloadTime = 10 * time.Second

// download fetches over an emulated LTE link for a while, through a proxy that
// runs algorithm or, without one, straight from a server that runs the kernel's
// congestion control, and returns what the link recorded.
func download(t *testing.T, algorithm, kernel string) netlab.DirectionReport {
	t.Helper()
	trace, err := sim.Generate("lte", 1, downloadTime)
	require.NoError(t, err)
	link := sim.LinkConfig{Trace: trace, Delay: 10 * time.Millisecond, QueueBytes: 2_000_000}
	s, path := newCellular(t, link)
	defer s.Close()
	w := ways[0]
	if algorithm != "" {
		s.start(w.yaml("defaults: {algorithm: " + algorithm + "}\n"))
		defer s.proxy.stop()
		s.capture(w)
	}

	ln := s.listen(netip.AddrPortFrom(s.ServerAddr.V4, servicePort))
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if kernel != "" {
			raw, _ := c.(*net.TCPConn).SyscallConn()
			_ = raw.Control(func(fd uintptr) {
				_ = unix.SetsockoptString(int(fd), syscall.IPPROTO_TCP, unix.TCP_CONGESTION, kernel)
			})
		}
		_, _ = io.Copy(struct{ io.Writer }{c}, random(1, 1<<40))
	}()
	watch := newWatch()
	defer watch.stop()
	path.StartOnData()
	conn, err := s.Client.Dial("tcp", netip.AddrPortFrom(s.ServerAddr.V4, servicePort).String())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(downloadTime)))
	_, _ = io.Copy(io.Discard, conn)
	watch.skip(t, 40*time.Millisecond) // which would be a queue by itself
	return path.Report(0, downloadTime).Down
}
