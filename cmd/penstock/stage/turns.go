package stage

import (
	"math/rand/v2"
	"time"
)

// turn is a time in which an application runs.
type turn struct{ from, to time.Duration }

// turns are when the actor of that number runs, in order, until the run is over.
func (s Stage) turns(number int) []turn {
	a := s.Actors[number]
	end := s.Duration
	if a.Stop > 0 {
		end = min(end, a.Stop)
	}
	if a.On == 0 {
		return []turn{{a.Start, end}}
	}
	draw := func(mean time.Duration) time.Duration { return mean }
	if a.Random {
		r := rand.New(rand.NewPCG(s.Seed, uint64(number)))
		draw = func(mean time.Duration) time.Duration { return time.Duration(r.ExpFloat64() * float64(mean)) }
	}
	var all []turn
	for t := a.Start; t < end; {
		on := max(draw(a.On), time.Millisecond) // so that it ends
		all = append(all, turn{t, min(t+on, end)})
		t += on + draw(a.Off)
	}
	return all
}

// ranFor is how long an application with these turns has run by then.
func ranFor(turns []turn, now time.Duration) time.Duration {
	var sum time.Duration
	for _, t := range turns {
		sum += max(0, min(now, t.to)-t.from)
	}
	return sum
}

// nextTurn is when it runs again: now, if it does; false: never.
func nextTurn(turns []turn, now time.Duration) (time.Duration, bool) {
	for _, t := range turns {
		if now < t.to {
			return max(now, t.from), true
		}
	}
	return 0, false
}
