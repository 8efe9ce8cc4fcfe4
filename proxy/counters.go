package proxy

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Bounds of the histograms, in seconds: connection set-up from a fast LAN to a
// dial timeout, connection lives from a request to a day.
var (
	setupBounds    = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	durationBounds = []float64{.01, .05, .1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400}
)

// Counters are the server's totals since it started. They move while
// connections live, and never go back. What a reload has taken away is not counted any
// more once it has no connections.
type Counters struct {
	Listeners []ListenerCounters // in the order of the configuration
	Routes    []RouteCounters    // by listener, then rule; only those that were used
	Peers     []PeerCounters     // by listener, then name; only those that have had connections
	Active    int                // connections, in whatever state
	Sources   int                // client hosts that have connections
	Limit     int                // connections at most
	Draining  bool
}

// ListenerCounters are what happened at one listener.
type ListenerCounters struct {
	Listener string
	Mode     string
	Accepted uint64
	Active   int // connections, in whatever state
	Rejected map[Reason]uint64
	Dial     datapath.Histogram // of successful dials
	Setup    datapath.Histogram // from accepted to relaying
}

// RouteCounters are what happened to the relayed connections of one listener
// and one rule.
type RouteCounters struct {
	Listener, Rule string // Rule is empty where only the defaults applied
	Opened         uint64
	Active         int
	Closed         map[Cause]uint64
	Down, Up       DirectionCounters
	Duration       datapath.Histogram // of closed connections
}

// DirectionCounters count what became of the bytes of one direction.
type DirectionCounters struct {
	Read    cc.Bytes // from the leg it comes from
	Written cc.Bytes // to the leg it goes to
	Spliced cc.Bytes // of those, moved inside the kernel

	Retransmitted cc.Bytes // by the leg it goes to
	SignalErrors  uint64   // failed reads of that leg's state

	Control map[string]AlgorithmCounters // by algorithm
}

// AlgorithmCounters count what happened to directions while they were under one algorithm.
type AlgorithmCounters struct {
	Algorithm  string
	LossEvents uint64 // it was told of; 0 where unmanaged
	Limited    flow.LimitedTime
}

// addCounters counts what more happened under the algorithm in.
func (a *AlgorithmCounters) addCounters(more AlgorithmCounters) {
	a.LossEvents += more.LossEvents
	for by, t := range more.Limited {
		a.Limited[by] += t
	}
}

// addDirection counts a direction in, and what is known of the leg it goes to.
func (d *DirectionCounters) addDirection(i *DirectionInfo, leg *datapath.Info) {
	d.Read += i.Read
	d.Written += i.Written
	d.Spliced += i.Spliced
	d.Retransmitted += leg.Retransmitted
	d.SignalErrors += leg.SignalErrors
	for _, c := range i.Control {
		d.addAlgorithm(c)
	}
}

// addAlgorithm counts what happened under an algorithm in.
func (d *DirectionCounters) addAlgorithm(c AlgorithmCounters) {
	if d.Control == nil {
		d.Control = map[string]AlgorithmCounters{}
	}
	sum := d.Control[c.Algorithm]
	sum.Algorithm = c.Algorithm
	sum.addCounters(c)
	d.Control[c.Algorithm] = sum
}

func (d DirectionCounters) copyCounters() DirectionCounters {
	d.Control = maps.Clone(d.Control)
	return d
}

// rejections count connections that were not relayed.
type rejections struct {
	mu sync.Mutex
	n  map[Reason]uint64
}

func (r *rejections) countRejection(reason Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n == nil {
		r.n = map[Reason]uint64{}
	}
	r.n[reason]++
}

func (r *rejections) copyCounts() map[Reason]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.n)
}

// totals are the counters of the connections that are over, and how many
// were opened. A nil map is ready.
type totals struct {
	mu     sync.Mutex
	there  inForce // what is counted without connections, too
	routes map[routeKey]*route
	peers  peerTotals
}

type routeKey struct{ listener, rule string }

type route struct {
	routeKey
	opened   uint64
	active   int
	closed   map[Cause]uint64
	down, up DirectionCounters
	duration *datapath.Durations
}

func (t *totals) countOpened(c *connection) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := routeKey{c.listener.cfg.Name, c.verdict.Rule}
	if t.routes == nil {
		t.routes = map[routeKey]*route{}
	}
	r := t.routes[k]
	if r == nil {
		r = &route{routeKey: k, closed: map[Cause]uint64{}, duration: datapath.NewDurations(durationBounds)}
		t.routes[k] = r
	}
	c.route, c.peer = r, t.peers.countersOf(c)
	r.down.addAlgorithm(AlgorithmCounters{Algorithm: c.verdict.Down.Algorithm})
	r.up.addAlgorithm(AlgorithmCounters{Algorithm: c.verdict.Up.Algorithm})
	r.opened++
	r.active++
	if c.peer != nil {
		c.peer.Opened++
		c.peer.Active++
	}
}

