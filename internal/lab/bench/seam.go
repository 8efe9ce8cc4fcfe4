package bench

import (
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/internal/lab/figures"
)

// over collects one figure of those runs that count and have it.
func over[T any](w row, part func(Result) *T, figure func(T) float64) []float64 {
	var v []float64
	for _, r := range w.counted() {
		if p := part(r); p != nil {
			v = append(v, figure(*p))
		}
	}
	return v
}

// middling is the median of values as a table has it; "-" when there are none.
func middling(values []float64) string {
	if len(values) == 0 {
		return "-"
	}
	return figures.Number(spread(values).Median)
}

// writeWindows adds the look at the seam, for the rows that have one, and how
// soon our windows were in force where the proxy tells.
func (t table) writeWindows(b *strings.Builder) {
	g := t.head(
		[]string{"", "our cwnd", "kernel cwnd", "pipe", "kernel ≥ ours", "pipe above ours"},
		[]string{"samples", "packets", "packets", "packets", "% of samples", "packets, at most"})
	answered := false
	for _, w := range t.rows {
		answered = answered || len(w.answers(Answer.count)) > 0
	}
	if answered {
		g[0], g[1] = append(g[0], "answer, ms", figures.Spans), append(g[1], "p50", "p99")
	}
	head := len(g)
	t.fill(&g, func(w row) []string {
		cells := w.windowCells()
		if answered && (cells != nil || len(w.answers(Answer.count)) > 0) {
			if cells == nil {
				cells = []string{"-", "-", "-", "-", "-", "-"}
			}
			cells = append(cells,
				middling(w.answers(func(a Answer) float64 { return a.P50 })),
				middling(w.answers(func(a Answer) float64 { return a.P99 })))
		}
		return cells
	})
	follow(g, b, head)
}

func (a Answer) count() float64 { return float64(a.Count) }

func (w row) answers(figure func(Answer) float64) []float64 {
	return over(w, func(r Result) *Answer { return r.Answer }, figure)
}

// windowCells is nil for a sender without a window of ours.
func (w row) windowCells() []string {
	windows := func(figure func(Window) float64) []float64 {
		return over(w, func(r Result) *Window { return r.Window }, figure)
	}
	covers := windows(func(w Window) float64 { return w.KernelCovers })
	if len(covers) == 0 {
		return nil
	}
	samples := 0.0
	for _, n := range windows(func(w Window) float64 { return float64(w.Samples) }) {
		samples += n
	}
	// Over several runs: the median of medians, the outermost of the ranges.
	whole := func(part func(Window) Spread) string {
		s := Spread{
			Median: spread(windows(func(w Window) float64 { return part(w).Median })).Median,
			Min:    spread(windows(func(w Window) float64 { return part(w).Min })).Min,
			Max:    spread(windows(func(w Window) float64 { return part(w).Max })).Max,
		}
		return withRange(s, true, figures.Number)
	}
	return []string{
		strconv.Itoa(int(samples)),
		whole(func(w Window) Spread { return w.Cwnd }),
		whole(func(w Window) Spread { return w.KernelCwnd }),
		whole(func(w Window) Spread { return w.Pipe }),
		figures.Percent(spread(covers).Min, 1),
		figures.Signed(spread(windows(func(w Window) float64 { return w.PipeExcess })).Max),
	}
}

// writeDepartures adds how the packets left, where they were recorded: medians
// over the runs, and the most of what is a maximum.
func (t table) writeDepartures(b *strings.Builder) {
	paced := false
	for _, w := range t.rows {
		paced = paced || len(w.ratios(func(m Tails) float64 { return m.P50 })) > 0
	}
	g := t.head(
		[]string{
			"", "in flight, packets", figures.Spans, figures.Spans, "pipe, packets", figures.Spans, "gaps, µs",
			figures.Spans, figures.Spans,
		},
		[]string{"packets", "p50", "p95", "max", "p95", "max", "p5", "p50", "p95"})
	if paced {
		g[0] = append(g[0], "gaps of ideal", figures.Spans, figures.Spans, figures.Spans)
		g[1] = append(g[1], "µs", "p5", "p50", "p95")
	}
	head := len(g)
	t.fill(&g, func(w row) []string {
		figure := func(f func(Departures) float64) []float64 {
			return over(w, func(r Result) *Departures { return r.Departures }, f)
		}
		median := func(f func(Departures) float64) string { return middling(figure(f)) }
		packets := figure(func(d Departures) float64 { return float64(d.Packets) })
		if len(packets) == 0 {
			return nil
		}
		most := func(f func(Departures) float64) string { return figures.Number(spread(figure(f)).Max) }
		cells := []string{
			middling(packets),
			median(func(d Departures) float64 { return d.Inflight.P50 }),
			median(func(d Departures) float64 { return d.Inflight.P95 }),
			most(func(d Departures) float64 { return d.Inflight.Max }),
			median(func(d Departures) float64 { return d.Pipe.P95 }),
			most(func(d Departures) float64 { return d.Pipe.Max }),
			median(func(d Departures) float64 { return d.Gaps.P5 }),
			median(func(d Departures) float64 { return d.Gaps.P50 }),
			median(func(d Departures) float64 { return d.Gaps.P95 }),
		}
		if !paced {
			return cells
		}
		if ratios := w.ratios(func(m Tails) float64 { return m.P50 }); len(ratios) == 0 {
			return append(cells, "-", "-", "-", "-")
		}
		return append(cells,
			median(func(d Departures) float64 { return d.IdealGap }),
			middling(w.ratios(func(m Tails) float64 { return m.P5 })),
			middling(w.ratios(func(m Tails) float64 { return m.P50 })),
			middling(w.ratios(func(m Tails) float64 { return m.P95 })))
	})
	follow(g, b, head)
}

// ratios are of the runs that were paced at a fixed rate.
func (w row) ratios(figure func(Tails) float64) []float64 {
	return over(w, func(r Result) *Tails {
		if r.Departures == nil {
			return nil
		}
		return r.Departures.Ratio
	}, figure)
}

// follow writes a grid behind another, unless it is all head.
func follow(g figures.Table, b *strings.Builder, head int) {
	if len(g) > head {
		b.WriteByte('\n')
		g.Write(b)
	}
}
