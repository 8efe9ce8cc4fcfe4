package page

import (
	"context"
	"embed"
	"encoding/json"
	"iter"
	"log/slog"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
)

// One reading of all flows serves all requests for minFresh at least, so that a second browser costs nothing. It
// serves them for freshPerRead times as long as it took, so that readings take a fortieth of the time at most.
// maxFresh bounds both.
const (
	minFresh     = time.Second
	maxFresh     = 10 * time.Second
	freshPerRead = 40
	// maxRateSpan bounds the time that a rate is over: one over a longer time is not the present one.
	maxRateSpan = 3 * maxFresh
)

// contentPolicy lets the page load its own script and style, and ask the proxy that it came from, but nothing else
// (Content Security Policy Level 3).
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

//go:embed assets
var assets embed.FS

// Source is the part of a proxy that the page reads.
type Source interface {
	// Counters returns the totals, without those that take a reading of each flow.
	Counters() proxy.Counters
	// Flows returns how many flows there are, and each, oldest first. What it yields is
	// overwritten by the next.
	Flows() (n int, each iter.Seq[*proxy.FlowInfo])
	// Groups returns the flows that share a window, group by group, and as of when.
	Groups() ([]flow.Group, cc.Time)
	// Held returns the state of held UDP, by listener.
	Held() []proxy.HeldInfo
	// Tunnels returns the state of the listeners that end tunnels.
	Tunnels() []proxy.TunnelInfo
}

// Options has what a page shows, and where it comes from.
type Options struct {
	Source  Source
	Version string
	Start   float64 // of the process, in Unix seconds
	Clock   func() cc.Time
	Wall    func() time.Time
	// Ready says what keeps the proxy from serving new connections; nil: it serves.
	Ready func() error
	// Fallbacks returns how often the kernel ran Reno on a leg; nil: it never does.
	Fallbacks func() uint64
	Events    *Events
	// Gains says what rules gain over others; nil: nothing is compared.
	Gains func() []Gain
	// Fleet returns a line on the edges of a fleet and on each shared rate; nil: there is none.
	Fleet func() []string
	// Drain returns a line on the connections that the process before this one still has; empty: none.
	Drain func() string
	// Changes reports whether algorithms may be changed here, and which rules such changes have made differ from the
	// file; nil: they may not.
	Changes func() (may bool, changed []string)
}

// Page shows a proxy, with a history of the last day.
type Page struct {
	o Options

	mu            sync.Mutex    // guards what follows
	rows          []row         // connections at the last look, in the order of their numbers
	rowsAt        cc.Time       // when rows were read
	fresh         time.Duration // for how long rows are shown before the next look
	hosts         hosts
	peers         peers
	counts        counts // at the last look
	pointCounts   counts // as of the last point of the history
	totals        Totals
	listeners     []Listener
	history       *history
	hostHistories hostHistories
}

// New returns the page of a proxy.
func New(o Options) *Page {
	if o.Drain == nil {
		o.Drain = func() string { return "" }
	}
	if o.Ready == nil {
		o.Ready = func() error { return nil }
	}
	if o.Fallbacks == nil {
		o.Fallbacks = func() uint64 { return 0 }
	}
	if o.Events == nil {
		o.Events = &Events{}
	}
	return &Page{o: o, fresh: minFresh, history: newHistory(step, longStep)}
}

// Run writes the history until ctx is done.
func (p *Page) Run(ctx context.Context) {
	p.AddPoint()
	tick := time.NewTicker(step)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			p.AddPoint()
		}
	}
}

// AddPoint adds a point to the history, and an event for each counter of trouble that has risen.
func (p *Page) AddPoint() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updateSums()
	before, now := p.pointCounts, p.counts
	p.pointCounts = now
	if before.at == 0 || before.at == now.at {
		return // there are no earlier counts to take a difference from
	}
	at := p.wallSeconds()
	addEvent := func(l slog.Level, text string, n int) { p.o.Events.addEvent(at, l, text, n) }
	refused := now.refusedSince(before, addEvent)
	if n := now.fallbacks - before.fallbacks; now.fallbacks > before.fallbacks {
		addEvent(slog.LevelWarn, "connections fell back to Reno in the kernel: the process did not answer in time", int(n))
	}
	down, up := ratesBetween(before, now)
	p.history.addPoint(Point{
		At: at, Down: down, Up: up, Connections: p.totals.Connections,
		Queue50: p.totals.Queue50, Queue95: p.totals.Queue95, Refused: refused,
	})
	p.hostHistories.addPoints(p.hosts.groups, p.hosts.at, at)
}

