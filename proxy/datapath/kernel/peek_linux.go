package kernel

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
)

var _ datapath.Peeker = (*Conn)(nil)

// Peek implements datapath.Peeker. The loop's edge-triggered epoll tells of each segment that
// comes, although those before it have not been read.
func (c *Conn) Peek(b []byte, look func([]byte) bool) error {
	var call error
	seen := 0
	poll := c.raw.Read(func(fd uintptr) bool {
		var n int
		var ended bool
		if n, ended, call = peekBytes(int(fd), b); call != nil {
			return true
		}
		done := ended || n == len(b)
		if n > seen {
			seen = n
			done = look(b[:n]) || done
		}
		return done
	})
	return c.opFailure("peek", poll, call)
}

// peekBytes reads what there is and leaves it there. ended: no more will come.
func peekBytes(fd int, b []byte) (n int, ended bool, err error) {
	asked := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLRDHUP}}
	if _, err := unix.Poll(asked[:], 0); err != nil && !errors.Is(err, unix.EINTR) {
		return 0, false, err
	}
	events := asked[0].Revents
	if events&unix.POLLERR != 0 {
		return 0, true, nil // looking would collect the error, which is the reader's
	}
	ended = events&(unix.POLLRDHUP|unix.POLLHUP) != 0
	n, _, err = unix.Recvfrom(fd, b, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return 0, ended, nil
	}
	return max(n, 0), ended, err
}

// hasArrived tells whether there is anything to read, without reading.
func hasArrived(fd int) bool {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	return err == nil && n > 0
}

// maxFalse bounds how often a read in front of an urgent byte is tried again. The kernel says
// EAGAIN there although the byte has come, if a signal is pending (tcp_recvmsg).
const maxFalse = 8

// checkReadable tells, as a read would, whether there is anything to read. n is at most 1.
func checkReadable(fd int) (n int, err error) {
	for tries := 0; ; tries++ {
		var b [1]byte // and no address, which package unix would allocate
		got, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), 1,
			unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == 0:
			return int(got), nil
		case errno == unix.EAGAIN && tries < maxFalse && atMark(uintptr(fd)) && hasArrived(fd):
		case errno != unix.EINTR:
			return 0, errno
		}
	}
}
