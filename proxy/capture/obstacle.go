package capture

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Obstacle is a chain of this machine's firewall that drops packets which a capturing proxy needs.
// A chain of the older iptables only may do so.
type Obstacle struct {
	// Hook is input or output.
	Hook  string
	Chain string
	// Drops describes the packets.
	Drops string
	// Cure is a command. There are several where they depend on the firewall.
	Cure string
}

// String returns the obstacle in one sentence.
func (o Obstacle) String() string {
	return fmt.Sprintf("%s chain %s drops %s: %s", o.Hook, o.Chain, o.Drops, o.Cure)
}

// Obstacles returns the obstacles to the installed rules, and to those around tunnels. Where none
// are installed, it returns the obstacles to default rules, and inForce is false. It needs
// CAP_NET_ADMIN.
func Obstacles() (found []Obstacle, inForce bool, err error) {
	interceptions, err := readInterceptions()
	if err != nil {
		return nil, false, err
	}
	if len(interceptions) == 0 {
		r := Rules{Mode: TPROXY, Port: 1, Interfaces: []string{AnyInterface}}
		if r, err = r.withDefaults(); err != nil {
			return nil, false, err
		}
		t := r.interception()
		t.own, t.ports = 0, somePorts[:1]
		found, err = findObstacles([]interception{t})
		return found, false, err
	}
	found, err = findObstacles(interceptions)
	return found, true, err
}

// findObstacles evaluates the chains of the hooks input and output with packets of each
// interception.
//
//	interception ─▶ passages of packets ─▶ evaluation of each base chain ─▶ fate
//
// A chain is an obstacle only if it certainly drops all packets of a passage. A part of a rule that
// is not understood, or that depends on unknown parts of a packet, may match or not: then the
// packet may pass, and there is no obstacle.
func findObstacles(interceptions []interception) ([]Obstacle, error) {
	w, err := readFirewall()
	if err != nil {
		return nil, err
	}
	m, err := readMachine()
	if err != nil {
		return nil, err
	}
	var found []Obstacle
	for _, hook := range []*nftables.ChainHook{nftables.ChainHookInput, nftables.ChainHookOutput} {
		for _, t := range interceptions {
			passages := t.passages(m)
			for _, chain := range w.filterChains(hook) {
				if strings.HasPrefix(chain.Table.Name, tunnelTable) {
					continue // ours, which knows what we need
				}
				o, err := w.obstaclesIn(chain, passages)
				if err != nil {
					return nil, err
				}
				found = append(found, o...)
			}
			for _, l := range legacyFilters() {
				if hook == nftables.ChainHookInput && slices.Contains(t.families, l.family) {
					found = append(found, l.possibleObstacle(passages))
				}
			}
		}
	}
	return slices.Compact(found), nil
}

// passage is packets of one kind that a hook has to let through.
type passage struct {
	family family
	// packets stand for all of the passage. A chain is an obstacle if it drops them all.
	packets      []packet
	interception *interception
	hook         *nftables.ChainHook
	// what describes the packets.
	what string
	// match is a match of them for the cure.
	match cureMatch
}

// cureMatch is a match of packets as iptables writes it, and as nft does.
type cureMatch struct{ iptables, nft string }

// interception is what the firewall has to let through for rules, installed or not.
type interception struct {
	mode Mode
	port uint16
	// mark and own are the marks of captured and own packets. 0: unknown.
	mark, own  uint32
	interfaces []string
	// tunnel reports whether it is of a tunnel, which restores lost routes and rules by itself.
	tunnel   bool
	families []family
	// packets are those captured since the rules were made, by family.
	packets []uint64
	// ports are destinations that stand for all.
	ports []uint16
}

// somePorts stand for all destinations. A firewall may let one of them in for a service of its own
// machine, but not all.
var somePorts = []uint16{443, 80, 50000}

// allBits is the mask of a mark that is known.
const (
	allBits       = 1<<32 - 1
	ephemeralPort = 49173 // in the range that clients dial from
)

// client is an address to capture connections from, and the interface that they come in by.
type client struct {
	via     *iface
	address netip.Addr
}

