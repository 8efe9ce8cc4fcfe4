package recipe

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/penstock-net/penstock/internal/lab/record"
)

// WriteList writes what there is to play, and how long it takes over real sockets.
func WriteList(w io.Writer, recipes []Recipe) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range recipes {
		stages, err := r.Stages(Full, 1)
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", r.Name, TimeOf(stages).Round(time.Second), r.About, r.Source)
	}
	return t.Flush()
}

// WriteHead writes what a recipe is, and in what form it was played.
func WriteHead(w io.Writer, r Recipe, runs []record.Run) error {
	plays := 0
	for _, one := range runs {
		if one.Name == runs[0].Name {
			plays++
		}
	}
	form := cmp.Or(runs[0].Scale, string(Full)) + " form"
	if plays > 1 {
		form += fmt.Sprintf(", %d runs", plays)
	}
	_, err := fmt.Fprintf(w, "%s: %s\n%s; %s\n\n", r.Name, r.About, r.Source, form)
	return err
}

// WriteFindings writes what must hold of the experiments that runs are of, each by itself; nothing where nothing must.
func WriteFindings(w io.Writer, runs []record.Run) error {
	for len(runs) > 0 {
		name := runs[0].Experiment
		end := slices.IndexFunc(runs, func(r record.Run) bool { return r.Experiment != name })
		if end < 0 {
			end = len(runs)
		}
		var all [][]record.Finding
		var disturbed []bool
		for i, r := range runs[:end] {
			if r.Findings != nil {
				all, disturbed = append(all, r.Findings), append(disturbed, IsDisturbed(runs, i))
			}
		}
		if runs = runs[end:]; len(all) == 0 {
			continue
		}
		fmt.Fprintf(w, "\n%s\n", name)
		if err := writeFindings(w, all, disturbed); err != nil {
			return err
		}
	}
	return nil
}

// IsDisturbed reports whether the machine disturbed a run that the findings of run i are about: they count for nothing.
func IsDisturbed(runs []record.Run, i int) bool {
	for k := i; k >= 0 && runs[k].Experiment == runs[i].Experiment && (k == i || runs[k].Findings == nil); k-- {
		if runs[k].Noisy || runs[k].Discarded != "" {
			return true
		}
	}
	return false
}

// writeFindings writes those of one experiment, a list for each time that it was played; the condition of one may
// hold some times only.
func writeFindings(w io.Writer, all [][]record.Finding, disturbed []bool) error {
	const absent = "-"
	type line struct {
		record.Finding
		got         []string // each time
		there, held int      // of the times that were not disturbed
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
			if !disturbed[i] {
				l.there++
				if f.OK {
					l.held++
				}
			}
			next = k + 1
		}
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tfinding\tpaper\tbound\tours")
	for _, l := range lines {
		verdict := "ok"
		switch {
		case l.there == 0:
			verdict = notMeasured
		case l.held < l.there:
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
