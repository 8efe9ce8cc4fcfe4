package cc

import "time"

// A flow that comes second, into a queue that others have filled, does not know what the link
// carries. A train tells it: what leaves when a draining ends leaves in one burst, so that nothing
// of others comes between its packets, and returns at the rate of the link. Half of that rate is
// held then, as by a flow that came first (standing). Windows of one edge that drain at different
// times would take each other for others, so only the sole window of an edge asks.

const (
	trainLong    = 200 * time.Millisecond // a round trip, drained, that is asked about
	trainBurst   = 5 * time.Millisecond   // a train has left within this
	trainWindow  = 32.                    // packets that leave at once where they are to tell
	trainGrant   = 2 * time.Millisecond   // what arrives this early does not count: base stations grant many at once
	trainPackets = 10                     // as many behind them tell the rate,
	trainLeast   = 15 * time.Millisecond  // if they took as long as this; fewer do if they took trainLong
	trainRounds  = 3                      // round trips between two drainings that ask
	trainRest    = 2                      // intervals of drainings without a question, after an answer
	trainFew     = 0.9                    // of its rate is taken for the link's
	trainBelow   = 0.45                   // of the link are left to us at most where others have filled its queue
	trainJoint   = 0.75                   // of the link are ours: no other flow is left
	trainStarved = 0.25                   // of the best rate so far are left to us, and that is a reason to ask

	soleShare  = 0.9             // of what the edge delivers under this algorithm
	soleMemory = 5 * time.Second // sole looks back as long as this, or twice as long
)

// ackTrain is the burst behind a draining.
type ackTrain struct {
	from   Time          // what leaves from here on is part of it; 0: there is no train
	queued time.Duration // round trip before it, drained
	first  Time          // when its first packet arrived
	head   Time          // when the last packet of the first grant did
	last   Time          // when the newest did
	before Time          // when the one before that did
	newest Bytes         // with the newest: it may have waited for the receiver's timer
	bytes  Bytes         // between head and before
}

// addAck counts an acknowledgement of what arrived then. Once the train is over it returns its
// rate in bytes/s, or 0 where it was too short to tell.
func (t *ackTrain) addAck(a Ack, arrived Time) (rate float64, over bool) {
	left := a.sentTime()
	switch {
	case t.from == 0 || left < t.from:
	case left > t.from.Add(trainBurst):
		t.from = 0
		took := t.before.Sub(t.head)
		if t.bytes == 0 || took < trainLeast || took < trainLong && t.bytes < trainPackets*a.MSS {
			return 0, true
		}
		return float64(t.bytes) / took.Seconds(), true
	case t.first == 0:
		t.first, t.head = arrived, arrived
	case arrived.Sub(t.first) <= trainGrant:
		t.head = arrived
	default:
		t.bytes += t.newest
		t.newest, t.before, t.last = a.Acked, t.last, arrived
	}
	return 0, false
}

// aloneDetector finds out whether its window is the only one at the edge under this algorithm.
type aloneDetector struct {
	marks [2]edgeMark // sole looks back to the first, the older one
	is    bool
}

// edgeMark is what had been delivered at a time: by the window, and by all of the edge.
type edgeMark struct {
	at        Time
	own, edge Bytes
}

// onState is called with each acknowledgement.
func (o *aloneDetector) onState(s State) {
	if o.marks[1].at == 0 || s.Now.Sub(o.marks[1].at) >= soleMemory {
		o.marks[0], o.marks[1] = o.marks[1], edgeMark{s.Now, s.Delivered, s.EdgeDelivered}
	}
	since := o.marks[0]
	o.is = since.at != 0 && float64(s.Delivered-since.own) >= soleShare*float64(s.EdgeDelivered-since.edge)
}

// requestTrain is called where something was lost, or hardly anything is left to us: the next train is to
// tell whether others have filled the queue.
func (p *penstock) requestTrain(now Time) {
	if p.competes && p.aloneOnEdge.is && p.srtt >= trainLong && now > p.rivalQueue.rest {
		p.asked = true
	}
}

// shouldDrainForTrain is whether to drain for a train. It does not while half of a link is held that a train
// told, or that was measured before others came. A short round trip shows that the queue
// is not full: a loss or a timeout had another cause, such as a link that was gone.
func (p *penstock) shouldDrainForTrain(now Time) bool {
	p.asked = p.asked && p.base.extreme()+p.queue >= trainLong
	known := p.rivalQueue.guess || p.rivalQueue.link != 0 && p.base.extreme() < trainLong
	pause := max(ownDrainEvery, trainRounds*p.srtt)
	return p.asked && !known && p.train.from == 0 && now.Sub(p.drainFrom) > pause
}

// trainWindow is the least window now, in packets, so that the train tells the rate. A link so
// slow that a few packets told it needs none.
func (p *penstock) trainWindow(now Time) float64 {
	if !p.asked || p.slow || p.train.from == 0 || now > p.train.from.Add(trainBurst) || p.train.queued < trainLong {
		return 0
	}
	return trainWindow
}

// followTrain takes an acknowledgement of the train into account.
func (p *penstock) followTrain(a Ack) {
	if rate, over := p.train.addAck(a, p.arrived); over {
		p.compareTrainRate(a.Now, rate)
	}
}

// compareTrainRate answers by the rate of a train, where that told one. Where it did not, the next
// train is asked as well, unless the draining emptied the queue.
func (p *penstock) compareTrainRate(now Time, rate float64) {
	s := &p.rivalQueue
	told, asked := rate > 0, p.asked
	link := trainFew * rate
	p.asked = asked && !told && p.train.queued >= trainLong
	p.slow = told && p.train.bytes < trainPackets*p.mss
	switch {
	case p.train.queued < trainLong || s.guess && told && p.held > trainJoint*link:
		p.forgetTrain(now)
	case !told:
	case s.guess:
		s.link = link
	case !asked && s.link == 0:
	case max(p.held, s.link) > trainBelow*link:
		s.rest = now.Add(trainRest * p.drainInterval())
	default:
		s.link, s.guess = link, true
		p.doubted, p.next = 0, p.nextDrainTime(now, p.drainInterval())
		p.beginTrial(now, p.train.queued)
	}
}

// forgetTrain gives up what a train said.
func (p *penstock) forgetTrain(now Time) {
	if p.rivalQueue.guess {
		p.rivalQueue.endStanding(now)
	}
}
