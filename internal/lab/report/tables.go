package report

import (
	"fmt"
	"io"
	"math"
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

// column is one of a table of text.
type column struct {
	head, unit string
	cell       func(row) string
}

// columns are those of the path's table: some only where a row has something to say there.
func (p path) columns() []column {
	all := []column{{"", "sender", func(w row) string { return w.kind[0] }}}
	if len(p.losses()) > 1 {
		all = append(all, column{"loss", "%", func(w row) string { return figures.Number(w.first.Loss * 100) }})
	}
	all = append(all,
		column{"", "runs", row.countRuns},
		column{"Mbit/s", "", withRange(throughputOf, func(v float64) string { return strconv.FormatFloat(v, 'f', 2, 64) })},
		column{"used", "%", median(func(r record.Run) float64 { return r.Utilisation }, figures.Percent(1))},
		column{"queueing, ms", "p50", median(func(r record.Run) float64 { return r.Queueing.P50 }, figures.Number)},
		column{figures.Spans, "p95", withRange(delayOf, figures.Number)},
		column{figures.Spans, "p99", median(func(r record.Run) float64 { return r.Queueing.P99 }, figures.Number)},
		column{"one-way, ms", "p50", median(func(r record.Run) float64 { return r.OneWay.P50 }, figures.Number)},
		column{figures.Spans, "p95", median(func(r record.Run) float64 { return r.OneWay.P95 }, figures.Number)},
		column{"dropped", "%", median(record.Run.DropShare, figures.Percent(2))},
		column{"resent", "%", median(func(r record.Run) float64 { return r.Retransmitted }, figures.Percent(2))})
	if slices.ContainsFunc(p.rows, func(w row) bool { return w.first.CPUShare != nil }) {
		all = append(all,
			column{"proxy CPU", "s/GB", median(func(r record.Run) float64 { return valueOf(r.CPUPerGB) }, figures.Number)},
			column{figures.Spans, "% of a core", median(func(r record.Run) float64 {
				return 100 * valueOf(r.CPUShare)
			}, figures.Number)})
	}
	if base := p.baseline(); base != "" {
		against := func(figure func(record.Run) float64) func(row) string {
			return func(w row) string {
				return w.compare(p.findRow(base, w.first.Loss), figure, figures.Ratio)
			}
		}
		all = append(all,
			column{"against " + base, "throughput", against(throughputOf)},
			column{figures.Spans, "p95 queueing", against(delayOf)})
	}
	if len(p.losses()) > 1 && slices.Contains(p.losses(), 0) {
		share := func(lossy, lossless float64) string {
			if lossless <= 0 {
				return "-"
			}
			return figures.Percent(1)(lossy / lossless)
		}
		all = append(all, column{"of lossless", "%", func(w row) string {
			return w.compare(p.findRow(w.kind[0], 0), throughputOf, share)
		}})
	}
	if slices.ContainsFunc(p.rows, func(w row) bool { return len(w.first.Flows) > 1 || w.first.Jain > 0 }) {
		all = append(all,
			column{"each flow", "Mbit/s of payload", func(w row) string { return listFlows(w.first) }},
			column{"", "Jain", row.fairness})
	}
	return all
}

// writeTable writes the rows of a path, an empty line before each further probability of random loss.
func (p path) writeTable(b *strings.Builder) {
	b.WriteString(p.name)
	if offered := p.offered(); offered > 0 {
		fmt.Fprintf(b, "; %.2f Mbit/s offered", offered)
	}
	b.WriteString("\n\n")
	g, columns := make(figures.Table, 2), p.columns()
	for _, c := range columns {
		g[0], g[1] = append(g[0], c.head), append(g[1], c.unit)
	}
	for i, loss := range p.losses() {
		if i > 0 {
			g = append(g, nil)
		}
		for _, w := range p.rows {
			if w.first.Loss != loss {
				continue
			}
			var line []string
			for _, c := range columns {
				line = append(line, c.cell(w))
			}
			g = append(g, line)
		}
	}
	g.Write(b)
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
	return row{runs: p.runs()}.median(func(r record.Run) float64 { return r.Offered })
}

// countRuns writes how many runs count, out of how many, and whether one is noisy.
func (w row) countRuns() string {
	runs := strconv.Itoa(len(w.runs))
	if w.discarded > 0 {
		runs += "/" + strconv.Itoa(len(w.runs)+w.discarded)
	}
	if w.countNoisy() > 0 {
		runs += "*"
	}
	return runs
}

// median is the cell with the median of a figure.
func median(figure func(record.Run) float64, format func(float64) string) func(row) string {
	return func(w row) string {
		values := w.values(figure)
		if len(values) == 0 {
			return "-"
		}
		return format(figures.SpreadOf(values).Median)
	}
}

// withRange is the cell with the median of a figure, and of several runs the range around it.
func withRange(figure func(record.Run) float64, format func(float64) string) func(row) string {
	return func(w row) string {
		text := median(figure, format)(w)
		if len(w.runs) > 1 {
			s := figures.SpreadOf(w.values(figure))
			text += fmt.Sprintf(" (%s–%s)", format(s.Min), format(s.Max))
		}
		return text
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

// compare writes the median of a figure beside that of base; "-" where there is none.
func (w row) compare(base *row, figure func(record.Run) float64, write func(a, b float64) string) string {
	if base == nil || len(w.runs) == 0 {
		return "-"
	}
	return write(w.median(figure), base.median(figure))
}

// valueOf is NaN of a figure that a run has not.
func valueOf(figure *float64) float64 {
	if figure == nil {
		return math.NaN()
	}
	return *figure
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
