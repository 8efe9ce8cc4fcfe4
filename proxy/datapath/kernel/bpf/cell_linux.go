package bpf

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Seen is what a socket says: counters since it was bound, and gauges. The fields
// are those of struct seen in control.bpf.c.
type Seen = controlSeen

// Cell is one socket's part of the shared memory. Apply and Mark may be called from
// any goroutine; one at a time uses the rest.
type Cell struct {
	control    *Control
	cell       *controlCell
	index      uint32
	generation uint32
}

// Bind makes the control that of a connected socket and returns its cell, which is
// of the given part; ErrFull: the socket keeps the control it has. Until a limit is
// applied it keeps its window, too.
func (c *Control) Bind(fd, part int) (*Cell, error) {
	cell, err := c.takeCell(part)
	if err != nil {
		return nil, err
	}
	b := controlBinding{Cell: cell.index, Generation: cell.generation}
	if err := c.objects.Bindings.Put(uint32(fd), &b); err != nil {
		cell.Free()
		return nil, fmt.Errorf("bpf: bind a socket to its cell: %w", err)
	}
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, c.name); err != nil {
		cell.Free()
		return nil, fmt.Errorf("bpf: select %q: %w", c.name, err)
	}
	return cell, nil
}

// takeCell returns a cell that no socket is bound to yet.
func (c *Control) takeCell(of int) (*Cell, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &c.parts[of]
	last := len(p.free) - 1
	if last < 0 || c.closed {
		return nil, ErrFull
	}
	index := p.free[last]
	p.free = p.free[:last]
	p.used.Store(max(p.used.Load(), index/64+1))
	if c.sequence++; c.sequence == 0 {
		c.sequence++ // 0 is no socket's
	}
	cell := &Cell{control: c, cell: &c.cells[index], index: index, generation: c.sequence}
	applied := &cell.cell.Applied
	atomic.StoreUint32(&applied.Cwnd, 0)
	atomic.StoreUint64(&applied.Rate, 0)
	atomic.StoreUint64(&applied.Answers, 0)
	atomic.StoreUint32(&applied.Timeouts, 0)
	atomic.StoreUint32(&applied.Marked, 0)
	atomic.StoreUint32(&applied.Generation, cell.generation)
	return cell, nil
}

// Room is how many sockets more could be bound to cells of a part.
func (c *Control) Room(part int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.parts[part].free)
}

// Free lets the socket go; it runs Reno from now on. The cell is not used after it.
func (c *Cell) Free() {
	atomic.StoreUint32(&c.cell.Applied.Generation, 0)
	o := c.control
	o.mu.Lock()
	defer o.mu.Unlock()
	p := &o.parts[int(c.index/64)%len(o.parts)]
	p.free = append(p.free, c.index)
}

// Index tells the cell from others in use.
func (c *Cell) Index() uint32 { return c.index }

// Mark makes news of the cell, as if its socket had said something.
func (c *Cell) Mark() {
	word, bit := &c.control.news[c.index/64], uint64(1)<<(c.index%64)
	if atomic.LoadUint64(word)&bit == 0 {
		atomic.OrUint64(word, bit)
	}
}

// News calls yield with the index of each cell of a part in which there is something
// new, up to about limit of them; the rest come first the next time. One goroutine at
// a time calls it for a part.
func (c *Control) News(of, limit int, yield func(cell uint32)) {
	p, step := &c.parts[of], len(c.parts)
	used := int(p.used.Load())
	for range (used + step - 1 - of) / step {
		if p.turn += step; p.turn >= used {
			p.turn = of
		}
		word := &c.news[p.turn]
		if atomic.LoadUint64(word) == 0 {
			continue
		}
		if limit <= 0 {
			p.turn -= step
			return
		}
		for left := atomic.SwapUint64(word, 0); left != 0; left &= left - 1 {
			yield(uint32(p.turn*64 + bits.TrailingZeros64(left)))
			limit--
		}
	}
}

// readTries is how often a cell is read again if the kernel was writing it. The next tick comes soon enough.
const readTries = 8

// Read copies what the socket said last; false: nothing yet, or the kernel is writing
// it just now, and s is as it was.
func (c *Cell) Read(s *Seen) bool {
	const words = int(unsafe.Sizeof(Seen{}) / 8)
	var whole Seen // until it is known to be, it is not s
	from := (*[words]uint64)(unsafe.Pointer(&c.cell.Seen))
	to := (*[words]uint64)(unsafe.Pointer(&whole))
	for range readTries {
		before := atomic.LoadUint32(&c.cell.Seen.Sequence)
		for i := range from {
			to[i] = atomic.LoadUint64(&from[i])
		}
		if before%2 == 0 && atomic.LoadUint32(&c.cell.Seen.Sequence) == before {
			if whole.Generation != c.generation {
				return false
			}
			*s = whole
			return true
		}
	}
	return false
}

// Apply has the socket send no more than cwnd bytes, and rate bytes per second (0: not
// paced), from its next acknowledgement or transmission on.
func (c *Cell) Apply(cwnd uint32, rate uint64) {
	atomic.StoreUint32(&c.cell.Applied.Cwnd, cwnd)
	atomic.StoreUint64(&c.cell.Applied.Rate, rate)
}

// Answer says that the limit applied last takes into account what s says.
func (c *Cell) Answer(s *Seen) {
	applied := &c.cell.Applied
	atomic.StoreUint32(&applied.Timeouts, s.Timeouts)
	atomic.StoreUint32(&applied.Marked, s.Marked)
	atomic.StoreUint64(&applied.Answers, s.At)
}
