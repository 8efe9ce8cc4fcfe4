package kernel

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var _ datapath.Receiver = (*Conn)(nil)

// receiving is how sockets' receive buffers can be bounded. The kernel lets them grow
// up to net.ipv4.tcp_rmem, also while nobody reads.
type receiving struct {
	most cc.Bytes // what the kernel lets one grow to (net.ipv4.tcp_rmem); 0: none is to be bounded, or can be
	free cc.Bytes // half of what may be asked for without CAP_NET_ADMIN (net.core.rmem_max)
}

// settleReceiving finds out what can be bounded, on a socket that goes nowhere; why says what cannot.
func settleReceiving(fd int) (r receiving, why string) {
	if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK); err != nil {
		return r, "receive buffers cannot be bounded before Linux 5.14: readers that stall may hold as much as " +
			"net.ipv4.tcp_rmem allows"
	}
	var least, initial int64
	errs := errors.Join(scan("/proc/sys/net/ipv4/tcp_rmem", &least, &initial, &r.most),
		scan("/proc/sys/net/core/rmem_max", &r.free))
	if errs != nil {
		return receiving{}, fmt.Sprintf("receive buffers are not bounded: %v", errs)
	}
	return r, ""
}

func scan(path string, to ...any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if _, err = fmt.Sscan(string(text), to...); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// LimitReceive implements datapath.Receiver. While the kernel's TCP is short of memory the window
// is smaller than n. The buffer is not, so that bytes in flight are not dropped.
func (c *Conn) LimitReceive(n cc.Bytes) (limited bool) {
	r := &c.dp.receiving
	if r.most == 0 {
		return false
	}
	c.receive, c.halvings = n, c.dp.pressure.halvings()
	err := c.raw.Visit(func(fd int) error {
		half := min(n, r.most) / 2 // the kernel doubles what it is told, for its overhead
		option := unix.SO_RCVBUF
		if half > r.free {
			option = unix.SO_RCVBUFFORCE
		}
		clamp, pressed := n, c.halvings > 0
		if pressed {
			clamp = max(half>>c.halvings, leastReceive)
		}
		if a := c.advertising; a != nil && a.window > 0 {
			clamp = min(clamp, a.window)
		}
		bound := func(option int) bool { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, int(half)) == nil }
		// The kernel raises the clamp of the window only together with a buffer that it sizes itself. Under
		// pressure the largest buffer that needs no privilege will do.
		limited = (n < r.most || pressed) && (bound(option) || pressed && bound(unix.SO_RCVBUF)) &&
			unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, int(clamp)) == nil
		if limited {
			return nil
		}
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0)
	})
	return limited && err == nil
}

// relimit adapts a bounded receive window to the present pressure on TCP's memory.
func (c *Conn) relimit() {
	if c.receive > 0 && c.halvings != c.dp.pressure.halvings() {
		c.LimitReceive(c.receive)
	}
}
