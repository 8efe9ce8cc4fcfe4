// Package sim runs flows over links in virtual time: no clock, no goroutine,
// no unseeded randomness, so one seed gives one result.
package sim

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// LinkConfig describes one direction of a path.
type LinkConfig struct {
	Rate         cc.Rate       // fixed rate; ignored when Trace is set; 0 without a trace: infinitely fast
	Trace        *Trace        // delivery opportunities; loops
	Delay        time.Duration // propagation, after the queue
	Delays       *DelayTrace   // propagation beyond Delay; loops; nil: none
	QueueBytes   cc.Bytes      // drop-tail limit in bytes; 0: none
	QueuePackets int           // drop-tail limit in packets; 0: none
	Loss         float64       // probability that a packet is lost, before the queue
	Reorder      float64       // probability that a packet takes ReorderBy longer, so that later ones overtake it
	ReorderBy    time.Duration
	Mark         float64 // probability that a packet that allows it gets an ECN mark (CE), up to 1
	AQM          AQM     // with one, the link is a ManagedLink
	Seed         uint64
}

// Verdict is what becomes of one packet.
type Verdict struct {
	Departs cc.Time // leaves the queue, its last byte sent
	Arrives cc.Time // reaches the far end
	Marked  bool    // with an ECN mark, if it allows one
	Dropped Drop    // why there is neither; DropNone otherwise
}

// Drop is why a packet is lost.
type Drop uint8

// The reasons for a drop.
const (
	DropNone  Drop = iota
	DropQueue      // the queue was full, or its management chose the packet
	DropLoss       // random loss
)

// Link is one direction of a path: a drop-tail queue in front of a server, then
// a delay line. The schedule of departures is known in advance, so a packet's
// fate is settled when it arrives and lateness never adds up.
//
// A trace is played as Mahimahi plays it: an opportunity serves those that were
// in the queue before it, up to 1500 bytes of them; a packet may need several,
// several packets may share one, and what is left of one when the queue runs
// empty is lost.
type Link struct {
	wire
	waiting Ring[queuedPacket]
	queued  cc.Bytes // sum over waiting
}

// NewLink returns a link that starts at time zero of its trace at start.
func NewLink(cfg LinkConfig, start cc.Time) *Link { return &Link{wire: newWire(cfg, start)} }

// Send puts a packet of size bytes (IP length) into the queue at now, which
// never goes backwards.
func (l *Link) Send(now cc.Time, size cc.Bytes) Verdict {
	now = l.advance(now)
	if draws(l.rng, l.cfg.Loss) {
		return Verdict{Dropped: DropLoss}
	}
	if overflows(l.cfg.QueueBytes, l.cfg.QueuePackets, l.queued+size, l.waiting.Len()) {
		return Verdict{Dropped: DropQueue}
	}
	if l.departs <= now {
		l.begin(now)
	}
	if l.send(size); l.departs > now {
		l.waiting.Push(queuedPacket{l.departs, size})
		l.queued += size
	}
	v := l.pass()
	v.Marked = draws(l.rng, l.cfg.Mark)
	return v
}

// Enqueue implements Hop: nothing waits for its fate.
func (l *Link) Enqueue(now cc.Time, _ int, size cc.Bytes, _ uint32, _ Codepoint) (lane int, v Verdict, waits bool) {
	return 0, l.Send(now, size), false
}

// Next implements Hop: there is never anything to do.
func (l *Link) Next() cc.Time { return cc.Never }

// Advance implements Hop.
func (l *Link) Advance(cc.Time) []Departure { return nil }

// Backlog implements Hop, with the packet that is being sent.
func (l *Link) Backlog(now cc.Time, _ int) (bytes cc.Bytes, packets int) {
	l.advance(now)
	return l.queued, l.waiting.Len()
}

// advance lets go of the packets that have left by now.
func (l *Link) advance(now cc.Time) cc.Time {
	l.now = max(l.now, now)
	for l.waiting.Len() > 0 && l.waiting.At(0).departs <= l.now {
		l.queued -= l.waiting.Pop().size
	}
	return l.now
}

type queuedPacket struct {
	departs cc.Time
	size    cc.Bytes
}

// overflows reports whether a queue with such limits, 0 where there is none, has no room for one more packet, with
// which it would have that many bytes.
func overflows(limit cc.Bytes, limitPackets int, bytes cc.Bytes, packets int) bool {
	return limit > 0 && bytes > limit || limitPackets > 0 && packets >= limitPackets
}

// ParseQueue reads the limit of a queue: packets ("100pkt") or bytes ("2MB").
func ParseQueue(s string) (bytes cc.Bytes, packets int, err error) {
	if n, ok := strings.CutSuffix(s, "pkt"); ok {
		v, err := strconv.ParseUint(n, 10, 31)
		if err != nil {
			return 0, 0, fmt.Errorf("%q is not a number of packets such as 100pkt", s)
		}
		return 0, int(v), nil
	}
	bytes, err = cc.ParseBytes(s)
	if err != nil {
		return 0, 0, fmt.Errorf("%w or 100pkt", err)
	}
	return bytes, 0, nil
}