// readInterceptions reads the installed rules from their tables.
func readInterceptions() ([]interception, error) {
	w, err := readFirewall()
	if err != nil {
		return nil, err
	}
	var interceptions []interception
	for _, c := range w.chains {
		tunnel, ofTunnel := strings.CutPrefix(c.Table.Name, tunnelTable)
		if c.Table.Family != nftables.TableFamilyINet || c.Name != ourChain || c.Table.Name != Table && !ofTunnel {
			continue
		}
		t, err := w.readInterception(c)
		switch {
		case errors.Is(err, syscall.ENOENT): // replaced in the meantime
			continue
		case err != nil:
			return nil, err
		case len(t.families) == 0:
			continue // another program made it
		}
		if ofTunnel {
			t.own, t.interfaces, t.tunnel = 0, []string{tunnel}, true
		}
		interceptions = append(interceptions, t)
	}
	return interceptions, nil
}

// readInterception reads a chain that Rules or a Tunnel has made: marks, the listener's port,
// families, and the sets. Without families the chain is another program's.
func (w *firewall) readInterception(c *nftables.Chain) (interception, error) {
	t := interception{mode: TPROXY, interfaces: []string{AnyInterface}, ports: somePorts}
	rules, err := w.rulesOf(c)
	if err != nil {
		return t, err
	}
	if c.Type == nftables.ChainTypeNAT {
		t.mode = Redirect
	}
	for i, rule := range rules {
		var port []byte
		var packets uint64
		captured := ipv4
		for j, x := range rule.Exprs {
			switch x := x.(type) {
			case *expr.Bitwise:
				switch {
				case i == 0 && len(x.Mask) == 4:
					t.own = binary.NativeEndian.Uint32(x.Mask)
				case len(x.Xor) == 4 && !slices.Equal(x.Xor, nativeBytes(0)):
					t.mark = binary.NativeEndian.Uint32(x.Xor)
				}
			case *expr.Immediate:
				port = x.Data
			case *expr.Counter:
				packets = x.Packets
			case *expr.Meta:
				if x.Key == expr.MetaKeyNFPROTO && j+1 < len(rule.Exprs) {
					if is, ok := rule.Exprs[j+1].(*expr.Cmp); ok && slices.Equal(is.Data, []byte{ipv6.proto}) {
						captured = ipv6
					}
				}
			case *expr.Lookup:
				if err := w.readSet(&t, c.Table, x.SetName); err != nil {
					return t, err
				}
			}
		}
		if len(port) == 2 {
			t.port = binary.BigEndian.Uint16(port)
			t.families, t.packets = append(t.families, captured), append(t.packets, packets)
		}
	}
	return t, nil
}

// readSet reads one of the sets that select the captured connections.
func (w *firewall) readSet(t *interception, table *nftables.Table, name string) error {
	switch name {
	case "interfaces":
		t.interfaces = nil
	case "ports":
		t.ports = nil
	default:
		return nil
	}
	s, err := w.readFilterSet(table, name)
	if err != nil {
		return err
	}
	for _, e := range s.elements {
		switch {
		case e.IntervalEnd:
		case name == "interfaces":
			t.interfaces = append(t.interfaces, unix.ByteSliceToString(e.Key))
		case len(e.Key) == 2:
			t.ports = append(t.ports, binary.BigEndian.Uint16(e.Key))
		}
	}
	return nil
}

// obstaclesIn returns the passages that a chain certainly drops, once for each cure.
func (w *firewall) obstaclesIn(chain *nftables.Chain, passages []passage) (found []Obstacle, err error) {
	for _, p := range passages {
		f := p.family
		if *p.hook != *chain.Hooknum ||
			chain.Table.Family == nftables.TableFamilyIPv4 && !f.isIPv4() ||
			chain.Table.Family == nftables.TableFamilyIPv6 && f.isIPv4() {
			continue
		}
		cure := w.cureFor(chain, p)
		if slices.ContainsFunc(found, func(o Obstacle) bool { return o.Cure == cure }) {
			continue
		}
		drops, err := w.dropsEvery(p.packets, chain)
		if err != nil {
			return nil, err
		}
		if drops {
			found = append(found, Obstacle{hookName(chain.Hooknum), nameOf(chain), p.what, cure})
		}
	}
	return found, nil
}

// dropsEvery reports whether a chain certainly drops every packet.
func (w *firewall) dropsEvery(packets []packet, chain *nftables.Chain) (bool, error) {
	for _, p := range packets {
		if is, err := w.fateOf(p, chain); err != nil || is != mayDrop {
			return false, err
		}
	}
	return true, nil
}

// hookName returns the name of a hook, as nft writes it.
func hookName(hook *nftables.ChainHook) string {
	if *hook == *nftables.ChainHookInput {
		return "input"
	}
	return "output"
}

