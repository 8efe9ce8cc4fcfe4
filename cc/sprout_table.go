package cc

import (
	"math"
	"sync"
	"time"
)

// SproutTick is a tick of the model, and the time between two forecasts of a receiver (NSDI 2013 §3.1, §3.4).
const SproutTick = 20 * time.Millisecond

// The constants of the model (NSDI 2013 §3.1 and keithw/sprout, which agree).
const (
	sproutTickSecs = 0.02
	sproutHorizons = 8      // ticks ahead
	sproutMaxRate  = 1000.0 // units/s; nothing above it can be told apart
	// sproutBins is 257, not 256: the reference's last bin begins at the greatest rate.
	sproutBins     = 257
	sproutBinWidth = sproutMaxRate / 256 // units/s
	sproutSigma    = 200.0               // units/s per √s: how fast the rate wanders
	sproutEscape   = 1.0                 // per second: how often an outage ends
	// sproutCounts is how many arrivals a tick of the forecast tells apart: 0 to 29.
	sproutCounts = 30
	// sproutReach is 5 standard deviations of a tick's wandering, in bins: it
	// goes no further.
	sproutReach = 36
)

// sproutRow holds a number for each bin.
type sproutRow [sproutBins]float64

// sproutTable is the model worked out ahead: how a rate wanders within a tick,
// and what is delivered from each rate. It is 2 MB, takes about 15 ms, never
// changes, and is the same for every flow of the process.
type sproutTable struct {
	rate   sproutRow               // what a bin stands for, units/s
	arrive [sproutCounts]sproutRow // probability of that number of arrivals in a tick

	// A tick's wandering. Of bin 0, where the rate is exactly 0, it is outage; of
	// the others it depends on the distance alone, but for what gathers at the ends.
	outage [sproutReach + 1]float64 // to that bin
	spread [sproutReach + 1]float64 // by a number of bins, up or down; not into the ends
	bottom [sproutReach + 1]float64 // into bin 0, from that bin
	top    [sproutReach + 1]float64 // into the last bin, from that number of bins below it

	// reaches[h][c] is the probability, from each bin, that at most c units are
	// delivered within h ticks: the rows of h are 29·h+1.
	reaches [sproutHorizons + 1][]sproutRow
}

// One of each kind for the process, built when the first flow asks: the only
// memory that algorithms share, and it is never written again.
var (
	sproutReference  = sync.OnceValue(func() *sproutTable { return newSproutTable(false) })
	sproutNormalised = sync.OnceValue(func() *sproutTable { return newSproutTable(true) })
)

// newSproutTable builds the model. The reference scales the row of the outage
// without normalising it, so that an outage loses weight with every tick;
// normalised, it is left once a second, as the paper has it.
func newSproutTable(normalised bool) *sproutTable {
	t := &sproutTable{}
	for i := range t.rate {
		if i > 0 {
			t.rate[i] = (float64(i) + 0.5) * sproutBinWidth
		}
		p := math.Exp(-t.rate[i] * sproutTickSecs)
		for k := range t.arrive {
			t.arrive[k][i] = p
			p *= t.rate[i] * sproutTickSecs / float64(k+1)
		}
	}
	t.fillTransitions(normalised)
	t.fillReaches()
	return t
}

// fillTransitions works out the transitions of one tick.
func (t *sproutTable) fillTransitions(normalised bool) {
	s := sproutSigma * math.Sqrt(sproutTickSecs)
	below := func(edge, rate float64) float64 { return math.Erfc((rate-edge)/(s*math.Sqrt2)) / 2 }
	edge := func(i int) float64 { return float64(i) * sproutBinWidth }
	within := func(j int, rate float64) float64 { return below(edge(j+1), rate) - below(edge(j), rate) }
	mid := sproutBins / 2
	for k := range t.spread {
		t.spread[k] = within(mid+k, t.rate[mid])
		t.bottom[k] = below(edge(1), t.rate[k])
		t.top[k] = 1 - below(edge(sproutBins-1), t.rate[sproutBins-1-k])
		t.outage[k] = within(k, 0)
	}
	t.outage[0] = below(edge(1), 0)
	stay := math.Exp(-sproutEscape * sproutTickSecs)
	sum := 0.0
	for k := range t.outage {
		if k == 0 {
			t.outage[k] *= stay
		} else {
			t.outage[k] *= 1 - stay
		}
		sum += t.outage[k]
	}
	t.bottom[0] = 0 // outage[0] says it
	if normalised {
		for k := range t.outage {
			t.outage[k] /= sum
		}
	}
}

// fillReaches works out reaches. The counts of successive ticks are taken as
// independent once the first rate is given, as in the reference; within a tick
// the arrivals come first, the wandering after.
func (t *sproutTable) fillReaches() {
	// ahead[k][i] is the probability of k arrivals in the h-th tick when the first
	// one had bin i, times mass[i]: what is left of a row that sums to less than 1.
	ahead, tick, mass := t.arrive, t.arrive, sproutRow{}
	for i := range mass {
		mass[i] = 1
	}
	exactly := []sproutRow{mass} // probabilities of each count before the h-th tick: at first none has come
	for h := 1; h <= sproutHorizons; h++ {
		for k := range tick {
			for i := range mass {
				tick[k][i] = ahead[k][i] / mass[i]
			}
		}
		exactly = convolveCounts(exactly, tick[:])
		t.reaches[h] = cumulateCounts(exactly)
		for k := range ahead {
			ahead[k] = t.stepBack(&ahead[k])
		}
		mass = t.stepBack(&mass)
	}
}

// stepBack returns, for each bin, what v amounts to on average a tick later.
func (t *sproutTable) stepBack(v *sproutRow) (out sproutRow) {
	const last = sproutBins - 1
	for k, p := range t.outage {
		out[0] += p * v[k]
	}
	for i := 1; i < sproutBins; i++ {
		for j := max(1, i-sproutReach); j < min(i, last); j++ {
			out[i] += t.spread[i-j] * v[j]
		}
		for j := i; j <= min(i+sproutReach, last-1); j++ {
			out[i] += t.spread[j-i] * v[j]
		}
		if i <= sproutReach {
			out[i] += t.bottom[i] * v[0]
		}
		if last-i <= sproutReach {
			out[i] += t.top[last-i] * v[last]
		}
	}
	return out
}

// convolveCounts returns the distribution of the sum of two independent counts.
func convolveCounts(a, b []sproutRow) []sproutRow {
	sum := make([]sproutRow, len(a)+len(b)-1)
	for m := range a {
		for n := range b {
			into, x, y := &sum[m+n], &a[m], &b[n]
			for i := range into {
				into[i] += x[i] * y[i]
			}
		}
	}
	return sum
}

// cumulateCounts turns probabilities of exact counts into those of at most each count.
func cumulateCounts(exactly []sproutRow) []sproutRow {
	most := make([]sproutRow, len(exactly))
	most[0] = exactly[0]
	for c := 1; c < len(most); c++ {
		for i := range most[c] {
			most[c][i] = most[c-1][i] + exactly[c][i]
		}
	}
	return most
}
