package proxy

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// descriptorHeadroom descriptors are kept back from connections: for listeners, timers, the resolver, files, and
// to accept a connection in order to refuse it. Connections to telemetry are counted apart.
const descriptorHeadroom = 128

// Each port of telemetry may have one of portShare of all descriptors, within these bounds.
const (
	portShare   = 32
	minPortConn = 8
	maxPortConn = 64
)

// The division of descriptors. Pipes, further attempts to reach names, name lookups and the sessions of
// datagrams each have a bound. Beyond it bytes are copied, attempts and lookups wait, and sessions end early.
const (
	descriptorsPerConnection = 2       // the sockets of both legs
	descriptorsPerListener   = 2       // WireGuard has a socket for each family
	pipeShare                = 8       // one eighth of all descriptors
	attemptShare             = 16      // one sixteenth
	lookupShare              = 8       // one eighth
	sessionShare             = 4       // a quarter of the rest, where there are tunnels
	maxSessions              = 1 << 14 // of one tunnel
)

// Descriptors is how the process's descriptors are divided.
type Descriptors struct {
	Total       int            // RLIMIT_NOFILE
	Connections int            // connections that fit
	Pipes       int            // pipes that may be in use for splicing
	Attempts    int            // further connections under way to names that have several addresses
	Lookups     int            // names looked up at a time, each for one family
	Sessions    map[string]int // of datagrams, by the names of tunnels
	Port        int            // connections to each port of telemetry: pages, health, socket for hints
}

// DescriptorBudget divides RLIMIT_NOFILE, which Go has raised to its hard limit,
// among telemetry, listeners and connections.
func DescriptorBudget(cfg *config.Config) Descriptors {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		lim.Cur = 1024 // POSIX promises less, Linux starts with this
	}
	return divideDescriptors(int(min(lim.Cur, 1<<30)), cfg)
}

// divideDescriptors divides total descriptors. Ports of telemetry, listeners and the headroom come first, then
// fixed shares for pipes, attempts and lookups. Sessions have up to a quarter of the rest, and what remains is for
// connections. Each part but sessions is at least 1, also where total is too small for all.
func divideDescriptors(total int, cfg *config.Config) Descriptors {
	listeners := cfg.Listeners
	port := min(maxPortConn, max(minPortConn, total/portShare))
	usable := max(0, total-min(descriptorHeadroom, total/4)-telemetryPorts(&cfg.Telemetry)*port-
		len(listeners)*descriptorsPerListener)
	pipes := usable / pipeShare / 2 // two descriptors each
	attempts := usable / attemptShare
	lookups := max(4, usable/lookupShare) // both families of two clients
	rest := max(0, usable-2*pipes-attempts-lookups)
	d := Descriptors{
		Total: total, Pipes: max(1, pipes), Attempts: attempts, Lookups: lookups, Sessions: map[string]int{}, Port: port,
	}
	asking := slices.DeleteFunc(slices.Clone(listeners), func(l access.Listener) bool { return sessionBound(l) == 0 })
	slices.SortStableFunc(asking, func(a, b access.Listener) int { return cmp.Compare(sessionBound(a), sessionBound(b)) })
	left := rest / sessionShare
	for i, l := range asking { // the smallest first: what it does not ask for is left to the others
		n := min(sessionBound(l), left/(len(asking)-i))
		d.Sessions[l.Name] = n
		left -= n
		rest -= n
	}
	d.Connections = max(1, rest/descriptorsPerConnection)
	return d
}

// telemetryPorts returns how many ports telemetry listens on.
func telemetryPorts(t *config.Telemetry) (n int) {
	for _, on := range []bool{t.Address != "off", t.Health != "off", t.Hints.Socket != ""} {
		if on {
			n++
		}
	}
	return n
}

