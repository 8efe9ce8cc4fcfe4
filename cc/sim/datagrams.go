package sim

import (
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

// datagrams sends them.
type datagrams struct {
	number uint32 // of the flow
	w      *world
	cfg    FlowConfig
	host   int
	edge   *holdingEdge // of its group; nil: it passes unseen
	src    source       // of what they are on the wire
	opened bool
	sent   cc.Bytes // of payload
	got    cc.Bytes // of payload, to the run's end
	closed cc.Time  // 0: it is open, or will be
	stats  stats

	transit time.Duration   // of the packet that arrived last; 0: none has
	jitter  []time.Duration // as in FlowResult
}

func newDatagrams(w *world, cfg FlowConfig, i, host int) *datagrams {
	return &datagrams{
		number: uint32(i), w: w, cfg: cfg, host: host,
		src: newSource(cfg, i, w.origin.Add(cfg.Start), w.scenario.Seed), stats: newStats(w, cfg),
	}
}

func (d *datagrams) open(flow.Terms) {
	d.opened = true
	if d.cfg.Hold != "" {
		if d.edge = d.w.holdingEdge(int(d.number)); d.edge == nil {
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
	now := d.w.now
	d.sent += datagramPayload
	d.stats.sent(now)
	settled := func(left cc.Time, v Verdict) {
		d.stats.settled(left, datagramBytes, d.cfg.Delay+left.Sub(now), v)
		if v.Dropped == DropNone {
			d.w.at(v.Arrives.Add(d.cfg.Delay), func() { d.arrive(now) })
		}
	}
	if d.edge != nil {
		d.edge.pass(heldPacket{flow: d.number, size: datagramBytes, settled: settled})
	} else {
		d.w.send(d.host, datagramBytes, d.number, NotECT, func(v Verdict) { settled(now, v) })
	}
	d.plan()
}

// arrive takes in a packet that was sent at a time.
func (d *datagrams) arrive(sent cc.Time) {
	d.got += datagramPayload
	transit := d.w.now.Sub(sent)
	if d.transit > 0 && sent >= d.stats.from {
		d.jitter = append(d.jitter, (transit - d.transit).Abs())
	}
	d.transit = transit
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
	f.Read, f.Jitter = d.got, d.jitter
	return f
}
