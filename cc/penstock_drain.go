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
	ownProbeDepth   = 0.75 // where the question is whether others fill the queue: they leave less than this of it
)

// drainInterval is the interval of drainings.
func (p *penstock) drainInterval() time.Duration {
	every := ownDrainEvery
	for every < ownDrainBases*p.base.extreme() || p.rivalQueue.link != 0 && every < shareDrains*p.srtt {
		every *= 2
	}
	return every
}

// isDrainDue is whether to drain now: not where the queue was empty just before.
func (p *penstock) isDrainDue(now Time) bool {
	if now < p.next || p.train.from != 0 || p.besideSeen { // the queue of rivals does not go for ours
		return false
	}
	every := p.drainInterval()
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
// it may have been a flow that began. It is part of the path, but where it is long and
// leaves us less than a share of the link; there a trial tells.
func (p *penstock) checkDrainEnd(a Ack) {
	left := a.sentTime()
	if a.RTT > 0 && left >= p.drainFrom && (p.drainLeft == 0 || a.RTT-p.reverse < p.drainLeft) {
		p.drainLeft = a.RTT - p.reverse
	}
	if left < p.drainFrom.Add(p.base.extreme()) && a.Now < p.drainEnd {
		return
	}
	p.phase, p.empty, p.drained = ownTracking, a.Now, a.Now
	if p.competes && p.aloneOnEdge.is {
		p.train = ackTrain{from: a.Now, queued: p.drainLeft}
	}
	first := p.doubted
	p.doubted = 0
	switch {
	case p.drainLeft <= p.base.extreme()+p.emptyThreshold():
	case p.rivalQueue.link != 0:
		p.beginTrial(a.Now, p.drainLeft)
	case first == 0:
		p.doubted = p.drainLeft
		p.scheduleDrain(a.Now, a.Now.Add(ownRejoin))
	case p.competes && min(first, p.drainLeft) > p.longestOwnRTT() && p.held < shareOfLink*p.rivalQueue.rate:
		p.beginTrial(a.Now, p.drainLeft)
	default:
		p.resetBase(a.Now, min(first, p.drainLeft))
	}
}
