package figures

import (
	"math"
	"slices"
)

// Spread is a median with the range around it.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf summarises values; there is at least one. The median of an
// even number is the mean of the middle two.
func SpreadOf(values []float64) Spread {
	v := slices.Sorted(slices.Values(values))
	return Spread{Median: Quantile(v, 0.5), Min: v[0], Max: v[len(v)-1]}
}

// Quantile returns the interpolated p-quantile of sorted values; there is at least one.
func Quantile(sorted []float64, p float64) float64 {
	at := p * float64(len(sorted)-1)
	i := int(at)
	if i+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// NearestRank is the least of sorted values that a part p of them does not exceed; NaN of none.
func NearestRank(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return sorted[min(len(sorted)-1, max(0, int(math.Ceil(p*float64(len(sorted))))-1))]
}
