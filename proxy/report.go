package proxy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/policy"
)

// State is the state of a connection as users see it; see phase for what the proxy knows.
type State string

// The states of a connection.
const (
	StateGreeting   State = "greeting"    // the client is asked for its destination
	StateDialing    State = "dialing"     // the server leg is being made, or a rule waits for a name
	StateOpen       State = "open"        // both directions move
	StateHalfClosed State = "half_closed" // one side has finished sending
	// StateClosing: both sides have finished, or one leg has failed. What they sent is being delivered.
	StateClosing State = "closing"
)

// FlowInfo is one live connection at one moment. What is not known yet in its
// state is zero.
type FlowInfo struct {
	ID             uint64         // in the order of arrival, from 1
	Listener, Rule string         // Rule is empty where only the defaults apply
	Source, Target netip.AddrPort // Target is where the server leg goes
	Host           string         // "name:port" when the client named it
	Peer           string         // of the tunnel that the client is inside; empty: none
	ServerName     string         // in the client's first bytes, where a rule asked for it
	State          State
	Age            time.Duration
	Setup          time.Duration // from accepted to relaying
	Idle           time.Duration // since a byte last moved
	Down, Up       DirectionInfo // Down sends to the client, Up to the server
	Client, Server datapath.Info // the legs
}

// ClientHost names the client's host as samples of rules do.
func (f *FlowInfo) ClientHost() string { return policy.ClientHost(f.Source.Addr(), f.Peer) }

// Relayed reports whether the directions and legs are in place.
func (f *FlowInfo) Relayed() bool { return f.State != StateGreeting && f.State != StateDialing }

// directionName names a direction as users see it.
func directionName(up bool) string {
	if up {
		return "up"
	}
	return "down"
}

// DirectionInfo is one direction of a live connection.
type DirectionInfo struct {
	Algorithm string   // "none": the kernel's own congestion control
	Read      cc.Bytes // from the leg it comes from
	Written   cc.Bytes // to the leg it goes to
	Spliced   cc.Bytes // part of Written that moved inside the kernel
	Finished  bool
	Managed   bool          // Flow is meaningful; false where the kernel alone decides, or still does
	Flow      flow.Snapshot // of the flow's window; Group is known before it is Managed
	Receive   HoldingInfo   // the receive window that the source leg advertises
	// Control is what happened under each algorithm that the direction has had. The last entry is the present one.
	Control []AlgorithmCounters

	counted countedBytes
}

// countedBytes are the part of a direction's bytes that the totals of another process have.
type countedBytes struct{ read, written, spliced, retransmitted cc.Bytes }

// HoldingInfo is the bound of a leg's receive window.
type HoldingInfo struct {
	Algorithm string        // "none": the transport decides
	Held      bool          // Flow is meaningful
	InForce   bool          // the path shows a queue, so the transport advertises no more than Flow.Share
	Why       string        // why the window cannot be bounded; empty: it can, or nothing was tried yet
	Flow      flow.Snapshot // of the algorithm; Share is the window
}

// setupBounds and durationBounds are the bounds of histograms, in seconds: of connection set-up, from a fast LAN to a
// dial timeout, and of connection lives, from a request to a day.
var (
	setupBounds    = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	durationBounds = []float64{.01, .05, .1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400}
)

// Counters are the server's totals since it started. They move while
// connections live, and never go back. Listeners, rules and peers that a reload has removed are
// dropped once they have no connections.
type Counters struct {
	Listeners []ListenerCounters // in the order of the configuration
	Routes    []RouteCounters    // by listener, then rule; only those that were used
	Peers     []PeerCounters     // by listener, then name; only those that have had connections
	Active    int                // connections, in whatever state
	Sources   int                // client hosts that have connections
	Limit     int                // connections at most
	Draining  bool
}

// ListenerCounters are the counters of one listener.
type ListenerCounters struct {
	Listener string
	Mode     string
	Accepted uint64
	Active   int // connections, in whatever state
	Rejected map[Reason]uint64
	Dial     datapath.Histogram // of successful dials
	Setup    datapath.Histogram // from accepted to relaying
}

// RouteCounters are the counters of the relayed connections of one listener
// and one rule.
type RouteCounters struct {
	Listener, Rule string // Rule is empty where only the defaults applied
	Opened         uint64
	Active         int
	Closed         map[Cause]uint64
	Down, Up       DirectionCounters
	Duration       datapath.Histogram // of closed connections
}

