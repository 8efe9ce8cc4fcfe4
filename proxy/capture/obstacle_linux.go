package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Obstacle is a chain of this machine's firewall that drops what a proxy that captures connections needs, or may
// do so: nobody can look into it.
type Obstacle struct {
	Hook  string // input or output
	Chain string
	Drops string // which packets
	Cure  string // a command; more than one where it depends on the firewall
}

func (o Obstacle) String() string {
	return fmt.Sprintf("%s chain %s drops %s: %s", o.Hook, o.Chain, o.Drops, o.Cure)
}

// trap is what the firewall has to let through for rules that are in force, or will be.
type trap struct {
	mode       Mode
	port       uint16
	mark, own  uint32 // 0: unknown
	interfaces []string
	families   []family
	ports      []uint16 // destinations that stand for all
}

// somePorts stand for all destinations: what a firewall lets in for services of its own machine is not enough.
var somePorts = []uint16{443, 80, 50000}

func (r Rules) trap() trap {
	t := trap{
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

// Obstacles returns what keeps connections of these rules from the proxy, and the proxy's own from the world. It
// takes CAP_NET_ADMIN.
func (r Rules) Obstacles() ([]Obstacle, error) {
	r, err := r.withDefaults()
	if err != nil {
		return nil, err
	}
	return obstacles([]trap{r.trap()})
}

// trap returns what a tunnel needs.
func (t Tunnel) trap() trap {
	return trap{
		mode: TPROXY, port: t.Port, mark: DefaultMark, interfaces: []string{t.Interface}, families: t.usedFamilies(),
		ports: somePorts,
	}
}

// Obstacles returns what keeps connections out of the tunnel from the proxy, and the proxy's own from the world. It
// takes CAP_NET_ADMIN.
func (t Tunnel) Obstacles() ([]Obstacle, error) { return obstacles([]trap{t.trap()}) }

// Obstacles returns the same of the rules that are in force, those around tunnels among them. Where none are, it
// returns what would keep connections of default rules from a proxy, and inForce is false.
func Obstacles() (found []Obstacle, inForce bool, err error) {
	traps, err := installed()
	if err != nil {
		return nil, false, err
	}
	if len(traps) == 0 {
		r := Rules{Mode: TPROXY, Port: 1, Interfaces: []string{AnyInterface}}
		if r, err = r.withDefaults(); err != nil {
			return nil, false, err
		}
		t := r.trap()
		t.own, t.ports = 0, somePorts[:1]
		found, err = obstacles([]trap{t})
		return found, false, err
	}
	found, err = obstacles(traps)
	return found, true, err
}

// passage is a packet that one hook has to let through.
type passage struct {
	packet
	trap  *trap
	hook  *nftables.ChainHook
	what  string                     // the packets it stands for
	match func(iptables bool) string // a match of them, for the cure
}

func obstacles(traps []trap) ([]Obstacle, error) {
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
		for _, t := range traps {
			passages := t.passages(m)
			for _, chain := range w.filters(hook) {
				if strings.HasPrefix(chain.Table.Name, tunnelTable) {
					continue // ours, which knows what we need
				}
				o, err := w.obstructs(chain, passages)
				if err != nil {
					return nil, err
				}
				found = append(found, o...)
			}
			for _, l := range legacyFilters() {
				if hook == nftables.ChainHookInput && slices.Contains(t.families, l.family) {
					found = append(found, l.obstacle(passages))
				}
			}
		}
	}
	return slices.Compact(found), nil
}

// obstructs returns what a chain certainly drops, once for each cure.
func (w *firewall) obstructs(chain *nftables.Chain, passages []passage) (found []Obstacle, err error) {
	for _, p := range passages {
		f := p.packet.family
		if *p.hook != *chain.Hooknum ||
			chain.Table.Family == nftables.TableFamilyIPv4 && !f.isIPv4() ||
			chain.Table.Family == nftables.TableFamilyIPv6 && f.isIPv4() {
			continue
		}
		cure := w.cure(chain, p)
		if slices.ContainsFunc(found, func(o Obstacle) bool { return o.Cure == cure }) {
			continue
		}
		is, err := w.fateOf(p.packet, chain)
		if err != nil {
			return nil, err
		}
		if is == mayDrop {
			found = append(found, Obstacle{hookName(chain.Hooknum), nameOf(chain), p.what, cure})
		}
	}
	return found, nil
}

func hookName(hook *nftables.ChainHook) string {
	if *hook == *nftables.ChainHookInput {
		return "input"
	}
	return "output"
}

// passages returns the packets that begin a captured connection: the client's first, the answer and what follows,
// and of the proxy's own connection the first and the answer.
func (t *trap) passages(m machine) []passage {
	var all []passage
	for _, f := range t.families {
		version := "IPv4"
		if !f.isIPv4() {
			version = "IPv6"
		}
		for _, from := range t.sides(m) {
			by := ""
			if len(from) == 1 {
				by = " from " + from[0].name
			}
			for _, port := range t.ports {
				in := packet{
					family: f, from: from, flags: flagSYN, state: expr.CtStateBitNEW, mark: bearing(t.mark),
					targetPort: portValue(port), sourceType: unix.RTN_UNICAST, targetType: unix.RTN_UNICAST,
					foreign: m.addresses,
				}
				back := packet{
					family: f, to: from, flags: flagSYN | flagACK, state: expr.CtStateBitESTABLISHED, reply: true,
					sourcePort: in.targetPort, sourceType: unix.RTN_UNICAST, targetType: unix.RTN_UNICAST, foreign: m.addresses,
				}
				match := func(iptables bool) string { return markMatch(t.mark, iptables) }
				if t.mode == Redirect {
					in.mark, in.foreign, in.targetPort = nil, nil, portValue(t.port)
					in.translated, back.translated = true, true
					in.targetType, back.sourceType = unix.RTN_LOCAL, unix.RTN_LOCAL
					back.sourcePort = in.targetPort
					match = func(iptables bool) string { return redirectedMatch(t.port, iptables) }
				}
				next := in
				next.flags, next.state = flagACK, expr.CtStateBitESTABLISHED
				all = append(all,
					passage{
						in, t, nftables.ChainHookInput,
						fmt.Sprintf("captured connections%s, such as over %s to port %d", by, version, port), match,
					},
					passage{
						next, t, nftables.ChainHookInput, "what follows the first packet of captured connections" + by,
						establishedMatch,
					},
					passage{back, t, nftables.ChainHookOutput, "answers to captured clients" + by, establishedMatch})
			}
		}
		for _, port := range t.ports {
			dial := packet{
				family: f, to: m.outside, flags: flagSYN, state: expr.CtStateBitNEW, mark: bearing(t.own),
				targetPort: portValue(port), targetType: unix.RTN_UNICAST, foreign: m.addresses,
			}
			answer := packet{
				family: f, from: m.outside, flags: flagSYN | flagACK, state: expr.CtStateBitESTABLISHED, reply: true,
				sourcePort: dial.targetPort, sourceType: unix.RTN_UNICAST, targetType: unix.RTN_LOCAL,
			}
			all = append(all,
				passage{
					dial, t, nftables.ChainHookOutput,
					fmt.Sprintf("the proxy's own connections, such as over %s to port %d", version, port),
					func(iptables bool) string { return markMatch(t.own, iptables) },
				},
				passage{answer, t, nftables.ChainHookInput, "answers to the proxy's own connections", establishedMatch})
		}
	}
	return all
}

// sides returns the interfaces that clients come in by, each alone where the rules name them.
func (t *trap) sides(m machine) (sides [][]iface) {
	if slices.Contains(t.interfaces, AnyInterface) {
		return [][]iface{m.outside}
	}
	for _, i := range m.named(t.interfaces) {
		sides = append(sides, []iface{i})
	}
	return sides
}

func markMatch(mark uint32, iptables bool) string {
	if mark == 0 { // unknown: what the configuration says
		mark = DefaultOwnMark
	}
	if iptables {
		return fmt.Sprintf("-m mark --mark 0x%x/0x%x", mark, mark)
	}
	return fmt.Sprintf("meta mark and 0x%08x == 0x%08x", mark, mark)
}

func redirectedMatch(port uint16, iptables bool) string {
	if iptables {
		return fmt.Sprintf("-p tcp --dport %d -m conntrack --ctstate DNAT", port)
	}
	return fmt.Sprintf("ct status dnat tcp dport %d", port)
}

func establishedMatch(iptables bool) string {
	if iptables {
		return "-m conntrack --ctstate ESTABLISHED,RELATED"
	}
	return "ct state established,related"
}

// cure returns the command that has a chain let packets through, and what keeps it so under the firewalls that
// write their chains anew.
func (w *firewall) cure(chain *nftables.Chain, p passage) string {
	now := fmt.Sprintf("nft insert rule %s %s accept", nameOf(chain), p.match(false))
	table := chain.Table
	has := func(name string) bool { return w.chain(table, name) != nil }
	switch {
	case table.Name == "firewalld":
		var zone strings.Builder
		for _, name := range p.trap.interfaces {
			fmt.Fprintf(&zone, "firewall-cmd --permanent --zone=trusted --change-interface=%s && ", name)
		}
		if *chain.Hooknum != *nftables.ChainHookInput || slices.Contains(p.trap.interfaces, AnyInterface) {
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
		cure := fmt.Sprintf("%s -I %s %s -j ACCEPT (or %s)", program, chain.Name, p.match(true), now)
		if before := rules + "-before-" + direction; has(before) {
			cure += fmt.Sprintf("; for ufw to keep it: -A %s %s -j ACCEPT, as the first rule in %s", before, p.match(true), file)
		}
		return cure
	case table.Name == "fw4":
		return fmt.Sprintf("%s; for OpenWrt to keep it: the line %q in /usr/share/nftables.d/chain-pre/%s/penstock.nft",
			now, p.match(false)+" accept", chain.Name)
	}
	return now
}

// obstacle says that nobody can tell what the older iptables does with captured connections.
func (l legacyFilter) obstacle(passages []passage) Obstacle {
	return Obstacle{
		Hook: "input", Chain: l.words("INPUT"), Drops: "captured connections, if it drops what it does not know",
		Cure: fmt.Sprintf("%s -I INPUT %s -j ACCEPT", l.command(), passages[0].match(true)),
	}
}

// installed returns what the rules in force need, as their table tells it.
func installed() ([]trap, error) {
	w, err := readFirewall()
	if err != nil {
		return nil, err
	}
	var traps []trap
	for _, c := range w.chains {
		tunnel, ofTunnel := strings.CutPrefix(c.Table.Name, tunnelTable)
		if c.Table.Family != nftables.TableFamilyINet || c.Name != ourChain || c.Table.Name != Table && !ofTunnel {
			continue
		}
		t, err := w.readTrap(c)
		switch {
		case errors.Is(err, syscall.ENOENT): // replaced in the meantime
			continue
		case err != nil:
			return nil, err
		case len(t.families) == 0:
			continue // somebody else's
		}
		if ofTunnel {
			t.own, t.interfaces = 0, []string{tunnel}
		}
		traps = append(traps, t)
	}
	return traps, nil
}

// readTrap reads a chain that Rules or a Tunnel made: marks, the listener's port, families, and the sets.
func (w *firewall) readTrap(c *nftables.Chain) (trap, error) {
	t := trap{mode: TPROXY, interfaces: []string{AnyInterface}, ports: somePorts}
	rules, err := w.rulesOf(c)
	if err != nil {
		return t, err
	}
	if c.Type == nftables.ChainTypeNAT {
		t.mode = Redirect
	}
	for i, rule := range rules {
		var port []byte
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
			t.families = append(t.families, captured)
		}
	}
	return t, nil
}

// readSet reads one of the sets that say which connections are captured.
func (w *firewall) readSet(t *trap, table *nftables.Table, name string) error {
	if name != "interfaces" && name != "ports" {
		return nil
	}
	s, err := w.set(table, name)
	if err != nil {
		return err
	}
	if name == "interfaces" {
		t.interfaces = nil
	} else {
		t.ports = nil
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
