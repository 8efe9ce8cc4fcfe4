package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// Conn is a leg over kernel TCP. Its sending direction is a sender, which has the table of its atomics and locks. Its
// receiving direction is used by one goroutine at a time, or by the task that drives the leg.
//
// Reading and writing wait, as net.Conn's do. While a Driver serves the leg they return datapath.ErrWait instead. An
// idle leg has no goroutine, no stack and no buffer; so every byte of this struct counts (TestALegIsSmall).
type Conn struct {
	sender
	receiveWindow
	reader reader

	serverDSCP uint8 // of a dialled leg; see ReceivedDSCP
}

var (
	_ datapath.Conn        = (*Conn)(nil)
	_ datapath.ReadyReader = (*Conn)(nil)
	_ datapath.Carriage    = (*Conn)(nil)
	_ datapath.Receiver    = (*Conn)(nil)
	_ datapath.Advertiser  = (*Conn)(nil)
	_ datapath.Marker      = (*Conn)(nil)
	_ datapath.Addressed   = (*Conn)(nil)
)

// newLeg makes a leg of a connected socket that a loop serves.
func (d *Datapath) newLeg(raw *eventloop.Socket, remote netip.AddrPort, dialled bool) *Conn {
	c := freeConns.Get().(*Conn)
	c.dp, c.raw, c.remote, c.missing, c.dialled = d, raw, remote, d.missing, dialled
	return c
}

// freeConns has the memory that Recycle was given.
var freeConns = sync.Pool{New: func() any { return new(Conn) }}

// Recycle gives the memory of two closed legs, which a Driver served, to later ones. Only their loop's goroutine
// calls it. Nothing may refer to the legs any more. A leg that was ever enforced or observed is left to the garbage
// collector, since its shard may still have it in a list.
func Recycle(a, b datapath.Conn) {
	for _, leg := range [...]datapath.Conn{a, b} {
		if c, ok := leg.(*Conn); ok && c.shard == nil && c.limits.Load() == nil && c.raw.Recycle() {
			*c = Conn{}
			freeConns.Put(c)
		}
	}
}

// Adopt makes a leg of a connected socket of package net, which may have sent bytes already. It takes conn over: the
// leg has a descriptor of its own, and conn is closed. After an error the caller still has conn.
//
// A loop of the datapath watches the socket, because Go's poller cannot tell a task that a socket may be written. The
// leg has keep-alives, and keeps urgent bytes in their place, only if conn did. An MPTCP connection is refused, because
// TCP_INFO and limits are those of one path.
func (d *Datapath) Adopt(conn *net.TCPConn) (*Conn, error) {
	remote, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return nil, net.ErrClosed
	}
	fd, err := duplicateFD(conn)
	if err != nil {
		return nil, fmt.Errorf("kernel: adopt: %w", err)
	}
	protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err == nil && protocol != unix.IPPROTO_TCP {
		err = errors.New("the connection is of MPTCP; its packets have no one path")
	}
	var raw *eventloop.Socket
	if err == nil {
		raw, err = d.loops.Least().Watch(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("kernel: adopt: %w", err)
	}
	_ = conn.Close() // Go's poller no longer watches the socket, which stays open by the other descriptor
	return d.newLeg(raw, remote.AddrPort(), false), nil
}

// DetachedLeg is an open connection that no Datapath serves. Attach makes a leg of it, in this process or another. What
// the socket says of itself is not part of it: its addresses here, the state of the connection, an urgent mark.
//
// Two processes can have descriptors of one socket. Only the last close ends the connection, so the death of either
// process changes nothing. That close resets it, because of the SO_LINGER of guardStream, which only Close takes back.
type DetachedLeg struct {
	FD          int            `json:"-"` // of whoever holds it: Attach takes it over
	Remote      netip.AddrPort `json:"remote"`
	Dialled     bool           `json:"dialled,omitempty"`      // not accepted
	WriteClosed bool           `json:"write_closed,omitempty"` // CloseWrite was called
	// Control is the congestion control that the socket had before a limit was in force; empty: none ever was.
	Control string `json:"control,omitempty"`
}

// Detach closes both legs of a connection, but not their sockets, which keep their options. The kernel's Reno decides
// their windows until Attach. The loop of both legs calls it, with no read or write underway. After an error nothing
// has changed, unless a leg was closed: then both are.
func Detach(a, b *Conn) (one, two DetachedLeg, err error) {
	var fds [2]int
	if fds[0], err = a.raw.Duplicate(); err != nil {
		return one, two, fmt.Errorf("kernel: detach: %w", err)
	}
	if fds[1], err = b.raw.Duplicate(); err != nil {
		_ = unix.Close(fds[0])
		return one, two, fmt.Errorf("kernel: detach: %w", err)
	}
	errA, errB := a.Abandon(), b.Abandon()
	if err = errors.Join(errA, errB); err != nil {
		_, _ = unix.Close(fds[0]), unix.Close(fds[1])
		return one, two, fmt.Errorf("kernel: detach: %w", err)
	}
	return a.makeDetached(fds[0]), b.makeDetached(fds[1]), nil
}

