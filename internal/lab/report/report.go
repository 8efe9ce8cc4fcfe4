// Package report makes one page of the records of runs: what came of each sender on each
// path, with figures, and how far to trust it. The page needs no network and no scripts.
package report

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// File is a file of records.
type File struct {
	Name string // no other file has it
	Runs []record.Run
}

//go:embed page.html
var pageText string

var page = template.Must(template.New("report").Parse(pageText))

// Write writes the page of all files' runs. Where there are several, their runs of one
// path stand side by side. Each sender's runs are set against the baseline's: of two files against the first's runs of
// that sender, else against those of the sender that baseline names, or, where it is empty, the first.
func Write(w io.Writer, files []File, baseline string) error {
	content := struct {
		Files []string
		Trust trust
		Paths []section
	}{Trust: trustOf(files)}
	for _, f := range files {
		content.Files = append(content.Files, f.Name)
	}
	for i, p := range pathsOf(files) {
		s, err := p.makeSection(i+1, files, baseline)
		if err != nil {
			return err
		}
		content.Paths = append(content.Paths, s)
	}
	if err := page.Execute(w, content); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// path is all runs over one path, of one experiment.
type path struct {
	name       string // with the experiment's, where there are several
	experiment string
	rows       []row
}

// row is all runs on one path that are alike but for their seeds.
type row struct {
	kind
	first     record.Run   // of all
	runs      []record.Run // that count
	discarded int          // that do not
}

// kind is what tells the runs of one row from others': the sender's name, then file, form, how it was played, build,
// hints and warm-up, transport, and the number of the setup.
type kind [9]string

const (
	transport = 7
	setup     = 8 // "setup 2": other runs of that seed, alike in all else, play something else
)

func kindOf(file string, r record.Run) kind {
	played, below := "over real sockets", cmp.Or(r.Transport, r.Envelope)
	if r.Virtual {
		played = "in virtual time"
	}
	if below == "auto" { // it was left to the proxy, which did not say
		below = ""
	}
	k := kind{r.Name, file, cmp.Or(r.Scale, "full") + " form", played, r.Version, transport: below}
	if r.Hints > 0 {
		k[5] = "hints each " + figures.Exact(r.Hints) + " ms"
	}
	if r.Warmup > 0 {
		k[6] = "warm-up " + figures.Exact(r.Warmup) + " s"
	}
	return k
}

// like reports whether runs of both are alike but for their setups. The proxy says nothing of a transport after its
// connections have ended: that must not part quick runs from slow ones.
func (k kind) like(o kind) bool {
	k[setup], o[setup] = "", ""
	if k[transport] == "" || o[transport] == "" {
		k[transport], o[transport] = "", ""
	}
	return k == o
}

// rowLabel is a row's name: the sender's, and of the rest what tells it from other rows of that sender.
func (p path) rowLabel(w row) string {
	text, alike := w.kind[0], slices.Clone(p.rows)
	for k, part := range w.kind {
		before := len(alike)
		alike = slices.DeleteFunc(alike, func(o row) bool { return o.kind[k] != part })
		if k > 0 && len(alike) < before && part != "" {
			text += ", " + part
		}
	}
	return text
}

// bySender is the kind of runs in tables of text, which have those of one session: the sender's, and the random loss.
func bySender(_ string, r record.Run) kind { return kind{r.Name, figures.Exact(r.Loss)} }

// pathsOf sorts runs by experiment, path and kind, in order of first appearance: what two experiments play
// over one path is not one thing.
func pathsOf(files []File) []path {
	all := sortRuns(files, record.Run.Path, kindOf)
	for i, p := range all {
		if slices.ContainsFunc(all, func(o path) bool { return o.experiment != p.experiment }) {
			all[i].name = p.experiment + ": " + p.name
		}
	}
	return all
}

// tablesOf sorts runs into tables of text. Runs of one way stand in one, where random loss may differ.
func tablesOf(runs []record.Run) []path {
	all := sortRuns([]File{{Runs: runs}}, func(r record.Run) string { return r.Way(false) }, bySender)
	for i, p := range all {
		if len(p.losses()) == 1 {
			all[i].name = p.rows[0].first.Way(true)
		}
	}
	return all
}

// sortRuns sorts runs into paths by experiment and way, and into rows by kind.
func sortRuns(files []File, way func(record.Run) string, kindOf func(file string, r record.Run) kind) (all []path) {
	for _, f := range files {
		for _, r := range f.Runs {
			name := way(r)
			i := slices.IndexFunc(all, func(p path) bool { return p.name == name && p.experiment == r.Experiment })
			if i < 0 {
				i = len(all)
				all = append(all, path{name: name, experiment: r.Experiment})
			}
			all[i].addRun(kindOf(f.Name, r), r)
		}
	}
	return all
}

// addRun takes a run into the newest row that it repeats, or else into a new one.
func (p *path) addRun(k kind, r record.Run) {
	i, setups := -1, 0
	for n, w := range p.rows {
		if !w.like(k) {
			continue
		}
		if setups++; !w.contradicts(r) {
			i = n
		}
	}
	if i < 0 {
		if setups > 0 {
			k[setup] = fmt.Sprintf("setup %d", setups+1)
		}
		i = len(p.rows)
		p.rows = append(p.rows, row{kind: k, first: r})
	}
	w := &p.rows[i]
	w.kind[transport] = cmp.Or(w.kind[transport], k[transport])
	switch {
	case r.Discarded != "":
		w.discarded++
	case r.Virtual && r.Find(w.runs) >= 0: // made twice: it says nothing new
	default:
		w.runs = append(w.runs, r)
	}
}

// contradicts reports whether a run of the same seed played something else. Setups of different seeds
// always differ.
func (w row) contradicts(r record.Run) bool {
	return slices.ContainsFunc(w.runs, func(o record.Run) bool {
		return o.Seed == r.Seed && o.Setup != r.Setup
	})
}

// section is a path as the page has it.
type section struct {
	Number  int
	Name    string
	Made    []string // by which commands, with which seeds, when, on which machines
	Against string   // what the ratios are to; empty: there are none
	Figures []drawing
	Lines   []line
}

// drawing is a figure with what it shows.
type drawing struct {
	SVG     template.HTML
	Caption string
}

// line is a sender's in a path's table.
type line struct {
	Name, Colour                         string
	Runs, Noisy                          int
	Discarded                            int
	Throughput, Used, P50, P95, Lost, Up string
	Rates, Delays                        string // throughput, and queueing at p95, as ratios to the baseline's
}

func (p path) makeSection(number int, files []File, baseline string) (section, error) {
	s := section{Number: number, Name: p.name, Made: p.describeRuns()}
	for _, f := range p.listFigures() {
		svg, err := f.draw().WriteElement(f.label + ": " + p.name)
		if err != nil {
			return s, err
		}
		//nolint:gosec // drawn by figures, which escapes its text
		s.Figures = append(s.Figures, drawing{template.HTML(svg), f.label})
	}
	for i, w := range p.rows {
		c := figures.Colour(i)
		l := line{
			Name: p.rowLabel(w), Colour: fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B),
			Runs: len(w.runs), Discarded: w.discarded, Noisy: w.countNoisy(),
			Throughput: w.medianText(throughputOf),
			Used:       w.medianText(func(r record.Run) float64 { return 100 * r.Utilisation }),
			P50:        w.medianText(func(r record.Run) float64 { return r.Queueing.P50 }),
			P95:        w.medianText(delayOf),
			Lost:       w.medianText(func(r record.Run) float64 { return 100 * r.DropShare() }),
			Up:         w.medianText(func(r record.Run) float64 { return r.UpQueueing.P95 }),
		}
		if base := p.baseOf(w, files, baseline); base != nil {
			s.Against = base.kind[0]
			if len(files) == 2 {
				s.Against = files[0].Name
			}
			l.Rates, l.Delays = w.ratioTo(*base, throughputOf), w.ratioTo(*base, delayOf)
		}
		s.Lines = append(s.Lines, l)
	}
	return s, nil
}

