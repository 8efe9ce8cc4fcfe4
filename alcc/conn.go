package alcc

import (
	"errors"
	"io"
	"math"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Conn is a net.Conn with a congestion controller on what it sends. Its methods may be called from any goroutine.
type Conn struct {
	leg    leg
	engine *engine    // nil: the connection passes through
	flow   *flow.Flow // nil: the kernel alone decides
	asks   bool       // Write asks the flow for room; false: the kernel enforces the window

	writing  sync.Mutex         // one call at a time
	granted  cc.Bytes           // room that the flow has granted and that is not used yet; guarded by writing
	room     chan struct{}      // has a value once there may be room
	deadline *datapath.Deadline // of writes that wait for room
	closing  sync.Once
	closed   chan struct{}
	missing  string // why the connection passes through
}

// leg is what a Conn reads from and writes to.
type leg interface {
	net.Conn
	CloseWrite() error
	Reset() error
}

var (
	_ net.Conn      = (*Conn)(nil)
	_ io.ReaderFrom = (*Conn)(nil)
	_ syscall.Conn  = (*Conn)(nil)
)

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) { return c.leg.Read(b) }

// Write implements net.Conn. It returns once the kernel has taken all bytes. Until then it waits for the window, for
// the peer, and for its turn at a maximum rate.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	for n < len(b) && err == nil {
		var most, written int
		if most, err = c.awaitRoom(len(b) - n); err == nil {
			written, err = c.leg.Write(b[n : n+most])
			n += written
			c.useRoom(written)
		}
	}
	return n, err
}

// sendChunk is how much of a file goes to the kernel in one call.
const sendChunk = 1 << 20

// fileSender is a leg that sends bytes of a file without copying them.
type fileSender interface {
	SendFile(f *os.File, n int) (int, error)
}

// ReadFrom implements io.ReaderFrom. The kernel reads regular files by itself (sendfile(2)).
func (c *Conn) ReadFrom(r io.Reader) (n int64, err error) {
	if plain, ok := c.leg.(io.ReaderFrom); ok && c.flow == nil {
		return plain.ReadFrom(r)
	}
	source, left := r, int64(math.MaxInt64)
	limited, isLimited := r.(*io.LimitedReader)
	if isLimited {
		source, left = limited.R, limited.N
	}
	file, isFile := source.(*os.File)
	sender, sends := c.leg.(fileSender)
	if !isFile || !sends || !isRegular(file) {
		return io.Copy(struct{ io.Writer }{c}, r) // hides ReadFrom, which io.Copy would call again
	}
	n, err = c.sendFile(sender, file, left)
	if isLimited {
		limited.N -= n
	}
	return n, err
}

// isRegular reports whether f is a regular file. sendfile(2) reads no others.
func isRegular(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode().IsRegular()
}

// sendFile sends up to left bytes of a file, from its present offset on.
func (c *Conn) sendFile(sender fileSender, f *os.File, left int64) (n int64, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	for n < left {
		most, err := c.awaitRoom(int(min(left-n, sendChunk)))
		if err != nil {
			return n, err
		}
		sent, err := sender.SendFile(f, most)
		n += int64(sent)
		c.useRoom(sent)
		if sent == 0 || err != nil { // the end of the file, or an error
			return n, err
		}
	}
	return n, nil
}

// awaitRoom waits until bytes may be written, and returns how many of n. The caller holds writing.
func (c *Conn) awaitRoom(n int) (int, error) {
	if c.flow == nil || !c.asks && !c.flow.NeedsGrants() {
		return n, nil
	}
	for c.granted == 0 {
		if c.granted = c.flow.Take(c.engine.now(), cc.Bytes(n)).Bytes; c.granted > 0 {
			break
		}
		select {
		case <-c.room:
		case <-c.closed:
			return 0, c.writeError(net.ErrClosed)
		case <-c.deadline.Wait():
			c.flow.Take(c.engine.now(), 0) // tells the flow that nothing waits any more
			return 0, c.writeError(os.ErrDeadlineExceeded)
		}
	}
	return int(min(cc.Bytes(n), c.granted)), nil
}

// writeError returns an error of Write in the form that package net has.
func (c *Conn) writeError(err error) error {
	return &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// useRoom subtracts what was written from the granted room. The caller holds writing.
func (c *Conn) useRoom(n int) { c.granted = max(0, c.granted-cc.Bytes(n)) }

// CloseWrite ends what is sent, as net.TCPConn's does. The peer reads the end of the stream.
func (c *Conn) CloseWrite() error { return c.leg.CloseWrite() }

// Close implements net.Conn. The kernel goes on delivering what was written.
func (c *Conn) Close() error { return c.closeWith(c.leg.Close) }

// Reset closes the connection so that the peer sees an abort. What was written before may not arrive.
func (c *Conn) Reset() error { return c.closeWith(c.leg.Reset) }

// closeWith ends writes that wait, closes the leg and leaves the group.
func (c *Conn) closeWith(closeLeg func() error) error {
	err := net.ErrClosed
	c.closing.Do(func() {
		close(c.closed)
		c.deadline.Set(time.Time{})
		err = closeLeg()
		if c.flow != nil {
			c.flow.Close(c.engine.now()) // the leg has made its last report
		}
	})
	return err
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.leg.LocalAddr() }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.leg.RemoteAddr() }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	c.deadline.Set(t)
	return c.leg.SetDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.leg.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn. It also ends a write that waits for room.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.deadline.Set(t)
	return c.leg.SetWriteDeadline(t)
}

// SyscallConn implements syscall.Conn, for options of the socket. Nothing controls what is written through it.
func (c *Conn) SyscallConn() (syscall.RawConn, error) {
	if s, ok := c.leg.(syscall.Conn); ok {
		return s.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}
