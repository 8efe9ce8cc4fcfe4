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

// WriteResults writes the runs of one recipe, which may have been played several times, one after the other: a
// table of the stages' figures, medians where there are several, then the findings of each time.
func WriteResults(w io.Writer, r Recipe, runs []record.Run) error {
	plays := playsOf(runs)
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n%s; %s form", r.Name, r.About, r.Source, cmp.Or(runs[0].Scale, string(Full)))
	if len(plays) > 1 {
		fmt.Fprintf(&b, ", %d runs", len(plays))
	}
	b.WriteString("\n\n")
	stageTable(plays).Write(&b)
	if err := WriteFindings(&b, runs); err != nil {
		return err
	}
	for _, one := range runs {
		if one.Discarded != "" {
			fmt.Fprintf(&b, "Discarded: %s, seed %d: %s.\n", one.Name, one.Seed, one.Discarded)
		}
		if one.Noisy {
			fmt.Fprintf(&b, "Disturbed by the machine: %s, seed %d: packets were up to %.1f ms late (p99).\n",
				one.Name, one.Seed, one.Lateness.P99)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// playsOf cuts runs into those of each time that their recipe was played; the last may lack some.
func playsOf(runs []record.Run) (plays [][]record.Run) {
	for i, r := range runs {
		if i == 0 || r.Seed != runs[i-1].Seed || r.Number != runs[i-1].Number {
			plays = append(plays, nil)
		}
		last := &plays[len(plays)-1]
		*last = append(*last, r)
	}
	return plays
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
func stageTable(plays [][]record.Run) figures.Table {
	t := figures.Table{
		{"", "Mbit/s", "used", "queueing, ms", figures.Spans, "each, Mbit/s of payload"},
		{"stage", "", "%", "p50", "p95", ""},
	}
	for i, first := range plays[0] {
		of := func(figure func(record.Run) float64, text func(float64) string) string {
			var all []float64
			for _, runs := range plays {
				if i < len(runs) && runs[i].Discarded == "" {
					all = append(all, figure(runs[i]))
				}
			}
			if len(all) == 0 {
				return "-"
			}
			return text(figures.SpreadOf(all).Median)
		}
		t = append(t, []string{
			first.Name,
			of(func(r record.Run) float64 { return r.Throughput }, figures.Number),
			of(func(r record.Run) float64 { return r.Utilisation },
				func(v float64) string { return figures.Percent(v, 1) }),
			of(func(r record.Run) float64 { return r.Queueing.P50 }, figures.Number),
			of(func(r record.Run) float64 { return r.Queueing.P95 }, figures.Number),
			each(first),
		})
	}
	return t
}

// each is the throughput of each flow after the warm-up, while it ran.
func each(r record.Run) string {
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
