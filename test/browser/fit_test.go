//go:build linux

package browser

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
)

// longName is as long as a server's name is in a network that delivers content.
const longName = "rr4---sn-4g5e6nzz-static-assets-europe-west.content-delivery.video.example:443"

// wideFlow is a flow whose figures and names are as wide as they get: rates from 100 kbit/s to 1 Gbit/s, delays up to
// 12 s, addresses of both families.
func wideFlow(i, looks int) proxy.FlowInfo {
	f := flowInfo(i, looks)
	rates := []cc.Bytes{12_500, 124_900, 1_249_000, 12_490_000, 124_900_000, 125_000_000, 2, 75_000, 3_500_000, 62_000_000}
	queues := []time.Duration{0, 99_940 * time.Microsecond, 999_500 * time.Microsecond, 9_999 * time.Millisecond, 12 * time.Second}
	ages := []time.Duration{59 * time.Second, 59 * time.Minute, 23 * time.Hour, 2000 * time.Hour}
	by := []flow.LimitedBy{flow.LimitedByApplication, flow.LimitedByTransport, flow.LimitedByReceiver, flow.LimitedByCwnd}[i%4]
	for way, d := range []*proxy.DirectionInfo{&f.Down, &f.Up} {
		d.Written = 2 * rates[(i+3*way)%len(rates)] * cc.Bytes(1+looks) // a look each two seconds
		d.Flow.QueueingDelay, d.Flow.LimitedBy = queues[(i+way)%len(queues)], by
		d.Flow.Share = []cc.Bytes{999_900, 99_940, 14_480, 16_700_000}[i%4]
		d.Flow.SRTT, d.Flow.MinRTT = 1234*time.Millisecond+d.Flow.QueueingDelay, 1234*time.Millisecond
		d.Flow.PacingRate, d.Flow.Lost, d.Flow.Inflight = 999_900_000, 999_900_000, 16_700_000
		d.Flow.Limited[by] = ages[i%4]
		if i%3 == 0 {
			d.Algorithm, d.Flow.Algorithm, d.Flow.Phase = "ccp:our-own-agent-of-2025", "ccp:our-own-agent-of-2025", "bandwidth-probing"
		}
	}
	f.Age, f.Listener = ages[i%4], "guests-upstairs"
	f.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 100, byte(100 + i%150)}), uint16(50000+i))
	switch i % 4 {
	case 1:
		f.Host = longName
	case 2:
		f.Host, f.Peer = "", "the phone of somebody's grandmother"
		f.Target = netip.MustParseAddrPort("[2001:db8:1234:5678:9abc:def0:1234:5678]:65535")
	case 3:
		f.Source = netip.MustParseAddrPort("[2001:db8:8765:4321:fedc:ba98:7654:3210]:54321")
	}
	return f
}

// wideGroup is a group like that. Every fifth has no flow.
func wideGroup(i, looks int) flow.Group {
	g := groupInfo(i, looks)
	f := wideFlow(i, looks)
	g.Name = []string{
		fmt.Sprintf("down|guests-upstairs|192.168.100.%d", 100+i%150), "up|guests-upstairs|to 2001:db8:1234:5678:9abc:def0:1234:5678",
		"down|vpn|through the phone of somebody's grandmother", fmt.Sprint("from down|guests-upstairs|192.168.100.", 100+i%150),
	}[i%4]
	g.Key = fmt.Sprint(g.Name, i)
	g.Algorithm, g.Phase, g.Cwnd, g.Delivered = f.Down.Algorithm, f.Down.Flow.Phase, f.Down.Flow.Share, f.Down.Written
	g.QueueingDelay, g.LimitedBy, g.Members, g.Active = f.Down.Flow.QueueingDelay, f.Down.Flow.LimitedBy, 4096, 1234
	if i%5 == 4 {
		g.Members, g.Active = 0, 0
	}
	return g
}

// cut lists what is wider than its place: cells and heads of the table and of the dialog, and tiles.
const cut = `[...document.querySelectorAll("#table td, #table th, dialog[open] td, dialog[open] th, .tiles b, figcaption")]
	.filter(e => e.scrollWidth > e.clientWidth || e.getBoundingClientRect().right > innerWidth)
	.map(e => e.textContent + " (" + e.scrollWidth + " of " + e.clientWidth + ")").join("\n")`

