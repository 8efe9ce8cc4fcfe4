//go:build linux

package browser

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/report"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// A report is a file that opens by itself: it draws, fits a phone, and asks for nothing.
func TestAReportOpens(t *testing.T) {
	_, trace, err := recipe.Carries("generate:lte", 1)
	require.NoError(t, err)
	link := sim.LinkConfig{Trace: trace, Delay: 10 * time.Millisecond, QueueBytes: 2_000_000}
	var runs []record.Run
	for _, algorithm := range []string{"penstock", "cubic"} {
		s := stage.Stage{
			Name: algorithm, Down: link, Up: link, Actors: []stage.Actor{{Name: "download", Kind: stage.Bulk}},
			Duration: 5 * time.Second, Seed: 1, Edge: "defaults: {algorithm: " + algorithm + "}\n",
		}
		rec, err := stage.PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		runs = append(runs, record.Of(s, rec))
	}
	path := filepath.Join(t.TempDir(), "report.html")
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, report.Write(f, []report.File{{Name: strings.Repeat("long", 20), Runs: runs}}, ""))
	require.NoError(t, f.Close())

	for name, width := range map[string]int64{"phone": 390, "desktop": 1280} {
		for _, dark := range []bool{false, true} {
			b := open(t, width, 900)
			b.dark(dark)
			b.do(chromedp.Navigate("file://" + path))
			b.until(`document.querySelectorAll("svg path").length > 20`)
			assert.Equal(t, "3", b.text(`document.querySelectorAll("svg[role=img]").length`), name)
			assert.Equal(t, "true", b.text(`document.documentElement.scrollWidth <= innerWidth`), "%s: the page fits",
				name)
			assert.Equal(t, "true", b.text(`getComputedStyle(document.querySelector("svg text")).fill ===
				getComputedStyle(document.body).color`), "%s: labels have the page's colour", name)
			assert.Equal(t, []string{"file://" + path}, b.asked())
			b.quiet()
		}
	}
}
