package flow

import (
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// oneWayEstimator separates the way back of a flow's round trips from the way there, by the peer's clock. Neither the
// rate of that clock nor its origin is known. So the result is not a one-way delay, but how much longer a way took
// than its least.
//
// An acknowledgement that arrives at A with timestamp v gives a reading A−v·tick of the way back. The rest of the
// round trip is a reading of the way there. Both are off by the same unknown time, in opposite directions. The reading
// is up to one tick too long, because the timestamp is rounded down. The estimate is the queue that is certain.
//
//   - The tick is the usual one that fits, otherwise a measured one. A clock that is wrong by a part s makes the
//     readings of one way rise and those of the other way fall. The skew s is the one that makes the least way back and
//     the least way there together the longest (fitSkew). A standing queue raises the least of one way as well, but not
//     at the cost of the other.
//   - The least way back is that of the last minutes. A longer one counts as a queue for as long as an upload may last,
//     and as a longer path after that. The least rises slowly, so that the way there shows no step. Taking a longer
//     path for a queue costs nothing: RTT−ReverseQueue is the way there plus a constant.
//   - The least way back is at least the least round trip without the least way there. That bounds what a clock that
//     was set back would show as a queue.
//   - A clock that shows a way back below zero, or above the round trip, was set, or is no clock. It is learnt
//     anew, with twice the evidence each time.
//
// A peer that lies about its clock can make any part of RTT−MinRTT count as a queue on its way back. Its algorithm
// then still sees no round trip below the least and every loss and mark, and the standing queue is on the peer's path.
type oneWayEstimator struct {
	first, last PeerClock
	firstRTT    time.Duration // of first
	rtt         time.Duration // newest; 0: none
	ticks       int64         // of the peer's clock, from first to last
	overtaken   int           // readings in a row that are older than last
	restarts    int

	tick            float64 // ns; 0: not known yet
	measuredTick    float64 // ns; an unusual one that was measured once; 0: none
	skew            float64 // part by which the peer's clock is slow
	skewBound       float64 // most that skew may be
	minima          *spanMinima
	leastBack       float64       // least reading of the way back, without skew, ns
	leastBackTarget float64       // leastBack rises to this, slowly
	leastThere      float64       // least reading of the way there, without skew, ns
	backQueue       time.Duration // queue on the way back, at the newest reading
}

// The constants of oneWayEstimator.
const (
	usualSkew     = 500e-6     // most that clocks are wrong by
	skewPrecision = 1e-7       // of fitSkew
	skewAge       = 10e9       // ns before the skew of a usual tick is fitted: queues grow or drain for less long
	leastBackRise = 1.0 / 1024 // most that leastBack rises, per time that passes
	certainRatio  = 16         // elapsed time over its uncertainty that tells the usual ticks apart
	measuredRatio = 512        // the same to measure a tick; the skew is then within twice its inverse
	hostJitter    = 200e3      // ns by which a host may be late to send or to notice an acknowledgement
	mostRestarts  = 8          // after which the demanded evidence stays the same
	mostStale     = 3          // acknowledgements in a row that others overtook
	wrapTicks     = 1 << 30    // of silence, after which timestamps may have wrapped around unseen
)

// usualTicks are those of TCP stacks: Linux has 1 ms, and 1 µs where a route says so. Others have clocks of 1000, 500,
// 250, 200 and 100 Hz.
var usualTicks = [...]time.Duration{
	time.Microsecond, time.Millisecond, 2 * time.Millisecond, 4 * time.Millisecond, 5 * time.Millisecond,
	10 * time.Millisecond,
}

// addReading takes in a reading of the peer's clock, the round trip of the same acknowledgement (0: unknown), and the
// flow's least round trip. It returns by how much the way back exceeded its least, and whether that is known.
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
	return max(0, min(o.backQueue, rtt-least)), true
}

// processReading takes in a reading that is new.
func (o *oneWayEstimator) processReading(c PeerClock, rtt, least time.Duration) {
	step := int64(int32(c.Value - o.last.Value))
	silence := float64(c.At.Sub(o.last.At))
	switch {
	case o.first.At == 0 || silence > wrapTicks*max(o.tick, float64(usualTicks[0])):
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
	unsure := 2*o.tick + hostJitter + o.skewBound*(silence+skewAge)
	if level-o.leastBack > float64(o.rtt)+unsure || o.leastBack-level > float64(least)+unsure {
		if rtt == 0 { // this acknowledgement itself may have been on its way that long
			return
		}
		o.restartLearning(c, rtt)
		return
	}
	o.leastBack = min(o.leastBack+min(max(0, o.leastBackTarget-o.leastBack), silence*leastBackRise), level)
	there := math.Inf(1)
	if rtt > 0 {
		there = float64(rtt) - back
		o.leastThere = min(o.leastThere, there+o.skew*t)
	}
	if o.minima.addReading(t, back, there, o.skew) {
		o.fitSkew(t)
		level = back - o.skew*t
	}
	// The way back is at least the least round trip without the least way there.
	emptyBack := max(o.leastBack, float64(least)-o.leastThere-o.tick)
	o.backQueue = time.Duration(max(0, level-emptyBack-o.tick))
}

// beginAt makes c the first reading if its round trip is known. The round trip of another acknowledgement would not
// say how long this one was on its way.
func (o *oneWayEstimator) beginAt(c PeerClock, rtt time.Duration) {
	*o = oneWayEstimator{rtt: o.rtt, restarts: o.restarts, measuredTick: o.measuredTick}
	if rtt > 0 {
		o.first, o.last, o.firstRTT = c, c, rtt
	}
}

// restartLearning learns the peer's clock anew, beginning with c.
func (o *oneWayEstimator) restartLearning(c PeerClock, rtt time.Duration) {
	o.restarts = min(o.restarts+1, mostRestarts)
	o.measuredTick = 0
	o.beginAt(c, rtt)
}

// measureTick finds the tick once enough time has passed since the first reading. An unusual tick must be measured
// twice in a row. Otherwise an odd first reading would define the tick, and its error would look like a queue that
// grows without end.
func (o *oneWayEstimator) measureTick(c PeerClock, elapsed, least time.Duration) {
	if o.ticks == 0 {
		return
	}
	unsure := float64(max(o.rtt, o.firstRTT) - least) // in ns, of the time between two departures
	certain := float64(int64(certainRatio) << o.restarts)
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
	case (unsure+tick)*max(certain, measuredRatio) > t:
	case tick < float64(usualTicks[0]) || tick > float64(usualTicks[len(usualTicks)-1]):
	case math.Abs(tick-o.measuredTick) <= 2*tick/measuredRatio:
		o.setTick(tick, 2.0/measuredRatio)
	default:
		o.measuredTick = tick
		o.beginAt(c, o.rtt)
	}
}

