package capture

import (
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
)

// connectedSet is what the sets begin with that hold the machine's networks.
const connectedSet = "connected"

// ruleset is a table of ours: what it looks things up in, and its chains.
type ruleset struct {
	table  string
	sets   []set
	chains []*chain
}

type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	words    string // kind, hook and priority in nft's words
	rules    [][]clause
}

type set struct {
	name     string
	kind     nftables.SetDatatype
	interval bool
	order    binaryutil.ByteOrder
	elements []element
}

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
		t.deliverICMPErrors(r.Mark, r.usedFamilies())
	}
	t.addRule(notTCP(), returnToCaller())
	if r.Mode == TPROXY {
		// First packets are left to tproxy, which knows what to do where they
		// reopen a connection in TIME_WAIT.
		t.deliverToSocket(r.Mark, notFirst())
	}
	t.addRule(notFirst(), returnToCaller())
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
	return t
}

// deliverICMPErrors delivers ICMP errors to the transparent socket that sent the packet quoted in them.
// They are addressed to that socket's address, which is another machine's. Forwarded there, they would
// leave the socket without path MTU discovery (RFC 1191, RFC 8201) and without word of unreachable hosts.
func (t *ruleset) deliverICMPErrors(mark uint32, families []family) {
	for _, f := range families {
		t.deliverToSocket(mark, isICMPError(f))
	}
}

// deliverToSocket delivers to this machine the packets that match and belong to a connection of a transparent
// socket. A listener on every address fits what is about any other machine's port of the same number: that passes.
func (t *ruleset) deliverToSocket(mark uint32, match clause) {
	t.addRule(match, ofWildcardSocket(), returnToCaller())
	t.addRule(match, ofTransparentSocket(), addMark(mark), acceptPacket())
}

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

// captureFamily adds what is excluded and what is included of one family.
func (t *ruleset) captureFamily(r Rules, f family, ports []clause) {
	suffix, kind := f.setSuffix(), f.addressType()
	if r.Connected == ConnectedLeave {
		// The set is there even if it is empty: it tells how the rules were applied.
		connected := t.addSet(connectedSet+suffix, kind, addressElements(r.machineNetworks, f.isIPv4()))
		t.addRule(ofFamily(f), targetIn(f, connected), returnToCaller())
	}
	rule := []clause{ofFamily(f)}
	for _, part := range []struct {
		name  string
		in    func(family, set) clause
		match Match
	}{
		{"sources", sourceIn, r.Sources},
		{"destinations", targetIn, r.Destinations},
	} {
		if excluded := addressElements(part.match.Exclude, f.isIPv4()); len(excluded) > 0 {
			t.addRule(ofFamily(f), part.in(f, t.addSet("not_"+part.name+suffix, kind, excluded)), returnToCaller())
		}
		if len(part.match.Include) == 0 {
			continue
		}
		included := addressElements(part.match.Include, f.isIPv4())
		if len(included) == 0 {
			return // what is wanted is all of the other family
		}
		rule = append(rule, part.in(f, t.addSet(part.name+suffix, kind, included)))
	}
	if len(ports) == 0 {
		rule = append(rule, isTCP()) // the statements below ask for it
	}
	rule = append(append(rule, ports...), countPackets())
	if r.Mode == Redirect {
		t.addRule(append(rule, redirectTo(r.Port))...)
		return
	}
	t.addRule(append(rule, toProxy(f, r.Port), addMark(r.Mark), acceptPacket())...)
}

func (t *ruleset) addSet(name string, kind nftables.SetDatatype, elements []element) set {
	s := set{
		name: name, kind: kind, elements: elements, interval: kind != nftables.TypeIFName,
		order: binaryutil.BigEndian,
	}
	if kind == nftables.TypeIFName {
		s.order = binaryutil.NativeEndian
	}
	t.sets = append(t.sets, s)
	return s
}

// beginChain begins a chain, to which rules are added from now on.
func (t *ruleset) beginChain(
	name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority, words string,
) {
	t.chains = append(t.chains, &chain{name: name, kind: kind, hook: hook, priority: priority, words: words})
}

func (t *ruleset) addRule(clauses ...clause) {
	last := t.chains[len(t.chains)-1]
	last.rules = append(last.rules, clauses)
}

func ruleText(clauses []clause) string {
	words := make([]string, 0, len(clauses))
	for _, c := range clauses {
		words = append(words, c.text)
	}
	return strings.Join(words, " ")
}

func ruleExprs(clauses []clause) []expr.Any {
	var exprs []expr.Any
	for _, c := range clauses {
		exprs = append(exprs, c.exprs...)
	}
	return exprs
}