// sessionBound returns how many sessions of datagrams a listener asks for. Peers of modes other than wireguard
// are not known in advance.
func sessionBound(l access.Listener) int {
	if !l.Mode.Tunnels() || l.WireGuard.DatapathOrDefault() == access.DatapathKernel {
		return 0
	}
	each := l.Tunnel.Datagrams().Sessions
	if peers := len(l.WireGuard.Peers); l.Mode == access.WireGuard {
		return min(each*peers, maxSessions)
	}
	return min(each*maxSessions, maxSessions)
}

// sourceShare is the part of all connections that one client host may have
// unless limits.per_source says otherwise.
const sourceShare = 4 // a quarter

// limiter counts connections against their limits; 0 is no limit. The zero value has none.
type limiter struct {
	global, perSource int
	configured        bool // global is the configuration's; descriptors have room for more
	sparesLoopback    bool // perSource is the default, which does not bound clients on loopback

	mu      sync.Mutex
	active  int
	sources map[source]*client
}

// client counts the connections of one source.
type client struct {
	source
	active int // guarded by limiter.mu
}

// source is what counts as one client: a host, or a peer of a tunnel with all its addresses.
type source struct {
	host netip.Addr
	peer peerKey
}

// share is what the limiter counts for one listener.
type share struct {
	max    int // 0: no limit
	active int // guarded by limiter.mu
}

// applyLimits puts the limits of cfg into force, and those of listeners, which are given with the share of each.
// Connections that are over a new limit stay.
func (l *limiter) applyLimits(cfg config.Config, listeners map[*share]int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.global = DescriptorBudget(&cfg).Connections
	if cfg.Limits.Connections > 0 {
		l.global = min(l.global, cfg.Limits.Connections)
	}
	l.perSource, l.sparesLoopback = max(1, l.global/sourceShare), true
	if given := cfg.Limits.PerSource; given != nil {
		l.perSource, l.sparesLoopback = *given, false
	}
	l.configured = cfg.Limits.Connections == l.global
	for of, most := range listeners {
		of.max = most
	}
}

// admitConnection counts a connection in, or returns the limit that it met.
func (l *limiter) admitConnection(of *share) (Reason, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.global > 0 && l.active >= l.global:
		return RejectedGlobalLimit, false
	case of.max > 0 && of.active >= of.max:
		return RejectedListenerLimit, false
	}
	l.active++
	of.active++
	return "", true
}

// admitMoved counts a connection in that another process has let in, whatever the limits are.
func (l *limiter) admitMoved(of *share, from source) *client {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.active++
	of.active++
	return l.addSource(from)
}

// releaseConnection undoes admitConnection.
func (l *limiter) releaseConnection(of *share) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.active--
	of.active--
}

// enterSource counts a connection of one client in. It returns nil if the client has as many as it may have.
func (l *limiter) enterSource(of source) *client {
	l.mu.Lock()
	defer l.mu.Unlock()
	bound := l.perSource > 0 && !(l.sparesLoopback && of.host.IsLoopback())
	if c := l.sources[of]; bound && c != nil && c.active >= l.perSource {
		return nil
	}
	return l.addSource(of)
}

// addSource counts a connection of one client in. mu is held.
func (l *limiter) addSource(of source) *client {
	c := l.sources[of]
	if c == nil {
		c = &client{source: of}
		if l.sources == nil {
			l.sources = map[source]*client{}
		}
		l.sources[of] = c
	}
	c.active++
	return c
}

// leaveSource undoes enterSource.
func (l *limiter) leaveSource(c *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.active--; c.active == 0 {
		delete(l.sources, c.source)
	}
}

// isConfigured reports whether the global limit is the configuration's rather than that of descriptors.
func (l *limiter) isConfigured() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.configured
}

// currentCounts returns how many connections and client hosts there are, and how many connections may be.
func (l *limiter) currentCounts() (active, sources, limit int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.active, len(l.sources), l.global
}

// activeIn returns how many connections a listener has.
func (l *limiter) activeIn(of *share) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return of.active
}