// passages returns the packets that begin captured connections and the proxy's own.
func (t *interception) passages(m machine) (all []passage) {
	for _, f := range t.families {
		for _, clients := range t.clientGroups(m, f) {
			for _, port := range t.ports {
				all = append(all, t.clientPassages(f, clients, port)...)
			}
		}
		for _, port := range t.ports {
			all = append(all, t.ownPassages(m, f, port)...)
		}
	}
	return all
}

// clientPassages returns the packets that begin captured connections of a group of clients: the first, the answer, and
// what follows.
func (t *interception) clientPassages(f family, clients []client, port uint16) []passage {
	by := ""
	if !slices.Contains(t.interfaces, AnyInterface) {
		by = " from " + clients[0].via.name
	}
	begin := passage{
		family: f, interception: t, hook: nftables.ChainHookInput,
		what:  fmt.Sprintf("captured connections%s, such as over IPv%s to port %d", by, f.version, port),
		match: markMatch(t.mark),
	}
	if t.mode == Redirect {
		begin.match = cureMatch{
			fmt.Sprintf("-p tcp --dport %d -m conntrack --ctstate DNAT", t.port),
			fmt.Sprintf("ct status dnat tcp dport %d", t.port),
		}
	}
	follow, answer := begin, begin
	follow.what, follow.match = "what follows the first packet of captured connections"+by, establishedMatch
	answer.hook = nftables.ChainHookOutput
	answer.what, answer.match = "answers to captured clients"+by, establishedMatch
	servers := serverAddresses(f)
	for i, c := range clients {
		in := t.firstPacket(f, c, servers[i%len(servers)], port)
		begin.packets = append(begin.packets, in)
		answer.packets = append(answer.packets, in.answerPacket())
		in.flags, in.state = flagACK, expr.CtStateBitESTABLISHED
		follow.packets = append(follow.packets, in)
	}
	return []passage{begin, follow, answer}
}

// ownPassages returns the packets that begin the proxy's own connections: the first, and the answer.
func (t *interception) ownPassages(m machine, f family, port uint16) []passage {
	begin := passage{
		family: f, interception: t, hook: nftables.ChainHookOutput,
		what:  fmt.Sprintf("the proxy's own connections, such as over IPv%s to port %d", f.version, port),
		match: markMatch(t.own),
	}
	answer := passage{
		family: f, interception: t, hook: nftables.ChainHookInput,
		what: "answers to the proxy's own connections", match: establishedMatch,
	}
	for _, by := range m.anyInterface() {
		for _, server := range serverAddresses(f) {
			dial := packet{
				family: f, to: by, target: server, flags: flagSYN, state: expr.CtStateBitNEW,
				sourcePort: ephemeralPort, targetPort: port, sourceType: unix.RTN_LOCAL, targetType: unix.RTN_UNICAST,
			}
			if t.own != 0 {
				dial.mark, dial.known = t.own, allBits
			}
			begin.packets = append(begin.packets, dial)
			answer.packets = append(answer.packets, dial.answerPacket())
		}
	}
	return []passage{begin, answer}
}

// markMatch returns a match of the mark.
func markMatch(mark uint32) cureMatch {
	mark = cmp.Or(mark, DefaultOwnMark) // 0 is unknown: what the configuration says
	return cureMatch{
		fmt.Sprintf("-m mark --mark 0x%x/0x%x", mark, mark), fmt.Sprintf("meta mark and 0x%08x == 0x%08x", mark, mark),
	}
}

// establishedMatch is a match of packets in open connections.
var establishedMatch = cureMatch{"-m conntrack --ctstate ESTABLISHED,RELATED", "ct state established,related"}

