//go:build linux

// Package browser looks at a proxy as people do: at its page in Debian's Chromium, and at
// penstock top in tmux.
package browser

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// patience is how long a test waits for what the page shows, on a machine with other
// work. Only what never comes takes it.
const patience = 30 * time.Second

// browser is the one that all tests share; each has a tab and a profile of its own.
// It starts with the first that asks.
var (
	browser  context.Context
	starting sync.Once
	failed   error // to start
	ends     []func()
)

func TestMain(m *testing.M) {
	code := m.Run()
	for _, end := range slices.Backward(ends) {
		end()
	}
	os.Exit(code)
}

// startBrowser starts Debian's Chromium.
func startBrowser(path string) error {
	alloc, end := chromedp.NewExecAllocator(context.Background(), chromedp.ExecPath(path), chromedp.NoSandbox,
		chromedp.Headless, chromedp.DisableGPU, chromedp.NoFirstRun, chromedp.NoDefaultBrowserCheck,
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.WSURLReadTimeout(patience))
	var cancel context.CancelFunc
	browser, cancel = chromedp.NewContext(alloc)
	ends = append(ends, end, cancel)
	return chromedp.Do(browser)
}

// tab is one page in the browser.
type tab struct {
	t   *testing.T
	ctx context.Context

	mu         sync.Mutex
	complaints []string
	elsewhere  []string // addresses asked beside the page's own
}

// open makes a tab of that size.
func open(t *testing.T, width, height int64, options ...chromedp.EmulateViewportOption) *tab {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("chromium is not installed: apt-get install chromium")
	}
	starting.Do(func() { failed = startBrowser(path) })
	require.NoError(t, failed, "chromium does not start")
	ctx, cancel := chromedp.NewContext(browser, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	b := &tab{t: t, ctx: ctx}
	require.NoError(t, chromedp.Listen(ctx, b.hear))
	require.NoError(t, chromedp.Do(ctx, chromedp.EmulateViewport(width, height, options...)))
	return b
}

// hear notes what a console would show.
func (b *tab) hear(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		b.complaints = append(b.complaints, fmt.Sprintf("%+v %+v", e.ExceptionDetails, e.ExceptionDetails.Exception))
	case *runtime.EventConsoleAPICalled:
		b.complaints = append(b.complaints, fmt.Sprint("console: ", e.Type, e.Args))
	case *log.EventEntryAdded:
		b.complaints = append(b.complaints, fmt.Sprint(e.Entry.Level, ": ", e.Entry.Text, " ", e.Entry.URL))
	case *network.EventRequestWillBeSent:
		b.elsewhere = append(b.elsewhere, e.Request.URL)
	}
}

// quiet checks that nothing was complained of.
func (b *tab) quiet() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	assert.Empty(b.t, b.complaints, "in the console")
}

// forgive drops complaints of the browser's own about answers of a code, which a page cannot
// keep it from; one has come.
func (b *tab) forgive(code string) {
	b.t.Helper()
	about := func(c string) bool { return strings.Contains(c, "the server responded with a status of "+code) }
	require.Eventually(b.t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return slices.ContainsFunc(b.complaints, about)
	}, patience, 20*time.Millisecond)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.complaints = slices.DeleteFunc(b.complaints, about)
}

// asked returns all addresses that the page has asked.
func (b *tab) asked() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string{}, b.elsewhere...)
}

func (b *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	require.NoError(b.t, chromedp.Do(b.ctx, steps...))
}

// text evaluates an expression that is a string.
func (b *tab) text(expression string) string {
	b.t.Helper()
	s, err := chromedp.Run(b.ctx, chromedp.Evaluate[string]("String("+expression+")"))
	require.NoError(b.t, err, expression)
	return s
}

// until waits until an expression is true; what is not there yet is not.
func (b *tab) until(expression string) {
	b.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		ok, err := chromedp.Run(b.ctx, chromedp.Evaluate[bool]("(() => { try { return !!("+expression+") } catch { "+
			"return false } })()"))
		require.NoError(b.t, err, expression)
		if ok {
			return
		}
		if time.Now().After(deadline) {
			b.quiet()
			require.Fail(b.t, "it never came to be", "%s\nthe page says:\n%s", expression,
				b.text("document.body.innerText"))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// dark has the page asked for in the dark.
func (b *tab) dark(on bool) {
	b.t.Helper()
	scheme := map[bool]string{true: "dark", false: "light"}[on]
	_, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
	require.NoError(b.t, err)
}