// PeerCounters are the counters of the relayed connections of one peer of a tunnel.
type PeerCounters struct {
	Listener, Peer string
	Opened         uint64
	Active         int
	Retransmitted  cc.Bytes // by TCP, towards the peer
}

// DirectionCounters count the bytes of one direction.
type DirectionCounters struct {
	Read    cc.Bytes // from the leg it comes from
	Written cc.Bytes // to the leg it goes to
	Spliced cc.Bytes // part of Written that moved inside the kernel

	Retransmitted cc.Bytes // by the leg it goes to
	SignalErrors  uint64   // failed reads of that leg's state

	Control map[string]AlgorithmCounters // by algorithm
}

// AlgorithmCounters count what happened to directions while they were under one algorithm.
type AlgorithmCounters struct {
	Algorithm  string
	LossEvents uint64 // reported to the algorithm; 0 where unmanaged
	Limited    flow.LimitedTime
}

// addCounters adds what more happened under the algorithm.
func (a *AlgorithmCounters) addCounters(more AlgorithmCounters) {
	a.LossEvents += more.LossEvents
	for by, t := range more.Limited {
		a.Limited[by] += t
	}
}

// addDirection adds a direction, and the state of the leg it goes to.
func (d *DirectionCounters) addDirection(i *DirectionInfo, leg *datapath.Info) {
	d.Read += i.Read - i.counted.read
	d.Written += i.Written - i.counted.written
	d.Spliced += i.Spliced - i.counted.spliced
	d.Retransmitted += max(0, leg.Retransmitted-i.counted.retransmitted)
	d.SignalErrors += leg.SignalErrors
	for _, c := range i.Control {
		d.addAlgorithm(c)
	}
}

// addAlgorithm adds what happened under one algorithm.
func (d *DirectionCounters) addAlgorithm(c AlgorithmCounters) {
	if d.Control == nil {
		d.Control = map[string]AlgorithmCounters{}
	}
	sum := d.Control[c.Algorithm]
	sum.Algorithm = c.Algorithm
	sum.addCounters(c)
	d.Control[c.Algorithm] = sum
}

// rejections counts connections that were not relayed. The zero value is empty.
type rejections struct {
	mu sync.Mutex
	n  map[Reason]uint64
}

// countRejection counts one connection.
func (r *rejections) countRejection(reason Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n == nil {
		r.n = map[Reason]uint64{}
	}
	r.n[reason]++
}

// copyCounts returns a copy of the counts.
func (r *rejections) copyCounts() map[Reason]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.n)
}

// peerKey names a peer of a tunnel.
type peerKey struct{ listener, peer string }

// compareTo orders peers by listener, then name.
func (p PeerCounters) compareTo(q PeerCounters) int {
	return cmp.Or(strings.Compare(p.Listener, q.Listener), strings.Compare(p.Peer, q.Peer))
}

// maxPeers bounds the peers that are counted one by one: certificates may name any number.
const maxPeers = 4096

// totals are the counters of connections that are over, and of how many were opened. The zero value is ready.
type totals struct {
	mu     sync.Mutex
	names  configuredNames // what is counted without connections, too
	routes map[routeKey]*route
	peers  map[peerKey]*PeerCounters
}

// routeKey names a route.
type routeKey struct{ listener, rule string }

// compareTo orders routes by listener, then rule.
func (k routeKey) compareTo(l routeKey) int {
	return cmp.Or(strings.Compare(k.listener, l.listener), strings.Compare(k.rule, l.rule))
}

// route counts the connections of one listener and one rule.
type route struct {
	routeKey
	counts   RouteCounters // but for Duration; Down and Up are of connections that are over
	duration *datapath.Durations
}

// countOpened counts a connection that is relayed now, under the algorithms of its directions. It returns the
// counters that countClosed needs; p is nil for a client that is no named peer.
func (t *totals) countOpened(k routeKey, peer, down, up string) (r *route, p *PeerCounters) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.routes == nil {
		t.routes = map[routeKey]*route{}
	}
	r = t.routes[k]
	if r == nil {
		counts := RouteCounters{Listener: k.listener, Rule: k.rule, Closed: map[Cause]uint64{}}
		r = &route{k, counts, datapath.NewDurations(durationBounds)}
		t.routes[k] = r
	}
	// Algorithms are listed from the first connection on, so that their metrics begin at 0.
	r.counts.Down.addAlgorithm(AlgorithmCounters{Algorithm: down})
	r.counts.Up.addAlgorithm(AlgorithmCounters{Algorithm: up})
	r.counts.Opened++
	r.counts.Active++
	if p = t.peerCounters(peerKey{k.listener, peer}); p != nil {
		p.Opened++
		p.Active++
	}
	return r, p
}

