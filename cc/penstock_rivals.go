package cc

import (
	"math"
	"time"
)

const (
	edgeMemory = 500 * time.Millisecond // over which delivered bytes fade, to compare windows of the edge

	// A hold keeps holdShare of the link: a bit more than half, because the link is rated a bit low.
	holdShare     = 0.55
	holdMostRTTs  = 2 // a sample counts as no more than this many of the last round's shortest round trip
	holdDrainRTTs = 8 // round trips from one draining to the next, at least
	// A hold ends once a round's shortest round trip is holdRTTJump times the last round's: others are not so fast.
	holdRTTJump = 1.4
	// It ends at a sample of holdRTTStall times that: the link stands still. The link's rate is then divided by
	// holdStallDivisor, or half of it would be held again.
	holdRTTStall, holdStallDivisor = 3, 16
	// It ends once this part of what is held has not arrived, over four rounds: no other flow grows the queue.
	holdUndelivered = 0.25

	// A round trip above what our flows make stands after standRounds rounds of about the same, or after standTime.
	standRounds = 3
	standTime   = 300 * time.Millisecond
	// shortEdgePart of the link's rate is more than the edge delivers while others fill the queue.
	shortEdgePart = 0.5

	// A trial tells nothing if the window grows by less than trialGrowth of itself. We are alone if the round trip grows
	// by trialAlonePart of the window's growth. The path is longer if it grows by trialPathGrowth of itself at most.
	trialGrowth     = 0.5
	trialAlonePart  = 0.9
	trialPathGrowth = 1. / 16
	// After a hold that failed there is no trial for trialRest, doubled for each failure in a row, up to 32 s.
	trialRest          = time.Second
	trialMostDoublings = 5
)

// rivalry is what is known of flows under no window of ours. Where the round trip stands above what our flows make,
// and the edge delivers less than half of what the link did, a trial finds the cause. The window becomes what half of
// the link has in flight at this round trip. On a longer path the queue does not grow then. On a slower link the round
// trip grows as the window does. Something between shows others: half of the link is held.
//
// A hold ends where the queue is empty, where the round trip jumps, and where it grows from round to round, because a
// link alone with us delivers less than is held. The zero value knows no link.
type rivalry struct {
	link     linkRate
	failures int // holds in a row that failed

	round          round
	leastRTT       time.Duration // shortest of this round; 0: none yet
	mostRTT        time.Duration // longest of this round
	lastRTT        time.Duration // shortest of the round before
	roundBegan     Time
	roundDelivered Bytes // Delivered when the round began
	roundsAbove    int   // rounds in a row with a round trip that stands above what our flows make
	aboveSince     Time  // when the first of them ended

	holds       bool          // a trial runs, or half of the link is held
	edgePart    float64       // our part of that half: of what the edge delivers
	undelivered float64       // part of what is held that did not arrive, mean of about four rounds
	cubicActive bool          // a loss has put CUBIC's window in force: the most that is held, or else the least window
	rttBefore   time.Duration // round trip before the trial; 0: no trial runs
	cwndBefore  float64       // packets, before the trial
	showsFrom   Time          // what leaves after this shows the effect of the trial
	formerBase  time.Duration // the base before a trial lengthened it; 0: the new one is not in doubt
	restUntil   Time          // no trial before
}

// release ends a trial, a hold and CUBIC's window. What the link carries stays known.
func (r *rivalry) release(restUntil Time) {
	*r = rivalry{link: r.link, round: r.round, restUntil: restUntil, failures: r.failures}
}

// fail ends a hold in which no other flow filled the queue.
func (r *rivalry) fail(now Time) {
	restUntil := now.Add(trialRest << r.failures)
	r.failures = min(r.failures+1, trialMostDoublings)
	r.release(restUntil)
}

// isQuiet reports whether nothing suggests that others fill the queue.
func (r *rivalry) isQuiet() bool { return r.roundsAbove == 0 && !r.holds && !r.cubicActive }

// longestAloneRTT returns the longest round trip that our flows make if no others send.
func (p *penstock) longestAloneRTT() time.Duration {
	target := p.queueTarget.targetDelay(max(p.rate, p.rivalry.link.rate()), p.base.extreme().Seconds())
	return p.base.extreme() + time.Duration(aloneQueueTargets*target*float64(time.Second))
}

// isEdgeShort reports whether the edge delivers less than half of what the link did. It compares all windows of the
// edge, so that those that share a link do not take each other for rivals.
func (p *penstock) isEdgeShort() bool {
	return p.recentEdge < shortEdgePart*p.rivalry.link.rate()*edgeMemory.Seconds()
}

// watchForRivals takes in a round trip while tracking, less its way back.
func (p *penstock) watchForRivals(a Ack, rtt time.Duration) {
	r := &p.rivalry
	if r.holds && rtt > holdRTTStall*r.lastRTT {
		r.link.peak /= holdStallDivisor
		r.fail(a.Now)
		return
	}
	if a.sentTime() < r.showsFrom {
		r.leastRTT, r.round.start = 0, a.Now
		return
	}
	if r.leastRTT == 0 {
		r.leastRTT, r.mostRTT = rtt, rtt
	}
	r.leastRTT, r.mostRTT = min(r.leastRTT, rtt), max(r.mostRTT, rtt)
	if !r.round.endsWith(a) {
		return
	}
	delivered := float64(a.Delivered-r.roundDelivered) / max(a.Now.Sub(r.roundBegan), minDivisor).Seconds()
	r.roundDelivered, r.roundBegan = a.Delivered, a.Now
	least, last := r.leastRTT, r.lastRTT
	r.leastRTT, r.lastRTT = 0, least
	p.judgeRound(a, least, last, delivered)
}