// describeRuns says how the runs came about.
func (p path) describeRuns() (all []string) {
	var commands, machines []string
	var seeds []uint64
	var first, last time.Time
	for _, r := range p.runs() {
		commands, machines = append(commands, r.Command), append(machines, r.System.String())
		seeds = append(seeds, r.Seed)
		if first.IsZero() || r.StartedAt.Before(first) {
			first = r.StartedAt
		}
		if r.StartedAt.After(last) {
			last = r.StartedAt
		}
	}
	distinct := func(texts []string) []string {
		slices.Sort(texts)
		return slices.DeleteFunc(slices.Compact(texts), func(s string) bool { return s == "" })
	}
	for _, c := range distinct(commands) {
		all = append(all, "Command: "+c)
	}
	slices.Sort(seeds)
	var names []string
	for _, s := range slices.Compact(seeds) {
		names = append(names, strconv.FormatUint(s, 10))
	}
	const day = "2006-01-02"
	date := first.Format(day)
	if end := last.Format(day); end != date {
		date += " to " + end
	}
	return append(all, fmt.Sprintf("Seeds: %s. Date: %s. Machine: %s.", strings.Join(names, ", "), date,
		strings.Join(distinct(machines), "; ")))
}

func throughputOf(r record.Run) float64 { return r.Throughput }

func delayOf(r record.Run) float64 { return r.Queueing.P95 }

func (w row) countNoisy() (n int) {
	for _, r := range w.runs {
		if r.Noisy {
			n++
		}
	}
	return n
}

// baseOf is the row that w is set against; nil: there is none but itself.
func (p path) baseOf(w row, files []File, baseline string) *row {
	const file, version = 1, 4
	for i, o := range p.rows {
		other := o.kind
		if len(files) == 2 {
			if other[file] != files[0].Name || w.kind[file] == files[0].Name {
				continue
			}
			other[file], other[version] = w.kind[file], w.kind[version]
			if other.like(w.kind) {
				return &p.rows[i]
			}
			continue
		}
		if baseline == "" || o.kind[0] == baseline {
			if o.kind == w.kind {
				return nil
			}
			return &p.rows[i]
		}
	}
	return nil
}

