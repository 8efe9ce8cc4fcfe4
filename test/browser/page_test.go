//go:build linux

package browser

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/telemetry/page"
)

const many = 10_000

func TestTenThousandFlows(t *testing.T) {
	at, _ := serve(t, &busy{n: many}, nil)
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows"))
	b.until(`document.querySelector("#matches").textContent === "10,000 rows"`)
	t.Log("first paint after ms:", b.text(`performance.getEntriesByName("first-contentful-paint")[0]?.startTime`))
	rows := `document.querySelectorAll("#table tbody tr:not(.gap)").length`
	b.until(rows + " > 10 && " + rows + " < 100")
	assert.Equal(t, "10001", b.text(`document.querySelector("#table").getAttribute("aria-rowcount")`))
	b.until(`document.querySelector("#down").textContent.endsWith("bit/s") && document.querySelector("#down").textContent !== "0 bit/s"`)

	// Rows in sight are there wherever it is scrolled to.
	b.text(`document.querySelector("#panel").scrollTop = 1e7`)
	b.until(`[...document.querySelectorAll("#table tbody tr:not(.gap)")].at(-1).getAttribute("aria-rowindex") === "10001"`)
	b.text(`document.querySelector("#panel").scrollTop = 170000`)
	b.until(`(() => { const p = document.querySelector("#panel").getBoundingClientRect();
		const e = document.elementFromPoint(p.left + 40, p.top + p.height / 2);
		return e.closest("tr") && !e.closest("tr").classList.contains("gap"); })()`)

	// A name of the network's is text, wherever it is shown.
	b.do(chromedp.SendKeys("#search", "<img src"))
	b.until(`document.querySelector("#matches").textContent === "1 of 10,000"`)
	b.until(`document.querySelector("#table tbody").textContent.includes("<img src=x")`)
	b.do(chromedp.Click("#table tbody button"))
	b.until(`document.querySelector("#detail").open && document.querySelector("#detail-title").textContent.includes("<img src=x")`)
	b.until(`document.querySelector("#detail-body").textContent.includes("penstock · steady")`)
	assert.Equal(t, "0", b.text(`document.querySelectorAll("img").length`))
	assert.Equal(t, "undefined", b.text("window.pwned"))
	b.do(chromedp.KeyEvent(kb.Escape))
	b.until(`!document.querySelector("#detail").open`)

	for _, asked := range b.asked() {
		assert.True(t, strings.HasPrefix(asked, at), "the page asks %s", asked)
	}
	b.quiet()
}

func TestTheServerSortsAndRatesGoOn(t *testing.T) {
	at, _ := serve(t, &busy{n: 300}, nil)
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows&sort=queue"))
	b.until(`document.querySelector('[aria-sort="ascending"]').textContent.startsWith("Queue")`)
	column := func(n int) string {
		return b.text(`document.querySelector("#table tbody tr:not(.gap)").cells[` + string(rune('0'+n)) + `].textContent`)
	}
	b.until(`document.querySelectorAll("#table tbody tr:not(.gap)").length > 5`)
	assert.Equal(t, "5.0 ms", column(5))
	b.do(chromedp.Click(`[data-sort="queue"]`))
	b.until(`document.querySelector("#table tbody tr:not(.gap)").cells[5].textContent === "64.0 ms"`)
	assert.Contains(t, b.text("location.hash"), "sort=-queue")

	before := b.text(`document.querySelector("#down").textContent`)
	b.until(`document.querySelector("#down").textContent !== "` + before + `"`)
	b.do(chromedp.Click("#pause"))
	b.until(`document.querySelector("#pause").getAttribute("aria-pressed") === "true"`)
	b.quiet()
}

