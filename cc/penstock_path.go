package cc

import "time"

// A path that grows lengthens both ways at once. With the peer's timestamps, each way then shows a delay above its
// least. Where the way there shows less than a queue that asks for a trial, the window stays too small for the path.

const (
	pathTolerance    = 1. / 16 // of a round trip: delays that differ by less count as equal
	pathStableRounds = 6       // in a row: a queue of others grows, and one of ours shrinks with the window
	pathRatePart     = 7. / 8  // where a path has grown, at most this part of bestRate is left
)

// pathWatch finds a path that has grown. The way back has grown, the way there is longer than the base by as much, and
// both stay so. A pathWatch starts with mostThere below 0.
type pathWatch struct {
	round                 round
	leastThere, mostThere time.Duration // delays of this round on the way there; mostThere below 0: there is none yet
	leastBack             time.Duration // least delay of this round on the way back
	lastThere, lastBack   time.Duration // leastThere and leastBack of the round before
	backRise              time.Duration // by how much the way back has grown since it last shrank
	stableRounds          int           // rounds in a row in which both ways were longer by the same, and stayed so
}

// hasGrown takes in by how much the way there and the way back of a round trip exceed their least. It reports whether
// the path has grown, on either way by lastThere.
func (w *pathWatch) hasGrown(a Ack, there, back time.Duration) bool {
	if w.mostThere < 0 {
		w.leastThere, w.mostThere, w.leastBack = there, there, back
	}
	w.leastThere, w.mostThere, w.leastBack = min(w.leastThere, there), max(w.mostThere, there), min(w.leastBack, back)
	if !w.round.endsWith(a) {
		return false
	}
	within := time.Duration(pathTolerance * float64(a.RTT))
	stable := w.mostThere-w.leastThere <= within && (w.leastThere-w.lastThere).Abs() <= within
	switch step := w.leastBack - w.lastBack; {
	case step > within:
		w.backRise, stable = w.backRise+step, false
	case step < -within:
		w.backRise = 0
	}
	stable = stable && w.backRise > within && (w.leastThere-w.backRise).Abs() <= within
	w.lastThere, w.lastBack, w.mostThere = w.leastThere, w.leastBack, -1
	if w.stableRounds++; !stable {
		w.stableRounds = 0
	}
	return w.stableRounds >= pathStableRounds
}

// followLongerPath lengthens the base where the path has grown and the rate has fallen, and goes back to bestRate.
func (p *penstock) followLongerPath(a Ack) {
	best := float64(p.bestRate.extreme())
	if !a.OneWay || !p.pathWatch.hasGrown(a, p.queueDelay, p.reverseQueue) || p.rate > pathRatePart*best {
		return
	}
	p.resetBase(a.Now, p.base.extreme()+p.pathWatch.lastThere)
	p.pathWatch = pathWatch{mostThere: -1, lastBack: p.pathWatch.lastBack}
	_, long := p.rateWindows()
	p.heldRate, p.heldUntil = best, a.Now.Add(long)
}
