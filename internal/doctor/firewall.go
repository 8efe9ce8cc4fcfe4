package doctor

import (
	"fmt"
	"strings"
)

// Settings that switch IPv6 off, everywhere and where captured packets are delivered.
const (
	ipv6OffAll      = "net.ipv6.conf.all.disable_ipv6"
	ipv6OffLoopback = "net.ipv6.conf.lo.disable_ipv6"
)

// judgeIPv6 is about a family that penstock rules apply leaves out where it is off.
func (f facts) judgeIPv6() Check {
	const name = "ipv6"
	everywhere, loopback := f.sysctls[ipv6OffAll], f.sysctls[ipv6OffLoopback]
	switch {
	case loopback == "":
		return okCheck(name, "switched off in this kernel: penstock rules apply leaves it out")
	case loopback == "0":
		return okCheck(name, "on: its connections may be captured")
	case everywhere == "1":
		return okCheck(name, "switched off: penstock rules apply leaves it out (sysctl -w %s=0 switches it on)", ipv6OffAll)
	}
	return Check{
		Name: name, State: Warn, Found: "switched off on lo alone: penstock rules apply leaves it out, so its " +
			"connections go past the proxy", Fix: "sysctl -w " + ipv6OffLoopback + "=0, and penstock rules apply once more",
	}
}

// judgeObstacles is about the chains of one hook of the machine's firewall. Where nothing is captured and nothing
// is routed, they are right as they are.
func (f facts) judgeObstacles(hook, passes string) Check {
	name := hook + "_chain"
	if f.filterless != nil {
		return Check{
			Name: name, State: Warn, Found: "could not be looked at: " + f.filterless.Error(), Fix: lookAsRoot,
		}
	}
	var found, cures []string
	for _, o := range f.obstacles {
		if o.Hook == hook {
			found, cures = append(found, o.Chain+" drops "+o.Drops), append(cures, o.Cure)
		}
	}
	routes := f.sysctls["net.ipv4.ip_forward"] == "1" || f.sysctls["net.ipv6.conf.all.forwarding"] == "1"
	switch {
	case len(found) == 0:
		return okCheck(name, "%s, as far as can be told", passes)
	case !f.inForce && !routes:
		return okCheck(name, "nothing is captured here; otherwise in the way: %s", strings.Join(found, "; "))
	}
	return Check{Name: name, State: Warn, Found: strings.Join(found, "; "), Fix: strings.Join(cures, "; ")}
}

// judgeForward is about what the machine's firewall keeps apart and capture
// would join.
func (f facts) judgeForward() []Check {
	const filters, networks, routes = "forward_chain", "captured_networks", "captured_routes"
	if f.filterless != nil {
		unknown := Check{State: Warn, Found: "could not be looked at: " + f.filterless.Error(), Fix: lookAsRoot}
		forward, own, parts := unknown, unknown, unknown
		forward.Name, own.Name, parts.Name = filters, networks, routes
		return []Check{forward, own, parts}
	}
	forward := okCheck(filters, "nothing is dropped there that captured connections would go round")
	if len(f.filters) > 0 {
		forward.State = Warn
		forward.Found = "captured connections do not pass it, and it drops some: " + strings.Join(f.filters, ", ")
		forward.Fix = "what it forbids between other networks than this machine's own, forbid for captured " +
			"connections by a rule with refuse, too (docs/operations.md, The forward chain)"
	}
	own := okCheck(networks, "connections to networks of this machine go past the rules, or are captured as asked")
	if len(f.newcomers) > 0 {
		var words []string
		for _, n := range f.newcomers {
			words = append(words, fmt.Sprintf("%v (%s)", n.Prefix, n.Interface))
		}
		own.State, own.Found = Warn, "captured, since they came after the rules: "+strings.Join(words, ", ")
		own.Fix = "penstock rules apply once more, as before (under systemd: systemctl restart penstock)"
	}
	parts := okCheck(routes, "nothing that the rules need has gone")
	if len(f.lost) > 0 {
		parts.State = Warn
		parts.Found = "gone, so captured connections fail or go past the proxy: " + strings.Join(f.lost, ", ")
		parts.Fix = "penstock rules apply once more, as before (under systemd: systemctl restart penstock)"
	}
	return []Check{forward, own, parts}
}
