//go:build linux

package netlab

import (
	"iter"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Quantiles summarise durations; each is one that occurred (nearest rank).
type Quantiles struct {
	sim.Delays
	Count    int
	Centiles [101]time.Duration // the least that 0, 1, … 100 % do not exceed
}

// Drops counts lost packets by reason.
type Drops struct {
	Queue  int // the link's queue was full
	Loss   int // the link's random loss
	Held   int // more in flight than the emulator holds: the run does not count
	Failed int // the receiving device refused it: the run does not count
}

// Total is the number of lost packets.
func (d Drops) Total() int { return d.Queue + d.Loss + d.Held + d.Failed }

// DirectionReport is what one direction did within a window of time.
type DirectionReport struct {
	// packets that arrived at the queue in the window, dropped ones included; of a cell, without those that wait yet
	Sent  int
	Drops Drops // among them

	Delivered int      // packets that left the queue in the window
	Bytes     cc.Bytes // IP bytes of the delivered packets
	// what the link could have delivered in the window, a cell to the hosts that it served, in the same parts; 0: no
	// limit
	Offered     cc.Bytes
	Throughput  cc.Rate // Bytes over the window
	Utilisation float64 // Bytes/Offered; 0 when nothing was offered

	// Queueing is the time from a packet's arrival to the departure of its last
	// byte, its own transmission included, of the packets that left in the
	// window; DataQueueing is that of packets of at least DataSize, and DataOneWay
	// until they reach the far end. All are the schedule's, exact and free of Lateness.
	Queueing, DataQueueing, DataOneWay Quantiles

	// Lateness is how long after its scheduled arrival a packet was handed over:
	// the emulator's own error. It blurs the senders' view of the path; a run
	// with a P99 above a few ms says more about the machine than about them.
	Lateness Quantiles
}

// Report is what a path did within a window of time.
type Report struct {
	Down, Up DirectionReport
}

// History is what a path, or a simulation, has done so far. It may be asked while packets flow and after the lab
// closed.
type History struct{ account func() account }

// Report summarises the time between two moments since the start; the record
// of a path that was not started is empty.
func (h History) Report(from, to time.Duration) Report { return h.account().report(from, to) }

// HostReport is Report of the packets to and from one host, counted from 0. What
// is offered is what the host would have had alone.
func (h History) HostReport(host int, from, to time.Duration) Report {
	return h.account().of(host).report(from, to)
}

// Series cuts the time from the start up to a moment into whole steps, for plots.
func (h History) Series(dir Direction, to, step time.Duration) []Point {
	return h.account().series(dir, to, step)
}

// Recent summarises the last span of time, as Report does.
func (p *Path) Recent(span time.Duration) Report {
	to := p.Elapsed()
	from := max(0, to-span)
	a := p.account()
	a.all = p.record.from(a.zero.Add(from - recentQueue))
	return a.report(from, to)
}

// recentQueue is how long before the span packets may have arrived that left in it: more than a queue lasts that
// anybody waits for.
const recentQueue = 10 * time.Second

// account is a path's record with what it takes to read it.
type account struct {
	down, up sim.LinkConfig
	cell     *sim.CellConfig // in place of down
	zero     cc.Time         // of the directions' schedules; 0: they have not begun
	all      iter.Seq[*entry]
}

func (p *Path) readRecord() account {
	return account{down: p.cfg.Down, up: p.cfg.Up, cell: p.cfg.Cell, zero: cc.Time(p.zero.Load()), all: p.record.all}
}

// of is the part of one host.
func (a account) of(host int) account {
	all := a.all
	a.all = func(yield func(*entry) bool) {
		for e := range all {
			if int(e.host) == host && !yield(e) {
				return
			}
		}
	}
	return a
}

// offers returns what a direction could have delivered to a host from one moment
// up to another; 0: no limit.
func (a account) offers(dir Direction) func(host int, from, to cc.Time) cc.Bytes {
	if dir == Up {
		return sim.NewHop(a.up, nil, a.zero).Offered
	}
	return sim.NewHop(a.down, a.cell, a.zero).Offered
}

func (a account) report(from, to time.Duration) Report {
	if a.zero == 0 || to <= from {
		return Report{}
	}
	lo, hi := a.zero.Add(from), a.zero.Add(to)
	var tallies [2]tally
	for e := range a.all {
		tallies[e.dir].count(e, lo, hi)
		if a.cell == nil && e.at >= hi { // entries are in order of arrival, so nothing after this one left before hi
			break
		}
	}
	return Report{
		Down: tallies[Down].report(a.offers(Down), lo, hi),
		Up:   tallies[Up].report(a.offers(Up), lo, hi),
	}
}

type tally struct {
	DirectionReport
	queueing, dataQueueing, dataOneWay, late []time.Duration
	byHost                                   map[uint16]cc.Bytes // of Bytes
}

func (t *tally) count(e *entry, lo, hi cc.Time) {
	late, handedOver := e.lateness()
	if within(e.at, lo, hi) {
		t.Sent++
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
	if t.byHost == nil {
		t.byHost = map[uint16]cc.Bytes{}
	}
	t.byHost[e.host] += cc.Bytes(e.size)
	queued := e.departs.Sub(e.at)
	t.queueing = append(t.queueing, queued)
	if e.size >= DataSize {
		t.dataQueueing, t.dataOneWay = append(t.dataQueueing, queued), append(t.dataOneWay, e.arrives.Sub(e.at))
	}
	if handedOver {
		t.late = append(t.late, late)
	}
}

// within reports whether t lies in the window; a moment between two windows belongs
// to the later.
func within(t, lo, hi cc.Time) bool { return t >= lo && t < hi }

func (t *tally) report(offers func(host int, from, to cc.Time) cc.Bytes, lo, hi cc.Time) DirectionReport {
	r := t.DirectionReport
	r.Offered = offers(0, lo, hi)
	r.Throughput = cc.RateOf(r.Bytes, hi.Sub(lo))
	for _, host := range slices.Sorted(maps.Keys(t.byHost)) { // in one order, since sums of fractions depend on it
		if offered := offers(int(host), lo, hi); offered > 0 {
			r.Utilisation += float64(t.byHost[host]) / float64(offered)
		}
	}
	if r.Utilisation > 0 {
		r.Offered = cc.Bytes(math.Round(float64(r.Bytes) / r.Utilisation))
	}
	r.Queueing, r.DataQueueing, r.DataOneWay = quantiles(t.queueing), quantiles(t.dataQueueing), quantiles(t.dataOneWay)
	r.Lateness = quantiles(t.late)
	return r
}

// quantiles sorts v in place.
func quantiles(v []time.Duration) Quantiles {
	if len(v) == 0 {
		return Quantiles{}
	}
	q := Quantiles{Delays: sim.DelaysOf(v), Count: len(v)}
	for i := range q.Centiles {
		q.Centiles[i] = sim.NearestRank(v, float64(i)/100)
	}
	return q
}
