package stage

import (
	"time"

	"github.com/penstock-net/penstock/cc/sim"
)

// Turns are when the actor of that number runs, in order, until the run is over.
func (s Stage) Turns(number int) []sim.Turn {
	a := s.Actors[number]
	f := sim.FlowConfig{Start: a.Start, Stop: a.Stop, On: a.On, Off: a.Off, Random: a.Random}
	return f.Turns(number, s.Seed, s.Duration)
}

// ranFor is how long an application with these turns has run by then.
func ranFor(turns []sim.Turn, now time.Duration) time.Duration {
	var sum time.Duration
	for _, t := range turns {
		sum += max(0, min(now, t.To)-t.From)
	}
	return sum
}

// nextTurn is when it runs again: now, if it does; false: never.
func nextTurn(turns []sim.Turn, now time.Duration) (time.Duration, bool) {
	for _, t := range turns {
		if now < t.To {
			return max(now, t.From), true
		}
	}
	return 0, false
}
