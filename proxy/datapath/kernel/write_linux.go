package kernel

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// beginWrite and end frame everything that hands bytes to the socket, took says how many.
func (c *Conn) beginWrite() {
	if c.observed.Load() {
		c.writersInside.Add(1)
		c.addToTick() // already now: a write may block half-way for long
	}
	if l := c.limits.Load(); l != nil && l.optionsDue.Load() { // a limit was applied while the leg was idle
		c.mu.Lock()
		c.setChangedOptions()
		c.mu.Unlock()
	}
}

func (c *Conn) noteTaken(n int) {
	if n <= 0 {
		return
	}
	c.accepted.Add(int64(n))
	c.writeCount.Add(1)
	c.roomLeft.Add(-int64(n))
	if !c.observed.Load() {
		return
	}
	c.markForPoll()
	if c.shard.slow.Load() {
		c.shard.wakeForLeg(nil)
	}
}

func (c *Conn) endWrite() {
	if c.observed.Load() {
		c.writersInside.Add(-1)
		c.markForPoll()
	}
}

// markForPoll has the tick poll a leg whose window the kernel enforces: its socket may say
// nothing for long.
func (c *Conn) markForPoll() {
	if h := c.enforced.Load(); h != nil {
		h.cell.Mark()
	}
}

// addToTick has the tick serve the leg until nothing of what was written is underway.
func (c *Conn) addToTick() {
	if c.onTick.Load() || !c.onTick.CompareAndSwap(false, true) {
		return
	}
	if c.enforced.Load() != nil {
		c.shard.enforcedBusy.Add(1)
	}
	c.shard.wakeForLeg(c)
	if !c.observed.Load() { // closed meanwhile
		c.removeFromTick()
	}
}

// removeFromTick takes the leg off the tick.
func (c *Conn) removeFromTick() {
	if c.onTick.CompareAndSwap(true, false) && c.enforced.Load() != nil {
		c.shard.enforcedBusy.Add(-1)
	}
}

// tryRetire is retire unless a writer came in between. Either the writer sees active unset
// and sets it, or its write is seen here.
func (c *Conn) tryRetire() (left bool) {
	if c.writersInside.Load() != 0 || c.writeCount.Load() != c.seenWrites {
		return false
	}
	c.removeFromTick()
	if c.writersInside.Load() == 0 && c.writeCount.Load() == c.seenWrites || !c.onTick.CompareAndSwap(false, true) {
		return true
	}
	if c.enforced.Load() != nil {
		c.shard.enforcedBusy.Add(1)
	}
	return false
}

// Write implements net.Conn. Where a task drives the leg it may write less than all, with
// datapath.ErrWait.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.beginWrite()
	defer c.endWrite()
	w := &c.writer
	w.mu.Lock()
	defer w.mu.Unlock()
	for n < len(b) {
		if err := c.waitWritable(); err != nil {
			return n, err
		}
		w.b, w.n, w.err = b[n:c.writeEnd(n, len(b))], 0, nil
		poll := c.raw.Write(w.tryWrite)
		w.b = nil
		c.noteTaken(w.n)
		n += w.n
		if err := c.opFailure("write", poll, w.err); err != nil {
			return n, err
		}
	}
	return n, nil
}

// writer is a write that is underway.
type writer struct {
	mu  sync.Mutex // one call at a time
	b   []byte
	n   int
	err error
}

func (w *writer) tryWrite(fd uintptr) bool {
	w.n, w.err = eventloop.Write(int(fd), w.b)
	return !errors.Is(w.err, unix.EAGAIN)
}

// upTo is where a single write of the bytes from n to end may stop; await waits until it may begin.
func (c *Conn) writeEnd(n, end int) int {
	if c.roomStep.Load() > 0 {
		return min(end, n+int(max(1, c.roomLeft.Load())))
	}
	return end
}

// waitWritable waits until at least half a piece may be written. The kernel checks what may wait
// unsent only when it begins a buffer of up to 64 KiB, whether writes are small or large,
// so that we ask it, once for a piece.
func (c *Conn) waitWritable() error {
	piece := c.roomStep.Load()
	if piece == 0 || c.roomLeft.Load() > piece/2 {
		return nil
	}
	if err := c.raw.Write(hasRoom); err != nil {
		return c.opFailure("write", err, nil)
	}
	c.roomLeft.Store(piece)
	return nil
}

// fitIn returns how many of n bytes the socket takes, in its send buffer and unsent, waiting until it takes some. More
// would wait in whatever holds them, and a peer that reads nothing lets them wait for long.
func (c *Conn) limitToRoom(n int) (int, error) {
	if err := c.raw.Write(hasRoom); err != nil {
		return n, c.opFailure("write", err, nil)
	}
	room := n
	_ = c.raw.Visit(func(fd int) error {
		if vars, err := memoryInfo(fd); err == nil {
			room = int(vars[sendBufferSize]) - int(vars[sendQueued])
		}
		most := c.limits.Load().maxUnsent()
		if most == 0 { // nobody decides about what it has in flight
			most = maxUnsent
			if !c.lowatSet {
				c.lowatSet = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, most) == nil
			}
		}
		if unsent, err := unix.IoctlGetInt(fd, unix.SIOCOUTQNSD); err == nil {
			room = min(room, most-unsent)
		}
		return nil
	})
	return min(n, max(room, datapath.SmallBuffer)), nil
}

// hasRoom runs inside RawConn.Write. Asking has the kernel wake us when there is.
func hasRoom(fd uintptr) bool {
	asked := [...]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(asked[:], 0)
	return n > 0 || err != nil // the write then says what is wrong
}
