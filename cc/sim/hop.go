package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Hop is one direction of a path: a Cell, or else a ManagedLink where an AQM manages the queue, or else a Link. Who
// plays it keeps the packets that wait by lane, calls Advance at the times that Next names, or later, and lets the
// oldest of a lane go for each Departure.
type Hop struct {
	queue
	link    *Link        // there is one of the three
	managed *ManagedLink // nil: another of the three
	cell    *Cell        // nil: another of the three
}

// queue is what the three have in common.
type queue interface {
	// SetDelay changes the propagation delay for the packets that leave the queue from now on.
	SetDelay(d time.Duration)
	// Next returns when Advance will have something to do; cc.Never: when a packet comes, or with a Link.
	Next() cc.Time
	// Advance returns what was served or dropped since the last call; valid until the next one.
	Advance(now cc.Time) []Departure
}

// NewHop returns a hop that starts at start: a cell where there is one.
func NewHop(cfg LinkConfig, cell *CellConfig, start cc.Time) *Hop {
	h := &Hop{}
	switch {
	case cell != nil:
		h.cell = NewCell(*cell, start)
		h.queue = h.cell
	case cfg.AQM != DropTail:
		h.managed = NewManagedLink(cfg, start)
		h.queue = h.managed
	default:
		h.link = NewLink(cfg, start)
		h.queue = h.link
	}
	return h
}

// Send puts a packet of size bytes (IP length) of a flow, for a host, into the queue at now, which never goes
// backwards. It returns the lane in which the packet waits until its fate is certain; false: v is its fate.
func (h *Hop) Send(now cc.Time, host int, size cc.Bytes, flow uint32, ecn Codepoint) (lane int, v Verdict,
	waits bool,
) {
	switch {
	case h.cell != nil:
		lane, v.Dropped = host, h.cell.Enqueue(now, host, size)
	case h.managed != nil:
		lane, v.Dropped = h.managed.Enqueue(now, size, flow, ecn)
	default:
		return 0, h.link.Send(now, size), false
	}
	return lane, v, v.Dropped == DropNone
}

// Offered returns how many bytes the hop could have delivered from one moment up to another; a cell: to a host that
// had it for itself. 0: there is no limit.
func (h *Hop) Offered(host int, from, to cc.Time) cc.Bytes {
	switch {
	case h.cell != nil:
		return h.cell.Offered(host, from, to)
	case h.managed != nil:
		return h.managed.Offered(from, to)
	}
	return h.link.Offered(from, to)
}

// backlog is what waits at now in the queue that a host's packets pass.
func (h *Hop) backlog(now cc.Time, host int) (bytes cc.Bytes, packets int) {
	switch {
	case h.cell != nil:
		return h.cell.Backlog(now, host)
	case h.managed != nil:
		return h.managed.Backlog(now)
	}
	return h.link.Backlog(now)
}

// Hint is what a cell tells the senders to a host at now; false: this is none.
func (h *Hop) Hint(now cc.Time, host int) (hint cc.Hint, ok bool) {
	if h.cell == nil {
		return hint, false
	}
	return h.cell.Hint(now, host), true
}
