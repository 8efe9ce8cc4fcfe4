package flow

import "math"

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
