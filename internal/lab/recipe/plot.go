package recipe

import (
	"fmt"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// mostLines is how many lines a plot has room for; hosts stand for their actors
// beyond it, and all of them for those.
const mostLines = 8

// fineUpTo is how long a run may be to be drawn step by step, not second by second.
const fineUpTo = 40 * time.Second

// WritePlots draws each stage's throughput over time, and the window below it
// where the proxy's configuration changes, into a file named after path, the
// recipe and the stage. It returns the files' names. A run that was not made now has no course.
func WritePlots(path string, r Result) (names []string, err error) {
	for i, run := range r.Runs {
		if len(run.Record.Actors) == 0 {
			continue
		}
		name := fmt.Sprintf("%s-%s-%d.png", strings.TrimSuffix(path, ".png"), r.Name, i+1)
		if err := run.plot(name, r.Name+": "+run.Stage.Name); err != nil {
			return names, fmt.Errorf("recipe: plot %s: %w", name, err)
		}
		names = append(names, name)
	}
	return names, nil
}

// curve is something over time, a value for each of a record's steps.
type curve struct {
	name   string
	values []cc.Bytes
}

func (r Run) plot(name, title string) error {
	every := 10
	if r.Stage.Duration <= fineUpTo {
		every = 1
	}
	legend := figures.NewLegend()
	rates := figures.NewPlot(title, "throughput, Mbit/s")
	lines, err := draw(rates, r.throughputs(), every, func(n cc.Bytes) float64 {
		return cc.RateOf(n, time.Duration(every)*stage.Step).Mbps()
	})
	if err != nil {
		return err
	}
	for i, c := range r.throughputs() {
		legend.Add(c.name, lines[i])
	}
	plots := []*plot.Plot{rates}
	if windows := r.windows(); len(windows) > 0 {
		below := figures.NewPlot("", "cwnd, packets")
		packets := func(n cc.Bytes) float64 { return float64(n) / float64(cc.DefaultMSS) }
		if _, err := draw(below, windows, 1, packets); err != nil {
			return err
		}
		plots = append(plots, below)
	}
	for _, p := range plots {
		p.X.Max, p.Y.Min = r.Stage.Duration.Seconds(), 0
		p.Y.Max *= 1.05
	}
	plots[len(plots)-1].X.Label.Text = "seconds"
	return figures.Save(name, legend, plots...)
}

// draw adds each curve, the sum of every steps as one point.
func draw(p *plot.Plot, curves []curve, every int, value func(cc.Bytes) float64) (lines []*plotter.Line, err error) {
	for i, c := range curves {
		var points plotter.XYs
		for k := 0; k+every <= len(c.values); k += every {
			middle := (time.Duration(k)*stage.Step + time.Duration(every)*stage.Step/2).Seconds()
			points = append(points, plotter.XY{X: middle, Y: value(total(c.values[k : k+every]))})
		}
		line, err := figures.Line(p, points, figures.Colour(i))
		if err != nil {
			return nil, err
		}
		lines = append(lines, line)
	}
	return lines, nil
}

// throughputs are those of the actors, of hosts where they are too many, or of all.
func (r Run) throughputs() []curve {
	by := func(name func(i int) string) (all []curve) {
		at := map[string]int{}
		for i, a := range r.Record.Actors {
			k, ok := at[name(i)]
			if !ok {
				k = len(all)
				at[name(i)] = k
				all = append(all, curve{name: name(i), values: make([]cc.Bytes, len(a.Bytes))})
			}
			for n, v := range a.Bytes {
				all[k].values[n] += v
			}
		}
		return all
	}
	for _, name := range []func(i int) string{
		func(i int) string { return r.Record.Actors[i].Name },
		func(i int) string { return fmt.Sprint("host ", r.Stage.Actors[i].Host+1) },
	} {
		if all := by(name); len(all) <= mostLines {
			return all
		}
	}
	return by(func(int) string { return "all" })
}

// windows are those of the groups, one for each host, where the proxy's
// configuration changes.
func (r Run) windows() (all []curve) {
	changes := false
	for _, c := range r.Stage.Changes {
		changes = changes || c.Edge != ""
	}
	if !changes {
		return nil
	}
	seen := map[int]bool{}
	for i, a := range r.Record.Actors {
		if host := r.Stage.Actors[i].Host; a.Cwnd != nil && !seen[host] && len(all) < mostLines {
			seen[host] = true
			all = append(all, curve{fmt.Sprint("host ", host+1), a.Cwnd})
		}
	}
	return all
}
