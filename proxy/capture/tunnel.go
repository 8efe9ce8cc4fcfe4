package capture

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What belongs to tunnels in the kernel, by which Remove finds it.
const (
	TunnelProtocol = RouteProtocol + 1 // origin of their routes and policy rules
	tunnelPriority = RulePriority + 1
	tunnelRoutes   = DefaultRouteTable + 100 // the first of their route tables; the interface's index is added
)

// tunnelTable begins the names of tunnels' tables. The interface follows.
const tunnelTable = Table + "_"

// Tunnel is what surrounds the interface of a tunnel that the kernel ends: what comes out
// of it as TCP goes to a transparent listener, and the rest is forwarded, in this
// machine's name. It stands beside Rules and knows nothing of them.
//
// When the listener is gone, what is TCP is forwarded, too.
type Tunnel struct {
	Interface string
	// Port is that of the transparent listener, on every local address.
	Port uint16

	// Inside has all prefixes inside.
	Inside []netip.Prefix
	// Gateways are this machine's addresses inside. They answer pings.
	Gateways []netip.Addr
	// DNS is the name server behind port 53 of the Gateways of its family; invalid: there is none.
	DNS netip.AddrPort
	// Isolate refuses packets from one peer to another.
	Isolate bool
	// Closed has destinations that peers may not reach.
	Closed []netip.Prefix
	// Open has exceptions from Closed, which may be this machine's own addresses.
	Open []netip.Prefix
	// From has sources outside that may begin a connection with a peer.
	From []netip.Prefix
	// Verdicts decide about packets to Open, and about other forwarded packets. The first match
	// decides. A packet without a match passes.
	Verdicts []Verdict

	// routeTable routes captured packets to this machine.
	routeTable int
}

// Verdict decides about packets that peers send past the proxy.
type Verdict struct {
	Refuse bool
	// Sources and Targets are prefixes. Empty: all.
	Sources, Targets []netip.Prefix
	// Ports are of the target, over UDP and TCP. Empty: every protocol.
	Ports []PortRange
	// TCP, UDP and ICMP select one protocol. None of them is set: every protocol.
	TCP, UDP, ICMP bool
}

// Apply makes the installed state exactly that of the tunnel. The interface has to exist. It
// replaces the table in one transaction. New routes are there before it, and old ones are removed
// after it. On an error the former state stays.
func (t Tunnel) Apply(context.Context) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return explainError("open netlink", err)
	}
	defer h.Close()
	link, err := h.LinkByName(t.Interface)
	if err != nil {
		return explainError("find interface "+t.Interface, err)
	}
	t.routeTable = tunnelRoutes + link.Attrs().Index
	if err := t.addRoutes(h); err != nil {
		return err
	}
	if err := replaceTable(t.buildRuleset()); err != nil {
		return err
	}
	return t.removeRoutes(h, t.usedFamilies())
}

