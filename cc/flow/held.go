package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// hold takes in what a transport that holds the window reports. Nobody asks for
// grants there: bytes count from when they leave, and those that have not left
// are what the flow wants to send.
func (f *Flow) hold(r, before Report) {
	m := f.macro
	f.freely, f.measured = true, f.measured || r.RTT > 0
	left := max(r.Written-r.Unsent, r.Acked) - f.taken
	if f.want == 0 && (left > 0 || r.Unsent > 0) {
		f.join(r.At)
	}
	if left > 0 {
		f.count(f.departure(r, before, left), left)
	}
	f.want, f.asked = r.Unsent, r.At
	f.parked = f.parked && f.turn != 0 // it waits for its turn, not for the window
	switch {
	case r.RwndFull: // no share of the window would help
		f.want = 0
	case r.Unsent >= f.mss() && !f.content():
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

const (
	// turnRTTs is for how many round trips the odd pairs stay with the same members.
	turnRTTs = 8
	// ackedTogether segments are acknowledged at once (RFC 9293 §3.8.6.3): one by
	// itself at the end of a window waits for tens of milliseconds at the receiver.
	// It would be in flight for so long, and its round trip would tell of a queue
	// that is not there.
	ackedTogether = 2
)

// inTurn is what f is due where others contend as well, for a transport to hold:
// whole pairs of segments. The odd pairs go round, slowly: with relays they go to who
// was served least, but a transport that reports has just been served, so that nobody
// would be told of any; and a window that changed with each report would send in bursts.
func (f *Flow) inTurn(now cc.Time) cc.Bytes {
	m, mss := f.macro, f.mss()
	pair := ackedTogether * mss
	whole := f.claim.due / pair * pair
	odd, n, place := cc.Bytes(0), 0, 0 // odd: what pairs leave of the dues
	for _, g := range m.members {
		if !g.claim.contends {
			continue
		}
		odd += g.claim.due%(ackedTogether*g.mss()) + 1 // dues are cut to whole bytes
		n++
		if g.id < f.id {
			place++
		}
	}
	if n < 2 { // the window is long enough for another segment to follow
		return f.claim.share
	}
	turn := int(now / cc.Time(turnRTTs*max(m.rtt.srtt, time.Millisecond)))
	if cc.Bytes((place+turn)%n) < odd/pair {
		whole += pair
	}
	return max(whole, f.claim.least)
}

// limit is what f may use from now on. A transport that holds the window has its
// share at once, whatever the others still have in flight: it acts on a raise
// only when it next hears from its peer.
func (f *Flow) limit(now cc.Time) Limit {
	m := f.macro
	m.allot(now, f)
	m.divided = f.contends(now) // then it is the division that wakeable needs, too
	share := f.claim.share
	if f.last.Held && len(m.members) > 1 {
		share = f.inTurn(now)
	}
	l := Limit{Cwnd: share, PacingRate: m.ctl.PacingRate, Waiting: f.want > 0, EveryAck: m.spec.EveryAck}
	if f.route.far() {
		l.Cwnd = max(f.route.expand(share)/f.mss(), 1) * f.mss()
	}
	if due := f.claim.due; f.last.Held && due < m.ctl.Cwnd && m.ctl.PacingRate > 0 {
		// The macroflow's pacer is not asked, so each has its part of the rate as well; 0 would not pace.
		l.PacingRate = max(1, cc.Rate(float64(l.PacingRate)*float64(due)/float64(m.ctl.Cwnd)))
	}
	l.PacingRate = lesser(lesser(l.PacingRate, f.ceiling), f.ownRate(now))
	return l
}
