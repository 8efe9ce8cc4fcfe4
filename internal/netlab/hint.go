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
func (m *Monitor) Hint() (h cc.Hint, ok bool) {
	p := m.path
	if m.zero = cc.Time(p.zero.Load()); m.zero == 0 {
		return h, false
	}
	if p.cfg.Cell == nil && m.cfg.AQM == sim.DropTail {
		now := p.now()
		m.next = p.record.since(m.next, m.note)
		return m.hint(now), true
	}
	err := p.do(func() {
		down := &p.dirs[Down]
		if p.cfg.Cell == nil { // packets of a managed queue are in the record once they have left
			m.next = p.record.since(m.next, m.note)
			h, ok = m.hint(p.now(), down.waits()...), true
		} else if cell, begun := down.hop.(*sim.Cell); begun { // else nothing has come to it yet
			h, ok = cell.Hint(p.now(), m.host), true
		}
	})
	return h, ok && err == nil
}

// waits are the packets in the queue of a managed link.
func (d *pipe) waits() (all []entry) {
	for i := range d.waiting {
		for k := range d.waiting[i].Len() {
			p := *d.waiting[i].At(k)
			all = append(all, entry{at: p.at, departs: cc.Never, size: uint16(p.n), host: uint16(p.host)})
		}
	}
	return all
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