// peerCounters returns the counters of a peer. nil: it has no name, or no other name than its address. Of such
// peers there may be any number. The caller holds t.mu.
func (t *totals) peerCounters(k peerKey) *PeerCounters {
	if n := t.peers[k]; n != nil || k.peer == "" {
		return n
	}
	if _, err := netip.ParseAddr(k.peer); err == nil || len(t.peers) >= maxPeers {
		return nil
	}
	if t.peers == nil {
		t.peers = map[peerKey]*PeerCounters{}
	}
	t.peers[k] = &PeerCounters{Listener: k.listener, Peer: k.peer}
	return t.peers[k]
}

// countClosed counts a relayed connection that is over. last is its last state.
func (t *totals) countClosed(r *route, p *PeerCounters, last *FlowInfo, cause Cause, lived time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r.counts.Active--
	r.counts.Closed[cause]++
	r.counts.Down.addDirection(&last.Down, &last.Client)
	r.counts.Up.addDirection(&last.Up, &last.Server)
	r.duration.Observe(lived)
	if r.counts.Active == 0 && !t.names.hasRoute(r.routeKey) {
		delete(t.routes, r.routeKey)
	}
	if p == nil {
		return
	}
	p.Active--
	p.Retransmitted += last.Client.Retransmitted
	if k := (peerKey{p.Listener, p.Peer}); p.Active == 0 && !t.names.hasPeer(k) {
		delete(t.peers, k)
	}
}

// dropStale forgets the counters of listeners, rules and peers that cfg does not have, each once it
// has no connections.
func (t *totals) dropStale(cfg *config.Config) {
	names := namesOf(cfg)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.names = names
	maps.DeleteFunc(t.routes, func(k routeKey, r *route) bool { return r.counts.Active == 0 && !names.hasRoute(k) })
	maps.DeleteFunc(t.peers, func(k peerKey, p *PeerCounters) bool { return p.Active == 0 && !names.hasPeer(k) })
}

// copyTotals returns copies of all counters; peers are in no order.
func (t *totals) copyTotals() (map[routeKey]*RouteCounters, []PeerCounters) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := map[routeKey]*RouteCounters{}
	for k, r := range t.routes {
		row := r.counts
		row.Closed, row.Duration = maps.Clone(row.Closed), r.duration.Snapshot()
		row.Down.Control, row.Up.Control = maps.Clone(row.Down.Control), maps.Clone(row.Up.Control)
		rows[k] = &row
	}
	peers := make([]PeerCounters, 0, len(t.peers))
	for _, n := range t.peers {
		peers = append(peers, *n)
	}
	return rows, peers
}

// addRetransmitted adds what a live connection has sent to its peer again so far. peers are sorted.
func addRetransmitted(peers []PeerCounters, f *FlowInfo) {
	of := PeerCounters{Listener: f.Listener, Peer: f.Peer}
	if i, found := slices.BinarySearchFunc(peers, of, PeerCounters.compareTo); found {
		peers[i].Retransmitted += f.Client.Retransmitted
	}
}

// configuredNames are the names of a configuration.
type configuredNames struct {
	rules    map[string]bool // with the empty name, of the defaults
	listsAll map[string]bool // by listener: whether it has no peers but those that it lists
	peers    map[peerKey]bool
}

// namesOf returns the names of cfg.
func namesOf(cfg *config.Config) configuredNames {
	n := configuredNames{map[string]bool{"": true}, map[string]bool{}, map[peerKey]bool{}}
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

// hasRoute reports whether both the listener and the rule are in the configuration.
func (n *configuredNames) hasRoute(k routeKey) bool {
	_, there := n.listsAll[k.listener]
	return there && n.rules[k.rule]
}

// hasPeer reports whether the configuration has the peer, or may: certificates name peers that it does not list.
func (n *configuredNames) hasPeer(k peerKey) bool {
	all, there := n.listsAll[k.listener]
	return there && (!all || n.peers[k])
}
