package capture

import (
	"fmt"
	"io"
	"strings"
)

// Print writes what Apply would install as a shell script for nft and ip, for
// review or for machines that are configured by other means. It needs no
// privilege.
func (r Rules) Print(w io.Writer) error {
	r, err := r.withDefaults()
	if err != nil {
		return err
	}
	if r, err = r.withMachineState(); err != nil {
		return err
	}
	t := r.buildRuleset()
	var b strings.Builder
	if r.Mode == TPROXY {
		b.WriteString("# Marked packets are routed to this machine, and what it sends itself by its usual routes.\n")
		for _, f := range r.usedFamilies() {
			ip := "ip"
			if !f.isIPv4() {
				ip = "ip -6"
			}
			fmt.Fprintf(&b, "%s rule add priority %d iif lo fwmark %#x/%#x lookup main protocol %d\n",
				ip, RulePriority-1, r.Mark, r.Mark, RouteProtocol)
			fmt.Fprintf(&b, "%s rule add priority %d fwmark %#x/%#x lookup %d protocol %d\n",
				ip, RulePriority, r.Mark, r.Mark, r.RouteTable, RouteProtocol)
			fmt.Fprintf(&b, "%s route add local default dev lo table %d proto %d\n", ip, r.RouteTable, RouteProtocol)
		}
		b.WriteString("\n")
	}
	b.WriteString("# nft takes this whole or not at all.\nnft -f - <<'END'\n")
	fmt.Fprintf(&b, "table inet %s\ndelete table inet %s\ntable inet %s {\n", Table, Table, Table)
	for _, s := range t.sets {
		fmt.Fprintf(&b, "\tset %s {\n\t\ttype %s\n", s.name, s.kind.Name)
		if s.interval {
			b.WriteString("\t\tflags interval\n")
		}
		texts := make([]string, 0, len(s.elements))
		for _, e := range s.elements {
			texts = append(texts, e.text)
		}
		if len(texts) > 0 {
			fmt.Fprintf(&b, "\t\telements = { %s }\n", strings.Join(texts, ", "))
		}
		b.WriteString("\t}\n")
	}
	for _, chain := range t.chains {
		fmt.Fprintf(&b, "\tchain %s {\n\t\t%s; policy accept;\n", chain.name, chain.words)
		for _, rule := range chain.rules {
			fmt.Fprintf(&b, "\t\t%s\n", ruleText(rule))
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\nEND\n")
	_, err = io.WriteString(w, b.String())
	return err
}
