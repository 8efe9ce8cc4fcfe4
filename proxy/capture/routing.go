package capture

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/nldump"
)

// object is a policy rule or a route with our protocol number. One of the two is set.
type object struct {
	rule  *netlink.Rule
	route *netlink.Route
}

// routing sends marked packets to this machine. Each family has policy rules for the mark, and a
// default route of type local in the table of the last.
type routing struct {
	handle *netlink.Handle
	// added are objects of this call, the oldest first.
	added []object
}

// policyRule returns the policy rule that leads marked packets to the local route.
func policyRule(r Rules, f family) *netlink.Rule {
	rule := netlink.NewRule()
	mask := r.Mark
	rule.Family, rule.Priority, rule.Table = int(f.af), RulePriority, r.RouteTable
	rule.Mark, rule.Mask, rule.Protocol = r.Mark, &mask, RouteProtocol
	return rule
}

// policyRules returns the policy rules for the mark. The first leaves packets of this machine to
// the usual routes: with src_valid_mark, which wg-quick and Tailscale set, the kernel looks up the
// source of a marked packet by its mark, and would drop it.
func policyRules(r Rules, f family) []*netlink.Rule {
	own := policyRule(r, f)
	own.Priority, own.IifName, own.Table = RulePriority-1, "lo", unix.RT_TABLE_MAIN
	return []*netlink.Rule{own, policyRule(r, f)}
}

// localRoute returns the route that delivers all addresses of a family to this machine.
func localRoute(table int, f family, lo int) *netlink.Route {
	everything := &net.IPNet{IP: make(net.IP, f.length), Mask: make(net.IPMask, f.length)}
	return &netlink.Route{
		Family: int(f.af), Table: table, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Dst: everything, LinkIndex: lo, Protocol: RouteProtocol,
	}
}

// addObjects installs the objects that are not there yet.
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

// undoAdded removes added objects, the newest first.
func (g *routing) undoAdded() error {
	var errs error
	for i := len(g.added) - 1; i >= 0; i-- {
		errs = errors.Join(errs, g.deleteObject(g.added[i]))
	}
	g.added = nil
	return errs
}

// removeUnless deletes our objects except those for which keep is true. Policy rules go first, so
// that none leads to an empty table.
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

// listOwn returns objects with our protocol number in every table: policy rules, then routes.
func (g *routing) listOwn() ([]object, error) {
	var objects []object
	for _, f := range []family{ipv4, ipv6} {
		rules, err := g.listRules(f, RouteProtocol)
		if err != nil {
			return nil, err
		}
		for _, rule := range rules {
			objects = append(objects, object{rule: &rule})
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

// listRules returns the policy rules of a family with a protocol number.
func (g *routing) listRules(f family, protocol uint8) ([]netlink.Rule, error) {
	rules, err := nldump.Retry(func() ([]netlink.Rule, error) { return g.handle.RuleList(int(f.af)) })
	if err != nil {
		return nil, explainError("list the policy rules", err)
	}
	// A kernel without the family answers for all of them.
	return slices.DeleteFunc(rules, func(r netlink.Rule) bool {
		return r.Protocol != protocol || r.Family != int(f.af)
	}), nil
}

// deleteObject deletes an object, unless it has gone already.
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

// isWantedBy reports whether the rules need the object.
func (o object) isWantedBy(r Rules) bool {
	return slices.ContainsFunc(r.usedFamilies(), func(f family) bool {
		return o.equalsObject(object{route: localRoute(r.RouteTable, f, 0)}) ||
			slices.ContainsFunc(policyRules(r, f), func(rule *netlink.Rule) bool { return o.equalsObject(object{rule: rule}) })
	})
}

// containsObject reports whether have has an equal object.
func containsObject(have []object, o object) bool { return slices.ContainsFunc(have, o.equalsObject) }

// equalsObject compares what this package sets. All listed routes are ours, and of type local.
func (o object) equalsObject(p object) bool {
	switch {
	case o.rule != nil && p.rule != nil:
		a, b := o.rule, p.rule
		return a.Family == b.Family && a.Priority == b.Priority && a.Table == b.Table &&
			a.IifName == b.IifName && a.Mark == b.Mark && a.Mask != nil && b.Mask != nil && *a.Mask == *b.Mask
	case o.route != nil && p.route != nil:
		a, b := o.route, p.route
		return a.Family == b.Family && a.Table == b.Table && isDefault(a.Dst) && isDefault(b.Dst)
	}
	return false
}

// isDefault reports whether n has all addresses.
func isDefault(n *net.IPNet) bool {
	if n == nil {
		return true
	}
	ones, _ := n.Mask.Size()
	return ones == 0 && n.IP.IsUnspecified()
}

// lockFile is a file that each network namespace has one of, and that only a user who may change rules may open.
const lockFile = "/proc/sys/net/ipv4/tcp_fastopen_key"

// lockNetlink waits until no other process changes rules in this network namespace, and opens
// netlink. Without the lock each would remove what the other has just made. done releases both.
func lockNetlink() (h *netlink.Handle, done func(), err error) {
	lock, err := os.Open(lockFile)
	if errors.Is(err, os.ErrPermission) {
		return nil, nil, explainError("change rules", syscall.EPERM)
	}
	if err != nil {
		return nil, nil, explainError("open "+lockFile, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		_ = lock.Close()
		return nil, nil, explainError("lock "+lockFile, err)
	}
	if h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		_ = lock.Close()
		return nil, nil, explainError("open netlink", err)
	}
	return h, func() {
		h.Close()
		_ = lock.Close()
	}, nil
}

// MakeInterface makes an interface of a kind that needs only a name. netlink.LinkAdd links the code
// of all kinds, 0.2 MB.
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

// explainError adds the cure to errors of the kernel.
func explainError(what string, err error) error {
	switch {
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("capture: %s: needs CAP_NET_ADMIN: run as root, or setcap cap_net_admin+ep on the binary, "+
			"or AmbientCapabilities=CAP_NET_ADMIN in the systemd unit: %w", what, err)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EAFNOSUPPORT):
		return fmt.Errorf("capture: %s: this address family is switched off here: leave it out of the rules, or switch "+
			"it on (sysctl -w %s=0): %w", what, ipv6Switches[0], err)
	case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("capture: %s: the kernel lacks a part of nftables: load the modules nft_fib_inet and "+
			"nft_tproxy, nft_socket (tproxy) or nft_redir, nft_chain_nat (redirect): %w", what, err)
	}
	return fmt.Errorf("capture: %s: %w", what, err)
}