// judgeRound decides at the end of a round whether to begin or end a trial or a hold. least is the shortest round trip
// of the round, last that of the one before. delivered is the rate in bytes/s.
func (p *penstock) judgeRound(a Ack, least, last time.Duration, delivered float64) {
	r := &p.rivalry
	switch alone := least <= p.longestAloneRTT(); {
	case r.formerBase != 0 && !alone: // the longer base was a queue
		p.resetBase(a.Now, r.formerBase)
		p.heldUntil = 0
		r.release(a.Now.Add(p.drainInterval()))
	case r.rttBefore != 0:
		p.endTrial(a, least)
	case alone:
		r.roundsAbove, r.formerBase = 0, 0
		if a.CwndLimited && !r.holds {
			r.link.peak = max(p.rate, r.link.peak*math.Exp(-least.Seconds()/linkMemory.Seconds()))
		}
	case r.holds:
		held := holdShare * r.edgePart * r.link.rate()
		if r.cubicActive {
			held = min(held, p.cubic.cwnd*float64(p.mss)/least.Seconds())
		}
		r.undelivered += (max(0, 1-delivered/held) - r.undelivered) / 4
		if float64(least) > holdRTTJump*float64(last) || r.undelivered > holdUndelivered {
			r.fail(a.Now)
		}
	default:
		if r.roundsAbove++; r.roundsAbove == 1 || !isAboutEqual(least, last) || !isAboutEqual(r.mostRTT, least) {
			r.roundsAbove, r.aboveSince = 1, a.Now
		}
		stands := r.roundsAbove >= standRounds || r.roundsAbove > 1 && a.Now.Sub(r.aboveSince) > standTime
		if stands && p.isEdgeShort() && a.Now > r.restUntil {
			p.beginTrial(a.Now, least)
		}
	}
}

// isAboutEqual reports whether two round trips differ by no jump.
func isAboutEqual(a, b time.Duration) bool {
	return float64(a) <= holdRTTJump*float64(b) && float64(b) <= holdRTTJump*float64(a)
}

// answerLoss puts CUBIC's window in force, because another flow may be filling the queue. Once that window is the
// larger one, a draining of our part of the queue shows whether another flow does.
func (p *penstock) answerLoss(l Loss) {
	r := &p.rivalry
	switch {
	case !r.cubicActive:
		r.cubicActive = true
		p.cubic.cwnd, p.cubic.ssthresh = p.cwnd, p.cwnd
	case !r.holds && p.phase == penstockTracking && p.cubic.cwnd >= p.cwnd &&
		l.Now.Sub(p.drainedFrom) > p.drainInterval():
		p.beginDraining(l.State, rivalDrainDepth)
	}
}

// beginTrial begins a trial at a round trip of rtt.
func (p *penstock) beginTrial(now Time, rtt time.Duration) {
	r := &p.rivalry
	if !r.holds {
		r.holds, r.cubicActive, r.edgePart = true, false, min(1, p.recentBytes/max(p.recentEdge, 1))
	}
	r.rttBefore, r.cwndBefore = rtt, p.cwnd
	r.lastRTT = max(r.lastRTT, rtt)
	r.showsFrom = now.Add(rtt)
	r.leastRTT, r.round.start = 0, now
}

// endTrial ends a trial. least is the shortest round trip after the window has grown.
func (p *penstock) endTrial(a Ack, least time.Duration) {
	r := &p.rivalry
	rttGrowth := float64(least-r.rttBefore) / float64(r.rttBefore)
	r.rttBefore, r.lastRTT = 0, least
	switch cwndGrowth := p.cwnd/r.cwndBefore - 1; {
	case cwndGrowth < trialGrowth:
	case rttGrowth >= trialAlonePart*cwndGrowth:
		r.fail(a.Now)
	case math.Abs(rttGrowth) <= trialPathGrowth:
		r.formerBase, r.holds = p.base.extreme(), false
		p.resetBase(a.Now, least)
		_, long := p.rateWindows()
		p.heldRate, p.heldUntil = r.link.peak, a.Now.Add(long)
		r.showsFrom = a.Now.Add(least)
	case !p.competes:
		r.release(a.Now.Add(p.drainInterval()))
	default:
		r.link.forgetChange()
		r.failures = 0
	}
}

// widenForRivals returns the window beside others. without is the window if there were none. Both are in packets.
func (p *penstock) widenForRivals(without float64) float64 {
	r := &p.rivalry
	switch {
	case p.phase == penstockDraining:
	case r.holds:
		rtt := min(p.base.extreme()+p.queueDelay, holdMostRTTs*r.lastRTT)
		if r.rttBefore != 0 {
			rtt = min(rtt, r.rttBefore)
		}
		half := holdShare * r.edgePart * r.link.rate() * (rtt + p.reverseQueue).Seconds() / float64(p.mss)
		if r.cubicActive {
			half = min(half, p.cubic.cwnd)
		}
		return max(half, without)
	case r.cubicActive:
		return max(p.cubic.cwnd, without)
	}
	return without
}

// countedRivalsPart is how much is in flight for each byte that counted rivals have in flight. Below 1, windows of two
// such edges that follow each other shrink until the queue is our own target's again.
const countedRivalsPart = 7. / 8

// widenForCountedRivals returns the window beside rivals that the edge counts. without is the window if there were
// none. Both are in packets. The window grows by what is acknowledged at most, as in slow start.
func (p *penstock) widenForCountedRivals(a Ack, without float64) float64 {
	if p.phase == penstockDraining || !p.competes {
		return without
	}
	theirs := float64(a.RivalRate.BytesIn(p.srtt)) / float64(p.mss)
	ours := min(countedRivalsPart*theirs, p.cwnd+p.toPackets(a.Acked))
	p.besideCounted = ours > without
	return max(ours, without)
}
