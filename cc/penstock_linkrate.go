package cc

import (
	"math"
	"time"
)

const (
	linkMemory = 30 * time.Second // the best rate fades over it, while the queue is ours
	// linkWavers is the wavering from which on a link's rate says nothing of others. Fixed links waver by 0.00 to 0.03,
	// recorded cellular links by 0.11 to 0.60.
	linkWavers  = 0.12
	waverMemory = 10 * time.Second
	// waverDelay is how old the wavering in force is at least: what a rival has changed since does not count.
	waverDelay = 5 * time.Second
	waverStart = 1.0 // seconds in which the rate still grows from slow start
)

// linkRate is what the link carries while its queue is ours, and whether that can be relied on. The zero value has
// seen nothing.
type linkRate struct {
	peak   float64 // bytes/s: the most that the link delivered, fading
	mean   float64 // bytes/s, over waverMemory
	wavers float64 // mean distance of the rate from mean, in parts of it
	age    float64 // seconds in those means, waverMemory at most

	pending float64 // wavers when they were last noted
	steady  float64 // wavers when they were noted before that
	noted   Time
}

// add takes in the rate that held for gap seconds until now, while nothing suggests others.
func (l *linkRate) add(now Time, rate, gap float64) {
	if now.Sub(l.noted) > waverDelay {
		l.steady, l.pending, l.noted = l.pending, l.wavers, now
	}
	l.age = min(l.age+gap, waverMemory.Seconds())
	if l.age < waverStart {
		l.mean = rate
	}
	part := gap / max(l.age, gap, 1e-3)
	l.mean += (rate - l.mean) * part
	l.wavers += (math.Abs(rate-l.mean)/l.mean - l.wavers) * part
}

// forgetChange takes back the wavering since steady was noted, because a rival has caused it.
func (l *linkRate) forgetChange() { l.wavers, l.pending = l.steady, l.steady }

// rate is the rate in bytes/s that the link can be relied on for; 0: it wavers too much. A link seen for less than
// waverMemory has no old wavering, so its newest counts.
func (l *linkRate) rate() float64 {
	if l.steady > linkWavers || l.age < waverMemory.Seconds() && l.wavers > linkWavers {
		return 0
	}
	return l.peak
}
