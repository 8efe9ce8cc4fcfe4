package flow

import (
	"fmt"

	"github.com/penstock-net/penstock/cc"
)

// satisfied is how far above its Target a Guarantee may get (Janus' 1+ε).
const satisfied = 1.1

func above(target cc.Rate) cc.Rate { return cc.Rate(satisfied * float64(target)) }

// checkClass tells what is wrong with what t asks of the window.
func (t Terms) checkClass() error {
	switch {
	case int(t.Class) >= len(classNames):
		return fmt.Errorf("class %d is none of those there are", t.Class)
	case t.Target < 0 || t.MinRate < 0:
		return fmt.Errorf("target %v and minimum rate %v must not be negative; 0: none", t.Target, t.MinRate)
	case t.Class == Guarantee && t.Target > 0 && t.MinRate > t.Target:
		return fmt.Errorf("a minimum rate of %v is above the target of %v", t.MinRate, t.Target)
	case t.MaxRate < 0 || t.ConnectionRate < 0:
		return fmt.Errorf("maximum rates %v and %v must not be negative; 0: none", t.MaxRate, t.ConnectionRate)
	case t.most() > 0 && t.MinRate > t.most():
		return fmt.Errorf("a minimum rate of %v is above the maximum of %v", t.MinRate, t.most())
	}
	return nil
}

// most is the rate that a flow never exceeds; 0: any.
func (t Terms) most() cc.Rate { return lesser(t.MaxRate, t.ConnectionRate) }

// standing is what Terms come to among the members of a macroflow.
type standing struct {
	weight  cc.Bytes
	place   int     // in the line: those with lower ones come first
	target  cc.Rate // what it has before others share the rest; 0: nothing
	ceiling cc.Rate // what it never exceeds; 0: any
	own     cc.Rate // of that, what is not the whole group's: its own pacer holds it
}

// standing puts the lowest Priority first; within one, the flows with a Target,
// which never want much, then those that do not wait, then the others.
func (t Terms) standing() standing {
	s := standing{weight: cc.Bytes(max(1, t.Weight)), place: 3*t.Priority + 2, ceiling: t.most(), own: t.ConnectionRate}
	switch {
	case t.Class == Guarantee && t.Target > 0:
		s.place -= 2
		s.target = lesser(t.Target, s.ceiling)
		s.ceiling = lesser(s.ceiling, above(s.target))
		s.own = lesser(s.own, above(s.target))
	case t.Class == DelaySensitive:
		s.place--
	}
	return s
}

// lesser is the lesser of two rates, of which 0 stands for none.
func lesser(a, b cc.Rate) cc.Rate {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// windowFor is what f has in flight at rate r; 0 before the round trip is known. Where
// a maximum rate binds, the parts of the window are the parts of that rate.
func (f *Flow) windowFor(r cc.Rate) cc.Bytes {
	m := f.macro
	if m.rateBound {
		return cc.Bytes(float64(m.ctl.Cwnd) * min(1, float64(r)/float64(m.ctl.PacingRate)))
	}
	return min(r.BytesIn(m.rtt.srtt), cc.MaxCwnd)
}

// known reports whether windows can be had from rates yet.
func (f *Flow) known() bool { return f.macro.rtt.srtt > 0 }

// content reports whether f has all it may by its terms, so that a wider window
// would be none to it. It goes by the last division.
func (f *Flow) content() bool {
	return f.known() && f.ceiling > 0 && f.claim.share >= f.claim.most && f.claim.most < f.macro.ctl.Cwnd
}

// join notes that f begins to want to send. Service is counted from where the
// others are; and one that comes new among others that send, or after so long
// that what it knew of them is out of date, gets up to its share over a round
// trip, since what they leave to it they leave over a round trip.
func (f *Flow) join(now cc.Time) {
	f.served = max(f.served, f.macro.served)
	if f.new(now) {
		f.ramp = now.Add(f.macro.rtt.srtt)
	}
}

// arrived notes that bytes of f were acknowledged: a ramp is over, and what it
// held back may go.
func (f *Flow) arrived(now cc.Time) {
	if now < f.ramp {
		f.ramp, f.ready, f.pacer.tat = now, 0, now
	}
}

// new reports whether what f sends now would be the first for long, among others
// that send. Of DelaySensitive it is not asked: they do not wait.
func (f *Flow) new(now cc.Time) bool {
	m := f.macro
	if f.terms.Class == DelaySensitive || f.inflight > 0 || f.busy != 0 && now.Sub(f.busy) <= m.rtt.rto() {
		return false
	}
	for _, g := range m.members {
		if g != f && (g.counted() > 0 || g.contends(now)) {
			return true
		}
	}
	return false
}

// ownRate is the rate at which f may send whatever the pacers say that it shares with
// others; 0: any. It goes by the last division.
func (f *Flow) ownRate(now cc.Time) cc.Rate {
	rate := f.own
	if f.known() && (now < f.ramp || f.new(now)) {
		rate = lesser(rate, max(1, cc.RateOf(f.claim.share, f.macro.rtt.srtt)))
	}
	return rate
}

// part is what f's macroflow leaves it: what its transport was told, where that
// holds the window; otherwise what it is due, were all active members to use
// theirs. Of that, it lends what it does not want.
func (f *Flow) part() (share, lent cc.Bytes) {
	m := f.macro
	if f.closed {
		return 0, 0
	}
	for _, g := range m.members {
		g.claim.contends = g == f || g.want > 0 || g.inflight > 0
	}
	m.divide()
	share = f.route.expand(f.claim.due)
	if f.want == 0 {
		lent = f.route.expand(max(0, f.claim.due-f.counted()))
	}
	if f.last.Held {
		share = f.told.Cwnd
	}
	return share, lent
}
