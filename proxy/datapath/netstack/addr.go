package netstack

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// LocalAddr implements net.Conn: the address that the client connected to.
func (c *Conn) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(c.Target()) }

// RemoteAddr implements net.Conn: the client.
func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.Source()) }

// Source is the client's address.
func (c *Conn) Source() netip.AddrPort { return addrPortOf(c.id.RemoteAddress, c.id.RemotePort) }

// Hops is the hop limit that the client's SYN would leave us with if it were forwarded.
func (c *Conn) Hops() uint8 { return c.hops }

// Target is the address that the client connected to.
func (c *Conn) Target() netip.AddrPort { return addrPortOf(c.id.LocalAddress, c.id.LocalPort) }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(c.reads, t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(c.writes, t) }

func (c *Conn) setDeadline(d *datapath.Deadline, t time.Time) error {
	d.Set(t)
	// A call may be waiting with the old one.
	c.queue.Notify(waiter.ReadableEvents | waiter.WritableEvents)
	return nil
}

// opError wraps err as package net does; nil and the end of the stream stay as they are.
func (c *Conn) opError(op string, err error) error {
	if err == nil || err == io.EOF { //nolint:errorlint // compared as io.Reader's callers do
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}
