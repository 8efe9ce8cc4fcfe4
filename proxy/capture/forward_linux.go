package capture

import (
	"encoding/binary"
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

// families are those whose forward chains forwarded TCP passes, as nft names them.
var families = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6",
}

// ForwardFilters returns the forward chains that drop or reject packets, in
// words. Captured connections do not pass them. It takes CAP_NET_ADMIN.
func ForwardFilters() ([]string, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, explain("open nftables", err)
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, explain("list nftables chains", err)
	}
	var filters []string
	for _, chain := range chains {
		family, routed := families[chain.Table.Family]
		if !routed || chain.Hooknum == nil || *chain.Hooknum != *nftables.ChainHookForward {
			continue
		}
		name := fmt.Sprintf("%s %s %s", family, chain.Table.Name, chain.Name)
		if chain.Policy != nil && *chain.Policy == nftables.ChainPolicyDrop {
			filters = append(filters, name+" (policy drop)")
			continue
		}
		refuses, err := refusesSome(c, chain, chains)
		if err != nil {
			return nil, err
		}
		if refuses {
			filters = append(filters, name+" (rules that drop or reject)")
		}
	}
	// The older iptables keeps rules of its own, which nftables does not see.
	for _, list := range []string{"ip", "ip6"} {
		tables, err := os.ReadFile("/proc/thread-self/net/" + list + "_tables_names")
		switch {
		case err == nil && slices.Contains(strings.Fields(string(tables)), "filter"):
			filters = append(filters, list+"tables-legacy FORWARD (not looked into)")
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			filters = append(filters, list+"tables-legacy FORWARD (which root alone may look for)")
		}
	}
	return filters, nil
}

// refusesSome reports whether chain, or a chain of its table that it may jump
// to, has a rule that drops or rejects. Which it does jump to is not asked.
func refusesSome(c *nftables.Conn, chain *nftables.Chain, all []*nftables.Chain) (bool, error) {
	for _, k := range all {
		if *k.Table != *chain.Table || k.Hooknum != nil && k.Name != chain.Name {
			continue
		}
		rules, err := c.GetRules(k.Table, k)
		if err != nil {
			return false, explain("list nftables rules", err)
		}
		for _, rule := range rules {
			if slices.ContainsFunc(rule.Exprs, isRefusal) {
				return true, nil
			}
			for _, e := range rule.Exprs {
				l, ok := e.(*expr.Lookup)
				if !ok || !l.IsDestRegSet || l.DestRegister != unix.NFT_REG_VERDICT {
					continue
				}
				if refuses, err := mapRefusesSome(c, k.Table, l.SetName); refuses || err != nil {
					return refuses, err
				}
			}
		}
	}
	return false, nil
}

// mapRefusesSome reports whether a verdict map has an element that drops.
func mapRefusesSome(c *nftables.Conn, table *nftables.Table, name string) (bool, error) {
	elements, err := c.GetSetElements(&nftables.Set{Table: table, Name: name})
	if err != nil {
		return false, explain("list an nftables map", err)
	}
	return slices.ContainsFunc(elements, func(e nftables.SetElement) bool {
		// The library leaves the verdict as it came: an attribute whose value is its code.
		const header = 4
		return len(e.Val) >= header+4 && int32(binary.BigEndian.Uint32(e.Val[header:])) == int32(expr.VerdictDrop)
	}), nil
}

func isRefusal(e expr.Any) bool {
	switch e := e.(type) {
	case *expr.Verdict:
		return e.Kind == expr.VerdictDrop
	case *expr.Reject:
		return true
	case *expr.Target: // of iptables over nftables
		return e.Name == "DROP" || e.Name == "REJECT"
	}
	return false
}
