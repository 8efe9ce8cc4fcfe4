package flow

import "github.com/penstock-net/penstock/cc"

// noteCap finds out which of the members' caps is the least.
func (m *macroflow) noteCap() {
	m.hintCap = 0
	for _, f := range m.members {
		if c := f.terms.HintCap; c > 0 && (m.hintCap == 0 || c < m.hintCap) {
			m.hintCap = c
		}
	}
}

// cap keeps the limits below the members' part of the capacity that a fresh hint
// tells, whatever the algorithm makes of it: the rate itself, and as a window what
// that has in flight without a queue and two segments of each member, without
// which a late acknowledgement would leave the path idle. So much may leave while
// the hint holds even where there is no capacity: who is paced by next to nothing
// would not notice when there is some again. Before the first round trip there is
// only the rate. A hint that grows old frees both by itself.
func (m *macroflow) cap(now cc.Time) {
	m.capped = false
	if m.hintCap == 0 || m.hint.Capacity == 0 || !m.fresh(now) {
		return
	}
	own := m.ctl
	slack := floorSegments * m.mss * cc.Bytes(max(1, len(m.members)))
	rate := max(cc.Rate(m.hintCap*float64(m.hint.Capacity)), cc.RateOf(slack, m.patience()))
	if own.PacingRate == 0 || own.PacingRate > rate {
		m.ctl.PacingRate = rate
	}
	if m.rtt.min > 0 {
		m.ctl.Cwnd = min(own.Cwnd, rate.BytesIn(m.rtt.min)+slack)
	}
	m.capped = own.Cwnd > m.ctl.Cwnd || own.PacingRate != m.ctl.PacingRate
	m.mgr.schedule(m, m.hint.At.Add(m.patience()+1))
}

// recap applies what has become of the cap since the algorithm's last event.
func (m *macroflow) recap(now cc.Time) {
	if m.alg != nil && (m.capped || m.hintCap > 0) {
		m.adopt(now)
	}
}
