package cc

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"
)

// belief is a model that has seen the counts, tick by tick.
func belief(t *sproutTable, counts ...int) *sproutModel {
	m := newSproutModel(t)
	for _, n := range counts {
		m.evolveTick()
		m.addArrivals(n)
	}
	return &m
}

// times is n ticks with so many arrivals.
func times(n, arrivals int) []int {
	counts := make([]int, n)
	for i := range counts {
		counts[i] = arrivals
	}
	return counts
}

// certain is the belief that the rate is that of one bin.
func certain(bin int) (p sproutRow) {
	p[bin] = 1
	return p
}

func (m *sproutModel) forecasts(quantile float64) (counts [sproutHorizons]int) {
	for h := range counts {
		counts[h] = m.forecastUnits(h+1, quantile, 0)
	}
	return counts
}

func TestSproutModelWorkedNumbers(t *testing.T) {
	reference, normalised := sproutReference(), sproutNormalised()
	unobserved := func(t *sproutTable, n int, counts ...int) *sproutModel {
		m := belief(t, counts...)
		for range n {
			m.evolveTick()
		}
		return m
	}
	after := func(n, arrivals int, more ...int) []int { return append(times(n, arrivals), more...) }
	for name, tt := range map[string]struct {
		model    *sproutModel
		quantile float64
		mean     float64
		outage   float64
		counts   [sproutHorizons]int
	}{
		"any rate is as likely": {belief(reference), 0.05, 501.9, 0.0039, [8]int{1, 1, 3, 4, 5, 6, 8, 9}},
		"200 ticks of 0":        {belief(reference, times(200, 0)...), 0.05, 0.8, 0.970, [8]int{}},
		"200 ticks of 1": {
			belief(reference, times(200, 1)...), 0.05, 68.0, 0,
			[8]int{0, 0, 0, 1, 1, 2, 3, 4},
		},
		"200 ticks of 5": {
			belief(reference, times(200, 5)...), 0.05, 258.4, 0,
			[8]int{2, 4, 8, 11, 14, 18, 21, 24},
		},
		"200 ticks of 10": {
			belief(reference, times(200, 10)...), 0.05, 505.9, 0,
			[8]int{5, 12, 20, 27, 35, 43, 51, 59},
		},
		"200 ticks of 20": {
			belief(reference, times(200, 20)...), 0.05, 953.5, 0,
			[8]int{12, 28, 44, 61, 77, 94, 111, 128},
		},
		"an empty tick after 10": {
			belief(reference, after(200, 10, 0)...), 0.05, 413.4, 0,
			[8]int{4, 9, 15, 21, 27, 33, 39, 44},
		},
		"two empty ticks": {
			belief(reference, after(200, 10, 0, 0)...), 0.05, 314.9, 0,
			[8]int{2, 6, 10, 13, 17, 21, 25, 29},
		},
		"three empty ticks": {
			belief(reference, after(200, 10, 0, 0, 0)...), 0.05, 209.8, 0.001,
			[8]int{1, 2, 4, 6, 8, 10, 12, 14},
		},
		"four empty ticks": {
			belief(reference, after(200, 10, times(4, 0)...)...), 0.05, 105.9, 0.057,
			[8]int{0, 0, 0, 0, 0, 0, 1, 2},
		},
		"five empty ticks": {
			belief(reference, after(200, 10, times(5, 0)...)...), 0.05, 42.8, 0.289,
			[8]int{},
		},
		"10 after 100 empty ticks": {
			belief(reference, after(100, 0, 10)...), 0.05, 129, 0,
			[8]int{0, 1, 3, 4, 5, 7, 8, 10},
		},
		"three of them": {
			belief(reference, after(100, 0, times(3, 10)...)...), 0.05, 246, 0,
			[8]int{1, 4, 8, 11, 14, 18, 21, 24},
		},
		"six of them": {
			belief(reference, after(100, 0, times(6, 10)...)...), 0.05, 350, 0,
			[8]int{3, 7, 12, 17, 23, 28, 33, 38},
		},
		"10 a tick, then 10 unobserved": {
			unobserved(reference, 10, times(200, 10)...), 0.05, 505.9, 0,
			[8]int{4, 10, 17, 23, 30, 36, 42, 49},
		},
		"the median of 10 a tick": {
			belief(reference, times(200, 10)...), 0.5, 505.9, 0,
			[8]int{10, 20, 30, 40, 50, 60, 70, 80},
		},
		"the first quartile of it": {
			belief(reference, times(200, 10)...), 0.25, 505.9, 0,
			[8]int{8, 17, 26, 35, 44, 53, 62, 71},
		},
		"normalised: no counts yet":  {belief(normalised), 0.05, 501.9, 0.0039, [8]int{1, 1, 3, 4, 5, 6, 7, 8}},
		"normalised: 200 ticks of 0": {belief(normalised, times(200, 0)...), 0.05, 0.4, 0.984, [8]int{}},
		"normalised: 200 ticks of 10": {
			belief(normalised, times(200, 10)...), 0.05, 505.9, 0,
			[8]int{5, 12, 20, 27, 35, 43, 51, 59},
		},
		"normalised: four empty ticks": {
			belief(normalised, after(200, 10, times(4, 0)...)...), 0.05, 104.6, 0.068,
			[8]int{},
		},
		"beyond 100, all counts are one": {
			belief(reference, 100_000), 0.05, belief(reference, 100).meanRate(), 0,
			belief(reference, 100).forecasts(0.05),
		},
	} {
		assert.InDelta(t, tt.mean, tt.model.meanRate(), max(0.01*tt.mean, 0.05), "%s: mean rate", name)
		assert.InDelta(t, tt.outage, tt.model.p[0], 0.001, "%s: outage", name)
		for h, c := range tt.model.forecasts(tt.quantile) {
			assert.InDelta(t, tt.counts[h], c, 1, "%s: within %d ticks", name, h+1)
		}
	}
	assert.InDelta(t, 0.543934, reference.outage[0], 1e-6,
		"an outage keeps so much of its weight in the authors' program")
	assert.InDelta(t, 0.98406, normalised.outage[0], 1e-5, "and stays with this probability in their paper")
}

