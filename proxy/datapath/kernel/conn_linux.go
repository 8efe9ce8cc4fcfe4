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
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// Conn is a leg over kernel TCP.
type Conn struct {
	dp    *Datapath
	shard *shard // whose tick serves it; set with the first Enforce or Observe
	raw   *eventloop.Socket

	remote *net.TCPAddr
	local  atomic.Pointer[net.TCPAddr] // nil: not asked for yet

	// Writers and the tick settle through these three, without a lock, whether
	// the leg must be polled; see leave.
	writing atomic.Int32
	writes  atomic.Uint32
	active  atomic.Bool

	queued   atomic.Bool // settles with the next tick
	observed atomic.Bool
	ending   atomic.Bool              // CloseWrite was called
	enforced atomic.Pointer[enforced] // nil: the kernel does not enforce the window. Changes under mu
	limits   limits

	wrote atomic.Int64 // bytes the socket took, since there is a leg
	piece atomic.Int64 // written at most before the kernel is asked whether there is room; 0: no bound
	room  atomic.Int64 // left of it

	mu       sync.Mutex // held while observer runs
	observer func(flow.Report)
	account  *account // what TCP_INFO says, while that is reported
	closed   bool
	dialled  bool
	holds    datapath.Hold
	envelope string // the socket's congestion control; empty: not asked for yet
	system   string // what it had before Enforce
	missing  []string
	errors   uint64

	reader      reader
	writer      writer
	advertising *advertising // see advertised

	// Of what is taken in; only who reads touches them.
	receive  cc.Bytes // LimitReceive's bound; 0: none yet
	halvings int32    // of it, see pressure

	info  unix.TCPInfo
	known int64  // bytes the socket had taken when info was read, and one; 0: it has not been
	size  uint32 // in: room in info; out: how much of it the kernel filled
	errno syscall.Errno
	read  func(fd uintptr)      // readInfo, made once: polling allocates nothing
	roomy func(fd uintptr) bool // hasRoom, made once
	asked [1]unix.PollFd        // of hasRoom, under the write lock of raw

	// Only the tick touches these.
	due      cc.Time // when to poll again, or to confirm
	progress cc.Time // when something happened last
	bulk     uint64  // polls in a row in which much moved and the window was not full, gaps aside
	gap      uint64  // polls in a row in which nothing moved after such
	seen     uint32  // writes at the last poll
	listed   bool    // in one of the shard's lists
}

var (
	_ datapath.Conn        = (*Conn)(nil)
	_ datapath.ReadyReader = (*Conn)(nil)
	_ datapath.Carriage    = (*Conn)(nil)
)

// leg makes one of a connected socket that the loop watches.
func (d *Datapath) leg(raw *eventloop.Socket, remote *net.TCPAddr, dialled bool) *Conn {
	c := &Conn{dp: d, raw: raw, remote: remote, missing: d.missing, dialled: dialled}
	c.read = c.readInfo
	return c
}

// readInfo runs inside RawConn.Control.
func (c *Conn) readInfo(fd uintptr) { c.size, c.errno = tcpInfo(fd, &c.info) }

// tcpInfo reads TCP_INFO and returns how much of it this kernel has.
func tcpInfo(fd uintptr, info *unix.TCPInfo) (uint32, syscall.Errno) {
	size := uint32(wholeTCPInfo)
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
	return size, errno
}

// refresh reads TCP_INFO into c.info.
func (c *Conn) refresh() error {
	known := c.wrote.Load() + 1
	if err := c.raw.Control(c.read); err != nil {
		return fmt.Errorf("kernel: read TCP_INFO: %w", err)
	}
	if c.errno != 0 {
		c.errors++
		return fmt.Errorf("kernel: read TCP_INFO: %w", c.errno)
	}
	if c.account != nil {
		c.account.fin = c.ending.Load()
	}
	c.known = known
	return nil
}

// still tells whether nothing has been underway since TCP_INFO was read, so that it
// would say the same of this direction. Ten thousand idle legs cost a scrape nothing.
func (c *Conn) still() bool { return c.known == c.wrote.Load()+1 && drained(&c.info) }

// LocalAddr implements net.Conn; on a captured connection it is the address
// the client meant to reach.
func (c *Conn) LocalAddr() net.Addr {
	if a := c.local.Load(); a != nil {
		return a
	}
	var a *net.TCPAddr
	err := c.raw.Control(func(fd uintptr) {
		if name, err := syscall.Getsockname(int(fd)); err == nil {
			a = tcpAddr(name)
		}
	})
	if err != nil || a == nil {
		return (*net.TCPAddr)(nil)
	}
	c.local.Store(a)
	return a
}

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.raw.SetReadDeadline(t), c.raw.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.raw.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.raw.SetWriteDeadline(t) }

// SyscallConn gives access to the socket, to read options from it. Bytes
// written through it are reported late or, on an idle leg, not until the next
// write through the Conn.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return c.raw, nil }

// Info implements datapath.Conn with a fresh reading; of a closed leg, or of one on
// which nothing has been underway since, it returns the last one.
func (c *Conn) Info() datapath.Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		if !c.still() {
			_ = c.refresh() // counted in errors; the last reading then serves
		}
		if c.envelope == "" {
			c.envelope = c.congestion()
		}
	}
	i := &c.info
	info := datapath.Info{
		Tier:          Tier,
		Envelope:      c.envelope,
		Holds:         c.holds,
		Missing:       c.missing,
		Cwnd:          cc.Bytes(i.Snd_cwnd) * cc.Bytes(i.Snd_mss),
		SRTT:          micros(i.Rtt),
		Unsent:        cc.Bytes(i.Notsent_bytes),
		Retransmitted: cc.Bytes(i.Bytes_retrans),
		SignalErrors:  c.errors,
	}
	if h := c.enforced.Load(); h != nil {
		info.Fallbacks = uint64(h.seen.Fallbacks)
	}
	if i.Min_rtt != noMinRTT {
		info.MinRTT = micros(i.Min_rtt)
	}
	if !appLimited(i) {
		info.DeliveryRate = cc.Rate(i.Delivery_rate) * 8
	}
	return info
}
