package recipe

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/internal/lab/record"
)

// unplayed are published experiments without a recipe: who published them, what is played, and why it is not here.
var unplayed = [][3]string{
	{
		"ALCC, §5.7", "phones in operators' networks",
		"needs those networks; `alcc-a7` has their queue, which loses nothing",
	},
	{
		"CCP, MIT 2019, figure 3-6", "incast of 50 flows, 10 and 40 Gbit/s, 20 µs",
		"flows decide once a millisecond, which is 50 of its round trips; the paper's is a simulation too",
	},
}

// played are the last findings of one experiment in virtual time and over real sockets.
type played struct {
	name, source     string
	virtual, sockets record.Run
	disturbed        bool // by the machine, in a run over real sockets: what was found there counts for nothing
}

// last are those of every recipe of the library, then of what else the records have.
func last(runs []record.Run) (all []played) {
	for _, r := range All(nil) {
		all = append(all, played{name: r.Name, source: r.Source})
	}
	noisy := map[string]bool{} // experiments with a run since their last findings that was disturbed or does not count
	for _, r := range runs {
		noisy[r.Experiment] = noisy[r.Experiment] || r.Noisy || r.Discarded != ""
		if len(r.Findings) == 0 || r.Scale == string(Control) { // they are with an experiment's last run
			continue
		}
		i := slices.IndexFunc(all, func(p played) bool { return p.name == r.Experiment })
		if i < 0 {
			i, all = len(all), append(all, played{name: r.Experiment, source: "-"})
		}
		there := all[i].sockets
		if r.Virtual {
			there = all[i].virtual
		}
		if r.Scale != "" && there.Findings != nil && there.Scale == "" {
			continue // the short form, and the full one is there
		}
		if r.Virtual {
			all[i].virtual = r
		} else {
			all[i].sockets, all[i].disturbed, noisy[r.Experiment] = r, noisy[r.Experiment], false
		}
	}
	return all
}

// Verdicts of a bound, and of an experiment over its bounds.
const (
	holds       = "ok"
	broken      = "**no**"
	notMeasured = unmeasured // it was not played, does not apply there, or the machine disturbed the run
)

// boundCount counts the bounds of one experiment, or of all, by their verdicts in virtual time or over real sockets.
type boundCount struct{ held, broken, notMeasured int }

// add counts one verdict.
func (c *boundCount) add(verdict string) {
	switch verdict {
	case holds:
		c.held++
	case broken:
		c.broken++
	case notMeasured:
		c.notMeasured++
	}
}

// verdict judges an experiment by the bounds that were measured.
func (c *boundCount) verdict() string {
	switch {
	case c.broken > 0:
		return broken
	case c.held > 0:
		return holds
	}
	return notMeasured
}

// String is how many of the measured bounds hold, and how many were not measured.
func (c *boundCount) String() string {
	text := fmt.Sprintf("%d of %d", c.held, c.held+c.broken)
	if c.notMeasured > 0 {
		text += fmt.Sprintf(", %d %s", c.notMeasured, notMeasured)
	}
	return text
}

// verdict judges one finding; empty: it has no bound. The bounds of a disturbed run are not measured, whether they
// hold or not, because the machine may have caused either.
func verdict(bound string, ok, measured bool) string {
	switch {
	case bound == comparing:
		return ""
	case !measured:
		return notMeasured
	case !ok:
		return broken
	}
	return holds
}

// row is one finding of an experiment, with the figures and verdicts in virtual time and over real sockets.
type row struct {
	record.Finding
	figures, verdicts, reasons [2]string
}

// explain returns the verdict of a side, with the reason where a bound is known to be missed.
func (r row) explain(side int) string {
	if r.verdicts[side] == broken && r.reasons[side] != "" {
		return broken + ": " + escape(r.reasons[side])
	}
	return r.verdicts[side]
}

// rows are the findings of both sides, in the order of virtual time. Some are of one side alone, such as processor
// time, which only a real proxy uses.
func (p played) rows() (all []row) {
	list := slices.Clone(p.virtual.Findings)
	for _, f := range p.sockets.Findings {
		if _, there := finding(p.virtual, f.What); !there {
			list = append(list, f)
		}
	}
	for _, f := range list {
		v, isVirtual := finding(p.virtual, f.What)
		r, isReal := finding(p.sockets, f.What)
		all = append(all, row{Finding: f, figures: [2]string{v.Got, r.Got}, verdicts: [2]string{
			verdict(f.Bound, v.OK, isVirtual), verdict(f.Bound, r.OK, isReal && !p.disturbed),
		}, reasons: [2]string{v.Why, r.Why}})
	}
	return all
}

