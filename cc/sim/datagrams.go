package sim

import (
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
	w      *world
	cfg    FlowConfig
	host   int
	src    source // of what they are on the wire
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
	now := d.w.now
	d.sent += datagramPayload
	d.stats.sent(now)
	d.w.send(d.host, datagramBytes, func(v Verdict) {
		d.stats.settled(now, datagramBytes, d.cfg.Delay, v)
		if v.Dropped == DropNone {
			d.w.at(v.Arrives.Add(d.cfg.Delay), d.arrive)
		}
	})
	d.plan()
}

func (d *datagrams) arrive() {
	if d.closed == 0 {
		d.got += datagramPayload
		d.stats.cameThrough(d.w.now)
		d.stats.delivered(d.w.now, datagramPayload)
	}
}

func (d *datagrams) close() { d.closed = d.w.now }

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
