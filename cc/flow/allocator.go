package flow

import (
	"cmp"

	"github.com/penstock-net/penstock/cc"
)

// fewMembers is among how many active members a window is divided with each change: it
// costs about as much as the report. Among more it is divided once in a tick, or four
// times in a round trip if that is less often: each acknowledges about once in that time.
// Before that it is divided when one in so many is new: each of these uses what the last
// division would have left to one.
const fewMembers = 8

// allocator divides a group's window among its active members.
type allocator struct {
	members  []*member // those that are active, by priority, then by id
	tiers    []tier    // as the last division left them, in the same order
	fresh    int       // of them, those that contend and that the last division did not know, or not as such
	turn     uint64    // shifts the odd pairs of segments from member to member
	odd      bool      // there are some: the next turn shifts them
	turnEnds cc.Time   // when the next one begins
}

// tier is what a division left of the window to the members of one priority: a pool for
// so many weights that contend, of all that are active.
type tier struct {
	priority              int
	pool, weights, active cc.Bytes
}

func compareMembers(a, b *member) int {
	return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.id, b.id))
}

// divideWindow divides window among the members. In this order, each has
//
//   - its floor, two segments or what its MinRate takes;
//   - then, the lowest Priority first and before all others: a Guarantee its
//     Target, by weighted max-min where that is more than there is;
//   - the others their weighted max-min share of the rest;
//   - and a Guarantee what they leave, until it has a little more than its Target.
//
// What a member that does not contend leaves unused is lent to the others. The dues add
// up to the window, or to the floors. A part of the window that a rate does not let
// anybody fill, unpaced, is not given above targets.
func (a *allocator) divideWindow(window, unpaced cc.Bytes) {
	a.tiers = a.tiers[:0]
	spare := max(0, window-reserveFloors(a.members, window))
	for from := 0; from < len(a.members); {
		to, targets := from, false
		for ; to < len(a.members) && a.members[to].priority == a.members[from].priority; to++ {
			targets = targets || a.members[to].goal > 0
		}
		equals := a.members[from:to]
		if targets {
			spare, _ = fillUpTo(equals, toTarget, spare)
		}
		left, t := fillUpTo(equals, toMost, spare)
		t.priority = equals[0].priority
		for _, m := range equals {
			t.active += m.weight
		}
		a.tiers = append(a.tiers, t)
		spare = left
		if targets { // above them there is nothing to give where the rate, not the window, is what is short
			idle := min(spare, unpaced)
			left, _ = fillUpTo(equals, aboveTarget, spare-idle)
			spare = idle + left
		}
		from = to
	}
	a.cutToPairs()
}

// reserveFloors has each member due its floor, and returns the sum: at most the window, or two
// segments each.
func reserveFloors(members []*member, window cc.Bytes) (sum cc.Bytes) {
	var above cc.Bytes // two segments each
	for _, m := range members {
		sum += m.least
		above += max(0, m.least-m.segments)
	}
	if over := sum - window; over > 0 && above > 0 {
		part := float64(max(0, above-over)) / float64(above)
		sum = 0
		for _, m := range members {
			if m.least > m.segments {
				kept := cc.Bytes(part * float64(m.least-m.segments))
				m.least = m.segments + kept - kept%m.unit
			}
			sum += m.least
		}
	}
	for _, m := range members {
		m.due = m.least
	}
	return sum
}

// round says up to what fill raises dues, and whose.
type round uint8

const (
	toTarget    round = iota // the Guarantees, up to their targets
	toMost                   // the others, up to what they can use
	aboveTarget              // the Guarantees once more, up to what they may use
)

// boundOf returns up to what r raises c's due; 0: not at all.
func (r round) boundOf(c *allocation) cc.Bytes {
	switch {
	case r == toTarget && c.goal > 0:
		return min(c.goal, c.most)
	case r == toMost && c.goal == 0, r == aboveTarget && c.goal > 0:
		return c.most
	}
	return 0
}

// level is what members are due for each weight. As a rule they are alike, and it need
// not be computed again.
type level struct {
	pool, weights cc.Bytes
	weight, of    cc.Bytes // of is the level of weight
}