// wallSeconds returns the date in Unix time.
func (p *Page) wallSeconds() float64 { return float64(p.o.Wall().UnixMilli()) / 1e3 }

// ratesBetween returns the rates of all listeners together between two counts.
func ratesBetween(before, now counts) (down, up cc.Rate) {
	d := now.at.Sub(before.at)
	for name, n := range now.down {
		down += rateOf(before.down[name], n, d)
		up += rateOf(before.up[name], now.up[name], d)
	}
	return down, up
}

// updateSums reads the totals, the groups and the listeners, unless it has within minFresh. It does not read each
// flow. Callers hold mu.
func (p *Page) updateSums() {
	now := p.o.Clock()
	before := p.counts
	if before.at != 0 && now.Sub(before.at) < minFresh {
		return
	}
	c := p.o.Source.Counters()
	p.counts = newCounts(c, p.o.Fallbacks(), now)
	var delays []time.Duration
	groups, at := p.o.Source.Groups()
	p.hosts, delays = p.hosts.readAfter(groups, SumHeld(p.o.Source.Held()), at)
	p.totals = Totals{Connections: c.Active, Limit: c.Limit, Sources: c.Sources}
	if before.at != 0 {
		p.totals.Down, p.totals.Up = ratesBetween(before, p.counts)
	}
	p.totals.Queue50, p.totals.Queue95 = medianAndP95(delays)
	p.listeners = make([]Listener, len(c.Listeners))
	for i, l := range c.Listeners {
		v := Listener{Name: l.Listener, Mode: l.Mode, Active: l.Active, Accepted: l.Accepted}
		for _, n := range l.Rejected {
			v.Refused += n
		}
		if before.at != 0 {
			d := now.Sub(before.at)
			v.Down = rateOf(before.down[v.Name], p.counts.down[v.Name], d)
			v.Up = rateOf(before.up[v.Name], p.counts.up[v.Name], d)
		}
		p.listeners[i] = v
	}
}

// updateFlows reads all flows, unless the last reading is still fresh. Callers hold mu.
func (p *Page) updateFlows() {
	now := p.o.Clock()
	d := now.Sub(p.rowsAt)
	if p.rowsAt != 0 && d < p.fresh {
		return
	}
	n, flows := p.o.Source.Flows()
	rows := make([]row, 0, n)
	for f := range flows {
		rows = append(rows, rowOf(f))
	}
	if p.rowsAt != 0 && d <= maxRateSpan {
		updateRates(rows, p.rows, d)
	}
	p.rows, p.rowsAt = rows, now
	p.fresh = min(max(minFresh, freshPerRead*p.o.Clock().Sub(now)), maxFresh)
}

// answerQuery returns the view that q asks for.
func (p *Page) answerQuery(q query) View {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updateSums()
	out := View{
		Now: p.wallSeconds(), Version: p.o.Version, Start: p.o.Start,
		State: "serving", Serving: true, Drain: p.o.Drain(), Totals: p.totals,
		Listeners: p.listeners, Table: q.table, Offset: q.offset,
		History: p.history.pointsSince(q.since, q.day),
	}
	var gains []Gain
	if p.o.Gains != nil {
		gains = p.o.Gains()
	}
	for _, g := range gains {
		out.Gains = append(out.Gains, g.Text)
	}
	if p.o.Fleet != nil {
		out.Fleet = p.o.Fleet()
	}
	if err := p.o.Ready(); err != nil {
		out.State, out.Serving = err.Error(), false
	}
	if p.o.Changes != nil {
		out.Changeable, out.Changed = p.o.Changes()
	}
	out.Events, out.EventsSeq = p.o.Events.eventsSince(q.events)
	if q.host != "" {
		p.updateFlows()
		out.Focus = p.focusOn(q.host, gains)
		out.History = History{Step: hostStep.Seconds(), Points: []Point{}}
		// An open page of a host keeps its history, however little the host moves.
		if h := p.hostHistories.historyOf(q.host, out.Focus.Connections > 0, 0); h != nil {
			out.History = h.pointsSince(q.since, q.day)
		}
	}
	p.addRows(&out, q)
	if q.detail != 0 {
		p.updateFlows()
		if i, ok := findFlow(p.rows, q.detail); ok {
			out.Detail = new(p.rows[i].flowView())
		}
	}
	out.Fresh = p.fresh.Seconds()
	return out
}

