package cc

import "time"

const (
	longerWavers = 1. / 16 // of a round trip, by which it may differ from round to round and still stand
	longerShrink = 0.5     // of the window: by then a queue of ours would have left the path
)

// longerPath tells a path that has become longer from a queue of ours: its round trip
// stands while less and less is in flight. A trial settles it: at the rate from before,
// over the longer path, the queue is not to exceed what we make by ourselves.
type longerPath struct {
	round round
	least time.Duration // round trip of this round

	// Since the round trip was last no longer than we make it by ourselves:
	stands time.Duration // that from which it hardly differed since; 0: it is no longer
	window float64       // packets, then
	rate   float64       // bytes/s, before

	former time.Duration // the base before a trial; 0: there is none
	from   Time          // what leaves after this shows how it went
	rest   Time          // no trial before
}

// lengthen is called with each round trip of tracking, less its way back.
func (p *penstock) lengthen(a Ack, rtt time.Duration) {
	l := &p.longer
	if l.former != 0 && a.left() < l.from {
		l.least, l.round.start = 0, a.Now
		return
	}
	if l.least == 0 || rtt < l.least {
		l.least = rtt
	}
	if !l.round.ended(a) {
		return
	}
	least := l.least
	l.least = 0
	if l.stands == 0 {
		l.rate = float64(p.best.get())
	}
	alone := p.base.get() + time.Duration(ownAloneQueue*p.target*float64(time.Second))
	switch stood := (least - l.stands).Abs() <= time.Duration(longerWavers*float64(l.stands)); {
	case least <= alone:
		*l = longerPath{round: l.round, rest: l.rest}
	case l.former != 0: // it was a queue
		p.rebase(a.Now, l.former)
		p.until = 0
		*l = longerPath{round: l.round, rest: a.Now.Add(p.drainEvery())}
	case !stood:
		l.stands, l.window = least, p.cwnd
	case p.cwnd <= longerShrink*l.window && a.CwndLimited && a.Now > l.rest:
		l.former = p.base.get()
		p.rebase(a.Now, least)
		_, long := p.windows()
		p.held, p.until = l.rate, a.Now.Add(long)
		l.from = a.Now.Add(least)
	}
}

// rebase forgets the base for another.
func (p *penstock) rebase(now Time, base time.Duration) {
	p.base.reset()
	p.base.add(now, base, 2*p.drainEvery())
}
