package report

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// WriteTables writes results as one table for each path: medians over the runs
// that count, with the range in parentheses where there are several.
func WriteTables(w io.Writer, results []record.Run) error {
	var b strings.Builder
	for i, p := range tablesOf(results) {
		if i > 0 {
			b.WriteByte('\n')
		}
		p.writeTable(&b)
	}
	writeTrust(&b, results)
	_, err := io.WriteString(w, b.String())
	return err
}

// writeTable writes the rows of a path, by probability of random loss.
func (p path) writeTable(b *strings.Builder) {
	b.WriteString(p.name)
	if offered := p.offered(); offered > 0 {
		fmt.Fprintf(b, "; %.2f Mbit/s offered", offered)
	}
	b.WriteString("\n\n")
	base := p.baseline()
	g := p.tableHead(
		[]string{
			"", "Mbit/s", "used", "queueing, ms", figures.Spans, figures.Spans, "one-way, ms", figures.Spans,
			"dropped", "resent",
		},
		[]string{"runs", "", "%", "p50", "p95", "p99", "p50", "p95", "%", "%"})
	proxied := slices.ContainsFunc(p.rows, func(w row) bool { return w.first.CPUShare != nil })
	if proxied {
		g[0], g[1] = append(g[0], "proxy CPU", figures.Spans), append(g[1], "s/GB", "% of a core")
	}
	if base != "" {
		g[0] = append(g[0], "against "+base, figures.Spans)
		g[1] = append(g[1], "throughput", "p95 queueing")
	}
	faded := len(p.losses()) > 1 && slices.Contains(p.losses(), 0)
	if faded {
		g[0], g[1] = append(g[0], "of lossless"), append(g[1], "%")
	}
	several := slices.ContainsFunc(p.rows, func(w row) bool {
		return len(w.first.Flows) > 1 || w.first.Jain > 0
	})
	if several {
		g[0], g[1] = append(g[0], "each flow", ""), append(g[1], "Mbit/s of payload", "Jain")
	}
	p.addRows(&g, func(w row) []string {
		cells := w.cells()
		if proxied {
			cells = append(cells, w.cpu(func(r record.Run) *float64 { return r.CPUPerGB }, 1),
				w.cpu(func(r record.Run) *float64 { return r.CPUShare }, 100))
		}
		if base != "" {
			cells = append(cells, w.ratiosTo(p.findRow(base, w.first.Loss))...)
		}
		if faded {
			cells = append(cells, w.shareOfLossless(p.findRow(w.kind[0], 0)))
		}
		if several {
			cells = append(cells, listFlows(w.first), w.fairness())
		}
		return cells
	})
	g.Write(b)
}

// tableHead begins a grid with the rows of the table: by sender, and by random loss
// where it differs.
func (p path) tableHead(first, second []string) figures.Table {
	if len(p.losses()) > 1 {
		first, second = append([]string{"loss"}, first...), append([]string{"%"}, second...)
	}
	return figures.Table{append([]string{""}, first...), append([]string{"sender"}, second...)}
}

// addRows adds a line for each row, an empty line before each further probability of
// loss.
func (p path) addRows(g *figures.Table, cells func(row) []string) {
	head := len(*g)
	for _, loss := range p.losses() {
		first := len(*g)
		for _, w := range p.rows {
			if w.first.Loss != loss {
				continue
			}
			if len(*g) == first && first > head {
				*g = append(*g, nil)
			}
			line := []string{w.kind[0]}
			if len(p.losses()) > 1 {
				line = append(line, figures.Number(w.first.Loss*100))
			}
			*g = append(*g, append(line, cells(w)...))
		}
	}
}

// losses are the probabilities of random loss that occur, in order of first appearance.
func (p path) losses() (all []float64) {
	for _, w := range p.rows {
		if !slices.Contains(all, w.first.Loss) {
			all = append(all, w.first.Loss)
		}
	}
	return all
}

// baseline is the sender that the others are compared with: the first of the
// kernel's with a run that counts; empty: there is none.
func (p path) baseline() string {
	for _, w := range p.rows {
		if w.first.Kernel != "" && !w.first.Virtual && len(w.runs) > 0 {
			return w.kind[0]
		}
	}
	return ""
}

// findRow is the sender's row with that probability of loss, if a run in it counts.
func (p path) findRow(sender string, loss float64) *row {
	i := slices.IndexFunc(p.rows, func(w row) bool {
		return w.kind[0] == sender && w.first.Loss == loss && len(w.runs) > 0
	})
	if i < 0 {
		return nil
	}
	return &p.rows[i]
}

// offered is the median of what the link could carry.
func (p path) offered() float64 {
	var all row
	for _, w := range p.rows {
		all.runs = append(all.runs, w.runs...)
	}
	return all.median(func(r record.Run) float64 { return r.Offered })
}

