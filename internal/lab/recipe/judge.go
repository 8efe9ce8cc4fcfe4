package recipe

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// of returns the run of the stage with that name.
func (o Outcome) of(name string) Run {
	for _, r := range o.Runs {
		if r.Stage.Name == name {
			return r
		}
	}
	panic(fmt.Sprintf("recipe: no stage is named %q", name)) // a mistake in the recipe, which its test finds
}

// actor returns what came of the actor with that name.
func (r Run) actor(name string) stage.ActorRecord {
	for _, a := range r.Record.Actors {
		if a.Name == name {
			return a
		}
	}
	panic(fmt.Sprintf("recipe: %s has no actor %q", r.Stage.Name, name))
}

// rate is an actor's throughput between two moments, in Mbit/s of payload.
func (r Run) rate(actor string, from, to time.Duration) float64 {
	return r.actor(actor).Rate(from, to).Mbps()
}

// rates are those of several.
func (r Run) rates(from, to time.Duration, actors ...string) []float64 {
	var out []float64
	for _, a := range actors {
		out = append(out, r.rate(a, from, to))
	}
	return out
}

// capacity is what the last hop carries of payload, in Mbit/s; it has a fixed rate.
func (r Run) capacity() float64 { return payload(r.Stage.Down.Rate) }

// payload is what is left of a rate on the wire without headers, in Mbit/s.
func payload(wire cc.Rate) float64 {
	return wire.Mbps() * float64(cc.DefaultMSS) / float64(cc.DefaultMSS+sim.HeaderBytes)
}

// firstAt is the first moment from which on an actor has had so many Mbit/s over
// a time; false: never.
func (r Run) firstAt(actor string, mbit float64, over, from, to time.Duration) (time.Duration, bool) {
	a := r.actor(actor)
	for t := from; t+over <= to; t += stage.Step {
		if a.Rate(t, t+over).Mbps() >= mbit {
			return t + over, true
		}
	}
	return 0, false
}

// p95 is of the last hop's queueing, in ms.
func (r Run) p95() float64 { return millis(r.Record.Queueing.P95) }

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func rate(mbit float64) cc.Rate { return cc.Rate(mbit * 1e6) }

// maxMin fills a capacity with water until each has what it wants, or as much as
// the others.
func maxMin(capacity float64, wants []float64) []float64 {
	got := make([]float64, len(wants))
	for left := capacity; ; {
		open := 0
		least := math.Inf(1)
		for i, w := range wants {
			if got[i] < w {
				open++
				least = min(least, w-got[i])
			}
		}
		if open == 0 || left <= 0 {
			return got
		}
		step := min(least, left/float64(open))
		for i, w := range wants {
			if got[i] < w {
				got[i] += step
			}
		}
		left -= step * float64(open)
		if step < least {
			return got
		}
	}
}

func sum(values []float64) (s float64) {
	for _, v := range values {
		s += v
	}
	return s
}

// figure is a number with its unit.
func figure(v float64, unit string) string {
	if unit == "" {
		return figures.Number(v)
	}
	return figures.Number(v) + " " + unit
}

// within asserts lo ≤ got ≤ hi.
func within(what, paper string, got, lo, hi float64, unit string) Finding {
	return Finding{
		What: what, Paper: paper, Bound: figures.Number(lo) + " to " + figure(hi, unit),
		Got: figure(got, unit), OK: got >= lo && got <= hi,
	}
}

// atLeast asserts got ≥ bound.
func atLeast(what, paper string, got, bound float64, unit string) Finding {
	return Finding{
		What: what, Paper: paper, Bound: "at least " + figure(bound, unit), Got: figure(got, unit),
		OK: got >= bound,
	}
}

// atMost asserts got ≤ bound.
func atMost(what, paper string, got, bound float64, unit string) Finding {
	return Finding{
		What: what, Paper: paper, Bound: "at most " + figure(bound, unit), Got: figure(got, unit),
		OK: got <= bound,
	}
}

// above asserts got > bound.
func above(what, paper string, got, bound float64, unit string) Finding {
	return Finding{
		What: what, Paper: paper, Bound: "above " + figure(bound, unit), Got: figure(got, unit),
		OK: got > bound,
	}
}

// holds asserts a fact.
func holds(what, paper, bound, got string, ok bool) Finding {
	return Finding{What: what, Paper: paper, Bound: bound, Got: got, OK: ok}
}

// beside shows a figure of a baseline, of which nothing is asserted.
func beside(what, paper, got string) Finding {
	return Finding{What: what, Paper: paper, Bound: "for comparison", Got: got, OK: true}
}

// jain is the fairness index: 1 when all are equal.
func jain(values ...float64) float64 { return sim.Jain(values...) }
