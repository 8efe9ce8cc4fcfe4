package cc

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

// path feeds an algorithm with events in packets, as seen by a sender that
// always has data and keeps its window full.
type path struct {
	alg   Algorithm
	state State
	// srtt, if set, is what State.SRTT says instead of the smoothed samples.
	srtt time.Duration
	// idle says that the application has nothing to send: little in flight, and
	// the window does not bind.
	idle    bool
	reverse time.Duration // queue on the way back
	// marked says that what is acknowledged came with ECN marks.
	marked bool
	// l4s says that it left as ECT(1).
	l4s bool
}

// newPath starts the algorithm that ref names, as Parse reads it.
func newPath(tb testing.TB, ref string) *path {
	tb.Helper()
	name, params, err := Parse(ref)
	require.NoError(tb, err)
	alg, err := New(name, Config{Params: params, Rand: rand.New(rand.NewPCG(1, 2))})
	require.NoError(tb, err)
	return &path{alg: alg, state: State{Now: Time(time.Second), MSS: DefaultMSS}}
}

// as returns the algorithm's own type, to set it up and look inside.
func as[A Algorithm](p *path) A {
	alg := p.alg
	if i, ok := alg.(inspected); ok {
		alg = i.Algorithm
	}
	switch m := alg.(type) {
	case lossMarks:
		alg = m.Algorithm
	case *ceiling:
		alg = m.Algorithm
	}
	return alg.(A)
}

// Wait lets time pass.
func (p *path) Wait(d time.Duration) { p.state.Now = p.state.Now.Add(d) }

// Ack acknowledges n packets in one event, the newest of which left rtt ago;
// rtt 0 gives no sample, and then the newest left a smoothed round trip ago.
func (p *path) Ack(n float64, rtt time.Duration) {
	ack := Ack{Acked: Bytes(n * float64(p.state.MSS)), RTT: rtt, ReverseQueue: p.reverse, L4S: p.l4s}
	if p.marked {
		ack.Marked = ack.Acked
	}
	p.state.Delivered += ack.Acked
	p.state.EdgeDelivered = p.state.Delivered
	if rtt > 0 {
		p.smooth(rtt)
		ack.Sent.At = max(1, p.state.Now.Add(-rtt))
	}
	p.fill()
	if ack.Sent.At != 0 {
		ack.Sent.Inflight = p.state.Inflight
	}
	ack.State = p.state
	p.alg.OnAck(ack)
}

// Round acknowledges one window in single packets, spread over a round trip.
func (p *path) Round(rtt time.Duration) {
	n := max(1, int(p.Cwnd()))
	for range n {
		p.Wait(rtt / time.Duration(n))
		p.Ack(1, rtt)
	}
}

// Lose reports n lost packets, the newest of which left just now.
func (p *path) Lose(n float64) { p.loseSent(n, p.state.Now) }

// loseSent reports n lost packets, the newest of which left at sent.
func (p *path) loseSent(n float64, sent Time) {
	p.fill()
	p.alg.OnLoss(Loss{State: p.state, Lost: Bytes(n * float64(p.state.MSS)), SentAt: sent})
}

// Timeout reports that the transport's retransmission timer fired.
func (p *path) Timeout() {
	p.fill()
	p.alg.OnLoss(Loss{State: p.state, Lost: p.state.MSS, SentAt: p.state.Now, Timeout: true})
}

// Cwnd is the window in packets.
func (p *path) Cwnd() float64 { return float64(p.alg.Control().Cwnd) / float64(p.state.MSS) }

func (p *path) fill() {
	p.state.CwndLimited = !p.idle
	p.state.Inflight = p.alg.Control().Cwnd
	if p.idle {
		p.state.Inflight = 0
	}
}

func (p *path) smooth(rtt time.Duration) {
	s := &p.state
	if s.SRTT == 0 {
		s.SRTT, s.RTTVar, s.MinRTT = rtt, rtt/2, rtt
	}
	s.MinRTT = min(s.MinRTT, rtt)
	s.SRTT += (rtt - s.SRTT) / 8
	if p.srtt != 0 {
		s.SRTT = p.srtt
	}
}
