package capture

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/nldump"
)

// What belongs to tunnels in the kernel, by which Remove finds it.
const (
	TunnelProtocol = RouteProtocol + 1 // origin of their routes and policy rules
	tunnelPriority = RulePriority + 1
	tunnelRoutes   = DefaultRouteTable + 100 // the first of their route tables; the interface's index is added
)

// Apply makes what is installed for the tunnel exactly what it says, whatever there was.
// The interface exists. The table is replaced in one transaction; routes that it needs are there
// before, those that it no longer needs are removed afterwards. On an error what there was stays.
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
	for _, f := range []family{ipv4, ipv6} {
		if err := t.removeRoutes(h, f, slices.Contains(t.usedFamilies(), f)); err != nil {
			return err
		}
	}
	return nil
}

// IsInstalled reports whether the table is, as far as anybody knows.
func (t Tunnel) IsInstalled() bool {
	c, err := nftables.New()
	if err != nil {
		return true
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	return err != nil || slices.ContainsFunc(tables, func(is *nftables.Table) bool { return is.Name == t.tableName() })
}

// Remove takes away what Apply made, the interface gone or not.
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
	var errs error
	for _, f := range []family{ipv4, ipv6} {
		errs = errors.Join(errs, t.removeRoutes(h, f, false))
	}
	return errs
}

// addRoutes has captured packets of the tunnel routed to this machine. What is right already
// stays: a packet of an open connection must not go elsewhere in between.
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

func (t Tunnel) policyRule(f family) *netlink.Rule {
	rule := policyRule(Rules{Mark: DefaultMark, RouteTable: t.routeTable}, f)
	rule.Priority, rule.Protocol, rule.IifName = tunnelPriority, TunnelProtocol, t.Interface
	return rule
}

// removeRoutes removes the policy rules of the interface's name and the routes that they lead
// to, but for the present one where it is to stay.
func (t Tunnel) removeRoutes(h *netlink.Handle, f family, stays bool) error {
	rules, err := nldump.Retry(func() ([]netlink.Rule, error) { return h.RuleList(int(f.af)) })
	if err != nil {
		return explainError("list the policy rules", err)
	}
	for _, rule := range rules {
		if rule.Protocol != TunnelProtocol || rule.Family != int(f.af) || rule.IifName != t.Interface ||
			stays && rule.Table == t.routeTable {
			continue
		}
		if err := h.RuleDel(&rule); err != nil && !errors.Is(err, syscall.ENOENT) {
			return explainError("delete a policy rule", err)
		}
		route := localRoute(rule.Table, f, 0)
		route.Protocol = TunnelProtocol
		if err := h.RouteDel(route); err != nil && !errors.Is(err, syscall.ESRCH) {
			return explainError("delete a local route", err)
		}
	}
	return nil
}

// MakeInterface makes an interface of a kind that takes nothing but its name to begin with.
// netlink.LinkAdd does the same with the code of all other kinds, which is 0.2 MB of program.
func MakeInterface(name, kind string) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(kind))
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}
