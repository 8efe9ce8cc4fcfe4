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
	{"ALCC, §5.6", "processor time beside native senders", "the native sender is part of the program that emulates the " +
		"link, and its time cannot be told apart; `go test -bench . ./test/cost` has the proxy's"},
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
	noisy := map[string]bool{} // experiments of which a run since their last findings was disturbed or does not count
	for _, r := range runs {
		noisy[r.Experiment] = noisy[r.Experiment] || r.Noisy || r.Discarded != ""
		if len(r.Findings) == 0 { // they are with an experiment's last run
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

// WriteMarkdown writes a table of all published experiments and how many of their bounds hold, and one of
// their findings: the last in virtual time beside the last over real sockets, and whether they hold.
func WriteMarkdown(w io.Writer, runs []record.Run) error {
	all := last(runs)
	var b strings.Builder
	b.WriteString("| experiment | recipe | bounds that hold, virtual | real | verdict |\n|---|---|---|---|---|\n")
	held, of := 0, 0
	var disturbed []string
	for _, p := range all {
		verdict := "-"
		asked := max(bounds(p.virtual), bounds(p.sockets))
		count := func(r record.Run) string {
			n, ok := bounds(r), 0
			if n == 0 {
				return "not run"
			}
			for _, f := range r.Findings {
				if f.Bound != comparing && f.OK {
					ok++
				}
			}
			short := ""
			if r.Scale != "" {
				short = ", " + r.Scale
			}
			if p.disturbed && !r.Virtual {
				disturbed = append(disturbed, "`"+p.name+"`")
				return fmt.Sprintf("%d of %d%s, disturbed", ok, n, short)
			}
			held, of = held+ok, of+n
			switch {
			case ok < n:
				verdict = "**no**"
			case verdict == "-":
				verdict = "ok"
			}
			if n < asked { // an earlier form of the experiment
				return fmt.Sprintf("%d of %d%s, %d are later", ok, n, short, asked-n)
			}
			return fmt.Sprintf("%d of %d%s", ok, n, short)
		}
		virtual, sockets := count(p.virtual), count(p.sockets)
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s | %s |\n", escape(p.source), p.name, virtual, sockets, verdict)
	}
	for _, u := range unplayed {
		fmt.Fprintf(&b, "| %s: %s | none | not run | not run | %s |\n", u[0], u[1], u[2])
	}
	fmt.Fprintf(&b, "\n%d of %d bounds hold. Builds: in virtual time %s; over real sockets %s.\n\n", held, of,
		builds(all, func(p played) record.Run { return p.virtual }),
		builds(all, func(p played) record.Run { return p.sockets }))
	if disturbed != nil {
		fmt.Fprintf(&b, "Disturbed by the machine over real sockets, and not counted: %s.\n\n", strings.Join(disturbed, ", "))
	}
	b.WriteString("| recipe | finding | paper | bound | virtual | real | verdict |\n|---|---|---|---|---|---|---|\n")
	for _, p := range all {
		title := "`" + p.name + "`"
		findings := p.virtual.Findings
		if findings == nil {
			findings = p.sockets.Findings
		}
		for _, f := range findings {
			v, isVirtual := finding(p.virtual, f.What)
			r, isReal := finding(p.sockets, f.What)
			verdict := ""
			if f.Bound != comparing {
				verdict = "ok"
			}
			if verdict != "" && (isVirtual && !v.OK || isReal && !r.OK && !p.disturbed) {
				verdict = "**no**"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", title, escape(f.What), escape(f.Paper), escape(f.Bound),
				escape(v.Got), escape(r.Got), verdict)
			title = ""
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// bounds is how much is asked of an experiment.
func bounds(r record.Run) (n int) {
	for _, f := range r.Findings {
		if f.Bound != comparing {
			n++
		}
	}
	return n
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
