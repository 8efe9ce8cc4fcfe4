package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// ReceiveBulk is how much of a stream has come before its window is held: what Linux
// lets a peer send first. Shorter requests are left alone.
const ReceiveBulk cc.Bytes = 64 << 10

// firstReceive is the first window of a group that receives: a sender that has just sent
// ReceiveBulk in slow start has a little more in flight.
const firstReceive = 2 * ReceiveBulk

// Arrivals is what has come of a stream that the peer sends. Counters are cumulative.
type Arrivals struct {
	At       cc.Time
	Received cc.Bytes      // payload without a hole before it
	RTT      time.Duration // from an acknowledgement of ours until what it let out had come; 0: no sample yet
	Peer     PeerClock     // newest timestamp that came with data; the zero value: none
	Window   cc.Bytes      // gauge: advertised beyond Received
	Unread   cc.Bytes      // gauge: of Received, what nobody has read yet
	Holes    int           // times something was missing, or overtaken
	MSS      cc.Bytes      // gauge: payload of a full segment; 0: unchanged
}

// Receiving is a flow whose bytes come here. What a peer that knows nothing of us may
// have in flight is bounded by the window that we advertise, so this window is a
// congestion window (RFC 9840 uses it so for LEDBAT, DRWA of Jiang et al. (IMC 2012)
// against queues of cellular networks). Arrivals are to its algorithm what acknowledgements
// are to a sender's. It is told of holes as of losses of one segment each, the least that
// they can be, and of no timeouts; nobody keeps a pacing rate. Flows that receive share
// windows only with each other.
type Receiving struct {
	flow *Flow

	// Of Arrived, which one goroutine calls.
	origin Arrivals // as the first were
	report Report
	rtt    time.Duration // the newest known
	round  roundTrip     // under way
	before cc.Bytes      // the window that was advertised when the one before it began
}

// roundTrip is one of arrivals: what comes in it was in flight when it began.
type roundTrip struct {
	at       cc.Time
	received cc.Bytes
	window   cc.Bytes // advertised when it began; 0: none has begun
}

// Receive adds a flow that receives to its group. put is told of each new window:
// it runs with locks held, on any goroutine, and must neither block nor call back.
func (m *Manager) Receive(now cc.Time, t Terms, put func(window cc.Bytes)) (*Receiving, error) {
	t.Receives = true
	f, err := m.Open(now, t, Leg{Enforces: true, Apply: func(l Limit) { put(l.Cwnd) }})
	if err != nil {
		return nil, err
	}
	return &Receiving{flow: f}, nil
}

// Arrived tells what has come. The first call says where the stream stands, and its RTT
// what is known of the path's least.
func (r *Receiving) Arrived(a Arrivals) {
	if a.RTT > 0 {
		r.rtt = a.RTT
	}
	if r.report.At == 0 {
		r.origin = a
		r.round = roundTrip{a.At, a.Received, a.Window}
	}
	flight, limited := r.estimateFlight(a)
	p := &r.report
	p.At, p.RTT, p.Peer, p.MSS = a.At, a.RTT, a.Peer, a.MSS
	if p.Acked == 0 {
		p.RTT = r.origin.RTT
	}
	p.Acked = a.Received - r.origin.Received
	p.Lost = cc.Bytes(a.Holes-r.origin.Holes) * max(a.MSS, 1)
	p.Pipe = flight
	p.Unsent = 0
	if limited { // a segment stands for what the peer would send
		p.Unsent = a.MSS
	}
	p.Written = max(p.Written, p.Acked+p.Pipe+p.Unsent)
	r.flow.Report(*p)
}

// estimateFlight is how many bytes are on their way, by what came in the last round trip, and
// whether our window kept the peer from sending more: then they fill most of it, and it
// is not a reader that lags behind which keeps it small.
func (r *Receiving) estimateFlight(a Arrivals) (n cc.Bytes, limited bool) {
	took := a.At.Sub(r.round.at)
	if r.rtt == 0 || took < max(r.rtt, time.Millisecond) {
		return r.report.Pipe, r.report.Unsent > 0
	}
	n = cc.Bytes(float64(a.Received-r.round.received) * r.rtt.Seconds() / took.Seconds())
	window := min(r.round.window, r.before)
	limited = n >= threeQuarters(window) && a.Unread <= window/4
	r.before = r.round.window
	r.round = roundTrip{a.At, a.Received, a.Window}
	return n, limited
}

// threeQuarters is three quarters: acknowledgements are late, and windows are in steps.
func threeQuarters(n cc.Bytes) cc.Bytes { return n - n/4 }

// Move gives the flow other terms.
func (r *Receiving) Move(now cc.Time, t Terms) error {
	t.Receives = true
	return r.flow.Move(now, t)
}

// Close leaves the group.
func (r *Receiving) Close(now cc.Time) { r.flow.Close(now) }

// Snapshot returns the present state: Delivered is what has come, Share the window.
func (r *Receiving) Snapshot() Snapshot { return r.flow.Snapshot() }
