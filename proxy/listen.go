package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/destination"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
	"github.com/penstock-net/penstock/proxy/tunnel/kernelspace"
)

// Listener takes clients in, at a socket or out of a tunnel.
type Listener interface {
	ingress.Listener
	// Apply puts the settings that may change while running into force, for clients that come
	// from now on. After an error nothing has changed. Settings that decide about clients together
	// with the Server's are in force once commit has been called.
	Apply(ListenerConfig) (commit func(), err error)
	// Tunnel returns the tunnel that the clients are inside of. nil: they are in none.
	Tunnel() tunnel.Listener
}

// ListenerConfig is what a Listener is opened with, and what Apply changes it to.
type ListenerConfig struct {
	access.Listener
	Handshake time.Duration // for a client to name its destination
	Datagrams int           // sessions of a tunnel's datagrams that there are descriptors for
	// KernelLacks names the part of the configuration that the kernel's WireGuard cannot do. nil: none.
	KernelLacks error
	// KernelRules are the rules for packets that the kernel forwards past the proxy.
	KernelRules []policy.RuleSettings
}

// newListenerConfig returns the settings of listener l of cfg.
func newListenerConfig(cfg *config.Config, l access.Listener, d Descriptors) ListenerConfig {
	return ListenerConfig{
		Listener: l, Handshake: cfg.Limits.HandshakeTimeout, Datagrams: d.Sessions[l.Name], KernelLacks: cfg.KernelLacks(&l),
		KernelRules: cfg.KernelRules(&l),
	}
}

// socketListener is a TCP listener as a Listener.
type socketListener struct {
	*ingress.Socket
	log  *slog.Logger // for the configurations that Apply passes on
	held []*heldUDP   // the directions of UDP that do not pass; Server.Held reads them, also once they are closed
	// closeOnce closes held.
	closeOnce sync.Once
}

// Apply implements Listener.
func (w *socketListener) Apply(next ListenerConfig) (commit func(), err error) {
	return w.Socket.Apply(next.ingressConfig(w.log))
}

// Close implements ingress.Listener.
func (w *socketListener) Close() error {
	err := w.Socket.Close()
	w.closeOnce.Do(func() {
		for _, h := range w.held {
			h.close()
		}
	})
	if err != nil {
		return fmt.Errorf("proxy: close a listener: %w", err)
	}
	return nil
}

// Tunnel implements Listener.
func (*socketListener) Tunnel() tunnel.Listener { return nil }

// ingressConfig returns what the ingress needs of the configuration.
func (l ListenerConfig) ingressConfig(log *slog.Logger) ingress.Config {
	out := ingress.Config{
		Name: l.Name, Mode: l.Mode, Addr: l.Address, Target: l.Target,
		HandshakeTimeout: l.Handshake, Log: log,
	}
	for _, u := range l.Users {
		out.Auth = append(out.Auth, ingress.User{Name: u.Name, Password: string(u.Password)})
	}
	out.TrustedProxies = l.ProxyProtocol.From
	return out
}

// tunnelSettings returns the settings that may change while a tunnel runs.
func (l ListenerConfig) tunnelSettings() (s tunnel.Settings, err error) {
	s = tunnel.Settings{
		Datagrams: l.Listener.Tunnel.Datagrams(), Allow: l.Allow,
		Pool: l.WireGuard.Pool, Peers: l.WireGuard.Peers, Tokens: l.MASQUE.Tokens,
	}
	s.Datagrams.MaxSessions = l.Datagrams
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

// listenPort returns the port of a UDP listener.
func (l ListenerConfig) listenPort() (uint16, error) {
	_, port, _ := net.SplitHostPort(l.Address) // the check of the configuration has split it before
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	return uint16(n), nil
}

// kernelListener is a tunnel that the kernel ends, as a Listener.
type kernelListener struct {
	*kernelspace.WireGuard
	log *slog.Logger
}

// openKernelListener opens a listener of mode wireguard with the kernel's WireGuard. With datapath auto it
// refuses a configuration that the kernel cannot carry out.
func openKernelListener(
	ctx context.Context, l ListenerConfig, open ingress.Open, dp *kernel.Datapath, log *slog.Logger,
) (Listener, error) {
	if l.WireGuard.DatapathOrDefault() == access.DatapathAuto {
		if l.KernelLacks != nil {
			return nil, l.KernelLacks
		}
		if off := kernelspace.ForwardingOff(l.WireGuard.Pool); len(off) > 0 {
			return nil, fmt.Errorf("the kernel does not forward what is not TCP: sysctl -w %s=1", strings.Join(off, "=1 "))
		}
	}
	settings, err := l.kernelSettings()
	if err != nil {
		return nil, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	port, err := l.listenPort()
	if err != nil {
		return nil, err
	}
	w, err := kernelspace.Listen(ctx, kernelspace.Config{
		Name: l.Name, Interface: l.Interface(), Port: port, PrivateKey: l.WireGuard.PrivateKey, MTU: l.MTU(),
		Closed: destination.Closed(), Socket: l.ingressConfig(log), Open: open, Log: log,
		Dial: func(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error) {
			conn, err := dp.Dial(ctx, kernel.DialConfig{Target: target, Source: netip.AddrPortFrom(source, 0)})
			if err != nil {
				return nil, err // not a nil *kernel.Conn in an interface
			}
			return conn, nil
		},
	}, settings)
	if err != nil {
		return nil, err
	}
	return kernelListener{w, log}, nil
}

// kernelSettings returns the settings of the tunnel, with the rules for packets that the kernel forwards.
func (l ListenerConfig) kernelSettings() (kernelspace.Settings, error) {
	common, err := l.tunnelSettings()
	s := kernelspace.Settings{Settings: common, From: l.WireGuard.ReachableFrom}
	for _, r := range l.KernelRules {
		s.Rules = append(s.Rules, kernelRules(r)...)
	}
	return s, err
}

// kernelRules returns what a rule means for packets that show no server name. A rule by server name
// leaves TCP to the proxy, and refuses UDP and pings, which never show one.
func kernelRules(r policy.RuleSettings) []kernelspace.Rule {
	rule := kernelspace.Rule{
		Refuse: r.Refuse != "", Sources: r.Match.Sources, Targets: r.Match.Destinations,
		TCP: r.Match.Protocol == policy.TCP, UDP: r.Match.Protocol == policy.UDP, ICMP: r.Match.Protocol == policy.ICMP,
	}
	// A refusal covers every form of an address, such as NAT64; an allowance covers the plain one.
	if rule.Refuse {
		rule.Targets = destination.Refused(rule.Targets)
	}
	for _, p := range r.Match.Ports {
		rule.Ports = append(rule.Ports, kernelspace.PortRange(p))
	}
	if len(r.Match.ServerNames) == 0 {
		return []kernelspace.Rule{rule}
	}
	if rule.TCP {
		return nil
	}
	udp, icmp := rule, rule
	udp.Refuse, udp.UDP = true, true
	icmp.Refuse, icmp.ICMP = true, true
	return []kernelspace.Rule{udp, icmp}
}

// Apply implements Listener.
func (w kernelListener) Apply(next ListenerConfig) (commit func(), err error) {
	s, err := next.kernelSettings()
	if err != nil {
		return nil, err
	}
	// A tunnel stays with the kernel, so a configuration for user space alone is refused.
	if next.KernelLacks != nil {
		return nil, fmt.Errorf("the kernel ends the tunnel: %w", next.KernelLacks)
	}
	return w.WireGuard.Apply(s, next.ingressConfig(w.log))
}

// Tunnel implements Listener.
func (w kernelListener) Tunnel() tunnel.Listener { return w.WireGuard }
