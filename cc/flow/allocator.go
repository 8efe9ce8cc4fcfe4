package flow

import (
	"cmp"

	"github.com/penstock-net/penstock/cc"
)

// fewMembers is the number of active members up to which each change divides the window. That costs about as much as a
// report. With more members the window is divided once in a tick, or four times in a round trip if that is less often.
// Each member has about one acknowledgement in that time. The division comes earlier if one member in fewMembers is
// new, because each new one uses what the last division left to a single one.
const fewMembers = 8

// allocator divides a window among the active members of a group. It changes allocations only.
type allocator struct {
	active       []*member // by priority, then by id
	tiers        []tier    // results of the last division, by priority
	newcomers    int       // members that contend and did not in the last division
	pairTurn     uint64    // shifts the odd pairs of segments from member to member
	hasOddPairs  bool      // there are odd pairs: the next turn shifts them
	pairTurnEnds cc.Time   // when the next turn begins
}

// tier is what a division left to the members of one priority: a pool, divided by the weights of the members that
// contend. activeWeights includes those that do not.
type tier struct {
	priority                     int
	pool, weights, activeWeights cc.Bytes
}

// compareMembers orders members by priority, then by id.
func compareMembers(a, b *member) int {
	return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.id, b.id))
}

// allotWindow divides window among the active members. In this order, each gets
//
//   - its floor: two segments or what its MinRate takes;
//   - then, the lowest priority first and before all higher ones: a Guarantee its Target, by weighted max-min if there
//     is not enough;
//   - the others their weighted max-min share of the rest;
//   - and a Guarantee what they leave, until it has a little more than its Target.
//
// What a member that does not contend leaves unused goes to the others. The allotments add up to the window, or to the
// floors. unpaced is the part of the window that the pacing rate lets no member fill: it is not given above targets.
func (a *allocator) allotWindow(window, unpaced cc.Bytes) {
	a.tiers = a.tiers[:0]
	spare := max(0, window-reserveFloors(a.active, window))
	for from := 0; from < len(a.active); {
		to, targets := from, false
		for ; to < len(a.active) && a.active[to].priority == a.active[from].priority; to++ {
			targets = targets || a.active[to].targetBytes > 0
		}
		equals := a.active[from:to]
		if targets {
			spare, _ = fillUpTo(equals, toTarget, spare)
		}
		left, t := fillUpTo(equals, toUsable, spare)
		t.priority = equals[0].priority
		for _, m := range equals {
			t.activeWeights += m.weight
		}
		a.tiers = append(a.tiers, t)
		spare = left
		if targets { // what the pacing rate leaves unused is of no use above targets
			idle := min(spare, unpaced)
			left, _ = fillUpTo(equals, aboveTarget, spare-idle)
			spare = idle + left
		}
		from = to
	}
	a.cutToPairs()
}

// reserveFloors allots each member its usable floor and returns the sum: at most the window, or two segments each.
func reserveFloors(members []*member, window cc.Bytes) (sum cc.Bytes) {
	var above cc.Bytes // what floors exceed two segments each by
	for _, m := range members {
		sum += m.usableFloor
		above += max(0, m.usableFloor-m.minimum)
	}
	if over := sum - window; over > 0 && above > 0 {
		part := float64(max(0, above-over)) / float64(above)
		sum = 0
		for _, m := range members {
			if m.usableFloor > m.minimum {
				kept := cc.Bytes(part * float64(m.usableFloor-m.minimum))
				m.usableFloor = m.minimum + kept - kept%m.segment
			}
			sum += m.usableFloor
		}
	}
	for _, m := range members {
		m.allotted = m.usableFloor
	}
	return sum
}

// fillRound selects the members that fillUpTo raises, and up to what.
type fillRound uint8

// The rounds of a division.
const (
	toTarget    fillRound = iota // Guarantees, up to their targets
	toUsable                     // the others, up to what they can use
	aboveTarget                  // Guarantees again, up to what they can use
)

// boundOf returns up to what r raises c's allotment; 0: not at all.
func (r fillRound) boundOf(c *allocation) cc.Bytes {
	switch {
	case r == toTarget && c.targetBytes > 0:
		return min(c.targetBytes, c.usable)
	case r == toUsable && c.targetBytes == 0, r == aboveTarget && c.targetBytes > 0:
		return c.usable
	}
	return 0
}

// level is a pool per weight. Members mostly have equal weights, so the last result is cached.
type level struct {
	pool, weights                 cc.Bytes
	cachedWeight, cachedAllotment cc.Bytes
}

