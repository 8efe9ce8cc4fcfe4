package figures

import (
	"bytes"
	"fmt"
	"html"
	"image/color"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/penstock-net/penstock/internal/lab/output"
)

// Widths of figures: a column of a paper, and both columns of its page.
const (
	ColumnWidth = 85 * vg.Millimeter
	PageWidth   = 178 * vg.Millimeter
)

const (
	panelHeight  = 52 * vg.Millimeter
	margin       = 2 * vg.Millimeter
	sampleWidth  = 5 * vg.Millimeter // of a line in the legend
	textSize     = 8                 // points, as in captions of papers
	lineWidth    = 1.2
	picturesDPI  = 200
	lineDistance = 1.35 // of lines of text, in their size
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

// dashes tell lines of one colour apart.
var dashes = [][]vg.Length{nil, {vg.Points(4), vg.Points(2)}, {vg.Points(1), vg.Points(2)}}

// capacityColour is that of what a link could carry.
var capacityColour = color.RGBA{0xe2, 0xe2, 0xe2, 0xff}

// Colour is that of series i; there are a few, which come round again with other dashes.
func Colour(i int) color.RGBA { return colours[i%len(colours)] }

// Figure is one drawing: panels one above the other, their axes aligned, and above them a legend of all that they
// show. A page shows it, and a paper can.
type Figure struct {
	Title  string // above the legend; empty: none
	panels []*Panel
	keys   []key
	err    error // the first of what could not be drawn; Write returns it
}

// key is an entry of the legend.
type key struct {
	name   string
	sample func(c draw.Canvas, from, to vg.Point)
}

// Panel is one pair of axes of a figure.
type Panel struct {
	*plot.Plot
	figure *Figure
}

// AddPanel adds a panel below those that are there. x and y are the labels of its axes.
func (f *Figure) AddPanel(x, y string) *Panel {
	p := &Panel{Plot: plot.New(), figure: f}
	p.X.Label.Text, p.Y.Label.Text = x, y
	for _, style := range []*text.Style{
		&p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label,
	} {
		style.Font = textStyle().Font
	}
	p.BackgroundColor = nil // the paper's, or the page's
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = color.Gray{0xe0}, color.Gray{0xe0}
	p.Add(grid)
	f.panels = append(f.panels, p)
	return p
}

// OverSeconds gives the panel an axis of time, up to an end.
func (p *Panel) OverSeconds(end float64) *Panel {
	p.X.Min, p.X.Max = 0, end
	p.X.Tick.Marker = seconds{}
	return p
}

// SetDecades makes an axis logarithmic, from a least value on.
func SetDecades(axis *plot.Axis, least float64) {
	axis.Scale, axis.Tick.Marker = plot.LogScale{}, decades{}
	axis.Min, axis.Max = least, 10*least
}

// fails reports whether drawing the named part failed, and keeps the first error.
func (f *Figure) fails(name string, err error) bool {
	if err != nil && f.err == nil {
		f.err = fmt.Errorf("draw %s: %w", name, err)
	}
	return err != nil
}

// DrawLine draws series i.
func (p *Panel) DrawLine(name string, i int, points plotter.XYs) {
	line, err := plotter.NewLine(points)
	if p.figure.fails(name, err) {
		return
	}
	line.Color, line.Width, line.Dashes = Colour(i), lineWidth, dashes[i/len(colours)%len(dashes)]
	p.Add(line)
	p.figure.addKey(name, func(c draw.Canvas, from, to vg.Point) {
		c.StrokeLine2(line.LineStyle, from.X, from.Y, to.X, to.Y)
	})
}

// DrawCapacity fills what the link could carry.
func (p *Panel) DrawCapacity(points plotter.XYs) {
	area, err := plotter.NewLine(points)
	if p.figure.fails("the capacity", err) {
		return
	}
	area.FillColor, area.Color = capacityColour, capacityColour
	p.Add(area)
	p.figure.addKey("capacity", func(c draw.Canvas, from, to vg.Point) {
		style := area.LineStyle
		style.Width = textSize * 0.8
		c.StrokeLine2(style, from.X, from.Y, to.X, to.Y)
	})
}

// DrawCloud draws series i as a point for each run and, of at least three, an ellipse of one standard deviation round
// their mean (Winstein et al., NSDI 2013, Fig. 7). x is on a logarithmic axis.
func (p *Panel) DrawCloud(name string, i int, points plotter.XYs) {
	dots, err := plotter.NewScatter(points)
	if p.figure.fails(name, err) {
		return
	}
	dots.GlyphStyle = draw.GlyphStyle{Color: Colour(i), Radius: vg.Points(2), Shape: draw.CircleGlyph{}}
	if i/len(colours)%2 > 0 {
		dots.Shape = draw.RingGlyph{}
	}
	if len(points) >= 3 {
		ring, err := plotter.NewPolygon(deviationEllipse(points))
		if p.figure.fails(name, err) {
			return
		}
		c := Colour(i)
		ring.LineStyle.Color, ring.LineStyle.Width = c, lineWidth
		c.A = 0x30
		ring.Color = color.NRGBA(c)
		p.Add(ring)
	}
	p.Add(dots)
	p.figure.addKey(name, func(c draw.Canvas, from, to vg.Point) {
		c.DrawGlyph(dots.GlyphStyle, vg.Point{X: (from.X + to.X) / 2, Y: from.Y})
	})
}

// deviationEllipse is the ellipse of one standard deviation of points, of the logarithm of x and of y.
func deviationEllipse(points plotter.XYs) (ring plotter.XYs) {
	var x, y []float64
	for _, p := range points {
		x, y = append(x, math.Log(p.X)), append(y, p.Y)
	}
	// Cholesky's factor of the covariance matrix takes a circle to the ellipse.
	a, b, c := math.Sqrt(covarianceOf(x, x)), 0.0, covarianceOf(y, y)
	if a > 0 {
		b = covarianceOf(x, y) / a
	}
	c = math.Sqrt(max(0, c-b*b))
	const corners = 64
	for i := range corners {
		sin, cos := math.Sincos(2 * math.Pi * float64(i) / corners)
		ring = append(ring, plotter.XY{X: math.Exp(meanOf(x) + a*cos), Y: meanOf(y) + b*cos + c*sin})
	}
	return ring
}

// addKey names what is drawn, once.
func (f *Figure) addKey(name string, sample func(c draw.Canvas, from, to vg.Point)) {
	if !slices.ContainsFunc(f.keys, func(k key) bool { return k.name == name }) {
		f.keys = append(f.keys, key{name, sample})
	}
}

func textStyle() text.Style {
	style := plot.New().Legend.TextStyle
	style.Font.Variant, style.Font.Size = "Sans", textSize
	style.YAlign = draw.YCenter
	return style
}

// Formats are the endings of names of files that a figure can have.
var Formats = []string{".pdf", ".png", ".svg"}

// WriteFile draws the figure into a file, in the format of its name's end.
func (f *Figure) WriteFile(name string, width vg.Length) error {
	return output.Write(name, func(w io.Writer) error { return f.Write(w, filepath.Ext(name), width) })
}

// Write draws the figure in one of Formats.
func (f *Figure) Write(w io.Writer, format string, width vg.Length) error {
	if f.err != nil {
		return f.err
	}
	height := f.drawAll(draw.New(vgimg.New(width, vg.Inch)), true) + panelHeight*vg.Length(len(f.panels))
	var canvas vg.CanvasWriterTo
	if format == ".png" {
		canvas = vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(picturesDPI),
			vgimg.UseBackgroundColor(color.White))}
	} else {
		var err error
		if canvas, err = draw.NewFormattedCanvas(width, height, strings.TrimPrefix(format, ".")); err != nil {
			return err
		}
	}
	f.drawAll(draw.NewCanvas(canvas, width, height), false)
	_, err := canvas.WriteTo(w)
	return err
}

