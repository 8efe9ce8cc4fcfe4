package bench

import (
	"fmt"
	"image/color"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"

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
		runs := w.counted()
		if len(runs) == 0 || len(runs[0].Points) == 0 {
			continue
		}
		points := record.Merge(runs[0].Points, int(plotStep/stage.Step))
		if drawn == 0 {
			area, err := addCapacity(rate, points)
			if err != nil {
				return false, err
			}
			legend.Add("capacity", area)
		}
		line, err := addSender(rate, delay, points, figures.Colour(drawn))
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

// seconds is the length of the table's runs.
func (t table) seconds() float64 { return t.rows[0].results[0].Duration }

// addCapacity fills the area that the link could carry.
func addCapacity(p *plot.Plot, points []netlab.Point) (*plotter.Line, error) {
	var xy plotter.XYs
	for _, pt := range points {
		xy = append(xy, plotter.XY{X: middle(pt), Y: pt.Offered.Mbps()})
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
func addSender(rate, delay *plot.Plot, points []netlab.Point, c color.RGBA) (*plotter.Line, error) {
	var rates, delays plotter.XYs
	for _, pt := range points {
		rates = append(rates, plotter.XY{X: middle(pt), Y: pt.Throughput.Mbps()})
		if pt.Queueing > 0 { // nothing left in this step otherwise: there is no delay to show
			delays = append(delays, plotter.XY{X: middle(pt), Y: max(leastDelay, record.Millis(pt.Queueing))})
		}
	}
	first, err := figures.Line(rate, rates, c)
	if err == nil && len(delays) > 0 {
		_, err = figures.Line(delay, delays, c)
	}
	return first, err
}

func middle(p netlab.Point) float64 { return (p.At + plotStep/2).Seconds() }
