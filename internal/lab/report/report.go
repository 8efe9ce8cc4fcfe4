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
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/output"
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
// path stand side by side.
func Write(w io.Writer, files []File) error {
	content := struct {
		Files []string
		Trust trust
		Paths []section
	}{Trust: trustOf(files)}
	for _, f := range files {
		content.Files = append(content.Files, f.Name)
	}
	for _, p := range pathsOf(files) {
		s, err := p.section()
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
	name string // with the experiment's, where there are several
	rows []row
}

// row is all runs on one path that are alike but for their seeds.
type row struct {
	kind
	runs      []record.Run // that count
	discarded int          // that do not
}

// kind is what tells the runs of one row from others': the sender's name, then file, form, how it was played, build,
// hints and warm-up, transport, and the number of the setup.
type kind [9]string

const (
	transport = 7
	setup     = 8 // "setup 2": other runs of that seed and number, alike in all else, play something else
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

// label is a row's name: the sender's, and of the rest what tells it from other rows of that sender.
func (p path) label(w row) string {
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

// pathsOf sorts runs by experiment, path and kind, in order of first appearance: what two experiments play
// over one path is not one thing.
func pathsOf(files []File) []path {
	experiments := map[string]bool{}
	for _, f := range files {
		for _, r := range f.Runs {
			experiments[r.Experiment] = true
		}
	}
	var all []path
	for _, f := range files {
		for _, r := range f.Runs {
			way := r.Path()
			if len(experiments) > 1 {
				way = r.Experiment + ": " + way
			}
			i := slices.IndexFunc(all, func(p path) bool { return p.name == way })
			if i < 0 {
				i = len(all)
				all = append(all, path{name: way})
			}
			all[i].add(kindOf(f.Name, r), r)
		}
	}
	return all
}

// add takes a run into the newest row that it repeats, or else into a new one.
func (p *path) add(k kind, r record.Run) {
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
		p.rows = append(p.rows, row{kind: k})
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

// contradicts reports whether a run of the same seed and number played something else. Setups of different seeds
// always differ.
func (w row) contradicts(r record.Run) bool {
	return slices.ContainsFunc(w.runs, func(o record.Run) bool {
		return o.Seed == r.Seed && o.Number == r.Number && o.Setup != r.Setup
	})
}

// section is a path as the page has it.
type section struct {
	Name    string
	Figures []template.HTML
	Lines   []line
}

// line is a sender's in a path's table.
type line struct {
	Name, Colour                         string
	Runs                                 int
	Discarded                            int
	Throughput, Used, P50, P95, Lost, Up string
}

func (p path) section() (section, error) {
	s := section{Name: p.name}
	for _, f := range p.figures() {
		drawn, err := f.draw()
		if err != nil {
			return s, err
		}
		svg, err := figures.SVG(drawn, f.label+": "+p.name)
		if err != nil {
			return s, err
		}
		s.Figures = append(s.Figures, template.HTML(svg)) //nolint:gosec // drawn by figures, which escapes its text
	}
	for i, w := range p.rows {
		c := figures.Colour(i)
		s.Lines = append(s.Lines, line{
			Name: p.label(w), Colour: fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B),
			Runs: len(w.runs), Discarded: w.discarded,
			Throughput: w.median(func(r record.Run) float64 { return r.Throughput }),
			Used:       w.median(func(r record.Run) float64 { return 100 * r.Utilisation }),
			P50:        w.median(func(r record.Run) float64 { return r.Queueing.P50 }),
			P95:        w.median(func(r record.Run) float64 { return r.Queueing.P95 }),
			Lost:       w.median(func(r record.Run) float64 { return 100 * r.DropShare() }),
			Up:         w.median(func(r record.Run) float64 { return r.UpQueueing.P95 }),
		})
	}
	return s, nil
}

// median is a figure's, with its 95 % confidence interval or, of fewer than six runs,
// the range.
func (w row) median(figure func(record.Run) float64) string {
	var values []float64
	for _, r := range w.runs {
		values = append(values, figure(r))
	}
	if len(values) == 0 {
		return "–"
	}
	slices.Sort(values)
	text := figures.Number(figures.Quantile(values, 0.5))
	if len(values) > 1 {
		lo, hi := interval(len(values))
		text += " (" + figures.Number(values[lo]) + "–" + figures.Number(values[hi]) + ")"
	}
	return text
}

// interval is the ranks, from 0, of the values between which the median lies with a
// probability of at least 95 %: order statistics, which assume no distribution. Of fewer
// than six values no two do, and the interval is the range.
func interval(n int) (lo, hi int) {
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
}

func trustOf(files []File) trust {
	var t trust
	var late []float64
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
				note(&t.Discarded, fmt.Sprintf("%s, seed %d, run %d: %s", r.Name, r.Seed, r.Number, r.Discarded))
			}
			if r.Virtual {
				t.Virtual++
				continue
			}
			note(&t.Systems, r.System.String())
			late = append(late, r.Lateness.P99)
			if r.Noisy {
				t.Noisy++
			}
		}
	}
	if len(late) > 0 {
		slices.Sort(late)
		t.Lateness = fmt.Sprintf("%s ms in the middle run, %s ms in the worst",
			figures.Number(figures.Quantile(late, 0.5)), figures.Number(late[len(late)-1]))
	}
	return t
}

// WriteFigures draws each figure into a folder, which it makes, as .svg and .png. It
// returns the files' names.
func WriteFigures(folder string, files []File) (names []string, err error) {
	if err := os.MkdirAll(folder, 0o755); err != nil { //nolint:gosec // for others to read
		return nil, err
	}
	for i, p := range pathsOf(files) {
		for _, f := range p.figures() {
			drawn, err := f.draw()
			if err != nil {
				return names, err
			}
			for suffix, write := range map[string]func(io.Writer, *plot.Plot) error{
				".svg": figures.WriteSVG, ".png": figures.WritePNG,
			} {
				name := filepath.Join(folder, fmt.Sprintf("%s-%d%s", f.name, i+1, suffix))
				if err := output.Write(name, func(w io.Writer) error { return write(w, drawn) }); err != nil {
					return names, err
				}
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names, nil
}
