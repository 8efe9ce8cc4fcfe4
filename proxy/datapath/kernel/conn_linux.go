package kernel

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// Conn is a leg over kernel TCP.
type Conn struct {
	dp  *Datapath
	tcp *net.TCPConn // kept here, so that the descriptor behind raw stays open
	raw syscall.RawConn

	// Writers and the tick settle through these three, without a lock, whether
	// the conn must be polled; see leave.
	writing atomic.Int32
	writes  atomic.Uint32
	active  atomic.Bool

	observed atomic.Bool
	ending   atomic.Bool // CloseWrite was called

	wrote atomic.Int64 // bytes the socket took, since there is a leg
	piece atomic.Int64 // written at once at most; 0: no bound

	mu       sync.Mutex // held while exchange runs
	exchange func(flow.Report) flow.Limit
	closed   bool
	account  account // what TCP_INFO tells, unless the kernel holds the window
	held     *held   // then this; nil otherwise. Set before the tick knows the conn
	envelope string
	missing  []string
	errors   uint64
	limit    limits
	waiting  bool // the last report's answer: a sender waits for the next

	reader reader

	info  unix.TCPInfo
	size  uint32 // in: room in info; out: how much of it the kernel filled
	errno syscall.Errno
	read  func(fd uintptr)      // readInfo, made once: polling allocates nothing
	roomy func(fd uintptr) bool // hasRoom, made once
	asked [1]unix.PollFd        // of hasRoom, under the write lock of raw

	// Only the tick touches these.
	due   uint64 // tick at which to poll again
	quiet uint64 // polls in a row in which nothing changed
	easy  uint64 // polls in a row in which much moved and nobody waited for it, lulls aside
	lull  uint64 // polls in a row in which nothing moved after such
	seen  uint32 // writes at the last poll
	place int    // in the datapath's awake, where it holds the window
}

var (
	_ datapath.Conn        = (*Conn)(nil)
	_ datapath.ReadyReader = (*Conn)(nil)
	_ datapath.Carriage    = (*Conn)(nil)
)

// Wrap makes a leg of a connection that a listener of Listen's accepted; after an
// error the connection is still the caller's. Wrap it before anything is written to it.
func (d *Datapath) Wrap(tcp *net.TCPConn) (*Conn, error) { return d.wrap(tcp, false) }

func (d *Datapath) wrap(tcp *net.TCPConn, dialled bool) (*Conn, error) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("kernel: wrap: %w", err)
	}
	c := &Conn{dp: d, tcp: tcp, raw: raw, missing: d.missing}
	c.read, c.roomy = c.readInfo, c.hasRoom
	// Package net has set TCP_NODELAY.
	if err := tcp.SetKeepAliveConfig(d.keepAlive); err != nil {
		return nil, fmt.Errorf("kernel: wrap: %w", err)
	}
	err = raw.Control(func(fd uintptr) {
		if d.envelope != "" {
			if err := unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, d.envelope); err != nil {
				c.missing = append(c.missing[:len(c.missing):len(c.missing)], envelopeRefused(d.envelope, err))
			}
		}
		c.envelope = envelopeOf(int(fd))
	})
	if err != nil {
		return nil, fmt.Errorf("kernel: wrap: %w", err)
	}
	if err := c.refresh(); err != nil {
		return nil, err
	}
	c.account.calibrate(&c.info, uintptr(c.size), dialled)
	return c, nil
}

// readInfo runs inside RawConn.Control.
func (c *Conn) readInfo(fd uintptr) { c.size, c.errno = tcpInfo(fd, &c.info) }

// tcpInfo reads TCP_INFO and returns how much of it this kernel has. The
// system call goes through the scheduler, since it can wait for the socket's lock.
func tcpInfo(fd uintptr, info *unix.TCPInfo) (uint32, syscall.Errno) {
	size := uint32(wholeTCPInfo)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
	return size, errno
}

