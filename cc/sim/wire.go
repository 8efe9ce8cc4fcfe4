package sim

import (
	"math/rand/v2"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// wire is what Link and ManagedLink have in common: when the server has sent what it is given, and the propagation
// behind it. An opportunity of a trace sends up to 1500 bytes; a packet may need several, and several packets may
// share one.
type wire struct {
	cfg     LinkConfig
	rng     *rand.Rand
	start   cc.Time // of the traces
	now     cc.Time // the latest seen
	departs cc.Time // when the last packet has left
	newest  cc.Time // when the last packet arrives, where the delay moves

	// With a fixed rate: the present busy period. Counting from its start keeps
	// rounding from adding up.
	busyFrom  cc.Time
	busyBytes cc.Bytes

	// With a trace: the opportunity that sends the last byte.
	opportunity int64
	left        cc.Bytes // what it can still carry
}

// lossStream keeps a link's draws apart from those of other users of its seed.
const lossStream = 0x6c696e6b

func newWire(cfg LinkConfig, start cc.Time) wire {
	return wire{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, lossStream)), start: start, now: start}
}

// SetDelay changes the propagation delay of the packets that leave the queue from now on. A Link decides when a packet
// comes, so there it is for the packets that come from now on. When the delay becomes shorter, packets may overtake.
func (w *wire) SetDelay(d time.Duration) { w.cfg.Delay = d }

// Offered returns how many bytes the link could have delivered from one moment
// up to another: 1500 for each opportunity of a trace. An infinitely fast link
// has no such number and returns 0.
func (w *wire) Offered(_ int, from, to cc.Time) cc.Bytes {
	from, to = max(from, w.start), max(to, w.start)
	if t := w.cfg.Trace; t != nil {
		before := func(at cc.Time) int64 { return t.until(at.Sub(w.start) - 1) }
		return cc.Bytes(max(0, before(to)-before(from))) * OpportunityBytes
	}
	return w.cfg.Rate.BytesIn(to.Sub(from))
}

// draws reports whether something of that probability happens.
func draws(rng *rand.Rand, probability float64) bool {
	return probability > 0 && rng.Float64() < probability
}

// begin starts a busy period: nothing was waiting before.
func (w *wire) begin(now cc.Time) {
	w.departs, w.busyFrom, w.busyBytes = now, now, 0
	if w.cfg.Trace != nil {
		w.opportunity, w.left = w.cfg.Trace.until(now.Sub(w.start)), OpportunityBytes
	}
}

// send sends size bytes behind all that was sent since the last begin.
func (w *wire) send(size cc.Bytes) {
	switch {
	case w.cfg.Trace != nil:
		if more := size - w.left; more > 0 {
			opportunities := (more + OpportunityBytes - 1) / OpportunityBytes
			w.opportunity += int64(opportunities)
			w.left += opportunities * OpportunityBytes
		}
		w.left -= size
		w.departs = w.start.Add(w.cfg.Trace.at(w.opportunity))
	case w.cfg.Rate > 0:
		w.busyBytes += size
		w.departs = w.busyFrom.Add(w.cfg.Rate.TimeFor(w.busyBytes))
	}
}

// next is when the next byte is taken to be sent.
func (w *wire) next() cc.Time {
	switch {
	case w.cfg.Trace == nil:
		return w.departs
	case w.left == 0:
		return w.start.Add(w.cfg.Trace.at(w.opportunity + 1))
	}
	return w.start.Add(w.cfg.Trace.at(w.opportunity))
}

// pass returns what becomes of the packet that was sent last. Packets arrive in the order in which they left, even if
// the delay shrinks; only random reordering changes that.
func (w *wire) pass() Verdict {
	v := Verdict{Departs: w.departs, Arrives: w.departs.Add(w.cfg.Delay)}
	if w.cfg.Delays != nil {
		w.newest = max(w.newest, v.Arrives.Add(w.cfg.Delays.at(w.departs.Sub(w.start))))
		v.Arrives = w.newest
	}
	if draws(w.rng, w.cfg.Reorder) {
		v.Arrives = v.Arrives.Add(w.cfg.ReorderBy)
	}
	return v
}