// makeDetached describes the leg as a detached one with the descriptor fd.
func (c *Conn) makeDetached(fd int) DetachedLeg {
	return DetachedLeg{
		FD: fd, Remote: c.remote, Dialled: c.dialled, WriteClosed: c.writeClosed.Load(),
		Control: c.systemControl,
	}
}

// Abandon makes a last report and closes the leg. The connection goes on by another descriptor of the socket. No read
// or write is underway.
func (c *Conn) Abandon() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.makeLastReport()
	_ = c.readTCPInfo() // for Info
	c.endEnforcing()
	return c.raw.Abandon()
}

// Attach serves a detached leg on the loop of near; nil: on any. It takes FD over; after an error the caller still has
// it. The socket has the options that Enforce(0, 0) leaves it.
//
// A congestion control of ours is taken off the socket, also where it has the name of this process's. The kernel calls
// a control's init only when the control changes, and init is what binds a socket to a cell.
func (d *Datapath) Attach(leg DetachedLeg, near *Conn) (*Conn, error) {
	if protocol, err := unix.GetsockoptInt(leg.FD, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil ||
		protocol != unix.IPPROTO_TCP {
		return nil, errors.Join(errors.New("kernel: attach: the descriptor is none of plain TCP"), err)
	}
	loop := d.loops.Least()
	if near != nil {
		loop = near.raw.Loop()
	}
	raw, err := loop.Watch(leg.FD)
	if err != nil {
		return nil, fmt.Errorf("kernel: attach: %w", err)
	}
	c := d.newLeg(raw, leg.Remote, leg.Dialled)
	if c.dialled {
		c.local = c.readLocal() // it is asked for once the leg is closed
	}
	c.writeClosed.Store(leg.WriteClosed)
	if leg.Control != "" {
		c.errors += defaultSockopts.setOptions(raw)
		if c.setCongestion(leg.Control) != nil {
			c.errors++
		}
	}
	return c, nil
}

// Do calls f on the goroutine of the leg's loop. f must not wait.
func (c *Conn) Do(f func()) { c.raw.Loop().Do(f) }

// Driver runs a connection on the loop of a leg, without goroutines. The loop calls step after each Post, whenever a
// leg may be read or written, and once a leg is closed. Only step, and what else runs on that loop, may then read and
// write. It gets datapath.ErrWait where it would have to wait.
//
// Post and Do may be called from any goroutine, the other methods on the loop only. Start and Join may also be called
// elsewhere while step does nothing. The zero value is ready for Start.
type Driver struct {
	task     eventloop.Task
	deadline *eventloop.Deadline // nil: SetTimeout was not called
}

// Start makes the leg's loop call step. ok: it is a leg of this package.
func (d *Driver) Start(leg datapath.Conn, step func()) (ok bool) {
	c, ok := leg.(*Conn)
	if ok {
		d.task.Prepare(c.raw.Loop(), step)
		c.raw.Drive(&d.task)
	}
	return ok
}

// Join makes the loop serve another leg as well. ok: it is a leg of this package and of the same loop
// (DialConfig.Near).
func (d *Driver) Join(leg datapath.Conn) (ok bool) {
	c, ok := leg.(*Conn)
	if ok = ok && c.raw.Loop() == d.task.OwnLoop(); ok {
		c.raw.Drive(&d.task)
	}
	return ok
}

// Leave makes reads and writes of a leg wait again, on any goroutine.
func (d *Driver) Leave(leg datapath.Conn) {
	if c, ok := leg.(*Conn); ok {
		c.raw.Drive(nil)
	}
}

// Post makes the loop call step soon.
func (d *Driver) Post() { d.task.Post() }

// Do makes the loop call f, once.
func (d *Driver) Do(f func()) { d.task.OwnLoop().Do(f) }

// SetTimeout makes the loop call run after that time, instead of what an earlier call has set. Below 0: never.
func (d *Driver) SetTimeout(after time.Duration, run func()) {
	if d.deadline != nil {
		d.task.OwnLoop().CancelDeadline(d.deadline)
	}
	if after < 0 {
		return
	}
	if d.deadline == nil {
		d.deadline = new(eventloop.Deadline)
	}
	d.task.OwnLoop().StartDeadline(d.deadline, after, run)
}

// Driven implements datapath.Driven.
func (c *Conn) Driven() bool { return c.raw.Driven() }

// Info implements datapath.Conn with a fresh reading of TCP_INFO. On a closed leg, or if nothing has been underway
// since the last reading, it returns that one.
func (c *Conn) Info() datapath.Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		if !c.isUnchanged() {
			_ = c.readTCPInfo() // counted in errors; the last reading then serves
		}
		if c.envelope == "" {
			c.envelope = c.congestionName()
		}
	}
	s := &c.status
	info := datapath.Info{
		Tier:          Tier,
		Envelope:      c.envelope,
		Holds:         c.enforces,
		Missing:       c.missing,
		Cwnd:          s.cwnd,
		SRTT:          microseconds(s.srtt),
		MinRTT:        microseconds(s.minRTT),
		DeliveryRate:  s.deliveryRate,
		Delivered:     s.delivered,
		Unsent:        cc.Bytes(s.unsent),
		Retransmitted: s.retransmitted,
		Retransmits:   s.retransmits,
		SignalErrors:  c.errors,
	}
	if h := c.enforced.Load(); h != nil {
		info.Fallbacks = uint64(h.reported.Fallbacks)
	}
	return info
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
	r := &c.reader
	r.mu.Lock()
	defer r.mu.Unlock()
	r.room = room
	poll := c.raw.Read(func(fd uintptr) bool { return r.tryRead(c.raw, fd) })
	r.room = nil
	return c.adaptReceiveWindow(c.readResult(r.n, poll, r.err, "read"))
}

