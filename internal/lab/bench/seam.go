package bench

import (
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// over collects one figure of the runs that count and have it.
func over[T any](w row, part func(record.Run) *T, figure func(T) float64) []float64 {
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
	return figures.Number(figures.SpreadOf(values).Median)
}

// writeWindows adds the look at the seam, for the rows that have one, and how
// soon our windows were in force where the proxy tells.
func (t table) writeWindows(b *strings.Builder) {
	g := t.head(
		[]string{"", "our cwnd", "kernel cwnd", "pipe", "kernel ≥ ours", "pipe above ours"},
		[]string{"samples", "packets", "packets", "packets", "% of samples", "packets, at most"})
	there := false
	for _, w := range t.rows {
		there = there || len(w.answers(answered)) > 0
	}
	if there {
		g[0], g[1] = append(g[0], "answer, ms", figures.Spans), append(g[1], "p50", "p99")
	}
	head := len(g)
	t.fill(&g, func(w row) []string {
		cells := w.windowCells()
		if there && (cells != nil || len(w.answers(answered)) > 0) {
			if cells == nil {
				cells = []string{"-", "-", "-", "-", "-", "-"}
			}
			cells = append(cells,
				middling(w.answers(func(a stage.Answer) float64 { return a.P50 })),
				middling(w.answers(func(a stage.Answer) float64 { return a.P99 })))
		}
		return cells
	})
	follow(g, b, head)
}

func answered(a stage.Answer) float64 { return float64(a.Count) }

func (w row) answers(figure func(stage.Answer) float64) []float64 {
	return over(w, func(r record.Run) *stage.Answer { return r.Answer }, figure)
}

// windowCells is nil for a sender without a window of ours.
func (w row) windowCells() []string {
	windows := func(figure func(stage.Window) float64) []float64 {
		return over(w, func(r record.Run) *stage.Window { return r.Window }, figure)
	}
	covers := windows(func(w stage.Window) float64 { return w.KernelCovers })
	if len(covers) == 0 {
		return nil
	}
	samples := 0.0
	for _, n := range windows(func(w stage.Window) float64 { return float64(w.Samples) }) {
		samples += n
	}
	// Over several runs: the median of medians, the outermost of the ranges.
	whole := func(part func(stage.Window) figures.Spread) string {
		s := figures.Spread{
			Median: figures.SpreadOf(windows(func(w stage.Window) float64 { return part(w).Median })).Median,
			Min:    figures.SpreadOf(windows(func(w stage.Window) float64 { return part(w).Min })).Min,
			Max:    figures.SpreadOf(windows(func(w stage.Window) float64 { return part(w).Max })).Max,
		}
		return withRange(s, true, figures.Number)
	}
	return []string{
		strconv.Itoa(int(samples)),
		whole(func(w stage.Window) figures.Spread { return w.Cwnd }),
		whole(func(w stage.Window) figures.Spread { return w.KernelCwnd }),
		whole(func(w stage.Window) figures.Spread { return w.Pipe }),
		figures.Percent(figures.SpreadOf(covers).Min, 1),
		figures.Signed(figures.SpreadOf(windows(func(w stage.Window) float64 { return w.PipeExcess })).Max),
	}
}

// writeDepartures adds how the packets left, where they were recorded: medians
// over the runs, and the most of what is a maximum.
func (t table) writeDepartures(b *strings.Builder) {
	paced := false
	for _, w := range t.rows {
		paced = paced || len(w.ratios(func(m stage.Tails) float64 { return m.P50 })) > 0
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
		figure := func(f func(stage.Departures) float64) []float64 {
			return over(w, func(r record.Run) *stage.Departures { return r.Departures }, f)
		}
		median := func(f func(stage.Departures) float64) string { return middling(figure(f)) }
		packets := figure(func(d stage.Departures) float64 { return float64(d.Packets) })
		if len(packets) == 0 {
			return nil
		}
		most := func(f func(stage.Departures) float64) string { return figures.Number(figures.SpreadOf(figure(f)).Max) }
		cells := []string{
			middling(packets),
			median(func(d stage.Departures) float64 { return d.Inflight.P50 }),
			median(func(d stage.Departures) float64 { return d.Inflight.P95 }),
			most(func(d stage.Departures) float64 { return d.Inflight.Max }),
			median(func(d stage.Departures) float64 { return d.Pipe.P95 }),
			most(func(d stage.Departures) float64 { return d.Pipe.Max }),
			median(func(d stage.Departures) float64 { return d.Gaps.P5 }),
			median(func(d stage.Departures) float64 { return d.Gaps.P50 }),
			median(func(d stage.Departures) float64 { return d.Gaps.P95 }),
		}
		if !paced {
			return cells
		}
		if ratios := w.ratios(func(m stage.Tails) float64 { return m.P50 }); len(ratios) == 0 {
			return append(cells, "-", "-", "-", "-")
		}
		return append(cells,
			median(func(d stage.Departures) float64 { return d.IdealGap }),
			middling(w.ratios(func(m stage.Tails) float64 { return m.P5 })),
			middling(w.ratios(func(m stage.Tails) float64 { return m.P50 })),
			middling(w.ratios(func(m stage.Tails) float64 { return m.P95 })))
	})
	follow(g, b, head)
}

// ratios are of the runs that were paced at a fixed rate.
func (w row) ratios(figure func(stage.Tails) float64) []float64 {
	return over(w, func(r record.Run) *stage.Tails {
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
