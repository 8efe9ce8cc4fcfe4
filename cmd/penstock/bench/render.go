package bench

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// WriteTables writes results as one table for each path: medians over the runs
// that count, with the range in parentheses where there are several. With
// windows it adds how the kernel under the proxy kept to the proxy's window.
func WriteTables(w io.Writer, results []Result, windows bool) error {
	var b strings.Builder
	for i, t := range tables(results) {
		if i > 0 {
			b.WriteByte('\n')
		}
		t.write(&b)
		if windows {
			t.writeWindows(&b)
		}
	}
	writeTrust(&b, results)
	_, err := io.WriteString(w, b.String())
	return err
}

func (t table) write(b *strings.Builder) {
	b.WriteString(t.path)
	if offered, ok := t.offered(); ok {
		fmt.Fprintf(b, "; %.2f Mbit/s offered", offered)
	}
	b.WriteString("\n\n")
	base := t.baseline()
	g := grid{
		{"", "", "Mbit/s", "used", "queueing, ms", spans, spans, "one-way, ms", spans, "dropped", "resent", "proxy CPU", spans},
		{"sender", "runs", "", "%", "p50", "p95", "p99", "p50", "p95", "%", "%", "s/GB", "% of a core"},
	}
	if base != nil {
		g[0] = append(g[0], "against "+base.sender, spans)
		g[1] = append(g[1], "throughput", "p95 queueing")
	}
	for _, r := range t.rows {
		g = append(g, r.cells(base))
	}
	g.write(b)
}

// offered is the median of what the link could carry.
func (t table) offered() (float64, bool) {
	var all row
	for _, r := range t.rows {
		all.results = append(all.results, r.results...)
	}
	s, ok := all.of(func(r Result) float64 { return r.Offered })
	return s.Median, ok && s.Median > 0
}

func (w row) cells(base *row) []string {
	runs := strconv.Itoa(len(w.counted()))
	if n := len(w.results); n > len(w.counted()) {
		runs += "/" + strconv.Itoa(n)
	}
	for _, r := range w.counted() {
		if r.Noisy {
			runs += "*"
			break
		}
	}
	throughput, ok := w.of(func(r Result) float64 { return r.Throughput })
	if !ok {
		return []string{w.sender, runs, "-", "-", "-", "-", "-", "-", "-", "-", "-", "-", "-"}
	}
	median := func(figure func(Result) float64) float64 { s, _ := w.of(figure); return s.Median }
	p95, _ := w.of(func(r Result) float64 { return r.Queueing.P95 })
	several := len(w.counted()) > 1
	cells := []string{
		w.sender, runs,
		withRange(throughput, several, func(v float64) string { return strconv.FormatFloat(v, 'f', 2, 64) }),
		percent(median(func(r Result) float64 { return r.Utilisation }), 1),
		number(median(func(r Result) float64 { return r.Queueing.P50 })),
		withRange(p95, several, number),
		number(median(func(r Result) float64 { return r.Queueing.P99 })),
		number(median(func(r Result) float64 { return r.OneWay.P50 })),
		number(median(func(r Result) float64 { return r.OneWay.P95 })),
		percent(median(Result.dropShare), 2),
		percent(median(func(r Result) float64 { return r.Retransmitted }), 2),
		w.cpu(func(r Result) *float64 { return r.CPUPerGB }, 1),
		w.cpu(func(r Result) *float64 { return r.CPUShare }, 100),
	}
	if base != nil {
		baseThroughput, _ := base.of(func(r Result) float64 { return r.Throughput })
		baseP95, _ := base.of(func(r Result) float64 { return r.Queueing.P95 })
		cells = append(cells, ratio(throughput.Median, baseThroughput.Median), ratio(p95.Median, baseP95.Median))
	}
	return cells
}

// cpu is the median of one figure of the proxy's, scaled; "-" without a proxy.
func (w row) cpu(figure func(Result) *float64, scale float64) string {
	var values []float64
	for _, r := range w.counted() {
		if v := figure(r); v != nil {
			values = append(values, *v*scale)
		}
	}
	if len(values) == 0 {
		return "-"
	}
	return number(spread(values).Median)
}

// dropShare is the share of packets that the link lost on the way to the
// client, random losses included.
func (r Result) dropShare() float64 {
	if r.Packets == 0 {
		return 0
	}
	return float64(r.QueueDrops+r.RandomLosses) / float64(r.Packets)
}