// IsInstalled reports whether the table is there. It returns true if it may not look.
func (t Tunnel) IsInstalled() bool {
	c, err := nftables.New()
	if err != nil {
		return true
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	return err != nil || slices.ContainsFunc(tables, func(is *nftables.Table) bool { return is.Name == t.tableName() })
}

// Remove removes what Apply has made, also after the interface has gone.
func (t Tunnel) Remove(context.Context) error {
	c, err := nftables.New()
	if err != nil {
		return explainError("open nftables", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: t.tableName()}
	c.AddTable(table) // deleting needs it to be there
	c.DelTable(table)
	if err := c.Flush(); err != nil {
		return explainError("delete the nftables table", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return explainError("open netlink", err)
	}
	defer h.Close()
	return t.removeRoutes(h, nil)
}

// Obstacles returns what keeps connections out of the tunnel from the proxy, and the proxy's own
// connections from the world. It needs CAP_NET_ADMIN.
func (t Tunnel) Obstacles() ([]Obstacle, error) {
	return findObstacles([]interception{t.interception()})
}

// interception returns what the firewall has to let through for the tunnel.
func (t Tunnel) interception() interception {
	return interception{
		mode: TPROXY, port: t.Port, mark: DefaultMark, interfaces: []string{t.Interface}, families: t.usedFamilies(),
		ports: somePorts,
	}
}

// addRoutes routes captured packets of the tunnel to this machine. It does not touch routes that
// are right, because a packet of an open connection must not go elsewhere in between.
func (t Tunnel) addRoutes(h *netlink.Handle) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return explainError("find lo", err)
	}
	for _, f := range t.usedFamilies() {
		route := localRoute(t.routeTable, f, lo.Attrs().Index)
		route.Protocol = TunnelProtocol
		if err := h.RouteReplace(route); err != nil {
			return explainError(fmt.Sprintf("add the local %s route to table %d (lo must be up)", f.name, t.routeTable), err)
		}
		if err := h.RuleAdd(t.policyRule(f)); err != nil && !errors.Is(err, syscall.EEXIST) {
			return explainError(fmt.Sprintf("add the %s policy rule for %s", f.name, t.Interface), err)
		}
	}
	return nil
}

// policyRule returns the policy rule for marked packets from the interface.
func (t Tunnel) policyRule(f family) *netlink.Rule {
	rule := policyRule(Rules{Mark: DefaultMark, RouteTable: t.routeTable}, f)
	rule.Priority, rule.Protocol, rule.IifName = tunnelPriority, TunnelProtocol, t.Interface
	return rule
}

// removeRoutes removes the policy rules with the interface's name, and the routes that they lead
// to. It keeps the present ones of some families.
func (t Tunnel) removeRoutes(h *netlink.Handle, keep []family) (err error) {
	g := routing{handle: h}
	for _, f := range []family{ipv4, ipv6} {
		rules, failed := g.listRules(f, TunnelProtocol)
		err = errors.Join(err, failed)
		for _, rule := range rules {
			if rule.IifName != t.Interface || slices.Contains(keep, f) && rule.Table == t.routeTable {
				continue
			}
			route := localRoute(rule.Table, f, 0)
			route.Protocol = TunnelProtocol
			err = errors.Join(err, g.deleteObject(object{rule: &rule}), g.deleteObject(object{route: route}))
		}
	}
	return err
}

// usedFamilies returns the families of the addresses inside.
func (t Tunnel) usedFamilies() []family {
	return slices.DeleteFunc([]family{ipv4, ipv6}, func(f family) bool {
		return !slices.ContainsFunc(t.Inside, func(p netip.Prefix) bool { return p.Addr().Is4() == f.isIPv4() })
	})
}

// tableName returns the name of the tunnel's table.
func (t Tunnel) tableName() string { return tunnelTable + t.Interface }

// buildRuleset builds the tunnel's table.
//
//	prerouting   TCP from the tunnel, but to this machine     to us, with the ICMP errors about it
//	dns          port 53 at the gateway's own address         to the name server
//	input        from the tunnel to this machine              refused, but for pings, names, answers and Open
//	forward      from the tunnel to a peer                    passes, unless Isolate, and not Open
//	             from the tunnel to elsewhere                 passes, unless Closed, and not Open
//	             from elsewhere into the tunnel               answers alone, but for From
//	both         what a Verdict refuses                       refused, Open or not
//	postrouting  from the tunnel to elsewhere, From into it   in this machine's name
func (t Tunnel) buildRuleset() ruleset {
	r := tunnelRuleset{
		ruleset: ruleset{table: t.tableName()}, tunnel: t, families: t.usedFamilies(),
		closed: map[family]set{}, open: map[family]set{}, outside: map[family]set{}, verdicts: map[family][][]clause{},
		from: fromInterface(t.Interface), to: toInterface(t.Interface),
	}
	for _, f := range r.families {
		r.closed[f] = r.addSet("closed"+f.version, f.addresses, addressElements(t.Closed, f.isIPv4()))
		r.open[f] = r.addSet("open"+f.version, f.addresses, addressElements(t.Open, f.isIPv4()))
		r.outside[f] = r.addSet("outside"+f.version, f.addresses, addressElements(t.From, f.isIPv4()))
		for i, v := range t.Verdicts {
			r.verdicts[f] = append(r.verdicts[f], r.verdictRules(v, f, strconv.Itoa(i)+f.version)...)
		}
	}
	r.captureTCP()
	r.translateNames()
	r.guardMachine()
	r.guardForwarding()
	r.masqueradePeers()
	return r.ruleset
}

// tunnelRuleset is the ruleset of a tunnel while it is built.
type tunnelRuleset struct {
	ruleset
	tunnel                Tunnel
	families              []family
	closed, open, outside map[family]set // addresses of Tunnel.Closed, Open and From
	verdicts              map[family][][]clause
	from, to              clause // the tunnel's interface
}

// addVerdicts adds the rules of all verdicts for packets that where matches.
func (r *tunnelRuleset) addVerdicts(where func(f family) []clause) {
	for _, f := range r.families {
		for _, v := range r.verdicts[f] {
			r.addRule(slices.Concat(where(f), v)...)
		}
	}
}

// captureTCP adds the chain prerouting.
func (r *tunnelRuleset) captureTCP() {
	r.beginChain("prerouting", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle,
		"type filter hook prerouting priority mangle")
	r.addRule(notFromInterface(r.tunnel.Interface), returnToCaller())
	r.deliverOpen(DefaultMark, r.families)
	r.addRule(toThisMachine(), returnToCaller())
	for _, f := range r.families {
		r.addRule(ofFamily(f), isTCP(), countPackets(), toProxy(f, r.tunnel.Port), addMark(DefaultMark), acceptPacket())
	}
}

// translateNames adds the chain dns.
func (r *tunnelRuleset) translateNames() {
	server := r.tunnel.DNS
	r.beginChain("dns", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest,
		"type nat hook prerouting priority dstnat")
	for _, gateway := range r.tunnel.Gateways {
		if f := familyOf(gateway); server.IsValid() && f == familyOf(server.Addr()) {
			for _, protocol := range []clause{isUDP(), isTCP()} {
				r.addRule(r.from, ofFamily(f), targetIs(f, gateway), protocol, toPort(dnsPort), translateTo(f, server))
			}
		}
	}
}

// guardMachine adds the chain input.
func (r *tunnelRuleset) guardMachine() {
	r.beginChain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter,
		"type filter hook input priority filter")
	r.addRule(notFromInterface(r.tunnel.Interface), returnToCaller())
	r.addRule(hasMark(DefaultMark), returnToCaller())
	r.addRule(isAnswer(), returnToCaller())
	r.addRule(ofTranslated(), returnToCaller())
	for _, gateway := range r.tunnel.Gateways {
		f := familyOf(gateway)
		r.addRule(ofFamily(f), targetIs(f, gateway), isEcho(f), returnToCaller())
	}
	r.addVerdicts(func(f family) []clause { return []clause{ofFamily(f), targetIn(f, r.open[f])} })
	for _, f := range r.families {
		r.addRule(ofFamily(f), targetIn(f, r.open[f]), returnToCaller())
	}
	r.addRule(isTCP(), countPackets(), rejectWithReset())
	r.addRule(countPackets(), rejectPacket())
}