// addRows adds the rows of the table that q asks for. Callers hold mu, and have called updateSums.
func (p *Page) addRows(out *View, q query) {
	switch q.table {
	case "listeners", "events": // every answer has them
	case "hosts":
		all := ofHost(p.hosts.allHosts(), q.host, (*Host).isOfHost)
		rows, n := selectRows(all, q, hostOrder[q.sort], (*Host).searchWords)
		out.Total, out.Matches, out.Hosts = len(all), n, valuesOf(rows)
	case "peers":
		if now := p.o.Clock(); p.peers.at == 0 || now.Sub(p.peers.at) >= p.fresh {
			p.peers = p.peers.readAfter(p.o.Source.Tunnels(), now, p.o.Wall())
		}
		rows, n := selectRows(p.peers.all, q, peerOrder[q.sort], (*Peer).searchWords)
		out.Total, out.Matches, out.Peers = len(p.peers.all), n, valuesOf(rows)
	default:
		p.updateFlows()
		all := ofHost(p.rows, q.host, (*row).isOfHost)
		rows, n := selectRows(all, q, flowOrder[q.sort], (*row).searchWords)
		out.Total, out.Matches = len(all), n
		for _, r := range rows {
			out.Flows = append(out.Flows, r.flowView())
		}
	}
}

// focusOn sums up the connections and windows of a host. Callers hold mu, and have called updateFlows.
func (p *Page) focusOn(host string, gains []Gain) *Focus {
	f := &Focus{Host: host, Rules: []string{}}
	for i := range p.rows {
		r := &p.rows[i]
		if !r.isOfHost(host) {
			continue
		}
		f.Connections++
		f.Down += r.down.rate
		f.Up += r.up.rate
		if !slices.Contains(f.Rules, r.rule) {
			f.Rules = append(f.Rules, r.rule)
		}
	}
	slices.Sort(f.Rules)
	windows := ofHost(p.hosts.allHosts(), host, (*Host).isOfHost)
	for i := range windows {
		w := &windows[i]
		if i == 0 || w.Severity.rank() > f.Severity.rank() {
			f.Reason, f.Severity = w.Reason, w.Severity
		}
		if w.Active > 0 && compareKnown(w.Queue, f.Queue) > 0 {
			f.Queue = w.Queue
		}
		if f.UDP == nil {
			f.UDP = w.UDP
		}
	}
	names := []string{host}
	if address, err := netip.ParseAddr(host); err == nil {
		client := proxy.FlowInfo{Source: netip.AddrPortFrom(address, 0)}
		names = append(names, client.ClientHost()) // as proofs name it
	}
	for _, g := range gains {
		ofRule := func(rule string) bool { return slices.Contains(f.Rules, rule) }
		if slices.Contains(names, g.Host) || slices.ContainsFunc(g.Rules, ofRule) {
			f.Gains = append(f.Gains, g.Text)
		}
	}
	return f
}

// ofHost returns the rows of a host; all rows if host is empty.
func ofHost[T any](all []T, host string, isOfHost func(*T, string) bool) []T {
	if host == "" {
		return all
	}
	var out []T
	for i := range all {
		if isOfHost(&all[i], host) {
			out = append(out, all[i])
		}
	}
	return out
}

// Register adds the page at /, and the files and the view that it asks for.
func (p *Page) Register(mux *http.ServeMux) {
	mux.HandleFunc("GET /{$}", serveAsset("index.html"))
	mux.HandleFunc("GET /page.js", serveAsset("page.js"))
	mux.HandleFunc("GET /page.css", serveAsset("page.css"))
	mux.HandleFunc("GET /favicon.svg", serveAsset("favicon.svg"))
	mux.HandleFunc("GET /v1/view", p.serveView)
}

// serveAsset serves one file that is part of the program.
func serveAsset(name string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", contentPolicy)
		w.Header().Set("Referrer-Policy", "no-referrer")
		w.Header().Set("Cross-Origin-Resource-Policy", "same-origin")
		http.ServeFileFS(w, r, assets, "assets/"+name)
	}
}

// serveView answers with the state that the page shows, as /v1/view.
func (p *Page) serveView(w http.ResponseWriter, r *http.Request) {
	q, err := readQuery(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if q.csv = q.csv || strings.HasPrefix(r.Header.Get("Accept"), "text/csv"); q.csv {
		q.offset, q.rows, q.events = 0, math.MaxInt, 0
		w.Header().Set("Content-Type", "text/csv; charset=utf-8")
		w.Header().Set("Content-Disposition", `attachment; filename="penstock-`+q.table+`.csv"`)
		_ = writeCSV(w, p.answerQuery(q)) // who has gone needs no answer
		return
	}
	text, err := json.Marshal(p.answerQuery(q))
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text) // who has gone needs no answer
}
