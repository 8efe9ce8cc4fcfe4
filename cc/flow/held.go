package flow

import "github.com/penstock-net/penstock/cc"

// hold takes in what a transport that holds the window reports. Nobody asks for
// grants there: bytes count from when they leave, and those that have not left
// are what the flow wants to send.
func (f *Flow) hold(r, before Report) {
	m := f.macro
	f.freely, f.measured = true, f.measured || r.RTT > 0
	if f.want == 0 {
		f.served = max(f.served, m.served)
	}
	if left := max(r.Written-r.Unsent, r.Acked) - f.taken; left > 0 {
		f.count(f.departure(r, before, left), left)
	}
	f.want, f.asked, f.parked = r.Unsent, r.At, false
	switch {
	case r.RwndFull: // no share of the window would help
		f.want = 0
	case r.Unsent >= f.mss():
		m.cwndFullAt, m.wantedAt = r.At, r.At
	}
}

// departure tells when the bytes left that a report is the first to show: just
// now, unless some of them have been acknowledged already. More than a window
// cannot have left within one round trip.
func (f *Flow) departure(r, before Report, left cc.Bytes) cc.Time {
	if r.RTT == 0 || max(r.Acked, r.Newest) <= f.taken || left > f.route.expand(f.macro.ctl.Cwnd) {
		return r.At
	}
	return min(r.At, max(before.At, r.At.Add(-r.RTT)))
}

// heldBy tells what holds the flow back over a transport that holds the window.
func (f *Flow) heldBy(r Report) LimitedBy {
	switch {
	case r.RwndFull:
		return LimitedByReceiver
	case r.Unsent < f.mss():
		return LimitedByApplication
	case f.told.PacingRate > 0 && f.inflight+2*f.mss() <= f.told.Cwnd:
		return LimitedByPacing
	default:
		return LimitedByCwnd
	}
}

// limit is what f may use from now on.
func (f *Flow) limit(now cc.Time) Limit {
	m := f.macro
	share := m.share(f, now)
	l := Limit{Cwnd: share, PacingRate: m.ctl.PacingRate, Waiting: f.want > 0, EveryAck: m.spec.EveryAck}
	if f.route.far() {
		l.Cwnd = max(f.route.expand(share)/f.mss(), 1) * f.mss()
	}
	if f.last.Held && share < m.ctl.Cwnd { // the macroflow's pacer is not asked, so each has its part of the rate as well
		l.PacingRate = cc.Rate(float64(l.PacingRate) * float64(share) / float64(m.ctl.Cwnd))
		if m.ctl.PacingRate > 0 {
			l.PacingRate = max(l.PacingRate, 1) // 0 would not pace
		}
	}
	if f.terms.MaxRate > 0 && (l.PacingRate == 0 || f.terms.MaxRate < l.PacingRate) {
		l.PacingRate = f.terms.MaxRate
	}
	return l
}