// cureFor returns the command that makes a chain let packets through. It adds how to keep it under
// firewalls that write their chains anew.
func (w *firewall) cureFor(chain *nftables.Chain, p passage) string {
	now := fmt.Sprintf("nft insert rule %s %s accept", nameOf(chain), p.match.nft)
	table := chain.Table
	has := func(name string) bool { return w.findChain(table, name) != nil }
	switch {
	case table.Name == "firewalld":
		var zone strings.Builder
		for _, name := range p.interception.interfaces {
			fmt.Fprintf(&zone, "firewall-cmd --permanent --zone=trusted --change-interface=%s && ", name)
		}
		if *chain.Hooknum != *nftables.ChainHookInput || slices.Contains(p.interception.interfaces, AnyInterface) {
			return now + " (until firewalld reloads)"
		}
		trusted := zone.String() + "firewall-cmd --reload (firewalld then lets in all that comes from there)"
		if w.isOwned(table) {
			return trusted
		}
		return now + "; or, beyond firewalld's next reload, " + trusted
	case table.Family != nftables.TableFamilyINet && (chain.Name == "INPUT" || chain.Name == "OUTPUT"):
		program, rules, direction := "iptables", "ufw", strings.ToLower(chain.Name)
		file := "/etc/ufw/before.rules"
		if table.Family == nftables.TableFamilyIPv6 {
			program, rules, file = "ip6tables", "ufw6", "/etc/ufw/before6.rules"
		}
		cure := fmt.Sprintf("%s -I %s %s -j ACCEPT (or %s)", program, chain.Name, p.match.iptables, now)
		if before := rules + "-before-" + direction; has(before) {
			cure += fmt.Sprintf("; for ufw to keep it: -A %s %s -j ACCEPT, as the first rule in %s", before,
				p.match.iptables, file)
		}
		return cure
	case table.Name == "fw4":
		return fmt.Sprintf("%s; for OpenWrt to keep it: the line %q in /usr/share/nftables.d/chain-pre/%s/penstock.nft",
			now, p.match.nft+" accept", chain.Name)
	}
	return now
}

// possibleObstacle returns an obstacle that is only possible: the rules of the older iptables are not read.
func (l legacyFilter) possibleObstacle(passages []passage) Obstacle {
	return Obstacle{
		Hook: "input", Chain: l.words("INPUT"), Drops: "captured connections, if it drops what it does not know",
		Cure: fmt.Sprintf("%s -I INPUT %s -j ACCEPT", l.command(), passages[0].match.iptables),
	}
}

// firstPacket returns the first packet of a captured connection, as the input hook sees it.
func (t *interception) firstPacket(f family, c client, server netip.Addr, port uint16) packet {
	p := packet{
		family: f, from: c.via, source: c.address, target: server, sourcePort: ephemeralPort, targetPort: port,
		flags: flagSYN, state: expr.CtStateBitNEW, mark: t.mark, known: allBits,
		sourceType: unix.RTN_UNICAST, targetType: unix.RTN_UNICAST,
	}
	if t.mode == Redirect {
		p.mark, p.target, p.targetPort = 0, c.via.globalAddress(f), t.port
		p.translated, p.targetType = true, unix.RTN_LOCAL
	}
	return p
}

// clientGroups returns clients of the captured interfaces, by network. With AnyInterface there is
// one group: clients are behind some of the interfaces, and one that passes is enough.
func (t *interception) clientGroups(m machine, f family) (groups [][]client) {
	everywhere := slices.Contains(t.interfaces, AnyInterface)
	interfaces := m.interfacesNamed(t.interfaces)
	if everywhere {
		interfaces = m.anyInterface()
	}
	for _, by := range interfaces {
		for _, addresses := range by.clientAddresses(f) {
			var group []client
			for _, a := range addresses {
				group = append(group, client{by, a})
			}
			groups = append(groups, group)
		}
	}
	if everywhere {
		groups = [][]client{slices.Concat(groups...)}
	}
	return groups
}

// LostParts returns the parts of the installed rules that have gone, in words: policy rules and
// routes, or the table where they are left without it. It needs CAP_NET_ADMIN.
func LostParts() (lost []string, err error) {
	interceptions, err := readInterceptions()
	if err != nil {
		return nil, err
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, explainError("open netlink", err)
	}
	defer h.Close()
	g := routing{handle: h}
	have, err := g.listOwn()
	if err != nil {
		return nil, err
	}
	interceptions = slices.DeleteFunc(interceptions, func(t interception) bool { return t.tunnel })
	if len(interceptions) == 0 && len(have) > 0 {
		return []string{"the nftables table inet " + Table}, nil
	}
	for _, t := range interceptions {
		if t.mode != TPROXY {
			continue
		}
		for _, f := range t.families {
			r := Rules{Mark: t.mark, RouteTable: DefaultRouteTable}
			for _, o := range have { // the policy rule names the table
				if o.rule != nil && o.rule.Priority == RulePriority && o.rule.Mark == t.mark {
					r.RouteTable = o.rule.Table
				}
			}
			for _, rule := range policyRules(r, f) {
				if !containsObject(have, object{rule: rule}) {
					lost = append(lost, fmt.Sprintf("the %s policy rule of priority %d", f.name, rule.Priority))
				}
			}
			if !containsObject(have, object{route: localRoute(r.RouteTable, f, 0)}) {
				lost = append(lost, fmt.Sprintf("the local %s route of table %d", f.name, r.RouteTable))
			}
		}
	}
	return lost, nil
}
