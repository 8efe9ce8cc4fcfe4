package cc

import "math"

// sproutModel is what is believed about a link's rate: a probability for each
// bin of it (NSDI 2013 §3.1). It counts in units: how many bytes one has is the
// caller's choice. Evolving, observing and forecasting one horizon take about
// 8 µs of a 2.5 GHz core, 50 times a second for each flow with bytes in flight:
// a core has room for some 2000 of them.
type sproutModel struct {
	*sproutTable
	p sproutRow
	// q is p with room on both sides, for evolve to slide over.
	q [sproutReach + sproutBins + sproutReach + sproutBlock]float64
}

// sproutBlock is how many bins evolve works out at a time.
const sproutBlock = 4

// sproutMost is the greatest count that observe takes as it is: beyond five
// times what the greatest rate delivers all say the same, and what is left of a
// slow link's probability would be too little for a float.
const sproutMost = 100

func newSproutModel(t *sproutTable) sproutModel {
	m := sproutModel{sproutTable: t}
	m.resetToUniform()
	return m
}

// resetToUniform believes any rate as likely as any other.
func (m *sproutModel) resetToUniform() {
	for i := range m.p {
		m.p[i] = 1.0 / sproutBins
	}
}

// evolveTick lets a tick pass: the rate may have wandered.
func (m *sproutModel) evolveTick() {
	const last = sproutBins - 1
	outage, bottom, top := m.p[0], 0.0, 0.0
	for k := range m.spread {
		bottom += m.p[k] * m.bottom[k]
		top += m.p[last-k] * m.top[k]
	}
	copy(m.q[sproutReach+1:], m.p[1:])
	// This is most of what a tick costs: the way up and the way down share their
	// product, and four bins their reading.
	for j := 1; j < last; j += sproutBlock {
		around := m.q[j : j+2*sproutReach+sproutBlock]
		var a, b, c, d float64
		for k := sproutReach; k > 0; k-- {
			p := m.spread[k]
			down, up := around[sproutReach-k:][:sproutBlock], around[sproutReach+k:][:sproutBlock]
			a += p * (down[0] + up[0])
			b += p * (down[1] + up[1])
			c += p * (down[2] + up[2])
			d += p * (down[3] + up[3])
		}
		same, stay := around[sproutReach:], m.spread[0]
		m.p[j], m.p[j+1], m.p[j+2] = a+stay*same[0], b+stay*same[1], c+stay*same[2]
		if j+3 < last {
			m.p[j+3] = d + stay*same[3]
		}
	}
	for k := 1; k <= sproutReach; k++ {
		m.p[k] += outage * m.outage[k]
	}
	m.p[0], m.p[last] = bottom+outage*m.outage[0], top
	m.normaliseBelief()
}

// addArrivals takes in that n units arrived in the tick: Bayes' rule with the
// Poisson distribution.
func (m *sproutModel) addArrivals(n int) {
	likely := &m.arrive[min(n, sproutCounts-1)]
	for i := range m.p {
		m.p[i] *= likely[i]
	}
	if beyond := min(n, sproutMost) - (sproutCounts - 1); beyond > 0 {
		for i := range m.p {
			m.p[i] *= math.Pow(m.rate[i]/sproutMaxRate, float64(beyond)) // but for a factor that all share
		}
	}
	m.normaliseBelief()
}

// addAtLeast takes in that the tick would have brought n units or more, had more been sent.
func (m *sproutModel) addAtLeast(n int) {
	if n == 0 {
		return
	}
	fewer := &m.reaches[1][min(n, len(m.reaches[1]))-1]
	for i := range m.p {
		m.p[i] *= 1 - fewer[i]
	}
	m.normaliseBelief()
}

func (m *sproutModel) normaliseBelief() {
	sum := 0.0
	for _, p := range m.p {
		sum += p
	}
	if !(sum > 0) { // no rate explains it
		m.resetToUniform()
		return
	}
	scale := 1 / sum
	for i := range m.p {
		m.p[i] *= scale
	}
}

// meanRate is the expected rate, units/s.
func (m *sproutModel) meanRate() float64 {
	sum := 0.0
	for i, p := range m.p {
		sum += p * m.rate[i]
	}
	return sum
}

// forecastUnits returns how many units will be delivered within h ticks but for the
// probability quantile; from is a guess, such as the last answer.
func (m *sproutModel) forecastUnits(h int, quantile float64, from int) int {
	c := min(max(from, 0), len(m.reaches[h])-1)
	for c > 0 && m.probabilityAtMost(h, c-1) >= quantile {
		c--
	}
	for c < len(m.reaches[h])-1 && m.probabilityAtMost(h, c) < quantile {
		c++
	}
	return c
}

// probabilityAtMost is the probability that at most c units are delivered within h ticks.
func (m *sproutModel) probabilityAtMost(h, c int) float64 {
	row := &m.reaches[h][c]
	var a, b float64
	for i := 0; i+1 < sproutBins; i += 2 {
		a += m.p[i] * row[i]
		b += m.p[i+1] * row[i+1]
	}
	return a + b + m.p[sproutBins-1]*row[sproutBins-1]
}
