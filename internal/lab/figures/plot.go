package figures

import (
	"image/color"
	"io"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/penstock-net/penstock/internal/lab/output"
)

const (
	plotWidth  = 24 * vg.Centimeter // the legend beside it not counted
	plotHeight = 9 * vg.Centimeter
	plotDPI    = 110
	textSize   = 11
	keyWidth   = 7 * vg.Millimeter // of a line's sample in the legend
)

// colours of lines differ for people who see few colours as well (the set of Okabe
// and Ito).
var colours = []color.RGBA{
	{0xd5, 0x5e, 0x00, 0xff},
	{0x00, 0x72, 0xb2, 0xff},
	{0x00, 0x9e, 0x73, 0xff},
	{0xcc, 0x79, 0xa7, 0xff},
	{0xe6, 0x9f, 0x00, 0xff},
	{0x56, 0xb4, 0xe9, 0xff},
	{0x55, 0x55, 0x55, 0xff},
}

// Colour is that of line i; there are a few, which come round again.
func Colour(i int) color.RGBA { return colours[i%len(colours)] }

// NewPlot returns one over seconds.
func NewPlot(title, y string) *plot.Plot {
	p := NewChart(title, "", y)
	p.X.Min = 0
	p.X.Tick.Marker = seconds{}
	return p
}

// NewChart returns a plot over anything.
func NewChart(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.Title.Padding = 4 * vg.Millimeter
	p.X.Label.Text, p.Y.Label.Text = x, y
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

// Line draws one.
func Line(p *plot.Plot, points plotter.XYs, c color.RGBA) (*plotter.Line, error) {
	line, err := plotter.NewLine(points)
	if err != nil {
		return nil, err
	}
	line.Color, line.Width = c, 1.4
	p.Add(line)
	return line, nil
}

func plain(s *text.Style) { s.Font.Variant, s.Font.Size = "Sans", textSize }

// Legend names the lines.
type Legend struct {
	plot.Legend
	widest vg.Length // of its names
}

// NewLegend returns one without names.
func NewLegend() *Legend {
	l := &Legend{Legend: plot.NewLegend()}
	l.Top, l.Left = true, true
	l.ThumbnailWidth = keyWidth
	l.Padding = 1.5 * vg.Millimeter
	plain(&l.TextStyle)
	return l
}

// Add names a line.
func (l *Legend) Add(name string, line plot.Thumbnailer) {
	l.Legend.Add(name, line)
	l.widest = max(l.widest, l.TextStyle.Width(name))
}

// seconds marks the seconds so that there are between four and ten labels.
type seconds struct{}

// Ticks implements plot.Ticker.
func (seconds) Ticks(_, hi float64) []plot.Tick {
	step := 1.0
	for i := 0; hi/step > 10; i++ {
		step *= []float64{2, 2.5, 2}[i%3] // 1, 2, 5, 10, 20, 50, …
	}
	var ticks []plot.Tick
	for v := 0.0; v <= hi; v += step {
		ticks = append(ticks, plot.Tick{Value: v, Label: Number(v)})
	}
	return ticks
}

// Decades marks 1, 10, 100, … with numbers one can read, and 2 to 9 without.
type Decades struct{}

// Ticks implements plot.Ticker.
func (Decades) Ticks(lo, hi float64) []plot.Tick {
	var ticks []plot.Tick
	for d := 1.0; d <= hi; d *= 10 {
		for i := 1.0; i < 10 && i*d <= hi; i++ {
			t := plot.Tick{Value: i * d}
			if i == 1 {
				t.Label = Number(i * d)
			}
			if t.Value >= lo {
				ticks = append(ticks, t)
			}
		}
	}
	return ticks
}

// Save draws plots into a .png file, one below the other, their axes aligned,
// and the legend beside them, where it hides nothing.
func Save(name string, legend *Legend, below ...*plot.Plot) error {
	beside := max(legend.widest, 2*vg.Centimeter) + keyWidth + vg.Centimeter
	height := plotHeight * vg.Length(len(below))
	img := vgimg.NewWith(vgimg.UseWH(plotWidth+beside, height), vgimg.UseDPI(plotDPI),
		vgimg.UseBackgroundColor(color.White))
	whole := draw.New(img)
	plots := make([][]*plot.Plot, len(below))
	for i, p := range below {
		plots[i] = []*plot.Plot{p}
	}
	pad := 5 * vg.Millimeter
	tiles := draw.Tiles{Rows: len(below), Cols: 1, PadTop: pad, PadBottom: pad, PadLeft: pad, PadRight: pad, PadY: pad}
	for i, row := range plot.Align(plots, tiles, draw.Crop(whole, 0, -beside, 0, 0)) {
		below[i].Draw(row[0])
	}
	legend.Draw(draw.Crop(whole, plotWidth, 0, 0, -15*vg.Millimeter))
	return output.Write(name, func(w io.Writer) error {
		_, err := vgimg.PngCanvas{Canvas: img}.WriteTo(w)
		return err
	})
}
