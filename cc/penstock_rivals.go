package cc

import (
	"math"
	"time"
)

const (
	// edgeMemory is what bytes delivered fade over where windows of the edge are compared.
	edgeMemory = 500 * time.Millisecond

	// shareOfLink is held beside others: more than half, as links are worth a little less than they carry.
	shareOfLink = 0.55
	shareJump   = 1.4 // of the round trip, in one round: others do not fill a queue so fast
	shareStall  = 3   // round trips of the round before: a link that stands still, whatever is held
	shareFall   = 16  // of what the link is taken to carry is left after that: of more, half would be held again
	shareMost   = 2   // round trips of the round before count at most
	shareDrains = 8   // round trips at least from one draining to the next
	// shareLess of what is held is missing, over four rounds: no other flow grows the queue.
	shareLess = 0.25

	// A round trip stands after standRounds above what we make ourselves, or after standTime.
	standRounds = 3
	standTime   = 300 * time.Millisecond
	// standRate of the link is more than the edge delivers while others fill the queue.
	standRate = 0.5

	// trialRise is how much longer a trial must make the window to tell anything. Where the round trip grows by trialOwn
	// of that, we are alone. Where it grows by trialPath at most, the path is longer.
	trialRise = 0.5
	trialOwn  = 0.9
	trialPath = 1. / 16
	trialRest = time.Second // after a hold that failed, doubled trialFails times at most
	// trialFails bounds the rest at 32 s.
	trialFails = 5
)

// rivalry is what is known of flows under no window of ours. Where the round trip stands above what we make ourselves,
// and the edge delivers less than half of what the link did, a trial tells the cause. The window becomes what half of
// the link has in flight at this round trip. A longer path shows no more queue then. A slower link shows as much more
// as the window. Others show something between: half of the link is held.
//
// A hold ends where the queue is empty, where the round trip jumps, and where it grows from round to round, because a
// link alone with us delivers less than is held. The zero value knows no link.
type rivalry struct {
	link  linkRate
	fails int // holds in a row that failed

	round round
	least time.Duration // shortest round trip of this round; 0: none yet
	most  time.Duration // longest round trip of this round
	last  time.Duration // shortest of the round before
	began Time          // of this round
	got   Bytes         // delivered by then
	above int           // rounds in a row that stand above what we make ourselves
	since Time          // when the first of them ended

	holds  bool          // half of the link is held
	part   float64       // of that half: ours of what the edge delivers
	less   float64       // part of what is held that was not delivered, mean of about four rounds
	bound  bool          // a loss has put CUBIC's window in force: the most that is held, or else the least window
	before time.Duration // round trip before the trial; 0: there is none
	small  float64       // packets, before it
	from   Time          // what leaves after this shows how it went
	former time.Duration // the base before a longer one; 0: that is no longer in doubt
	rest   Time          // no trial before
}

// release forgets all but what the link carries.
func (r *rivalry) release(rest Time) {
	*r = rivalry{link: r.link, round: r.round, rest: rest, fails: r.fails}
}

// fail ends a hold in which no other flow filled the queue. Each that follows another lets the next trial wait twice
// as long.
func (r *rivalry) fail(now Time) {
	rest := now.Add(trialRest << r.fails)
	r.fails = min(r.fails+1, trialFails)
	r.release(rest)
}

// isQuiet reports whether nothing suggests that others fill the queue.
func (r *rivalry) isQuiet() bool { return r.above == 0 && !r.holds && !r.bound }

// longestOwnRTT is the longest round trip that we make by ourselves.
func (p *penstock) longestOwnRTT() time.Duration {
	target := p.aim.targetDelay(max(p.rate, p.rivalry.link.rate()), p.base.extreme().Seconds())
	return p.base.extreme() + time.Duration(ownAloneQueue*target*float64(time.Second))
}

// isEdgeShort reports whether the edge delivers less than half of what the link did. Windows of ours that share a link
// have it together, so that they do not take each other for others.
func (p *penstock) isEdgeShort() bool {
	return p.edge < standRate*p.rivalry.link.rate()*edgeMemory.Seconds()
}