// allotmentFor returns what the level gives to a weight.
func (l *level) allotmentFor(weight cc.Bytes) cc.Bytes {
	if weight != l.cachedWeight {
		l.cachedWeight, l.cachedAllotment = weight, l.pool*weight/l.weights
	}
	return l.cachedAllotment
}

// fillUpTo raises the allotments of members by at most spare in all: to a common level times their weights, but none
// below its old allotment or above its cap (water-filling). Each pass fixes the members on one side of the level;
// mostly there are two or three passes. It returns what is left, and the pool for the members that only the level
// bounds.
func fillUpTo(members []*member, r fillRound, spare cc.Bytes) (left cc.Bytes, t tier) {
	pool, weights := spare, cc.Bytes(0)
	for _, m := range members {
		m.fillCap = r.boundOf(&m.allocation)
		if m.fillOpen = m.fillCap > m.allotted; m.fillOpen {
			pool += m.allotted
			weights += m.weight
		}
	}
	for weights > 0 {
		l := level{pool: pool, weights: weights}
		var below, above cc.Bytes // by how much the level misses allotments and exceeds caps
		for _, m := range members {
			if m.fillOpen {
				due := l.allotmentFor(m.weight)
				below += max(0, m.allotted-due)
				above += max(0, due-m.fillCap)
			}
		}
		for _, m := range members {
			if !m.fillOpen {
				continue
			}
			switch due := l.allotmentFor(m.weight); {
			case below == 0 && above == 0:
				m.allotted = due
				continue
			case below >= above && due < m.allotted:
			case below < above && due > m.fillCap:
				m.allotted = m.fillCap
			default:
				continue
			}
			m.fillOpen = false
			pool -= m.allotted
			weights -= m.weight
		}
		if below == 0 && above == 0 {
			return 0, tier{pool: pool, weights: weights}
		}
	}
	left = max(0, pool)
	return left, tier{pool: left}
}

// cutToPairs sets inflightLimit from the allotments: whole pairs of segments for members that contend. The odd pairs
// that remain go from member to member as pairTurn counts up. It does so slowly, because windows that change with each
// report would send in bursts.
func (a *allocator) cutToPairs() {
	var odd cc.Bytes
	n := 0
	for _, m := range a.active {
		if m.contends {
			odd += m.allotted - m.roundToPairs() + 1 // allotments are cut to whole bytes
			n++
		}
	}
	a.hasOddPairs = n > 1 && odd >= ackedTogether*cc.DefaultMSS
	place := 0 // among the members that contend, shifted by the turn
	if n > 0 {
		place = int(a.pairTurn % uint64(n))
	}
	for _, m := range a.active {
		switch {
		case !m.contends:
			m.inflightLimit = a.limitIfContending(&m.allocation)
			m.allotted = m.inflightLimit
		case n == 1: // another segment follows an odd one soon
			m.inflightLimit = max(m.allotted-m.allotted%m.segment, m.usableFloor)
		default:
			m.inflightLimit = m.roundToPairs()
			if pair := ackedTogether * m.segment; cc.Bytes(place) < odd/pair {
				m.inflightLimit += pair
			}
			if place++; place == n {
				place = 0
			}
		}
	}
}

// limitIfContending returns what a member could have in flight if it contended. It is for members that do not contend
// or were inactive at the last division. Among many it is at most fewMembers times what it would have if all
// contended: otherwise a thousand that take turns, each done before the next division, would have the whole window
// each.
func (a *allocator) limitIfContending(c *allocation) cc.Bytes {
	t := a.tierOf(c.priority)
	weights := max(t.weights+c.weight, t.activeWeights/fewMembers)
	share := max(c.allotted, (t.pool+c.allotted)*c.weight/weights, c.targetBytes, c.floor)
	share = min(share, max(c.allowed, c.floor))
	return max(share-share%c.segment, c.floor)
}

// tierOf returns what there is for members of a priority.
func (a *allocator) tierOf(priority int) (t tier) {
	for i, each := range a.tiers {
		switch {
		case each.priority == priority:
			return each
		case each.priority > priority: // it takes from all lower priorities
			for _, behind := range a.tiers[i:] {
				t.pool += behind.pool
			}
			return t
		case each.weights == 0: // it gets what higher priorities leave
			t.pool = each.pool
		default:
			t.pool = 0
		}
	}
	return t
}

// allotToOne gives the whole window to one member.
func (a *allocator) allotToOne(c *allocation, window cc.Bytes) {
	c.allotted, c.inflightLimit = window, window
	t := tier{priority: c.priority, pool: window, weights: c.weight}
	if !c.contends {
		t.pool, t.weights = max(0, window-c.used), 0
	}
	a.tiers = append(a.tiers[:0], t)
}
