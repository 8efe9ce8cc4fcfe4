// Package sim runs flows over links in virtual time: no clock, no goroutine,
// no unseeded randomness, so one seed gives one result.
package sim

import (
	"fmt"
	"math/rand/v2"
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
	cfg     LinkConfig
	line    delayLine
	rng     *rand.Rand
	waiting ring[queuedPacket]
	queued  cc.Bytes // sum over waiting
	now     cc.Time  // the latest seen
	schedule
}

// lossStream keeps a link's draws apart from those of other users of its seed.
const lossStream = 0x6c696e6b

// NewLink returns a link that starts at time zero of its trace at start.
func NewLink(cfg LinkConfig, start cc.Time) *Link {
	return &Link{
		cfg: cfg, schedule: newSchedule(cfg, start), line: delayLine{start: start}, now: start,
		rng: rand.New(rand.NewPCG(cfg.Seed, lossStream)),
	}
}

// SetDelay changes the propagation delay for the packets sent from now on. They
// may overtake earlier ones when it becomes shorter.
func (l *Link) SetDelay(d time.Duration) { l.cfg.Delay = d }

// Send puts a packet of size bytes (IP length) into the queue at now, which
// never goes backwards.
func (l *Link) Send(now cc.Time, size cc.Bytes) Verdict {
	now = l.advance(now)
	if l.cfg.Loss > 0 && l.rng.Float64() < l.cfg.Loss {
		return Verdict{Dropped: DropLoss}
	}
	if l.cfg.QueueBytes > 0 && l.queued+size > l.cfg.QueueBytes ||
		l.cfg.QueuePackets > 0 && l.waiting.n >= l.cfg.QueuePackets {
		return Verdict{Dropped: DropQueue}
	}
	if l.departs <= now {
		l.begin(now)
	}
	if l.send(size); l.departs > now {
		l.waiting.push(queuedPacket{l.departs, size})
		l.queued += size
	}
	arrives := l.line.arrives(l.cfg, l.departs)
	if l.cfg.Reorder > 0 && l.rng.Float64() < l.cfg.Reorder {
		arrives = arrives.Add(l.cfg.ReorderBy)
	}
	marked := l.cfg.Mark > 0 && l.rng.Float64() < l.cfg.Mark
	return Verdict{Departs: l.departs, Arrives: arrives, Marked: marked}
}

// Next and Advance have nothing to do: each packet's fate is settled as it comes.
func (l *Link) Next() cc.Time { return cc.Never }

// Advance implements Hop's queue.
func (l *Link) Advance(cc.Time) []Departure { return nil }

// Backlog returns what waits in the queue at now, with the packet that is being
// sent.
func (l *Link) Backlog(now cc.Time) (bytes cc.Bytes, packets int) {
	l.advance(now)
	return l.queued, l.waiting.n
}

// Offered returns how many bytes the link could have delivered from one moment
// up to another: 1500 for each opportunity of a trace. An infinitely fast link
// has no such number and returns 0.
func (l *Link) Offered(from, to cc.Time) cc.Bytes {
	return l.cfg.offered(l.start, from, to)
}

// offered is Offered of a link that starts at start.
func (c LinkConfig) offered(start, from, to cc.Time) cc.Bytes {
	from, to = max(from, start), max(to, start)
	if t := c.Trace; t != nil {
		before := func(at cc.Time) int64 { return t.until(at.Sub(start) - 1) }
		return cc.Bytes(max(0, before(to)-before(from))) * OpportunityBytes
	}
	return c.Rate.BytesIn(to.Sub(from))
}

// advance lets go of the packets that have left by now.
func (l *Link) advance(now cc.Time) cc.Time {
	l.now = max(l.now, now)
	for l.waiting.n > 0 && l.waiting.first().departs <= l.now {
		l.queued -= l.waiting.pop().size
	}
	return l.now
}

type queuedPacket struct {
	departs cc.Time
	size    cc.Bytes
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
