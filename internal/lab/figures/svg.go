package figures

import (
	"bytes"
	"fmt"
	"html"
	"image/color"
	"io"
	"regexp"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The size of a figure by itself.
const (
	figureWidth  = 17 * vg.Centimeter
	figureHeight = 9 * vg.Centimeter
)

// sized is the head of an SVG drawing, with a size that a page is to choose.
var sized = regexp.MustCompile(`(?s)^.*?<svg width="[^"]*" height="[^"]*"`)

// SVG draws a plot as an element for a page: as wide as its place, with the page's own
// colour for text and axes. label says in words what is shown.
func SVG(p *plot.Plot, label string) (string, error) {
	p.BackgroundColor = color.Transparent
	canvas := vgsvg.New(figureWidth, figureHeight)
	p.Draw(inside(canvas))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return "", fmt.Errorf("draw %s: %w", label, err)
	}
	text := strings.NewReplacer("#000000", "currentColor", `xmlns:xlink="http://www.w3.org/1999/xlink"`,
		"").Replace(b.String())
	return sized.ReplaceAllLiteralString(text, `<svg role="img" aria-label="`+html.EscapeString(label)+`"`), nil
}

// inside leaves room at the right, where the last label of an axis ends.
func inside(canvas vg.CanvasSizer) draw.Canvas {
	return draw.Crop(draw.New(canvas), 0, -5*vg.Millimeter, 0, 0)
}

// WriteSVG draws a plot as a file by itself, in black on white.
func WriteSVG(w io.Writer, p *plot.Plot) error {
	p.BackgroundColor = color.White
	canvas := vgsvg.New(figureWidth, figureHeight)
	p.Draw(inside(canvas))
	_, err := canvas.WriteTo(w)
	return err
}

// WritePNG draws a plot as a picture.
func WritePNG(w io.Writer, p *plot.Plot) error {
	p.BackgroundColor = color.White
	img := vgimg.NewWith(vgimg.UseWH(figureWidth, figureHeight), vgimg.UseDPI(plotDPI))
	p.Draw(inside(img))
	_, err := vgimg.PngCanvas{Canvas: img}.WriteTo(w)
	return err
}
