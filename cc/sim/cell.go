package sim

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// CellConfig describes one direction of a radio cell: a queue for each host, and
// a scheduler that divides the resource blocks of each subframe of a millisecond
// among those for which something waits, in turn (round robin).
type CellConfig struct {
	Blocks int           // resource blocks in a subframe; 0: 100, a carrier of 20 MHz
	Hosts  []CellHost    // in the order of their numbers; a host beyond them is as the last
	Delay  time.Duration // propagation, after the queue
	Seed   uint64
}

// CellHost is a host as its cell serves it.
type CellHost struct {
	BitsPerBlock int           // what a resource block carries, by its modulation and coding; 0: 500
	Delay        time.Duration // propagation added to the cell's
	QueueBytes   cc.Bytes      // drop-tail limit; 0: none
	QueuePackets int           // drop-tail limit in packets; 0: none
	Loss         float64       // probability that a packet is lost by the radio, before the queue
}

// Subframe is how long one division of a cell's blocks holds.
const Subframe = time.Millisecond

// What a cell's zero values stand for, and what bounds it.
const (
	defaultBlocks = 100 // of 20 MHz
	defaultBits   = 500
	maxBlocks     = 10_000
	maxBits       = 10_000
)

// Departure is a packet that a Cell or a ManagedLink has served. Those of one lane
// leave it in the order in which they came.
type Departure struct {
	Lane int      // the queue it was in; in a cell, the number of its host
	Size cc.Bytes // IP length
	Verdict
}

// Cell is one direction of a radio cell. At the start of each subframe it
// divides the blocks among the hosts for which something waits, equally, as far
// as each can use them; what they carry has left at the subframe's end. A block
// is one host's: what it has no bytes for is lost.
//
// A packet's fate depends on those that come to others after it, so it is not
// settled on arrival, as a Link's is. A Departure may lie up to a subframe ahead.
// The schedule depends on when packets come and not on when it is asked, so lateness
// never adds up.
type Cell struct {
	cfg   CellConfig
	start cc.Time
	rng   *rand.Rand
	hosts []*cellHost
	now   cc.Time // the latest seen

	next     int64 // the first subframe not divided yet, counted from 0 at the start
	turn     int   // the host that is next to get what cannot be divided equally
	wanting  []*cellHost
	departed []Departure // since the last Advance
	handed   []Departure // by the last Advance
}

// cellHost is one host's queue.
type cellHost struct {
	CellHost
	number  int
	waiting Ring[queuedPacket]
	queued  cc.Bytes
	sent    cc.Bytes // bits of the first in the queue that have left
	want    int      // blocks, in the division under way
	given   int      // blocks, in the division under way
	radio
}

// cellStream keeps a cell's draws apart from those of other users of its seed.
const cellStream = 0x63656c6c

// NewCell returns a cell; its first subframe begins at start.
func NewCell(cfg CellConfig, start cc.Time) *Cell {
	if cfg.Blocks == 0 {
		cfg.Blocks = defaultBlocks
	}
	return &Cell{cfg: cfg, start: start, now: start, rng: rand.New(rand.NewPCG(cfg.Seed, cellStream))}
}

// Host returns host number i, counted from 0, its defaults filled in.
func (c CellConfig) Host(i int) CellHost {
	var h CellHost
	if n := len(c.Hosts); n > 0 {
		h = c.Hosts[min(i, n-1)]
	}
	if h.BitsPerBlock == 0 {
		h.BitsPerBlock = defaultBits
	}
	return h
}

// Check tells what is wrong with the cell.
func (c CellConfig) Check() error {
	switch {
	case c.Blocks < 0 || c.Blocks > maxBlocks:
		return fmt.Errorf("a cell has %d blocks, but must have 1 to %d; 0: %d", c.Blocks, maxBlocks, defaultBlocks)
	case c.Delay < 0:
		return fmt.Errorf("the delay is %v, but must not be negative", c.Delay)
	}
	for i, h := range c.Hosts {
		if h.BitsPerBlock < 0 || h.BitsPerBlock > maxBits {
			return fmt.Errorf("host %d: a block carries %d bits, but must carry 1 to %d; 0: %d", i+1, h.BitsPerBlock,
				maxBits, defaultBits)
		}
		link := LinkConfig{Delay: h.Delay, QueueBytes: h.QueueBytes, QueuePackets: h.QueuePackets, Loss: h.Loss}
		if err := link.Check(); err != nil {
			return fmt.Errorf("host %d: %w", i+1, err)
		}
	}
	return nil
}

// host returns host number i, which is born when it is first spoken of.
func (c *Cell) host(i int) *cellHost {
	for len(c.hosts) <= i {
		n := len(c.hosts)
		c.hosts = append(c.hosts, &cellHost{CellHost: c.cfg.Host(n), number: n})
	}
	return c.hosts[i]
}