// watchForRivals is called with each round trip of tracking, less its way back.
func (p *penstock) watchForRivals(a Ack, rtt time.Duration) {
	r := &p.rivalry
	if r.holds && rtt > shareStall*r.last {
		r.link.peak /= shareFall
		r.fail(a.Now)
		return
	}
	if a.sentTime() < r.from {
		r.least, r.round.start = 0, a.Now
		return
	}
	if r.least == 0 {
		r.least, r.most = rtt, rtt
	}
	r.least, r.most = min(r.least, rtt), max(r.most, rtt)
	if !r.round.endsWith(a) {
		return
	}
	got := float64(a.Delivered-r.got) / max(a.Now.Sub(r.began), minDivisor).Seconds()
	r.got, r.began = a.Delivered, a.Now
	least, last, own := r.least, r.last, r.least <= p.longestOwnRTT()
	r.least, r.last = 0, least
	switch {
	case r.former != 0 && !own: // it was a queue
		p.resetBase(a.Now, r.former)
		p.until = 0
		r.release(a.Now.Add(p.drainInterval()))
	case r.before != 0:
		p.endTrial(a, least)
	case own:
		r.above, r.former = 0, 0
		if a.CwndLimited && !r.holds {
			r.link.peak = max(p.rate, r.link.peak*math.Exp(-least.Seconds()/linkMemory.Seconds()))
		}
	case r.holds:
		held := shareOfLink * r.part * r.link.rate()
		if r.bound {
			held = min(held, p.rival.cwnd*float64(p.mss)/least.Seconds())
		}
		r.less += (max(0, 1-got/held) - r.less) / 4
		if float64(least) > shareJump*float64(last) || r.less > shareLess {
			r.fail(a.Now)
		}
	default:
		if r.above++; r.above == 1 || !standsBeside(least, last) || !standsBeside(r.most, least) {
			r.above, r.since = 1, a.Now
		}
		stands := r.above >= standRounds || r.above > 1 && a.Now.Sub(r.since) > standTime
		if stands && p.isEdgeShort() && a.Now > r.rest {
			p.beginTrial(a.Now, least)
		}
	}
}

// standsBeside reports whether two round trips are about the same.
func standsBeside(rtt, last time.Duration) bool {
	return float64(rtt) <= shareJump*float64(last) && float64(last) <= shareJump*float64(rtt)
}

// answerLoss answers a loss: another flow may be filling the queue. CUBIC's window is in force then. Draining our part
// of the queue tells, once that has grown as large as we are.
func (p *penstock) answerLoss(l Loss) {
	r := &p.rivalry
	switch {
	case !r.bound:
		r.bound = true
		p.rival.cwnd, p.rival.ssthresh = p.cwnd, p.cwnd
	case !r.holds && p.phase == ownTracking && p.rival.cwnd >= p.cwnd && l.Now.Sub(p.drainFrom) > p.drainInterval():
		p.beginDraining(l.State, ownProbeDepth)
	}
}

// beginTrial begins a trial, at that round trip.
func (p *penstock) beginTrial(now Time, rtt time.Duration) {
	r := &p.rivalry
	if !r.holds {
		r.holds, r.bound, r.part = true, false, min(1, p.ours/max(p.edge, 1))
	}
	r.before, r.small = rtt, p.cwnd
	r.last = max(r.last, rtt)
	r.from = now.Add(rtt)
	r.least, r.round.start = 0, now
}

// endTrial ends a trial with the least round trip after it.
func (p *penstock) endTrial(a Ack, least time.Duration) {
	r := &p.rivalry
	before := r.before
	r.before, r.last = 0, least
	grown := float64(least-before) / float64(before)
	switch rise := p.cwnd/r.small - 1; {
	case rise < trialRise:
	case grown >= trialOwn*rise:
		r.fail(a.Now)
	case math.Abs(grown) <= trialPath:
		r.former, r.holds = p.base.extreme(), false
		p.resetBase(a.Now, least)
		_, long := p.rateWindows()
		p.held, p.until = r.link.peak, a.Now.Add(long)
		r.from = a.Now.Add(least)
	case !p.competes:
		r.release(a.Now.Add(p.drainInterval()))
	default:
		r.link.forgetChange()
		r.fails = 0
	}
}

// widenForRivals returns the window beside others, in packets; without is that without them.
func (p *penstock) widenForRivals(without float64) float64 {
	r := &p.rivalry
	switch {
	case p.phase == ownDraining:
		return without
	case r.holds:
		rtt := min(p.base.extreme()+p.queue, shareMost*r.last)
		if r.before != 0 {
			rtt = min(rtt, r.before)
		}
		half := shareOfLink * r.part * r.link.rate() * (rtt + p.reverse).Seconds() / float64(p.mss)
		if r.bound {
			half = min(half, p.rival.cwnd)
		}
		return max(half, without)
	case r.bound:
		return max(p.rival.cwnd, without)
	default:
		return without
	}
}

// seenRivals is how much is in flight for each byte that rivals have in flight. Below 1, windows of two such edges
// that follow each other shrink until the queue is our own target's again.
const seenRivals = 7. / 8

// widenForSeenRivals returns the window beside rivals that the edge counts, in packets; without is that without them.
// It opens by what is acknowledged at most, as in slow start.
func (p *penstock) widenForSeenRivals(a Ack, without float64) float64 {
	if p.phase == ownDraining || !p.competes {
		return without
	}
	theirs := float64(a.RivalRate.BytesIn(p.srtt)) / float64(p.mss)
	ours := min(seenRivals*theirs, p.cwnd+p.toPackets(a.Acked))
	p.besideSeen = ours > without
	return max(ours, without)
}
