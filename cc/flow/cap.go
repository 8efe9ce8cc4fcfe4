package flow

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// commonMaxRate is what all members have; nil: they have none, or not the same.
func (g *group) commonMaxRate() *rateLimit {
	for l, n := range g.caps.maxRates {
		if n == len(g.members) {
			return l
		}
	}
	return nil
}

// applyCaps keeps the limits below a maximum rate that all members have, and below their part
// of the capacity that a fresh hint tells, whatever the algorithm asks for. The
// algorithm is told that its window did not bind.
func (g *group) applyCaps(now cc.Time) {
	g.capToMaxRate()
	g.caps.bind = g.caps.rateBound
	g.capToHint(now)
}

// capToMaxRate keeps the limits to the maximum rate that all members have. The rate
// binds once the window is more than the rate has in flight between two visits of a
// busy pacer, with what waits to be acknowledged together. Then the window only serves
// to divide the rate.
func (g *group) capToMaxRate() {
	g.caps.rateBound, g.caps.burst = false, 0
	limit := g.commonMaxRate()
	if limit == nil {
		return
	}
	own, rate := g.ctl, limit.key.rate
	slack := g.segmentsOfEach(floorSegments + ackedTogether)
	g.caps.rateBound = g.rtt.srtt > 0 && own.Cwnd > rate.BytesIn(g.rtt.srtt+pacerBurst)+slack
	if !g.caps.rateBound && own.PacingRate == 0 { // the window is the lesser: pacing would only hold it back
		return
	}
	if g.capToRate(rate, g.rtt.srtt+spareWindow, slack); own.PacingRate != g.ctl.PacingRate {
		g.caps.burst = limitBurst
	}
}

// spareWindow is for how long the rate may be sent beyond a round trip before the
// window binds, where acknowledgements come late.
const spareWindow = 100 * time.Millisecond

// capToRate keeps the limits to a rate: the rate itself, and as a window what it has in
// flight in d, once a round trip is known, and some slack.
func (g *group) capToRate(rate cc.Rate, d time.Duration, slack cc.Bytes) {
	g.ctl.PacingRate = lesserRate(g.ctl.PacingRate, rate)
	if g.rtt.srtt > 0 {
		g.ctl.Cwnd = min(g.ctl.Cwnd, rate.BytesIn(d)+slack)
	}
}

// segmentsOfEach is so many segments of each member.
func (g *group) segmentsOfEach(each cc.Bytes) cc.Bytes {
	return each * g.mss * cc.Bytes(max(1, len(g.members)))
}

// capToHint keeps the limits below the part of a fresh hint's capacity, in a window
// without a queue. Two segments of each member may leave while the hint holds even
// where there is no capacity: without them a late acknowledgement would leave the path
// idle, and a flow paced by next to nothing would not notice when there is some
// capacity again. A hint that grows old frees both by itself.
func (g *group) capToHint(now cc.Time) {
	g.caps.within = false
	if g.caps.hintCap == 0 || g.caps.sound.Capacity == 0 || !g.hintIsFresh(now) {
		return
	}
	own := g.ctl
	slack := g.segmentsOfEach(floorSegments)
	rate := max(cc.Rate(g.caps.hintCap*float64(g.caps.sound.Capacity)), cc.RateOf(slack, g.hintLifetime()))
	g.capToRate(rate, g.rtt.min, slack)
	// A window that is within it has no more in flight than the rate: pacing only spreads that.
	g.caps.within = own.Cwnd > g.ctl.Cwnd
	g.caps.bind = g.caps.bind || g.caps.within || g.rtt.srtt == 0 && own.PacingRate != g.ctl.PacingRate
	g.timers.scheduleAt(g, g.caps.hint.At.Add(g.hintLifetime()+1))
}

// freshHint is how old a hint may be at the most and still say how the path is:
// the longer of this and three smoothed round trips.
const freshHint = time.Second

func (g *group) hintLifetime() time.Duration { return max(freshHint, 3*g.rtt.srtt) }

// hintIsFresh reports whether g has heard of its path lately.
func (g *group) hintIsFresh(now cc.Time) bool {
	return g.caps.hinted && g.caps.hint.Age(now) <= g.hintLifetime()
}

// addHint takes note of a hint, unless g knows a newer one. So much is delivered to other
// groups of its host.
func (g *group) addHint(h cc.Hint, others cc.Rate) {
	if c := &g.caps; !c.hinted || h.At >= c.hint.At {
		c.hint, c.hinted = h, true
		c.check.addHint(&h, others)
		c.sound = c.check.correctedHint(h)
		if c.hintCap > 0 { // which does not wait for an event
			g.timers.scheduleAt(g, h.At)
		}
	}
}

// checkHint holds the newest hint against an acknowledgement, of which the queue on the
// way back is taken off.
func (g *group) checkHint(a *cc.Ack) {
	c := &g.caps
	if !c.hinted || !g.hintIsFresh(a.Now) {
		c.check.since = 0
		return
	}
	changed := c.check.onAck(acked{
		now: a.Now, forward: a.RTT - a.ReverseQueue, srtt: a.SRTT, uses: g.hintPart(),
		delivered: g.delivered.total, free: g.isUnboundByHint(),
	})
	if changed {
		c.sound = c.check.correctedHint(c.hint)
		a.State.Hint = &c.sound
	}
}

// isUnboundByHint reports whether something other than hints keeps g from sending more: the
// application, the receiver, the transport, or an algorithm that knows of no hints.
func (g *group) isUnboundByHint() bool {
	idle := g.wanting == 0 && g.inflight+g.mss <= g.memberWindow()
	return idle || g.limitedBelow || !g.caps.within && !slices.Contains(g.spec.Needs, cc.NeedsHints)
}

// hintPart is the part of what hints say for which g goes.
func (g *group) hintPart() float64 {
	if g.caps.within {
		return g.caps.hintCap
	}
	if part := g.params["usable_fraction"]; part > 0 { // NACC's
		return part
	}
	return 1
}
