package agent

import (
	"errors"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/ccp"
)

// together is how many datagrams are read at a time.
const together = 16

// header is the kernel's struct mmsghdr.
type header struct {
	unix.Msghdr
	n uint32
}

// batch reads datagrams, several with one system call.
type batch struct {
	headers [together]header
	pieces  [together]unix.Iovec
	bytes   [together][ccp.MaxFromAgent + 1]byte
}

func newBatch() *batch {
	b := new(batch)
	for i := range b.headers {
		b.pieces[i].Base = &b.bytes[i][0]
		b.pieces[i].SetLen(len(b.bytes[i]))
		b.headers[i].Iov = &b.pieces[i]
		b.headers[i].SetIovlen(1)
	}
	return b
}

// read takes the datagrams that wait at a socket, and returns how many: none, and no error, where none
// does; together, where there may be more. It does not wait, so the call does not go through Go's scheduler.
func (b *batch) read(fd uintptr) (n int, err error) {
	for {
		got, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&b.headers[0])), together,
			unix.MSG_DONTWAIT, 0, 0)
		runtime.KeepAlive(b)
		switch {
		case errno == 0:
			return int(got), nil
		case errors.Is(errno, unix.EAGAIN):
			return 0, nil
		case !errors.Is(errno, unix.EINTR):
			return 0, errno
		}
	}
}

// datagram is the i-th of those that were read last.
func (b *batch) datagram(i int) []byte { return b.bytes[i][:b.headers[i].n] }
