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

// One look at the flows serves all requests for minFresh at least, so that a second reader costs nothing, and for
// freshPerLook times what the look took, so that looks take a fortieth of the time at most. maxFresh bounds that.
const (
	minFresh     = time.Second
	maxFresh     = 10 * time.Second
	freshPerLook = 40
	// maxRateSpan bounds the time that a rate is over: one over a longer time is not the present one.
	maxRateSpan = 3 * maxFresh
)

// contentPolicy lets the page load its own script and style, ask the proxy it came from,
// and nothing else (Content Security Policy Level 3).
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

//go:embed assets
var assets embed.FS

// Source is what a proxy tells of itself.
type Source interface {
	// Counters returns the totals, without what takes a look at each flow.
	Counters() proxy.Counters
	// Flows returns how many flows there are, and each, oldest first. What it yields is
	// overwritten by the next.
	Flows() (n int, each iter.Seq[*proxy.FlowInfo])
	// Groups returns the flows that share a window, group by group, and as of when.
	Groups() ([]flow.Group, cc.Time)
	// Held returns the state of held UDP, by listener.
	Held() []proxy.HeldInfo
	// Tunnels returns how it goes with the listeners that end tunnels.
	Tunnels() []proxy.TunnelInfo
}

// Options are what a page is made of.
type Options struct {
	Source  Source
	Version string
	Start   float64 // of the process, in Unix seconds
	Clock   func() cc.Time
	Wall    func() time.Time
	// Ready says what keeps the proxy from serving new connections; nil: it serves.
	Ready func() error
	// Fallbacks counts how often the kernel ran Reno on a leg; nil: it never does.
	Fallbacks func() uint64
	Events    *Events
	// Gains says what rules gain over others; nil: nothing is compared.
	Gains func() []Gain
	// Fleet says in words, a line each, what the edges and the shared rates of a fleet do; nil: there is none.
	Fleet func() []string
	// Drain says in words what the process before this one still has; empty: nothing.
	Drain func() string
	// Changes reports whether algorithms may be changed here, and which rules differ from the
	// file by that; nil: they may not.
	Changes func() (may bool, changed []string)
}

// Page looks at a proxy and remembers the last day.
type Page struct {
	o Options

	mu      sync.Mutex    // guards what follows
	rows    []row         // connections at the last look, in the order of their numbers
	looked  cc.Time       // when rows were read
	fresh   time.Duration // for how long rows are shown before the next look
	hosts   hosts
	peers   peers
	counted counted // at the last look
	noted   counted // as of the last point of the history
	totals  Totals
	lists   []Listener
	history *trail
	trails  trails
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
	return &Page{o: o, fresh: minFresh, history: newTrail(step, longStep)}
}

// Run writes the history until ctx is done.
func (p *Page) Run(ctx context.Context) {
	p.Note()
	tick := time.NewTicker(step)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			p.Note()
		}
	}
}

// Note adds a point to the history, and the events that counters tell of.
func (p *Page) Note() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updateSums()
	before, now := p.noted, p.counted
	p.noted = now
	if before.at == 0 || before.at == now.at {
		return // there is no earlier look to take a difference from
	}
	at := p.wallSeconds()
	tell := func(l slog.Level, text string, n int) { p.o.Events.addEvent(at, l, text, n) }
	refused := now.refusedSince(before, tell)
	if n := now.fallbacks - before.fallbacks; now.fallbacks > before.fallbacks {
		tell(slog.LevelWarn, "connections fell back to Reno in the kernel: the process did not answer in time", int(n))
	}
	down, up := ratesBetween(before, now)
	point := Point{
		At: at, Down: down, Up: up, Connections: p.totals.Connections,
		Queue50: p.totals.Queue50, Queue95: p.totals.Queue95, Refused: refused,
	}
	p.history.addPoint(point)
	p.trails.addPoints(p.hosts.groups, p.hosts.at, at)
}

// wallSeconds is the date in Unix time.
func (p *Page) wallSeconds() float64 { return float64(p.o.Wall().UnixMilli()) / 1e3 }

// ratesBetween are those of all listeners between two counts.
func ratesBetween(before, now counted) (down, up cc.Rate) {
	d := now.at.Sub(before.at)
	for name, n := range now.down {
		down += rateOf(before.down[name], n, d)
		up += rateOf(before.up[name], now.up[name], d)
	}
	return down, up
}

