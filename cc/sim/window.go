package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Of Linux's receive window.
const (
	mostWindow  cc.Bytes = 3 << 20 // net.ipv4.tcp_rmem of 6 MiB; half counts as overhead
	windowScale cc.Bytes = 1 << 7
)

// readEvery is how often a relay looks at what has come over a socket.
const readEvery = time.Millisecond

// window is what an upload's receiver advertises, with an application that reads at
// once. It opens as Linux's does, by two segments with each that comes, up to what an
// algorithm of ours says; what was advertised is not taken back.
type window struct {
	s      *sender
	flow   *flow.Receiving
	clamp  cc.Bytes // ours
	size   cc.Bytes // has opened so far
	last   cc.Bytes // stream offset that was advertised
	echo   cc.Time  // the newest that came with data
	rtt    time.Duration
	least  time.Duration // of the handshake, or of data
	holes  int
	peer   flow.PeerClock // that came with data; the kernel tells of none
	looked cc.Time
}

// advertise has an algorithm of ours decide the window.
func (s *sender) advertise() {
	w := &window{s: s, clamp: mostWindow, size: flow.ReceiveBulk}
	s.win, w.last = w, w.size
	host := hostAddr(s.host)
	terms := flow.Terms{Group: host.String(), Host: host, Algorithm: s.cfg.Receive, Params: s.cfg.ReceiveParams}
	w.flow, s.w.err = s.w.manager.Receive(s.w.now, terms, func(n cc.Bytes) { w.clamp = n })
}

// connect shakes hands: the client sends once it has the answer, and the edge has a first
// round trip.
func (s *sender) connect() {
	began := s.w.now
	s.w.carry(false, s.host, ackBytes, s.number, NotECT, func(v Verdict) {
		if v.Dropped != DropNone {
			s.w.at(began.Add(firstRTO), s.connect)
			return
		}
		s.w.at(v.Arrives.Add(s.cfg.Delay), func() {
			s.w.carry(true, s.host, ackBytes, s.number, NotECT, func(v Verdict) {
				if s.win != nil && v.Dropped == DropNone {
					s.win.least = v.Arrives.Add(s.cfg.Delay).Sub(began)
				}
			})
			s.edge = cc.MaxCwnd
			if s.win != nil {
				s.edge = s.win.last
			}
			s.pump()
		})
	})
}

// edge is the stream offset that is advertised now.
func (w *window) edge() cc.Bytes {
	w.size = min(w.size, max(w.clamp, windowScale))
	w.last = max(w.last, w.s.rcv.upTo+(w.size+windowScale-1)/windowScale*windowScale)
	return w.last
}

// noteArrival notes an arrival, before it is acknowledged.
func (w *window) noteArrival(a arrival) {
	w.size = min(w.size+2*cc.DefaultMSS, max(w.size, min(w.clamp, mostWindow)))
	if len(w.s.rcv.above) > 0 && a.n > w.s.rcv.next {
		w.holes++
	}
	now, kernel := w.s.w.now, w.s.w.scenario.Transport == Kernel
	if a.stamp != nil && !kernel {
		w.peer = flow.PeerClock{At: now, Value: *a.stamp}
	}
	if a.echo > w.echo {
		w.echo = a.echo
		w.sample(now.Sub(a.echo), kernel)
	}
	if w.s.rcv.upTo < flow.ReceiveBulk || kernel && now < w.looked.Add(readEvery) {
		return
	}
	rtt := w.rtt
	if w.looked == 0 {
		rtt = w.least
	}
	w.looked = now
	w.flow.Arrived(flow.Arrivals{
		At: now, Received: w.s.rcv.upTo, RTT: rtt, Peer: w.peer,
		Window: w.last - w.s.rcv.upTo, Holes: w.holes, MSS: cc.DefaultMSS,
	})
}

// sample takes in a round trip from an acknowledgement to what it let out. In the kernel
// the clock of the timestamps ticks in milliseconds, and the estimate falls at once and
// rises slowly (tcpi_rcv_rtt).
func (w *window) sample(rtt time.Duration, kernel bool) {
	if w.least == 0 || rtt < w.least {
		w.least = rtt
	}
	if !kernel {
		w.rtt = rtt
		return
	}
	rtt = max(rtt.Truncate(time.Millisecond), time.Millisecond)
	if w.rtt == 0 || rtt < w.rtt {
		w.rtt = rtt
		return
	}
	w.rtt += (rtt - w.rtt) / 8
}

// answer sends an acknowledgement of all that has come, with the window.
func (s *sender) answer() {
	news, edge, now := s.rcv.acknowledge(), s.edge, s.w.now
	stamp := s.rcv.clock.reading(now)
	if s.win != nil {
		edge = s.win.edge()
	}
	s.w.carry(!s.cfg.Upload, s.host, ackBytes, s.number, NotECT, func(v Verdict) {
		if v.Dropped != DropNone {
			return
		}
		s.w.at(v.Arrives.Add(s.cfg.Delay), func() {
			s.heard, s.edge = max(s.heard, now), max(s.edge, edge)
			s.hear(news, stamp)
		})
	})
}
