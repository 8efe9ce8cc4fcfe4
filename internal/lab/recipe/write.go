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
	for judged := record.Judged(runs); len(judged) > 0; {
		n := slices.IndexFunc(judged, func(r record.Run) bool { return r.Experiment != judged[0].Experiment })
		if n < 0 {
			n = len(judged)
		}
		fmt.Fprintf(w, "\n%s\n", judged[0].Experiment)
		if err := writeFindings(w, judged[:n]); err != nil {
			return err
		}
		judged = judged[n:]
	}
	return nil
}

// absent stands for the figure of a finding that did not apply.
const absent = "-"

// line is a finding with what came of it each time that its experiment was played.
type line struct {
	record.Finding                   // of the first time
	times          []*record.Finding // nil: its condition did not hold then
}

// joinFindings joins those of one experiment, a list for each time that it was played. Those of one name have their
// order.
func joinFindings(runs []record.Run) (lines []line) {
	for i, r := range runs {
		next := 0
		for _, f := range r.Findings {
			k := slices.IndexFunc(lines, func(l line) bool {
				return l.What == f.What && l.Paper == f.Paper && l.times[i] == nil
			})
			if k < 0 {
				k = next
				lines = slices.Insert(lines, k, line{f, make([]*record.Finding, len(runs))})
			}
			lines[k].times[i] = &f
			next = k + 1
		}
	}
	return lines
}

// tallyTimes counts the times that the machine did not disturb: what was found in the others is not measured, whether
// the bound holds or not, because the machine may have caused either.
func tallyTimes(times []*record.Finding, runs []record.Run) (t tally) {
	for i, f := range times {
		if f != nil && !runs[i].Noisy {
			t.add(f.OK)
		}
	}
	return t
}

// writeFindings writes those of one experiment, which must hold each time that the machine did not disturb.
func writeFindings(w io.Writer, runs []record.Run) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tfinding\tpaper\tbound\tours")
	for _, l := range joinFindings(runs) {
		got := slices.Repeat([]string{absent}, len(runs))
		for i, f := range l.times {
			if f != nil {
				got[i] = f.Got
			}
		}
		count := tallyTimes(l.times, runs)
		verdict := count.verdict()
		if verdict == broken {
			verdict = "FAIL"
			if count.held > 0 {
				verdict += fmt.Sprintf(" %d of %d", count.measured-count.held, count.measured)
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", verdict, l.What, cmp.Or(l.Paper, absent), l.Bound, strings.Join(got, " · "))
	}
	return t.Flush()
}
