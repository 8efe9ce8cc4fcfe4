package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/internal/lab/figures"
)

// Fidelity says by how much an algorithm's real runs differ from those in virtual
// time over the same links.
type Fidelity struct {
	Sender     string // the real one: "copa@ebpf"
	Throughput Difference
	P95        Difference // of queueing
}

// Difference summarises one figure's over the links on which both runs count.
type Difference struct {
	Links         int     // that have it
	Real, Virtual float64 // means of the figure itself
	Mean          float64 // of the differences of real from virtual, in per cent of virtual
	Deviation     float64 // their standard deviation over the links; NaN with fewer than two
	Error         float64 // the mean's standard error: Deviation over the root of Links; NaN with fewer than two
}

// Fidelities compares each real sender with the same algorithm in virtual time,
// link by link: runs belong together that are of one path, seed and number.
func Fidelities(results []Result) []Fidelity {
	var all []Fidelity
	var pairs [][][2]Result
	for _, r := range results {
		if r.Algorithm == "" || r.virtual() {
			continue
		}
		v := slices.IndexFunc(results, func(o Result) bool {
			return o.virtual() && o.Algorithm == r.Algorithm && o.path(true) == r.path(true) &&
				o.Seed == r.Seed && o.Run == r.Run
		})
		i := slices.IndexFunc(all, func(f Fidelity) bool { return f.Sender == r.Sender })
		if i < 0 {
			i = len(all)
			all, pairs = append(all, Fidelity{Sender: r.Sender}), append(pairs, nil)
		}
		if v >= 0 && r.Discarded == "" {
			pairs[i] = append(pairs[i], [2]Result{r, results[v]})
		}
	}
	for i := range all {
		all[i].Throughput = difference(pairs[i], func(r Result) float64 { return r.Throughput })
		all[i].P95 = difference(pairs[i], func(r Result) float64 { return r.Queueing.P95 })
	}
	return all
}

// difference is that of one figure between the first and the second of each pair.
// Pairs are left out of which the second has none.
func difference(pairs [][2]Result, figure func(Result) float64) Difference {
	var d Difference
	var each []float64
	for _, p := range pairs {
		found, expected := figure(p[0]), figure(p[1])
		if expected <= 0 {
			continue
		}
		d.Real += found
		d.Virtual += expected
		each = append(each, 100*(found/expected-1))
		d.Mean += each[len(each)-1]
	}
	d.Links = len(each)
	n := float64(d.Links)
	d.Real, d.Virtual, d.Mean = d.Real/n, d.Virtual/n, d.Mean/n
	squares := 0.0
	for _, v := range each {
		squares += (v - d.Mean) * (v - d.Mean)
	}
	d.Deviation, d.Error = math.NaN(), math.NaN()
	if d.Links > 1 {
		d.Deviation = math.Sqrt(squares / (n - 1))
		d.Error = d.Deviation / math.Sqrt(n)
	}
	return d
}

// WriteFidelities writes a table of them, and what says how far to trust it.
func WriteFidelities(w io.Writer, results []Result) error {
	var b strings.Builder
	if len(results) > 0 {
		b.WriteString(results[0].path(true) + "\n\n")
	}
	g := figures.Table{
		{
			"", "", "Mbit/s", figures.Spans, "difference, %", figures.Spans, figures.Spans,
			"p95 queueing, ms", figures.Spans, "difference, %", figures.Spans, figures.Spans,
		},
		{"sender", "links", "virtual", "real", "mean", "sd", "se", "virtual", "real", "mean", "sd", "se"},
	}
	for _, f := range Fidelities(results) {
		line := []string{f.Sender, strconv.Itoa(f.Throughput.Links)}
		g = append(g, slices.Concat(line, f.Throughput.cells(), f.P95.cells()))
	}
	g.Write(&b)
	b.WriteString("\nMeans over the links. Differences are those of the real run from the one in virtual time on the same link;\n" +
		"sd: their standard deviation, se: the standard error of their mean.\n")
	writeTrust(&b, results)
	_, err := io.WriteString(w, b.String())
	return err
}

func (d Difference) cells() []string {
	if d.Links == 0 {
		return []string{"-", "-", "-", "-", "-"}
	}
	spread := func(v float64) string {
		if math.IsNaN(v) {
			return "-"
		}
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return []string{
		figures.Number(d.Virtual), figures.Number(d.Real), fmt.Sprintf("%+.1f", d.Mean), spread(d.Deviation), spread(d.Error),
	}
}
