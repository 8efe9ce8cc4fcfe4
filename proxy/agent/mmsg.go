package agent

import (
	"errors"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/ccp"
)

// batchLen is how many datagrams one system call reads or writes.
const batchLen = 16

// mmsghdr is the kernel's struct of that name.
type mmsghdr struct {
	unix.Msghdr
	n uint32
}

// datagrams are those that one system call reads or writes. The call does not block, so it bypasses Go's scheduler:
// after a call through the scheduler, a goroutine may have to wait for a processor.
type datagrams struct {
	headers [batchLen]mmsghdr
	buffers [batchLen]unix.Iovec
}

// setBuffer makes b the buffer of datagram i.
func (t *datagrams) setBuffer(i int, b []byte) {
	t.buffers[i].Base = &b[0]
	t.buffers[i].SetLen(len(b))
	t.headers[i].Iov = &t.buffers[i]
	t.headers[i].SetIovlen(1)
}

// moveMessages makes the system call, sendmmsg or recvmmsg, for the first n datagrams, and returns how many it moved.
func (t *datagrams) moveMessages(call, fd uintptr, n, flags int) (moved int, err error) {
	first := unsafe.Pointer(&t.headers[0])
	got, _, errno := unix.RawSyscall6(call, fd, uintptr(first), uintptr(n), uintptr(flags), 0, 0)
	runtime.KeepAlive(t)
	if errno != 0 {
		return 0, errno
	}
	return int(got), nil
}

// sendMessages sends up to batchLen messages, and returns how many; ccp.ErrBusy where the next has no room.
func (t *datagrams) sendMessages(fd int, messages []message) (n int, err error) {
	for i, m := range messages {
		t.setBuffer(i, m.bytes)
	}
	n, err = t.moveMessages(unix.SYS_SENDMMSG, uintptr(fd), len(messages), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR) {
		err = ccp.ErrBusy
	}
	return n, err
}

// batch is a buffer for datagrams that are read.
type batch struct {
	datagrams
	bytes [batchLen][ccp.MaxFromAgent + 1]byte
}

// newBatch returns a batch with a buffer for each datagram. A datagram that fills its buffer is longer than any that
// an agent may send.
func newBatch() *batch {
	b := new(batch)
	for i := range b.bytes {
		b.setBuffer(i, b.bytes[i][:])
	}
	return b
}

// readWaiting reads the datagrams that wait at a socket, and returns how many: 0 and no error if there are none,
// batchLen if there may be more.
func (b *batch) readWaiting(fd uintptr) (n int, err error) {
	for {
		n, err = b.moveMessages(unix.SYS_RECVMMSG, fd, batchLen, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return 0, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// datagramAt returns datagram i of the last read.
func (b *batch) datagramAt(i int) []byte { return b.bytes[i][:b.headers[i].n] }
