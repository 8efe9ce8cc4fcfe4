package report

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// leastDelay is where logarithmic axes of delay begin, in milliseconds: one packet's own transmission at 12 Mbit/s.
const leastDelay = 1.0

// Axes.
const (
	delayAxis = "queueing delay, ms"
	rateAxis  = "throughput, Mbit/s"
	shareAxis = "share of the link, %"
)

// figure is one of a path's.
type figure struct {
	name, label string // in file names, and in words
	draw        func() *figures.Figure
}

// listFigures returns those that the records have data for.
func (p path) listFigures() (all []figure) {
	if p.hasCourse() {
		all = append(all,
			figure{"tradeoff", "throughput against queueing delay", p.drawTradeoff},
			figure{"course", "throughput and queueing delay over time, of the first run", p.drawCourse})
	}
	if slices.ContainsFunc(p.runs(), func(r record.Run) bool { return len(r.Centiles) > 0 }) {
		all = append(all, figure{"cdf", "distribution of the queueing delay", p.drawDistribution})
	}
	return all
}

// runs are those of all rows that count.
func (p path) runs() (all []record.Run) {
	for _, w := range p.rows {
		all = append(all, w.runs...)
	}
	return all
}

func (p path) hasCourse() bool {
	return slices.ContainsFunc(p.runs(), func(r record.Run) bool { return r.Course() != nil })
}

// isUnlike reports whether the links of the path's runs could carry unlike amounts, as traces of several seeds do.
// Throughput is then shown as a share of the link.
func (p path) isUnlike() bool {
	least, most := math.Inf(1), 0.0
	for _, r := range p.runs() {
		least, most = min(least, r.Offered), max(most, r.Offered)
	}
	return least > 0 && most > 1.01*least
}

// throughput is a run's, in the unit of the axis.
func (p path) throughput(r record.Run) float64 {
	if p.isUnlike() {
		return 100 * r.Utilisation
	}
	return r.Throughput
}

func (p path) throughputAxis() string {
	if p.isUnlike() {
		return shareAxis
	}
	return rateAxis
}

// drawTradeoff draws the plot of this field: a point for each run. Better is up and to the right.
func (p path) drawTradeoff() *figures.Figure {
	f := &figures.Figure{}
	panel := f.AddPanel("p95 of the queueing delay, ms (better: right)", p.throughputAxis())
	figures.SetDecades(&panel.X, leastDelay)
	panel.X.Scale = plot.InvertedScale{Normalizer: plot.LogScale{}}
	least, quickest := math.Inf(1), math.Inf(1)
	for i, w := range p.rows {
		var points plotter.XYs
		for _, r := range w.runs {
			if r.Queueing.P95 > 0 {
				points = append(points, plotter.XY{X: max(leastDelay, r.Queueing.P95), Y: p.throughput(r)})
			}
		}
		if len(points) == 0 {
			continue
		}
		panel.DrawCloud(p.rowLabel(w), i, points)
		for _, pt := range points {
			panel.X.Max, panel.Y.Max = max(panel.X.Max, 1.5*pt.X), max(panel.Y.Max, 1.05*pt.Y)
			least, quickest = min(least, pt.Y), min(quickest, pt.X)
		}
	}
	if !math.IsInf(quickest, 1) { // an axis needs a number, and only powers of ten have one
		panel.X.Min = math.Pow(10, math.Floor(math.Log10(quickest)))
	}
	if panel.Y.Min = 0; least > panel.Y.Max/2 {
		panel.Y.Min = 0.9 * least
	}
	return f
}