func (l *level) dueFor(weight cc.Bytes) cc.Bytes {
	if weight != l.weight {
		l.weight, l.of = weight, l.pool*weight/l.weights
	}
	return l.of
}

// fillUpTo raises what members are due by spare at most: to a common level, times their
// weights, but nobody below what it was due before nor above its cap (water-filling).
// Each pass settles those on one side of the level: as a rule there are two or three.
// It returns what is left, and the pool for those whom the level alone bounds.
func fillUpTo(members []*member, r round, spare cc.Bytes) (left cc.Bytes, t tier) {
	pool, weights := spare, cc.Bytes(0)
	for _, m := range members {
		m.cap = r.boundOf(&m.allocation)
		if m.open = m.cap > m.due; m.open {
			pool += m.due
			weights += m.weight
		}
	}
	for weights > 0 {
		l := level{pool: pool, weights: weights}
		var below, above cc.Bytes // by how much the level misses their dues and exceeds their caps
		for _, m := range members {
			if m.open {
				due := l.dueFor(m.weight)
				below += max(0, m.due-due)
				above += max(0, due-m.cap)
			}
		}
		for _, m := range members {
			if !m.open {
				continue
			}
			switch due := l.dueFor(m.weight); {
			case below == 0 && above == 0:
				m.due = due
				continue
			case below >= above && due < m.due:
			case below < above && due > m.cap:
				m.due = m.cap
			default:
				continue
			}
			m.open = false
			pool -= m.due
			weights -= m.weight
		}
		if below == 0 && above == 0 {
			return 0, tier{pool: pool, weights: weights}
		}
	}
	left = max(0, pool)
	return left, tier{pool: left}
}

// cutToPairs makes shares of the dues: whole pairs of segments for those that contend. The odd
// pairs that this leaves go round from member to member as turn counts up, slowly: a
// window that changed with each report would send in bursts.
func (a *allocator) cutToPairs() {
	var odd cc.Bytes
	n := 0
	for _, m := range a.members {
		if m.wants {
			odd += m.due - m.wholePairs() + 1 // dues are cut to whole bytes
			n++
		}
	}
	a.odd = n > 1 && odd >= ackedTogether*cc.DefaultMSS
	place := 0 // among those that contend, shifted
	if n > 0 {
		place = int(a.turn % uint64(n))
	}
	for _, m := range a.members {
		switch {
		case !m.wants:
			m.share = a.shareIfActive(&m.allocation)
			m.due = m.share
		case n == 1: // the window is long enough for another segment to follow
			m.share = max(m.due-m.due%m.unit, m.least)
		default:
			m.share = m.wholePairs()
			if pair := ackedTogether * m.unit; cc.Bytes(place) < odd/pair {
				m.share += pair
			}
			if place++; place == n {
				place = 0
			}
		}
	}
}

// shareIfActive is what a member that does not contend, or was not active when the window was
// last divided, would have if it contended; among many at most fewMembers times what it
// would have if all did. A thousand that take turns, each done before the next division,
// would otherwise have the window each.
func (a *allocator) shareIfActive(c *allocation) cc.Bytes {
	t := a.tierOf(c.priority)
	weights := max(t.weights+c.weight, t.active/fewMembers)
	share := max(c.due, (t.pool+c.due)*c.weight/weights, c.goal, c.floor)
	share = min(share, max(c.bound, c.floor))
	return max(share-share%c.unit, c.floor)
}

// tierOf is what there is for members of a priority.
func (a *allocator) tierOf(priority int) (t tier) {
	for i, each := range a.tiers {
		switch {
		case each.priority == priority:
			return each
		case each.priority > priority: // all that those behind it have
			for _, behind := range a.tiers[i:] {
				t.pool += behind.pool
			}
			return t
		case each.weights == 0: // what those before it leave
			t.pool = each.pool
		default:
			t.pool = 0
		}
	}
	return t
}

// giveWhole has the window be one member's.
func (a *allocator) giveWhole(c *allocation, window cc.Bytes) {
	c.due, c.share = window, window
	t := tier{priority: c.priority, pool: window, weights: c.weight}
	if !c.wants {
		t.pool, t.weights = max(0, window-c.used), 0
	}
	a.tiers = append(a.tiers[:0], t)
}
