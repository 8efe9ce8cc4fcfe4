package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"

	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
	"github.com/penstock-net/penstock/proxy/tunnel/kernelspace"
)

// kernelWay is a tunnel that the kernel ends as a Way.
type kernelWay struct {
	*kernelspace.WireGuard
	log *slog.Logger
}

// openInKernel opens a listener of mode wireguard whose tunnel the kernel ends. Where
// that is for us to choose, it is refused to what the kernel would not do.
func openInKernel(
	ctx context.Context, l WayConfig, open ingress.Open, dp *kernel.Datapath, log *slog.Logger,
) (Way, error) {
	if l.WireGuard.Path() == config.DatapathAuto {
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
		Closed: policy.Closed(), Socket: l.ingressConfig(log), Open: open, Log: log,
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
	return kernelWay{w, log}, nil
}

// kernelSettings are settings with the rules for what the kernel forwards by itself.
func (l WayConfig) kernelSettings() (kernelspace.Settings, error) {
	common, err := l.tunnelSettings()
	s := kernelspace.Settings{Settings: common, From: l.WireGuard.ReachableFrom}
	for _, r := range l.KernelRules {
		s.Rules = append(s.Rules, kernelRules(r)...)
	}
	return s, err
}

// kernelRules are what a rule means where nobody looks for names. TCP may still have one, while UDP and pings
// never do.
func kernelRules(r config.Rule) []kernelspace.Rule {
	rule := kernelspace.Rule{
		Refuse: r.Refuse != "", Sources: r.Match.Source, Targets: r.Match.Destination,
		TCP: r.Match.Protocol == policy.TCP, UDP: r.Match.Protocol == policy.UDP, ICMP: r.Match.Protocol == policy.ICMP,
	}
	if rule.Refuse {
		rule.Targets = policy.Refused(rule.Targets)
	}
	for _, p := range r.Match.Ports {
		rule.Ports = append(rule.Ports, kernelspace.PortRange(p))
	}
	if len(r.Match.ServerName) == 0 {
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

// Apply implements Way.
func (w kernelWay) Apply(next WayConfig) (commit func(), err error) {
	s, err := next.kernelSettings()
	if err != nil {
		return nil, err
	}
	if next.KernelLacks != nil {
		return nil, fmt.Errorf("the kernel ends the tunnel: %w", next.KernelLacks)
	}
	return w.WireGuard.Apply(s, next.ingressConfig(w.log))
}

// Tunnel implements Way.
func (w kernelWay) Tunnel() tunnel.Listener { return w.WireGuard }
