// Package sim runs flows over links in virtual time: no clock, no goroutine,
// no unseeded randomness, so one seed gives one result.
package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// LinkConfig describes one direction of a path.
type LinkConfig struct {
	Rate         cc.Rate       // fixed rate; ignored when Trace is set; 0 without a trace: infinitely fast
	Trace        *Trace        // delivery opportunities; loops
	Delay        time.Duration // propagation, after the queue
	QueueBytes   cc.Bytes      // drop-tail limit in bytes; 0: none
	QueuePackets int           // drop-tail limit in packets; 0: none
	Loss         float64       // probability that a packet is lost, before the queue
	Seed         uint64
}

// Verdict is what becomes of one packet.
type Verdict struct {
	Departs cc.Time // leaves the queue, its last byte sent
	Arrives cc.Time // reaches the far end
	Dropped Drop    // why there is neither; DropNone otherwise
}

// Drop is why a packet is lost.
type Drop uint8

// The reasons for a drop.
const (
	DropNone  Drop = iota
	DropQueue      // the queue was full
	DropLoss       // random loss
)

// Link is one direction of a path: a drop-tail queue in front of a server, then
// a delay line. The schedule of departures is known in advance, so a packet's
// fate is settled when it arrives and lateness never adds up.
type Link struct{ cfg LinkConfig }

// NewLink returns a link that starts at time zero of its trace at start.
func NewLink(cfg LinkConfig, start cc.Time) *Link { return &Link{cfg: cfg} }

// Send puts a packet of size bytes (IP length) into the queue at now, which
// never goes backwards.
func (l *Link) Send(now cc.Time, size cc.Bytes) Verdict { return Verdict{} }

// Backlog returns what waits in the queue at now.
func (l *Link) Backlog(now cc.Time) (bytes cc.Bytes, packets int) { return 0, 0 }

// Offered returns how many bytes the link could have delivered from one moment
// to another: 1500 for each opportunity of a trace.
func (l *Link) Offered(from, to cc.Time) cc.Bytes { return 0 }
