package compare

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// LeastHosts is how many hosts each side needs for a verdict: fewer do not show how hosts differ.
const LeastHosts = 8

// figure is one that both sides have, and that is compared.
type figure struct {
	name, unit string
	compute    func(*Unit) float64 // NaN where there is none
}

// figures are all that are compared, in the order of the answer.
var figures = []figure{
	{"queueing delay, mean", "s", func(u *Unit) float64 { return u.seconds / u.busy }},
	{"queueing delay, median", "s", func(u *Unit) float64 { return u.delayQuantile(0.5) }},
	{"queueing delay, 95th percentile", "s", func(u *Unit) float64 { return u.delayQuantile(0.95) }},
	{"rate while busy", "bit/s", func(u *Unit) float64 { return 8 * u.bytes / u.busy }},
	{"downloads up to 100 kB", "s", func(u *Unit) float64 { return u.took[0].mean() }},
	{"downloads up to 1 MB", "s", func(u *Unit) float64 { return u.took[1].mean() }},
	{"downloads up to 10 MB", "s", func(u *Unit) float64 { return u.took[2].mean() }},
	{"larger downloads", "s", func(u *Unit) float64 { return u.took[3].mean() }},
}

// The places of the figures that decide a verdict.
const (
	delayFigure = 2
	rateFigure  = 3
)

// Side is one of the two that are compared.
type Side struct {
	Rule    string  `json:"rule"` // empty: the defaults
	Hosts   int     `json:"hosts"`
	Seconds float64 `json:"busy_seconds"`
}

// Figure is one figure of both sides. Difference and ratio are those of the first to the second.
type Figure struct {
	Name       string   `json:"name"`
	Unit       string   `json:"unit"`
	First      float64  `json:"first"`
	Second     float64  `json:"second"`
	Difference Interval `json:"difference"`
	Ratio      Interval `json:"ratio"`
}

// Result says what the first side gains over the second. It has only figures that both sides have.
type Result struct {
	First   Side     `json:"first"`
	Second  Side     `json:"second"`
	Unit    string   `json:"unit"` // what is drawn for the intervals: hosts, or turns of one host
	Figures []Figure `json:"figures"`
	Verdict string   `json:"verdict"`
	// Harmful says that the first side costs more than a fifth of the rate, with 97.5 % confidence.
	Harmful bool `json:"harmful"`
}

// Compare compares two rules by what was observed in the last day. unit names what is drawn for the intervals, in the
// plural: hosts.
func (r *Recorder) Compare(now time.Time, first, second, unit string) Result {
	a, b := r.hostsOf(now, first), r.hostsOf(now, second)
	sumA, sumB := sumUnits(a), sumUnits(b)
	out := Result{
		First: Side{first, len(a), sumA.busy}, Second: Side{second, len(b), sumB.busy}, Unit: unit, Figures: []Figure{},
	}
	if len(a) > 0 && len(b) > 0 {
		contrasts := contrastSides(a, b, figures)
		for i, c := range contrasts {
			if !isNumber(c.difference) || !isNumber(c.ratio) {
				continue
			}
			out.Figures = append(out.Figures, Figure{
				Name: figures[i].name, Unit: figures[i].unit, First: c.first, Second: c.second,
				Difference: c.difference, Ratio: c.ratio,
			})
		}
		out.decide(&contrasts[delayFigure].ratio, &contrasts[rateFigure].ratio)
		return out
	}
	out.Verdict = out.lackingHosts()
	return out
}

// isNumber reports whether an interval can be written.
func isNumber(i Interval) bool {
	return !math.IsNaN(i.Value+i.Low+i.High) && !math.IsInf(i.Value, 0) && !math.IsInf(i.Low, 0) && !math.IsInf(i.High, 0)
}

// lackingHosts says how many hosts there are, and how many are needed.
func (r *Result) lackingHosts() string {
	return fmt.Sprintf("not enough yet: %d and %d %s were seen, and %d are needed on each side",
		r.First.Hosts, r.Second.Hosts, r.Unit, LeastHosts)
}

// decide sets the verdict by the ratios of delay and rate.
func (r *Result) decide(delay, rate *Interval) {
	if min(r.First.Hosts, r.Second.Hosts) < LeastHosts || !isNumber(*delay) || !isNumber(*rate) {
		r.Verdict = r.lackingHosts()
		return
	}
	r.Harmful = rate.High < 0.8
	r.Verdict = describeRatio("queueing delay at the 95th percentile", *delay) + "; " +
		describeRatio("rate while busy", *rate)
}

// describeRatio says in words what a ratio and its interval show.
func describeRatio(what string, i Interval) string {
	if i.Low <= 1 && 1 <= i.High {
		return fmt.Sprintf("no difference in %s is shown (%s to %s)", what, describePercent(i.Low), describePercent(i.High))
	}
	size := fmt.Sprintf("%.0f %% less", 100*(1-i.Value))
	switch {
	case i.Value >= 10:
		size = fmt.Sprintf("%.0f times the", i.Value)
	case i.Value > 1:
		size = fmt.Sprintf("%.0f %% more", 100*(i.Value-1))
	}
	return fmt.Sprintf("%s %s (%s to %s)", size, what, describePercent(i.Low), describePercent(i.High))
}

// describePercent writes a ratio as a change: −20 %.
func describePercent(ratio float64) string {
	return strings.Replace(fmt.Sprintf("%+.0f %%", 100*(ratio-1)), "-", "−", 1)
}