// refresh reads TCP_INFO into c.info.
func (c *Conn) refresh() error {
	if err := c.raw.Control(c.read); err != nil {
		return fmt.Errorf("kernel: read TCP_INFO: %w", err)
	}
	if c.errno != 0 {
		c.errors++
		return fmt.Errorf("kernel: read TCP_INFO: %w", c.errno)
	}
	c.account.fin = c.ending.Load()
	return nil
}

// Observe implements datapath.Conn. exchange runs once before Observe returns,
// so that the limit is in force before the first byte. It must not call back.
func (c *Conn) Observe(exchange func(flow.Report) flow.Limit) {
	c.mu.Lock()
	if !c.closed && c.refresh() == nil {
		if c.hold(); c.held == nil {
			c.account.start(&c.info)
		}
		c.exchange = exchange
		c.observed.Store(true)
		c.report()
	}
	idle := c.drained()
	c.mu.Unlock()
	if !idle {
		c.activate()
	}
}

// hold has the kernel hold the window, where it can. Otherwise the leg keeps the
// congestion control it has, and says why.
func (c *Conn) hold() {
	if c.dp.holder == nil {
		return
	}
	h, err := c.dp.holder.bind(c)
	if err != nil {
		c.missing = append(c.missing[:len(c.missing):len(c.missing)], err.Error())
		return
	}
	c.held = h
	c.envelope = EBPF
}

// look takes a reading of the socket.
func (c *Conn) measure() error {
	if c.held == nil {
		return c.refresh()
	}
	c.held.cell.Read(&c.held.next) // else the last one serves once more
	return nil
}

// report hands the last reading to the observer, and its limit to the socket.
func (c *Conn) report() {
	now := c.dp.clock()
	var limit flow.Limit
	if h := c.held; h != nil {
		o := c.dp.holder
		o.note(h)
		limit = c.exchange(h.step(c.wrote.Load(), c.ending.Load(), o.when(h.next.At), now))
		o.ask(h, limit.EveryAck)
		h.tell(limit)
		unsent := h.unsent()
		c.piece.Store(int64(unsent))
		c.errors += c.limit.apply(c.raw, 0, unsent)
	} else {
		limit = c.exchange(c.account.step(&c.info, now))
		c.errors += c.limit.apply(c.raw, limit.PacingRate, unsentFor(limit.Cwnd))
	}
	c.waiting = limit.Waiting
}

// acknowledged reports one acknowledgement by itself.
func (c *Conn) acknowledged(a *bpf.Ack) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// The cell, which is ahead of the ring, may have been read in between.
	if h := c.held; !c.closed && h.cell.Is(a) && int32(a.Seen.Acks-h.seen.Acks) > 0 {
		h.next = a.Seen
		c.report()
	}
}

// drained says whether nothing more will happen to what was written.
func (c *Conn) drained() bool {
	if c.held == nil {
		return drained(&c.info)
	}
	r := &c.held.report
	return r.Unsent == 0 && r.Acked == r.Written
}

// last is the report that was made last.
func (c *Conn) last() *flow.Report {
	if c.held != nil {
		return &c.held.report
	}
	return &c.account.report
}

// outcome is what a poll found.
type outcome uint8

const (
	polledIdle  outcome = iota // nothing more will happen until the next write
	polledQuiet                // nothing happened since the last poll
	polledEasy                 // much moved, and no sender waits for what comes of it
	polledLull                 // nothing moved, as happens between much that does
	polledBusy
	polledGone // closed, or not readable any more
)

func (c *Conn) poll() outcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return polledGone
	}
	before := *c.last()
	if err := c.measure(); err != nil {
		if errors.Is(err, net.ErrClosed) {
			return polledGone
		}
		return polledQuiet
	}
	c.report()
	after := c.last()
	moved := after.Written - before.Written
	switch {
	case !c.waiting && moved >= easyBytes:
		return polledEasy
	case moved == 0 && c.drained(): // what has just moved is rarely the last
		if c.easy > 0 && c.lull < lullPolls {
			return polledLull
		}
		return polledIdle
	case before.Written == after.Written && before.Acked == after.Acked && before.Unsent == after.Unsent &&
		before.Pipe == after.Pipe && before.Lost == after.Lost && before.Timeouts == after.Timeouts:
		return polledQuiet
	}
	return polledBusy
}

