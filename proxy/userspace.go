//go:build !nonetstack

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
	"github.com/penstock-net/penstock/proxy/tunnel"
	"github.com/penstock-net/penstock/proxy/tunnel/userspace"
)

// tunnelWay is a tunnel as a Way.
type tunnelWay struct{ *userspace.Listener }

// openTunnel opens a listener that ends a tunnel in a stack of its own.
func openTunnel(l WayConfig, clock func() cc.Time, log *slog.Logger) (Way, error) {
	settings, err := l.settings()
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	stack, err := netstack.New(netstack.Config{Clock: clock, MTU: l.MTU()})
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	outside, err := l.openOutside(settings, stack, clock, log)
	if err != nil {
		_ = stack.Close() // nothing has come through it
		return nil, err
	}
	return tunnelWay{userspace.Listen(l.Name, stack, outside)}, nil
}

// openOutside opens what carries the tunnel's packets.
func (l WayConfig) openOutside(s tunnel.Settings, stack *netstack.Stack, clock func() cc.Time,
	log *slog.Logger,
) (userspace.Outside, error) {
	switch access.Mode(l.Mode) {
	case access.MASQUE:
		return userspace.ListenMASQUE(userspace.MASQUEConfig{
			Name: l.Name, Addr: l.Address, Certificate: s.Certificate, ClientCAs: s.Authorities, Tokens: s.Tokens,
			Open: l.MASQUE.Open, Pool: config.Prefixes(l.MASQUE.Pool), Clock: clock, Log: log,
		}, stack)
	case access.TUN:
		return userspace.OpenTUN(userspace.TUNConfig{Name: l.Name, Device: l.Device, MTU: l.MTU(), Log: log}, stack)
	}
	_, port, _ := net.SplitHostPort(l.Address) // it has been checked, as the port has been
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	return userspace.ListenWireGuard(userspace.WireGuardConfig{
		Name: l.Name, Port: uint16(n), PrivateKey: access.Key(l.WireGuard.PrivateKey), Peers: s.Peers, Pool: s.Pool, MTU: l.MTU(), Log: log,
	}, stack)
}

// settings are what may change of the tunnel while it runs.
func (l WayConfig) settings() (s tunnel.Settings, err error) {
	s = tunnel.Settings{
		Datagrams: l.Listener.Tunnel.Datagrams(), Pool: config.Prefixes(l.WireGuard.Pool), Peers: l.WireGuard.Access(), Tokens: l.MASQUE.Access(),
	}
	s.Datagrams.Most = l.Datagrams
	if l.TLS.Certificate != "" {
		if s.Certificate, err = l.TLS.Pair(); err != nil {
			return s, fmt.Errorf("tls: %w", err)
		}
	}
	if s.Authorities, err = l.TLS.Authorities(); err != nil {
		return s, fmt.Errorf("tls.client_ca: %w", err)
	}
	return s, nil
}

// Apply implements Way.
func (w tunnelWay) Apply(next WayConfig) error {
	s, err := next.settings()
	if err != nil {
		return err
	}
	return w.Listener.Apply(s)
}

// Tunnel implements Way.
func (w tunnelWay) Tunnel() tunnel.Listener { return w.Listener }
