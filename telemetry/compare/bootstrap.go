package compare

import (
	"math"
	"math/rand/v2"
	"slices"
)

const (
	// resamples is how many samples of hosts are drawn for an interval, at most.
	resamples = 1000
	// maxDraws bounds the hosts drawn for all samples together, which takes a second.
	maxDraws = 4e6
)

// Interval is a figure with its 95 % confidence interval. All are NaN where a side has no value.
type Interval struct {
	Value float64 `json:"value"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
}

// contrast is one figure of both sides, with its difference and ratio, first to second.
type contrast struct {
	first, second     float64
	difference, ratio Interval
}

// contrastSides returns the contrasts of all figures between two lists of hosts. Its intervals are those of the
// bootstrap that draws whole hosts of each side with replacement (Efron and Tibshirani 1993, section 8.6), with the
// quantiles moved out for small samples (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", expanded
// percentile interval). The draws are the same each time.
func contrastSides(first, second []Unit, figures []figure) []contrast {
	a, b := sumUnits(first), sumUnits(second)
	out := make([]contrast, len(figures))
	for i, f := range figures {
		out[i].first, out[i].second = f.compute(&a), f.compute(&b)
		out[i].difference.Value, out[i].ratio.Value = out[i].first-out[i].second, out[i].first/out[i].second
	}
	differences, ratios := make([][]float64, len(figures)), make([][]float64, len(figures))
	random := rand.New(rand.NewPCG(uint64(len(first)), uint64(len(second)))) //nolint:gosec // statistics
	for range min(resamples, maxDraws/max(1, len(first)+len(second))) {
		a, b := drawHosts(first, random), drawHosts(second, random)
		for i, f := range figures {
			x, y := f.compute(&a), f.compute(&b)
			if !math.IsNaN(x) && !math.IsNaN(y) {
				differences[i] = append(differences[i], x-y)
				ratios[i] = append(ratios[i], x/y)
			}
		}
	}
	tail := tailProbability(min(len(first), len(second)))
	for i := range figures {
		out[i].difference.setBounds(differences[i], tail)
		out[i].ratio.setBounds(ratios[i], tail)
	}
	return out
}

// sumUnits adds up hosts.
func sumUnits(hosts []Unit) (sum Unit) {
	for i := range hosts {
		sum.addUnit(&hosts[i])
	}
	return sum
}

// drawHosts adds up as many hosts as there are, each drawn from all.
func drawHosts(hosts []Unit, random *rand.Rand) (sum Unit) {
	for range hosts {
		sum.addUnit(&hosts[random.IntN(len(hosts))])
	}
	return sum
}

// setBounds sets the bounds to the tail quantiles of drawn values.
func (i *Interval) setBounds(drawn []float64, tail float64) {
	if len(drawn) == 0 {
		i.Low, i.High = math.NaN(), math.NaN()
		return
	}
	slices.Sort(drawn)
	at := func(p float64) float64 { return drawn[min(len(drawn)-1, int(p*float64(len(drawn))))] }
	i.Low, i.High = at(tail), at(1-tail)
}

// tailProbability is the part of the draws below the lower bound of an interval of n hosts. It is 2.5 % for many
// hosts. It is less for few, because a bootstrap underestimates how these differ.
func tailProbability(n int) float64 {
	if n < 2 {
		return 0
	}
	const z = 1.959964
	nu := float64(n - 1)
	// The quantile of Student's distribution, by Cornish and Fisher's expansion.
	t := z + (z*z*z+z)/(4*nu) + (5*math.Pow(z, 5)+16*z*z*z+3*z)/(96*nu*nu)
	return math.Erfc(t*math.Sqrt(float64(n)/nu)/math.Sqrt2) / 2
}
