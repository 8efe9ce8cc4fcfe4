//go:build linux

package netlab

import (
	"iter"
	"math"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Quantiles summarise durations; each is one that occurred (nearest rank).
type Quantiles struct {
	Count                         int
	Mean, P50, P90, P95, P99, Max time.Duration
}

// Drops counts lost packets by reason.
type Drops struct {
	Queue  int // the link's queue was full
	Loss   int // the link's random loss
	Held   int // more in flight than the emulator holds: the measurement is spoilt
	Failed int // the receiving device refused it: the measurement is spoilt
}

// Total is the number of lost packets.
func (d Drops) Total() int { return d.Queue + d.Loss + d.Held + d.Failed }

// DirectionReport is what one direction did within a window of time.
type DirectionReport struct {
	Sent      int      // packets that arrived at the queue in the window, dropped ones included
	SentBytes cc.Bytes // IP bytes of those
	Drops     Drops    // of those

	Delivered   int      // packets that left the queue in the window
	Bytes       cc.Bytes // IP bytes of those
	Offered     cc.Bytes // what the link could have delivered in the window; 0: no limit
	Throughput  cc.Rate  // Bytes over the window
	Utilisation float64  // Bytes/Offered; 0 when nothing was offered

	// Queueing is the time from a packet's arrival to the departure of its last
	// byte, its own transmission included, of the packets that left in the
	// window; OneWay adds the propagation delay. Data covers those of at least
	// DataSize only. All are the schedule's, exact and free of Lateness.
	Queueing, OneWay         Quantiles
	DataQueueing, DataOneWay Quantiles

	// Lateness is how long after its scheduled arrival a packet was handed over:
	// the emulator's own error. It blurs the senders' view of the path; a run
	// whose P99 exceeds a few ms says more about the machine than about them.
	Lateness Quantiles
}

// Report is what a path did within a window of time.
type Report struct {
	From, To time.Duration // since the start
	Down, Up DirectionReport
}

// Report summarises the time between two moments since the start; the record
// of a path that was not started is empty. It may be asked while packets flow
// and after the lab closed.
func (p *Path) Report(from, to time.Duration) Report { return p.account().report(from, to) }

// account is a path's record with what it takes to read it.
type account struct {
	down, up sim.LinkConfig
	zero     cc.Time // of the directions' schedules; 0: they have not begun
	all      iter.Seq[*entry]
}

func (p *Path) account() account {
	return account{down: p.cfg.Down, up: p.cfg.Up, zero: cc.Time(p.zero.Load()), all: p.record.all}
}

func (a account) report(from, to time.Duration) Report {
	r := Report{From: from, To: to}
	if a.zero == 0 || to <= from {
		return r
	}
	lo, hi := a.zero.Add(from), a.zero.Add(to)
	var tallies [2]tally
	for e := range a.all {
		tallies[e.dir].count(e, lo, hi)
		if e.at >= hi { // entries are in order of arrival, so nothing after this one left before hi
			break
		}
	}
	r.Down = tallies[Down].report(a.down, a.zero, lo, hi)
	r.Up = tallies[Up].report(a.up, a.zero, lo, hi)
	return r
}

type tally struct {
	DirectionReport
	queueing, dataQueueing, late []time.Duration
}

func (t *tally) count(e *entry, lo, hi cc.Time) {
	late, handedOver := e.lateness()
	if within(e.at, lo, hi) {
		t.Sent++
		t.SentBytes += cc.Bytes(e.size)
		switch {
		case e.drop == sim.DropQueue:
			t.Drops.Queue++
		case e.drop == sim.DropLoss:
			t.Drops.Loss++
		case e.drop != sim.DropNone:
			t.Drops.Held++
		case !handedOver && late == time.Duration(lateFailed):
			t.Drops.Failed++
		}
	}
	if e.drop != sim.DropNone || !within(e.departs, lo, hi) {
		return
	}
	t.Delivered++
	t.Bytes += cc.Bytes(e.size)
	queued := e.departs.Sub(e.at)
	t.queueing = append(t.queueing, queued)
	if e.size >= DataSize {
		t.dataQueueing = append(t.dataQueueing, queued)
	}
	if handedOver {
		t.late = append(t.late, late)
	}
}

// within tells whether t lies in the window; a moment between two windows belongs
// to the later.
func within(t, lo, hi cc.Time) bool { return t >= lo && t < hi }

func (t *tally) report(cfg sim.LinkConfig, zero, lo, hi cc.Time) DirectionReport {
	r := t.DirectionReport
	if cfg.Rate > 0 || cfg.Trace != nil {
		r.Offered = sim.NewLink(cfg, zero).Offered(lo, hi)
	}
	r.Throughput = cc.RateOf(r.Bytes, hi.Sub(lo))
	if r.Offered > 0 {
		r.Utilisation = float64(r.Bytes) / float64(r.Offered)
	}
	r.Queueing = quantiles(t.queueing)
	r.OneWay = r.Queueing.plus(cfg.Delay)
	r.DataQueueing = quantiles(t.dataQueueing)
	r.DataOneWay = r.DataQueueing.plus(cfg.Delay)
	r.Lateness = quantiles(t.late)
	return r
}

// quantiles sorts v in place.
func quantiles(v []time.Duration) Quantiles {
	if len(v) == 0 {
		return Quantiles{}
	}
	slices.Sort(v)
	rank := func(p float64) time.Duration { return v[max(0, int(math.Ceil(p*float64(len(v))))-1)] }
	var sum float64
	for _, d := range v {
		sum += float64(d)
	}
	return Quantiles{
		Count: len(v), Mean: time.Duration(sum / float64(len(v))),
		P50: rank(0.50), P90: rank(0.90), P95: rank(0.95), P99: rank(0.99), Max: v[len(v)-1],
	}
}

func (q Quantiles) plus(d time.Duration) Quantiles {
	if q.Count == 0 {
		return q
	}
	q.Mean, q.P50, q.P90, q.P95, q.P99, q.Max = q.Mean+d, q.P50+d, q.P90+d, q.P95+d, q.P99+d, q.Max+d
	return q
}
