package capture

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
)

// connectedSet begins the names of the sets that hold the machine's networks.
const connectedSet = "connected"

// ourChain is the one chain of the table for Rules.
const ourChain = "prerouting"

// ruleset is a table with its sets and chains, before it is printed or installed.
type ruleset struct {
	table  string
	sets   []set
	chains []*chain
}

// chain is a base chain with its rules.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	// words are kind, hook and priority as nft writes them.
	words string
	// rules are clauses that all have to match, in order.
	rules [][]clause
}

// set is a set that rules look addresses, ports or interfaces up in.
type set struct {
	name string
	// kind is the type of its elements, and order their byte order.
	kind nftables.SetDatatype
	// interval reports whether elements are ranges.
	interval bool
	// expires reports whether elements are added with a timeout, by a proxy that runs.
	expires bool
	// counts reports whether the kernel counts the packets that each element matches.
	counts   bool
	order    binaryutil.ByteOrder
	elements []element
}

// element is one entry of a set. text is for people, and first to just before end for the kernel. A
// nil end is behind the last of all.
type element struct {
	text       string
	first, end []byte
}

// matchedSide is one side of packets that rules look at: clients or servers.
type matchedSide struct {
	name  string // of its sets
	in    func(family, set) clause
	match Match
}

// selectAddresses adds rules that return what is excluded of one family to the caller. It returns the clauses that
// match what is included, after first. some is false if nothing is included. prefix begins the names of sets.
func (t *ruleset) selectAddresses(
	r Rules, f family, prefix string, clients, servers matchedSide, first ...clause,
) (rule []clause, some bool) {
	if r.Connected == ConnectedLeave {
		// An empty set is added, too: CapturedNetworks sees by it that networks were left out.
		connected := t.addSet(prefix+connectedSet+f.version, f.addresses, addressElements(r.machineNetworks, f.isIPv4()))
		t.addRule(ofFamily(f), servers.in(f, connected), returnToCaller())
	}
	rule = append([]clause{ofFamily(f)}, first...)
	for _, side := range []matchedSide{clients, servers} {
		name := side.name + f.version
		if excluded := addressElements(side.match.Exclude, f.isIPv4()); len(excluded) > 0 {
			t.addRule(ofFamily(f), side.in(f, t.addSet(prefix+"not_"+name, f.addresses, excluded)), returnToCaller())
		}
		if len(side.match.Include) == 0 {
			continue
		}
		included := addressElements(side.match.Include, f.isIPv4())
		if len(included) == 0 {
			return nil, false // what is wanted is all of the other family
		}
		rule = append(rule, side.in(f, t.addSet(prefix+name, f.addresses, included)))
	}
	return rule, true
}

