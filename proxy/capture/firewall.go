package capture

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// families are those with chains that routed TCP passes, as nft names them.
var families = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6",
}

// firewall reads the chains of nftables that routed packets pass. It reads rules and sets when they
// are first needed, and keeps them: a machine may have thousands that no packet of ours meets.
type firewall struct {
	conn         *nftables.Conn
	tables       []*nftables.Table
	chains       []*nftables.Chain
	chainsByName map[chainName]*nftables.Chain
	rules        map[chainName][]*nftables.Rule
	sets         map[chainName]filterSet
	// fates are results of fateOf by base chain.
	fates map[*nftables.Chain][]cachedFate
}

// chainName identifies a chain or a set.
type chainName struct {
	table nftables.Table
	name  string
}

// filterSet is a set or map with its elements, of any program's rules.
type filterSet struct {
	*nftables.Set
	elements []nftables.SetElement
}

// readFirewall reads the names of tables and chains.
func readFirewall() (*firewall, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, explainError("open nftables", err)
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, explainError("list nftables chains", err)
	}
	tables, err := c.ListTables()
	if err != nil {
		return nil, explainError("list nftables tables", err)
	}
	w := &firewall{
		conn: c, tables: tables, chains: chains, chainsByName: map[chainName]*nftables.Chain{},
		rules: map[chainName][]*nftables.Rule{}, sets: map[chainName]filterSet{}, fates: map[*nftables.Chain][]cachedFate{},
	}
	for _, c := range chains {
		w.chainsByName[nameIn(c.Table, c.Name)] = c
	}
	return w, nil
}

// nameIn returns the name of a chain or set within a table.
func nameIn(table *nftables.Table, name string) chainName {
	return chainName{nftables.Table{Family: table.Family, Name: table.Name}, name}
}

// filterChains returns the base chains of a hook that filter routed packets.
func (w *firewall) filterChains(hook *nftables.ChainHook) []*nftables.Chain {
	return slices.DeleteFunc(slices.Clone(w.chains), func(c *nftables.Chain) bool {
		_, routed := families[c.Table.Family]
		return !routed || c.Hooknum == nil || *c.Hooknum != *hook || c.Type == nftables.ChainTypeNAT
	})
}

// nameOf returns family, table and name, as nft writes them.
func nameOf(c *nftables.Chain) string {
	return fmt.Sprintf("%s %s %s", families[c.Table.Family], c.Table.Name, c.Name)
}

// isOwned reports whether a table belongs to a running program, which alone may change it.
func (w *firewall) isOwned(table *nftables.Table) bool {
	const owner = 1 << 1 // NFT_TABLE_F_OWNER
	return slices.ContainsFunc(w.tables, func(t *nftables.Table) bool {
		return t.Family == table.Family && t.Name == table.Name && t.Flags&owner != 0
	})
}

// findChain returns the chain of a table that a rule jumps to; nil: it has gone.
func (w *firewall) findChain(table *nftables.Table, name string) *nftables.Chain {
	return w.chainsByName[nameIn(table, name)]
}

// rulesOf returns the rules of a chain.
func (w *firewall) rulesOf(c *nftables.Chain) ([]*nftables.Rule, error) {
	name := nameIn(c.Table, c.Name)
	if rules, read := w.rules[name]; read {
		return rules, nil
	}
	rules, err := w.conn.GetRules(c.Table, c)
	if err != nil {
		return nil, explainError("list nftables rules", err)
	}
	w.rules[name] = rules
	return rules, nil
}

// readFilterSet returns a set of a table with its elements.
func (w *firewall) readFilterSet(table *nftables.Table, name string) (filterSet, error) {
	key := nameIn(table, name)
	if s, read := w.sets[key]; read {
		return s, nil
	}
	found, err := w.conn.GetSetByName(table, name)
	if err != nil {
		return filterSet{}, explainError("read an nftables set", err)
	}
	elements, err := w.conn.GetSetElements(found)
	if err != nil {
		return filterSet{}, explainError("list an nftables set", err)
	}
	w.sets[key] = filterSet{found, elements}
	return w.sets[key], nil
}

// ForwardFilters returns the forward chains that drop or reject packets, in words. Captured
// connections do not pass these chains. It needs CAP_NET_ADMIN.
func ForwardFilters() ([]string, error) {
	w, err := readFirewall()
	if err != nil {
		return nil, err
	}
	var filters []string
	for _, chain := range w.filterChains(nftables.ChainHookForward) {
		if dropsByPolicy(chain) {
			filters = append(filters, nameOf(chain)+" (policy drop)")
			continue
		}
		refuses, err := w.refusesSome(chain)
		if err != nil {
			return nil, err
		}
		if refuses {
			filters = append(filters, nameOf(chain)+" (rules that drop or reject)")
		}
	}
	for _, l := range legacyFilters() {
		filters = append(filters, l.words("FORWARD"))
	}
	return filters, nil
}

// dropsByPolicy reports whether a chain drops packets that no rule decides about.
func dropsByPolicy(c *nftables.Chain) bool {
	return c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop
}

// legacyFilter is a table of the older iptables. nftables does not see its rules.
type legacyFilter struct {
	family family
	// hidden reports that only root may ask whether there is one.
	hidden bool
}

// command returns the program that shows and changes the table.
func (l legacyFilter) command() string { return l.family.name + "tables-legacy" }

// words describes one chain of the table.
func (l legacyFilter) words(chain string) string {
	if l.hidden {
		return l.command() + " " + chain + " (which root alone may look for)"
	}
	return l.command() + " " + chain + " (not looked into)"
}

// legacyFilters returns the tables of this network namespace.
func legacyFilters() (found []legacyFilter) {
	for _, f := range []family{ipv4, ipv6} {
		tables, err := os.ReadFile("/proc/thread-self/net/" + f.name + "_tables_names")
		there := err == nil && slices.Contains(strings.Fields(string(tables)), "filter")
		if hidden := err != nil && !errors.Is(err, fs.ErrNotExist); there || hidden {
			found = append(found, legacyFilter{f, hidden})
		}
	}
	return found
}

// refusesSome reports whether a chain has a rule that drops or rejects, itself or in another chain
// of its table. It does not check that the chain jumps there.
func (w *firewall) refusesSome(chain *nftables.Chain) (bool, error) {
	for _, k := range w.chains {
		if *k.Table != *chain.Table || k.Hooknum != nil && k.Name != chain.Name {
			continue
		}
		rules, err := w.rulesOf(k)
		if err != nil {
			return false, err
		}
		for _, rule := range rules {
			for _, e := range rule.Exprs {
				if verdictOf(e).kind == expr.VerdictDrop {
					return true, nil
				}
				l, ok := e.(*expr.Lookup)
				if !ok || !l.IsDestRegSet || l.DestRegister != unix.NFT_REG_VERDICT {
					continue
				}
				s, err := w.readFilterSet(k.Table, l.SetName)
				if err != nil {
					return false, err
				}
				if slices.ContainsFunc(s.elements, func(e nftables.SetElement) bool {
					return elementVerdict(e).kind == expr.VerdictDrop
				}) {
					return true, nil
				}
			}
		}
	}
	return false, nil
}
