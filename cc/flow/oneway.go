package flow

import (
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// oneWayEstimator tells the way back of a flow's round trips from the way there, by the peer's
// clock. Neither the clock's rate nor what it showed at the start is known. So there is
// no one-way delay, but what a way took beyond the least it took.
//
// An acknowledgement that arrives at A with timestamp v gives a reading A−v·tick of the
// way back, and what is left of the round trip one of the way there. Both are off by the
// same unknown time, in opposite directions. The reading is up to a tick too long, since
// the timestamp is rounded down; a queue is what is certain to be one.
//
//   - The tick is the usual one that fits, or else measured. A clock that runs wrong by a
//     part s makes the readings of one way rise and those of the other fall. So s is what
//     makes the least way back and the least way there together the longest (fit): the
//     least of either rises as well where a queue stands, but not at the other's cost.
//   - The least way back is that of the last minutes. A longer one is a queue at first,
//     for as long as an upload may last, and a longer path from then on; the least rises
//     slowly, so that nobody who watches the way there sees a step. To take a longer path
//     for a queue costs nothing: RTT−ReverseQueue is the way there, plus a constant.
//   - Nor can the least way back be less than the least round trip without the least way
//     there. That bounds what a clock that was set back would pass for a queue.
//   - A clock that shows a way back of below zero, or of more than the round trip, has
//     been set, or is none: it is learnt again, with twice the evidence each time.
//
// A peer that lies about its clock can have any part of RTT−MinRTT count as a queue on its
// way back. Then its algorithm sees no round trip below the least, nor misses a loss or a
// mark, and the queue that it lets stand is that of the peer's own path.
type oneWayEstimator struct {
	first, last PeerClock
	firstRTT    time.Duration
	rtt         time.Duration // newest
	ticks       int64         // from first to last
	overtaken   int           // readings in a row that are older than last
	restarts    int

	tick    float64 // ns; 0: not known yet
	unusual float64 // an unusual one that was measured once; 0: none was
	skew    float64 // part of it by which the peer's clock is slow
	within  float64 // most that skew may be
	lows    *spanMinima
	back    float64 // least reading of the way back without skew, ns
	rises   float64 // to this, slowly
	there   float64 // of the way there
	queue   time.Duration
}

// The constants of oneWay.
const (
	usualSkew    = 500e-6     // most that clocks are wrong by
	fineSkew     = 1e-7       // how closely it is told
	tooEarly     = 10e9       // ns, to tell it from queues that grow or drain
	riseSlowly   = 1.0 / 1024 // most that the least way back rises, per time that passes
	leastCertain = 16         // elapsed time over its uncertainty, to tell the usual ticks apart
	wellMeasured = 512        // to measure the tick, within which twice that bounds the skew
	unevenly     = 200e3      // ns that a machine may take longer to send or to notice an acknowledgement
	mostRestarts = 8          // after which the evidence that is asked for does not grow
	mostStale    = 3          // acknowledgements in a row that others overtook
	wrap         = 1 << 30    // ticks, after which timestamps may have wrapped around unseen
)

// usualTicks are those of TCP stacks: Linux has 1 ms, and 1 µs where a route says so;
// others have clocks of 1000, 500, 250, 200 and 100 Hz.
var usualTicks = [...]time.Duration{
	time.Microsecond, time.Millisecond, 2 * time.Millisecond, 4 * time.Millisecond, 5 * time.Millisecond,
	10 * time.Millisecond,
}

// addReading takes in a reading of the peer's clock with a round trip of the same
// acknowledgement, 0: unknown, and the flow's least one. It returns by how much longer
// than at least that was on its way back.
func (o *oneWayEstimator) addReading(
	c PeerClock, now cc.Time, rtt, least time.Duration,
) (queue time.Duration, known bool) {
	if rtt > 0 {
		o.rtt = rtt
	}
	if c.At >= o.last.At && c != o.last && o.rtt > 0 {
		o.processReading(c, rtt, least)
	}
	if o.tick == 0 || now.Sub(o.last.At) > o.rtt {
		return 0, false
	}
	return max(0, min(o.queue, rtt-least)), true
}

// processReading takes in a reading that is new.
func (o *oneWayEstimator) processReading(c PeerClock, rtt, least time.Duration) {
	step := int64(int32(c.Value - o.last.Value))
	silence := float64(c.At.Sub(o.last.At))
	switch {
	case o.first.At == 0 || silence > wrap*max(o.tick, float64(usualTicks[0])):
		o.beginAt(c, rtt)
		return
	case step < 0 && o.overtaken < mostStale:
		o.overtaken++
		return
	case step < 0:
		o.restartLearning(c, rtt)
		return
	}
	o.last, o.ticks, o.overtaken = c, o.ticks+step, 0
	elapsed := c.At.Sub(o.first.At)
	if o.tick == 0 {
		if o.measureTick(c, elapsed, least); o.tick == 0 {
			return
		}
	}
	t := float64(elapsed)
	back := t - float64(o.ticks)*o.tick
	level := back - o.skew*t
	unsure := 2*o.tick + unevenly + o.within*(silence+tooEarly)
	if level-o.back > float64(o.rtt)+unsure || o.back-level > float64(least)+unsure {
		if rtt == 0 { // so long may it have been on its way
			return
		}
		o.restartLearning(c, rtt)
		return
	}
	o.back = min(o.back+min(max(0, o.rises-o.back), silence*riseSlowly), level)
	there := math.Inf(1)
	if rtt > 0 {
		there = float64(rtt) - back
		o.there = min(o.there, there+o.skew*t)
	}
	if o.lows.addReading(t, back, there, o.skew) {
		o.fitSkew(t)
		level = back - o.skew*t
	}
	// Where the way there was the least, the way back was all the rest.
	least0 := max(o.back, float64(least)-o.there-o.tick)
	o.queue = time.Duration(max(0, level-least0-o.tick))
}

// beginAt has c be the first reading, unless the round trip that it is of is not known:
// that of another acknowledgement says nothing of how long this one was on its way.
func (o *oneWayEstimator) beginAt(c PeerClock, rtt time.Duration) {
	*o = oneWayEstimator{rtt: o.rtt, restarts: o.restarts, unusual: o.unusual}
	if rtt > 0 {
		o.first, o.last, o.firstRTT = c, c, rtt
	}
}

// restartLearning learns the clock anew.
func (o *oneWayEstimator) restartLearning(c PeerClock, rtt time.Duration) {
	o.restarts = min(o.restarts+1, mostRestarts)
	o.unusual = 0
	o.beginAt(c, rtt)
}

// measureTick finds the tick, once enough time has passed since the first reading. One that is
// not usual must be found twice in a row: else an odd reading at the start would pass for one,
// and what it is wrong by for a queue that grows without end.
func (o *oneWayEstimator) measureTick(c PeerClock, elapsed, least time.Duration) {
	if o.ticks == 0 {
		return
	}
	unsure := float64(max(o.rtt, o.firstRTT) - least) // of the time between two acknowledgements' departures
	certain := float64(int64(leastCertain) << o.restarts)
	t := float64(elapsed)
	for _, usual := range usualTicks {
		tick := float64(usual)
		if (unsure+tick)*certain <= t && math.Abs(float64(o.ticks)*tick-t) <= unsure+tick+usualSkew*t {
			o.setTick(tick, usualSkew)
			return
		}
	}
	tick := t / float64(o.ticks)
	switch {
	case (unsure+tick)*max(certain, wellMeasured) > t:
	case tick < float64(usualTicks[0]) || tick > float64(usualTicks[len(usualTicks)-1]):
	case math.Abs(tick-o.unusual) <= 2*tick/wellMeasured:
		o.setTick(tick, 2.0/wellMeasured)
	default:
		o.unusual = tick
		o.beginAt(c, o.rtt)
	}
}

// setTick has the tick be known.
func (o *oneWayEstimator) setTick(tick, within float64) {
	o.tick, o.within = tick, within
	t := float64(o.last.At.Sub(o.first.At))
	back := t - float64(o.ticks)*tick
	o.lows = &spanMinima{width: firstWidth}
	o.lows.addReading(0, 0, float64(o.firstRTT), 0) // a connection's first round trip is often the least
	o.back, o.rises, o.there = min(0, back), 0, float64(o.firstRTT)
}

// fitSkew finds the skew anew, and with it the least of either way, at t. It changes no more
// than the data ask for beyond what they may be wrong by: the skew is what it was unless
// another explains the least round trip better.
func (o *oneWayEstimator) fitSkew(t float64) {
	was := o.skew
	if o.within > usualSkew || t > tooEarly {
		o.skew = o.bestSkew()
	}
	o.rises, o.there = o.lows.leastOfAll(o.skew)
	o.back = min(o.rises, o.back+(was-o.skew)*t)
}

// bestSkew is what makes the least of both ways together the longest.
func (o *oneWayEstimator) bestSkew() float64 {
	// It is concave in the skew: a sum of minima of straight lines. When within a span
	// the least was is known only for one moment of it.
	sum := func(s float64) float64 {
		back, there := o.lows.leastOfAll(s)
		return back + there - 2*o.lows.width*math.Abs(s-o.skew)
	}
	// By golden sections: each step needs the sum at one more place only.
	const golden = 0.618033988749895
	low, high := -o.within, o.within
	a, b := high-golden*(high-low), low+golden*(high-low)
	atA, atB := sum(a), sum(b)
	for high-low > fineSkew {
		if atA < atB {
			low, a, atA = a, b, atB
			b = low + golden*(high-low)
			atB = sum(b)
		} else {
			high, b, atB = b, a, atA
			a = high - golden*(high-low)
			atA = sum(a)
		}
	}
	best, worse := (low+high)/2, o.skew
	enough := sum(best) - o.tick/4 - unevenly
	if sum(worse) >= enough {
		return worse
	}
	for math.Abs(best-worse) > fineSkew {
		if s := (best + worse) / 2; sum(s) < enough {
			worse = s
		} else {
			best = s
		}
	}
	return best
}

// Bounds of lows.
const (
	lowsKept   = 32
	firstWidth = 100e6 // ns
	mostWidth  = 25e9  // ns, after which it does not double; so 32 spans are about fourteen minutes
)

// spanMinima are the least readings of both ways of a round trip in each of the spans of time
// that passed: short spans at first, then ever longer ones. In the end the oldest is
// forgotten.
type spanMinima struct {
	spans [lowsKept]low
	n     int
	width float64 // of a span, ns
	from  float64 // the last span begins here
}

// low is the least of either way within a span, and when it was.
type low struct {
	back, there     float64
	backAt, thereAt float64
}

// addReading takes in readings at t; there is infinite where it is not known. It tells whether
// a span has ended.
func (l *spanMinima) addReading(t, back, there, skew float64) (ended bool) {
	if l.n == 0 || t-l.from >= l.width {
		ended = l.n > 0
		l.beginSpan(skew)
		l.from = t
	}
	s := &l.spans[l.n-1]
	s.keepLower(low{back, there, t, t}, skew)
	return ended
}

// beginSpan begins a span.
func (l *spanMinima) beginSpan(skew float64) {
	if l.n == lowsKept && l.width < mostWidth {
		for i := range lowsKept / 2 {
			l.spans[i] = l.spans[2*i]
			l.spans[i].keepLower(l.spans[2*i+1], skew)
		}
		l.n, l.width = lowsKept/2, 2*l.width
	} else if l.n == lowsKept {
		copy(l.spans[:], l.spans[1:])
		l.n--
	}
	l.spans[l.n] = low{back: math.Inf(1), there: math.Inf(1)}
	l.n++
}

// keepLower keeps the lesser of each, with a clock of that skew.
func (s *low) keepLower(o low, skew float64) {
	if o.back-skew*o.backAt < s.back-skew*s.backAt {
		s.back, s.backAt = o.back, o.backAt
	}
	if o.there+skew*o.thereAt < s.there+skew*s.thereAt {
		s.there, s.thereAt = o.there, o.thereAt
	}
}

// leastOfAll returns the least of all, with a clock of that skew.
func (l *spanMinima) leastOfAll(skew float64) (back, there float64) {
	back, there = math.Inf(1), math.Inf(1)
	for i := range l.n {
		s := &l.spans[i]
		back = min(back, s.back-skew*s.backAt)
		there = min(there, s.there+skew*s.thereAt)
	}
	return back, there
}