// captureFamily adds the rules for excluded and included connections of one family.
func (t *ruleset) captureFamily(r Rules, f family, ports []clause) {
	rule, some := t.selectAddresses(r, f, "",
		matchedSide{"sources", sourceIn, r.Sources}, matchedSide{"destinations", targetIn, r.Destinations})
	if !some {
		return
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

// verdictRules returns the clauses of a Verdict for a family, one list for each rule. The caller puts
// in front of them where the rules hold. suffix ends the names of sets. None: it is about the other
// family.
func (t *ruleset) verdictRules(v Verdict, f family, suffix string) (rules [][]clause) {
	var match []clause
	for _, part := range []struct {
		name  string
		in    func(family, set) clause
		addrs []netip.Prefix
	}{{"from", sourceIn, v.Sources}, {"to", targetIn, v.Targets}} {
		if len(part.addrs) == 0 {
			continue
		}
		elements := addressElements(part.addrs, f.isIPv4())
		if len(elements) == 0 {
			return nil // it is about the other family
		}
		match = append(match, part.in(f, t.addSet(part.name+suffix, f.addresses, elements)))
	}
	protocols := [][]clause{nil}
	switch {
	case v.ICMP && len(v.Ports) > 0:
		return nil // it has none
	case v.ICMP:
		protocols = [][]clause{{isICMP(f)}}
	case v.UDP:
		protocols = [][]clause{{isUDP()}}
	case v.TCP:
		protocols = [][]clause{{isTCP()}}
	case len(v.Ports) > 0:
		protocols = [][]clause{{isUDP()}, {isTCP()}}
	}
	if len(v.Ports) > 0 {
		s := t.addSet("ports"+suffix, nftables.TypeInetService, portElements(v.Ports))
		for i := range protocols {
			protocols[i] = append(protocols[i], clause{"th dport @" + s.name, portIn(s).exprs})
		}
	}
	end := []clause{returnToCaller()}
	if v.Refuse {
		end = []clause{countPackets(), rejectPacket()}
	}
	for _, protocol := range protocols {
		rules = append(rules, slices.Concat(match, protocol, end))
	}
	return rules
}

// deliverOpen delivers packets of open connections of transparent sockets, and returns all other packets to the caller
// but the first ones of TCP. Those are left to tproxy, which handles one that reopens a connection in TIME_WAIT.
//
// ICMP errors go to the socket that sent the packet quoted in them. They are addressed to that socket's address, which
// is another machine's. Forwarded there, they would leave the socket without path MTU discovery (RFC 1191, RFC 8201)
// and without reports of unreachable hosts.
func (t *ruleset) deliverOpen(mark uint32, families []family) {
	for _, f := range families {
		t.deliverToSocket(mark, isICMPError(f))
	}
	t.addRule(notTCP(), returnToCaller())
	t.deliverToSocket(mark, notFirst())
	t.addRule(notFirst(), returnToCaller())
}

// deliverToSocket delivers packets to this machine that match and belong to a connection of a
// transparent socket. A listener on every address also fits packets to another machine's port of
// that number. These pass.
func (t *ruleset) deliverToSocket(mark uint32, match clause) {
	t.addRule(match, ofWildcardSocket(), returnToCaller())
	t.addRule(match, ofTransparentSocket(), addMark(mark), acceptPacket())
}

// addSet adds a set, unless there is one of that name, and returns it for rules.
func (t *ruleset) addSet(name string, kind nftables.SetDatatype, elements []element) set {
	if i := slices.IndexFunc(t.sets, func(s set) bool { return s.name == name }); i >= 0 {
		return t.sets[i]
	}
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

// beginChain begins a chain. addRule adds to the last one, so that a chain and its rules stand
// together where they are made.
func (t *ruleset) beginChain(
	name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority, words string,
) {
	t.chains = append(t.chains, &chain{name: name, kind: kind, hook: hook, priority: priority, words: words})
}

// addRule adds a rule to the last chain.
func (t *ruleset) addRule(clauses ...clause) {
	last := t.chains[len(t.chains)-1]
	last.rules = append(last.rules, clauses)
}

// printTable writes the table as nft reads it, in place of one of the same name.
func (t ruleset) printTable(b *strings.Builder) {
	fmt.Fprintf(b, "table inet %s\ndelete table inet %[1]s\ntable inet %[1]s {\n", t.table)
	for _, s := range t.sets {
		fmt.Fprintf(b, "\tset %s {\n\t\ttype %s\n", s.name, s.kind.Name)
		if s.interval {
			b.WriteString("\t\tflags interval\n")
		}
		if s.expires {
			b.WriteString("\t\tflags timeout\n")
		}
		if s.counts {
			b.WriteString("\t\tcounter\n")
		}
		texts := make([]string, 0, len(s.elements))
		for _, e := range s.elements {
			texts = append(texts, e.text)
		}
		if len(texts) > 0 {
			fmt.Fprintf(b, "\t\telements = { %s }\n", strings.Join(texts, ", "))
		}
		b.WriteString("\t}\n")
	}
	for _, chain := range t.chains {
		fmt.Fprintf(b, "\tchain %s {\n\t\t%s; policy accept;\n", chain.name, chain.words)
		for _, rule := range chain.rules {
			fmt.Fprintf(b, "\t\t%s\n", ruleText(rule))
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
}

// ruleText returns a rule as nft writes it.
func ruleText(clauses []clause) string {
	words := make([]string, 0, len(clauses))
	for _, c := range clauses {
		words = append(words, c.text)
	}
	return strings.Join(words, " ")
}

// addressElements returns the prefixes of one family as disjoint ranges, because the kernel refuses
// elements that overlap.
func addressElements(prefixes []netip.Prefix, v4 bool) []element {
	type span struct{ first, last netip.Addr }
	var spans []span
	for _, p := range prefixes {
		if p = p.Masked(); p.Addr().Is4() == v4 {
			spans = append(spans, span{p.Addr(), lastOf(p)})
		}
	}
	slices.SortFunc(spans, func(a, b span) int { return a.first.Compare(b.first) })
	merged := spans[:0]
	for _, s := range spans {
		if n := len(merged) - 1; n >= 0 {
			next := merged[n].last.Next() // invalid: the last of all addresses
			if !next.IsValid() || s.first.Compare(next) <= 0 {
				if s.last.Compare(merged[n].last) > 0 {
					merged[n].last = s.last
				}
				continue
			}
		}
		merged = append(merged, s)
	}
	var elements []element
	for _, s := range merged {
		e := element{text: spanText(s.first, s.last), first: s.first.AsSlice()}
		if next := s.last.Next(); next.IsValid() {
			e.end = next.AsSlice()
		}
		elements = append(elements, e)
	}
	return elements
}

// lastOf returns the last address in p.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return last
}

// spanText writes a range as a prefix if it is one.
func spanText(first, last netip.Addr) string {
	for bits := range first.BitLen() + 1 {
		if p := netip.PrefixFrom(first, bits); p.Masked() == p && lastOf(p) == last {
			return p.String()
		}
	}
	return fmt.Sprintf("%v-%v", first, last)
}

// portElements returns ports as disjoint ranges.
func portElements(ports []PortRange) []element {
	ports = slices.Clone(ports)
	slices.SortFunc(ports, func(a, b PortRange) int { return cmp.Compare(a.First, b.First) })
	merged := ports[:0]
	for _, p := range ports {
		if n := len(merged) - 1; n >= 0 && int(p.First) <= int(merged[n].Last)+1 {
			merged[n].Last = max(merged[n].Last, p.Last)
			continue
		}
		merged = append(merged, p)
	}
	var elements []element
	for _, p := range merged {
		e := element{text: p.String(), first: binary.BigEndian.AppendUint16(nil, p.First)}
		if p.Last < 1<<16-1 {
			e.end = binary.BigEndian.AppendUint16(nil, p.Last+1)
		}
		elements = append(elements, e)
	}
	return elements
}

// interfaceElements returns names of interfaces as elements.
func interfaceElements(names []string) []element {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	var elements []element
	for _, name := range names {
		key := make([]byte, 16) // IFNAMSIZ
		copy(key, name)
		elements = append(elements, element{text: strconv.Quote(name), first: key})
	}
	return elements
}

// setElements returns the elements as the library takes them.
func (s set) setElements() []nftables.SetElement {
	var keys []nftables.SetElement
	for _, e := range s.elements {
		keys = append(keys, nftables.SetElement{Key: e.first})
		if s.interval && e.end != nil {
			keys = append(keys, nftables.SetElement{Key: e.end, IntervalEnd: true})
		}
	}
	return keys
}

// maxKeysPerMessage bounds the keys in one message. The library puts all of a call into one
// attribute with a length of 16 bits, and a key takes 40 bytes at most.
const maxKeysPerMessage = 1000

// transactionBytes bounds the messages of a table, and the kernel's answers to them. A socket has
// 208 KiB for either by default.
const transactionBytes = 1 << 26

// replaceTable installs a table in place of the one of that name, in one transaction. It refuses to
// replace the table of Rules if another program has made it.
func replaceTable(t ruleset) error {
	c, err := nftables.New(nftables.WithSockOptions(setBuffers))
	if err != nil {
		return explainError("open nftables", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: t.table}
	if t.table == Table {
		there, mine, err := findTable(c)
		switch {
		case err != nil:
			return err
		case there != nil && !mine:
			return fmt.Errorf("capture: there is a table inet %s that penstock has not made: "+
				"give it another name, or remove it (nft delete table inet %s), and apply again", Table, Table)
		}
	}
	// Deleting needs a table to be there: add it, so that it always is.
	c.AddTable(table)
	c.DelTable(table)
	c.AddTable(table)
	for _, s := range t.sets {
		to := &nftables.Set{
			Table: table, Name: s.name, KeyType: s.kind, Interval: s.interval, KeyByteOrder: s.order,
			HasTimeout: s.expires, Counter: s.counts,
		}
		err := c.AddSet(to, nil)
		for part := range slices.Chunk(s.setElements(), maxKeysPerMessage) {
			err = errors.Join(err, c.SetAddElements(to, part))
		}
		if err != nil {
			return fmt.Errorf("capture: set %s: %w", s.name, err)
		}
	}
	policy := nftables.ChainPolicyAccept
	for _, chain := range t.chains {
		added := c.AddChain(&nftables.Chain{
			Table: table, Name: chain.name, Type: chain.kind, Hooknum: chain.hook, Priority: chain.priority, Policy: &policy,
		})
		for _, rule := range chain.rules {
			var exprs []expr.Any
			for _, part := range rule {
				exprs = append(exprs, part.exprs...)
			}
			c.AddRule(&nftables.Rule{Table: table, Chain: added, Exprs: exprs})
		}
	}
	if err := c.Flush(); err != nil {
		return explainError("install the nftables table", err)
	}
	return nil
}

// setBuffers makes room for a transaction. Its parameter is a *netlink.Conn of the library below
// nftables, which nothing else here needs.
func setBuffers[C interface {
	SetWriteBuffer(bytes int) error
	SetReadBuffer(bytes int) error
}](c C) error {
	return errors.Join(c.SetWriteBuffer(transactionBytes), c.SetReadBuffer(transactionBytes))
}

// deleteTable deletes the table of Rules, unless another program has made it.
func deleteTable() error {
	c, err := nftables.New()
	if err != nil {
		return explainError("open nftables", err)
	}
	table, mine, err := findTable(c)
	if err != nil || !mine {
		return err // another's, which stays, or none
	}
	c.DelTable(table)
	if err := c.Flush(); err != nil && !errors.Is(err, syscall.ENOENT) {
		return explainError("delete the nftables table", err)
	}
	return nil
}

// findTable returns the table of Rules, and whether Apply has made it; nil: there is none. It
// recognises its own by the chain ourChain, in which the first rule compares the mark. A comment in
// the table would be clearer, but kernels before 5.10 do not keep it, and earlier versions wrote none.
func findTable(c *nftables.Conn) (table *nftables.Table, mine bool, err error) {
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, false, explainError("list nftables tables", err)
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == Table })
	if i < 0 {
		return nil, false, nil
	}
	table = tables[i]
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, false, explainError("list nftables chains", err)
	}
	chains = slices.DeleteFunc(chains, func(c *nftables.Chain) bool {
		own := []string{passingChain, holdChain, uplinkChain, congestionChain}
		return c.Table.Name != Table || slices.Contains(own, c.Name)
	})
	switch {
	case len(chains) != 1 || chains[0].Name != ourChain,
		chains[0].Hooknum == nil || *chains[0].Hooknum != *nftables.ChainHookPrerouting:
		return table, false, nil
	}
	rules, err := c.GetRules(table, chains[0])
	switch {
	case errors.Is(err, syscall.ENOENT): // replaced in the meantime, by an Apply of ours
		return table, true, nil
	case err != nil:
		return nil, false, explainError("list nftables rules", err)
	case len(rules) == 0 || len(rules[0].Exprs) == 0:
		return table, false, nil
	}
	first, ok := rules[0].Exprs[0].(*expr.Meta)
	return table, ok && first.Key == expr.MetaKeyMARK, nil
}