// clipped lists addresses and reasons of which a part is out of sight, because they would take more lines.
const clipped = `[...document.querySelectorAll("#table td.t > *")].filter(e => e.offsetParent &&
	(/^(to |from )?[0-9a-f\[\]:.]+$/.test(e.textContent) || e.closest("#table.hosts td:nth-child(2)")))
	.filter(e => e.scrollHeight > e.clientHeight || e.scrollWidth > e.clientWidth).map(e => e.textContent).join("\n")`

func TestNoFigureIsCutAtAnyWidth(t *testing.T) {
	at, p := serve(t, &busy{n: 60, flow: wideFlow, group: wideGroup}, nil)
	p.AddPoint()
	b := open(t, 1280, 800)
	// fits waits until the page has taken a width, and checks that everything has its room.
	fits := func(width int64, what string) {
		t.Helper()
		b.do(chromedp.EmulateViewport(width, 800))
		require.EventuallyWithT(t, func(c *assert.CollectT) { assert.Empty(c, b.text(cut)) }, 5*time.Second,
			50*time.Millisecond, "%s at %d px", what, width)
		assert.Empty(t, b.text(clipped), "%s at %d px", what, width)
		assert.Equal(t, "true", b.text("document.documentElement.scrollWidth <= innerWidth"), "%s at %d px scrolls sideways",
			what, width)
	}
	widths := []int64{360, 390, 600, 760, 761, 768, 900, 1024, 1100, 1280, 1920}
	for tab, names := range map[string][]string{
		"flows": {"Client", "Server", "Down", "Queue"}, "hosts": {"Host", "How", "Rate", "Queue"},
		"listeners": {"Listener", "Down"}, "peers": {"Peer", "Down"},
	} {
		b.do(chromedp.Navigate("about:blank"), chromedp.Navigate(at+"#tab="+tab))
		b.until(`document.querySelectorAll("#table tbody tr:not(.gap)").length > 0`)
		if tab == "flows" || tab == "hosts" {
			b.until(`/[1-9].*bit.s/.test(document.querySelector("#table tbody").textContent)`)
		}
		for _, width := range widths {
			fits(width, tab)
			if width <= 760 { // a phone has no heads
				continue
			}
			for _, name := range names {
				b.until(shown(name))
			}
		}
	}
	b.do(chromedp.Navigate("about:blank"), chromedp.Navigate(at+"#tab=flows"))
	for n := range 4 {
		row := fmt.Sprintf(`document.querySelectorAll("#table tbody button")[%d]`, n)
		b.until(row + " !== undefined")
		b.text(row + ".click()")
		b.until(`document.querySelector("#detail").open && document.querySelector("#detail-body").textContent.includes("Round trip")`)
		for _, width := range widths {
			fits(width, "the dialog")
		}
		b.do(chromedp.KeyEvent(kb.Escape))
		b.until(`!document.querySelector("#detail").open`)
	}
	b.quiet()
}

// shown tells whether the column with a title is there.
func shown(title string) string {
	return `[...document.querySelectorAll("#table th")].some(e => e.offsetParent && e.innerText.startsWith("` + title + `"))`
}

// A window that becomes narrower leaves out columns, and one that becomes wider has them again; the one that sorts stays.
func TestColumnsFollowTheWidth(t *testing.T) {
	at, _ := serve(t, &busy{n: 60, flow: wideFlow}, nil)
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=flows&sort=-age"))
	b.until(shown("Listener") + "&&" + shown("Window"))
	b.do(chromedp.EmulateViewport(800, 800))
	b.until("!" + shown("Listener") + "&& !" + shown("Window") + "&&" + shown("Age") + "&&" + shown("Down"))
	assert.Empty(t, b.text(cut))
	b.do(chromedp.EmulateViewport(1280, 800))
	b.until(shown("Listener") + "&&" + shown("Window"))
	assert.Empty(t, b.text(cut))
	b.quiet()
}

// A host without a flow under way has no queue, whatever the last one was.
func TestAnIdleHostHasNoQueue(t *testing.T) {
	at, _ := serve(t, &busy{n: 5, group: wideGroup}, nil)
	b := open(t, 1280, 800)
	b.do(chromedp.Navigate(at + "#tab=hosts"))
	b.until(`document.querySelectorAll("#table tbody tr.idle").length === 1`)
	idle := b.text(`[...document.querySelector("#table tbody tr.idle").cells].map(e => e.textContent).join("|")`)
	assert.Contains(t, idle, "0 of 0")
	cells := strings.Split(idle, "|")
	assert.Equal(t, "no connection|–", cells[1]+"|"+cells[3])
	b.quiet()
}
