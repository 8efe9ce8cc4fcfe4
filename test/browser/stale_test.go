//go:build linux

package browser

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
)

// TestADeadProxysFiguresAreGrey: what the page shows of a proxy that has ended, refuses or hangs is marked as old within
// seconds, and no longer once the proxy answers again.
func TestADeadProxysFiguresAreGrey(t *testing.T) {
	const well, gone, hangs, refuses = 0, 1, 2, 3
	for name, how := range map[string]int32{"ends": gone, "does not answer": hangs, "refuses": refuses} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var state atomic.Int32
			pages, p := handlerOf(&busy{n: 60}, nil, func() time.Duration { return 0 })
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch state.Load() {
				case gone:
					panic(http.ErrAbortHandler)
				case hangs:
					<-r.Context().Done()
				case refuses:
					http.Error(w, "starting", http.StatusServiceUnavailable)
				default:
					pages.ServeHTTP(w, r)
				}
			}))
			defer srv.Close()
			p.AddPoint()
			b := open(t, 1280, 800)
			b.do(chromedp.Navigate(srv.URL + "#tab=flows"))
			b.until(`document.querySelector("#table tbody tr:not(.gap)").cells[3].textContent !== "–"`)
			colour := func(selector string) string {
				return b.text(`getComputedStyle(document.querySelector("` + selector + `")).color`)
			}
			soft := colour(".key")
			const figure, cell, chart = "#down", "#table tbody tr:not(.gap) td.n", ".charts"
			assert.NotEqual(t, soft, colour(figure))

			state.Store(how)
			died := time.Now()
			b.until(`document.body.classList.contains("stale")`)
			assert.Less(t, time.Since(died), 15*time.Second)
			assert.Equal(t, soft, colour(figure), "the tiles")
			assert.Equal(t, soft, colour(cell), "the table")
			assert.Equal(t, "grayscale(1)", b.text(`getComputedStyle(document.querySelector("`+chart+`")).filter`))
			assert.Equal(t, "Penstock", b.text("document.title"), "without a rate")

			state.Store(well)
			b.until(`!document.body.classList.contains("stale")`)
			assert.NotEqual(t, soft, colour(figure))
			assert.Equal(t, "none", b.text(`getComputedStyle(document.querySelector("`+chart+`")).filter`))
		})
	}
}
