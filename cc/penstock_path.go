package cc

import "time"

// A path that grows lengthens both ways at once. With the peer's timestamps, the way there shows a queue and the way
// back another. Where the queue is less than two targets, the window is too small for the path, and no trial asks why.

const (
	pathWavers = 1. / 16 // of a round trip, by which a way may differ from round to round and still stand
	pathRounds = 6       // in a row that stand: a queue of others grows, and one of ours shrinks with the window
	pathLess   = 7. / 8  // of the best rate of the last second is left at most where a path has grown
)

// pathWatch finds a path that has grown. The way back has grown within two rounds, the way there stands as far above
// the base, and both stay. The zero value has seen nothing.
type pathWatch struct {
	round               round
	least, most         time.Duration // of this round, on the way there above the base; below 0: none yet
	back                time.Duration // least of this round on the way back
	lastLeast, lastBack time.Duration // of the round before
	rise                time.Duration // by which the way back has grown since it last shrank
	stood               int           // rounds in a row
}

// hasGrown takes in what a round trip exceeds its least by, on the way there and back. It reports whether the path has
// grown by lastLeast on the way there.
func (w *pathWatch) hasGrown(a Ack, there, back time.Duration) bool {
	if w.most < 0 {
		w.least, w.most, w.back = there, there, back
	}
	w.least, w.most, w.back = min(w.least, there), max(w.most, there), min(w.back, back)
	if !w.round.endsWith(a) {
		return false
	}
	within := time.Duration(pathWavers * float64(a.RTT))
	stands := w.most-w.least <= within && (w.least-w.lastLeast).Abs() <= within
	switch step := w.back - w.lastBack; {
	case step > within:
		w.rise, stands = w.rise+step, false
	case step < -within:
		w.rise = 0
	}
	stands = stands && w.rise > within && (w.least-w.rise).Abs() <= within
	w.lastLeast, w.lastBack, w.most = w.least, w.back, -1
	if w.stood++; !stands {
		w.stood = 0
	}
	return w.stood >= pathRounds
}

// followLongerPath takes for the base what stands on either way while the rate falls, and goes back to the best rate.
func (p *penstock) followLongerPath(a Ack) {
	best := float64(p.best.extreme())
	if !a.OneWay || !p.path.hasGrown(a, p.queue, p.reverse) || p.rate > pathLess*best {
		return
	}
	p.resetBase(a.Now, p.base.extreme()+p.path.lastLeast)
	p.path = pathWatch{most: -1, lastBack: p.path.lastBack}
	_, long := p.rateWindows()
	p.held, p.until = best, a.Now.Add(long)
}
