package kernel

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// reader reads from a socket without holding memory while it waits.
type reader struct {
	mu          sync.Mutex // one call at a time
	room        datapath.Room
	splitAtMark bool // in: read the byte at the urgent mark by itself
	readUrgent  bool // out: that is what was read
	n           int
	err         error
}

func (r *reader) tryRead(raw *eventloop.Socket, fd uintptr) bool {
	r.readUrgent = false
	if r.splitAtMark && raw.MayBeUrgent() { // once a byte is there, it is settled whether it is urgent
		if r.n, r.err = checkReadable(int(fd)); r.n == 0 {
			return !errors.Is(r.err, unix.EAGAIN)
		}
		r.readUrgent = atMark(fd)
	}
	buf := r.room.Take()
	if r.readUrgent {
		buf = buf[:1]
	}
	r.n, r.err = eventloop.Read(int(fd), buf)
	for tries := 0; r.readUrgent && errors.Is(r.err, unix.EAGAIN) && tries < maxFalse; tries++ {
		r.n, r.err = eventloop.Read(int(fd), buf)
	}
	if errors.Is(r.err, unix.EAGAIN) {
		r.room.GiveBack()
		return false
	}
	if r.n < len(buf) && raw.Driven() && !raw.Urgent() { // a read ends in front of an urgent byte, too
		raw.Emptied()
	}
	return true
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	return c.ReadReady(datapath.Lent(b))
}

// ReadReady implements datapath.ReadyReader.
func (c *Conn) ReadReady(room datapath.Room) (int, error) {
	n, _, err := c.readReady(room, false)
	return n, err
}

// readReady is ReadReady. With marks, urgent tells that all it read is the one
// byte at the urgent mark.
func (c *Conn) readReady(room datapath.Room, marks bool) (n int, urgent bool, err error) {
	r := &c.reader
	r.mu.Lock()
	defer r.mu.Unlock()
	r.room, r.splitAtMark = room, marks
	poll := c.raw.Read(func(fd uintptr) bool { return r.tryRead(c.raw, fd) })
	r.room = nil
	n, err = c.ioResult(r.n, poll, r.err, "read")
	return n, r.readUrgent && n > 0, err
}

// ioResult is the outcome of a raw read, or of a splice out of the socket, with the errors that failure
// takes. No bytes and no error are the end of the stream.
func (c *Conn) ioResult(n int, poll, call error, op string) (int, error) {
	if err := c.opFailure(op, poll, call); err != nil {
		return 0, err
	}
	if n <= 0 {
		return 0, io.EOF
	}
	c.adaptReceiveWindow()
	return n, nil
}

// opFailure is the error of an operation, as package net has it: poll, if the socket could not be
// waited for, or else call, that of the system call. It is datapath.ErrWait by itself, or nil.
func (c *Conn) opFailure(op string, poll, call error) error {
	err := poll
	if err == nil {
		err = os.NewSyscallError(op, call)
	}
	if err == nil || errors.Is(err, datapath.ErrWait) {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}