// SetDelay implements Hop, for all hosts.
func (c *Cell) SetDelay(d time.Duration) { c.cfg.Delay = d }

// Enqueue implements Hop. Hosts are counted from 0.
func (c *Cell) Enqueue(now cc.Time, host int, size cc.Bytes, _ uint32, _ Codepoint) (lane int, v Verdict, waits bool) {
	c.advance(now)
	h := c.host(host)
	if draws(c.rng, h.Loss) {
		h.lost += max(0, size-HeaderBytes)
		return host, Verdict{Dropped: DropLoss}, false
	}
	h.arrived(c.next-1, size)
	if overflows(h.QueueBytes, h.QueuePackets, h.queued+size, h.waiting.Len()) {
		return host, Verdict{Dropped: DropQueue}, false
	}
	h.waiting.Push(queuedPacket{size: size})
	h.queued += size
	return host, Verdict{}, true
}

// Advance implements Hop: it divides the blocks of the subframes that have begun by now.
func (c *Cell) Advance(now cc.Time) []Departure {
	c.advance(now)
	c.handed, c.departed = c.departed, c.handed[:0]
	return c.handed
}

// Next implements Hop: the start of the next subframe, while anything waits.
func (c *Cell) Next() cc.Time {
	if len(c.departed) > 0 {
		return c.now
	}
	if !c.busy() {
		return cc.Never
	}
	return c.begins(c.next)
}

// Backlog implements Hop, without what the subframe under way carries.
func (c *Cell) Backlog(now cc.Time, host int) (bytes cc.Bytes, packets int) {
	c.advance(now)
	h := c.host(host)
	return h.queued, h.waiting.Len()
}

// Offered implements Hop, of the subframes that ended from one moment up to another.
func (c *Cell) Offered(host int, from, to cc.Time) cc.Bytes {
	ended := func(t cc.Time) int64 { return int64(max(0, t.Sub(c.start)-1) / Subframe) }
	bits := cc.Bytes(c.cfg.Blocks) * cc.Bytes(c.cfg.Host(host).BitsPerBlock)
	return cc.Bytes(max(0, ended(to)-ended(from))) * bits / 8
}

func (c *Cell) begins(subframe int64) cc.Time {
	return c.start.Add(time.Duration(subframe) * Subframe)
}

func (c *Cell) busy() bool {
	for _, h := range c.hosts {
		if h.waiting.Len() > 0 {
			return true
		}
	}
	return false
}

// advance divides the subframes that have begun by now.
func (c *Cell) advance(now cc.Time) {
	c.now = max(c.now, now)
	begun := int64(c.now.Sub(c.start)/Subframe) + 1
	for c.next < begun {
		if !c.busy() {
			c.idle(begun - c.next)
			c.next = begun
			return
		}
		c.divide()
	}
}

// divide gives away the blocks of the next subframe: to each who wants any an
// equal part of what is left, or one, until all are given or no host wants more.
func (c *Cell) divide() {
	c.wanting = c.wanting[:0]
	for i := range c.hosts {
		h := c.hosts[(c.turn+i)%len(c.hosts)]
		h.want, h.given = h.wants(), 0
		if h.want > 0 {
			c.wanting = append(c.wanting, h)
		}
	}
	free, wanting := c.cfg.Blocks, c.wanting
	for free > 0 && len(wanting) > 0 {
		each := max(1, free/len(wanting))
		if free < len(wanting) {
			c.turn = wanting[free].number
			wanting = wanting[:free]
		}
		still := wanting[:0]
		for _, h := range wanting {
			n := min(each, h.want)
			h.given, h.want, free = h.given+n, h.want-n, free-n
			if h.want > 0 {
				still = append(still, h)
			}
		}
		wanting = still
	}
	for i := range c.hosts {
		h := c.hosts[i]
		h.note(c.next, h.given)
		if h.given > 0 {
			c.serve(h)
		}
	}
	c.next++
}

// wants is how many blocks the host could use.
func (h *cellHost) wants() int {
	bits := cc.Bytes(h.BitsPerBlock)
	return int((8*h.queued - h.sent + bits - 1) / bits)
}

// serve sends what a host's blocks carry in the next subframe.
func (c *Cell) serve(h *cellHost) {
	departs := c.begins(c.next + 1)
	h.sent += cc.Bytes(h.given) * cc.Bytes(h.BitsPerBlock)
	for h.waiting.Len() > 0 && 8*h.waiting.At(0).size <= h.sent {
		p := h.waiting.Pop()
		h.sent -= 8 * p.size
		h.queued -= p.size
		c.departed = append(c.departed, Departure{
			Lane: h.number, Size: p.size,
			Verdict: Verdict{Departs: departs, Arrives: departs.Add(c.cfg.Delay + h.Delay)},
		})
	}
	if h.waiting.Len() == 0 {
		h.sent = 0
	}
}