func TestKeyboardAndScreenReader(t *testing.T) {
	events := &page.Events{}
	slog.New(events.Handler(slog.DiscardHandler)).Error("configuration not reloaded", "err",
		"line 3: <b>unknown</b> key")
	at, p := serve(t, &busy{n: 25}, events)
	p.AddPoint()
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows"))
	b.until(`document.querySelectorAll("#table tbody button").length === 25`)

	// What a screen reader is told.
	tree, err := chromedp.Call(b.ctx, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
	require.NoError(t, err)
	roles := map[string]int{}
	for _, n := range tree.Nodes {
		if n.Ignored || n.Role == nil {
			continue
		}
		role := strings.Trim(string(n.Role.Value), `"`)
		roles[role]++
		if role == "button" || role == "tab" || role == "searchbox" || role == "image" {
			require.NotNil(t, n.Name, role)
			assert.NotEmpty(t, strings.Trim(string(n.Name.Value), `"`), "a %s without a name", role)
		}
	}
	assert.Equal(t, 5, roles["tab"])
	assert.Equal(t, 1, roles["tabpanel"])
	assert.Equal(t, 1, roles["table"])
	assert.Equal(t, 10, roles["columnheader"])
	assert.Equal(t, 26, roles["row"], "with the head, without what only takes up room")
	assert.Equal(t, 1, roles["main"])
	assert.NotZero(t, roles["status"])

	// By keys alone: to the tabs, along them, into the search, to a flow and back.
	b.do(chromedp.Focus("#tab-flows"), chromedp.KeyEvent(kb.Home), chromedp.KeyEvent(kb.ArrowLeft))
	b.until(`document.activeElement.id === "tab-events" && document.activeElement.getAttribute("aria-selected") === "true"`)
	b.until(`document.querySelector("#table").textContent.includes("line 3: <b>unknown</b> key")`)
	b.do(chromedp.KeyEvent(kb.ArrowLeft))
	b.until(`document.querySelector("#table").textContent.includes("198.51.100.9:4000")`)
	b.until(`document.querySelector("#table").textContent.includes("1 min")`) // the age of a handshake of 75 s ago
	b.do(chromedp.KeyEvent(kb.ArrowLeft))
	b.until(`document.querySelector("#table").textContent.includes("wireguard")`)
	b.do(chromedp.KeyEvent(kb.Home))
	b.until(`document.querySelector("#table").textContent.includes("10.7.0.1")`)
	assert.NotContains(t, b.text(`document.querySelector("#table").textContent`), "down|", "a host is called by its address")
	b.do(chromedp.KeyEvent(kb.ArrowRight))
	b.until(`document.activeElement.id === "tab-flows" && document.querySelectorAll("#table tbody button").length === 25`)
	b.do(chromedp.KeyEvent("/"))
	b.until(`document.activeElement.id === "search"`)
	b.text(`document.querySelector("#search").value = ""`) // where this way of typing has left the key itself
	b.do(chromedp.KeyEvent("10.7.0.23:"))
	b.until(`document.querySelector("#matches").textContent === "1 of 25"`)
	b.do(chromedp.Focus("#table tbody button"), chromedp.KeyEvent(kb.Enter))
	b.until(`document.querySelector("#detail").open && document.querySelector("#detail-title").textContent.startsWith("10.7.0.23:")`)
	b.do(chromedp.KeyEvent(kb.Escape))
	b.until(`!document.querySelector("#detail").open`)
	b.quiet()
}

func TestPhone(t *testing.T) {
	at, _ := serve(t, &busy{n: many}, nil)
	b := open(t, 390, 844, chromedp.EmulateMobile)
	b.dark(true)
	b.do(chromedp.Navigate(at + "#tab=flows"))
	b.until(`document.querySelector("#matches").textContent === "10,000 rows"`)
	assert.LessOrEqual(t, b.text("document.documentElement.scrollWidth"), "390", "it scrolls sideways")
	assert.Equal(t, "rgb(16, 21, 27)", b.text("getComputedStyle(document.body).backgroundColor"), "in the dark")
	b.text(`document.querySelector("#panel").scrollTop = 1e7`)
	b.until(`[...document.querySelectorAll("#table tbody tr:not(.gap)")].at(-1).getAttribute("aria-rowindex") === "10001"`)
	b.text(`(s => { s.value = "-queue"; s.dispatchEvent(new Event("change")); })(document.querySelector("#sort"))`)
	b.until(`[...document.querySelector("#table tbody tr:not(.gap)").cells].some(c => c.textContent === "64.0 ms")`)
	b.quiet()
}

func TestChartsHaveAxesAndShowTheirValues(t *testing.T) {
	var later time.Duration
	at, p := serveAt(t, &busy{n: 64}, nil, func() time.Duration { return later })
	for range 120 {
		later += 5 * time.Second
		p.AddPoint()
	}
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows"))
	axis := func(chart, kind string) string {
		return b.text(`[...document.querySelector("#` + chart + `").parentNode.querySelectorAll("span.` + kind + `")]
			.map((e) => e.textContent).join("|")`)
	}
	b.until(`document.querySelector("#delays").parentNode.querySelectorAll("span.y").length === 3`)
	assert.Equal(t, "0|25.0 ms|50.0 ms", axis("delays", "y"))
	assert.Equal(t, "−1 h|−30 min|now", axis("delays", "x"))
	b.text(`(() => { const s = document.querySelector("#delays"), r = s.getBoundingClientRect();
		s.dispatchEvent(new PointerEvent("pointermove", { clientX: r.right - 20, clientY: r.top + 20 })); })()`)
	b.until(`/\d:\d\d.*: \d.* ms \/ \d.* ms$/.test(document.querySelector("#delays-now").textContent)`)
	assert.Equal(t, "1", b.text(`document.querySelectorAll("#delays line.cursor").length`))
	b.text(`document.querySelector("#delays").dispatchEvent(new PointerEvent("pointerleave"))`)
	b.until(`document.querySelector("#delays-now").textContent.startsWith("up to")`)

	for span, first := range map[string]string{"300": "−5 min", "86400": "−1 d", "3600": "−1 h"} {
		b.do(chromedp.Click(`#spans [data-span="` + span + `"]`))
		b.until(`document.querySelector("#rates").parentNode.querySelector("span.x").textContent === "` + first + `"`)
		if span == "300" {
			assert.Equal(t, "−5 min|−2.5 min|now", axis("rates", "x"))
		}
		assert.Equal(t, span, b.text(`document.querySelector('#spans [aria-pressed="true"]').dataset.span`))
		b.until(`document.querySelector("#rates path.a").getAttribute("d").includes("L")`)
	}
	b.quiet()
}

func TestAnIdleProxySaysHowTrafficGetsThere(t *testing.T) {
	at, _ := serve(t, &busy{}, nil)
	b := open(t, 390, 844)
	b.do(chromedp.Navigate(at + "#tab=flows"))
	b.until(`!document.querySelector("#empty").hidden`)
	assert.Contains(t, b.text(`document.querySelector("#empty").textContent`), "No connection is open.")
	assert.Contains(t, b.text(`document.querySelector("#empty").textContent`), "Listener ")
	assert.Equal(t, "true", b.text(`document.querySelector("#fleet").hidden`), "there is no fleet")
	b.do(chromedp.Click("#tab-peers"))
	b.until(`document.querySelector("#empty").hidden`)
	b.quiet()
}

// troubledGroup is a group among which every seventh has a queue of 250 ms and more, the last one the longest.
func troubledGroup(i, looks int) flow.Group {
	g := groupInfo(i, looks)
	if i%7 == 6 {
		g.QueueingDelay = time.Duration(250+i) * time.Millisecond
	}
	return g
}

func TestTheWorstHostComesFirstAndHasAPageOfItsOwn(t *testing.T) {
	gains := []page.Gain{
		{Host: "10.7.0.196", Text: "10.7.0.196, proved: 61 % less queueing delay"},
		{Rules: []string{"other"}, Text: "other against defaults"},
	}
	var later time.Duration
	fleet := []string{"Fleet: a (this one), b", "down|lan|10.7.0.196: 12mbit of 20mbit here, granted by b; sends 9mbit"}
	source := &busy{n: 200, group: troubledGroup, gains: gains, fleet: fleet}
	at, p := serveAt(t, source, nil, func() time.Duration { return later })
	for range 60 {
		later += 5 * time.Second
		p.AddPoint()
	}
	b := open(t, 390, 844)
	b.do(chromedp.Navigate(at))
	b.until(`document.querySelector("#table tbody tr.bad td a").textContent === "10.7.0.196"`)
	assert.Equal(t, "long queue: it fills the link itself",
		b.text(`document.querySelector("#table tbody tr.bad").cells[1].textContent`))
	assert.Equal(t, "10.7.0.196, proved: 61 % less queueing delay|other against defaults",
		b.text(`[...document.querySelectorAll("#gains li")].map((e) => e.textContent).join("|")`))
	assert.Equal(t, strings.Join(fleet, "|"),
		b.text(`[...document.querySelectorAll("#fleet li")].map((e) => e.textContent).join("|")`))
	assert.Equal(t, "0", b.text(`document.querySelectorAll(".said li").length - [...document.querySelectorAll(".said li")]
		.filter((e) => e.checkVisibility() && e.getBoundingClientRect().right <= innerWidth).length`), "in sight")

	b.do(chromedp.Click("#table tbody tr.bad td a"))
	page := func() {
		t.Helper()
		b.until(`document.querySelector("#host-name").textContent === "10.7.0.196" &&
			document.querySelector("#matches").textContent === "1 row"`)
	}
	page()
	address := b.text("location.href")
	assert.Contains(t, address, "#host=10.7.0.196")
	assert.Equal(t, "Rules: all|UDP: none is held|Gained: 10.7.0.196, proved: 61 % less queueing delay",
		b.text(`[...document.querySelectorAll("#host dt")].map(
			(e) => e.textContent + ": " + e.nextElementSibling.textContent).join("|")`))
	assert.Equal(t, "445\u00a0ms|1", b.text(
		`["queue", "connections"].map((id) => document.getElementById(id).textContent).join("|")`))
	b.until(`document.querySelector("#delays path.b").getAttribute("d").includes("L")`)
	assert.Equal(t, "false|false", b.text(
		`["gains", "fleet"].map((id) => document.getElementById(id).checkVisibility()).join("|")`))
	b.do(chromedp.Click("#tab-hosts"))
	b.until(`document.querySelector("#table.hosts tbody").textContent.includes("10.7.0.196")`)
	for _, width := range []int64{390, 768, 1280} {
		b.do(chromedp.EmulateViewport(width, 844))
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			assert.Empty(c, b.text(cut))
		}, 5*time.Second, 50*time.Millisecond)
		assert.Equal(t, "true", b.text("document.documentElement.scrollWidth <= innerWidth"))
	}

	// By way of a bookmark, of a flow, and back to all hosts.
	b.do(chromedp.Navigate("about:blank"), chromedp.Navigate(address))
	page()
	b.do(chromedp.Click("#table tbody button"))
	b.until(`document.querySelector("#detail-body a").textContent === "10.7.0.196"`)
	b.do(chromedp.Click("#detail-body a"))
	b.until(`!document.querySelector("#detail").open`)
	page()
	table := b.text(`(() => {
		const r = new XMLHttpRequest();
		r.open("GET", document.querySelector("#csv").href, false);
		r.send();
		return r.responseText;
	})()`)
	assert.Equal(t, 2, strings.Count(table, "\n"), "a head and one flow:\n%s", table)
	assert.Contains(t, table, ",10.7.0.196:20195,")
	b.do(chromedp.Click("#host a"))
	b.until(`!document.querySelector("#host").checkVisibility() &&
		document.querySelector("#matches").textContent === "200 rows"`)
	b.quiet()
}

