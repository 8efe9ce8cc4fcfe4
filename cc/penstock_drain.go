package cc

import "time"

// A draining makes the window smaller for two round trips, so that the queue runs empty. The least round trip after it
// is the path's. A queue that stays is not ours.

const (
	// The interval of drainings is drainEvery, doubled until it is at least drainBases bases. It begins for all flows at
	// the same times. The base is the least round trip of two intervals.
	drainEvery       = 5 * time.Second
	drainBases       = 50
	baseSeenWithin   = time.Millisecond // a queueing delay up to this shows the base
	drainRejoinAfter = time.Second      // from the last draining to one that joins another flow's
	drainDepth       = 0.5              // bases that the window covers: enough to empty a queue of several flows
	drainTargets     = 2                // targets below the base suffice on a long path: bases are not wrong by more
	rivalDrainDepth  = 0.75             // is drainDepth where others may fill the queue: they leave us less than this
	// drainTrialMostRTT is the longest drainedRTT that leads to a trial by itself: a longer one may be an outage.
	drainTrialMostRTT = 500 * time.Millisecond
)

// drainInterval returns the time between drainings. It is longer beside others.
func (p *penstock) drainInterval() time.Duration {
	every := drainEvery
	for every < drainBases*p.base.extreme() || p.rivalry.holds && every < holdDrainRTTs*p.srtt {
		every *= 2
	}
	return every
}

// checkDrainTime reports whether to drain now, and plans the next draining when its time has come. There is none where
// the queue was empty within half an interval, nor beside counted rivals, because their queue stays. A time that was
// planned for a longer base is planned anew, because the base would expire before.
func (p *penstock) checkDrainTime(now Time) bool {
	every := p.drainInterval()
	if p.nextDrain.Sub(now) > 2*every {
		p.nextDrain = p.nextDrainTime(now, every)
	}
	if now < p.nextDrain || p.besideCounted {
		return false
	}
	p.nextDrain = p.nextDrainTime(now, every)
	return now.Sub(p.emptyAt) > every/2
}

// nextDrainTime returns the end of the present interval. All flows of an edge drain then, because none of them empties
// the queue by itself. A window that a host is let send in drains half an interval later. Its round trips meet the
// queue that our flows to the host make, and it must not shrink for that.
func (p *penstock) nextDrainTime(now Time, every time.Duration) Time {
	past := time.Duration(now) % every
	if p.receives {
		past = (past + every/2) % every
	}
	return now.Add(every - past)
}

// noteShorterPath reacts to a round trip below the base. Another flow has drained the queue then, and the base never
// was the path's: this flow drains as well. The idle time, too, was measured with a queue that counted as empty.
func (p *penstock) noteShorterPath(a Ack, forwardRTT time.Duration) {
	if p.phase == penstockTracking && a.Delivered > p.objectEnd && forwardRTT < p.base.extreme()-baseSeenWithin &&
		a.Now.Sub(p.drainedFrom) > drainRejoinAfter {
		p.beginDraining(a.State, drainDepth)
	}
	if forwardRTT < p.base.extreme()-p.emptyThreshold() {
		p.queueTarget.idle, p.queueTarget.total = 0, 0
	}
}

// noteEmptyQueue notes when the queue is empty. An empty queue ends a hold and CUBIC's window, because no other flow
// fills it. What leaves with next to nothing in flight finds no queue of ours, whatever its round trip is.
func (p *penstock) noteEmptyQueue(a Ack) {
	paused := a.Sent.At > p.drainEndedAt && p.toPackets(a.Sent.Inflight) <= leastDrainingCwnd
	if p.queueDelay <= baseSeenWithin || paused && p.phase == penstockTracking {
		p.emptyAt = a.Now
	}
	r := &p.rivalry
	if p.queueDelay <= p.emptyThreshold() && a.sentTime() >= r.showsFrom && (r.holds || r.cubicActive) {
		r.release(r.restUntil)
	}
}

func (p *penstock) beginDraining(s State, depth float64) {
	p.drainDepth = depth
	p.phase, p.heldRate = penstockDraining, p.rate
	p.drainedFrom, p.drainedRTT = s.Now.Add(s.SRTT), 0
	p.drainDeadline = s.Now.Add(p.drainInterval())
	p.emptyAt = s.Now
}

// checkDrainEnd ends a draining once a round trip has passed with the queue drained.
func (p *penstock) checkDrainEnd(a Ack) {
	left := a.sentTime()
	if a.RTT > 0 && left >= p.drainedFrom && (p.drainedRTT == 0 || a.RTT-p.reverseQueue < p.drainedRTT) {
		p.drainedRTT = a.RTT - p.reverseQueue
	}
	if left >= p.drainedFrom.Add(p.base.extreme()) || a.Now >= p.drainDeadline {
		p.phase, p.emptyAt, p.drainEndedAt = penstockTracking, a.Now, a.Now
		p.judgeDrainedRTT(a.Now)
	}
}

// judgeDrainedRTT draws conclusions from drainedRTT. If it is above the base, a queue stays that is not ours. Where
// that leaves the edge less than half of the link, a trial finds the cause. Otherwise it may be a flow that has just
// begun, and a second draining follows soon. What stays then, too, is part of the path.
func (p *penstock) judgeDrainedRTT(now Time) {
	rtt, first := p.drainedRTT, p.doubtedRTT
	p.doubtedRTT = 0
	switch {
	case rtt <= p.base.extreme()+p.emptyThreshold():
	case p.rivalry.holds:
		p.beginTrial(now, rtt)
	case p.competes && p.isEdgeShort() && now > p.rivalry.restUntil &&
		(rtt < drainTrialMostRTT || p.rivalry.roundsAbove > 1):
		p.beginTrial(now, rtt)
	case first == 0:
		p.doubtedRTT = rtt
		p.nextDrain, p.emptyAt = p.nextDrainTime(now, drainEvery), now.Add(-p.drainInterval()) // even if it was empty
	default:
		p.resetBase(now, min(first, rtt))
	}
}

// resetBase replaces the base.
func (p *penstock) resetBase(now Time, base time.Duration) {
	p.base.reset()
	p.base.addSample(now, base, 2*p.drainInterval())
}
