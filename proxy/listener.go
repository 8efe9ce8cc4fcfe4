package proxy

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/destination"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// openListener is a Listener that is open. It outlives the configurations that it is in.
type openListener struct {
	Listener
	now       atomic.Pointer[listenerState] // as the configuration in force has it; nil: no configuration has yet
	handlers  sync.WaitGroup                // of its connections
	accepting chan struct{}                 // closed: it takes no more; nil: it has not begun
}

// listenerState is a listener as one configuration has it. It is never changed.
type listenerState struct {
	*openListener
	*listenerTotals
	cfg   access.Listener
	guard destination.Guard
}

// newListenerState returns the state of e under cfg. local reports whether an address is this machine's.
func newListenerState(
	e *openListener, t *listenerTotals, cfg access.Listener, local func(netip.Addr) (bool, error),
) *listenerState {
	l := &listenerState{openListener: e, listenerTotals: t, cfg: cfg}
	l.guard = destination.Guard{Allow: cfg.Allow, Captured: cfg.Mode.Captures(), Own: local}
	if via := e.Tunnel(); via != nil && cfg.Tunnel.Datagrams().Isolate {
		l.guard.Inner = func(a netip.Addr) bool { return via.Place(a) == tunnel.OfPeer }
	}
	return l
}

// trustsPeer reports whether connections from peer open with a PROXY header. The client
// that they count against is then not known before the header is read.
func (l *listenerState) trustsPeer(peer netip.Addr) bool {
	return destination.Contains(l.cfg.ProxyProtocol.From, peer)
}

// named is a connection that knows its client by a name.
type named interface{ Peer() string }

// sourceOf returns the client that a connection to l counts against. A peer that is known by its
// address alone is a host.
func (l *listenerState) sourceOf(conn datapath.Conn) source {
	addr, name := datapath.RemoteOf(conn).Addr(), ""
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

// peerEndpoints returns the last known address of each peer. Peers that never connected are absent; the
// result is nil for sockets.
func (l *listenerState) peerEndpoints() map[access.Key]netip.AddrPort {
	if l.Tunnel() == nil {
		return nil
	}
	is, err := l.Tunnel().Status()
	if err != nil {
		return nil
	}
	return tunnel.Endpoints(is.Peers)
}

// listenerTotals are the counters of all listeners of one name. They outlive a reload.
type listenerTotals struct {
	share
	setup, dial *datapath.Durations // from accept to relay; of successful dials
	taken       atomic.Uint64       // connections that came, be they refused or not
	refused     rejections
}

// newListenerTotals returns counters of a listener that is new.
func newListenerTotals() *listenerTotals {
	return &listenerTotals{setup: datapath.NewDurations(setupBounds), dial: datapath.NewDurations(setupBounds)}
}

// TunnelInfo is the state of a listener that ends a tunnel.
type TunnelInfo struct {
	Listener, Mode string
	Up             bool // packets get through, as far as this machine decides it
	tunnel.Status
}
