package cc

import (
	"math"
	"time"
)

const (
	standWavers = 1. / 16 // of a round trip, by which it may differ from round to round and still stand
	standShrink = 0.5     // of the window: by then a queue of ours would have left the path

	// trialRise is how much longer a trial must make the window to tell anything.
	// Where the round trip grows by trialOwn of that, there is nobody but us.
	trialRise = 0.5
	trialOwn  = 0.9

	shareOfLink = 0.5    // as much as it leaves to others
	shareMemory = 1. / 8 // of the rate before, per round trip
	shareLess   = 1.25   // times the share are in flight without it: there is no need for it
	shareJump   = 1.4    // of the round trip, in one: others do not fill a queue so fast
	shareMost   = 2      // least round trips of the round before count at most: more is a link that stands still
	shareDrains = 8      // round trips at least from one draining to the next
)

// standing is what is known of a round trip that stands above what we make it by ourselves.
// A queue of ours goes as less is in flight. What stays is a longer path, or the queue of
// others, or a link that became slower meanwhile. A trial settles it: the window becomes
// what half of the link, as it was before, has in flight at this round trip. Over a longer
// path there is no more queue after it than before. On a slower link the round trip
// grows as the window. Between the two are others, and the half of the link is held.
type standing struct {
	round round
	least time.Duration // round trip of this round

	rate   float64       // bytes/s, while the queue was ours
	since  time.Duration // round trip from which it hardly differed since it stands; 0: it does not
	window float64       // packets, then

	link   float64       // bytes/s, of which half is held; 0: none
	guess  bool          // a train told it
	before time.Duration // round trip before the trial; 0: there is none
	small  float64       // packets, before it
	former time.Duration // the base before a longer one; 0: that is no longer in doubt
	from   Time          // what leaves after this shows how it went
	rest   Time          // no trial before
}

// end forgets all but what the link carried.
func (s *standing) end(rest Time) { *s = standing{round: s.round, rate: s.rate, rest: rest} }

// alone is the longest round trip that we make by ourselves.
func (p *penstock) alone() time.Duration {
	target := p.target
	if p.stand.rate > p.rate { // that others left us less is no reason for a longer queue
		target = min(target, p.aim.seconds(p.stand.rate, p.base.get().Seconds()))
	}
	return p.base.get() + time.Duration(ownAloneQueue*target*float64(time.Second))
}

// watch is called with each round trip of tracking, less its way back.
func (p *penstock) watch(a Ack, rtt time.Duration) {
	s := &p.stand
	if a.left() < s.from {
		s.least, s.round.start = 0, a.Now
		return
	}
	if s.least == 0 || rtt < s.least {
		s.least = rtt
	}
	if !s.round.ended(a) {
		return
	}
	least := s.least
	s.least = 0
	switch {
	case least <= p.alone() && !s.guess:
		if s.since == 0 && a.CwndLimited {
			s.rate += (p.rate - s.rate) * shareMemory
		}
		if s.link == 0 {
			s.end(s.rest)
		}
	case s.former != 0: // it was a queue
		p.rebase(a.Now, s.former)
		p.until = 0
		s.end(a.Now.Add(p.drainEvery()))
	case s.before != 0:
		p.judge(a, least)
	case s.link != 0:
		if s.since != 0 && float64(least) > shareJump*float64(s.since) {
			s.end(a.Now.Add(p.drainEvery()))
			return
		}
		s.since = least
	case s.since == 0 || (least-s.since).Abs() > time.Duration(standWavers*float64(s.since)):
		if p.rate < trainStarved*s.rate && float64(least) < shareJump*float64(s.since) {
			p.ask(a.Now)
		}
		s.since, s.window = least, p.cwnd
	case p.cwnd <= standShrink*s.window && a.CwndLimited && a.Now > s.rest:
		p.try(a.Now, least)
	}
}

// contend answers a loss: somebody may be filling the queue. Draining our part of
// it tells, once they have grown as large as we are.
func (p *penstock) contend(l Loss) {
	switch {
	case p.stand.link != 0:
	case !p.rivals:
		p.rivals = true
		p.rival.cwnd, p.rival.ssthresh = p.cwnd, p.cwnd
	case p.phase == ownTracking && p.rival.cwnd >= p.cwnd && l.Now.Sub(p.drainFrom) > p.drainEvery():
		p.drain(l.State, ownProbeDepth)
	}
}

// try begins a trial, at that round trip.
func (p *penstock) try(now Time, rtt time.Duration) {
	s := &p.stand
	p.rivals = false
	s.before, s.small = rtt, p.cwnd
	if s.link == 0 {
		s.link, s.since = s.rate, 0
	}
	s.since = max(s.since, rtt)
	s.from = now.Add(rtt)
	s.least, s.round.start = 0, now
}

// judge ends a trial with the least round trip after it.
func (p *penstock) judge(a Ack, least time.Duration) {
	s := &p.stand
	before := s.before
	s.before, s.since = 0, least
	grown := float64(least-before) / float64(before)
	switch rise := p.cwnd/s.small - 1; {
	case rise < trialRise:
	case grown >= trialOwn*rise:
		s.rate = p.rate
		s.end(a.Now.Add(p.drainEvery()))
	case math.Abs(grown) <= standWavers && !s.guess:
		s.former, s.link, s.guess = p.base.get(), 0, false
		p.rebase(a.Now, least)
		_, long := p.windows()
		p.held, p.until = s.rate, a.Now.Add(long)
		s.from = a.Now.Add(least)
	case !p.competes:
		s.end(a.Now.Add(p.drainEvery()))
	}
}

// share is the window that half of the link has at the present round trip, without
// packets, the window without it, where it is in force.
func (p *penstock) share(now Time, without float64) float64 {
	s := &p.stand
	rtt := p.base.get() + p.queue
	if s.since != 0 {
		rtt = min(rtt, shareMost*s.since)
	}
	if s.before != 0 {
		rtt = min(rtt, s.before)
	}
	n := shareOfLink * s.link * (rtt + p.reverse).Seconds() / float64(p.mss)
	if without > shareLess*n && s.before == 0 {
		p.release(now)
	}
	return max(n, without)
}

// rebase forgets the base for another.
func (p *penstock) rebase(now Time, base time.Duration) {
	p.base.reset()
	p.base.add(now, base, 2*p.drainEvery())
}

// again has the next draining be at that time, even though the queue was seen empty.
func (p *penstock) again(now, at Time) { p.next, p.empty = at, now.Add(-p.drainEvery()) }

// release holds the share no longer. Where the link was guessed the base may be of the others' queue.
func (p *penstock) release(now Time) {
	s := &p.stand
	if s.guess {
		p.again(now, now)
	}
	s.link, s.guess = 0, false
}
