package cc

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// bottleneck is a drop-tail queue of packets in front of a server of fixed
// rate, with all of the propagation delay behind it, shared by senders that
// always have data.
type bottleneck struct {
	rate   float64       // packets/s
	base   time.Duration // round trip without queue
	buffer int           // packets; 0: unbounded
	batch  time.Duration // acknowledgements reach the sender in multiples of it; 0: each by itself
	random float64       // probability that a packet is lost on the way

	now, free Time // free: when the server has sent all it holds
	events    eventHeap
	seq       int // keeps events of the same time in order
	flows     []*sender
	rng       *rand.Rand
	queue     []float64 // packets, once per millisecond
}

// sender is one flow.
type sender struct {
	alg       Algorithm
	state     State
	starts    Time
	paced     Time // when the pacer next lets a packet go
	woken     Time // the timer that is set for it
	full      Time // when the window last held the flow back
	due       []packet
	delivered []Time // one per packet
	lost      int
	cwnd      []float64 // packets, at each event
}

type packet struct {
	sent    Sent
	arrives Time // when the sender learns its fate
	lost    bool
}

type event struct {
	at  Time
	seq int
	run func()
}

type eventHeap []event

func (h eventHeap) Len() int { return len(h) }
func (h eventHeap) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}
func (h eventHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *eventHeap) Push(x any)   { *h = append(*h, x.(event)) }
func (h *eventHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

const linkStart = Time(time.Second)

// run lets the flows, each started at its time, share the link until the end.
func (l *bottleneck) run(tb testing.TB, until time.Duration, flows ...*sender) {
	tb.Helper()
	l.rng = rand.New(rand.NewPCG(7, 7))
	l.flows = flows
	for _, s := range flows {
		l.at(s.starts, func() { l.pump(s) })
	}
	for d := ms; d < until; d += ms {
		l.at(linkStart.Add(d), func() { l.queue = append(l.queue, l.backlog()) })
	}
	end := linkStart.Add(until)
	for len(l.events) > 0 && l.events[0].at < end {
		e := heap.Pop(&l.events).(event)
		l.now = e.at
		e.run()
	}
}

// from starts a flow after d.
func from(tb testing.TB, d time.Duration, ref string) *sender {
	tb.Helper()
	p := newPath(tb, ref)
	return &sender{alg: p.alg, state: p.state, starts: linkStart.Add(d)}
}

func (l *bottleneck) at(at Time, run func()) {
	l.seq++
	heap.Push(&l.events, event{at, l.seq, run})
}

func (l *bottleneck) backlog() float64 { return max(0, l.free.Sub(l.now).Seconds()*l.rate) }

// pump sends what window and pacer allow.
func (l *bottleneck) pump(s *sender) {
	mss := s.state.MSS
	for {
		ctl := s.alg.Control()
		if ctl.NextTick != 0 && ctl.NextTick <= l.now {
			s.state.Now = l.now
			s.alg.OnTick(s.state)
			continue
		}
		if s.state.Inflight+mss > ctl.Cwnd {
			s.full = l.now
			return
		}
		if s.paced > l.now {
			if s.woken != s.paced {
				s.woken = s.paced
				l.at(s.paced, func() { l.pump(s) })
			}
			return
		}
		if ctl.PacingRate > 0 {
			s.paced = max(s.paced, l.now.Add(-ms)).Add(ctl.PacingRate.TimeFor(mss))
		}
		l.send(s)
	}
}

func (l *bottleneck) send(s *sender) {
	p := packet{sent: Sent{
		At: l.now, Cwnd: s.alg.Control().Cwnd, Inflight: s.state.Inflight,
		Delivered: s.state.Delivered,
	}}
	s.state.Inflight += s.state.MSS
	p.lost = l.buffer > 0 && l.backlog() >= float64(l.buffer) || l.rng.Float64() < l.random
	if !p.lost {
		l.free = max(l.free, l.now).Add(time.Duration(float64(time.Second) / l.rate))
	}
	// A loss shows when the packets in front of it are through.
	p.arrives = max(l.free, l.now).Add(l.base)
	at := p.arrives
	if l.batch > 0 {
		at = (at + Time(l.batch) - 1) / Time(l.batch) * Time(l.batch)
	}
	s.due = append(s.due, p)
	l.at(at, func() { l.report(s) })
}

// report tells the flow of all packets whose fate is known by now, losses first.
func (l *bottleneck) report(s *sender) {
	var acked, lost Bytes
	var newest, newestLost Sent
	s.state.Now = l.now
	for len(s.due) > 0 && s.due[0].arrives <= l.now {
		p := s.due[0]
		s.due = s.due[1:]
		s.state.Inflight -= s.state.MSS
		if p.lost {
			lost += s.state.MSS
			newestLost = p.sent
			s.lost++
			continue
		}
		acked += s.state.MSS
		newest = p.sent
		s.delivered = append(s.delivered, p.arrives)
	}
	s.state.CwndLimited = s.full != 0 && l.now.Sub(s.full) <= max(s.state.SRTT, 10*ms)
	if lost > 0 {
		s.alg.OnLoss(Loss{State: s.state, Lost: lost, SentAt: newestLost.At})
	}
	if acked > 0 {
		rtt := l.now.Sub(newest.At)
		s.state.Delivered += acked
		p := path{state: s.state}
		p.smooth(rtt)
		s.state = p.state
		s.alg.OnAck(Ack{State: s.state, Acked: acked, RTT: rtt, Sent: newest})
	}
	s.cwnd = append(s.cwnd, float64(s.alg.Control().Cwnd)/float64(s.state.MSS))
	l.pump(s)
}

// throughput is what a flow got between two moments, in packets/s.
func (s *sender) throughput(from, to time.Duration) float64 {
	n := 0
	for _, at := range s.delivered {
		if at >= linkStart.Add(from) && at < linkStart.Add(to) {
			n++
		}
	}
	return float64(n) / (to - from).Seconds()
}

// queued returns mean and 99th percentile of the queue between two moments, in packets.
func (l *bottleneck) queued(from, to time.Duration) (mean, p99 float64) {
	q := slices.Clone(l.queue[from/ms : min(int(to/ms), len(l.queue))])
	slices.Sort(q)
	sum := 0.0
	for _, v := range q {
		sum += v
	}
	return sum / float64(len(q)), q[len(q)*99/100]
}

// jain is the fairness index of throughputs: 1 when all are equal.
func jain(rates ...float64) float64 {
	sum, squares := 0.0, 0.0
	for _, r := range rates {
		sum += r
		squares += r * r
	}
	return sum * sum / (float64(len(rates)) * squares)
}
