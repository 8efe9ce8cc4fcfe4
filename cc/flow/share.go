package flow

import "github.com/penstock-net/penstock/cc"

// floorSegments is what every member of a macroflow may have in flight however
// small its share: nobody starves (at the price of at most that much per
// member above the window).
const floorSegments = 2

func (f *Flow) floor() cc.Bytes { return f.route.shrink(floorSegments * f.mss()) }

// ownInflight is what the algorithm's window has put in flight: where only the
// members' floors keep more there, that is not the algorithm's to take back, and
// one that waited for it to go (BBR's ProbeRTT) would wait for ever.
func (m *macroflow) ownInflight() cc.Bytes {
	if m.inflight <= m.ctl.Cwnd {
		return min(m.inflight+m.lent(false), m.ctl.Cwnd)
	}
	for _, f := range m.members {
		if f.counted() > f.floor() {
			return m.inflight
		}
	}
	return m.ctl.Cwnd
}

// claim is what a member may have of its macroflow's window, in bytes; scratch
// of divide, valid until the next call.
type claim struct {
	contends bool     // it wants more than it has; otherwise it is due what it uses, at most
	open     bool     // scratch of fill: its level is not settled yet
	least    cc.Bytes // whatever the others want
	target   cc.Bytes // before others share the rest; 0: it has none
	most     cc.Bytes // all it can or may use
	cap      cc.Bytes // most, or target: scratch of fill
	due      cc.Bytes // what the window gives it
	share    cc.Bytes // due in whole segments; 0 unless it contends
}

// allot divides the window among the members: those that contend now, and
// asking, which may be nil, as if it did.
func (m *macroflow) allot(now cc.Time, asking *Flow) {
	for _, f := range m.members {
		f.claim.contends = f == asking || f.contends(now)
	}
	m.divide()
}

// divide divides the window among the members, by the marks of who contends.
// In this order, each has
//
//   - its floor, two segments or what its MinRate takes;
//   - then, the lowest Priority first and before all others: a Guarantee its
//     Target, by weighted max-min where that is more than there is;
//   - the others their weighted max-min share of the rest;
//   - and a Guarantee what they leave, until it has a little more than its Target.
//
// What a member that does not contend leaves unused is lent to the others. The
// dues add up to the window, or to two segments for each; shares are the dues
// in whole segments, and the odd ones go to who is first in line. All of it is as
// bytes count in the window.
func (m *macroflow) divide() {
	if len(m.members) == 1 {
		c := &m.members[0].claim
		m.members[0].bound()
		c.due, c.share = m.window(), m.window()
		return
	}
	m.line()
	spare := m.window() - m.reserve()
	for from := 0; from < len(m.members) && spare > 0; {
		to, targets := from, false
		for ; to < len(m.members) && m.members[to].terms.Priority == m.members[from].terms.Priority; to++ {
			targets = targets || m.members[to].claim.target > 0
		}
		equals := m.members[from:to]
		if targets {
			spare = fill(equals, toTarget, spare)
		}
		spare = fill(equals, toMost, spare)
		if targets { // above them there is nothing to give where the algorithm's rate, not its window, is what is short
			idle := cc.Bytes(0)
			if !m.rateBound {
				idle = min(spare, m.unpaced())
			}
			spare = idle + fill(equals, aboveTarget, spare-idle)
		}
		from = to
	}
	m.cut()
}

// unpaced is the part of the window that the pacer does not let anybody fill.
func (m *macroflow) unpaced() cc.Bytes {
	if m.ctl.PacingRate == 0 || m.rtt.srtt == 0 {
		return 0
	}
	return max(0, m.ctl.Cwnd-m.ctl.PacingRate.BytesIn(m.rtt.srtt))
}

// reserve sets the bounds of all claims, has each due its floor, and returns
// the sum. The floors are at most the window together, or two segments each.
func (m *macroflow) reserve() cc.Bytes {
	var sum, above cc.Bytes // of the floors; of that, what they are above two segments
	for _, f := range m.members {
		f.bound()
		sum += f.claim.least
		above += max(0, f.claim.least-f.floor())
	}
	if over := sum - m.window(); over > 0 && above > 0 {
		part := float64(max(0, above-over)) / float64(above)
		sum = 0
		for _, f := range m.members {
			if c := &f.claim; c.least > f.floor() {
				kept := cc.Bytes(part * float64(c.least-f.floor()))
				c.least = f.floor() + kept - kept%f.mss()
			}
			sum += f.claim.least
		}
	}
	for _, f := range m.members {
		f.claim.due = f.claim.least
	}
	return sum
}

