//go:build !nonetstack

package proxy

import (
	"fmt"
	"log/slog"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/tunnel"
	"github.com/penstock-net/penstock/proxy/tunnel/userspace"
)

// tunnelListener is a tunnel that this process ends, as a Listener.
type tunnelListener struct{ *userspace.Listener }

// openTunnelListener opens a listener that ends a tunnel in a stack of its own.
func openTunnelListener(l ListenerConfig, clock func() cc.Time, log *slog.Logger) (Listener, error) {
	settings, err := l.tunnelSettings()
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	stack, err := netstack.New(netstack.Config{Clock: clock, MTU: l.MTU()})
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	outside, err := l.openOutside(settings, stack, clock, log)
	if err != nil {
		_ = stack.Close() // no packet has come through it
		return nil, err
	}
	return tunnelListener{userspace.Listen(l.Name, stack, outside)}, nil
}

// openOutside opens the part of the tunnel that carries its packets over the network.
func (l ListenerConfig) openOutside(s tunnel.Settings, stack *netstack.Stack, clock func() cc.Time,
	log *slog.Logger,
) (userspace.Outside, error) {
	switch l.Mode {
	case access.MASQUE:
		return userspace.ListenMASQUE(userspace.MASQUEConfig{
			Name: l.Name, Addr: l.Address, Certificate: s.Certificate, ClientCAs: s.Authorities, Tokens: s.Tokens,
			Open: l.MASQUE.Open, Pool: l.MASQUE.Pool, Clock: clock, Log: log,
		}, stack)
	case access.TUN:
		return userspace.OpenTUN(userspace.TUNConfig{Name: l.Name, Device: l.Device, MTU: l.MTU(), Log: log}, stack)
	}
	port, err := l.listenPort()
	if err != nil {
		return nil, err
	}
	return userspace.ListenWireGuard(userspace.WireGuardConfig{
		Name: l.Name, Port: port, PrivateKey: l.WireGuard.PrivateKey,
		Peers: s.Peers, Pool: s.Pool, MTU: l.MTU(), Log: log,
	}, stack)
}

// Apply implements Listener.
func (w tunnelListener) Apply(next ListenerConfig) (commit func(), err error) {
	s, err := next.tunnelSettings()
	if err != nil {
		return nil, err
	}
	return func() {}, w.Listener.Apply(s)
}

// Tunnel implements Listener.
func (w tunnelListener) Tunnel() tunnel.Listener { return w.Listener }
