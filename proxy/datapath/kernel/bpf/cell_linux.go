package bpf

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Seen is what a socket tells: counters since it was bound, and gauges. The
// fields are those of struct seen in control.bpf.c.
type Seen = controlSeen

// Told is what a socket is told.
type Told struct {
	Cwnd     uint32 // bytes in flight at most
	Rate     uint64 // bytes per second; 0: not paced
	Answers  uint64 // Seen.At of what it answers
	Timeouts uint32 // Seen.Timeouts of what it answers
	Marked   uint32 // Seen.Marked of what it answers
	Each     bool   // every acknowledgement shall go into the ring
}

// Cell is one socket's part of the shared memory. One goroutine at a time uses
// it, but for Mark.
type Cell struct {
	control    *Control
	cell       *controlCell
	index      uint32
	generation uint32
}

// Bind makes the control that of a connected socket and returns the cell through
// which it speaks; ErrFull: the socket keeps the control it has. Until it is told
// a window it keeps that too.
func (c *Control) Bind(fd int) (*Cell, error) {
	cell, err := c.take()
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

// take returns a cell that nobody is bound to yet.
func (c *Control) take() (*Cell, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := len(c.free) - 1
	if last < 0 {
		return nil, ErrFull
	}
	index := c.free[last]
	c.free = c.free[:last]
	c.used.Store(max(c.used.Load(), index+1))
	if c.sequence++; c.sequence == 0 {
		c.sequence++ // 0 is nobody's
	}
	cell := &Cell{control: c, cell: &c.cells[index], index: index, generation: c.sequence}
	told := &cell.cell.Told
	atomic.StoreUint32(&told.Cwnd, 0)
	atomic.StoreUint64(&told.Rate, 0)
	atomic.StoreUint64(&told.Answers, 0)
	atomic.StoreUint32(&told.Timeouts, 0)
	atomic.StoreUint32(&told.Marked, 0)
	atomic.StoreUint32(&told.Each, 0)
	atomic.StoreUint32(&told.Generation, cell.generation)
	return cell, nil
}

// Free lets the socket go; it helps itself from now on. The cell is not used
// after it.
func (c *Cell) Free() {
	atomic.StoreUint32(&c.cell.Told.Generation, 0)
	c.control.mu.Lock()
	defer c.control.mu.Unlock()
	if !c.control.closed {
		c.control.free = append(c.control.free, c.index)
	}
}

// Index tells the cell from others in use, as Ack.Cell does.
func (c *Cell) Index() uint32 { return c.index }

// Mark makes news of the cell, as if its socket had told something.
func (c *Cell) Mark() {
	word, bit := &c.control.news[c.index/64], uint64(1)<<(c.index%64)
	if atomic.LoadUint64(word)&bit == 0 {
		atomic.OrUint64(word, bit)
	}
}

// News calls yield with the index of every cell in which there is something new,
// up to limit of them; the rest come first the next time.
func (c *Control) News(limit int, yield func(cell uint32)) {
	used := int(c.used.Load()+63) / 64
	for range used {
		if c.turn++; c.turn >= used {
			c.turn = 0
		}
		word := &c.news[c.turn]
		if atomic.LoadUint64(word) == 0 {
			continue
		}
		if limit <= 0 {
			c.turn--
			return
		}
		for left := atomic.SwapUint64(word, 0); left != 0; left &= left - 1 {
			yield(uint32(c.turn*64 + bits.TrailingZeros64(left)))
			limit--
		}
	}
}

// readTries is how often a reading that the kernel was writing meanwhile is
// repeated at once; the next tick comes soon enough.
const readTries = 8

// Read copies what the socket told last; false: nothing yet, or it is telling
// just now, and s is as it was.
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

// Tell has the socket obey t from its next acknowledgement or transmission on.
func (c *Cell) Tell(t Told) {
	told := &c.cell.Told
	atomic.StoreUint32(&told.Cwnd, t.Cwnd)
	atomic.StoreUint64(&told.Rate, t.Rate)
	var each uint32
	if t.Each {
		each = 1
	}
	atomic.StoreUint32(&told.Each, each)
	atomic.StoreUint32(&told.Timeouts, t.Timeouts)
	atomic.StoreUint32(&told.Marked, t.Marked)
	atomic.StoreUint64(&told.Answers, t.Answers)
}

// Ack is one acknowledgement out of the ring.
type Ack struct {
	Cell uint32
	_    uint32
	Seen Seen
}

// Acks calls yield for every acknowledgement that came since the last call, of
// the sockets that were asked for each. It does not wait. The Ack is valid until
// yield returns.
func (c *Control) Acks(yield func(*Ack)) error {
	c.acks.SetDeadline(time.Unix(0, 0)) // no wait: nobody is woken for the ring
	for {
		err := c.acks.ReadInto(&c.record)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return fmt.Errorf("bpf: read the ring: %w", err)
		case len(c.record.RawSample) >= int(unsafe.Sizeof(Ack{})):
			yield((*Ack)(unsafe.Pointer(&c.record.RawSample[0])))
		}
	}
}

// Is says whether an acknowledgement is of the socket behind the cell.
func (c *Cell) Is(a *Ack) bool { return a.Cell == c.index && a.Seen.Generation == c.generation }
