package figures

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
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

// Estimate is a figure of a sample with its 95 % confidence interval.
type Estimate struct{ Value, Low, High float64 }

// resamples is how many samples a bootstrap draws.
const resamples = 4000

// MeanRatio is the geometric mean of one ratio or more. The interval is the percentile bootstrap's
// (Efron 1979), from draws that are the same each time. Of two ratios it is their range, of one the ratio.
func MeanRatio(ratios []float64) Estimate {
	logs := make([]float64, len(ratios))
	for i, r := range ratios {
		logs[i] = math.Log(r)
	}
	e := Estimate{Value: math.Exp(meanOf(logs))}
	if len(ratios) < 3 {
		e.Low, e.High = slices.Min(ratios), slices.Max(ratios)
		return e
	}
	random := rand.New(rand.NewPCG(1, uint64(len(ratios)))) //nolint:gosec // statistics
	means, sample := make([]float64, resamples), make([]float64, len(logs))
	for i := range means {
		for k := range sample {
			sample[k] = logs[random.IntN(len(logs))]
		}
		means[i] = meanOf(sample)
	}
	slices.Sort(means)
	bound := func(p float64) float64 { return math.Exp(Quantile(means, p)) }
	e.Low, e.High = bound(0.025), bound(0.975)
	return e
}

// meanOf is the mean of one value or more.
func meanOf(values []float64) (m float64) {
	for _, v := range values {
		m += v / float64(len(values))
	}
	return m
}

// covarianceOf returns the covariance of two samples of one length, at least two. gonum's package stat would add
// 2.8 MB to the program.
func covarianceOf(x, y []float64) (c float64) {
	mx, my := meanOf(x), meanOf(y)
	for i := range x {
		c += (x[i] - mx) * (y[i] - my) / float64(len(x)-1)
	}
	return c
}

// String writes the figure with its interval: 0.36 [0.28, 0.40].
func (e Estimate) String() string {
	text := strconv.FormatFloat(e.Value, 'f', 2, 64)
	if e.Low == e.High {
		return text
	}
	return fmt.Sprintf("%s [%.2f, %.2f]", text, e.Low, e.High)
}