// bound sets what f's claim is at least and at most.
func (f *Flow) bound() {
	window := f.macro.window()
	c := &f.claim
	c.least, c.target, c.most = f.floor(), 0, window
	if f.terms.MinRate > 0 {
		c.least = max(c.least, f.roundUp(f.windowFor(f.terms.MinRate)))
	}
	if f.ceiling > 0 && f.known() {
		c.most = f.roundUp(f.windowFor(f.ceiling))
		if f.target > 0 {
			c.target = f.roundUp(f.windowFor(f.target))
		} else {
			c.most += f.floor() // its pacer lets that much go at once
		}
		c.most = max(c.most, f.floor())
	}
	if !c.contends {
		c.most = min(c.most, f.counted())
	}
	c.most = min(c.most, window)
	c.least = min(c.least, c.most)
}

// round says up to what fill raises dues, and whose.
type round uint8

const (
	toTarget    round = iota // the Guarantees, up to their targets
	toMost                   // the others, up to what they can use
	aboveTarget              // the Guarantees once more, up to what they may use
)

func (c *claim) upTo(r round) cc.Bytes {
	switch {
	case r == toTarget && c.target > 0:
		return min(c.target, c.most)
	case r == toMost && c.target == 0, r == aboveTarget && c.target > 0:
		return c.most
	}
	return 0
}

// level is what members are due for each weight; as a rule they are alike, and it
// need not be computed again.
type level struct {
	pool, weights cc.Bytes
	weight, of    cc.Bytes // of is the level of weight
}

func (l *level) due(weight cc.Bytes) cc.Bytes {
	if weight != l.weight {
		l.weight, l.of = weight, l.pool*weight/l.weights
	}
	return l.of
}

// fill raises what members are due by spare at most, and returns what it leaves:
// to a common level, times their weights, but nobody below what it was due
// before nor above its cap (water-filling). Each pass settles those on one side of
// the level: as a rule there are two or three.
func fill(members []*Flow, r round, spare cc.Bytes) cc.Bytes {
	pool, weights := spare, cc.Bytes(0)
	for _, f := range members {
		c := &f.claim
		c.cap = c.upTo(r)
		if c.open = c.cap > c.due; c.open {
			pool += c.due
			weights += f.weight
		}
	}
	for weights > 0 {
		l := level{pool: pool, weights: weights}
		var below, above cc.Bytes // by how much the level misses their dues and exceeds their caps
		for _, f := range members {
			if c := &f.claim; c.open {
				due := l.due(f.weight)
				below += max(0, c.due-due)
				above += max(0, due-c.cap)
			}
		}
		for _, f := range members {
			c := &f.claim
			if !c.open {
				continue
			}
			switch due := l.due(f.weight); {
			case below == 0 && above == 0:
				c.due = due
			case below >= above && due < c.due:
			case below < above && due > c.cap:
				c.due = c.cap
			default:
				continue
			}
			c.open = false
			pool -= c.due
			weights -= f.weight
		}
	}
	return max(0, pool)
}

// cut makes shares of the dues: whole segments, of which those that are left go
// to the first in line.
func (m *macroflow) cut() {
	left := m.window()
	var due, mss, whole cc.Bytes // whole segments in due; as a rule members are alike
	for _, f := range m.members {
		c := &f.claim
		c.share = 0
		if !c.contends {
			left -= c.due
			continue
		}
		if c.due != due || f.mss() != mss {
			due, mss = c.due, f.mss()
			whole = due - due%mss
		}
		c.share = max(whole, c.least)
		left -= c.share
	}
	for _, f := range m.members {
		if left < m.mss {
			return
		}
		if c := &f.claim; c.contends && c.due > c.share && left >= f.mss() {
			c.share += f.mss()
			left -= f.mss()
		}
	}
}
