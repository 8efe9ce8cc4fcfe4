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
	free := scanFile("/proc/sys/net/core/rmem_max", &r.free)
	if errors.Is(free, fs.ErrNotExist) { // in a network namespace, before Linux 6.11
		r.free, free = mostReceive(fd)
	}
	if errs := errors.Join(scanFile("/proc/sys/net/ipv4/tcp_rmem", &least, &initial, &r.most), free); errs != nil {
		return receiving{}, fmt.Sprintf("receive buffers are not bounded: %v", errs)
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
	r := &c.dp.receiving
	if r.most == 0 {
		return false
	}
	c.receive = n
	was := c.halvings > 0
	c.halvings, c.looks = c.dp.pressure.checkMemory()
	err := c.raw.Visit(func(fd int) error {
		buffer, clamp, pressed := min(n, r.most), min(n, math.MaxInt32), c.halvings > 0
		if pressed {
			clamp = max(buffer/2>>c.halvings, leastReceive)
			buffer = min(buffer, max(2*clamp, bufferSize(fd))) // half is overhead
		}
		// Under pressure the largest buffer that needs no privilege will do.
		limited = (n < r.most || pressed) && (r.setBuffer(fd, buffer) || pressed && setBuffer(fd, buffer)) &&
			setClamp(fd, c.heldTo(clamp)) == nil
		if limited {
			c.clamp = clamp
			return nil
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0); err != nil || c.clamp == 0 {
			return err
		}
		room := max(min(n, r.most)/2, c.clamp)
		if was { // it may have had as much before
			room = r.most / 2
		}
		if a := c.advertising; a != nil && a.window > 0 {
			a.before = max(a.before, int(room))
		}
		c.clamp = 0
		return errors.Join(makeRoom(fd, room), setClamp(fd, c.heldTo(room)))
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
func (c *Conn) heldTo(clamp cc.Bytes) cc.Bytes {
	if a := c.advertising; a != nil && a.window > 0 {
		return min(clamp, a.window)
	}
	return clamp
}

// setBuffer gives a socket a buffer of a size, if that is allowed.
func (r *receiving) setBuffer(fd int, size cc.Bytes) bool {
	if size/2 <= r.free {
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
	if c.receive == 0 {
		return
	}
	halvings, looks := c.dp.pressure.checkMemory()
	if halvings != c.halvings || halvings > 0 && looks-c.looks >= shrinkAfter {
		c.LimitReceive(c.receive)
	}
}