// begin and end frame everything that hands bytes to the socket.
func (c *Conn) begin() {
	if c.observed.Load() {
		c.writing.Add(1)
		c.activate() // already now: a write may block half-way for long
	}
}

func (c *Conn) end() {
	if c.observed.Load() {
		c.writes.Add(1)
		c.writing.Add(-1)
		c.activate()
		if c.held != nil { // its cell may have to be told
			c.held.cell.Mark()
		}
	}
}

// activate has the tick poll the conn until it is drained.
func (c *Conn) activate() {
	if !c.active.Load() && c.active.CompareAndSwap(false, true) {
		c.dp.join(c)
	}
}

// leave ends polling unless a writer came in between. Either the writer sees
// active unset and sets it, or its write is seen here.
func (c *Conn) leave() (left bool) {
	if c.writing.Load() != 0 || c.writes.Load() != c.seen {
		return false
	}
	c.active.Store(false)
	if c.writing.Load() == 0 && c.writes.Load() == c.seen {
		return true
	}
	return !c.active.CompareAndSwap(false, true)
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.begin()
	defer c.end()
	for {
		if err := c.await(); err != nil {
			return n, err
		}
		wrote, err := c.tcp.Write(b[n:c.upTo(n, len(b))])
		c.wrote.Add(int64(wrote))
		if n += wrote; err != nil || n == len(b) {
			return n, err
		}
	}
}

// upTo is how far a write of what lies between n and end goes at once, await
// waits until it may. The kernel checks what it may park only when it begins a
// buffer of up to 64 KiB, whether writes are small or large.
func (c *Conn) upTo(n, end int) int {
	if piece := int(c.piece.Load()); piece > 0 {
		return min(end, n+piece)
	}
	return end
}

func (c *Conn) await() error {
	if c.piece.Load() == 0 {
		return nil
	}
	return c.raw.Write(c.roomy)
}

// hasRoom runs inside RawConn.Write. Asking has the kernel wake us when there is.
func (c *Conn) hasRoom(fd uintptr) bool {
	c.asked[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
	n, err := unix.Poll(c.asked[:], 0)
	return n > 0 || err != nil // the write then says what is wrong
}

// CloseWrite implements datapath.Conn.
func (c *Conn) CloseWrite() error {
	c.ending.Store(true)
	return c.tcp.CloseWrite()
}

// LocalAddr implements net.Conn; on a captured connection it is the address
// the client meant to reach.
func (c *Conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.tcp.RemoteAddr() }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error { return c.tcp.SetDeadline(t) }

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.tcp.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.tcp.SetWriteDeadline(t) }

// SyscallConn gives access to the socket, to read options from it. Bytes
// written through it are reported late or, on an idle leg, not until the next
// write through the Conn.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return c.raw, nil }

// Info implements datapath.Conn with a fresh reading; of a closed leg it
// returns the last one.
func (c *Conn) Info() datapath.Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		_ = c.refresh() // counted in errors; the last reading then serves
	}
	i := &c.info
	info := datapath.Info{
		Tier:          Tier,
		Envelope:      c.envelope,
		Holds:         c.holds(),
		Missing:       c.missing,
		Cwnd:          cc.Bytes(i.Snd_cwnd) * cc.Bytes(i.Snd_mss),
		SRTT:          micros(i.Rtt),
		Unsent:        cc.Bytes(i.Notsent_bytes),
		Retransmitted: cc.Bytes(i.Bytes_retrans),
		SignalErrors:  c.errors,
	}
	if c.held != nil {
		info.Falls = uint64(c.held.seen.Falls)
	}
	if i.Min_rtt != noMinRTT {
		info.MinRTT = micros(i.Min_rtt)
	}
	if !appLimited(i) {
		info.DeliveryRate = cc.Rate(i.Delivery_rate) * 8
	}
	return info
}

func (c *Conn) holds() datapath.Hold {
	if c.held != nil {
		return datapath.HoldRate | datapath.HoldWindow
	}
	return datapath.HoldRate
}
