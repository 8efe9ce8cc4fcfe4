package proxy

import (
	"fmt"
	"log/slog"
	"net"
	"strconv"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// openTunnel opens a listener that ends a tunnel in a stack of its own.
func openTunnel(l config.Listener, clock func() cc.Time, log *slog.Logger) (ingress.Listener, error) {
	stack, err := netstack.New(netstack.Config{Clock: clock, MTU: l.MTU()})
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	outside, err := openOutside(l, stack, clock, log)
	if err != nil {
		_ = stack.Close() // nothing has come through it
		return nil, err
	}
	return tunnel.Listen(l.Name, stack, outside), nil
}

// openOutside opens what carries the tunnel's packets.
func openOutside(l config.Listener, stack *netstack.Stack, clock func() cc.Time, log *slog.Logger) (tunnel.Outside, error) {
	switch access.Mode(l.Mode) {
	case access.MASQUE:
		return openMASQUE(l, stack, clock, log)
	case access.TUN:
		t, err := tunnel.OpenTUN(tunnel.TUNConfig{Name: l.Name, Device: l.Device, MTU: l.MTU(), Log: log}, stack)
		if err != nil {
			return nil, err // not a nil *tunnel.TUN in an interface
		}
		return t, nil
	}
	_, port, _ := net.SplitHostPort(l.Address) // it has been checked, as the port has been
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	w, err := tunnel.ListenWireGuard(tunnel.WireGuardConfig{
		Name: l.Name, Port: uint16(n), PrivateKey: access.Key(l.WireGuard.PrivateKey), Peers: l.WireGuard.Access(), Pool: config.Prefixes(l.WireGuard.Pool), MTU: l.MTU(), Log: log,
	}, stack)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// openMASQUE opens a listener of mode masque.
func openMASQUE(l config.Listener, stack *netstack.Stack, clock func() cc.Time, log *slog.Logger) (tunnel.Outside, error) {
	certificate, err := l.TLS.Pair()
	if err != nil {
		return nil, fmt.Errorf("config: listener %q: tls: %w", l.Name, err)
	}
	authorities, err := l.TLS.Authorities()
	if err != nil {
		return nil, fmt.Errorf("config: listener %q: tls.client_ca: %w", l.Name, err)
	}
	m, err := tunnel.ListenMASQUE(tunnel.MASQUEConfig{
		Name: l.Name, Addr: l.Address, Certificate: certificate, ClientCAs: authorities, Tokens: l.MASQUE.Access(),
		Open: l.MASQUE.Open, Pool: config.Prefixes(l.MASQUE.Pool), Clock: clock, Log: log,
	}, stack)
	if err != nil {
		return nil, err // not a nil *tunnel.MASQUE in an interface
	}
	return m, nil
}

// TunnelInfo is how it goes with a listener that ends a tunnel.
type TunnelInfo struct {
	Listener, Mode string
	tunnel.Status
}

// Tunnels returns how it goes with the tunnels, in the order of the configuration.
func (s *Server) Tunnels() []TunnelInfo {
	var out []TunnelInfo
	for _, l := range s.lanes {
		t, ok := l.in.(*tunnel.Listener)
		if !ok {
			continue
		}
		status, err := t.Status()
		if err != nil { // its counters are good
			s.log.Warn("peers of a tunnel cannot be listed", "listener", l.cfg.Name, "err", err)
		}
		out = append(out, TunnelInfo{l.cfg.Name, string(l.cfg.Mode), status})
	}
	return out
}

// setPeers gives the listeners the users, peers and tokens of next, which has been
// checked. Should one fail all the same, those before it get theirs back.
func (s *Server) setPeers(next *config.Config) error {
	present := &s.settings().cfg
	for i, l := range s.lanes {
		err := l.setPeers(next.Listeners[i])
		if err == nil {
			continue
		}
		for j := range i {
			_ = s.lanes[j].setPeers(present.Listeners[j])
		}
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}

// setPeers gives the listener the users or peers of cfg, or its tokens and certificate.
func (l *listenerState) setPeers(cfg config.Listener) error {
	if asking, ok := l.in.(interface{ SetUsers([]ingress.User) }); ok {
		asking.SetUsers(accounts(cfg))
		return nil
	}
	t, ok := l.in.(*tunnel.Listener)
	if !ok {
		return nil
	}
	switch o := t.Outside().(type) {
	case *tunnel.WireGuard:
		o.SetPool(config.Prefixes(cfg.WireGuard.Pool))
		return o.SetPeers(cfg.WireGuard.Access())
	case *tunnel.MASQUE:
		certificate, err := cfg.TLS.Pair()
		if err != nil {
			return err
		}
		authorities, err := cfg.TLS.Authorities()
		if err != nil {
			return err
		}
		if err := o.SetTokens(cfg.MASQUE.Access()); err != nil {
			return err
		}
		o.SetAuthorities(authorities)
		o.SetCertificate(certificate)
	}
	return nil
}