// transition is the probability to wander from bin i to bin j in a tick, as NSDI
// 2013 §3.1 has it.
func transition(t *sproutTable, i, j int) float64 {
	const b = 1000.0 / 256
	s := 200 * math.Sqrt(0.02)
	below := func(x float64) float64 { return math.Erfc(-(x-t.rate[i])/(s*math.Sqrt2)) / 2 }
	lo, hi := below(float64(j)*b), below(float64(j+1)*b)
	switch j {
	case 0:
		lo = 0
	case 256:
		hi = 1
	}
	p := hi - lo
	switch {
	case i == 0 && j == 0:
		p *= math.Exp(-0.02)
	case i == 0:
		p *= 1 - math.Exp(-0.02)
	}
	return p
}

func TestSproutModelWandersAsTheDefinitionSays(t *testing.T) {
	table := sproutReference()
	m := belief(table, 3, 0, 0, 25, 12)
	for _, start := range []int{-1, 0, 1, 20, 128, 250, 256} {
		if start >= 0 {
			m.p = certain(start)
		}
		var want, value sproutRow
		sum := 0.0
		for j := range want {
			value[j] = math.Sin(float64(j))
			for i, p := range m.p {
				want[j] += p * transition(table, i, j)
			}
			sum += want[j]
		}
		mean := 0.0 // of value, a tick later
		for j := range want {
			mean += want[j] * value[j]
		}
		back, backward := table.stepBack(&value), 0.0
		for i, p := range m.p {
			backward += p * back[i]
		}
		assert.InDelta(t, mean, backward, 1e-5, "from bin %d, backwards", start)
		m.evolveTick()
		for j := range want {
			assert.InDelta(t, want[j]/sum, m.p[j], 1e-5, "from bin %d to bin %d", start, j)
		}
	}
}

func TestSproutForecastIsThatOfItsDefinition(t *testing.T) {
	// From one bin, count by count and tick by tick.
	table := sproutReference()
	for _, start := range []int{0, 1, 40, 256} {
		p := certain(start)
		total := []float64{1}
		for h := 1; h <= 4; h++ {
			next := make([]float64, len(total)+29)
			for c, x := range total {
				for k := range 30 {
					for i, y := range p {
						next[c+k] += x * y * table.arrive[k][i]
					}
				}
			}
			total = next
			most := 0.0
			for c, x := range total {
				most += x
				assert.InDelta(t, most, table.reaches[h][c][start], 1e-6, "at most %d within %d ticks of bin %d", c,
					h, start)
			}
			m := sproutModel{sproutTable: table, p: p}
			m.evolveTick()
			p = m.p
		}
	}
}

func TestSproutModelProperties(t *testing.T) {
	tables := []*sproutTable{sproutReference(), sproutNormalised()}
	rapid.Check(t, func(t *rapid.T) {
		m := belief(tables[rapid.IntRange(0, 1).Draw(t, "table")],
			rapid.SliceOfN(rapid.OneOf(rapid.Just(0), rapid.IntRange(0, 30), rapid.IntRange(0, 1_000_000)), 0,
				40).Draw(t, "counts")...)
		sum := 0.0
		for _, p := range m.p {
			assert.GreaterOrEqual(t, p, 0.0)
			sum += p
		}
		assert.InDelta(t, 1, sum, 1e-9, "the probabilities are all there is")
		cautious, even := m.forecasts(0.05), m.forecasts(0.5)
		for h := range cautious {
			assert.LessOrEqual(t, cautious[h], even[h], "5 % is not above 50 %")
			if h > 0 {
				assert.GreaterOrEqual(t, cautious[h], cautious[h-1], "counts are cumulative")
			}
		}
		guess := rapid.IntRange(-10, 1000).Draw(t, "guess")
		assert.Equal(t, cautious[4], m.forecastUnits(5, 0.05, guess), "the guess does not matter")
	})
}

func TestSproutModelUnobservedWidens(t *testing.T) {
	m := belief(sproutReference(), times(200, 10)...)
	mean, before := m.meanRate(), m.forecasts(0.05)
	for range 10 {
		m.evolveTick()
	}
	assert.InDelta(t, mean, m.meanRate(), 1, "the mean stays")
	for h, c := range m.forecasts(0.05) {
		assert.Less(t, c, before[h], "the forecast within %d ticks gets more cautious", h+1)
	}
	m.p = sproutRow{}
	m.addArrivals(1)
	assert.Equal(t, belief(sproutReference()).p, m.p, "what no rate explains leaves no belief")
}

func BenchmarkSproutTable(b *testing.B) {
	for b.Loop() {
		newSproutTable(false)
	}
}

// BenchmarkSproutTick is what each flow with bytes in flight costs 50 times a second.
func BenchmarkSproutTick(b *testing.B) {
	p := newPath(b, "sprout")
	p.Ack(10, 40*ms)
	b.ReportAllocs()
	for b.Loop() {
		p.state.Now = p.alg.Control().NextTick
		p.Ack(10, 40*ms)
	}
}
