package capture

import (
	"fmt"
	"slices"
	"strings"

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

// Obstacles returns what keeps connections of these rules from the proxy, and the proxy's own from the world. It
// takes CAP_NET_ADMIN.
func (r Rules) Obstacles() ([]Obstacle, error) {
	r, err := r.withDefaults()
	if err != nil {
		return nil, err
	}
	return findObstacles([]interception{r.interception()})
}

// Obstacles returns what keeps connections out of the tunnel from the proxy, and the proxy's own from the world. It
// takes CAP_NET_ADMIN.
func (t Tunnel) Obstacles() ([]Obstacle, error) {
	return findObstacles([]interception{t.interception()})
}

// Obstacles returns the same of the rules that are in force, those around tunnels among them. Where none are, it
// returns what would keep connections of default rules from a proxy, and inForce is false.
func Obstacles() (found []Obstacle, inForce bool, err error) {
	traps, err := readInterceptions()
	if err != nil {
		return nil, false, err
	}
	if len(traps) == 0 {
		r := Rules{Mode: TPROXY, Port: 1, Interfaces: []string{AnyInterface}}
		if r, err = r.withDefaults(); err != nil {
			return nil, false, err
		}
		t := r.interception()
		t.own, t.ports = 0, somePorts[:1]
		found, err = findObstacles([]interception{t})
		return found, false, err
	}
	found, err = findObstacles(traps)
	return found, true, err
}

// passage is a kind of packets that one hook has to let through. A chain is an obstacle to it if it drops them all.
type passage struct {
	family       family
	packets      []packet
	interception *interception
	hook         *nftables.ChainHook
	what         string                     // the packets it stands for
	match        func(iptables bool) string // a match of them, for the cure
}

func findObstacles(traps []interception) ([]Obstacle, error) {
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
		f := p.family
		if *p.hook != *chain.Hooknum ||
			chain.Table.Family == nftables.TableFamilyIPv4 && !f.isIPv4() ||
			chain.Table.Family == nftables.TableFamilyIPv6 && f.isIPv4() {
			continue
		}
		cure := w.cure(chain, p)
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

func (w *firewall) dropsEvery(packets []packet, chain *nftables.Chain) (bool, error) {
	for _, p := range packets {
		if is, err := w.fateOf(p, chain); err != nil || is != mayDrop {
			return false, err
		}
	}
	return true, nil
}

func hookName(hook *nftables.ChainHook) string {
	if *hook == *nftables.ChainHookInput {
		return "input"
	}
	return "output"
}

// passages returns the packets that begin a captured connection: the client's first, the answer and what follows,
// and of the proxy's own connection the first and the answer.
func (t *interception) passages(m machine) []passage {
	var all []passage
	for _, f := range t.families {
		version := "IPv4"
		if !f.isIPv4() {
			version = "IPv6"
		}
		for _, clients := range t.clientGroups(m, f) {
			by := ""
			if !slices.Contains(t.interfaces, AnyInterface) {
				by = " from " + clients[0].via.name
			}
			for _, port := range t.ports {
				begin := passage{
					family: f, interception: t, hook: nftables.ChainHookInput,
					what:  fmt.Sprintf("captured connections%s, such as over %s to port %d", by, version, port),
					match: func(iptables bool) string { return markMatch(t.mark, iptables) },
				}
				if t.mode == Redirect {
					begin.match = func(iptables bool) string { return redirectedMatch(t.port, iptables) }
				}
				follow, answer := begin, begin
				follow.what, follow.match = "what follows the first packet of captured connections"+by, establishedMatch
				answer.hook = nftables.ChainHookOutput
				answer.what, answer.match = "answers to captured clients"+by, establishedMatch
				for i, c := range clients {
					in := t.firstPacket(f, c, serverAddresses(f)[i%len(serverAddresses(f))], port)
					begin.packets = append(begin.packets, in)
					answer.packets = append(answer.packets, in.answerPacket())
					in.flags, in.state = flagACK, expr.CtStateBitESTABLISHED
					follow.packets = append(follow.packets, in)
				}
				all = append(all, begin, follow, answer)
			}
		}
		for _, port := range t.ports {
			begin := passage{
				family: f, interception: t, hook: nftables.ChainHookOutput,
				what:  fmt.Sprintf("the proxy's own connections, such as over %s to port %d", version, port),
				match: func(iptables bool) string { return markMatch(t.own, iptables) },
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
			all = append(all, begin, answer)
		}
	}
	return all
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
