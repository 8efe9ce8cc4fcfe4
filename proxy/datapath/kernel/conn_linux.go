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
	writersInside atomic.Int32
	writeCount    atomic.Uint32
	onTick        atomic.Bool

	inSettleList atomic.Bool // settles with the next tick
	observed     atomic.Bool
	ending       atomic.Bool                  // CloseWrite was called
	enforced     atomic.Pointer[cellReporter] // nil: the kernel does not enforce the window. Changes under mu
	limits       atomic.Pointer[limits]       // nil: neither enforced nor observed ever. Changes under mu

	accepted atomic.Int64 // bytes the socket took, since there is a leg
	roomStep atomic.Int64 // written at most before the kernel is asked whether there is room; 0: no bound
	roomLeft atomic.Int64 // left of it

	mu            sync.Mutex // held while observer runs
	observer      func(flow.Report)
	infoReporter  *infoReporter // what TCP_INFO says, while that is reported
	closed        bool
	dialled       bool
	serverDSCP    uint8 // see ReceivedDSCP
	lowatSet      bool  // TCP_NOTSENT_LOWAT is set, though no limit is kept; whoever carries bytes here owns this
	enforces      datapath.Hold
	envelope      string // the socket's congestion control; empty: not asked for yet
	systemControl string // what it had before Enforce
	missing       []string
	errors        uint64

	reader     reader
	writer     writer
	advertised *advertisedWindow // see advertised

	// Only the goroutine that reads touches these.
	receiveLimit  cc.Bytes // LimitReceive's bound; 0: none yet
	receiveClamp  cc.Bytes // of the window, by it; 0: none
	halvings      int32    // by pressure, of the window
	pressureLooks uint32   // of pressure, when that was put into force

	status     tcpStatus
	statusMark int64 // bytes the socket had taken when status was read, plus 1; 0: it was never read

	// Only the tick touches these.
	nextPoll   cc.Time // when to poll again, or to confirm
	progressAt cc.Time // when something happened last
	bulkStreak uint64  // polls in a row in which much moved and the window was not full, gaps aside
	gapStreak  uint64  // polls in a row in which nothing moved after such
	seenWrites uint32  // writes at the last poll
	listed     bool    // in one of the shard's lists
}

var (
	_ datapath.Conn        = (*Conn)(nil)
	_ datapath.ReadyReader = (*Conn)(nil)
	_ datapath.Carriage    = (*Conn)(nil)
)

// newLeg makes one of a connected socket that the loop watches.
func (d *Datapath) newLeg(raw *eventloop.Socket, remote *net.TCPAddr, dialled bool) *Conn {
	return &Conn{dp: d, raw: raw, remote: remote, missing: d.missing, dialled: dialled}
}

// readInfo reads TCP_INFO and returns how much of it this kernel has.
func (c *Conn) readInfo(info *unix.TCPInfo) (size uintptr, err error) {
	err = c.raw.Visit(func(fd int) (err error) {
		size, err = tcpInfo(fd, info)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("kernel: read TCP_INFO: %w", err)
	}
	return size, nil
}

// tcpInfo is readInfo of any socket.
func tcpInfo(fd int, info *unix.TCPInfo) (uintptr, error) {
	size := uint32(wholeTCPInfo)
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, errno
	}
	return uintptr(size), nil
}

// readTCPInfo reads TCP_INFO for the status, and for the account if there is one.
func (c *Conn) readTCPInfo() error {
	known := c.accepted.Load() + 1
	var own unix.TCPInfo
	info := &own
	if c.infoReporter != nil {
		info = &c.infoReporter.info
	}
	size, err := c.readInfo(info)
	switch {
	case errors.Is(err, net.ErrClosed):
		return err
	case err != nil:
		c.errors++
		return err
	}
	if c.infoReporter != nil {
		c.infoReporter.infoSize, c.infoReporter.finQueued = size, c.ending.Load()
	}
	c.status, c.statusMark = statusOf(info), known
	return nil
}

// isUnchanged tells whether nothing has been underway since TCP_INFO was read, so that it would say the
// same of this direction. So a scrape of ten thousand idle legs makes no system calls.
func (c *Conn) isUnchanged() bool { return c.statusMark == c.accepted.Load()+1 && c.status.isDrained() }

// LocalAddr implements net.Conn; on a captured connection it is the address
// the client meant to reach.
func (c *Conn) LocalAddr() net.Addr {
	if a := c.local.Load(); a != nil {
		return a
	}
	var a *net.TCPAddr
	err := c.raw.Visit(func(fd int) error {
		name, err := syscall.Getsockname(fd)
		a = tcpAddr(name)
		return err
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

// SyscallConn gives access to the socket, for its options. Bytes that are written through it are
// reported late or, on an idle leg, not before the next write through the Conn.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return c.raw, nil }

// Info implements datapath.Conn with a fresh reading; of a closed leg, or of one on
// which nothing has been underway since, it returns the last one.
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
		SRTT:          s.srtt,
		MinRTT:        s.minRTT,
		DeliveryRate:  s.deliveryRate,
		Unsent:        cc.Bytes(s.unsent),
		Retransmitted: s.retransmitted,
		SignalErrors:  c.errors,
	}
	if h := c.enforced.Load(); h != nil {
		info.Fallbacks = uint64(h.reported.Fallbacks)
	}
	return info
}
