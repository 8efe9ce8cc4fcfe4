package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Hop is one direction of a path: a Cell, a ManagedLink or a Link. Who plays it keeps the packets that wait by lane,
// calls Advance at the times that Next names, or later, and lets the oldest of a lane go for each Departure.
type Hop interface {
	// Enqueue puts a packet of size bytes (IP length) of a flow, for a host, into the queue at now, which never goes
	// backwards. It returns the lane in which the packet waits until its fate is certain; false: v is its fate.
	Enqueue(now cc.Time, host int, size cc.Bytes, flow uint32, ecn Codepoint) (lane int, v Verdict, waits bool)
	// SetDelay changes the propagation delay for the packets that leave the queue from now on.
	SetDelay(d time.Duration)
	// Next returns when Advance will have something to do; cc.Never: when a packet comes, or with a Link.
	Next() cc.Time
	// Advance returns what was served or dropped since the last call, in that order; valid until the next one.
	Advance(now cc.Time) []Departure
	// Offered returns how many bytes the hop could have delivered from one moment up to another; a cell: to a host that
	// had it for itself. 0: there is no limit.
	Offered(host int, from, to cc.Time) cc.Bytes
	// Backlog returns what waits at now in the queue that a host's packets pass.
	Backlog(now cc.Time, host int) (bytes cc.Bytes, packets int)
}

// NewHop returns a hop that starts at start: a cell where there is one, or else a ManagedLink where an AQM manages the
// queue.
func NewHop(cfg LinkConfig, cell *CellConfig, start cc.Time) Hop {
	switch {
	case cell != nil:
		return NewCell(*cell, start)
	case cfg.AQM != DropTail:
		return NewManagedLink(cfg, start)
	}
	return NewLink(cfg, start)
}
