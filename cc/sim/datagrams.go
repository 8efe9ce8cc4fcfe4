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
	DatagramPayload cc.Bytes = 1400
	DatagramBytes            = DatagramPayload + 28 // with the headers of IPv4 and UDP
)

// Jitter is how much the transit of each datagram differs from that of the one before it (RFC 3393 §2).
type Jitter struct {
	All  []time.Duration
	last time.Duration // transit of the one that arrived last; 0: none has
}

// Arrive notes a datagram's transit, which counts or serves the next one alone.
func (j *Jitter) Arrive(transit time.Duration, counts bool) {
	if j.last > 0 && counts {
		j.All = append(j.All, (transit - j.last).Abs())
	}
	j.last = transit
}

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
	jitter Jitter
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
	d.src.taken += DatagramBytes
	d.w.at(d.src.started.Add(d.src.next(d.src.taken)), d.send)
}

func (d *datagrams) send() {
	if d.closed != 0 {
		return
	}
	now := d.w.now
	d.sent += DatagramPayload
	d.stats.sent(now)
	settled := func(left cc.Time, v Verdict) {
		d.stats.settled(left, DatagramBytes, d.cfg.Delay+left.Sub(now), v)
		if v.Dropped == DropNone {
			d.w.at(v.Arrives.Add(d.cfg.Delay), func() { d.arrive(now) })
		}
	}
	if d.edge != nil {
		d.edge.pass(heldPacket{flow: d.number, size: DatagramBytes, settled: settled})
	} else {
		d.w.send(d.host, DatagramBytes, d.number, NotECT, func(v Verdict) { settled(now, v) })
	}
	d.plan()
}

// arrive takes in a packet that was sent at a time.
func (d *datagrams) arrive(sent cc.Time) {
	d.got += DatagramPayload
	d.jitter.Arrive(d.w.now.Sub(sent), sent >= d.stats.from)
	if d.closed == 0 {
		d.stats.count(&d.stats.through, d.w.now)
		d.stats.delivered(d.w.now, DatagramPayload)
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
	f.Read, f.Jitter = d.got, d.jitter.All
	return f
}
