// Package capture installs and removes the rules by which the kernel hands other machines'
// connections to a transparent listener: one nftables table, and for TPROXY policy rules and a local
// route for each address family. It also finds chains of the machine's firewall that are in the way.
//
//	rules, tunnel  ─▶ ruleset ─▶ clause              the table, printed and installed
//	               ─▶ routing                        policy rules and routes
//	obstacle       ─▶ evaluation ─▶ packet, value    what a firewall does with our packets
//	               ─▶ firewall, machine              its chains; interfaces, addresses and routes
//
// Captured connections do not pass the machine's forward chains. The rules therefore leave the
// machine's own networks out where these chains drop something (Rules.Connected).
package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
)

// Names of Penstock's objects in the kernel. Remove looks for them, so they are no settings.
const (
	// Table is the nftables table of Rules, of family inet.
	Table = "penstock"
	// RouteProtocol is the origin ("proto") of our routes and policy rules. rt_protos has no name
	// for it.
	RouteProtocol = 112
	// RulePriority is that of our policy rules. It is behind the local table, and before the rules
	// of other programs.
	RulePriority = 120
)

// Defaults of Rules. Both marks are single high bits: the middle ones are used by
// kube-proxy, Tailscale and others. Cilium and Calico use these too: see deploy/kubernetes.
const (
	DefaultMark       = 0x0100_0000
	DefaultOwnMark    = 0x0200_0000
	DefaultRouteTable = 11200
)

// AnyInterface stands for every interface, also those to the outside.
const AnyInterface = "any"

// Mode is the way of capturing.
type Mode string

// TPROXY hands packets over unchanged, and needs no connection tracking. Redirect rewrites their
// destination by NAT, and needs it.
const (
	TPROXY   Mode = "tproxy"
	Redirect Mode = "redirect"
)

// Connected decides about connections to networks that the machine is on.
type Connected string

// ConnectedAuto leaves these connections out where a forward chain of the machine drops or rejects
// something, because captured connections do not pass it. Otherwise it captures them.
const (
	ConnectedAuto    Connected = "auto"
	ConnectedCapture Connected = "yes"
	ConnectedLeave   Connected = "no"
)

// PortRange is an inclusive range of ports.
type PortRange struct{ First, Last uint16 }

// UnmarshalText reads "443" or "8000-8099".
func (p *PortRange) UnmarshalText(text []byte) error {
	first, last, ranged := strings.Cut(string(text), "-")
	if !ranged {
		last = first
	}
	a, errA := strconv.ParseUint(first, 10, 16)
	b, errB := strconv.ParseUint(last, 10, 16)
	if errA != nil || errB != nil || a == 0 || b < a {
		return fmt.Errorf("capture: port %q is neither a port nor a range such as 8000-8099", text)
	}
	p.First, p.Last = uint16(a), uint16(b)
	return nil
}

// String returns the range as UnmarshalText reads it.
func (p PortRange) String() string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// Match selects addresses: those in Include that are not in Exclude. An empty Include has all.
type Match struct{ Include, Exclude []netip.Prefix }

// Rules says which connections to capture, and how. Only connections that the
// machine forwards are captured: never those of its own processes, never those
// to its own addresses, and never one that was open before.
//
// A captured connection does not pass the machine's forward chains: it ends
// here, and the proxy's own begins. What these chains keep apart is mostly the
// networks that the machine is on, so Connected leaves destinations there out. It
// goes by the machine's chains, addresses and routes when the rules are applied.
//
// TPROXY fits listeners that keep the client's address towards the server, too:
// the answers, addressed to the client, are kept here. When the listener is
// gone TPROXY captures nothing, and new connections pass as if there were no
// rules; Redirect refuses them.
//
// TPROXY captures the first packet of a connection, and recognises the others by
// the socket that the first one has made. In a flood the kernel answers with SYN
// cookies and makes no socket: such a client is reset and has to try again.
type Rules struct {
	Mode Mode
	// Port is that of the transparent listener, on every local address.
	Port uint16

	// IPv4 and IPv6 select the families. Neither is set: both.
	IPv4, IPv6 bool
	// Interfaces are where connections come in, or AnyInterface. At least one is named.
	Interfaces []string
	// Connected is ConnectedAuto if it is empty.
	Connected Connected
	// Ports are of destinations. Empty: all.
	Ports        []PortRange
	Sources      Match
	Destinations Match

	// Mark has bits that captured packets get; other bits stay. 0: DefaultMark.
	Mark uint32
	// OwnMark has bits that the proxy's own packets have. They are never captured. 0:
	// DefaultOwnMark.
	OwnMark uint32
	// RouteTable routes marked packets to this machine. 0: DefaultRouteTable.
	RouteTable int
	// Hold says which UDP towards Interfaces waits for room in its host's window.
	Hold Hold

	// holdsByTarget is set where the kernel has no nft_queue: a target of iptables sends packets into the queue.
	holdsByTarget bool
	// machineNetworks are those of this machine at the last withMachineState.
	machineNetworks []netip.Prefix
}

