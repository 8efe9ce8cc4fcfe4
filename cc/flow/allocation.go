package flow

import "github.com/penstock-net/penstock/cc"

// floorSegments is what every member of a group may have in flight however small its
// share: nobody starves, at the price of at most that much per member above the window.
const floorSegments = 2

// ackedTogether segments are acknowledged at once (RFC 9293 §3.8.6.3): one by itself at
// the end of a window waits for tens of milliseconds at the receiver. Its round trip
// would tell of a queue that is not there.
const ackedTogether = 2

// allocation is what a member may have of its group's window. Bytes are as they count there.
type allocation struct {
	weight   cc.Bytes
	priority int     // lower ones come first
	target   cc.Rate // what it has before others of its priority share the rest; 0: nothing
	ceiling  cc.Rate // what it never exceeds; 0: any
	own      cc.Rate // of that, what is not the whole group's: its own pacer keeps it

	// In and out of divide.
	wants    bool     // it contends: it can use more than it has
	used     cc.Bytes // in flight; all that one which does not contend can use
	floor    cc.Bytes // whatever the others want
	least    cc.Bytes // of the floor, what it can use
	goal     cc.Bytes // before others of its priority share the rest; 0: it has none
	bound    cc.Bytes // all it may use
	most     cc.Bytes // all it can use: bound, or used if it does not contend
	unit     cc.Bytes // a segment
	segments cc.Bytes // floorSegments of them
	due      cc.Bytes // what the window gives it
	share    cc.Bytes // what it may have in flight; if it does not contend, as if it did
	cap      cc.Bytes // scratch of fill: most, or goal
	open     bool     // scratch of fill: its level is not settled yet
}

// satisfied is how far above its Target a Guarantee may get (Janus' 1+ε).
const satisfied = 1.1

func satisfiedRate(target cc.Rate) cc.Rate { return cc.Rate(satisfied * float64(target)) }

// newAllocation is what Terms ask for.
func (t Terms) newAllocation() allocation {
	a := allocation{
		weight: cc.Bytes(max(1, t.Weight)), priority: t.Priority, ceiling: t.maxAllowedRate(), own: t.ConnectionRate,
	}
	if t.Class == Guarantee && t.Target > 0 {
		a.target = lesserRate(t.Target, a.ceiling)
		a.ceiling = lesserRate(a.ceiling, satisfiedRate(a.target))
		a.own = lesserRate(a.own, satisfiedRate(a.target))
	}
	return a
}

// round says up to what fill raises dues, and whose.
type round uint8

const (
	toTarget    round = iota // the Guarantees, up to their targets
	toMost                   // the others, up to what they can use
	aboveTarget              // the Guarantees once more, up to what they may use
)

func (c *allocation) boundFor(r round) cc.Bytes {
	switch {
	case r == toTarget && c.goal > 0:
		return min(c.goal, c.most)
	case r == toMost && c.goal == 0, r == aboveTarget && c.goal > 0:
		return c.most
	}
	return 0
}

// wholePairs is what c is due in whole pairs of segments, or what it has at least.
func (c *allocation) wholePairs() cc.Bytes {
	return max(c.due-c.due%(ackedTogether*c.unit), c.least)
}