// ratioTo is the ratio of a figure to that of the base, over the pairs of runs that have a seed in
// common: the same link and the same starts.
func (w row) ratioTo(base row, figure func(record.Run) float64) string {
	var ratios []float64
	for _, r := range w.runs {
		for _, o := range base.runs {
			if r.Seed == o.Seed && figure(r) > 0 && figure(o) > 0 {
				ratios = append(ratios, figure(r)/figure(o))
				break
			}
		}
	}
	if len(ratios) == 0 {
		return "–"
	}
	return figures.MeanRatio(ratios).String()
}

// WriteComparison writes a table of what two files have in common: the second's figures as ratios to the first's.
func WriteComparison(w io.Writer, files []File) error {
	var b strings.Builder
	for _, p := range pathsOf(files) {
		t := figures.Table{
			{"", "", files[1].Name + " / " + files[0].Name, figures.Spans},
			{"sender", "runs", "throughput", "p95 queueing"},
		}
		head := len(t)
		for _, r := range p.rows {
			if base := p.baseOf(r, files, ""); base != nil {
				t = append(t, []string{
					r.kind[0], strconv.Itoa(len(r.runs)), r.ratioTo(*base, throughputOf), r.ratioTo(*base, delayOf),
				})
			}
		}
		if len(t) > head {
			b.WriteString(p.name + "\n\n")
			t.Write(&b)
			b.WriteByte('\n')
		}
	}
	if b.Len() == 0 {
		b.WriteString("The files have no sender on one path in common.\n")
	} else {
		b.WriteString("Geometric means over pairs of runs with one seed; in brackets the 95 % interval of " +
			"a bootstrap.\nAn interval without 1 is a difference.\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// values are a figure of the runs that count and have it.
func (w row) values(figure func(record.Run) float64) (all []float64) {
	for _, r := range w.runs {
		if v := figure(r); !math.IsNaN(v) {
			all = append(all, v)
		}
	}
	return all
}

// median is that of a figure; 0: no run counts.
func (w row) median(figure func(record.Run) float64) float64 {
	if len(w.runs) == 0 {
		return 0
	}
	return figures.SpreadOf(w.values(figure)).Median
}

// medianText is the median of a figure, with its 95 % confidence interval or, of fewer than six runs,
// the range.
func (w row) medianText(figure func(record.Run) float64) string {
	values := w.values(figure)
	if len(values) == 0 {
		return "–"
	}
	slices.Sort(values)
	text := figures.Number(figures.Quantile(values, 0.5))
	if len(values) > 1 {
		lo, hi := medianRanks(len(values))
		text += " (" + figures.Number(values[lo]) + "–" + figures.Number(values[hi]) + ")"
	}
	return text
}

// medianRanks are the ranks, from 0, of the values between which the median lies with a
// probability of at least 95 %: order statistics, which assume no distribution. Of fewer
// than six values no two do, and the interval is the range.
func medianRanks(n int) (lo, hi int) {
	// below is the chance that at most k of n values lie below the median. What is added is made of logarithms:
	// half to the power of n is 0 for large ones.
	below, chance := 0.0, -float64(n)*math.Ln2
	for k := 0; 2*k < n; k++ {
		below += math.Exp(chance)
		if below > 0.025 {
			break
		}
		lo = k
		chance += math.Log(float64(n-k)) - math.Log(float64(k+1))
	}
	return lo, n - 1 - lo
}

// trust is what says how far to trust the figures.
type trust struct {
	Systems, Versions []string
	Runs, Virtual     int
	Lateness          string // of the emulator at p99, over the runs; empty: none was real
	Noisy             int
	Discarded         []string
	late              []float64 // p99 of each run over real sockets
}

func trustOf(files []File) trust {
	var t trust
	note := func(list *[]string, text string) {
		if text = strings.TrimSpace(text); text != "" && !slices.Contains(*list, text) {
			*list = append(*list, text)
		}
	}
	for _, f := range files {
		for _, r := range f.Runs {
			t.Runs++
			note(&t.Versions, r.Version)
			if r.Discarded != "" {
				note(&t.Discarded, fmt.Sprintf("%s, seed %d: %s", r.Name, r.Seed, r.Discarded))
			}
			if r.Virtual {
				t.Virtual++
				continue
			}
			note(&t.Systems, r.System.String())
			t.late = append(t.late, r.Lateness.P99)
			if r.Noisy {
				t.Noisy++
			}
		}
	}
	if len(t.late) > 0 {
		s := figures.SpreadOf(t.late)
		t.Lateness = fmt.Sprintf("%s ms in the middle run, %s ms in the worst", figures.Number(s.Median),
			figures.Number(s.Max))
	}
	return t
}
