package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

var _ datapath.Ending = (*Conn)(nil)

// Close implements net.Conn. It makes a last report. The kernel goes on delivering what is still
// underway.
func (c *Conn) Close() error { return c.shutSocket(deliver) }

// Reset implements datapath.Conn.
func (c *Conn) Reset() error { return c.shutSocket(reset) }

// CloseWrite implements datapath.Conn.
func (c *Conn) CloseWrite() error {
	c.ending.Store(true)
	err := c.raw.Visit(func(fd int) error { return eventloop.Shutdown(fd, unix.SHUT_WR) })
	return c.opFailure("shutdown", nil, err)
}

// How a socket is closed, as the time in seconds for which it lingers.
const (
	deliver = -1 // in the background
	reset   = 0
)

// shutSocket closes the leg in the way that the first call names.
func (c *Conn) shutSocket(linger int) error {
	c.mu.Lock()
	if !c.closed {
		h := c.enforced.Load()
		if (c.observer == nil || h != nil) && !c.isUnchanged() {
			_ = c.readTCPInfo() // for Info
		}
		c.makeLastReport()
		c.closed = true
		c.limits.Load().stopEnforcing()
		if h != nil { // what is still underway goes on under Reno
			c.dp.enforcer.releaseCell(h)
		}
		if linger == reset || !c.status.closed { // else nothing is left to be delivered
			_ = c.raw.Visit(func(fd int) error { return setLinger(fd, linger) })
		}
	}
	c.mu.Unlock()
	return c.raw.Close()
}

// setLinger says how a socket is closed.
func setLinger(fd, seconds int) error {
	l := unix.Linger{Linger: int32(max(seconds, 0))}
	if seconds >= 0 {
		l.Onoff = 1
	}
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &l)
}

// Undelivered implements datapath.Ending.
func (c *Conn) Undelivered() (cc.Bytes, error) {
	var n int
	err := c.raw.Visit(func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("kernel: read send queue: %w", err)
	}
	if n > 0 && c.Aborted() {
		return 0, nil // none of it will be delivered
	}
	return cc.Bytes(n), nil
}

// Aborted implements datapath.Ending. A peer's FIN leaves CLOSE_WAIT; only a
// connection that is no more is in CLOSE.
func (c *Conn) Aborted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.readTCPInfo() != nil || c.status.closed
}

// InProcess implements datapath.Ending.
func (c *Conn) InProcess() bool { return false }
