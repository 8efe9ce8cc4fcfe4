package recipe

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"regexp"
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
	name             string
	virtual, sockets record.Run
	disturbed        bool // by the machine, in a run over real sockets: what was found there counts for nothing
}

// last are those of every recipe of the library, then of what else the records have.
func last(runs []record.Run) (all []played) {
	for _, r := range All(nil) {
		all = append(all, played{name: r.Name})
	}
	noisy := map[string]bool{} // experiments with a run since their last findings that was disturbed or does not count
	for _, r := range runs {
		noisy[r.Experiment] = noisy[r.Experiment] || r.Noisy || r.Discarded != ""
		if len(r.Findings) == 0 || r.Scale == string(Control) { // they are with an experiment's last run
			continue
		}
		i := slices.IndexFunc(all, func(p played) bool { return p.name == r.Experiment })
		if i < 0 {
			i, all = len(all), append(all, played{name: r.Experiment})
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

// String is the verdict and how many of the measured bounds hold.
func (c *boundCount) String() string {
	if c.held+c.broken == 0 {
		return notMeasured
	}
	return fmt.Sprintf("%s %d/%d", c.verdict(), c.held, c.held+c.broken)
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

// describe is an experiment's cell on one side.
func (p played) describe(run record.Run, count boundCount) string {
	text := count.String()
	if p.disturbed && !run.Virtual && run.Findings != nil {
		text += ", disturbed"
	}
	if run.Scale != "" {
		text += ", " + run.Scale + " form"
	}
	return text
}

// sides name the ways of playing in words.
var sides = [2]string{"virtual", "real"}

// WriteMarkdown writes a table of all published experiments with a verdict on each side, by the last findings in
// virtual time and over real sockets, and each bound that does not hold with the reason.
func WriteMarkdown(w io.Writer, runs []record.Run) error {
	all := last(runs)
	var b, broken strings.Builder
	var totals [2]boundCount
	b.WriteString("| recipe | virtual | real |\n|---|---|---|\n")
	for _, p := range all {
		var counts [2]boundCount
		rows := p.rows()
		for side := range sides {
			for _, r := range rows {
				counts[side].add(r.verdicts[side])
				totals[side].add(r.verdicts[side])
			}
		}
		writeBroken(&broken, p.name, rows)
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", p.name, p.describe(p.virtual, counts[0]),
			p.describe(p.sockets, counts[1]))
	}
	b.WriteString("\nBounds that hold, of those that were measured:")
	for side, of := range []func(played) record.Run{
		func(p played) record.Run { return p.virtual }, func(p played) record.Run { return p.sockets },
	} {
		c := totals[side]
		fmt.Fprintf(&b, " %s %d of %d (builds: %s);", [2]string{"in virtual time", "over real sockets"}[side], c.held,
			c.held+c.broken, builds(all, of))
	}
	b.WriteString(" not measured is what was not played, has no meaning on that side, or was played while the machine " +
		"was busy with other work.\n\nBounds that do not hold, how many, the first of them, and why:\n\n")
	b.WriteString(cmp.Or(broken.String(), "None.\n") + "\nPublished experiments without a recipe:\n\n")
	for _, u := range unplayed {
		fmt.Fprintf(&b, "- %s: %s; %s.\n", u[0], u[1], u[2])
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// unknownReason stands where a recipe does not say why its bound is missed.
const unknownReason = "**the reason is not known**"

// fullForm begins a reason of the full form alone, for the test of the short forms; a table has the full form.
var fullForm = regexp.MustCompile(`^in the full form,? `)

// writeBroken writes the bounds of an experiment that do not hold, by reason.
func writeBroken(b *strings.Builder, name string, rows []row) {
	var reasons []string
	first, counts := map[string]string{}, map[string]*[2]int{}
	for _, r := range rows {
		for side := range sides {
			if r.verdicts[side] != broken {
				continue
			}
			why := fullForm.ReplaceAllString(cmp.Or(r.reasons[side], unknownReason), "")
			if counts[why] == nil {
				reasons, counts[why] = append(reasons, why), &[2]int{}
				first[why] = fmt.Sprintf("%s is %s (%s)", r.What, r.figures[side], r.Bound)
			}
			counts[why][side]++
		}
	}
	for _, why := range reasons {
		var played []string
		for side, n := range counts[why] {
			if n > 0 {
				played = append(played, fmt.Sprintf("%d %s", n, sides[side]))
			}
		}
		fmt.Fprintf(b, "- `%s`, %s: %s: %s.\n", name, strings.Join(played, ", "), first[why], why)
	}
}

// WriteFigures writes a table of all findings: the last in virtual time beside the last over real sockets.
func WriteFigures(w io.Writer, runs []record.Run) error {
	var b strings.Builder
	b.WriteString("| recipe | finding | paper | bound | virtual | verdict | real | verdict |\n" +
		"|---|---|---|---|---|---|---|---|\n")
	for _, p := range last(runs) {
		title := "`" + p.name + "`"
		for _, r := range p.rows() {
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", title, escape(r.What), escape(r.Paper),
				escape(r.Bound), escape(r.figures[0]), r.explain(0), escape(r.figures[1]), r.explain(1))
			title = ""
		}
	}
	_, err := io.WriteString(w, b.String())
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
