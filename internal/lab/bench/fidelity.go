package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// Fidelity says by how much an algorithm's runs differ from its reference's over the
// same links: those in virtual time, or native ones.
type Fidelity struct {
	Sender     string // "copa@ebpf"
	Throughput Difference
	P95        Difference // of queueing
}

// Difference summarises one figure's over the links on which both runs count.
type Difference struct {
	Links            int     // that have it
	Found, Reference float64 // means of the figure itself
	Mean             float64 // of the differences of found from reference, in per cent of reference
	Median           float64 // of the same
	Deviation        float64 // their standard deviation over the links; NaN with fewer than two
	Error            float64 // the mean's standard error: Deviation over the root of Links; NaN with fewer than two
}

// Fidelities compares each real sender with the same algorithm over the envelope
// against, link by link: runs belong together that are of one path, seed and number.
func Fidelities(results []record.Run, against string) []Fidelity {
	var all []Fidelity
	var pairs [][][2]record.Run
	for _, r := range results {
		if r.Algorithm == "" || r.Virtual || isReference(r, against) {
			continue
		}
		v := slices.IndexFunc(results, func(o record.Run) bool {
			return isReference(o, against) && o.Algorithm == r.Algorithm && o.Way(true) == r.Way(true) &&
				o.Seed == r.Seed && o.Number == r.Number && o.Discarded == ""
		})
		i := slices.IndexFunc(all, func(f Fidelity) bool { return f.Sender == r.Name })
		if i < 0 {
			i = len(all)
			all, pairs = append(all, Fidelity{Sender: r.Name}), append(pairs, nil)
		}
		if v >= 0 && r.Discarded == "" {
			pairs[i] = append(pairs[i], [2]record.Run{r, results[v]})
		}
	}
	for i := range all {
		all[i].Throughput = difference(pairs[i], func(r record.Run) float64 { return r.Throughput })
		all[i].P95 = difference(pairs[i], func(r record.Run) float64 { return r.Queueing.P95 })
	}
	return all
}

// isReference reports whether others are compared with a run.
func isReference(r record.Run, against string) bool {
	if against == EnvelopeSim {
		return r.Virtual
	}
	return r.Native && !r.Virtual
}

// difference is that of one figure between the first and the second of each pair.
// A pair without that figure in its second run is left out.
func difference(pairs [][2]record.Run, figure func(record.Run) float64) Difference {
	var d Difference
	var each []float64
	for _, p := range pairs {
		found, expected := figure(p[0]), figure(p[1])
		if expected <= 0 {
			continue
		}
		d.Found += found
		d.Reference += expected
		each = append(each, 100*(found/expected-1))
		d.Mean += each[len(each)-1]
	}
	if d.Links = len(each); d.Links == 0 {
		return d
	}
	n := float64(d.Links)
	d.Found, d.Reference, d.Mean = d.Found/n, d.Reference/n, d.Mean/n
	d.Median = figures.SpreadOf(each).Median
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

// WriteFidelities writes a table of them for each path, and what says how far to trust it.
func WriteFidelities(w io.Writer, results []record.Run, against string) error {
	reference := "virtual"
	if against != EnvelopeSim {
		reference = against
	}
	var b strings.Builder
	var paths []string
	for _, r := range results {
		if path := r.Way(true); !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	for _, path := range paths {
		of := slices.DeleteFunc(slices.Clone(results), func(r record.Run) bool { return r.Way(true) != path })
		b.WriteString(path + "\n\n")
		g := figures.Table{
			{
				"", "", "Mbit/s", figures.Spans, "difference, %", figures.Spans, figures.Spans, figures.Spans,
				"p95 queueing, ms", figures.Spans, "difference, %", figures.Spans, figures.Spans, figures.Spans,
			},
			{
				"sender", "links", reference, "real", "mean", "median", "sd", "se",
				reference, "real", "mean", "median", "sd", "se",
			},
		}
		for _, f := range Fidelities(of, against) {
			line := []string{f.Sender, strconv.Itoa(f.Throughput.Links)}
			g = append(g, slices.Concat(line, f.Throughput.cells(), f.P95.cells()))
		}
		g.Write(&b)
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "Over the links, which differ by their seed. Differences are those of the real run from the %s "+
		"one on the\n"+
		"same link; sd: their standard deviation, se: the standard error of their mean.\n", reference)
	writeTrust(&b, results)
	_, err := io.WriteString(w, b.String())
	return err
}

func (d Difference) cells() []string {
	if d.Links == 0 {
		return []string{"-", "-", "-", "-", "-", "-"}
	}
	spread := func(v float64) string {
		if math.IsNaN(v) {
			return "-"
		}
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return []string{
		figures.Number(d.Reference), figures.Number(d.Found), fmt.Sprintf("%+.1f", d.Mean),
		fmt.Sprintf("%+.1f", d.Median), spread(d.Deviation), spread(d.Error),
	}
}
