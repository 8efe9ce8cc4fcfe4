package sim

import (
	"fmt"

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

// datagrams sends them.
type datagrams struct {
	number uint32 // of the flow
	w      *world
	cfg    FlowConfig
	host   int
	gate   *gateway // of its group; nil: it passes unseen
	src    source   // of what they are on the wire
	opened bool
	sent   cc.Bytes // of payload
	got    cc.Bytes // of payload, to the run's end
	closed cc.Time  // 0: it is open, or will be
	stats  stats
}

func newDatagrams(w *world, cfg FlowConfig, i, host int) *datagrams {
	return &datagrams{
		number: uint32(i), w: w, cfg: cfg, host: host,
		src: newSource(cfg, i, w.origin.Add(cfg.Start), w.scenario.Seed), stats: newStats(w, cfg),
	}
}

func (d *datagrams) open(flow.Terms) {
	d.opened = true
	if d.cfg.Share > 0 {
		if d.gate, d.w.err = d.w.gateway(d.cfg.Group, d.cfg.Share); d.w.err != nil {
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
	if d.gate == nil {
		d.transmit()
	} else {
		d.gate.pass(d)
	}
	d.plan()
}

// refuse is what the gateway does with one that it drops.
func (d *datagrams) refuse() {
	d.sent += datagramPayload
	d.stats.sent(d.w.now)
	d.stats.settled(d.w.now, datagramBytes, 0, Verdict{Dropped: DropQueue})
}

func (d *datagrams) transmit() {
	now := d.w.now
	d.sent += datagramPayload
	d.stats.sent(now)
	d.w.send(d.host, datagramBytes, d.number, NotECT, func(v Verdict) {
		d.stats.settled(now, datagramBytes, d.cfg.Delay, v)
		if v.Dropped == DropNone {
			d.w.at(v.Arrives.Add(d.cfg.Delay), d.arrive)
		}
	})
}

func (d *datagrams) arrive() {
	d.got += datagramPayload
	if d.closed == 0 {
		d.stats.cameThrough(d.w.now)
		d.stats.delivered(d.w.now, datagramPayload)
	}
}

func (d *datagrams) close() {
	d.closed = d.w.now
}

// state is what a flow's would be.
func (d *datagrams) state() flow.Snapshot { return flow.Snapshot{Taken: d.sent, Delivered: d.got} }

// record goes on after the last has been sent: what is under way then still comes.
func (d *datagrams) record() {
	if d.opened {
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

// gateway holds back the datagrams of a group as that of a tunnel does: they have
// one part of the group's window, and a queue before it.
type gateway struct {
	w      *world
	window *flow.Datagrams
	queue  *flow.FairQueue[*datagrams, *datagrams]
}

// gateway returns the one of a group; the first of its flows has the window.
func (w *world) gateway(group string, share float64) (*gateway, error) {
	if g := w.gateways[group]; g != nil {
		return g, nil
	}
	for i, f := range w.scenario.Flows {
		if f.Group != group || f.Algorithm == UDP {
			continue
		}
		g := &gateway{w: w}
		var err error
		if g.window, err = w.manager.OpenDatagrams(w.now, w.terms(i), share, g.wake); err != nil {
			return nil, err
		}
		g.queue = flow.NewFairQueue[*datagrams](flow.QueueConfig[*datagrams]{
			Window: g.window, Dropped: func(d *datagrams, _ flow.Drop) { d.refuse() },
		})
		w.gateways[group] = g
		return g, nil
	}
	return nil, fmt.Errorf("no flow of group %q has a window for datagrams to share", group)
}

// pass sends a datagram of d, or has it wait for room.
func (g *gateway) pass(d *datagrams) {
	if g.queue.Pass(g.w.now, d, datagramBytes) {
		d.transmit()
		return
	}
	g.queue.Push(g.w.now, d, datagramBytes, d)
	g.drain()
	g.queue.Trim(flow.QueuedPackets, flow.QueuedBytes)
}

// wake is the window's to call, from within the manager: it only plans.
func (g *gateway) wake() { g.w.at(g.w.now, g.drain) }

// drain sends what has waited, as far as there is room.
func (g *gateway) drain() {
	for {
		d, ok := g.queue.Pop(g.w.now)
		if !ok {
			return
		}
		if d.closed == 0 {
			d.transmit()
		}
	}
}
