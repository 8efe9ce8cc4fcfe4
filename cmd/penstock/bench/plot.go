package bench

import (
	"errors"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/netlab"
)

const (
	plotWidth  = 24 * vg.Centimeter // the legend beside it not counted
	plotHeight = 18 * vg.Centimeter
	plotDPI    = 110
	textSize   = 11
	keyWidth   = 7 * vg.Millimeter // of a line's sample in the legend

	plotStep = 500 * time.Millisecond // steps of 100 ms are merged into these
	// leastDelay is where the logarithmic axis begins: one packet's own
	// transmission at 12 Mbit/s.
	leastDelay = 1.0
)

// lineColours are told apart by people who see few colours as well (the set of
// Okabe and Ito).
var lineColours = []color.RGBA{
	{0xd5, 0x5e, 0x00, 0xff},
	{0x00, 0x72, 0xb2, 0xff},
	{0x00, 0x9e, 0x73, 0xff},
	{0xcc, 0x79, 0xa7, 0xff},
	{0xe6, 0x9f, 0x00, 0xff},
	{0x56, 0xb4, 0xe9, 0xff},
	{0x55, 0x55, 0x55, 0xff},
}

var capacityColour = color.RGBA{0xe2, 0xe2, 0xe2, 0xff}

// WritePlots draws, for each path, throughput and queueing delay over time: the
// first run of each sender that counts. With several paths the file names get a
// number. It returns the names.
func WritePlots(path string, results []Result) ([]string, error) {
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
	rate, delay, legend := newPlot(t.path, "throughput, Mbit/s"), newPlot("", "queueing delay, ms"), newLegend()
	rate.Y.Min = 0
	delay.X.Label.Text = "seconds since the first data packet"
	delay.Y.Scale, delay.Y.Tick.Marker = plot.LogScale{}, decades{}
	delay.Y.Min = leastDelay
	widest := vg.Length(0)

	drawn := 0
	for _, w := range t.rows {
		runs := w.counted()
		if len(runs) == 0 || len(runs[0].series) == 0 {
			continue
		}
		points := merge(runs[0].series, int(plotStep/netlab.DefaultStep))
		if drawn == 0 {
			area, err := addCapacity(rate, points)
			if err != nil {
				return false, err
			}
			legend.Add("capacity", area)
		}
		line, err := addSender(rate, delay, points, lineColours[drawn%len(lineColours)])
		if err != nil {
			return false, err
		}
		legend.Add(w.sender, line)
		widest = max(widest, legend.TextStyle.Width(w.sender))
		drawn++
	}
	if drawn == 0 {
		return false, nil
	}
	rate.X.Max, delay.X.Max = t.seconds(), t.seconds()
	rate.Y.Max *= 1.05
	delay.Y.Max = max(delay.Y.Max*1.3, 10*leastDelay)
	return true, save(name, rate, delay, legend, widest)
}

// seconds is the length of the table's runs.
func (t table) seconds() float64 { return t.rows[0].results[0].Duration }

func newPlot(title, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.Title.Padding = 4 * vg.Millimeter
	p.Y.Label.Text = y
	p.X.Min = 0
	p.X.Tick.Marker = fives{}
	for _, style := range []*text.Style{
		&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label,
	} {
		plain(style)
	}
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{0xe0}, color.Gray{0xe0}
	p.Add(grid)
	return p
}

func newLegend() plot.Legend {
	l := plot.NewLegend()
	l.Top, l.Left = true, true
	l.ThumbnailWidth = keyWidth
	l.Padding = 1.5 * vg.Millimeter
	plain(&l.TextStyle)
	return l
}

func plain(s *text.Style) { s.Font.Variant, s.Font.Size = "Sans", textSize }

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
			delays = append(delays, plotter.XY{X: middle(pt), Y: max(leastDelay, millis(pt.Queueing))})
		}
	}
	first, err := addLine(rate, rates, c)
	if err == nil && len(delays) > 0 {
		_, err = addLine(delay, delays, c)
	}
	return first, err
}

func addLine(p *plot.Plot, points plotter.XYs, c color.RGBA) (*plotter.Line, error) {
	line, err := plotter.NewLine(points)
	if err != nil {
		return nil, err
	}
	line.Color, line.Width = c, 1.4
	p.Add(line)
	return line, nil
}

func middle(p netlab.Point) float64 { return (p.At + plotStep/2).Seconds() }

// merge joins n neighbouring steps into one; a rest at the end is left out.
func merge(points []netlab.Point, n int) []netlab.Point {
	var merged []netlab.Point
	for ; len(points) >= n; points = points[n:] {
		m := netlab.Point{At: points[0].At}
		var weighted float64 // a busy step says more about the delay
		for _, p := range points[:n] {
			m.Throughput += p.Throughput / cc.Rate(n)
			m.Offered += p.Offered / cc.Rate(n)
			m.MaxQueue = max(m.MaxQueue, p.MaxQueue)
			m.Drops += p.Drops
			weighted += float64(p.Queueing) * float64(p.Throughput)
		}
		if m.Throughput > 0 {
			m.Queueing = time.Duration(weighted / float64(m.Throughput) / float64(n))
		}
		merged = append(merged, m)
	}
	return merged
}

// fives marks the seconds so that there are between four and ten labels.
type fives struct{}

// Ticks implements plot.Ticker.
func (fives) Ticks(_, hi float64) []plot.Tick {
	step := 1.0
	for i := 0; hi/step > 10; i++ {
		step *= []float64{2, 2.5, 2}[i%3] // 1, 2, 5, 10, 20, 50, …
	}
	var ticks []plot.Tick
	for v := 0.0; v <= hi; v += step {
		ticks = append(ticks, plot.Tick{Value: v, Label: number(v)})
	}
	return ticks
}

// decades marks 1, 10, 100, … with numbers one can read, and 2 to 9 without.
type decades struct{}

// Ticks implements plot.Ticker.
func (decades) Ticks(lo, hi float64) []plot.Tick {
	var ticks []plot.Tick
	for d := leastDelay; d <= hi; d *= 10 {
		for i := 1.0; i < 10 && i*d <= hi; i++ {
			t := plot.Tick{Value: i * d}
			if i == 1 {
				t.Label = number(i * d)
			}
			if t.Value >= lo {
				ticks = append(ticks, t)
			}
		}
	}
	return ticks
}

// save draws the two plots one above the other, their axes aligned, and the
// legend, whose widest name is given, beside them, where it hides nothing.
func save(name string, upper, lower *plot.Plot, legend plot.Legend, widest vg.Length) error {
	beside := max(widest, 2*vg.Centimeter) + keyWidth + vg.Centimeter
	img := vgimg.NewWith(vgimg.UseWH(plotWidth+beside, plotHeight), vgimg.UseDPI(plotDPI), vgimg.UseBackgroundColor(color.White))
	whole := draw.New(img)
	plots := [][]*plot.Plot{{upper}, {lower}}
	pad := 5 * vg.Millimeter
	tiles := draw.Tiles{Rows: 2, Cols: 1, PadTop: pad, PadBottom: pad, PadLeft: pad, PadRight: pad, PadY: pad}
	for i, row := range plot.Align(plots, tiles, draw.Crop(whole, 0, -beside, 0, 0)) {
		plots[i][0].Draw(row[0])
	}
	legend.Draw(draw.Crop(whole, plotWidth, 0, 0, -15*vg.Millimeter))
	f, err := os.Create(filepath.Clean(name))
	if err != nil {
		return err
	}
	_, err = vgimg.PngCanvas{Canvas: img}.WriteTo(f)
	return errors.Join(err, f.Close())
}