// An address that somebody wrote, and a search that is longer than the proxy takes, leave a
// page that works.
func TestAnAddressThatIsWrong(t *testing.T) {
	at, _ := serve(t, &busy{n: 300}, nil)
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows&sort=-members&q=" + strings.Repeat("%C3%A9", 100)))
	b.until(`document.querySelector("#matches").textContent === "nothing here"`)
	assert.NotContains(t, b.text("location.hash"), "members")
	assert.Equal(t, "serving", b.text(`document.querySelector("#state").textContent`))
	search := func(words string) {
		b.text(`(() => { const s = document.querySelector("#search"); s.value = ` + words + `;
			s.dispatchEvent(new Event("input")); })()`)
	}
	search(`"\u{1F600}".repeat(50)`)
	b.until(`new URLSearchParams(location.hash.slice(1)).get("q") === "\u{1F600}".repeat(25)`)
	search(`""`)
	b.until(`document.querySelector("#matches").textContent === "300 rows"`)
	b.forgive("400")
	b.quiet()
}

// A flow that is opened while an answer is on its way has not ended because that answer,
// to what was asked before, is without it.
func TestAFlowThatIsOpenedBetweenAnswersHasNotEnded(t *testing.T) {
	at, _ := serve(t, &busy{n: 300}, nil)
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows"))
	b.until(`document.querySelector("#matches").textContent === "300 rows"`)
	b.text(`(() => {
		window.titles = [];
		const title = document.querySelector("#detail-title"), real = window.fetch;
		new MutationObserver(() => titles.push(title.textContent)).observe(title, { childList: true });
		window.fetch = async (...a) => {
			const answer = await real(...a);
			if (!a[0].includes("detail=") && !window.clicked) { // now, while the page waits for it
				window.clicked = true;
				document.querySelector("#table tbody button").click();
			}
			return answer;
		};
	})()`)
	b.until(`document.querySelector("#detail").open && document.querySelector("#detail-body").textContent.includes("penstock · steady")`)
	assert.NotContains(t, b.text(`titles.join("|")`), "ended")
	b.quiet()
}
