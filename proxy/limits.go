package proxy

import (
	"github.com/penstock-net/penstock/proxy/config"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// Descriptors kept back from connections: listeners, telemetry, timers, the
// resolver, files, and room to accept a connection in order to refuse it.
const descriptorHeadroom = 128

// descriptorsPerConnection counts both sockets. Pipes for splicing have a
// bound of their own, pipeShare of what there is; beyond it bytes are copied.
// So have the sessions of tunnels' datagrams, each of which is a socket.
const (
	descriptorsPerConnection = 2
	pipeShare                = 8       // one eighth of all descriptors
	sessionShare             = 4       // a quarter of the rest, where there are tunnels
	maxSessions              = 1 << 14 // of one tunnel
)

// Descriptors is how the process's descriptors are divided.
type Descriptors struct {
	Total       int // RLIMIT_NOFILE
	Connections int // connections that fit
	Pipes       int // pipes that may be in use for splicing
	Sessions    int // of datagrams, in each tunnel
}

// DescriptorBudget divides RLIMIT_NOFILE, which Go has raised to its hard limit,
// for a proxy with so many tunnels.
func DescriptorBudget(tunnels int) Descriptors {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		lim.Cur = 1024 // POSIX promises less, Linux starts with this
	}
	return divideDescriptors(int(min(lim.Cur, 1<<30)), tunnels)
}

func divideDescriptors(total, tunnels int) Descriptors {
	usable := max(0, total-min(descriptorHeadroom, total/4))
	pipes := usable / pipeShare / 2 // two descriptors each
	rest := usable - 2*pipes
	sessions := 0
	if tunnels > 0 {
		sessions = min(rest/sessionShare/tunnels, maxSessions)
	}
	return Descriptors{
		Total:       total,
		Connections: max(1, (rest-sessions*tunnels)/descriptorsPerConnection),
		Pipes:       max(1, pipes),
		Sessions:    sessions,
	}
}

// sourceShare is the part of all connections that one client host may have
// unless limits.per_source says otherwise.
const sourceShare = 4 // a quarter

// descriptors divides them for what c has open.
func descriptors(c config.Config) Descriptors {
	tunnels := 0
	for _, l := range c.Listeners {
		if l.Tunnels() {
			tunnels++
		}
	}
	return DescriptorBudget(tunnels)
}

// limiter counts connections against their limits; 0 is no limit.
type limiter struct {
	global, perSource int
	sparesLoopback    bool // perSource is the default: clients on loopback have no bound of their own

	mu      sync.Mutex
	active  int
	sources map[netip.Addr]int
}

// change puts the limits of cfg into force. Who is in already stays.
func (l *limiter) change(cfg config.Config, lanes []*listenerState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.global = descriptors(cfg).Connections
	if cfg.Limits.Connections > 0 {
		l.global = min(l.global, cfg.Limits.Connections)
	}
	l.perSource, l.sparesLoopback = max(1, l.global/sourceShare), true
	if given := cfg.Limits.PerSource; given != nil {
		l.perSource, l.sparesLoopback = *given, false
	}
	for i, lane := range lanes {
		lane.max = cfg.Listeners[i].Connections
	}
}

// lane is the part of the limiter that belongs to one listener.
type lane struct {
	max    int // 0: no limit
	active int // guarded by limiter.mu
}

// enter counts a connection in, or says which limit it met.
func (l *limiter) enter(ln *lane) (Reason, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.global > 0 && l.active >= l.global:
		return RejectedGlobalLimit, false
	case ln.max > 0 && ln.active >= ln.max:
		return RejectedListenerLimit, false
	}
	l.active++
	ln.active++
	return "", true
}

func (l *limiter) leave(ln *lane) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.active--
	ln.active--
}

// enterSource counts a connection of one client host in.
func (l *limiter) enterSource(addr netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	host := sourceHost(addr)
	bound := l.perSource > 0 && !(l.sparesLoopback && host.IsLoopback())
	if bound && l.sources[host] >= l.perSource {
		return false
	}
	if l.sources == nil {
		l.sources = map[netip.Addr]int{}
	}
	l.sources[host]++
	return true
}

func (l *limiter) leaveSource(addr netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	host := sourceHost(addr)
	if l.sources[host]--; l.sources[host] <= 0 {
		delete(l.sources, host)
	}
}

func (l *limiter) counts() (active, sources, limit int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.active, len(l.sources), l.global
}

func (l *limiter) laneActive(ln *lane) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return ln.active
}

// sourceHost is what counts as one client: an IPv4 address, or an IPv6 /64,
// since any host may use all of its own.
func sourceHost(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if !addr.Is6() {
		return addr
	}
	p, err := addr.Prefix(64)
	if err != nil {
		return addr
	}
	return p.Addr()
}