// drawAll draws the figure, and returns the height of title and legend. measure draws nothing.
func (f *Figure) drawAll(c draw.Canvas, measure bool) vg.Length {
	style := textStyle()
	line := lineDistance * style.Font.Size
	y := c.Max.Y - margin - line/2
	for _, words := range wrapText(style, f.Title, c.Size().X-2*margin) {
		if !measure {
			c.FillText(style, vg.Point{X: c.Min.X + margin, Y: y}, words)
		}
		y -= line
	}
	x := c.Min.X + margin
	for i, k := range f.keys {
		width := sampleWidth + margin/2 + style.Width(k.name) + 2*margin
		if i > 0 && x+width > c.Max.X {
			x = c.Min.X + margin
			y -= line
		}
		if !measure {
			k.sample(c, vg.Point{X: x, Y: y}, vg.Point{X: x + sampleWidth, Y: y})
			c.FillText(style, vg.Point{X: x + sampleWidth + margin/2, Y: y}, k.name)
		}
		x += width
	}
	head := c.Max.Y - y
	if len(f.keys) > 0 {
		head += line / 2
	}
	if measure {
		return head
	}
	plots := make([][]*plot.Plot, len(f.panels))
	for i, p := range f.panels {
		plots[i] = []*plot.Plot{p.Plot}
	}
	tiles := draw.Tiles{
		Rows: len(plots), Cols: 1, PadTop: margin, PadBottom: margin, PadLeft: margin, PadRight: 2 * margin,
		PadY: margin,
	}
	for i, row := range plot.Align(plots, tiles, draw.Crop(c, 0, 0, 0, -head)) {
		plots[i][0].Draw(row[0])
	}
	return head
}

// wrapText breaks a text into lines that fit a width, between words.
func wrapText(style text.Style, words string, width vg.Length) (lines []string) {
	for word := range strings.FieldsSeq(words) {
		last := len(lines) - 1
		if last >= 0 && style.Width(lines[last]+" "+word) <= width {
			lines[last] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}

// sized is the head of an SVG drawing, with a size that a page is to choose.
var sized = regexp.MustCompile(`(?s)^.*?<svg width="[^"]*" height="[^"]*"`)

// WriteElement returns the figure as an SVG element for a page: as wide as its place, with the page's own
// colour for text and axes. label says in words what is shown.
func (f *Figure) WriteElement(label string) (string, error) {
	var b bytes.Buffer
	if err := f.Write(&b, ".svg", ColumnWidth); err != nil {
		return "", fmt.Errorf("draw %s: %w", label, err)
	}
	text := strings.NewReplacer("#000000", "currentColor", `xmlns:xlink="http://www.w3.org/1999/xlink"`,
		"").Replace(b.String())
	return sized.ReplaceAllLiteralString(text, `<svg role="img" aria-label="`+html.EscapeString(label)+`"`), nil
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

// decades marks 1, 10, 100, … with numbers one can read, and 2 to 9 without.
type decades struct{}

// Ticks implements plot.Ticker.
func (decades) Ticks(lo, hi float64) []plot.Tick {
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
