package recipe

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// WriteList writes what there is to play, and how long it takes over real sockets.
func WriteList(w io.Writer, recipes []Recipe) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range recipes {
		lasts, err := r.Lasts(Full)
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", r.Name, lasts.Round(time.Second), r.About, r.Source)
	}
	return t.Flush()
}

// WriteResults writes the runs of one recipe: a table of the stages' figures,
// medians where there are several runs, then the findings of each run.
func WriteResults(w io.Writer, results []Result) error {
	first := results[0]
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n%s; %s form", first.Name, first.About, first.Source, first.Scale)
	if len(results) > 1 {
		fmt.Fprintf(&b, ", %d runs", len(results))
	}
	b.WriteString("\n\n")
	stageTable(results).Write(&b)
	b.WriteByte('\n')
	all := make([][]record.Finding, len(results))
	for i, r := range results {
		all[i] = r.Findings
	}
	if err := writeFindings(&b, all); err != nil {
		return err
	}
	for _, r := range results {
		for _, run := range r.Runs {
			if run.Record.Discarded != "" {
				fmt.Fprintf(&b, "Discarded: %s, seed %d: %s.\n", run.Stage.Name, r.Seed, run.Record.Discarded)
			}
			if run.Record.Disturbed() {
				fmt.Fprintf(&b, "Disturbed by the machine: %s, seed %d: packets were up to %s late (p99).\n",
					run.Stage.Name, r.Seed, run.Record.Lateness.Round(100*time.Microsecond))
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteFindings writes what must hold of the experiment that runs are of; nothing where nothing must.
func WriteFindings(w io.Writer, runs []record.Run) error {
	var all [][]record.Finding
	for _, r := range runs {
		if r.Findings != nil {
			all = append(all, r.Findings)
		}
	}
	if len(all) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	return writeFindings(w, all)
}

// writeFindings writes those of one experiment, a list for each time that it was played; the condition of one may
// hold some times only.
func writeFindings(w io.Writer, all [][]record.Finding) error {
	const absent = "-"
	type line struct {
		record.Finding
		got         []string // each time
		there, held int
	}
	var lines []line
	for i, findings := range all {
		next := 0
		for _, f := range findings {
			k := slices.IndexFunc(lines, func(l line) bool {
				return l.What == f.What && l.Paper == f.Paper && l.got[i] == absent
			})
			if k < 0 {
				k = next
				lines = slices.Insert(lines, k, line{Finding: f, got: slices.Repeat([]string{absent}, len(all))})
			}
			l := &lines[k]
			l.got[i] = f.Got
			l.there++
			if f.OK {
				l.held++
			}
			next = k + 1
		}
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tfinding\tpaper\tbound\tours")
	for _, l := range lines {
		verdict := "ok"
		if l.held < l.there {
			verdict = "FAIL"
		}
		if l.held > 0 && l.held < l.there {
			verdict += fmt.Sprintf(" %d of %d", l.there-l.held, l.there)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", verdict, l.What, cmp.Or(l.Paper, absent), l.Bound,
			strings.Join(l.got, " · "))
	}
	return t.Flush()
}

// stageTable has a line for each stage: medians of the runs that count.
func stageTable(results []Result) figures.Table {
	t := figures.Table{
		{"", "Mbit/s", "used", "queueing, ms", figures.Spans, "each, Mbit/s of payload"},
		{"stage", "", "%", "p50", "p95", ""},
	}
	for i, run := range results[0].Runs {
		of := func(figure func(stage.Record) float64, text func(float64) string) string {
			var all []float64
			for _, r := range results {
				if rec := r.Runs[i].Record; rec.Discarded == "" {
					all = append(all, figure(rec))
				}
			}
			if len(all) == 0 {
				return "-"
			}
			return text(figures.SpreadOf(all).Median)
		}
		t = append(t, []string{
			run.Stage.Name,
			of(func(r stage.Record) float64 { return r.Throughput.Mbps() }, figures.Number),
			of(func(r stage.Record) float64 { return r.Utilisation },
				func(v float64) string { return figures.Percent(v, 1) }),
			of(func(r stage.Record) float64 { return record.Millis(r.Queueing.P50) }, figures.Number),
			of(func(r stage.Record) float64 { return record.Millis(r.Queueing.P95) }, figures.Number),
			each(run),
		})
	}
	return t
}

// each is the throughput of each actor after the warm-up, while it ran.
func each(r Run) string {
	const most = 5
	var all []float64
	var texts []string
	for i, a := range r.Record.Actors {
		v := a.Rate(r.Stage.There(i)).Mbps()
		all, texts = append(all, v), append(texts, figures.Number(v))
	}
	if len(all) > most {
		return fmt.Sprintf("%d: %s to %s", len(all), figures.Number(slices.Min(all)), figures.Number(slices.Max(all)))
	}
	return strings.Join(texts, " ")
}
