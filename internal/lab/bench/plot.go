package bench

import (
	"fmt"
	"image/color"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/netlab"
)

const (
	plotStep = 500 * time.Millisecond // steps of 100 ms are merged into these
	// leastDelay is where the logarithmic axis begins: one packet's own
	// transmission at 12 Mbit/s.
	leastDelay = 1.0
)

var capacityColour = color.RGBA{0xe2, 0xe2, 0xe2, 0xff}

// WritePlots draws, for each path, throughput and queueing delay over time: the
// first run of each sender that counts. With several paths the file names get a
// number. It returns the names.
func WritePlots(path string, results []record.Run) ([]string, error) {
	if !strings.HasSuffix(path, ".png") {
		return nil, fmt.Errorf("--plot %s: the name must end in .png", path)
	}
	var names []string
	all := tables(results, true)
	for i, t := range all {
		name := path
		if len(all) > 1 {
			name = fmt.Sprintf("%s-%d.png", strings.TrimSuffix(path, ".png"), i+1)
		}
		drawn, err := t.plot(name)
		if err != nil {
			return names, fmt.Errorf("bench: plot %s: %w", name, err)
		}
		if drawn {
			names = append(names, name)
		}
	}
	return names, nil
}

// plot draws one table; false: no run in it has a series.
func (t table) plot(name string) (bool, error) {
	rate, delay, legend := figures.NewPlot(t.path, "throughput, Mbit/s"), figures.NewPlot("",
		"queueing delay, ms"), figures.NewLegend()
	rate.Y.Min = 0
	delay.X.Label.Text = "seconds since the first data packet"
	delay.Y.Scale, delay.Y.Tick.Marker = plot.LogScale{}, figures.Decades{}
	delay.Y.Min = leastDelay

	drawn := 0
	for _, w := range t.rows {
		points, step := w.course()
		if len(points) == 0 {
			continue
		}
		if drawn == 0 {
			area, err := addCapacity(rate, points, step)
			if err != nil {
				return false, err
			}
			legend.Add("capacity", area)
		}
		line, err := addSender(rate, delay, points, step, figures.Colour(drawn))
		if err != nil {
			return false, err
		}
		legend.Add(w.sender, line)
		drawn++
	}
	if drawn == 0 {
		return false, nil
	}
	rate.X.Max, delay.X.Max = t.seconds(), t.seconds()
	rate.Y.Max *= 1.05
	delay.Y.Max = max(delay.Y.Max*1.3, 10*leastDelay)
	return true, figures.Save(name, legend, rate, delay)
}

// course is that of the first run that counts and has one.
func (w row) course() (points []netlab.Point, step time.Duration) {
	for _, r := range w.counted() {
		if points, step = course(r); len(points) > 0 {
			return points, step
		}
	}
	return nil, 0
}

// course is a run's in steps; of one that was read, those of its record. None: it has no series.
func course(r record.Run) (points []netlab.Point, step time.Duration) {
	if len(r.Points) > 0 {
		return record.Merge(r.Points, int(plotStep/stage.Step)), plotStep
	}
	s := r.Series
	if s == nil {
		return nil, 0
	}
	step = time.Duration(s.Step * float64(time.Second))
	for i := range min(len(s.Throughput), len(s.Offered), len(s.Queueing)) {
		points = append(points, netlab.Point{
			At: time.Duration(i) * step, Throughput: cc.Rate(s.Throughput[i] * 1e6),
			Offered: cc.Rate(s.Offered[i] * 1e6), Queueing: time.Duration(s.Queueing[i] * float64(time.Millisecond)),
		})
	}
	return points, step
}

// seconds is the length of the table's longest run.
func (t table) seconds() (longest float64) {
	for _, w := range t.rows {
		for _, r := range w.results {
			longest = max(longest, r.Duration)
		}
	}
	return longest
}

// addCapacity fills the area that the link could carry.
func addCapacity(p *plot.Plot, points []netlab.Point, step time.Duration) (*plotter.Line, error) {
	var xy plotter.XYs
	for _, pt := range points {
		xy = append(xy, plotter.XY{X: middle(pt, step), Y: pt.Offered.Mbps()})
	}
	area, err := plotter.NewLine(xy)
	if err != nil {
		return nil, err
	}
	area.FillColor, area.Color = capacityColour, capacityColour
	p.Add(area)
	return area, nil
}

// addSender draws one sender into both plots and returns its line.
func addSender(
	rate, delay *plot.Plot, points []netlab.Point, step time.Duration, c color.RGBA,
) (*plotter.Line, error) {
	var rates, delays plotter.XYs
	for _, pt := range points {
		rates = append(rates, plotter.XY{X: middle(pt, step), Y: pt.Throughput.Mbps()})
		if pt.Queueing > 0 { // nothing left in this step otherwise: there is no delay to show
			delays = append(delays, plotter.XY{X: middle(pt, step), Y: max(leastDelay, record.Millis(pt.Queueing))})
		}
	}
	first, err := figures.Line(rate, rates, c)
	if err == nil && len(delays) > 0 {
		_, err = figures.Line(delay, delays, c)
	}
	return first, err
}

func middle(p netlab.Point, step time.Duration) float64 { return (p.At + step/2).Seconds() }
