package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/proxy/access"
)

// The datapaths of mode wireguard.
const (
	DatapathAuto     Datapath = "auto"
	DatapathKernel   Datapath = "kernel"
	DatapathNetstack Datapath = "netstack"
)

// widest is the longest prefix that has as good as all that a machine sends: 2000::/3 has IPv6's.
const widest = 3

// Path is the datapath of a listener of mode wireguard, with what was not set.
func (w WireGuard) Path() Datapath {
	if w.Datapath == "" {
		return DatapathNetstack
	}
	return w.Datapath
}

// Interface is the name of the interface that the kernel's WireGuard has.
func (l *Listener) Interface() string {
	if l.Device != "" {
		return l.Device
	}
	name := "wg-" + l.Name
	return name[:min(len(name), maxDevice)]
}

// KernelLacks tells what of the configuration the kernel's WireGuard would not do, since
// it forwards datagrams by itself: an error that names the keys; nil: it does all.
func (c *Config) KernelLacks(l *Listener) error {
	i := slices.IndexFunc(c.Listeners, func(other Listener) bool { return other.Name == l.Name })
	key := fmt.Sprintf("listeners[%d].tunnel", i)
	var errs []error
	for _, k := range []struct {
		name string
		set  bool
	}{
		{".udp_share", l.Tunnel.UDPShare != nil},
		{".udp_idle", l.Tunnel.UDPIdle != nil},
		{".udp_sessions", l.Tunnel.UDPSessions != nil},
	} {
		if k.set {
			errs = append(errs, keyErrorf(key+k.name, "the kernel forwards datagrams by itself; remove this, or take "+
				"wireguard.datapath: netstack"))
		}
	}
	for _, p := range l.WireGuard.Access() {
		for _, a := range p.AllowedIPs {
			if a.Bits() <= widest { // the tunnel's own packets, too
				errs = append(errs, keyErrorf(fmt.Sprintf("listeners[%d].wireguard.peers", i), "peer %q has %v, and "+
					"all that this machine sends would be routed to it; remove this, or take wireguard.datapath: "+
					"netstack", p.Name, a))
			}
		}
	}
	for i, r := range c.Rules {
		if p := r.Match.Protocol; l.sentBy(r) && p != "" && p != "tcp" && r.Refuse == "" {
			errs = append(errs, keyErrorf(fmt.Sprintf("rules[%d].match.protocol", i), "what the kernel forwards out of "+
				"listener %q has no window, so that this rule can refuse it and nothing else; have it refuse, or take "+
				"wireguard.datapath: netstack", l.Name))
		}
	}
	return errors.Join(errs...)
}

// sentBy reports whether the rule decides about something that comes out of the listener's tunnel and
// shows no name.
func (l *Listener) sentBy(r Rule) bool {
	m := r.Match
	return (len(m.Listener) == 0 || slices.Contains(m.Listener, l.Name)) && len(m.Host) == 0 &&
		(len(m.ServerName) == 0 || r.Undecided == "refuse")
}

// KernelRules are the rules for what the kernel takes out of the listener's tunnel past the proxy, where
// nobody looks for names, in order.
func (c *Config) KernelRules(l *Listener) []Rule {
	return slices.DeleteFunc(slices.Clone(c.Rules), func(r Rule) bool { return !l.sentBy(r) })
}

// checkDatapath is about who ends the tunnels of mode wireguard.
func (c *Config) checkDatapath() error {
	var errs []error
	for i := range c.Listeners {
		if l := &c.Listeners[i]; l.Mode == access.WireGuard && l.WireGuard.Path() == DatapathKernel {
			errs = append(errs, c.KernelLacks(l))
		}
	}
	return errors.Join(errs...)
}

func (l *Listener) checkDeviceName(key string) error {
	if name := l.Device; len(name) > maxDevice || strings.ContainsAny(name, "/ :%") || name == "." || name == ".." {
		return keyErrorf(key+".device", "%q is no name of a network device: at most 15 bytes without spaces, / : or %%",
			name)
	}
	return nil
}
