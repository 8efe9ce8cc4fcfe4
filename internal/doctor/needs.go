package doctor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

// requirement is a check that must be ok, and the keys that need it.
type requirement struct {
	// check is the name of a Check.
	check string
	// keys are paths in the configuration, such as listeners[0].mode.
	keys []string
}

// needs lists what a configuration needs of the machine, in the order of its keys.
type needs []requirement

// addNeed adds checks that a key needs.
func (n *needs) addNeed(key string, checks ...string) {
	for _, check := range checks {
		at := slices.IndexFunc(*n, func(other requirement) bool { return other.check == check })
		if at < 0 {
			*n = append(*n, requirement{check: check})
			at = len(*n) - 1
		}
		(*n)[at].keys = append((*n)[at].keys, key)
	}
}

// needsOf returns what cfg needs. Keys that work on every machine are left out.
func needsOf(cfg *config.Config) (n needs) {
	for i, l := range cfg.Listeners {
		key := func(name string) string { return fmt.Sprintf("listeners[%d].%s", i, name) }
		v4, v6 := familiesOf(l.Address)
		// Every listener that captures needs the rules of its mode, and of the families that it listens for.
		switch mode := capture.Redirect; {
		case l.Mode == access.TPROXY:
			mode = capture.TPROXY
			n.addNeed(key("mode"), "net_admin")
			n.addNeed(key("mode"), chooseChecks(v4, v6, "tproxy_ipv4", "tproxy_ipv6")...)
			fallthrough
		case l.Mode == access.Redirect:
			n.addNeed(key("mode"), chooseChecks(v4, v6, rulesCheck(mode, false), rulesCheck(mode, true))...)
			n.addNeed(key("mode"), rulesInForce, "input_chain", "output_chain", "forward_chain", "captured_networks",
				"captured_routes", SYNCookies)
			n.addNeed(key("mode"), chooseChecks(v4, v6, forwarding4, forwarding6)...)
		case l.Mode == access.TUN:
			n.addNeed(key("mode"), "tun", "net_admin")
		case l.Mode == access.WireGuard && l.WireGuard.DatapathOrDefault() == access.DatapathKernel:
			n.addNeed(key("wireguard.datapath"), wireGuardTrial, "net_admin")
		}
		if l.Mode.Tunnels() {
			n.addNeed(key("mode"), "ping")
		}
		if l.KeepClient {
			n.addNeed(key("keep_client"), "net_admin")
		}
		if l.UDP.HoldsAny() {
			n.addNeed(key("udp"), queueTrial)
		}
	}
	// A mark is set on each of the proxy's own connections.
	if cfg.Mark != 0 {
		n.addNeed("mark", "net_admin")
	}
	switch cfg.Envelope {
	case kernel.EBPF:
		n.addNeed("envelope", "ebpf")
	case "bbr":
		n.addNeed("envelope", "bbr")
	}
	return n
}

// familiesOf reports the families of an address that is listened on. An empty host and [::] are both, because a socket
// of IPv6 takes IPv4, too (ipv6(7), IPV6_V6ONLY).
func familiesOf(address string) (v4, v6 bool) {
	host, _, _ := net.SplitHostPort(address)
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return true, host == ""
	}
	return addr.Unmap().Is4() || addr.IsUnspecified(), addr.Is6() && !addr.Is4In6()
}

// chooseChecks returns the checks of the families, IPv4 first.
func chooseChecks(v4, v6 bool, forV4, forV6 string) (out []string) {
	if v4 {
		out = append(out, forV4)
	}
	if v6 {
		out = append(out, forV6)
	}
	return out
}

// socketOf is a TCP or UDP address of a configuration at which the proxy listens.
type socketOf struct {
	key string
	// network is tcp or udp.
	network string
	// address is host:port. An empty host is every address of this machine.
	address string
}

// socketsOf returns the sockets that cfg needs. It leaves out those of tunnels in the kernel, which opens them.
func socketsOf(cfg *config.Config) (out []socketOf) {
	for i, l := range cfg.Listeners {
		if l.Address != "" && !l.EndsInKernel() {
			out = append(out, socketOf{fmt.Sprintf("listeners[%d].address", i), l.Network(), l.Address})
		}
	}
	for _, s := range []socketOf{
		{"telemetry.address", "tcp", cfg.Telemetry.Address}, {"telemetry.health", "tcp", cfg.Telemetry.Health},
	} {
		if s.address != "off" {
			out = append(out, s)
		}
	}
	return out
}

