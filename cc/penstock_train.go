package cc

import "time"

// Who comes second, into a queue that others have filled, does not know what the link carries.
// A train tells: what leaves when a draining ends leaves in one burst, so that nothing of others
// comes between its packets, and returns at the rate of the link. Half of that is held, as for
// who came first (standing). Windows of the same edge that drain at different times would take
// each other for others, so only the sole one asks.

const (
	trainLong    = 200 * time.Millisecond // a round trip, drained, that is asked about
	trainBurst   = 5 * time.Millisecond   // within which a train has left
	trainGrant   = 2 * time.Millisecond   // a base station grants many packets at once: those that come first do not count
	trainPackets = 10                     // behind them, and trainLeast, are enough to tell the rate
	trainLeast   = 15 * time.Millisecond
	trainFew     = 0.9  // of its rate is taken for the link's
	trainBelow   = 0.45 // of the link are left to us at most where others have filled its queue
	trainJoint   = 0.75 // of it: there are no others any more

	soleShare  = 0.9             // of what the edge delivers under this algorithm
	soleMemory = 5 * time.Second // that, or twice as long
)

// train is the burst behind a draining.
type train struct {
	from   Time  // what leaves from here on is part of it; 0: there is none
	first  Time  // when its first packet arrived
	head   Time  // when the last packet of the first grant did
	last   Time  // when the newest did
	before Time  // when the one before that did
	newest Bytes // with the newest: it may have waited for the receiver's timer
	bytes  Bytes // between head and before
}

// take counts an acknowledgement of what arrived then. Once the train is over it returns its
// rate in bytes/s; 0: it is not, or was too short to tell.
func (t *train) take(a Ack, arrived Time) float64 {
	left := a.left()
	switch {
	case t.from == 0 || left < t.from:
		return 0
	case left > t.from.Add(trainBurst):
		t.from = 0
		took := t.before.Sub(t.head)
		if t.bytes < trainPackets*a.MSS || took < trainLeast {
			return 0
		}
		return float64(t.bytes) / took.Seconds()
	case t.first == 0:
		t.first, t.head = arrived, arrived
	case arrived.Sub(t.first) <= trainGrant:
		t.head = arrived
	default:
		t.bytes += t.newest
		t.newest, t.before, t.last = a.Acked, t.last, arrived
	}
	return 0
}

// sole tells whether a window has been the only one of the edge that its algorithm decides.
type sole struct {
	marks [2]edgeMark // the older one is what is looked back to
	is    bool
}

// edgeMark is what had been delivered at a time: by the window, and by all of the edge.
type edgeMark struct {
	at        Time
	own, edge Bytes
}

// update is called with each acknowledgement.
func (o *sole) update(s State) {
	if o.marks[1].at == 0 || s.Now.Sub(o.marks[1].at) >= soleMemory {
		o.marks[0], o.marks[1] = o.marks[1], edgeMark{s.Now, s.Delivered, s.EdgeDelivered}
	}
	since := o.marks[0]
	o.is = since.at != 0 && float64(s.Delivered-since.own) >= soleShare*float64(s.EdgeDelivered-since.edge)
}

// ask has the next train tell whether others have filled the queue: something was lost.
func (p *penstock) ask(l Loss) {
	if !p.sole.is || p.srtt < trainLong || l.Now <= p.stand.rest {
		return
	}
	p.asked = true
	if p.phase == ownTracking && p.stand.link == 0 && l.Now.Sub(p.drainFrom) > ownDrainEvery {
		p.drain(l.State, ownDrainDepth)
	}
}

// compare answers by the rate of a train.
func (p *penstock) compare(now Time, rate float64) {
	s := &p.stand
	link := trainFew * rate
	asked := p.asked
	p.asked = false
	switch {
	case p.drainLeft < trainLong || s.guess && p.held > trainJoint*link:
		p.surrender(now)
	case s.guess:
		s.link = link
	case !asked && s.link == 0:
	case max(p.held, s.link) > trainBelow*link:
		s.rest = now.Add(p.drainEvery())
	default:
		s.link, s.guess = link, true
		p.try(now, p.drainLeft)
	}
}

// surrender gives up what a train said.
func (p *penstock) surrender(now Time) {
	if p.stand.guess {
		p.stand.end(now)
	}
}
