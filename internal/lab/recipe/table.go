package recipe

import (
	"cmp"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

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

// sides name the ways of playing in words.
var sides = [2]string{"in virtual time", "over real sockets"}

// played is what was found of one experiment on both sides.
type played struct {
	name   string
	recipe Recipe // zero: it is none of the library
	sides  [2]side
}

// side is what was found in one way of playing: the last run with findings of each seed, of one build and form, as
// record.Judged has it.
type side []record.Run

// add takes the place of what is there of the seed, and of other builds and forms.
func (s *side) add(r record.Run) {
	*s = append(slices.DeleteFunc(*s, func(old record.Run) bool {
		return old.Seed == r.Seed || old.Version != r.Version || old.Scale != r.Scale
	}), r)
}

// first has what all runs have in common.
func (s side) first() record.Run {
	if len(s) == 0 {
		return record.Run{}
	}
	return s[0]
}

// isDisturbed reports whether the machine disturbed all runs.
func (s side) isDisturbed() bool {
	return len(s) > 0 && !slices.ContainsFunc(s, func(r record.Run) bool { return !r.Noisy })
}

// counting are the runs that were not disturbed, or all if each was.
func (s side) counting() side {
	if s.isDisturbed() {
		return s
	}
	return slices.DeleteFunc(slices.Clone(s), func(r record.Run) bool { return r.Noisy })
}

// readLibrary reads all recipes once, since that takes a second.
var readLibrary = sync.OnceValue(func() []Recipe { return All(nil) })

// last are those of every recipe of the library, then of what else the records have.
func last(runs []record.Run) (all []played) {
	for _, r := range readLibrary() {
		all = append(all, played{name: r.Name, recipe: r})
	}
	for _, r := range record.Judged(runs) {
		if r.Scale == string(Control) {
			continue
		}
		i := slices.IndexFunc(all, func(p played) bool { return p.name == r.Experiment })
		if i < 0 {
			i, all = len(all), append(all, played{name: r.Experiment})
		}
		there := &all[i].sides[1]
		if r.Virtual {
			there = &all[i].sides[0]
		}
		if r.Scale == "" || len(*there) == 0 || there.first().Scale != "" { // no short form where the full one is
			there.add(r)
		}
	}
	return all
}

// Verdicts of a bound, and of an experiment over its bounds, beside notMeasured.
const (
	holds  = "ok"
	broken = "**no**"
)

// tally counts what was measured, and what of it holds: the times of one bound, or the bounds of experiments.
type tally struct{ measured, held int }

// add counts one more.
func (t *tally) add(holds bool) {
	t.measured++
	if holds {
		t.held++
	}
}

// verdict is holds if all does that was measured.
func (t tally) verdict() string {
	switch {
	case t.measured == 0:
		return notMeasured
	case t.held < t.measured:
		return broken
	}
	return holds
}

// String is the verdict and how much holds of what was measured.
func (t tally) String() string {
	if t.measured == 0 {
		return notMeasured
	}
	return fmt.Sprintf("%s %d/%d", t.verdict(), t.held, t.measured)
}

// row is one finding of an experiment on both sides.
type row struct {
	line
	sides [2]judged
}

// judged is a finding on one side. The verdict is empty where there is no bound.
type judged struct{ bound, figure, verdict, reason string }

// explain returns the verdict, with the reason where a bound is known to be missed.
func (c judged) explain() string {
	if c.verdict == broken && c.reason != "" {
		return broken + ": " + escape(c.reason)
	}
	return c.verdict
}

// rows are the findings of both sides, in the order of virtual time. Some are of one side alone, such as processor
// time, which only a real proxy uses.
func (p played) rows() []row {
	virtual, sockets := p.sides[0].counting(), p.sides[1].counting()
	var all, alone []row // alone: over real sockets
	for _, l := range joinFindings(slices.Concat(virtual, sockets)) {
		n := len(virtual)
		r := row{l, [2]judged{p.judge(l.What, l.times[:n], virtual), p.judge(l.What, l.times[n:], sockets)}}
		r.Bound = cmp.Or(r.sides[0].bound, r.sides[1].bound)
		for i := range r.sides {
			if one := &r.sides[i]; cmp.Or(one.bound, r.Bound) == comparing {
				one.verdict = ""
			}
		}
		if r.sides[0].bound != "" {
			all = append(all, r)
		} else {
			alone = append(alone, r)
		}
	}
	return append(all, alone...)
}

// judge returns what one side has of a finding. The reason of a missed bound is as the library has it now, else as the
// record has it.
func (p played) judge(what string, times []*record.Finding, runs side) (j judged) {
	var figures []string
	for _, f := range times {
		if f != nil {
			figures = append(figures, f.Got)
			j.bound, j.reason = f.Bound, cmp.Or(j.reason, f.Why)
		}
	}
	j.figure, j.verdict = strings.Join(figures, " · "), tallyTimes(times, runs).verdict()
	j.reason = cmp.Or(p.recipe.missedReason(what), j.reason)
	return j
}

// describe is an experiment's cell on one side.
func (s side) describe(count tally) string {
	text := count.String()
	if s.isDisturbed() {
		text += ", disturbed"
	}
	if scale := s.first().Scale; scale != "" {
		text += ", " + scale + " form"
	}
	return text
}

// WriteMarkdown writes a table of all published experiments with a verdict on each side, by the findings of the last
// build in virtual time and over real sockets, which must hold in the runs of all seeds, and each bound that does not
// hold with the reason. Where runs have no findings over real sockets, the table says what an earlier one says of
// them, with the build they are of.
func WriteMarkdown(w io.Writer, runs []record.Run, earlier Sockets) error {
	all := last(runs)
	var b strings.Builder
	var missed [2]strings.Builder
	var totals [2]tally
	fmt.Fprintf(&b, "| %s |\n|---|---|---|---|\n", strings.Join(tableHead, " | "))
	for _, p := range all {
		var counts [2]tally
		rows := p.rows()
		for side := range sides {
			for _, r := range rows {
				if verdict := r.sides[side].verdict; verdict == holds || verdict == broken {
					counts[side].add(verdict == holds)
				}
			}
			writeBroken(&missed[side], p.name, rows, side)
		}
		found := p.sides[1]
		sockets := socketsCell{found.describe(counts[1]), cmp.Or(commit(found.first()), "-"), counts[1]}
		if old, is := earlier.cells[p.name]; is && len(found) == 0 {
			sockets = old
			missed[1].WriteString(earlier.broken[p.name])
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", p.name, p.sides[0].describe(counts[0]), sockets.text, sockets.build)
		for side, c := range [2]tally{counts[0], sockets.count} {
			totals[side].held += c.held
			totals[side].measured += c.measured
		}
	}
	b.WriteString("\nBounds that hold, of those that were measured:")
	for side, c := range totals {
		fmt.Fprintf(&b, " %s %d of %d", sides[side], c.held, c.measured)
		if side == 0 {
			fmt.Fprintf(&b, " (%s)", builds(all))
		}
		b.WriteString(";")
	}
	b.WriteString(" not measured is what was not played, has no meaning on that side, or was played while the machine " +
		"was busy with other work.\n")
	for side := range sides {
		fmt.Fprintf(&b, "\n%s%s, how many of a recipe, the first of them, and why:\n\n", brokenHead, sides[side])
		b.WriteString(cmp.Or(missed[side].String(), "None.\n"))
	}
	b.WriteString("\nPublished experiments without a recipe:\n\n")
	for _, u := range unplayed {
		fmt.Fprintf(&b, "- %s: %s; %s.\n", u[0], u[1], u[2])
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// brokenHead begins the line above the bounds that do not hold on a side.
const brokenHead = "Bounds that do not hold "

// Sockets is what a page that WriteMarkdown wrote says of runs over real sockets. Both maps are by recipe name.
type Sockets struct {
	cells  map[string]socketsCell
	broken map[string]string // the lines of its bounds that do not hold
}

// socketsCell is what the table says of one recipe over real sockets.
type socketsCell struct {
	text, build string
	count       tally
}

// tableHead are the columns of the table.
var tableHead = []string{"recipe", "virtual", "real", "build of real"}

var (
	tableName  = regexp.MustCompile("^`([^`]+)`$")
	realCount  = regexp.MustCompile(`^(ok|\*\*no\*\*) (\d{1,9})/(\d{1,9})\b`)
	brokenLine = regexp.MustCompile("^- `([^`]+)`, ")
)

// ReadSockets reads a page of WriteMarkdown. A row that contradicts itself is an error, and so is a page without the
// table: what it says of hours of runs would be lost.
func ReadSockets(page string) (Sockets, error) {
	t := Sockets{map[string]socketsCell{}, map[string]string{}}
	hasTable, isReal, number := false, false, 0
	for line := range strings.Lines(strings.ReplaceAll(page, "\r\n", "\n")) {
		number++
		cells := strings.Split(strings.Trim(line, "| \n"), "|")
		for i, text := range cells {
			cells[i] = strings.TrimSpace(text)
		}
		hasTable = hasTable || slices.Equal(cells, tableHead)
		if name := tableName.FindStringSubmatch(cells[0]); hasTable && name != nil && len(cells) == len(tableHead) {
			if err := t.addRow(name[1], cells[2], cells[3]); err != nil {
				return t, fmt.Errorf("line %d: %w: mend the line, or take it out", number, err)
			}
		}
		if strings.HasPrefix(line, brokenHead) {
			isReal = strings.HasPrefix(line, brokenHead+sides[1])
		}
		if bound := brokenLine.FindStringSubmatch(line); bound != nil && isReal {
			t.broken[bound[1]] += line
		}
	}
	if !hasTable {
		return t, fmt.Errorf("there is no table of %s in it", strings.Join(tableHead, ", "))
	}
	return t, nil
}

// addRow takes what the table says of a recipe over real sockets.
func (t Sockets) addRow(name, text, build string) error {
	if _, twice := t.cells[name]; twice {
		return fmt.Errorf("%s has two rows", name)
	}
	if strings.HasPrefix(text, notMeasured) {
		t.cells[name] = socketsCell{text: text, build: build}
		return nil
	}
	found := realCount.FindStringSubmatch(text)
	if found == nil {
		return fmt.Errorf("%s is %q, which is no verdict", name, text)
	}
	held, _ := strconv.Atoi(found[2]) // digits, by the expression
	all, _ := strconv.Atoi(found[3])
	count := tally{all, held}
	if held > all || count.verdict() != found[1] {
		return fmt.Errorf("%s is %q, which contradicts itself", name, text)
	}
	t.cells[name] = socketsCell{text, build, count}
	return nil
}

// unknownReason stands where a recipe does not say why its bound is missed.
const unknownReason = "**the reason is not known**"

// fullForm begins a reason of the full form alone, for the test of the short forms; a table has the full form.
var fullForm = regexp.MustCompile(`^in the full form,? `)

// writeBroken writes the bounds of an experiment that do not hold on a side, by reason.
func writeBroken(b *strings.Builder, name string, rows []row, side int) {
	var reasons []string
	first, counts := map[string]string{}, map[string]int{}
	for _, r := range rows {
		c := r.sides[side]
		if c.verdict != broken {
			continue
		}
		why := fullForm.ReplaceAllString(cmp.Or(c.reason, unknownReason), "")
		if counts[why]++; counts[why] == 1 {
			reasons = append(reasons, why)
			first[why] = fmt.Sprintf("%s is %s (%s)", r.What, c.figure, r.Bound)
		}
	}
	for _, why := range reasons {
		fmt.Fprintf(b, "- `%s`, %d: %s: %s.\n", name, counts[why], first[why], why)
	}
}

// WriteFigures writes a table of all findings: those of the last build in virtual time beside those over real sockets.
func WriteFigures(w io.Writer, runs []record.Run) error {
	var b strings.Builder
	b.WriteString("| recipe | finding | paper | bound | virtual | verdict | real | verdict |\n" +
		"|---|---|---|---|---|---|---|---|\n")
	for _, p := range last(runs) {
		title := "`" + p.name + "`"
		for _, r := range p.rows() {
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", title, escape(r.What), escape(r.Paper),
				escape(r.Bound), escape(r.sides[0].figure), r.sides[0].explain(), escape(r.sides[1].figure), r.sides[1].explain())
			title = ""
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// builds names those that records in virtual time are of.
func builds(all []played) string {
	var names []string
	for _, p := range all {
		if name := commit(p.sides[0].first()); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return "build " + cmp.Or(strings.Join(names, ", "), "none")
}

// commit returns the source's commit, or release, from the version of a run: its second word.
func commit(r record.Run) string {
	if words := strings.Fields(r.Version); len(words) > 1 {
		return words[1]
	}
	return r.Version
}

func escape(s string) string { return strings.ReplaceAll(cmp.Or(s, "-"), "|", "\\|") }
