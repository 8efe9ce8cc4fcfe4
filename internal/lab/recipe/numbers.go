package recipe

import (
	"fmt"
	"math"
	"slices"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/builtin"
	"github.com/expr-lang/expr/conf"
	"github.com/expr-lang/expr/vm"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
)

// functions are of numbers alone.
type functions struct {
	Jain       func(list any) (float64, error)            `expr:"jain"`
	Percentile func(list any, p float64) (float64, error) `expr:"percentile"`
	KS         func(a, b any) (float64, error)            `expr:"ks"`
	Variation  func(list any) (float64, error)            `expr:"variation"`
}

var judging = functions{
	Jain:      of(jain),
	Variation: of(variation),
	KS:        kolmogorov,
	Percentile: func(list any, p float64) (float64, error) {
		return of(func(v []float64) float64 { return percentile(v, p) })(list)
	},
}

// language replaces functions of the language by functions that are NaN where there is no number, or where one was not
// measured. The language's own are 0 there, or pass over the NaN.
var language = []expr.Option{measured("mean"), measured("median"), measured("min"), measured("max")}

func measured(name string) expr.Option {
	own := func(name string) builtin.Function { return *builtin.Builtins[builtin.Index[name]] }
	replaced := own(name)
	replaced.Func = func(values ...any) (any, error) {
		value, err := own(name).Func(values...)
		if err != nil {
			return nil, err
		}
		least, _ := own("min").Func(values...) // fails of what is no number alone, as the other did
		mean, _ := own("mean").Func(values...)
		if mean, ok := mean.(float64); least == nil || ok && math.IsNaN(mean) {
			return math.NaN(), nil
		}
		return value, nil
	}
	return func(c *conf.Config) { c.Functions[name] = &replaced }
}

// jain is the fairness of rates; NaN where nothing moved.
func jain(rates []float64) float64 {
	if index := sim.Jain(rates...); index > 0 {
		return index
	}
	return math.NaN()
}

func of(f func([]float64) float64) func(any) (float64, error) {
	return func(list any) (float64, error) {
		v, err := numbers(list)
		return f(v), err
	}
}

// kolmogorov is the distance of Kolmogorov and Smirnov: the largest difference between the
// parts of two lists that are at most as large as any value; NaN where one has none.
func kolmogorov(a, b any) (float64, error) {
	first, err := numbers(a)
	if err != nil {
		return 0, err
	}
	second, err := numbers(b)
	if err != nil || len(first) == 0 || len(second) == 0 {
		return math.NaN(), err
	}
	part := func(values []float64, v float64) (n float64) {
		for _, x := range values {
			if x <= v {
				n += 1 / float64(len(values))
			}
		}
		return n
	}
	largest := 0.0
	for _, v := range slices.Concat(first, second) {
		largest = max(largest, math.Abs(part(first, v)-part(second, v)))
	}
	return largest, nil
}

// variation is the coefficient of variation.
func variation(values []float64) float64 {
	var mean, squares float64
	for _, v := range values {
		mean += v / float64(len(values))
		squares += v * v / float64(len(values))
	}
	return math.Sqrt(max(0, squares-mean*mean)) / mean
}

// number is what an expression comes to: true is 1 and false 0.
func number(p *vm.Program, env any) (float64, error) {
	v, err := expr.Run(p, env)
	if err != nil {
		return 0, err
	}
	if b, ok := v.(bool); ok {
		if b {
			return 1, nil
		}
		return 0, nil
	}
	return toNumber(v)
}

func toNumber(v any) (float64, error) {
	switch v := v.(type) {
	case float64:
		return v, nil
	case int:
		return float64(v), nil
	}
	return 0, fmt.Errorf("expected a number, not %v", v)
}

// numbers are those of a list.
func numbers(list any) ([]float64, error) {
	switch list := list.(type) {
	case []float64:
		return list, nil
	case []any:
		all := make([]float64, len(list))
		for i, v := range list {
			var err error
			if all[i], err = toNumber(v); err != nil {
				return nil, err
			}
		}
		return all, nil
	}
	return nil, fmt.Errorf("expected a list of numbers, not %v", list)
}

// figure is a number with its unit as text; never: +Inf.
func figure(v float64, unit string) string {
	if math.IsInf(v, 1) {
		return "never"
	}
	if unit == "" {
		return figures.Number(v)
	}
	return figures.Number(v) + " " + unit
}

// percentile is by the nearest rank; NaN of no values.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	return sim.NearestRank(slices.Sorted(slices.Values(values)), p/100)
}

func total(list []cc.Bytes) (sum cc.Bytes) {
	for _, n := range list {
		sum += n
	}
	return sum
}

// payload is what is left of a rate on the wire without headers, in Mbit/s.
func payload(wire cc.Rate) float64 {
	return wire.Mbps() * float64(cc.DefaultMSS) / float64(cc.DefaultMSS+sim.HeaderBytes)
}
