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
	ending   atomic.Bool          // CloseWrite was called
	held     atomic.Pointer[held] // nil: the kernel does not hold the window. Changes under mu

	wrote atomic.Int64 // bytes the socket took, since there is a leg
	piece atomic.Int64 // written at once at most; 0: no bound

	mu       sync.Mutex // held while exchange runs
	exchange func(flow.Report) flow.Limit
	closed   bool
	account  account // what TCP_INFO tells, unless the kernel holds the window
	dialled  bool
	envelope string // the socket's congestion control; empty: not asked for yet
	system   string // what it had before it was observed
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
	c := &Conn{dp: d, tcp: tcp, raw: raw, missing: d.missing, dialled: dialled}
	c.read, c.roomy = c.readInfo, c.hasRoom
	// Package net has set TCP_NODELAY.
	if err := tcp.SetKeepAliveConfig(d.keepAlive); err != nil {
		return nil, fmt.Errorf("kernel: wrap: %w", err)
	}
	c.LimitReceive(d.receiving.first)
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
func (c *Conn) Observe(exchange func(flow.Report) flow.Limit, want datapath.Hold) datapath.Hold {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0
	}
	c.unobserve()
	if exchange == nil {
		return 0
	}
	c.system = c.congestion()
	c.envelope = c.system
	if want&datapath.HoldWindow == 0 || !c.hold() {
		if err := c.watch(want); err != nil { // counted in errors
			return 0
		}
	}
	c.exchange = exchange
	c.observed.Store(true)
	c.report()
	if !c.drained() {
		c.activate()
	}
	return c.holds()
}

// hold has the kernel hold the window, if it can.
func (c *Conn) hold() bool {
	if c.dp.holder == nil {
		return false
	}
	h, err := c.dp.holder.bind(c)
	if err != nil {
		c.lack(err.Error())
		return false
	}
	c.held.Store(h)
	c.envelope = EBPF
	return true
}

// watch observes a leg whose window, if there is one, the relay holds above the
// envelope.
func (c *Conn) watch(want datapath.Hold) error {
	if name := c.dp.envelope; want&datapath.HoldWindow != 0 && name != "" && name != c.envelope {
		if err := c.setCongestion(name); err != nil {
			c.lack(envelopeRefused(name, err))
		} else {
			c.envelope = name
		}
	}
	if err := c.refresh(); err != nil {
		return err
	}
	c.account = account{}
	c.account.calibrate(&c.info, uintptr(c.size), c.dialled)
	c.account.start(&c.info)
	return nil
}

// unobserve gives the socket back what it had before it was observed.
func (c *Conn) unobserve() {
	if c.exchange == nil {
		return
	}
	if c.measure() == nil {
		c.report()
	}
	c.exchange = nil
	c.observed.Store(false)
	if h := c.held.Load(); h != nil {
		c.dp.holder.release(h)
		c.held.Store(nil)
	}
	if c.system != "" && c.system != c.envelope {
		if err := c.setCongestion(c.system); err != nil {
			c.errors++
		} else {
			c.envelope = c.system
		}
	}
	c.errors += c.limit.lift(c.raw)
	c.piece.Store(0)
	c.missing = c.dp.missing
}

// lack notes what was asked for and could not be had.
func (c *Conn) lack(words string) {
	c.missing = append(c.missing[:len(c.missing):len(c.missing)], words)
}

// congestion is the name of the socket's congestion control; empty: unknown.
func (c *Conn) congestion() (name string) {
	_ = control(c.raw, func(fd int) error {
		name = envelopeOf(fd)
		return nil
	})
	return name
}

func (c *Conn) setCongestion(name string) error {
	return control(c.raw, func(fd int) error {
		return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
	})
}

// measure takes a reading of the socket.
func (c *Conn) measure() error {
	h := c.held.Load()
	if h == nil {
		return c.refresh()
	}
	h.cell.Read(&h.next) // else the last one serves once more
	return nil
}

// report hands the last reading to the observer, and its limit to the socket.
func (c *Conn) report() {
	now := c.dp.clock()
	var limit flow.Limit
	if h := c.held.Load(); h != nil {
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
	if h := c.held.Load(); !c.closed && h != nil && h.cell.Is(a) && int32(a.Seen.Acks-h.seen.Acks) > 0 {
		h.next = a.Seen
		c.report()
	}
}

// drained says whether nothing more will happen to what was written.
func (c *Conn) drained() bool {
	h := c.held.Load()
	if h == nil {
		return drained(&c.info)
	}
	r := &h.report
	return r.Unsent == 0 && r.Acked == r.Written
}

// last is the report that was made last.
func (c *Conn) last() *flow.Report {
	if h := c.held.Load(); h != nil {
		return &h.report
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
	polledGone // closed, not observed, or not readable any more
)

func (c *Conn) poll() outcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return polledGone
	}
	if c.exchange == nil {
		c.active.Store(false) // whoever observes it anew has it polled again
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
		if c.envelope == "" {
			c.envelope = c.congestion()
		}
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
	if h := c.held.Load(); h != nil {
		info.Falls = uint64(h.seen.Falls)
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
	if c.held.Load() != nil {
		return datapath.HoldAll
	}
	return datapath.HoldRate
}
