package cc

import "time"

// Marks is how an algorithm answers ECN marks (RFC 3168): as it answers losses, at most once per round trip.
// Algorithms that do not answer losses get a ceiling.
type Marks uint8

// The ways to answer a mark.
const (
	MarksLowerCeiling Marks = iota // by a ceiling of the algorithm's window, which answers as Reno would
	MarksAreLosses                 // by OnLoss, with no bytes lost
	MarksPass                      // not at all: the transport answers them
)

var marksAbout = [...]string{
	MarksLowerCeiling: "lower a ceiling on the window: half of what is in flight, from where it grows by a packet " +
		"per round trip until the algorithm asks for less",
	MarksAreLosses: "are answered as losses are",
	MarksPass:      "are answered by the transport's own congestion control",
}

// String describes the answer to a mark.
func (m Marks) String() string { return marksAbout[m] }

// Answering returns s with algorithms that answer marks by s.Marks.
func (s Spec) Answering() Spec {
	build := s.New
	s.New = func(cfg Config) Algorithm {
		own := build(cfg)
		var a Algorithm
		switch s.Marks {
		case MarksPass:
			return own
		case MarksAreLosses:
			a = lossMarks{own, s.L4S}
		default:
			a = &ceiling{Algorithm: own, window: newScalable(newLossWindow(Config{MSS: cfg.MSS}))}
		}
		if i, ok := own.(Inspector); ok {
			return inspected{a, i}
		}
		return a
	}
	return s
}

// inspected is an algorithm that shows what another one does.
type inspected struct {
	Algorithm
	Inspector
}

// lossMarks reports marks to an algorithm as losses.
type lossMarks struct {
	Algorithm
	l4s bool // but those of L4S, which it answers by itself
}

func (m lossMarks) OnAck(a Ack) {
	if a.Marked > 0 && !(a.L4S && m.l4s) {
		m.OnLoss(Loss{State: a.State, SentAt: a.sentTime()})
	}
	m.Algorithm.OnAck(a)
}

// ceiling bounds the window of an algorithm by another window. That starts with the first mark, and ends when
// the algorithm by itself asks for less. It answers marks as a Reno sender does (RFC 3168 §6.1.2), and on L4S
// packets as a scalable one.
type ceiling struct {
	Algorithm
	window scalable
	low    bool          // it is in force
	l4s    bool          // as the newest acknowledgement is
	from   Time          // since when; 0: never yet
	till   Time          // when it was lifted
	srtt   time.Duration // newest
}

func (c *ceiling) OnAck(a Ack) {
	c.srtt, c.l4s = a.SRTT, a.L4S
	c.window.setMSS(a.MSS)
	own := a
	if c.wasBinding(a.sentTime()) {
		own.CwndLimited, own.Sent.AppLimited = false, true
	}
	c.Algorithm.OnAck(own)
	if a.L4S {
		c.window.onAck(a)
	}
	if a.Marked > 0 {
		c.lowerCeiling(a)
	}
	if !c.low {
		return
	}
	if a.L4S {
		c.window.growUnmarked(a)
		c.window.growFaster(a)
	} else {
		c.window.growWindow(c.window.growthCredit(a))
	}
	if (a.Marked == 0 || !a.L4S) && c.window.toBytes(c.window.cwnd) >= c.wantedInflight() {
		c.low, c.till = false, a.Now
	}
}

// wasBinding reports whether the ceiling bounded the sender at that time.
func (c *ceiling) wasBinding(left Time) bool {
	return c.from != 0 && left >= c.from && (c.low || left <= c.till)
}

// lowerCeiling answers a mark. If the application or the pacing rate leaves the window unused, the ceiling
// starts from the bytes in flight, or from an initial window.
func (c *ceiling) lowerCeiling(a Ack) {
	if a.L4S && a.sentTime() <= c.window.first || !a.L4S && c.window.epoch.covers(a.sentTime()) {
		return
	}
	w := min(c.Control().Cwnd, c.wantedInflight())
	if !a.CwndLimited {
		flight := max(a.Sent.Inflight, a.Inflight+a.Acked)
		w = min(w, max(flight, InitialCwndPackets*c.window.mss))
	}
	if !c.low {
		c.low, c.from = true, a.Now
	}
	c.window.cwnd = c.window.toPackets(w)
	if a.L4S {
		c.window.answerMark(a)
	} else {
		c.window.cutWindow(Loss{State: a.State, SentAt: a.sentTime()}, renoBeta)
	}
}

// wantedInflight returns how much the algorithm by itself would have in flight.
func (c *ceiling) wantedInflight() Bytes {
	ctl := c.Algorithm.Control()
	if ctl.PacingRate > 0 && c.srtt > 0 {
		return min(ctl.Cwnd, ctl.PacingRate.BytesIn(c.srtt))
	}
	return ctl.Cwnd
}

// OnLoss also cuts the ceiling after a loss on an L4S path (RFC 9331 §4.3).
func (c *ceiling) OnLoss(l Loss) {
	if c.low && c.l4s {
		c.window.cutWindow(l, renoBeta)
	}
	l.CwndLimited = l.CwndLimited && !c.low
	c.Algorithm.OnLoss(l)
}

func (c *ceiling) OnTick(s State) {
	s.CwndLimited = s.CwndLimited && !c.low
	c.Algorithm.OnTick(s)
}

func (c *ceiling) Control() Control {
	ctl := c.Algorithm.Control()
	if c.l4s && ctl.PacingRate == 0 { // no bursts
		ctl.PacingRate = c.window.pacingRate(slowStartGain, c.window.toPackets(ctl.Cwnd), c.srtt)
	}
	if !c.low {
		return ctl
	}
	if w := c.window.toBytes(c.window.cwnd); w < ctl.Cwnd {
		ctl.Cwnd, ctl.Phase = w, "marked"
	}
	gain := cubicGain
	if c.l4s {
		gain = c.window.pacingGain()
	}
	rate := c.window.pacingRate(gain, c.window.cwnd, c.srtt)
	if rate > 0 {
		ctl.PacingRate = min(ctl.PacingRate, rate)
	}
	return ctl
}
