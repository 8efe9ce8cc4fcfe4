//go:build linux

package netlab

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Monitor watches a path towards one host at its near end. Of a cell it tells
// what the cell's own control channel says of that host. A link has one queue for
// all: to a lone host it tells what a base station would that serves it alone, and
// where there are several the same of all of them, with their parts left open
// (Share 0) for whoever knows their claims. It is not for several goroutines at
// once.
type Monitor struct {
	path *Path
	next int64 // entry of the record
	watch
}

// Monitor returns one of a host, counted from 0, that has seen nothing yet.
func (p *Path) Monitor(host int) *Monitor {
	return &Monitor{path: p, watch: watch{cfg: p.cfg.Down, host: host, shared: len(p.cfg.Near.hosts()) > 2}}
}

// Hint tells how the link is now; false: the path has not started, or is closed.
// Its time is the path's and means nothing elsewhere.
func (m *Monitor) Hint() (cc.Hint, bool) {
	m.zero = cc.Time(m.path.zero.Load())
	if m.zero == 0 {
		return cc.Hint{}, false
	}
	if m.path.cfg.Cell != nil {
		return m.path.radioHint(m.host)
	}
	if m.cfg.AQM != sim.DropTail {
		return m.managedHint()
	}
	now := m.path.now()
	m.next = m.path.record.since(m.next, m.note)
	return m.hint(now), true
}

// managedHint returns the hint of a managed queue: its packets are in the record once they have left. false: the path
// is closed.
func (m *Monitor) managedHint() (h cc.Hint, ok bool) {
	err := m.path.do(func() {
		m.next = m.path.record.since(m.next, m.note)
		h, ok = m.hint(m.path.now(), m.path.dirs[Down].waits()...), true
	})
	return h, ok && err == nil
}

// waits are the packets in the queue of a managed link, or of a cell.
func (d *pipe) waits() (all []entry) {
	for i := range d.waiting {
		for k := range d.waiting[i].Len() {
			p := *d.waiting[i].At(k)
			all = append(all, entry{at: p.at, departs: cc.Never, size: uint16(p.n), host: uint16(p.host)})
		}
	}
	return all
}

// radioHint is what the cell tells a host now; false: nothing has come to it yet.
func (p *Path) radioHint(host int) (h cc.Hint, ok bool) {
	err := p.do(func() {
		if cell, begun := p.dirs[Down].hop.(*sim.Cell); begun {
			h, ok = cell.Hint(p.now(), host), true
		}
	})
	return h, ok && err == nil
}

// watch is the state of a link as its packets tell it.
type watch struct {
	cfg    sim.LinkConfig
	host   int
	shared bool    // with other hosts
	zero   cc.Time // when it started
	recent []entry // in the queue, or that came within the window; the oldest first
	lost   cc.Bytes
}

// note takes in a packet, in the order in which they came to the link.
func (w *watch) note(e *entry) {
	switch {
	case e.dir != Down:
	case e.drop == sim.DropLoss && int(e.host) != w.host:
	case e.drop == sim.DropLoss:
		w.lost += max(0, cc.Bytes(e.size)-sim.HeaderBytes)
	default:
		w.recent = append(w.recent, entry{at: e.at, departs: e.departs, size: e.size, drop: e.drop, host: e.host})
	}
}

// hint is what the link tells now; waiting are packets in its queue that have not been noted.
func (w *watch) hint(now cc.Time, waiting ...entry) cc.Hint {
	from := max(w.zero, now.Add(-sim.HintWindow))
	span := max(now.Sub(from), time.Microsecond)
	came, queued, packets := cc.Bytes(0), cc.Bytes(0), 0
	waits := func(e entry) bool { return e.drop == sim.DropNone && e.departs > now }
	w.recent = slices.DeleteFunc(w.recent, func(e entry) bool { return e.at <= from && !waits(e) })
	hosts := map[uint16]bool{}
	for _, e := range slices.Concat(w.recent, waiting) {
		hosts[e.host] = true
		if e.at > from {
			came += cc.Bytes(e.size)
		}
		if waits(e) {
			queued += cc.Bytes(e.size)
			packets++
		}
	}
	h := cc.Hint{At: now, ArrivalRate: sim.Known(cc.RateOf(came, span)), Flows: 1, RadioLost: w.lost, Share: 1}
	if w.cfg.Rate > 0 || w.cfg.Trace != nil {
		offered := sim.NewLink(w.cfg, w.zero).Offered(0, from, now)
		h.LinkRate = sim.Known(cc.RateOf(offered, span))
		h.Capacity = sim.Known(cc.RateOf(sim.Payload(offered), span))
		h.FairShare = h.Capacity
	}
	if w.shared {
		h.Share, h.Flows = 0, max(1, len(hosts))
		h.FairShare = sim.Known(h.FairShare / cc.Rate(h.Flows))
	}
	h.QueueRoom = sim.Known(w.cfg.Room(queued, packets))
	return h
}
