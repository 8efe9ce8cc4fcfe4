package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// minDatagramRate has the next datagram come within the hour.
const minDatagramRate cc.Rate = 1000

// UDP in place of an algorithm makes a flow cross traffic: datagrams at a
// constant rate, whatever becomes of them.
const UDP = "udp"

// Of a datagram.
const (
	datagramPayload cc.Bytes = 1400
	datagramBytes            = datagramPayload + 28 // with the headers of IPv4 and UDP
)

// A gateway keeps so many that the window has no room for, each for so long.
const (
	datagramsQueued = 64
	datagramsWait   = 50 * time.Millisecond
)

// datagrams sends them.
type datagrams struct {
	w      *world
	cfg    FlowConfig
	host   int
	window *flow.Datagrams // of its group; nil: it passes unseen
	queue  []cc.Time       // when those came that wait for room there
	src    source          // of what they are on the wire
	opened bool
	sent   cc.Bytes // of payload
	got    cc.Bytes // likewise
	closed cc.Time  // 0: it is open, or will be
	stats  stats
}

func newDatagrams(w *world, cfg FlowConfig, i, host int) *datagrams {
	return &datagrams{
		w: w, cfg: cfg, host: host,
		src: newSource(cfg, i, w.origin.Add(cfg.Start), w.scenario.Seed), stats: newStats(w, cfg),
	}
}

func (d *datagrams) open(flow.Terms) {
	d.opened = true
	if d.cfg.Share > 0 {
		if d.window, d.w.err = d.w.beside(d.cfg.Group, d.cfg.Share, d.wake); d.w.err != nil {
			return
		}
	}
	d.plan()
}

func (d *datagrams) underWay() bool { return d.opened && d.closed == 0 }

// move is not for them: Check refuses it.
func (d *datagrams) move(flow.Terms) {}

// plan waits until the next has been produced.
func (d *datagrams) plan() {
	d.src.taken += datagramBytes
	d.w.at(d.src.started.Add(d.src.next(d.src.taken)), d.send)
}

func (d *datagrams) send() {
	if d.closed != 0 {
		return
	}
	switch {
	case d.window == nil:
		d.transmit()
	case len(d.queue) == datagramsQueued:
		d.refuse()
	default:
		d.queue = append(d.queue, d.w.now)
		if len(d.queue) == 1 {
			d.drain()
		}
	}
	d.plan()
}

// wake is the window's to call, from within the manager: it only plans.
func (d *datagrams) wake() { d.w.at(d.w.now, d.drain) }

// drain sends what has waited, as far as there is room.
func (d *datagrams) drain() {
	for d.closed == 0 && len(d.queue) > 0 {
		late := d.w.now.Sub(d.queue[0]) > datagramsWait
		if !late && !d.window.Take(d.w.now, datagramBytes) {
			return
		}
		d.queue = slices.Delete(d.queue, 0, 1)
		if late {
			d.refuse()
		} else {
			d.transmit()
		}
	}
}

// refuse is what the gateway does with one too many.
func (d *datagrams) refuse() {
	d.sent += datagramPayload
	d.stats.sent(d.w.now)
	d.stats.settled(d.w.now, datagramBytes, 0, Verdict{Dropped: DropQueue})
}

func (d *datagrams) transmit() {
	now := d.w.now
	d.sent += datagramPayload
	d.stats.sent(now)
	d.w.send(d.host, datagramBytes, func(v Verdict) {
		d.stats.settled(now, datagramBytes, d.cfg.Delay, v)
		if v.Dropped == DropNone {
			d.w.at(v.Arrives.Add(d.cfg.Delay), d.arrive)
		}
	})
}

func (d *datagrams) arrive() {
	if d.closed == 0 {
		d.got += datagramPayload
		d.stats.cameThrough(d.w.now)
		d.stats.delivered(d.w.now, datagramPayload)
	}
}

func (d *datagrams) close() {
	d.closed = d.w.now
	if d.window != nil {
		d.window.Close()
	}
}

// state is what a flow's would be.
func (d *datagrams) state() flow.Snapshot { return flow.Snapshot{Taken: d.sent, Delivered: d.got} }

func (d *datagrams) record() {
	if d.underWay() {
		d.stats.sample(d.w, d.host, d.state(), d.got)
	}
}

func (d *datagrams) measured() *stats { return &d.stats }

func (d *datagrams) result(i int) FlowResult {
	to := d.w.end
	if d.closed != 0 {
		to = d.closed
	}
	d.stats.final = d.state()
	f := d.stats.result(d.w, d.cfg, i, d.host, to)
	f.Read = d.got
	return f
}

// beside opens datagrams in the macroflow of a group's first flow.
func (w *world) beside(group string, share float64, wake func()) (*flow.Datagrams, error) {
	for i, f := range w.scenario.Flows {
		if f.Group == group && f.Algorithm != UDP {
			return w.manager.OpenDatagrams(w.scenario.terms(i), share, wake)
		}
	}
	return nil, fmt.Errorf("no flow of group %q has a window for datagrams to share", group)
}