// Validate returns why the rules cannot be applied. It does not look at the machine.
func (r Rules) Validate() error {
	_, err := r.withDefaults()
	return err
}

// Apply makes the installed state of this network namespace exactly that of the rules, whatever an
// earlier call has left. It replaces the table in one transaction. New routes are there before it,
// and old routes are removed after it, so that a crash between leaves a state that works. On an
// error it takes back what it has added.
func (r Rules) Apply(ctx context.Context) (err error) {
	r, err = r.withDefaults()
	if err != nil {
		return err
	}
	r, _ = r.leaveOutIPv6()
	if r, err = r.withMachineState(); err != nil {
		return err
	}
	h, done, err := lockNetlink()
	if err != nil {
		return err
	}
	defer done()
	routing := routing{handle: h}
	defer func() {
		if err != nil {
			err = errors.Join(err, routing.undoAdded())
		}
	}()
	if r.Mode == TPROXY {
		if err := routing.addObjects(r); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	if err := r.installTable(); err != nil {
		return err
	}
	routing.added = nil // from here on the table needs them
	return routing.removeUnless(func(o object) bool { return r.Mode == TPROXY && o.isWantedBy(r) })
}

// Remove removes everything that Apply can have made, with any settings and however far it came.
// Without anything to remove it does nothing.
func Remove(ctx context.Context) error {
	h, done, err := lockNetlink()
	if err != nil {
		return err
	}
	defer done()
	// The table first: marked packets without a route would be lost.
	if err := deleteTable(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	routing := routing{handle: h}
	return routing.removeUnless(func(object) bool { return false })
}

// Print writes what Apply would install as a shell script for nft and ip. It is for review, or for
// machines that are configured by other means. It needs no privilege.
func (r Rules) Print(w io.Writer) error {
	r, err := r.withDefaults()
	if err != nil {
		return err
	}
	if r, err = r.withMachineState(); err != nil {
		return err
	}
	var b strings.Builder
	if r.Mode == TPROXY {
		r.printRouting(&b)
	}
	b.WriteString("# nft takes this whole or not at all.\nnft -f - <<'END'\n")
	r.buildRuleset().printTable(&b)
	b.WriteString("END\n")
	_, err = io.WriteString(w, b.String())
	return err
}

// printRouting writes the commands for policy rules and routes.
func (r Rules) printRouting(b *strings.Builder) {
	b.WriteString("# Marked packets are routed to this machine, and what it sends itself by its usual routes.\n")
	for _, f := range r.usedFamilies() {
		ip := "ip"
		if !f.isIPv4() {
			ip = "ip -6"
		}
		fmt.Fprintf(b, "%s rule add priority %d iif lo fwmark %#x/%#x lookup main protocol %d\n",
			ip, RulePriority-1, r.Mark, r.Mark, RouteProtocol)
		fmt.Fprintf(b, "%s rule add priority %d fwmark %#x/%#x lookup %d protocol %d\n",
			ip, RulePriority, r.Mark, r.Mark, r.RouteTable, RouteProtocol)
		fmt.Fprintf(b, "%s route add local default dev lo table %d proto %d\n", ip, r.RouteTable, RouteProtocol)
	}
	b.WriteString("\n")
}

// Advice returns warnings about these rules on this machine, a sentence each. It leaves out what it
// may not read.
func (r Rules) Advice() []string {
	var advice []string
	add := func(format string, args ...any) { advice = append(advice, fmt.Sprintf(format, args...)) }
	for _, name := range r.Interfaces {
		if name == AnyInterface {
			add("interface any: connections from outside are captured too; " +
				"where the firewall lets them in, they reach inside hosts past the forward chain")
		} else if _, err := net.InterfaceByName(name); err != nil {
			add("interface %s does not exist: nothing is captured there until it does", name)
		}
	}
	if r, err := r.withDefaults(); err == nil {
		if _, why := r.leaveOutIPv6(); why != "" {
			add("%s", why)
		}
	}
	networks, err := Networks()
	if r.withForwardDecision().Connected == ConnectedLeave && err == nil && len(networks) > 0 {
		var words []string
		for _, n := range networks {
			words = append(words, fmt.Sprintf("%v (%s)", n.Prefix, n.Interface))
		}
		add("connections to networks of this machine go past the proxy: %s; "+
			"--connected captures them, and applying again follows changes", strings.Join(words, ", "))
	}
	if filters, err := ForwardFilters(); err == nil && len(filters) > 0 {
		add("captured connections do not pass the forward chain, which drops some here: %s; what it forbids, "+
			"forbid for them by a rule with refuse, too (docs/capture.md, The forward chain)",
			strings.Join(filters, ", "))
	}
	return advice
}

// Obstacles returns what keeps connections of these rules from the proxy, and the proxy's own
// connections from the world. It needs CAP_NET_ADMIN.
func (r Rules) Obstacles() ([]Obstacle, error) {
	r, err := r.withDefaults()
	if err != nil {
		return nil, err
	}
	return findObstacles([]interception{r.interception()})
}

// interception returns what the firewall has to let through for these rules.
func (r Rules) interception() interception {
	t := interception{
		mode: r.Mode, port: r.Port, mark: r.Mark, own: r.OwnMark, interfaces: r.Interfaces, families: r.usedFamilies(),
	}
	for _, p := range r.Ports {
		t.ports = append(t.ports, p.First)
	}
	if len(t.ports) == 0 {
		t.ports = somePorts
	}
	return t
}

// withDefaults fills in the defaults, and refuses rules that cannot work. The error names the field
// as flags and configuration files do.
func (r Rules) withDefaults() (Rules, error) {
	if !r.IPv4 && !r.IPv6 {
		r.IPv4, r.IPv6 = true, true
	}
	r.Mark, r.OwnMark = cmp.Or(r.Mark, DefaultMark), cmp.Or(r.OwnMark, DefaultOwnMark)
	r.Connected, r.RouteTable = cmp.Or(r.Connected, ConnectedAuto), cmp.Or(r.RouteTable, DefaultRouteTable)
	var err error
	if r.Hold, err = r.Hold.withDefaults(r.Interfaces); err != nil {
		return r, err
	}
	switch {
	case r.Hold.isOn() && (r.Mark|r.OwnMark)&CongestionMark != 0:
		return r, fmt.Errorf("capture: mark %#x and own-mark %#x must not have the bit %#x, by which held packets are "+
			"marked", r.Mark, r.OwnMark, CongestionMark)
	case r.Mode != TPROXY && r.Mode != Redirect:
		return r, fmt.Errorf("capture: mode %q is neither tproxy nor redirect", r.Mode)
	case r.Connected != ConnectedAuto && r.Connected != ConnectedCapture && r.Connected != ConnectedLeave:
		return r, fmt.Errorf("capture: connected %q is none of auto, yes and no", r.Connected)
	case r.Port == 0:
		return r, errors.New("capture: port: the port of the transparent listener is missing")
	case r.Mark&r.OwnMark != 0:
		return r, fmt.Errorf("capture: mark %#x and own-mark %#x share bits: the proxy's own packets would be "+
			"routed back to it", r.Mark, r.OwnMark)
	case r.RouteTable < 0 || r.RouteTable > 1<<31-1:
		return r, fmt.Errorf("capture: route-table %d is not in 1..2147483647", r.RouteTable)
	case r.RouteTable >= 253 && r.RouteTable <= 255:
		return r, fmt.Errorf("capture: route-table %d is the system's (default, main, local): choose an unused one",
			r.RouteTable)
	}
	if len(r.Interfaces) == 0 {
		return r, errors.New("capture: interface: where connections come in is missing: " +
			"--interface lan0, once for each inside interface; or --interface any, which captures what comes from " +
			"outside, too")
	}
	for _, name := range r.Interfaces {
		if name == "" || len(name) > 15 || strings.ContainsAny(name, "/ \t\n\"*\x00") {
			return r, fmt.Errorf("capture: interface %q: not the full name of a network interface; ip link lists them", name)
		}
	}
	for _, p := range slices.Concat(r.Ports, r.Hold.Ports) {
		if p.First == 0 || p.Last < p.First {
			return r, fmt.Errorf("capture: port range %v is empty or has port 0", p)
		}
	}
	for _, list := range [][]netip.Prefix{
		r.Sources.Include, r.Sources.Exclude, r.Destinations.Include,
		r.Destinations.Exclude,
	} {
		for _, p := range list {
			if !p.IsValid() || p.Addr().Is4In6() {
				return r, fmt.Errorf("capture: prefix %v: write it as 192.0.2.0/24 or 2001:db8::/32", p)
			}
		}
	}
	return r, nil
}

// withMachineState fills in what the rules take from the machine: its networks, if they are left
// out.
func (r Rules) withMachineState() (Rules, error) {
	if r = r.withForwardDecision(); r.Connected == ConnectedCapture {
		return r, nil
	}
	networks, err := Networks()
	if err != nil {
		return r, err
	}
	r.machineNetworks = nil
	for _, n := range networks {
		r.machineNetworks = append(r.machineNetworks, n.Prefix)
	}
	return r, nil
}

// withForwardDecision replaces ConnectedAuto by the decision for this machine's forward chains.
// Chains that may not be read count as chains that drop.
func (r Rules) withForwardDecision() Rules {
	if r.Connected == "" || r.Connected == ConnectedAuto {
		r.Connected = ConnectedLeave
		if filters, err := ForwardFilters(); err == nil && len(filters) == 0 {
			r.Connected = ConnectedCapture
		}
	}
	return r
}

// leaveOutIPv6 removes IPv6 from rules for both families where captured packets of it cannot be
// routed to this machine. why is the reason with the cure; empty: IPv6 stays.
func (r Rules) leaveOutIPv6() (_ Rules, why string) {
	if r.Mode != TPROXY || !r.IPv4 || !r.IPv6 {
		return r, ""
	}
	off := func(name string) bool {
		text, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		return err == nil && strings.TrimSpace(string(text)) == "1"
	}
	where, cure := "in this kernel", "boot without ipv6.disable=1"
	switch _, err := os.Stat("/proc/sys/net/ipv6"); {
	case off(ipv6Switches[1]) && off(ipv6Switches[0]):
		where, cure = "here", "sysctl -w "+ipv6Switches[0]+"=0"
	case off(ipv6Switches[1]):
		where, cure = "on lo", "sysctl -w "+ipv6Switches[1]+"=0"
	case !errors.Is(err, fs.ErrNotExist):
		return r, ""
	}
	r.IPv6 = false
	return r, fmt.Sprintf("IPv6 is switched off %s, so the rules leave it out; to capture it: %s, and apply again",
		where, cure)
}

// ipv6Switches are the settings that switch IPv6 off: everywhere, and on lo, where captured packets
// are delivered.
var ipv6Switches = []string{"net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.lo.disable_ipv6"}

// buildRuleset builds the table of rules that were normalised.
//
//	our own packets                          pass
//	ICMP errors about captured connections   to us     TPROXY; NAT sees to it by itself
//	other protocols                          pass
//	not first, of a connection we captured   to us     TPROXY; NAT sees to it by itself
//	not first                                pass
//	not from Interfaces, to this machine     pass
//	to a network of this machine             pass      unless Connected captures it
//	excluded                                 pass
//	included                                 to us
//
// Only first packets come as far as the filters. Past them, the answers in
// connections that were excluded would seem to be new connections.
func (r Rules) buildRuleset() ruleset {
	t := ruleset{table: Table}
	if r.Mode == Redirect {
		t.beginChain(ourChain, nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest,
			"type nat hook prerouting priority dstnat")
	} else {
		t.beginChain(ourChain, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle,
			"type filter hook prerouting priority mangle")
	}
	t.addRule(hasMark(r.OwnMark), returnToCaller())
	if r.Mode == TPROXY {
		t.deliverOpen(r.Mark, r.usedFamilies())
	} else {
		t.addRule(notTCP(), returnToCaller())
		t.addRule(notFirst(), returnToCaller())
	}
	if !slices.Contains(r.Interfaces, AnyInterface) {
		interfaces := t.addSet("interfaces", nftables.TypeIFName, interfaceElements(r.Interfaces))
		t.addRule(notFromInterfaces(interfaces), returnToCaller())
	}
	t.addRule(toThisMachine(), returnToCaller())

	var ports []clause
	if len(r.Ports) > 0 {
		ports = append(ports, portIn(t.addSet("ports", nftables.TypeInetService, portElements(r.Ports))))
	}
	for _, f := range r.usedFamilies() {
		t.captureFamily(r, f, ports)
	}
	if r.Hold.isOn() {
		t.holdDatagrams(r)
	}
	return t
}

// usedFamilies returns the families that the rules capture.
func (r Rules) usedFamilies() []family {
	var fs []family
	if r.IPv4 {
		fs = append(fs, ipv4)
	}
	if r.IPv6 {
		fs = append(fs, ipv6)
	}
	return fs
}
