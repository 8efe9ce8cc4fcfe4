package kernelspace

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/nldump"
)

// chooseProbes chooses an address of each family, by which isUnrouted finds that routes are lost. For IPv4 the address
// is outside of the pool, because the kernel adds the route of an IPv4 address again when the link comes up.
func (d *device) chooseProbes(pool, inside []netip.Prefix) {
	d.probes = nil
	for _, six := range []bool{false, true} {
		i := slices.IndexFunc(inside, func(p netip.Prefix) bool {
			return p.Addr().Is6() == six && !slices.ContainsFunc(pool, func(g netip.Prefix) bool {
				return g.Masked() == p.Masked() || !six && g.Contains(p.Addr())
			})
		})
		if i >= 0 {
			d.probes = append(d.probes, inside[i].Addr())
		}
	}
}

// isUnrouted reports whether refusal routes refuse packets to peers although the link is up.
func (d *device) isUnrouted() bool {
	link, err := netlink.LinkByIndex(d.link.Attrs().Index)
	if err != nil || link.Attrs().Flags&net.FlagUp == 0 {
		return false
	}
	return slices.ContainsFunc(d.probes, func(a netip.Addr) bool {
		_, err := netlink.RouteGet(a.AsSlice())
		return errors.Is(err, syscall.EHOSTUNREACH)
	})
}

// setRefusalRoutes replaces the routes that refuse packets to addresses inside while the interface is down or not
// there. Without them other routes would lead these packets out unencrypted.
func (d *device) setRefusalRoutes(inside []netip.Prefix) error {
	for _, p := range inside {
		if err := netlink.RouteReplace(refusalRoute(p)); err != nil {
			return d.explainError("add the route that refuses "+p.String(), err)
		}
	}
	for _, p := range d.refused {
		if !slices.Contains(inside, p) {
			if err := netlink.RouteDel(refusalRoute(p)); err != nil && !errors.Is(err, syscall.ESRCH) {
				return d.explainError("remove the route that refuses "+p.String(), err)
			}
		}
	}
	d.refused = inside
	return nil
}

// refusalRoute returns a route with the lowest priority, so that it only takes effect without another to the prefix.
func refusalRoute(to netip.Prefix) *netlink.Route {
	return &netlink.Route{
		Dst: ipNet(to.Masked()), Type: unix.RTN_UNREACHABLE, Priority: math.MaxInt32, Protocol: capture.TunnelProtocol,
	}
}

// addPeerRoutes adds the routes to the prefixes in routes. It adds none to a link that is down, which cannot have
// them.
func (d *device) addPeerRoutes() error {
	link, err := netlink.LinkByIndex(d.link.Attrs().Index)
	if err != nil {
		return d.explainError("find it", err)
	}
	if link.Attrs().Flags&net.FlagUp == 0 {
		return nil
	}
	if len(d.routes) == 0 {
		return nil
	}
	others, err := d.otherRoutes()
	if err != nil {
		return d.explainError("list routes", err)
	}
	for _, p := range d.routes {
		if r, taken := others[p.Masked().String()]; taken {
			return fmt.Errorf("add a route to %v: this machine has another (%v), and one of the two would be lost: "+
				"remove it, or the peer's addresses", p, r)
		}
		err := netlink.RouteAdd(d.routeTo(p))
		if err != nil && !errors.Is(err, syscall.EEXIST) { // the interface has it already
			return d.explainError("add a route to "+p.String(), err)
		}
	}
	return nil
}

// otherRoutes returns this machine's routes to other interfaces, by destination. If one has the destination of a
// peer's route, only metrics would decide between the two.
func (d *device) otherRoutes() (map[string]netlink.Route, error) {
	all := map[string]netlink.Route{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := nldump.Retry(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			refuses := r.Protocol == capture.TunnelProtocol && r.Type == unix.RTN_UNREACHABLE
			onLink := r.Dst != nil && r.Dst.IP.To4() == nil && r.Dst.IP.IsLinkLocalUnicast() // each link has this route
			if r.Dst != nil && !onLink && r.LinkIndex != d.link.Attrs().Index && !refuses {
				all[r.Dst.String()] = r
			}
		}
	}
	return all, nil
}

// routeTo returns the route to a prefix by the interface.
func (d *device) routeTo(to netip.Prefix) *netlink.Route {
	return &netlink.Route{
		LinkIndex: d.link.Attrs().Index, Dst: ipNet(to.Masked()), Scope: netlink.SCOPE_LINK,
		Protocol: capture.TunnelProtocol,
	}
}
