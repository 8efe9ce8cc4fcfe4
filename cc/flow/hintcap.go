package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// noteCap finds out which of the members' caps is the least, and which maximum rate
// they all have.
func (m *macroflow) noteCap() {
	m.hintCap, m.maxRate = 0, nil
	for i, f := range m.members {
		if c := f.terms.HintCap; c > 0 && (m.hintCap == 0 || c < m.hintCap) {
			m.hintCap = c
		}
		switch {
		case i == 0:
			m.maxRate = f.maxRate
		case m.maxRate != f.maxRate:
			m.maxRate = nil
		}
	}
}

// cap keeps the limits below a maximum rate that all members have, and below their
// part of the capacity that a fresh hint tells, whatever the algorithm asks for. The
// algorithm is told that its window did not bind.
func (m *macroflow) cap(now cc.Time) {
	m.capToMaxRate()
	m.capped = m.rateBound
	m.capToHint(now)
}

// capToMaxRate keeps the limits to the maximum rate that all members have. The rate
// binds once the window is more than the rate has in flight between two visits of a
// busy pacer, with what waits to be acknowledged together. Then the window only serves
// to divide the rate.
func (m *macroflow) capToMaxRate() {
	m.rateBound, m.pacer.most = false, 0
	if m.maxRate == nil {
		return
	}
	own, rate := m.ctl, m.maxRate.key.rate
	slack := m.segments(floorSegments + ackedTogether)
	m.rateBound = m.rtt.srtt > 0 && own.Cwnd > rate.BytesIn(m.rtt.srtt+pacerBurst)+slack
	if !m.rateBound && own.PacingRate == 0 { // the window is less than the rate: spreading it would only hold it back
		return
	}
	if m.within(rate, m.rtt.srtt+spareWindow, slack); own.PacingRate != m.ctl.PacingRate {
		m.pacer.most = limitBurst
	}
}

// spareWindow is for how long the rate may be sent beyond a round trip before the
// window binds, where acknowledgements come late.
const spareWindow = 100 * time.Millisecond

// within keeps the limits to a rate: the rate itself, and as a window what it has in
// flight in d, once a round trip is known, and some slack.
func (m *macroflow) within(rate cc.Rate, d time.Duration, slack cc.Bytes) {
	m.ctl.PacingRate = lesser(m.ctl.PacingRate, rate)
	if m.rtt.srtt > 0 {
		m.ctl.Cwnd = min(m.ctl.Cwnd, rate.BytesIn(d)+slack)
	}
}

// segments is so many segments of each member.
func (m *macroflow) segments(each cc.Bytes) cc.Bytes {
	return each * m.mss * cc.Bytes(max(1, len(m.members)))
}

// capToHint keeps the limits below the part of a fresh hint's capacity, in a window
// without a queue. Two segments of each member may leave while the hint holds even
// where there is no capacity: without them a late acknowledgement would leave the path
// idle, and a flow paced by next to nothing would not notice when there is some
// capacity again. A hint that grows old frees both by itself.
func (m *macroflow) capToHint(now cc.Time) {
	if m.hintCap == 0 || m.hint.Capacity == 0 || !m.fresh(now) {
		return
	}
	own := m.ctl
	slack := m.segments(floorSegments)
	rate := max(cc.Rate(m.hintCap*float64(m.hint.Capacity)), cc.RateOf(slack, m.patience()))
	m.within(rate, m.rtt.min, slack)
	m.capped = m.capped || own.Cwnd > m.ctl.Cwnd || own.PacingRate != m.ctl.PacingRate
	m.mgr.schedule(m, m.hint.At.Add(m.patience()+1))
}

// recap applies what has become of the cap since the algorithm's last event.
func (m *macroflow) recap(now cc.Time) {
	if m.alg != nil && (m.capped || m.hintCap > 0) {
		m.adopt(now)
	}
}
