//go:build linux

package browser

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/report"
)

// A report is a file that opens by itself: it draws, fits a phone, and asks for nothing.
func TestAReportOpens(t *testing.T) {
	link, err := bench.ParseLink("generate:lte")
	require.NoError(t, err)
	buffer, err := bench.ParseBuffer("2MB")
	require.NoError(t, err)
	plan := bench.Plan{
		Links: []bench.Link{link}, Buffers: []bench.Buffer{buffer}, Losses: []float64{0}, Seeds: []uint64{1},
		Delay: 10 * time.Millisecond, Duration: 5 * time.Second, Runs: 1, Ingress: bench.IngressTPROXY,
	}
	plan.Senders, err = bench.ParseSenders([]string{"penstock@sim", "cubic@sim"}, nil)
	require.NoError(t, err)
	results, err := (&bench.Bench{Version: "test"}).Run(t.Context(), plan, func(bench.Result) error { return nil })
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "report.html")
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, report.Write(f, []report.File{{Name: "runs.jsonl", Results: results}}))
	require.NoError(t, f.Close())

	for name, width := range map[string]int64{"phone": 390, "desktop": 1280} {
		for _, dark := range []bool{false, true} {
			b := open(t, width, 900)
			b.dark(dark)
			b.do(chromedp.Navigate("file://" + path))
			b.until(`document.querySelectorAll("svg path").length > 20`)
			assert.Equal(t, "4", b.text(`document.querySelectorAll("svg[role=img]").length`), name)
			assert.Equal(t, "true", b.text(`document.documentElement.scrollWidth <= innerWidth`), "%s: the page fits",
				name)
			assert.Equal(t, "true", b.text(`getComputedStyle(document.querySelector("svg text")).fill ===
				getComputedStyle(document.body).color`), "%s: labels have the page's colour", name)
			assert.Equal(t, []string{"file://" + path}, b.asked())
			b.quiet()
		}
	}
}
