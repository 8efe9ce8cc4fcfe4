package capture

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/nldump"
)

// object is a policy rule or a route that bears our protocol number.
type object struct {
	rule  *netlink.Rule
	route *netlink.Route
}

// routing is what sends marked packets to this machine: per family the policy
// rules for the mark, and in the table of the last a default route of type local.
type routing struct {
	handle *netlink.Handle
	added  []object // by this call, oldest first
}

func policyRule(r Rules, f family) *netlink.Rule {
	rule := netlink.NewRule()
	mask := r.Mark
	rule.Family, rule.Priority, rule.Table = int(f.af), RulePriority, r.RouteTable
	rule.Mark, rule.Mask, rule.Protocol = r.Mark, &mask, RouteProtocol
	return rule
}

// policyRules are those for the mark. What this machine asks for itself goes by its usual routes: with
// src_valid_mark, which wg-quick and Tailscale set, the kernel looks up the source of a marked packet
// by its mark, and drops it where that leads here.
func policyRules(r Rules, f family) []*netlink.Rule {
	own := policyRule(r, f)
	own.Priority, own.IifName, own.Table = RulePriority-1, "lo", unix.RT_TABLE_MAIN
	return []*netlink.Rule{own, policyRule(r, f)}
}

func localRoute(table int, f family, lo int) *netlink.Route {
	everything := &net.IPNet{IP: make(net.IP, f.length), Mask: make(net.IPMask, f.length)}
	return &netlink.Route{
		Family: int(f.af), Table: table, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Dst: everything, LinkIndex: lo, Protocol: RouteProtocol,
	}
}

// addObjects installs what is not there yet.
func (g *routing) addObjects(r Rules) error {
	lo, err := g.handle.LinkByName("lo")
	if err != nil {
		return explainError("find lo", err)
	}
	have, err := g.listOwn()
	if err != nil {
		return err
	}
	for _, f := range r.usedFamilies() {
		route := object{route: localRoute(r.RouteTable, f, lo.Attrs().Index)}
		if !containsObject(have, route) {
			if err := g.handle.RouteAdd(route.route); errors.Is(err, syscall.EEXIST) {
				return fmt.Errorf("capture: route-table %d already has a default route that is not ours: choose "+
					"another table", r.RouteTable)
			} else if err != nil {
				return explainError(fmt.Sprintf("add the local %s route to table %d (lo must be up)", f.name,
					r.RouteTable), err)
			}
			g.added = append(g.added, route)
		}
		for _, add := range policyRules(r, f) {
			rule := object{rule: add}
			if containsObject(have, rule) {
				continue
			}
			if err := g.handle.RuleAdd(add); errors.Is(err, syscall.EEXIST) {
				return fmt.Errorf("capture: another program has the same %s policy rule for mark %#x: choose "+
					"another mark", f.name, r.Mark)
			} else if err != nil {
				return explainError(fmt.Sprintf("add the %s policy rule for mark %#x", f.name, r.Mark), err)
			}
			g.added = append(g.added, rule)
		}
	}
	return nil
}

func (g *routing) undoAdded() error {
	var errs error
	for i := len(g.added) - 1; i >= 0; i-- {
		errs = errors.Join(errs, g.deleteObject(g.added[i]))
	}
	g.added = nil
	return errs
}

// removeUnless deletes all that is ours but what keep wants: policy rules first, so
// that none ever points to an empty table.
func (g *routing) removeUnless(keep func(object) bool) error {
	objects, err := g.listOwn()
	if err != nil {
		return err
	}
	for _, o := range objects {
		if !keep(o) {
			err = errors.Join(err, g.deleteObject(o))
		}
	}
	return err
}

// listOwn finds what bears our protocol number, in every table: policy rules,
// then routes.
func (g *routing) listOwn() ([]object, error) {
	var objects []object
	for _, f := range []family{ipv4, ipv6} {
		rules, err := nldump.Retry(func() ([]netlink.Rule, error) { return g.handle.RuleList(int(f.af)) })
		if err != nil {
			return nil, explainError("list the policy rules", err)
		}
		for _, rule := range rules {
			// A kernel without the family answers for all of them.
			if rule.Protocol == RouteProtocol && rule.Family == int(f.af) {
				objects = append(objects, object{rule: &rule})
			}
		}
	}
	for _, f := range []family{ipv4, ipv6} {
		routes, err := nldump.Retry(func() ([]netlink.Route, error) {
			return g.handle.RouteListFiltered(int(f.af),
				&netlink.Route{Table: unix.RT_TABLE_UNSPEC, Protocol: RouteProtocol, Type: unix.RTN_LOCAL},
				netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TYPE)
		})
		if err != nil {
			return nil, explainError("list the routes", err)
		}
		for _, route := range routes {
			objects = append(objects, object{route: &route})
		}
	}
	return objects, nil
}

func (g *routing) deleteObject(o object) error {
	if o.rule != nil {
		if err := g.handle.RuleDel(o.rule); err != nil && !errors.Is(err, syscall.ENOENT) {
			return explainError("delete a policy rule", err)
		}
		return nil
	}
	if err := g.handle.RouteDel(o.route); err != nil && !errors.Is(err, syscall.ESRCH) {
		return explainError("delete a local route", err)
	}
	return nil
}

// isWantedBy reports whether o is one of those that r needs.
func (o object) isWantedBy(r Rules) bool {
	for _, f := range r.usedFamilies() {
		needed := []object{{route: localRoute(r.RouteTable, f, 0)}}
		for _, rule := range policyRules(r, f) {
			needed = append(needed, object{rule: rule})
		}
		if slices.ContainsFunc(needed, o.equalsObject) {
			return true
		}
	}
	return false
}

func containsObject(have []object, o object) bool {
	for _, h := range have {
		if h.equalsObject(o) {
			return true
		}
	}
	return false
}

// equalsObject compares what we set; all routes listed are ours, and of type local.
func (o object) equalsObject(p object) bool {
	switch {
	case o.rule != nil && p.rule != nil:
		a, b := o.rule, p.rule
		return a.Family == b.Family && a.Priority == b.Priority && a.Table == b.Table &&
			a.IifName == b.IifName && a.Mark == b.Mark && a.Mask != nil && *a.Mask == *b.Mask
	case o.route != nil && p.route != nil:
		a, b := o.route, p.route
		return a.Family == b.Family && a.Table == b.Table && isDefault(a.Dst) && isDefault(b.Dst)
	}
	return false
}

func isDefault(n *net.IPNet) bool {
	if n == nil {
		return true
	}
	ones, _ := n.Mask.Size()
	return ones == 0 && n.IP.IsUnspecified()
}

// LostParts returns what the rules in force need and is no longer there, in words: policy rules and routes, and the
// table where they are left without it. It takes CAP_NET_ADMIN.
func LostParts() (lost []string, err error) {
	traps, err := readInterceptions()
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
	traps = slices.DeleteFunc(traps, func(t interception) bool { return t.tunnel })
	if len(traps) == 0 && len(have) > 0 {
		return []string{"the nftables table inet " + Table}, nil
	}
	for _, t := range traps {
		if t.mode != TPROXY {
			continue
		}
		for _, f := range t.families {
			r := Rules{Mark: t.mark, RouteTable: DefaultRouteTable}
			for _, o := range have { // the rule tells the table
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
