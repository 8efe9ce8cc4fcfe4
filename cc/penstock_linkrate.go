package cc

import (
	"math"
	"time"
)

const (
	linkMemory = 30 * time.Second // over which peak fades, while the queue is ours
	// A rate that wavers by more than mostWavering says nothing of others. Fixed links waver by 0.00 to 0.03, recorded
	// cellular links by 0.11 to 0.60.
	mostWavering = 0.12
	waverMemory  = 10 * time.Second
	waverDelay   = 5 * time.Second // age of oldWavering at least, because a rival changes the newest
	waverStart   = 1.0             // seconds in which the rate still grows from slow start
)

// linkRate is what the link carries while its queue is ours, and how steadily. The zero value has seen nothing.
type linkRate struct {
	peak     float64 // bytes/s: the most that the link delivered, fading over linkMemory
	mean     float64 // bytes/s, over waverMemory
	wavering float64 // distance of the rate from mean, as a part of mean; the mean of it over waverMemory
	age      float64 // seconds that both means are over, waverMemory at most

	notedWavering float64 // wavering at notedAt
	oldWavering   float64 // wavering when it was noted before that
	notedAt       Time
}

// add takes in the rate that held for gap seconds until now, while nothing suggests others.
func (l *linkRate) add(now Time, rate, gap float64) {
	if now.Sub(l.notedAt) > waverDelay {
		l.oldWavering, l.notedWavering, l.notedAt = l.notedWavering, l.wavering, now
	}
	l.age = min(l.age+gap, waverMemory.Seconds())
	if l.age < waverStart {
		l.mean = rate
	}
	part := gap / max(l.age, gap, 1e-3)
	l.mean += (rate - l.mean) * part
	l.wavering += (math.Abs(rate-l.mean)/l.mean - l.wavering) * part
}

// forgetChange sets wavering back to oldWavering, because a rival has caused the change.
func (l *linkRate) forgetChange() { l.wavering, l.notedWavering = l.oldWavering, l.oldWavering }

// rate returns what the link is relied on to carry, in bytes/s; 0: its rate wavers too much. A link seen for less than
// waverMemory has no old wavering, so its newest counts.
func (l *linkRate) rate() float64 {
	if l.oldWavering > mostWavering || l.age < waverMemory.Seconds() && l.wavering > mostWavering {
		return 0
	}
	return l.peak
}
