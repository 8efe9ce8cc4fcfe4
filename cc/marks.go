package cc

import "time"

// Marks is how an algorithm answers ECN marks (RFC 3168): as it would losses, at
// most once per round trip. Those that do not answer losses have a ceiling.
type Marks uint8

// The ways to answer a mark.
const (
	MarksLowerCeiling Marks = iota // by a window as Reno would have it, above which the algorithm's does not count
	MarksAreLosses                 // by OnLoss, with no bytes lost
	MarksPass                      // not at all: the transport does
)

var marksAbout = [...]string{
	MarksLowerCeiling: "lower a ceiling on the window: half of what is in flight, from where it grows by a packet per round trip until the algorithm asks for less",
	MarksAreLosses:    "are answered as losses are",
	MarksPass:         "are answered by the transport's own congestion control",
}

// String says what a mark does.
func (m Marks) String() string { return marksAbout[m] }

// answering is s whose algorithms answer marks as it says.
func (s Spec) answering() Spec {
	build := s.New
	s.New = func(cfg Config) Algorithm {
		own := build(cfg)
		var a Algorithm
		switch s.Marks {
		case MarksPass:
			return own
		case MarksAreLosses:
			a = lossMarks{own}
		default:
			a = &ceiling{Algorithm: own, reno: newLossWindow(Config{MSS: cfg.MSS})}
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

// lossMarks tells an algorithm of marks as of losses.
type lossMarks struct{ Algorithm }

func (m lossMarks) OnAck(a Ack) {
	if a.Marked > 0 {
		m.OnLoss(Loss{State: a.State, SentAt: a.left()})
	}
	m.Algorithm.OnAck(a)
}

// ceiling bounds the window of an algorithm by that of a Reno sender that starts
// with the first mark: RFC 3168 §6.1.2 asks for no more than its answer. It is
// lifted when the algorithm asks for less by itself.
type ceiling struct {
	Algorithm
	reno lossWindow
	low  bool          // it is in force
	from Time          // since when; 0: never yet
	till Time          // when it was lifted
	srtt time.Duration // newest
}

func (c *ceiling) OnAck(a Ack) {
	c.srtt = a.SRTT
	c.reno.learn(a.MSS)
	own := a
	if c.held(a.left()) {
		own.CwndLimited, own.Sent.AppLimited = false, true
	}
	c.Algorithm.OnAck(own)
	switch {
	case a.Marked > 0 && !c.reno.epoch.covers(a.left()):
		c.lower(a)
	case c.low:
		c.reno.grow(c.reno.credit(a))
		if c.reno.bytes(c.reno.cwnd) >= c.wanted() {
			c.low, c.till = false, a.Now
		}
	}
}

// held reports whether the ceiling held back what left then.
func (c *ceiling) held(left Time) bool {
	return c.from != 0 && left >= c.from && (c.low || left <= c.till)
}

// lower answers a mark. A window that the application or the pacing rate leaves
// unused stands for what is in flight, or for a first window.
func (c *ceiling) lower(a Ack) {
	w := min(c.Control().Cwnd, c.wanted())
	if !a.CwndLimited {
		flight := max(a.Sent.Inflight, a.Inflight+a.Acked)
		w = min(w, max(flight, InitialCwndPackets*c.reno.mss))
	}
	if !c.low {
		c.low, c.from = true, a.Now
	}
	c.reno.cwnd = c.reno.packets(w)
	c.reno.lose(Loss{State: a.State, SentAt: a.left()}, renoBeta)
}

// wanted is what the algorithm by itself would have in flight.
func (c *ceiling) wanted() Bytes {
	ctl := c.Algorithm.Control()
	if ctl.PacingRate > 0 && c.srtt > 0 {
		return min(ctl.Cwnd, ctl.PacingRate.BytesIn(c.srtt))
	}
	return ctl.Cwnd
}

func (c *ceiling) OnLoss(l Loss) {
	l.CwndLimited = l.CwndLimited && !c.low
	c.Algorithm.OnLoss(l)
}

func (c *ceiling) OnTick(s State) {
	s.CwndLimited = s.CwndLimited && !c.low
	c.Algorithm.OnTick(s)
}

func (c *ceiling) Control() Control {
	ctl := c.Algorithm.Control()
	if !c.low {
		return ctl
	}
	if w := c.reno.bytes(c.reno.cwnd); w < ctl.Cwnd {
		ctl.Cwnd, ctl.Phase = w, "marked"
	}
	if rate := c.reno.pace(cubicGain, c.reno.cwnd, c.srtt); rate > 0 {
		ctl.PacingRate = min(ctl.PacingRate, rate)
	}
	return ctl
}