// updateSums counts anew unless it just did: what the whole proxy and its groups do, without
// a look at each flow. Callers hold mu.
func (p *Page) updateSums() {
	now := p.o.Clock()
	before := p.counted
	if before.at != 0 && now.Sub(before.at) < minFresh {
		return
	}
	c := p.o.Source.Counters()
	p.counted = countAll(c, p.o.Fallbacks(), now)
	var delays []time.Duration
	groups, at := p.o.Source.Groups()
	p.hosts, delays = p.hosts.nextLook(groups, SumHeld(p.o.Source.Held()), at)
	p.totals = Totals{Connections: c.Active, Limit: c.Limit, Sources: c.Sources}
	if before.at != 0 {
		p.totals.Down, p.totals.Up = ratesBetween(before, p.counted)
	}
	p.totals.Queue50, p.totals.Queue95 = medianAndP95(delays)
	p.lists = make([]Listener, len(c.Listeners))
	for i, l := range c.Listeners {
		v := Listener{Name: l.Listener, Mode: l.Mode, Active: l.Active, Accepted: l.Accepted}
		for _, n := range l.Rejected {
			v.Refused += n
		}
		if before.at != 0 {
			d := now.Sub(before.at)
			v.Down = rateOf(before.down[v.Name], p.counted.down[v.Name], d)
			v.Up = rateOf(before.up[v.Name], p.counted.up[v.Name], d)
		}
		p.lists[i] = v
	}
}

// updateFlows looks at all flows unless the last look is fresh. Callers hold mu.
func (p *Page) updateFlows() {
	now := p.o.Clock()
	d := now.Sub(p.looked)
	if p.looked != 0 && d < p.fresh {
		return
	}
	n, flows := p.o.Source.Flows()
	rows := make([]row, 0, n)
	for f := range flows {
		rows = append(rows, rowOf(f))
	}
	if p.looked != 0 && d <= maxRateSpan {
		updateRates(rows, p.rows, d)
	}
	p.rows, p.looked = rows, now
	p.fresh = min(max(minFresh, freshPerLook*p.o.Clock().Sub(now)), maxFresh)
}

// answerQuery answers q.
func (p *Page) answerQuery(q query) View {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updateSums()
	out := View{
		Now: p.wallSeconds(), Version: p.o.Version, Start: p.o.Start,
		State: "serving", Serving: true, Drain: p.o.Drain(), Totals: p.totals,
		Listeners: p.lists, Table: q.table, Offset: q.offset,
		History: p.history.since(q.since, q.day),
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
	now := p.o.Clock()
	if q.host != "" {
		p.updateFlows()
		out.Focus = p.focusOn(q.host, gains)
		out.History = History{Step: hostStep.Seconds(), Points: []Point{}}
		// A host that is looked at has a history from now on, whatever it moves.
		if h := p.trails.trailOf(q.host, out.Focus.Connections > 0, 0); h != nil {
			out.History = h.since(q.since, q.day)
		}
	}
	switch q.table {
	case "listeners", "events": // which every answer has
	case "hosts":
		all := ofHost(p.hosts.allHosts(), q.host, (*Host).isOf)
		rows, n := selectRows(all, q, hostOrder[q.sort], (*Host).searchWords)
		out.Total, out.Matches, out.Hosts = len(all), n, valuesOf(rows)
	case "peers":
		if p.peers.at == 0 || now.Sub(p.peers.at) >= p.fresh {
			p.peers = p.peers.nextLook(p.o.Source.Tunnels(), now, p.o.Wall())
		}
		rows, n := selectRows(p.peers.all, q, peerOrder[q.sort], (*Peer).searchWords)
		out.Total, out.Matches, out.Peers = len(p.peers.all), n, valuesOf(rows)
	default:
		p.updateFlows()
		all := ofHost(p.rows, q.host, (*row).isOf)
		rows, n := selectRows(all, q, flowOrder[q.sort], (*row).searchWords)
		out.Total, out.Matches = len(all), n
		for _, r := range rows {
			out.Flows = append(out.Flows, r.flowView())
		}
	}
	if q.detail != 0 {
		p.updateFlows()
		if i, ok := findFlow(p.rows, q.detail); ok {
			out.Detail = new(p.rows[i].flowView())
		}
	}
	out.Fresh = p.fresh.Seconds()
	return out
}

// focusOn sums up what a host does. Callers hold mu.
func (p *Page) focusOn(host string, gains []Gain) *Focus {
	f := &Focus{Host: host, Rules: []string{}}
	for i := range p.rows {
		r := &p.rows[i]
		if !r.isOf(host) {
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
	windows := ofHost(p.hosts.allHosts(), host, (*Host).isOf)
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

// ofHost returns the rows that are of a host; all if it is empty.
func ofHost[T any](all []T, host string, isOf func(*T, string) bool) []T {
	if host == "" {
		return all
	}
	var out []T
	for i := range all {
		if isOf(&all[i], host) {
			out = append(out, all[i])
		}
	}
	return out
}

// Register puts the page at / and what it is made of beside it.
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
