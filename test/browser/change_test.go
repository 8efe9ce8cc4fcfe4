//go:build linux

package browser

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

const changeToken = "0123456789abcdef"

func TestAnAlgorithmIsChangedFromThePage(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "penstock.yaml")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "token"), []byte(changeToken+"\n"), 0o600))
	require.NoError(t, os.WriteFile(config, []byte("listeners:\n  - {name: front, mode: forward, address: \""+
		need.Host()+proxyPort+"\", target: \""+endless(t).Addr().String()+"\"}\nrules:\n"+
		"  - {name: quiet, match: {ports: [9]}, algorithm: reno}\n"+
		"defaults: {algorithm: cubic}\nshutdown: {drain: 1s}\n"+
		"telemetry: {address: \""+need.Host()+pagePort+"\", change_token_file: token}\n"), 0o600))
	cmd := startAt(t, build(t), config, need.Host()+pagePort)
	download(t)

	b := open(t, 1280, 800)
	b.do(chromedp.Navigate("http://" + need.Host() + pagePort + "/#tab=flows"))
	b.until(`document.querySelector("#table tbody").textContent.includes("cubic")`)
	b.until(`!document.querySelector("#change").hidden && document.querySelector("#differs").hidden`)

	// By keys alone. What is behind the token shows once one is there.
	b.do(chromedp.Focus("#change"), chromedp.KeyEvent(kb.Enter))
	b.until(`document.querySelector("#changes").open && document.activeElement.id === "token"`)
	assert.Equal(t, "0", b.text(`document.querySelector("#algorithm").getClientRects().length`))
	b.do(chromedp.KeyEvent("fedcba9876543210"), chromedp.KeyEvent(kb.Enter))
	b.until(`document.activeElement.id === "rule" && document.querySelector("#rule").options.length === 2`)
	b.do(chromedp.Focus("#algorithm"), chromedp.KeyEvent("copa"), chromedp.KeyEvent(kb.Enter))
	b.until(`document.querySelector("#outcome").textContent === "That was not the token."`)
	b.until(`document.activeElement.id === "token"`)
	b.forgive("401")
	b.do(chromedp.KeyEvent(changeToken), chromedp.KeyEvent(kb.Enter))
	b.until(`document.activeElement.id === "rule"`)

	// A mistake is told, and nothing has changed.
	b.text(`document.querySelector("#algorithm").value = "frob"`)
	b.do(chromedp.Focus("#algorithm"), chromedp.KeyEvent(kb.Enter))
	b.until(`document.querySelector("#outcome").textContent.startsWith('algorithm: no algorithm "frob"; there')`)
	b.forgive("422")

	b.text(`document.querySelector("#algorithm").value = "copa:delta=0.1"`)
	b.do(chromedp.Focus("#algorithm"), chromedp.KeyEvent(kb.Enter))
	b.until(`document.querySelector("#outcome").textContent.includes("2 directions of running connections have")`)
	b.until(`document.querySelector("#rule").selectedOptions[0].textContent === "defaults: copa:delta=0.1"`)
	b.do(chromedp.KeyEvent(kb.Escape))
	b.until(`!document.querySelector("#changes").open`)
	b.until(`document.querySelector("#differs").textContent ===
		"Not as in the file, until it is reloaded: defaults: copa:delta=0.1"`)
	b.until(`document.querySelector("#table tbody").textContent.includes("copa")`)
	b.do(chromedp.Click("#tab-events"))
	b.until(`document.querySelector("#table").textContent.includes(
		"algorithm changed until the next reload rule=defaults")`)
	assert.False(t, strings.Contains(b.text("document.documentElement.outerHTML"), changeToken), "it shows the token")
	assert.NotContains(t, strings.Join(b.asked(), " "), changeToken)
	b.quiet()

	// On a phone, in the dark; a tab of its own does not know the token.
	phone := open(t, 390, 844, chromedp.EmulateMobile)
	phone.dark(true)
	phone.do(chromedp.Navigate("http://" + need.Host() + pagePort + "/#tab=flows"))
	phone.until(`!document.querySelector("#change").hidden && !document.querySelector("#differs").hidden`)
	phone.do(chromedp.Click("#change"))
	phone.until(`document.activeElement.id === "token"`)
	phone.do(chromedp.KeyEvent(changeToken), chromedp.KeyEvent(kb.Enter))
	phone.until(`document.querySelector("#rule").options.length === 2`)
	assert.Equal(t, "true", phone.text(`[...document.querySelectorAll("#changes :is(input, select, button)")].every((e) =>
		e.getBoundingClientRect().right <= 390 && e.getBoundingClientRect().left >= 0)`), "beyond the screen")
	assert.LessOrEqual(t, phone.text("document.documentElement.scrollWidth"), "390", "it scrolls sideways")
	assert.Equal(t, "rgb(24, 31, 39)",
		phone.text(`getComputedStyle(document.querySelector("#algorithm")).backgroundColor`), "in the dark")
	phone.text(`document.querySelector("#rule").value = "quiet"`)
	phone.text(`document.querySelector("#direction").value = "up"`)
	phone.text(`document.querySelector("#algorithm").value = "vegas"`)
	phone.do(chromedp.Click("#change-form button"))
	phone.until(`document.querySelector("#differs").textContent.includes(
		"quiet: down reno, up vegas; defaults: copa")`)
	phone.do(chromedp.Click("#forget"))
	phone.until(`document.activeElement.id === "token" && sessionStorage.length === 0`)
	phone.quiet()

	require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
	b.until(`document.querySelector("#differs").hidden`)
	b.do(chromedp.Click("#tab-flows"))
	b.until(`document.querySelector("#table tbody").textContent.includes("cubic")`)
	b.quiet()
}

func TestThePageChangesNothingWithoutAToken(t *testing.T) {
	at, _ := serve(t, &busy{n: 5}, nil)
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows"))
	b.until(`document.querySelectorAll("#table tbody button").length === 5`)
	assert.Equal(t, "0 0", b.text(`document.querySelector("#change").getClientRects().length + " " +
		document.querySelector("#differs").getClientRects().length`))
	b.quiet()
}
