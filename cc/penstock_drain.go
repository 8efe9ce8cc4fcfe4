package cc

import "time"

// A draining has the window shrink for two round trips, so that the queue runs empty: the least
// round trip is the path's then, and what stays is not ours.

const (
	// The base is the least round trip of two draining intervals: ownDrainEvery, doubled
	// until it is at least ownDrainBases of it. All flows have the same beginnings of them.
	ownDrainEvery = 5 * time.Second
	ownBaseSeen   = time.Millisecond // above the base, and the base has been seen
	ownDrainBases = 50
	ownRejoin     = time.Second // between drainings that others began, or that settle a doubt
	ownDrainDepth = 0.5         // of what the path delivers in the base: enough for several that drain at once
	// ownDrainTargets of queue less are enough on a long path, as bases are not wrong by more.
	ownDrainTargets = 2
	// ownDrainMost is the longest drained round trip that asks for a trial by itself: more may be an outage.
	ownDrainMost  = 500 * time.Millisecond
	ownProbeDepth = 0.75 // where the question is whether others fill the queue: they leave less than this of it
)

// drainInterval is the interval of drainings.
func (p *penstock) drainInterval() time.Duration {
	every := ownDrainEvery
	for every < ownDrainBases*p.base.extreme() || p.rivalry.holds && every < shareDrains*p.srtt {
		every *= 2
	}
	return every
}

// isDrainDue is whether to drain now: not where the queue was empty just before. What was planned for a base that
// proved too long is planned anew, because the base would expire before it.
func (p *penstock) isDrainDue(now Time) bool {
	every := p.drainInterval()
	if p.next.Sub(now) > 2*every {
		p.next = p.nextDrainTime(now, every)
	}
	if now < p.next || p.besideSeen { // the queue of rivals does not go for ours
		return false
	}
	p.next = p.nextDrainTime(now, every)
	return now.Sub(p.empty) > every/2
}

// nextDrainTime is the next of an interval: all flows of an edge drain then, since none of
// them empties the queue by itself. A window that a host is let send in drains half-way
// between: its round trips meet the queue that our flows to the host make, and it is
// not to shrink for that.
func (p *penstock) nextDrainTime(now Time, every time.Duration) Time {
	past := time.Duration(now) % every
	if p.receives {
		past = (past + every/2) % every
	}
	return now.Add(every - past)
}

func (p *penstock) beginDraining(s State, depth float64) {
	p.drainDepth = depth
	p.phase, p.held = ownDraining, p.rate
	p.drainFrom, p.drainLeft = s.Now.Add(s.SRTT), 0
	p.drainEnd = s.Now.Add(p.drainInterval())
	p.empty = s.Now
}

// checkDrainEnd ends it once a round trip has passed with the queue drained. Where that
// is as long as ever a second time, soon after, the queue is not ours: the first time
// it may have been a flow that began. It is part of the path, but where it leaves the edge
// less than half of the link; there a trial tells.
func (p *penstock) checkDrainEnd(a Ack) {
	left := a.sentTime()
	if a.RTT > 0 && left >= p.drainFrom && (p.drainLeft == 0 || a.RTT-p.reverse < p.drainLeft) {
		p.drainLeft = a.RTT - p.reverse
	}
	if left < p.drainFrom.Add(p.base.extreme()) && a.Now < p.drainEnd {
		return
	}
	p.phase, p.empty, p.drained = ownTracking, a.Now, a.Now
	first := p.doubted
	p.doubted = 0
	switch {
	case p.drainLeft <= p.base.extreme()+p.emptyThreshold():
	case p.rivalry.holds:
		p.beginTrial(a.Now, p.drainLeft)
	case p.competes && p.isEdgeShort() && a.Now > p.rivalry.rest && (p.drainLeft < ownDrainMost || p.rivalry.above > 1):
		p.beginTrial(a.Now, p.drainLeft)
	case first == 0:
		p.doubted = p.drainLeft
		p.scheduleDrain(a.Now, p.nextDrainTime(a.Now, ownDrainEvery))
	default:
		p.resetBase(a.Now, min(first, p.drainLeft))
	}
}

// resetBase forgets the base for another.
func (p *penstock) resetBase(now Time, base time.Duration) {
	p.base.reset()
	p.base.addSample(now, base, 2*p.drainInterval())
}

// scheduleDrain has the next draining be at that time, even though the queue was seen empty.
func (p *penstock) scheduleDrain(now, at Time) { p.next, p.empty = at, now.Add(-p.drainInterval()) }
