package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var _ datapath.Receiver = (*Conn)(nil)

// receiving is how sockets' receive buffers can be bounded. The kernel lets them grow
// up to net.ipv4.tcp_rmem, also while nobody reads.
type receiveBounds struct {
	largest      cc.Bytes // what the kernel lets one grow to (net.ipv4.tcp_rmem); 0: none is to be bounded, or can be
	unprivileged cc.Bytes // half of what may be asked for without CAP_NET_ADMIN (net.core.rmem_max)
}

// settleReceiving finds out what can be bounded, on a socket that goes nowhere; why says what cannot.
func probeReceiveBounds(fd int) (r receiveBounds, why string) {
	if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK); err != nil {
		return r, "receive buffers cannot be bounded before Linux 5.14: readers that stall may hold as much as " +
			"net.ipv4.tcp_rmem allows"
	}
	var least, initial int64
	free := scanFile("/proc/sys/net/core/rmem_max", &r.unprivileged)
	if errors.Is(free, fs.ErrNotExist) { // in a network namespace, before Linux 6.11
		r.unprivileged, free = mostReceive(fd)
	}
	if errs := errors.Join(scanFile("/proc/sys/net/ipv4/tcp_rmem", &least, &initial, &r.largest), free); errs != nil {
		return receiveBounds{}, fmt.Sprintf("receive buffers are not bounded: %v", errs)
	}
	return r, ""
}

// mostReceive finds out what may be asked for without CAP_NET_ADMIN: the kernel gives twice that at most (socket(7)).
func mostReceive(fd int) (cc.Bytes, error) {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, math.MaxInt32/2); err != nil {
		return 0, os.NewSyscallError("setsockopt SO_RCVBUF", err)
	}
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	return cc.Bytes(n) / 2, os.NewSyscallError("getsockopt SO_RCVBUF", err)
}

func scanFile(path string, to ...any) error {
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
// is smaller than n, and the buffer shrinks with what is read from it.
func (c *Conn) LimitReceive(n cc.Bytes) (limited bool) {
	r := &c.dp.receiveBounds
	if r.largest == 0 {
		return false
	}
	c.receiveLimit = n
	was := c.halvings > 0
	c.halvings, c.pressureLooks = c.dp.pressure.checkMemory()
	err := c.raw.Visit(func(fd int) error {
		buffer, clamp, pressed := min(n, r.largest), min(n, math.MaxInt32), c.halvings > 0
		if pressed {
			clamp = max(buffer/2>>c.halvings, minReceive)
			buffer = min(buffer, max(2*clamp, bufferSize(fd))) // half is overhead
		}
		// Under pressure the largest buffer that needs no privilege will do.
		limited = (n < r.largest || pressed) && (r.setBuffer(fd, buffer) || pressed && setBuffer(fd, buffer)) &&
			setClamp(fd, c.underAdvertised(clamp)) == nil
		if limited {
			c.receiveClamp = clamp
			return nil
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0); err != nil || c.receiveClamp == 0 {
			return err
		}
		room := max(min(n, r.largest)/2, c.receiveClamp)
		if was { // it may have had as much before
			room = r.largest / 2
		}
		if a := c.advertised; a != nil && a.window > 0 {
			a.savedClamp = max(a.savedClamp, int(room))
		}
		c.receiveClamp = 0
		return errors.Join(makeRoom(fd, room), setClamp(fd, c.underAdvertised(room)))
	})
	return limited && err == nil
}

// LeastRTT implements datapath.Receiver. Before the peer has acknowledged anything it is the handshake's.
func (c *Conn) LeastRTT() (least time.Duration) {
	_ = c.raw.Visit(func(fd int) error {
		var info unix.TCPInfo
		_, err := tcpInfo(fd, &info)
		least = time.Duration(info.Min_rtt) * time.Microsecond
		return err
	})
	return least
}

// makeRoom has the kernel enlarge a buffer that it sizes itself until it holds a window, in bytes, up to
// half of net.ipv4.tcp_rmem's maximum. The kernel alone enlarges a buffer only once more bytes arrive in
// a round trip than ever before, which a small window may prevent. It also makes room for as many bytes
// as a reader says that it waits for, and to say so (SO_RCVLOWAT) needs no privilege.
func makeRoom(fd int, window cc.Bytes) error {
	return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, int(window)),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, 1))
}

// heldTo is a clamp of the window where Advertise may hold a smaller one.
func (c *Conn) underAdvertised(clamp cc.Bytes) cc.Bytes {
	if a := c.advertised; a != nil && a.window > 0 {
		return min(clamp, a.window)
	}
	return clamp
}

// setBuffer gives a socket a buffer of a size, if that is allowed.
func (r *receiveBounds) setBuffer(fd int, size cc.Bytes) bool {
	if size/2 <= r.unprivileged {
		return setBuffer(fd, size)
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, int(size/2)) == nil
}

// setBuffer gives a socket a buffer of a size, or as much of it as needs no privilege.
func setBuffer(fd int, size cc.Bytes) bool {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, int(size/2)) == nil // the kernel doubles it
}

// setClamp bounds a socket's window. The kernel raises it only together with a buffer that it sizes itself.
func setClamp(fd int, clamp cc.Bytes) error {
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, int(clamp))
}

// bufferSize returns the size of a buffer, in bytes, for what a socket holds unread and what its peer may have
// in flight; never more than the socket has. A larger buffer fills up even behind a small window, since
// each read opens the window again while there is room. Before Linux 6.2 the kernel does not tell the
// window; then the buffer stays as it is.
func bufferSize(fd int) cc.Bytes {
	has, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return math.MaxInt64
	}
	var info unix.TCPInfo
	held, err := unreadMemory(fd)
	size, errInfo := tcpInfo(fd, &info)
	if err != nil || errInfo != nil || size < uptoRcvWnd {
		return cc.Bytes(has)
	}
	return min(cc.Bytes(has), held+2*cc.Bytes(info.Rcv_wnd))
}

// unreadMemory is the kernel's memory for what a socket holds unread, in bytes, overhead included.
func unreadMemory(fd int) (cc.Bytes, error) {
	vars, err := memoryInfo(fd)
	return cc.Bytes(vars[receiveUsed]), err
}

// Places in SO_MEMINFO (include/uapi/linux/sock_diag.h).
const (
	receiveUsed    = 0 // SK_MEMINFO_RMEM_ALLOC
	sendBufferSize = 3 // SK_MEMINFO_SNDBUF
	sendQueued     = 5 // SK_MEMINFO_WMEM_QUEUED
	memoryInfoSize = 9
)

// memoryInfo is what a socket says of its memory, in bytes.
func memoryInfo(fd int) (vars [memoryInfoSize]uint32, err error) {
	size := uint32(unsafe.Sizeof(vars))
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&vars)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return vars, errno
	}
	return vars, nil
}

// adaptReceiveWindow adapts a bounded receive window to the present pressure on TCP's memory.
func (c *Conn) adaptReceiveWindow() {
	if c.receiveLimit == 0 {
		return
	}
	halvings, looks := c.dp.pressure.checkMemory()
	if halvings != c.halvings || halvings > 0 && looks-c.pressureLooks >= shrinkAfter {
		c.LimitReceive(c.receiveLimit)
	}
}