// describe is an experiment's cell on one side: how many of its bounds hold.
func (p played) describe(run record.Run, count boundCount) string {
	if run.Findings == nil {
		return "not run"
	}
	text := count.String()
	if p.disturbed && !run.Virtual {
		var undecided boundCount
		for _, f := range run.Findings {
			undecided.add(verdict(f.Bound, f.OK, true))
		}
		text = undecided.String() + ", disturbed"
	}
	if run.Scale != "" {
		text += ", " + run.Scale
	}
	return text
}

// WriteMarkdown writes a table of all published experiments and how many of their bounds hold, and one of their
// findings: the last in virtual time beside the last over real sockets, with a verdict on each side.
func WriteMarkdown(w io.Writer, runs []record.Run) error {
	all := last(runs)
	var b, findings strings.Builder
	b.WriteString("| experiment | recipe | virtual: bounds that hold | verdict | real: bounds that hold | verdict |\n" +
		"|---|---|---|---|---|---|\n")
	findings.WriteString("| recipe | finding | paper | bound | virtual | verdict | real | verdict |\n" +
		"|---|---|---|---|---|---|---|---|\n")
	var virtual, sockets boundCount
	var disturbed []string
	for _, p := range all {
		var counts [2]boundCount
		title := "`" + p.name + "`"
		for _, r := range p.rows() {
			fmt.Fprintf(&findings, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", title, escape(r.What), escape(r.Paper),
				escape(r.Bound), escape(r.figures[0]), r.explain(0), escape(r.figures[1]), r.explain(1))
			title = ""
			for i, total := range []*boundCount{&virtual, &sockets} {
				counts[i].add(r.verdicts[i])
				total.add(r.verdicts[i])
			}
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s | %s | %s |\n", escape(p.source), p.name,
			p.describe(p.virtual, counts[0]), counts[0].verdict(), p.describe(p.sockets, counts[1]), counts[1].verdict())
		if p.disturbed {
			disturbed = append(disturbed, "`"+p.name+"`")
		}
	}
	for _, u := range unplayed {
		fmt.Fprintf(&b, "| %s: %s | none | not run | %s | not run | %s: %s |\n", u[0], u[1], notMeasured, notMeasured, u[2])
	}
	fmt.Fprintf(&b, "\nBounds that hold, of those that were measured: in virtual time %s; over real sockets %s. "+
		"A verdict is `ok` where each measured bound holds and `no` where one does not. It is `%s` where the experiment was not played, "+
		"where a bound has no meaning on that side, and where the machine disturbed a run: its figures stand in the table "+
		"and prove nothing.\n\n", &virtual, &sockets, notMeasured)
	fmt.Fprintf(&b, "Builds: in virtual time %s; over real sockets %s.\n\n",
		builds(all, func(p played) record.Run { return p.virtual }),
		builds(all, func(p played) record.Run { return p.sockets }))
	if disturbed != nil {
		fmt.Fprintf(&b, "Disturbed by the machine over real sockets, and so not measured: %s.\n\n",
			strings.Join(disturbed, ", "))
	}
	_, err := io.WriteString(w, b.String()+findings.String())
	return err
}

// builds names those that records are of, and how many experiments each has played.
func builds(all []played, of func(played) record.Run) string {
	counts := map[string]int{}
	for _, p := range all {
		if r := of(p); r.Version != "" {
			counts[r.Version]++
		}
	}
	var names []string
	for _, version := range slices.Sorted(maps.Keys(counts)) {
		names = append(names, fmt.Sprintf("%s (%d of %d)", version, counts[version], len(all)))
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

func escape(s string) string { return strings.ReplaceAll(cmp.Or(s, "-"), "|", "\\|") }

func finding(r record.Run, what string) (record.Finding, bool) {
	for _, f := range r.Findings {
		if f.What == what {
			return f, true
		}
	}
	return record.Finding{}, false
}