func (w row) cells() []string {
	runs := strconv.Itoa(len(w.runs))
	if w.discarded > 0 {
		runs += "/" + strconv.Itoa(len(w.runs)+w.discarded)
	}
	if w.countNoisy() > 0 {
		runs += "*"
	}
	if len(w.runs) == 0 {
		return []string{runs, "-", "-", "-", "-", "-", "-", "-", "-", "-"}
	}
	return []string{
		runs,
		w.withRange(throughputOf, func(v float64) string { return strconv.FormatFloat(v, 'f', 2, 64) }),
		figures.Percent(w.median(func(r record.Run) float64 { return r.Utilisation }), 1),
		figures.Number(w.median(func(r record.Run) float64 { return r.Queueing.P50 })),
		w.withRange(delayOf, figures.Number),
		figures.Number(w.median(func(r record.Run) float64 { return r.Queueing.P99 })),
		figures.Number(w.median(func(r record.Run) float64 { return r.OneWay.P50 })),
		figures.Number(w.median(func(r record.Run) float64 { return r.OneWay.P95 })),
		figures.Percent(w.median(record.Run.DropShare), 2),
		figures.Percent(w.median(func(r record.Run) float64 { return r.Retransmitted }), 2),
	}
}

// listFlows returns the throughput of each flow after the warm-up, while it ran, or the range of many.
func listFlows(r record.Run) string {
	const most = 5
	var all []float64
	var texts []string
	for _, f := range r.Flows {
		text := figures.Number(f.Throughput)
		if strings.HasPrefix(f.Name, "all ") { // a record of many flows together
			text = f.Name + ": " + text
		}
		all, texts = append(all, f.Throughput), append(texts, text)
	}
	if len(all) > most {
		return fmt.Sprintf("%d: %s to %s", len(all), figures.Number(slices.Min(all)), figures.Number(slices.Max(all)))
	}
	return strings.Join(texts, " ")
}

// fairness returns the median of Jain's index; "-" where one flow has the link.
func (w row) fairness() string {
	jain := w.median(func(r record.Run) float64 { return r.Jain })
	if jain == 0 {
		return "-"
	}
	return strconv.FormatFloat(jain, 'f', 3, 64)
}

// ratiosTo compares throughput and delay with those of base.
func (w row) ratiosTo(base *row) []string {
	if base == nil || len(w.runs) == 0 {
		return []string{"-", "-"}
	}
	return []string{
		figures.Ratio(w.median(throughputOf), base.median(throughputOf)),
		figures.Ratio(w.median(delayOf), base.median(delayOf)),
	}
}

// shareOfLossless is the throughput in per cent of what the same sender has without random loss.
func (w row) shareOfLossless(lossless *row) string {
	if lossless == nil || len(w.runs) == 0 || lossless.median(throughputOf) <= 0 {
		return "-"
	}
	return figures.Percent(w.median(throughputOf)/lossless.median(throughputOf), 1)
}

// cpu is the median of one figure of the proxy's, scaled; "-" without a proxy.
func (w row) cpu(figure func(record.Run) *float64, scale float64) string {
	var values []float64
	for _, r := range w.runs {
		if v := figure(r); v != nil {
			values = append(values, *v*scale)
		}
	}
	if len(values) == 0 {
		return "-"
	}
	return figures.Number(figures.SpreadOf(values).Median)
}

// writeTrust adds what says how far to trust the figures.
func writeTrust(b *strings.Builder, results []record.Run) {
	if len(results) == 0 {
		return
	}
	t := trustOf([]File{{Runs: results}})
	b.WriteByte('\n')
	if len(t.late) > 0 {
		s := figures.SpreadOf(t.late)
		fmt.Fprintf(b, "Emulator lateness at p99: %.2f ms (runs: %.2f to %.2f). %s. ", s.Median, s.Min, s.Max,
			results[0].System)
	}
	fmt.Fprintf(b, "%s.\n", results[0].Version)
	writeTransports(b, results)
	if t.Noisy > 0 {
		fmt.Fprintf(b, "* %d of %d runs are noisy: the machine handed packets over too late. Close other programs, "+
			"or use --retry-noisy.\n", t.Noisy, len(t.late))
	}
	for _, r := range results {
		if r.Discarded != "" {
			fmt.Fprintf(b, "Not counted: %s: %s.\n", runLabel(r), r.Discarded)
		}
		for _, m := range r.Missing {
			fmt.Fprintf(b, "The proxy could not have: %s (%s).\n", m, runLabel(r))
		}
	}
}

// writeTransports says over what the runs in virtual time were.
func writeTransports(b *strings.Builder, results []record.Run) {
	for _, transport := range []sim.Transport{sim.Kernel, sim.Relay, sim.Native} {
		var senders []string
		for _, r := range results {
			if r.Transport == transport.String() && !slices.Contains(senders, r.Name) {
				senders = append(senders, r.Name)
			}
		}
		if len(senders) > 0 {
			fmt.Fprintf(b, "In virtual time, where nothing is late, over the transport %s: %s.\n", transport,
				strings.Join(senders, ", "))
		}
	}
}

// runLabel says which run it is.
func runLabel(r record.Run) string {
	loss := ""
	if r.Loss > 0 {
		loss = fmt.Sprintf(", %s %% random loss", figures.Number(r.Loss*100))
	}
	return fmt.Sprintf("%s%s, seed %d", r.Name, loss, r.Seed)
}

// withRange is the median of a figure, and of several runs the range around it.
func (w row) withRange(figure func(record.Run) float64, format func(float64) string) string {
	s := figures.SpreadOf(w.values(figure))
	if len(w.runs) == 1 {
		return format(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", format(s.Median), format(s.Min), format(s.Max))
}
