package proxy

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Way is one way in: what a Server asks of sockets and of tunnels alike.
type Way interface {
	ingress.Listener
	// Apply puts into force what of a configuration may change while running, for clients that
	// come from now on. An error changes nothing. What decides about clients together with the
	// server's settings is in force once commit has been called.
	Apply(WayConfig) (commit func(), err error)
	// Tunnel is what its clients are inside of; nil: they are in none.
	Tunnel() tunnel.Listener
}

// WayConfig is what a way in is opened and changed by.
type WayConfig struct {
	config.Listener
	Handshake time.Duration // for a client to say where it wants to go
	Datagrams int           // sessions of a tunnel's datagrams that there are descriptors for
	// KernelLacks is what of the configuration the kernel's WireGuard would not do; nil: nothing.
	KernelLacks error
	// KernelRules are those for what the kernel takes out of the tunnel past the proxy.
	KernelRules []config.Rule
}

// wayConfig is how a Way is told of a listener.
func wayConfig(cfg *config.Config, l config.Listener, d Descriptors) WayConfig {
	return WayConfig{
		Listener: l, Handshake: cfg.Limits.HandshakeTimeout, Datagrams: d.Sessions[l.Name], KernelLacks: cfg.KernelLacks(&l),
		KernelRules: cfg.KernelRules(&l),
	}
}

// openWay opens a listener of whatever kind, at socket unless that is nil.
func openWay(
	ctx context.Context, l WayConfig, socket *net.TCPListener, clock func() cc.Time, open ingress.Open,
	dp *kernel.Datapath, log *slog.Logger,
) (Way, error) {
	if l.Mode.Tunnels() && l.WireGuard.Path() != config.DatapathNetstack {
		way, err := openInKernel(ctx, l, open, dp, log)
		if err == nil || l.WireGuard.Path() == config.DatapathKernel || !config.Netstack {
			return way, err // there is nothing else
		}
		log.Info("tunnel: netstack ends it", "listener", l.Name, "why", err)
	}
	if l.Mode.Tunnels() {
		return openTunnel(l, clock, log)
	}
	cfg := l.ingressConfig(log)
	cfg.Socket = socket
	in, err := ingress.Listen(ctx, cfg, open)
	if err != nil {
		return nil, err
	}
	return &socketWay{in, log}, nil
}

// socketWay is a TCP listener as a Way.
type socketWay struct {
	*ingress.Socket
	log *slog.Logger
}

// Apply implements Way.
func (w *socketWay) Apply(next WayConfig) (commit func(), err error) {
	return w.Socket.Apply(next.ingressConfig(w.log))
}

// Tunnel implements Way.
func (*socketWay) Tunnel() tunnel.Listener { return nil }

// ingressConfig is the listener's part of the configuration in the ingress's terms.
func (l WayConfig) ingressConfig(log *slog.Logger) ingress.Config {
	out := ingress.Config{
		Name: l.Name, Mode: l.Mode, Addr: l.Address, Target: l.Target,
		HandshakeTimeout: l.Handshake, Log: log,
	}
	for _, u := range l.Users {
		out.Auth = append(out.Auth, ingress.User{Name: u.Name, Password: u.Password})
	}
	out.TrustedProxies = l.ProxyProtocol.From
	return out
}

// entrance is a way in that is open.
type entrance struct {
	Way
	now       atomic.Pointer[listenerState] // what the configuration says of it; nil: none in force has it yet
	handlers  sync.WaitGroup                // of its connections
	accepting chan struct{}                 // closed: it takes no more; nil: it has not begun
}

// listenerState is a listener as one configuration has it. It is never changed.
type listenerState struct {
	*entrance
	*listenerTotals
	cfg   config.Listener
	guard policy.Guard
}

func (s *Server) newListenerState(e *entrance, t *listenerTotals, cfg config.Listener) *listenerState {
	l := &listenerState{entrance: e, listenerTotals: t, cfg: cfg}
	l.guard = policy.Guard{
		Allow: cfg.Allow, Captured: cfg.Mode.Captures(), Own: s.parts.Local,
	}
	if via := e.Tunnel(); via != nil && cfg.Tunnel.Datagrams().Isolate {
		l.guard.Inner = func(a netip.Addr) bool { return via.Place(a) == tunnel.OfPeer }
	}
	return l
}

// listenerTotals are what is counted of all listeners of one name.
type listenerTotals struct {
	share
	setup, dial *datapath.Durations
	taken       atomic.Uint64
	refused     rejections
}

func newListenerTotals() *listenerTotals {
	return &listenerTotals{setup: datapath.NewDurations(setupBounds), dial: datapath.NewDurations(setupBounds)}
}

// TunnelInfo is how it goes with a listener that ends a tunnel.
type TunnelInfo struct {
	Listener, Mode string
	Up             bool // packets get through, as far as it is ours
	tunnel.Status
}

// Tunnels returns how it goes with the tunnels, in the order of the configuration.
func (s *Server) Tunnels() []TunnelInfo {
	var out []TunnelInfo
	for _, l := range s.currentSettings().listeners {
		t := l.Tunnel()
		if t == nil {
			continue
		}
		status, err := t.Status()
		if err != nil { // its counters are good
			s.log.Warn("peers of a tunnel cannot be listed", "listener", l.cfg.Name, "err", err)
		}
		out = append(out, TunnelInfo{l.cfg.Name, string(l.cfg.Mode), t.Health() == nil, status})
	}
	return out
}
