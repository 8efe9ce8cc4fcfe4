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
	sending
	opened bool
	sent   cc.Bytes // of payload
	jitter Jitter
}

func newDatagrams(w *world, cfg FlowConfig, i int) *datagrams {
	return &datagrams{sending: newSending(w, cfg, i)}
}

func (d *datagrams) open() {
	d.opened = true
	if d.cfg.Hold != "" {
		d.hold = d.w.holdingEdge(int(d.number))
	}
	d.plan()
}

func (d *datagrams) underWay() bool { return d.opened && !d.closed }

// plan waits until the next has been produced.
func (d *datagrams) plan() {
	d.src.taken += DatagramBytes
	d.w.at(d.src.started.Add(d.src.next(d.src.taken)), d.send)
}

func (d *datagrams) send() {
	if d.closed {
		return
	}
	now := d.w.now
	d.sent += DatagramPayload
	d.launch(DatagramBytes, NotECT, func(bool) { d.arrive(now) })
	d.plan()
}

// arrive takes in a packet that was sent at a time.
func (d *datagrams) arrive(sent cc.Time) {
	d.Read += DatagramPayload
	d.jitter.Arrive(d.w.now.Sub(sent), sent >= d.from)
	if !d.closed {
		d.count(&d.Arrived)
		d.deliver(DatagramPayload)
	}
}

// state is what a flow's would be.
func (d *datagrams) state() flow.Snapshot { return flow.Snapshot{Taken: d.sent, Delivered: d.Read} }

// record goes on after the last has been sent: what is under way then still comes.
func (d *datagrams) record() {
	if d.opened {
		d.sample(d.state(), d.Read)
	}
}

func (d *datagrams) result() FlowResult {
	d.Final, d.Jitter = d.state(), d.jitter.All
	return d.sending.result()
}
