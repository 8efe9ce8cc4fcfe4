package report

import (
	"image/color"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// leastDelay is where logarithmic axes of delay begin, in milliseconds.
const leastDelay = 1.0

// figure is one of a path's.
type figure struct {
	name, label string // in file names, and in words
	draw        func() (*plot.Plot, error)
}

// figures are those that the records have data for.
func (p path) figures() []figure {
	var all []figure
	if p.has(func(r record.Run) bool { return r.Series != nil }) {
		all = append(all,
			figure{"tradeoff", "throughput against queueing delay", p.tradeoff},
			figure{"throughput", "throughput over time", p.throughput},
			figure{"queueing", "queueing delay over time", p.queueing})
	}
	if p.has(func(r record.Run) bool { return len(r.Centiles) > 0 }) {
		all = append(all, figure{"cdf", "distribution of the queueing delay", p.distribution})
	}
	return all
}

func (p path) has(data func(record.Run) bool) bool {
	return slices.ContainsFunc(p.rows, func(w row) bool { return slices.ContainsFunc(w.runs, data) })
}

// tradeoff is the plot of this field: for each sender the middle of its seconds, and an
// ellipse through their quartiles. Better is up and to the right.
func (p path) tradeoff() (*plot.Plot, error) {
	chart := figures.NewChart("Throughput against queueing delay: median and quartiles of the seconds that count",
		"queueing delay, ms (better: right)", "throughput, Mbit/s")
	chart.X.Scale, chart.X.Tick.Marker = plot.InvertedScale{Normalizer: plot.LogScale{}}, figures.Decades{}
	chart.X.Min, chart.X.Max, chart.Y.Min = leastDelay, 10*leastDelay, 0
	for i, w := range p.rows {
		delays, rates := w.seconds()
		if len(delays) == 0 {
			continue
		}
		slices.Sort(delays)
		slices.Sort(rates)
		x := [3]float64{figures.Quantile(delays, 0.25), figures.Quantile(delays, 0.5), figures.Quantile(delays, 0.75)}
		y := [3]float64{figures.Quantile(rates, 0.25), figures.Quantile(rates, 0.5), figures.Quantile(rates, 0.75)}
		ring, err := plotter.NewPolygon(ellipse(x, y))
		if err != nil {
			return nil, err
		}
		c := figures.Colour(i)
		ring.LineStyle.Color, ring.LineStyle.Width = c, 1.4
		c.A = 0x30
		ring.Color = color.NRGBA(c)
		dot, err := plotter.NewScatter(plotter.XYs{{X: x[1], Y: y[1]}})
		if err != nil {
			return nil, err
		}
		dot.Color, dot.Radius, dot.Shape = figures.Colour(i), vg.Points(3), draw.CircleGlyph{}
		chart.Add(ring, dot)
		chart.Y.Max = max(chart.Y.Max, 1.1*y[2])
		chart.X.Max = max(chart.X.Max, 1.5*x[2])
	}
	return chart, nil
}

// seconds are throughput of all steps after the warm-up, and queueing delay of the steps in which something left.
func (w row) seconds() (delays, rates []float64) {
	for _, r := range w.runs {
		if r.Series == nil {
			continue
		}
		for i, rate := range r.Series.Throughput {
			if float64(i)*r.Series.Step < r.Warmup {
				continue
			}
			rates = append(rates, rate)
			if i < len(r.Series.Queueing) && r.Series.Queueing[i] > 0 {
				delays = append(delays, max(leastDelay, r.Series.Queueing[i]))
			}
		}
	}
	return delays, rates
}

// ellipse goes through the quartiles x and y, of a logarithmic and a linear axis, round
// their medians: four quarters of ellipses, since the quartiles may lie unevenly.
func ellipse(x, y [3]float64) plotter.XYs {
	var ring plotter.XYs
	const points = 64
	for i := range points {
		sin, cos := math.Sincos(2 * math.Pi * float64(i) / points)
		far := func(q [3]float64, part float64) float64 {
			if part < 0 {
				return q[1] + part*(q[1]-q[0])
			}
			return q[1] + part*(q[2]-q[1])
		}
		logs := [3]float64{math.Log(x[0]), math.Log(x[1]), math.Log(x[2])}
		ring = append(ring, plotter.XY{X: math.Exp(far(logs, cos)), Y: far(y, sin)})
	}
	return ring
}

func (p path) throughput() (*plot.Plot, error) {
	chart := figures.NewPlot("Throughput of the first run", "Mbit/s")
	chart.X.Label.Text, chart.Y.Min = "seconds", 0
	capacity := false
	for _, w := range p.rows {
		if s := w.first(); s != nil && !capacity {
			capacity = true
			area, err := figures.Line(chart, steps(s, s.Offered), color.RGBA{0x88, 0x88, 0x88, 0xff})
			if err != nil {
				return nil, err
			}
			area.Dashes = []vg.Length{vg.Points(2), vg.Points(2)}
		}
	}
	err := p.lines(chart, func(s *record.Series) []float64 { return s.Throughput }, 0)
	chart.Y.Max *= 1.05
	return chart, err
}

func (p path) queueing() (*plot.Plot, error) {
	chart := figures.NewPlot("Queueing delay of the first run", "ms")
	chart.X.Label.Text = "seconds"
	chart.Y.Scale, chart.Y.Tick.Marker, chart.Y.Min = plot.LogScale{}, figures.Decades{}, leastDelay
	err := p.lines(chart, func(s *record.Series) []float64 { return s.Queueing }, leastDelay)
	chart.Y.Max = max(1.3*chart.Y.Max, 10*leastDelay)
	return chart, err
}

// lines draws a figure of each sender's first run over time, no less than least.
func (p path) lines(chart *plot.Plot, of func(*record.Series) []float64, least float64) error {
	for i, w := range p.rows {
		s := w.first()
		if s == nil {
			continue
		}
		points := steps(s, of(s))
		for k := range points {
			points[k].Y = max(points[k].Y, least)
		}
		if _, err := figures.Line(chart, points, figures.Colour(i)); err != nil {
			return err
		}
		chart.X.Max = max(chart.X.Max, s.Step*float64(len(points)))
	}
	return nil
}

// first is the course of the first run that has one; nil: none has.
func (w row) first() *record.Series {
	for _, r := range w.runs {
		if r.Series != nil && len(r.Series.Throughput) > 0 {
			return r.Series
		}
	}
	return nil
}

func steps(s *record.Series, values []float64) plotter.XYs {
	var points plotter.XYs
	for i, v := range values {
		points = append(points, plotter.XY{X: (float64(i) + 0.5) * s.Step, Y: v})
	}
	return points
}

// distribution is the share of packets that waited no longer, the mean of each sender's
// runs.
func (p path) distribution() (*plot.Plot, error) {
	chart := figures.NewChart("Queueing delay of the packets", "ms", "packets that waited no longer, %")
	chart.X.Scale, chart.X.Tick.Marker = plot.LogScale{}, figures.Decades{}
	chart.X.Min, chart.X.Max, chart.Y.Min, chart.Y.Max = leastDelay, 10*leastDelay, 0, 100
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
		var points plotter.XYs
		for k, v := range sum {
			points = append(points, plotter.XY{X: max(leastDelay, v/runs), Y: 100 * float64(k) / float64(len(sum)-1)})
		}
		if len(points) < 2 {
			continue
		}
		if _, err := figures.Line(chart, points, figures.Colour(i)); err != nil {
			return nil, err
		}
		chart.X.Max = max(chart.X.Max, 1.2*points[len(points)-1].X)
	}
	return chart, nil
}