// drawCourse draws throughput and queueing delay over time, of each sender's first run.
func (p path) drawCourse() *figures.Figure {
	f, end := &figures.Figure{}, 0.0
	for _, r := range p.runs() {
		end = max(end, r.Duration)
	}
	rate, delay := f.AddPanel("", p.throughputAxis()).OverSeconds(end),
		f.AddPanel("seconds", delayAxis).OverSeconds(end)
	rate.Y.Min = 0
	figures.SetDecades(&delay.Y, leastDelay)
	capacity := p.isUnlike()
	for i, w := range p.rows {
		s := w.firstCourse()
		if s == nil {
			continue
		}
		if !capacity {
			capacity = true
			rate.DrawCapacity(seriesPoints(s, s.Offered))
		}
		rates := seriesPoints(s, s.Throughput)
		if p.isUnlike() {
			for k := range rates {
				rates[k].Y = 100 * rates[k].Y / max(s.Offered[k], rates[k].Y, 0.001)
			}
		}
		rate.DrawLine(p.rowLabel(w), i, rates)
		delays := slices.DeleteFunc(seriesPoints(s, s.Queueing), func(pt plotter.XY) bool { return pt.Y == 0 })
		for k := range delays {
			delays[k].Y = max(leastDelay, delays[k].Y)
		}
		if len(delays) > 0 {
			delay.DrawLine(p.rowLabel(w), i, delays)
		}
	}
	rate.Y.Max *= 1.05
	delay.Y.Max = max(1.3*delay.Y.Max, 10*leastDelay)
	return f
}

// firstCourse is the course of the first run that has one; nil: none has.
func (w row) firstCourse() *record.Series {
	for _, r := range w.runs {
		if s := r.Course(); s != nil {
			return s
		}
	}
	return nil
}

// seriesPoints are the steps of a series, each in its middle.
func seriesPoints(s *record.Series, values []float64) (all plotter.XYs) {
	for i, v := range values {
		all = append(all, plotter.XY{X: (float64(i) + 0.5) * s.Step, Y: v})
	}
	return all
}

// drawDistribution draws the share of packets that waited no longer, the mean of each sender's
// runs.
func (p path) drawDistribution() *figures.Figure {
	f := &figures.Figure{}
	panel := f.AddPanel(delayAxis, "packets below, %")
	figures.SetDecades(&panel.X, leastDelay)
	panel.Y.Min, panel.Y.Max = 0, 100
	for i, w := range p.rows {
		var sum []float64
		runs := 0.0
		for _, r := range w.runs {
			if len(r.Centiles) == 0 || sum != nil && len(sum) != len(r.Centiles) {
				continue
			}
			if sum == nil {
				sum = make([]float64, len(r.Centiles))
			}
			runs++
			for k, v := range r.Centiles {
				sum[k] += v
			}
		}
		var line plotter.XYs
		for k, v := range sum {
			line = append(line, plotter.XY{X: max(leastDelay, v/runs), Y: 100 * float64(k) / float64(len(sum)-1)})
		}
		if len(line) < 2 {
			continue
		}
		panel.DrawLine(p.rowLabel(w), i, line)
		panel.X.Max = max(panel.X.Max, 1.2*line[len(line)-1].X)
	}
	return f
}

// WriteFigures draws each figure into a folder, which it makes, in each of its formats and width in mm.
// It returns the files' names.
func WriteFigures(folder string, files []File, width float64) (names []string, err error) {
	if err := os.MkdirAll(folder, 0o755); err != nil { //nolint:gosec // for others to read
		return nil, err
	}
	for i, p := range pathsOf(files) {
		for _, f := range p.listFigures() {
			drawn := f.draw()
			for _, suffix := range figures.Formats {
				name := filepath.Join(folder, fmt.Sprintf("%s-%d%s", f.name, i+1, suffix))
				if err := drawn.WriteFile(name, vg.Length(width)*vg.Millimeter); err != nil {
					return names, err
				}
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names, nil
}

// WritePlots draws, for each path, throughput and queueing delay over time into a file in the format of its name's
// end. Of several paths the names get a number. It returns the names. Paths without any course have no figure.
func WritePlots(file string, runs []record.Run) (names []string, err error) {
	paths := pathsOf([]File{{Runs: runs}})
	for i, p := range paths {
		if !p.hasCourse() {
			continue
		}
		name, end := file, filepath.Ext(file)
		if len(paths) > 1 {
			name = fmt.Sprintf("%s-%d%s", strings.TrimSuffix(file, end), i+1, end)
		}
		drawn := p.drawCourse()
		drawn.Title = p.name
		if err := drawn.WriteFile(name, figures.PageWidth); err != nil {
			return names, fmt.Errorf("draw %s: %w", name, err)
		}
		names = append(names, name)
	}
	return names, nil
}