// tryListen listens at an address and closes the socket. judgeSockets finds the cure by the error of the system call.
func tryListen(network, address string) error {
	if network == "udp" {
		conn, err := net.ListenPacket(network, address)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	ln, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	return ln.Close()
}

// The settings that make a machine a router. If one is off, listeners that capture get a warning only, because a
// machine that captures its own connections does not need it.
const (
	forwarding4 = "net.ipv4.ip_forward"
	forwarding6 = "net.ipv6.conf.all.forwarding"
)

// rulesInForce names the check of whether capture rules are installed.
const rulesInForce = "capture_rules"

// judgeNeeds turns the report of a machine into that of a configuration. It keeps the checks that the configuration
// needs, and adds those of its addresses and interfaces. A warning becomes Missing if a key needs the thing. Then
// Fatal is set, which decides the exit code.
func (f facts) judgeNeeds(r Report) Report {
	out := r
	out.Checks = nil
	afterCapture := max(0, slices.IndexFunc(r.Checks, func(c Check) bool { return c.Group == "hints" }))
	all := slices.Insert(slices.Clone(r.Checks), afterCapture, f.judgeInForce())
	wanted := needsOf(f.config)
	// The names of checks that are missing, for the error.
	var lacks []string
	for _, c := range all {
		at := slices.IndexFunc(wanted, func(n requirement) bool { return n.check == c.Name })
		// Every configuration needs these.
		general := c.Group == "kernel" || c.Name == "tier" || c.Group == "limits" && c.Name != SYNCookies ||
			c.Group == "process"
		if at < 0 && !general {
			continue
		}
		if at >= 0 {
			c.Found += " (needed by " + strings.Join(wanted[at].keys, ", ") + ")"
			// Without these the proxy does not start, or does not do what a key asks for.
			if hard := []string{"ebpf", "bbr", queueTrial, wireGuardTrial}; c.State == Warn &&
				slices.Contains(hard, c.Name) {
				c.State = Missing
			}
			if f.sysctls[c.Name] == "0" && slices.Contains([]string{forwarding4, forwarding6}, c.Name) {
				c.State, c.Fix = Warn, "sysctl -w "+c.Name+"=1, unless this machine captures its own connections alone"
			}
		}
		out.Checks = append(out.Checks, c)
	}
	out.Checks = append(out.Checks, f.judgeSockets()...)
	out.Checks = append(out.Checks, f.judgeHints()...)
	for _, c := range out.Checks {
		if c.State == Missing {
			lacks = append(lacks, c.Name)
		}
	}
	if out.Fatal == nil {
		out.Verdict = "This machine has all that the configuration needs."
		if len(lacks) > 0 {
			out.Fatal = fmt.Errorf("this machine lacks what the configuration needs: %s", strings.Join(lacks, ", "))
			out.Verdict = "Mend what is missing above, each by its fix, and ask again."
		}
	}
	return out
}

// judgeInForce judges whether capture rules are installed. If not, it is a warning only, because they may be applied
// after the start.
func (f facts) judgeInForce() Check {
	c := okCheck(rulesInForce, "rules are in force")
	c.Group = "capture"
	switch {
	case f.captureErr != nil:
		c.State, c.Found, c.Fix = Warn, "could not be looked at: "+f.captureErr.Error(), lookAsRoot
	case !f.rulesInstalled:
		c.State, c.Found = Warn, "no rules are in force, so nothing comes to listeners that capture"
		c.Fix = "penstock rules apply, with the interface of the clients (docs/capture.md)"
	}
	return c
}

// judgeSockets judges the addresses at which the proxy would listen. One that it cannot have is Missing, because the
// proxy opens all of them or does not start.
func (f facts) judgeSockets() (out []Check) {
	for _, s := range socketsOf(f.config) {
		c := okCheck(s.key, "%s %s is free", s.network, s.address)
		c.Group = "configuration"
		err := f.listenErrs[s.key]
		switch owner := f.owners[s.key]; {
		case err == nil:
		// Doctor is run beside a running proxy, too, which has the addresses of its own configuration.
		case errors.Is(err, unix.EADDRINUSE) && strings.HasPrefix(owner, "penstock "):
			c.Found = fmt.Sprintf("%s %s is in use by %s, the running proxy it seems", s.network, s.address, owner)
		case errors.Is(err, unix.EADDRINUSE):
			c.State, c.Found = Missing, fmt.Sprintf("%s %s is in use", s.network, s.address)
			if owner != "" {
				c.Found += " by " + owner
			}
			c.Fix = "end that process, or write another port there"
		case errors.Is(err, unix.EADDRNOTAVAIL):
			c.State, c.Found = Missing, fmt.Sprintf("no interface has the address of %s", s.address)
			c.Fix = "ip addr add it to an interface, or write [::] in its place, which is every address"
		case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
			c.State, c.Found = Missing, fmt.Sprintf("this process may not listen at %s", s.address)
			c.Fix = f.grantHint(caps.NetBindService) + "; or write a port from 1024 on"
		default:
			c.State, c.Found, c.Fix = Missing, err.Error(), "write an address and a port of this machine there"
		}
		out = append(out, c)
	}
	return out
}

// judgeHints judges the interfaces that give hints. None is Missing, because the proxy waits for an interface.
func (f facts) judgeHints() (out []Check) {
	for i, s := range f.config.Hints {
		c := okCheck(fmt.Sprintf("hints[%d].interface", i), "%s is up", s.Interface)
		c.Group = "configuration"
		at := slices.IndexFunc(f.sources, func(has linkstat.Interface) bool { return has.Name == s.Interface })
		switch {
		case f.sourcesErr != nil:
			c.State, c.Found, c.Fix = Warn, f.sourcesErr.Error(), "let the process open netlink sockets"
		case at < 0:
			c.State, c.Found = Warn, s.Interface+" is not there, or down: it gives no hints until it is up"
			c.Fix = "ip link set " + s.Interface + " up; or write another name there"
		case f.sources[at].Rate == 0 && !f.sources[at].Radio && s.Capacity == 0:
			c.State, c.Found = Warn, s.Interface+" does not tell its rate"
			c.Fix = fmt.Sprintf("set hints[%d].capacity", i)
		}
		out = append(out, c)
	}
	return out
}