// writeWindows adds the look at the seam, for the rows that have one.
func (t table) writeWindows(b *strings.Builder) {
	g := grid{
		{"", "", "our cwnd", "kernel cwnd", "pipe", "kernel ≥ ours", "pipe above ours"},
		{"sender", "samples", "packets", "packets", "packets", "% of samples", "packets, at most"},
	}
	for _, w := range t.rows {
		samples := 0
		var windows []Window
		for _, r := range w.counted() {
			if r.Window != nil {
				windows = append(windows, *r.Window)
				samples += r.Window.Samples
			}
		}
		if len(windows) == 0 {
			continue
		}
		over := func(figure func(Window) float64) []float64 {
			var v []float64
			for _, w := range windows {
				v = append(v, figure(w))
			}
			return v
		}
		// Over several runs: the median of medians, the outermost of the ranges.
		whole := func(part func(Window) Spread) string {
			s := Spread{
				Median: spread(over(func(w Window) float64 { return part(w).Median })).Median,
				Min:    spread(over(func(w Window) float64 { return part(w).Min })).Min,
				Max:    spread(over(func(w Window) float64 { return part(w).Max })).Max,
			}
			return withRange(s, true, number)
		}
		g = append(g, []string{
			w.sender, strconv.Itoa(samples),
			whole(func(w Window) Spread { return w.Cwnd }),
			whole(func(w Window) Spread { return w.KernelCwnd }),
			whole(func(w Window) Spread { return w.Pipe }),
			percent(spread(over(func(w Window) float64 { return w.KernelCovers })).Min, 1),
			signed(spread(over(func(w Window) float64 { return w.PipeExcess })).Max),
		})
	}
	if len(g) > 2 {
		b.WriteByte('\n')
		g.write(b)
	}
}

// writeTrust adds what says how far to trust the figures.
func writeTrust(b *strings.Builder, results []Result) {
	if len(results) == 0 {
		return
	}
	var late []float64
	noisy := 0
	for _, r := range results {
		late = append(late, r.Lateness.P99)
		if r.Noisy {
			noisy++
		}
	}
	s := spread(late)
	fmt.Fprintf(b, "\nEmulator lateness at p99: %.2f ms (runs: %.2f to %.2f). %s. %s.\n",
		s.Median, s.Min, s.Max, results[0].System, results[0].Version)
	if noisy > 0 {
		fmt.Fprintf(b, "* %d of %d runs are noisy: the machine handed packets over too late. Close other programs, or use --retry-noisy.\n", noisy, len(results))
	}
	for _, r := range results {
		if r.Spoilt != "" {
			fmt.Fprintf(b, "Not counted: %s, seed %d, run %d: %s.\n", r.Sender, r.Seed, r.Run, r.Spoilt)
		}
		for _, m := range r.Missing {
			fmt.Fprintf(b, "The proxy could not have: %s (%s, seed %d, run %d).\n", m, r.Sender, r.Seed, r.Run)
		}
	}
}

// grid is a table of cells; the first two lines are its head.
type grid [][]string

// spans is a cell of the first line over which the one before it reaches.
const spans = "<"

// write aligns the first column left, the others right, and what spans several
// in their middle.
func (g grid) write(b *strings.Builder) {
	widths := make([]int, len(g[0]))
	for n, line := range g {
		for i, c := range line {
			if n > 0 || g.reach(i) == 1 && c != spans {
				widths[i] = max(widths[i], utf8.RuneCountInString(c))
			}
		}
	}
	for n, line := range g {
		var out strings.Builder
		for i := 0; i < len(line); i++ {
			width, first := widths[i], i
			if n == 0 {
				for range g.reach(first) - 1 {
					i++
					width += len(gap) + widths[i]
				}
			}
			pad := max(0, width-utf8.RuneCountInString(line[first]))
			left := pad
			switch {
			case first == 0:
				left = 0
			case i > first:
				left = pad / 2
			}
			if first > 0 {
				out.WriteString(gap)
			}
			out.WriteString(strings.Repeat(" ", left) + line[first] + strings.Repeat(" ", pad-left))
		}
		b.WriteString(strings.TrimRight(out.String(), " ") + "\n")
	}
}

const gap = "  "

// reach is how many columns the first line's cell i covers.
func (g grid) reach(i int) int {
	n := 1
	for i+n < len(g[0]) && g[0][i+n] == spans {
		n++
	}
	return n
}

// number writes three significant digits or the whole part, whichever is more.
func number(v float64) string {
	decimals := 0
	switch a := math.Abs(v); {
	case v == math.Trunc(v):
	case a < 10:
		decimals = 2
	case a < 100:
		decimals = 1
	}
	s := strconv.FormatFloat(v, 'f', decimals, 64)
	if decimals > 0 {
		s = strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
	}
	return s
}

func signed(v float64) string {
	if v > 0 {
		return "+" + number(v)
	}
	return number(v)
}

func percent(share float64, decimals int) string {
	return strconv.FormatFloat(share*100, 'f', decimals, 64)
}

func withRange(s Spread, several bool, format func(float64) string) string {
	if !several {
		return format(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", format(s.Median), format(s.Min), format(s.Max))
}

// ratio writes a/b as one says it: 0.95×, 1.20×, or 1/34 where it is small.
func ratio(a, b float64) string {
	switch {
	case b <= 0 || a < 0:
		return "-"
	case a == 0:
		return "0"
	case a/b <= 0.5:
		return "1/" + number(math.Round(b/a*10)/10)
	}
	return strconv.FormatFloat(a/b, 'f', 2, 64) + "×"
}