// adaptReceiveWindow adapts the receive window to the pressure on TCP's memory after a read. It returns its arguments,
// which are the result of the read.
func (c *Conn) adaptReceiveWindow(n int, err error) (int, error) {
	if err == nil && c.isOutdated(&c.dp.pressure) {
		c.LimitReceive(c.receiveLimit)
	}
	return n, err
}

// LimitReceive implements datapath.Receiver.
func (c *Conn) LimitReceive(n cc.Bytes) (limited bool) {
	return c.limitReceive(c.raw, n, &c.dp.receiveBounds, &c.dp.pressure)
}

// LeastRTT implements datapath.Receiver. Until the peer has acknowledged something it is the handshake's.
func (c *Conn) LeastRTT() time.Duration {
	var info unix.TCPInfo
	_, _ = c.readInfo(&info)
	return microseconds(info.Min_rtt)
}

// Arrivals implements datapath.Advertiser. It needs Linux 6.2 and TCP timestamps.
func (c *Conn) Arrivals() (flow.Arrivals, error) {
	size, err := c.readInfo(&c.ensureAdvertised().info)
	if err != nil {
		return flow.Arrivals{}, err
	}
	return c.makeArrivals(size)
}

// Advertise implements datapath.Advertiser.
func (c *Conn) Advertise(window cc.Bytes) error { return c.boundAdvertised(c.raw, window) }

// Close implements net.Conn. It makes a last report. The kernel goes on delivering what is underway.
func (c *Conn) Close() error { return c.closeSocket(lingerDeliver) }

// Reset implements datapath.Conn.
func (c *Conn) Reset() error { return c.closeSocket(lingerReset) }

// Undelivered implements datapath.Conn: what is in the send queue is unsent, or not acknowledged yet.
func (c *Conn) Undelivered() (cc.Bytes, error) {
	var n int
	err := c.raw.Visit(func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	switch {
	case err != nil:
		return 0, fmt.Errorf("kernel: read send queue: %w", err)
	case n > 0 && c.Aborted():
		return 0, nil // nothing more will be delivered
	}
	return cc.Bytes(n), nil
}

// Aborted implements datapath.Conn. After a peer's FIN the connection is in CLOSE_WAIT; only one that is no more is
// in CLOSE.
func (c *Conn) Aborted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.readTCPInfo() != nil || c.status.closed
}

// InProcess implements datapath.Conn: the kernel delivers what was written, also after this process has ended.
func (c *Conn) InProcess() bool { return false }

// KeepAlive implements datapath.KeepAliver. An accepted leg inherits it from its listener.
func (c *Conn) KeepAlive() error {
	if !c.dialled {
		return nil
	}
	return c.raw.Visit(keepAlive)
}

// ReceivedDSCP implements datapath.Marker. The mark of a dialled leg is known if DialConfig.DSCP said to keep it.
func (c *Conn) ReceivedDSCP() (dscp uint8) {
	if c.dialled {
		return c.serverDSCP
	}
	err := c.raw.Visit(func(fd int) (err error) {
		dscp, err = readReceived(fd, c.isIPv4())
		return err
	})
	if err != nil {
		c.dp.log.Debug("a client's DSCP is not known", "err", err)
	}
	return dscp
}

// SetDSCP implements datapath.Marker.
func (c *Conn) SetDSCP(dscp uint8) error {
	return c.raw.Visit(func(fd int) error { return setDSCP(fd, c.isIPv4(), dscp) })
}