// setTick stores the tick (ns) with the bound of its skew, and begins to keep minima.
func (o *oneWayEstimator) setTick(tick, within float64) {
	o.tick, o.skewBound = tick, within
	t := float64(o.last.At.Sub(o.first.At))
	back := t - float64(o.ticks)*tick
	o.minima = &spanMinima{width: firstSpan}
	o.minima.addReading(0, 0, float64(o.firstRTT), 0) // a connection's first round trip is often the least
	o.leastBack, o.leastBackTarget, o.leastThere = min(0, back), 0, float64(o.firstRTT)
}

// fitSkew fits the skew at t, and with it the least of either way. It keeps the old skew unless another one explains
// the least round trip better than the data may be wrong by.
func (o *oneWayEstimator) fitSkew(t float64) {
	was := o.skew
	if o.skewBound > usualSkew || t > skewAge {
		o.skew = o.bestSkew()
	}
	o.leastBackTarget, o.leastThere = o.minima.leastOfAll(o.skew)
	o.leastBack = min(o.leastBackTarget, o.leastBack+(was-o.skew)*t)
}

// bestSkew returns the skew that makes the least of both ways together the longest.
func (o *oneWayEstimator) bestSkew() float64 {
	// sum is concave in the skew, because it adds minima of straight lines. The last term allows for when the least
	// was within its span.
	sum := func(s float64) float64 {
		back, there := o.minima.leastOfAll(s)
		return back + there - 2*o.minima.width*math.Abs(s-o.skew)
	}
	// Golden sections: each step evaluates sum at only one more place.
	const golden = 0.618033988749895
	low, high := -o.skewBound, o.skewBound
	a, b := high-golden*(high-low), low+golden*(high-low)
	atA, atB := sum(a), sum(b)
	for high-low > skewPrecision {
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
	enough := sum(best) - o.tick/4 - hostJitter
	if sum(worse) >= enough {
		return worse
	}
	for math.Abs(best-worse) > skewPrecision {
		if s := (best + worse) / 2; sum(s) < enough {
			worse = s
		} else {
			best = s
		}
	}
	return best
}

// Bounds of spanMinima.
const (
	spansKept   = 32
	firstSpan   = 100e6 // ns
	longestSpan = 25e9  // ns, after which the span does not double; 32 of them are about fourteen minutes
)

// spanMinima keeps the least readings of both ways of a round trip in each of the last spans of time. Spans are short
// at first and double when there are too many. At their longest, the oldest span is dropped instead.
type spanMinima struct {
	spans [spansKept]spanMinimum
	n     int
	width float64 // of a span, ns
	from  float64 // begin of the last span, ns
}

// spanMinimum is the least reading of either way within a span, and when it was (ns).
type spanMinimum struct {
	back, there     float64
	backAt, thereAt float64
}

// addReading takes in the readings at t; there is infinite if it is not known. It reports whether a span has ended.
func (l *spanMinima) addReading(t, back, there, skew float64) (ended bool) {
	if l.n == 0 || t-l.from >= l.width {
		ended = l.n > 0
		l.beginSpan(skew)
		l.from = t
	}
	s := &l.spans[l.n-1]
	s.keepLower(spanMinimum{back, there, t, t}, skew)
	return ended
}

// beginSpan begins a span, and merges or drops older ones if there is no room.
func (l *spanMinima) beginSpan(skew float64) {
	if l.n == spansKept && l.width < longestSpan {
		for i := range spansKept / 2 {
			l.spans[i] = l.spans[2*i]
			l.spans[i].keepLower(l.spans[2*i+1], skew)
		}
		l.n, l.width = spansKept/2, 2*l.width
	} else if l.n == spansKept {
		copy(l.spans[:], l.spans[1:])
		l.n--
	}
	l.spans[l.n] = spanMinimum{back: math.Inf(1), there: math.Inf(1)}
	l.n++
}

// keepLower keeps the lesser reading of each way, for a clock with that skew.
func (s *spanMinimum) keepLower(o spanMinimum, skew float64) {
	if o.back-skew*o.backAt < s.back-skew*s.backAt {
		s.back, s.backAt = o.back, o.backAt
	}
	if o.there+skew*o.thereAt < s.there+skew*s.thereAt {
		s.there, s.thereAt = o.there, o.thereAt
	}
}

// leastOfAll returns the least of either way over all spans, for a clock with that skew.
func (l *spanMinima) leastOfAll(skew float64) (back, there float64) {
	back, there = math.Inf(1), math.Inf(1)
	for i := range l.n {
		s := &l.spans[i]
		back = min(back, s.back-skew*s.backAt)
		there = min(there, s.there+skew*s.thereAt)
	}
	return back, there
}