func (t *totals) countClosed(c *connection, last *FlowInfo, cause Cause, lived time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := c.route
	r.active--
	r.closed[cause]++
	r.down.addDirection(&last.Down, &last.Client)
	r.up.addDirection(&last.Up, &last.Server)
	r.duration.Observe(lived)
	if r.active == 0 && !t.there.hasRoute(r.routeKey) {
		delete(t.routes, r.routeKey)
	}
	p := c.peer
	if p == nil {
		return
	}
	p.Active--
	p.Retransmitted += last.Client.Retransmitted
	if k := (peerKey{p.Listener, p.Peer}); p.Active == 0 && !t.there.hasPeer(k) {
		delete(t.peers, k)
	}
}

// inForce are the names of a configuration.
type inForce struct {
	rules    map[string]bool
	listsAll map[string]bool // by listener: whether it has no peers but those that it lists
	peers    map[peerKey]bool
}

func namesOf(cfg *config.Config) inForce {
	n := inForce{map[string]bool{"": true}, map[string]bool{}, map[peerKey]bool{}}
	for _, r := range cfg.Rules {
		n.rules[r.Name] = true
	}
	for _, l := range cfg.Listeners {
		n.listsAll[l.Name] = l.Mode == access.WireGuard || l.Mode == access.MASQUE && l.TLS.ClientCA == ""
		for _, p := range l.WireGuard.Peers {
			n.peers[peerKey{l.Name, p.Name}] = true
		}
		for _, token := range l.MASQUE.Tokens {
			n.peers[peerKey{l.Name, token.Name}] = true
		}
	}
	return n
}

func (n *inForce) hasRoute(k routeKey) bool {
	_, there := n.listsAll[k.listener]
	return there && n.rules[k.rule]
}

func (n *inForce) hasPeer(k peerKey) bool {
	all, there := n.listsAll[k.listener]
	return there && (!all || n.peers[k])
}

// dropStale forgets what is counted of listeners, rules and peers that are not in force, each once it
// has no connections.
func (t *totals) dropStale(in *settings) {
	there := namesOf(&in.cfg)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.there = there
	maps.DeleteFunc(t.routes, func(k routeKey, r *route) bool { return r.active == 0 && !there.hasRoute(k) })
	maps.DeleteFunc(t.peers, func(k peerKey, p *PeerCounters) bool { return p.Active == 0 && !there.hasPeer(k) })
}

// Counters returns the totals, with the bytes of live connections. What the kernel or an
// algorithm counts is in them when a connection is over: Snapshot asks for it earlier.
func (s *Server) Counters() Counters {
	return s.countLive((*connection).fillMoved, func(*FlowInfo) {})
}

// Snapshot returns the totals, all that is counted of live connections included. It has
// visit see each of these first, oldest first; what it sees is overwritten by the next.
func (s *Server) Snapshot(visit func(*FlowInfo)) Counters {
	now := s.clock()
	return s.countLive(func(c *connection, out *FlowInfo) { c.fillInfo(out, now) }, visit)
}

// countLive adds up what look says of each live connection, oldest first, and has visit see it.
func (s *Server) countLive(look func(*connection, *FlowInfo), visit func(*FlowInfo)) Counters {
	active, sources, limit := s.limits.currentCounts()
	out := Counters{Active: active, Sources: sources, Limit: limit, Draining: s.draining.Load()}
	for _, l := range s.allListeners() {
		out.Listeners = append(out.Listeners, ListenerCounters{
			Listener: l.cfg.Name, Mode: string(l.cfg.Mode), Accepted: l.taken.Load(),
			Active: s.limits.activeIn(&l.share), Rejected: l.refused.copyCounts(),
			Dial: l.dial.Snapshot(), Setup: l.setup.Snapshot(),
		})
	}
	// A connection moves from the live ones to the totals under s.mu, and only
	// then: it is in exactly one of both here. What it counts after this copy
	// only makes the next one larger.
	conns := s.emptyRoster()
	s.mu.Lock()
	conns = append(conns, s.conns.conns...)
	rows, peers := s.totals.copyTotals()
	s.mu.Unlock()
	slices.SortFunc(peers, PeerCounters.compareTo)

	f := new(FlowInfo)
	for i, c := range dropGone(conns) {
		giveWay(i)
		look(c, f)
		visit(f)
		if !f.Relayed() {
			continue
		}
		if row := rows[c.route.routeKey]; row != nil {
			row.Down.addDirection(&f.Down, &f.Client)
			row.Up.addDirection(&f.Up, &f.Server)
			addLive(peers, f)
		}
	}
	out.Peers = peers
	for _, k := range slices.SortedFunc(maps.Keys(rows), routeKey.compareTo) {
		out.Routes = append(out.Routes, *rows[k])
	}
	return out
}

func (k routeKey) compareTo(l routeKey) int {
	return cmp.Or(strings.Compare(k.listener, l.listener), strings.Compare(k.rule, l.rule))
}

func (t *totals) copyTotals() (map[routeKey]*RouteCounters, []PeerCounters) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := map[routeKey]*RouteCounters{}
	for k, r := range t.routes {
		rows[k] = &RouteCounters{
			Listener: k.listener, Rule: k.rule, Opened: r.opened, Active: r.active,
			Closed: maps.Clone(r.closed), Down: r.down.copyCounters(), Up: r.up.copyCounters(), Duration: r.duration.Snapshot(),
		}
	}
	return rows, t.peers.copyAll()
}
