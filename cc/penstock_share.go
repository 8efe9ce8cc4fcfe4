package cc

import (
	"math"
	"time"
)

const (
	standWavers = 1. / 16 // of a round trip, by which it may differ from round to round and still stand
	standShrink = 0.5     // of the window: by then a queue of ours would have left the path

	// trialRise is how much longer a trial must make the window to tell anything.
	// Where the round trip grows by trialOwn of that, we are alone.
	trialRise = 0.5
	trialOwn  = 0.9

	shareOfLink = 0.5    // as much as it leaves to others
	shareMemory = 1. / 8 // of the rate before, per round trip
	shareLess   = 1.25   // times the share are in flight without it: there is no need for it
	shareJump   = 1.4    // of the round trip, in one: others do not fill a queue so fast
	shareMost   = 2      // least round trips of the round before count at most: more is a link that stands still
	shareDrains = 8      // round trips at least from one draining to the next
)

// standingQueue is what is known of a round trip that stands above what we make it by ourselves.
// A queue of ours goes as less is in flight. What stays is a longer path, or the queue of
// others, or a link that became slower. A trial settles it: the window becomes
// what half of the link, as it was before, has in flight at this round trip. Over a longer
// path there is no more queue after it than before. On a slower link the round trip
// grows as the window. Between the two are others, and the half of the link is held.
type standingQueue struct {
	round round
	least time.Duration // round trip of this round

	rate   float64       // bytes/s, while the queue was ours
	since  time.Duration // round trip from which it hardly differed since it stands; 0: it does not
	window float64       // packets, then

	link   float64       // bytes/s; half of it is held; 0: none
	guess  bool          // a train told it
	before time.Duration // round trip before the trial; 0: there is none
	small  float64       // packets, before it
	former time.Duration // the base before a longer one; 0: that is no longer in doubt
	from   Time          // what leaves after this shows how it went
	rest   Time          // no trial before
}

// endStanding forgets all but what the link carried.
func (s *standingQueue) endStanding(rest Time) {
	*s = standingQueue{round: s.round, rate: s.rate, rest: rest}
}

// longestOwnRTT is the longest round trip that we make by ourselves.
func (p *penstock) longestOwnRTT() time.Duration {
	target := p.target
	if p.rivalQueue.rate > p.rate { // that others left us less is no reason for a longer queue
		target = min(target, p.aim.targetDelay(p.rivalQueue.rate, p.base.extreme().Seconds()))
	}
	return p.base.extreme() + time.Duration(ownAloneQueue*target*float64(time.Second))
}

// watchForRivals is called with each round trip of tracking, less its way back.
func (p *penstock) watchForRivals(a Ack, rtt time.Duration) {
	s := &p.rivalQueue
	if a.sentTime() < s.from {
		s.least, s.round.start = 0, a.Now
		return
	}
	if s.least == 0 || rtt < s.least {
		s.least = rtt
	}
	if !s.round.endsWith(a) {
		return
	}
	least := s.least
	s.least = 0
	switch {
	case least <= p.longestOwnRTT() && !s.guess:
		if s.since == 0 && a.CwndLimited {
			s.rate += (p.rate - s.rate) * shareMemory
		}
		if s.link == 0 {
			s.endStanding(s.rest)
		}
	case s.former != 0: // it was a queue
		p.resetBase(a.Now, s.former)
		p.until = 0
		s.endStanding(a.Now.Add(p.drainInterval()))
	case s.before != 0:
		p.endTrial(a, least)
	case s.link != 0:
		if s.since != 0 && float64(least) > shareJump*float64(s.since) {
			s.endStanding(a.Now.Add(p.drainInterval()))
			return
		}
		s.since = least
	case s.since == 0 || (least-s.since).Abs() > time.Duration(standWavers*float64(s.since)):
		if p.rate < trainStarved*s.rate && float64(least) < shareJump*float64(s.since) {
			p.requestTrain(a.Now)
		}
		s.since, s.window = least, p.cwnd
	case p.cwnd <= standShrink*s.window && a.CwndLimited && a.Now > s.rest:
		p.beginTrial(a.Now, least)
	}
}

// answerLoss answers a loss: another flow may be filling the queue. Draining our part of
// it tells, once they have grown as large as we are.
func (p *penstock) answerLoss(l Loss) {
	switch {
	case p.rivalQueue.link != 0:
	case !p.rivals:
		p.rivals = true
		p.rival.cwnd, p.rival.ssthresh = p.cwnd, p.cwnd
	case p.phase == ownTracking && p.rival.cwnd >= p.cwnd && l.Now.Sub(p.drainFrom) > p.drainInterval():
		p.beginDraining(l.State, ownProbeDepth)
	}
}

// beginTrial begins a trial, at that round trip.
func (p *penstock) beginTrial(now Time, rtt time.Duration) {
	s := &p.rivalQueue
	p.rivals = false
	s.before, s.small = rtt, p.cwnd
	if s.link == 0 {
		s.link, s.since = s.rate, 0
	}
	s.since = max(s.since, rtt)
	s.from = now.Add(rtt)
	s.least, s.round.start = 0, now
}

// endTrial ends a trial with the least round trip after it.
func (p *penstock) endTrial(a Ack, least time.Duration) {
	s := &p.rivalQueue
	before := s.before
	s.before, s.since = 0, least
	grown := float64(least-before) / float64(before)
	switch rise := p.cwnd/s.small - 1; {
	case rise < trialRise:
	case grown >= trialOwn*rise:
		s.rate = p.rate
		s.endStanding(a.Now.Add(p.drainInterval()))
	case math.Abs(grown) <= standWavers && !s.guess:
		s.former, s.link, s.guess = p.base.extreme(), 0, false
		p.resetBase(a.Now, least)
		_, long := p.rateWindows()
		p.held, p.until = s.rate, a.Now.Add(long)
		s.from = a.Now.Add(least)
	case !p.competes:
		s.endStanding(a.Now.Add(p.drainInterval()))
	}
}

// shareWindow is the window that half of the link has at the present round trip, without
// packets, the window without it, where it is in force.
func (p *penstock) shareWindow(now Time, without float64) float64 {
	s := &p.rivalQueue
	rtt := p.base.extreme() + p.queue
	if s.since != 0 {
		rtt = min(rtt, shareMost*s.since)
	}
	if s.before != 0 {
		rtt = min(rtt, s.before)
	}
	n := shareOfLink * s.link * (rtt + p.reverse).Seconds() / float64(p.mss)
	if without > shareLess*n && s.before == 0 {
		p.releaseShare(now)
	}
	return max(n, without)
}

// seenRivals is how much is in flight for each byte that rivals have in flight. Below 1, windows of two such edges that
// follow each other shrink until the queue is our own target's again.
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

// resetBase forgets the base for another.
func (p *penstock) resetBase(now Time, base time.Duration) {
	p.base.reset()
	p.base.addSample(now, base, 2*p.drainInterval())
}

// scheduleDrain has the next draining be at that time, even though the queue was seen empty.
func (p *penstock) scheduleDrain(now, at Time) { p.next, p.empty = at, now.Add(-p.drainInterval()) }

// releaseShare holds the share no longer. Where the link was guessed the base may be of the others' queue.
func (p *penstock) releaseShare(now Time) {
	s := &p.rivalQueue
	if s.guess {
		p.scheduleDrain(now, now)
	}
	s.link, s.guess = 0, false
}