// guardForwarding adds the chain forward.
func (r *tunnelRuleset) guardForwarding() {
	from, to, open := r.from, r.to, r.open
	r.beginChain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter,
		"type filter hook forward priority filter")
	r.addRule(isAnswer(), returnToCaller())
	r.addVerdicts(func(f family) []clause { return []clause{from, ofFamily(f), targetIn(f, open[f])} })
	if r.tunnel.Isolate {
		for _, f := range r.families {
			r.addRule(from, to, ofFamily(f), targetIn(f, open[f]), returnToCaller())
		}
		r.addRule(from, to, countPackets(), rejectPacket())
	} else {
		r.addVerdicts(func(f family) []clause { return []clause{from, to, ofFamily(f)} })
		r.addRule(from, to, returnToCaller())
	}
	for _, f := range r.families {
		r.addRule(from, ofFamily(f), targetIn(f, open[f]), returnToCaller())
		r.addRule(from, ofFamily(f), targetIn(f, r.closed[f]), countPackets(), rejectPacket())
	}
	r.addVerdicts(func(f family) []clause { return []clause{from, ofFamily(f)} })
	r.addRule(from, returnToCaller())
	for _, f := range r.families {
		r.addRule(to, ofFamily(f), sourceIn(f, r.outside[f]), returnToCaller())
	}
	r.addRule(to, countPackets(), rejectPacket())
}

// masqueradePeers adds the chain postrouting.
func (r *tunnelRuleset) masqueradePeers() {
	r.beginChain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource,
		"type nat hook postrouting priority srcnat")
	for _, f := range r.families {
		r.addRule(r.to, ofFamily(f), sourceIn(f, r.outside[f]), masqueradeSource())
	}
	r.addRule(r.to, returnToCaller())
	for _, f := range r.families {
		inside := r.addSet("inside"+f.version, f.addresses, addressElements(r.tunnel.Inside, f.isIPv4()))
		r.addRule(ofFamily(f), sourceIn(f, inside), masqueradeSource())
	}
}
