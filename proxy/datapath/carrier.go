package datapath

import (
	"bytes"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
)

// Carrier moves the bytes of one direction from one leg to the other through a store. It has a store only while bytes
// are in it, so an idle connection costs none. One goroutine at a time uses it. Closing either leg, or a deadline on
// it, ends a call that waits. Where a task drives the legs, calls return ErrWait instead of waiting.
type Carrier interface {
	// Fill waits until the source has something and takes up to limit bytes of
	// it into the store: io.EOF once the source has ended. With bytes still in
	// the store it takes nothing.
	Fill(limit int) (int, error)

	// Drain passes up to limit of the stored bytes on, waiting while the
	// destination takes none. Without an error it passes at least one.
	Drain(limit int) (int, error)

	// Buffered returns how many bytes are in the store.
	Buffered() int

	// Splicing reports whether the stored bytes have stayed in the kernel.
	Splicing() bool

	// Release gives the store back. Bytes that are still in it are lost. The carrier must not be used afterwards, as
	// another connection may have its memory by then.
	Release()
}

// Unloader is a Carrier that gives out its stored bytes, for them to go on by another way.
type Unloader interface {
	// TakeStored empties the store and returns what was in it. ok is false, and nothing has changed, if the store says
	// more of the bytes than their values.
	TakeStored() (stored []byte, ok bool)
}

// Carriage is implemented by legs that have a cheaper way than copying through memory of this process.
type Carriage interface {
	// CarryFrom returns a carrier from src to this leg; nil if src is of another kind. buffers serve where the cheaper
	// way cannot be had.
	CarryFrom(src net.Conn, buffers *Buffers) Carrier
}

// NewCarrier returns the cheapest carrier from src to dst: the destination's
// own where it has one, else a copy.
func NewCarrier(dst, src net.Conn, buffers *Buffers) Carrier {
	if c, ok := dst.(Carriage); ok {
		if carrier := c.CarryFrom(src, buffers); carrier != nil {
			return carrier
		}
	}
	return NewCopy(dst, src, buffers)
}

// ReadyReader is a source that can wait for bytes without memory to put them in.
type ReadyReader interface {
	// ReadReady reads, as Read does, into memory that room lends. While it has to wait it
	// gives the memory back, and takes it anew afterwards.
	ReadReady(room Room) (int, error)
}

// Room lends memory to a read.
type Room interface {
	Take() []byte
	GiveBack()
}

// Lent is a Room of memory that is there already.
type Lent []byte

// Take implements Room.
func (b Lent) Take() []byte { return b }

// GiveBack implements Room.
func (Lent) GiveBack() {}

// Sizes of the copy's buffers. Even with the large one a copy costs two thirds
// more CPU per byte than splicing; the small one keeps a connection going when
// memory is short.
const (
	LargeBuffer = 256 << 10
	SmallBuffer = 16 << 10
)

// Buffers lends memory to copies. The zero value lends without a bound.
type Buffers struct {
	bound        int64 // large buffers out at most; 0: no bound, below 0: none
	out          atomic.Int64
	short        atomic.Uint64 // how often there was no large one
	large, small sync.Pool
}

// NewBuffers returns buffers. The large ones that are lent take limit bytes at most; further borrowers get small ones.
func NewBuffers(limit cc.Bytes) *Buffers {
	if limit < LargeBuffer {
		return &Buffers{bound: -1}
	}
	return &Buffers{bound: int64(limit) / LargeBuffer}
}

// Short returns how often a small buffer was lent since all large ones were out.
func (b *Buffers) Short() uint64 { return b.short.Load() }

// lendBuffer lends a buffer for n bytes, or for less where memory is short.
func (b *Buffers) lendBuffer(n int) []byte {
	if n > SmallBuffer {
		if out := b.out.Add(1); b.bound == 0 || out <= b.bound {
			if p, ok := b.large.Get().(*[LargeBuffer]byte); ok {
				return p[:]
			}
			return make([]byte, LargeBuffer)
		}
		b.out.Add(-1)
		b.short.Add(1)
	}
	if p, ok := b.small.Get().(*[SmallBuffer]byte); ok {
		return p[:]
	}
	return make([]byte, SmallBuffer)
}

func (b *Buffers) returnBuffer(buf []byte) {
	if len(buf) == LargeBuffer {
		b.large.Put((*[LargeBuffer]byte)(buf))
		b.out.Add(-1)
		return
	}
	b.small.Put((*[SmallBuffer]byte)(buf))
}

// copier is the carrier through our own memory; it works between any two conns.
type copier struct {
	dst     io.Writer
	src     io.Reader // a ReadyReader waits without memory
	buffers *Buffers
	buf     []byte // nil while nothing is stored
	r, w    int    // buf[r:w] is to be written
	limit   int    // of the Fill underway
}

// NewCopy returns the carrier that copies. From a ReadyReader it holds a
// buffer only while bytes are in it; from any other source also while it waits.
func NewCopy(dst io.Writer, src io.Reader, buffers *Buffers) Carrier {
	return &copier{dst: dst, src: src, buffers: buffers}
}

// Take implements Room.
func (c *copier) Take() []byte {
	if c.buf == nil {
		c.buf = c.buffers.lendBuffer(c.limit)
	}
	return c.buf[:min(c.limit, len(c.buf))]
}

// GiveBack implements Room.
func (c *copier) GiveBack() {
	if c.buf != nil {
		c.buffers.returnBuffer(c.buf)
		c.buf = nil
	}
	c.r, c.w = 0, 0
}

func (c *copier) Fill(limit int) (n int, err error) {
	if c.Buffered() > 0 || limit <= 0 {
		return 0, nil
	}
	c.limit = limit
	if ready, ok := c.src.(ReadyReader); ok {
		n, err = ready.ReadReady(c)
	} else {
		n, err = c.src.Read(c.Take())
	}
	if c.w = n; n == 0 {
		c.GiveBack()
	}
	return n, err
}

func (c *copier) Drain(limit int) (int, error) {
	limit = min(limit, c.Buffered())
	if limit <= 0 {
		return 0, nil
	}
	n, err := c.dst.Write(c.buf[c.r : c.r+limit])
	if c.r += n; c.r == c.w {
		c.GiveBack()
	}
	return n, err
}

// TakeStored implements Unloader.
func (c *copier) TakeStored() ([]byte, bool) {
	stored := bytes.Clone(c.buf[c.r:c.w])
	c.GiveBack()
	return stored, true
}

func (c *copier) Buffered() int { return c.w - c.r }

// Splicing implements Carrier.
func (c *copier) Splicing() bool { return false }

func (c *copier) Release() { c.GiveBack() }
