package proxy

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Descriptors kept back from connections: listeners, timers, the resolver, files, and room to
// accept a connection in order to refuse it. Connections to telemetry are counted besides.
const descriptorHeadroom = 128

// Each port of telemetry may have one of portShare of all descriptors.
const (
	portShare   = 32
	minPortConn = 8
	maxPortConn = 64
)

// descriptorsPerConnection counts both sockets. Pipes for splicing have a
// bound of their own, pipeShare of what there is; beyond it bytes are copied.
// So have attempts to reach further addresses of names, attemptShare; beyond it one
// follows another. So have the sessions of tunnels' datagrams, each of which is a socket:
// each tunnel has as many as it asks for, or its part of sessionShare.
const (
	descriptorsPerConnection = 2
	descriptorsPerListener   = 2       // WireGuard has a socket for each family
	pipeShare                = 8       // one eighth of all descriptors
	attemptShare             = 16      // one sixteenth
	lookupShare              = 8       // one eighth; lookups beyond it wait
	sessionShare             = 4       // a quarter of the rest, where there are tunnels
	maxSessions              = 1 << 14 // of one tunnel
)

// Descriptors is how the process's descriptors are divided.
type Descriptors struct {
	Total       int            // RLIMIT_NOFILE
	Connections int            // connections that fit
	Pipes       int            // pipes that may be in use for splicing
	Attempts    int            // connections that may be made beside others towards the same names
	Lookups     int            // names looked up at a time, each for one family
	Sessions    map[string]int // of datagrams, by the names of tunnels
	Port        int            // connections that each port of telemetry may have: pages, health, socket for hints
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
	asking := slices.DeleteFunc(slices.Clone(listeners), func(l config.Listener) bool { return sessionBound(l) == 0 })
	slices.SortStableFunc(asking, func(a, b config.Listener) int { return cmp.Compare(sessionBound(a), sessionBound(b)) })
	left := rest / sessionShare
	for i, l := range asking { // who asks for less leaves it to the others
		n := min(sessionBound(l), left/(len(asking)-i))
		d.Sessions[l.Name] = n
		left -= n
		rest -= n
	}
	d.Connections = max(1, rest/descriptorsPerConnection)
	return d
}

// telemetryPorts is how many ports telemetry listens at.
func telemetryPorts(t *config.Telemetry) (n int) {
	for _, on := range []bool{t.Address != "off", t.Health != "off", t.Hints.Socket != ""} {
		if on {
			n++
		}
	}
	return n
}

// sessionBound is how many of datagrams the listener would have at most.
func sessionBound(l config.Listener) int {
	if !l.Mode.Tunnels() || l.WireGuard.Path() == config.DatapathKernel {
		return 0
	}
	each := l.Tunnel.Datagrams().Sessions
	if peers := len(l.WireGuard.Peers); l.Mode == access.WireGuard {
		return min(each*peers, maxSessions)
	}
	return min(each*maxSessions, maxSessions) // how many peers there are nobody knows
}

// sourceShare is the part of all connections that one client host may have
// unless limits.per_source says otherwise.
const sourceShare = 4 // a quarter

// limiter counts connections against their limits; 0 is no limit.
type limiter struct {
	global, perSource int
	configured        bool // global is the configuration's, not what descriptors have room for
	sparesLoopback    bool // perSource is the default: clients on loopback have no bound of their own

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

// named is a connection whose client has told who it is.
type named interface{ Peer() string }

// sourceOf is whom a connection to l counts against. A peer that is told apart by its
// address alone is a host.
func (l *listenerState) sourceOf(conn datapath.Conn) source {
	addr, name := addrPort(conn.RemoteAddr()).Addr(), ""
	if c, ok := conn.(named); ok {
		name = c.Peer()
	} else if t := l.Tunnel(); t != nil {
		name = t.Peer(addr)
	}
	if name == "" {
		return source{host: datapath.Host(addr)}
	}
	if a, err := netip.ParseAddr(name); err == nil {
		return source{host: datapath.Host(a)}
	}
	return source{peer: peerKey{l.cfg.Name, name}}
}

// applyLimits puts the limits of cfg into force. Who is in already stays.
func (l *limiter) applyLimits(cfg config.Config, listeners []*listenerState) {
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
	for _, in := range listeners {
		in.max = in.cfg.Connections
	}
}

// share is the part of the limiter that belongs to one listener.
type share struct {
	max    int // 0: no limit
	active int // guarded by limiter.mu
}

// admitConnection counts a connection in, or says which limit it met.
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

func (l *limiter) releaseConnection(of *share) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.active--
	of.active--
}

// enterSource counts a connection of one client in; nil: it has as many as it may.
func (l *limiter) enterSource(of source) *client {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.sources[of]
	if c == nil {
		c = &client{source: of}
	}
	bound := l.perSource > 0 && !(l.sparesLoopback && of.host.IsLoopback())
	if bound && c.active >= l.perSource {
		return nil
	}
	if l.sources == nil {
		l.sources = map[source]*client{}
	}
	l.sources[of] = c
	c.active++
	return c
}

func (l *limiter) leaveSource(c *client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.active--; c.active == 0 {
		delete(l.sources, c.source)
	}
}

// raise is what raises the global limit.
func (l *limiter) raise() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.configured {
		return "limits.connections"
	}
	return raises[RejectedDescriptors]
}

func (l *limiter) currentCounts() (active, sources, limit int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.active, len(l.sources), l.global
}

func (l *limiter) activeIn(of *share) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return of.active
}
