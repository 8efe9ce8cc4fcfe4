package capture

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/nldump"
)

// Network is a network that this machine is on.
type Network struct {
	Prefix    netip.Prefix
	Interface string
}

// Networks returns the networks that this machine is on: those of its addresses,
// and those that it was told are on its links. Loopback and link-local ones are
// nowhere to be captured. It needs no privilege.
func Networks() ([]Network, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, explainError("open netlink", err)
	}
	defer h.Close()
	links, err := nldump.Retry(h.LinkList)
	if err != nil {
		return nil, explainError("list the interfaces", err)
	}
	names := map[int]string{}
	for _, l := range links {
		if l.Attrs().Flags&net.FlagLoopback == 0 {
			names[l.Attrs().Index] = l.Attrs().Name
		}
	}
	var found []Network
	add := func(n *net.IPNet, link int) {
		prefix, ok := toPrefix(n)
		if names[link] != "" && ok && prefix.Bits() > 0 && prefix.Addr().IsGlobalUnicast() {
			found = append(found, Network{prefix, names[link]})
		}
	}
	addrs, err := nldump.Retry(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, explainError("list the addresses", err)
	}
	for _, a := range addrs {
		add(a.IPNet, a.LinkIndex)
		add(a.Peer, a.LinkIndex)
	}
	for _, f := range []family{ipv4, ipv6} {
		routes, err := nldump.Retry(func() ([]netlink.Route, error) {
			return h.RouteListFiltered(int(f.af), &netlink.Route{Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TYPE)
		})
		if err != nil {
			return nil, explainError("list the routes", err)
		}
		for _, r := range routes {
			// An address need not be within the network that its link has.
			told := r.Protocol == unix.RTPROT_KERNEL || r.Protocol == unix.RTPROT_RA || r.Protocol == unix.RTPROT_DHCP
			if told && r.Gw == nil && r.Via == nil && len(r.MultiPath) == 0 {
				add(r.Dst, r.LinkIndex)
			}
		}
	}
	slices.SortFunc(found, func(a, b Network) int { return a.Prefix.Compare(b.Prefix) })
	return slices.Compact(found), nil
}

// toPrefix is what n says, without the bits behind its length.
func toPrefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if addr = addr.Unmap(); !ok || bits != addr.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(addr, ones).Masked(), true
}

// withForwardDecision decides by the machine's forward chains what was left to them. Chains that
// cannot be looked at count as some that drop.
func (r Rules) withForwardDecision() Rules {
	if r.Connected == "" || r.Connected == ConnectedAuto {
		r.Connected = ConnectedLeave
		if filters, err := ForwardFilters(); err == nil && len(filters) == 0 {
			r.Connected = ConnectedCapture
		}
	}
	return r
}

// withMachineState fills in what the rules take from the machine.
func (r Rules) withMachineState() (Rules, error) {
	if r = r.withForwardDecision(); r.Connected == ConnectedCapture {
		return r, nil
	}
	networks, err := Networks()
	if err != nil {
		return r, err
	}
	r.machineNetworks = nil
	for _, n := range networks {
		r.machineNetworks = append(r.machineNetworks, n.Prefix)
	}
	return r, nil
}

// ipv6Switches are the settings that switch IPv6 off everywhere, and where captured packets are delivered.
var ipv6Switches = []string{"net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.lo.disable_ipv6"}

// leaveOutIPv6 leaves IPv6 out of rules for both families where captured packets of it cannot be routed to this
// machine, and returns why, with the cure. Empty: it stays.
func (r Rules) leaveOutIPv6() (_ Rules, why string) {
	if r.Mode != TPROXY || !r.IPv4 || !r.IPv6 {
		return r, ""
	}
	off := func(name string) bool {
		text, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		return err == nil && strings.TrimSpace(string(text)) == "1"
	}
	where, cure := "in this kernel", "boot without ipv6.disable=1"
	switch _, err := os.Stat("/proc/sys/net/ipv6"); {
	case off(ipv6Switches[1]) && off(ipv6Switches[0]):
		where, cure = "here", "sysctl -w "+ipv6Switches[0]+"=0"
	case off(ipv6Switches[1]):
		where, cure = "on lo", "sysctl -w "+ipv6Switches[1]+"=0"
	case !errors.Is(err, fs.ErrNotExist):
		return r, ""
	}
	r.IPv6 = false
	return r, fmt.Sprintf("IPv6 is switched off %s, so the rules leave it out; to capture it: %s, and apply again",
		where, cure)
}

// Advice returns what an operator should know of these rules on this machine,
// a sentence each. What cannot be looked at is left out.
func (r Rules) Advice() []string {
	var say []string
	add := func(format string, args ...any) { say = append(say, fmt.Sprintf(format, args...)) }
	for _, name := range r.Interfaces {
		if name == AnyInterface {
			add("interface any: connections from outside are captured too; " +
				"where the firewall lets them in, they reach inside hosts past the forward chain")
		} else if _, err := net.InterfaceByName(name); err != nil {
			add("interface %s does not exist: nothing is captured there until it does", name)
		}
	}
	if r, err := r.withDefaults(); err == nil {
		if _, why := r.leaveOutIPv6(); why != "" {
			add("%s", why)
		}
	}
	networks, err := Networks()
	if r.withForwardDecision().Connected == ConnectedLeave && err == nil && len(networks) > 0 {
		var words []string
		for _, n := range networks {
			words = append(words, fmt.Sprintf("%v (%s)", n.Prefix, n.Interface))
		}
		add("connections to networks of this machine go past the proxy: %s; "+
			"--connected captures them, and applying again follows changes", strings.Join(words, ", "))
	}
	if filters, err := ForwardFilters(); err == nil && len(filters) > 0 {
		add("captured connections do not pass the forward chain, which drops some here: %s; what it forbids, "+
			"forbid for them by a rule with refuse, too (docs/operations.md, The forward chain)",
			strings.Join(filters, ", "))
	}
	return say
}

// CapturedNetworks returns the networks of this machine that the rules in force capture
// although those who applied them left such networks out: they have come since.
// It takes CAP_NET_ADMIN.
func CapturedNetworks() ([]Network, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, explainError("open nftables", err)
	}
	table, mine, err := findTable(c)
	if err != nil || !mine {
		return nil, err
	}
	networks, err := Networks()
	if err != nil {
		return nil, err
	}
	for _, f := range []family{ipv4, ipv6} {
		set, err := c.GetSetByName(table, connectedSet+f.setSuffix())
		if errors.Is(err, syscall.ENOENT) { // all of the family is captured, or nothing
			networks = slices.DeleteFunc(networks, func(n Network) bool { return n.Prefix.Addr().Is4() == f.isIPv4() })
			continue
		}
		if err != nil {
			return nil, explainError("read an nftables set", err)
		}
		elements, err := c.GetSetElements(set)
		if err != nil {
			return nil, explainError("read an nftables set", err)
		}
		slices.SortFunc(elements, func(a, b nftables.SetElement) int { return bytes.Compare(a.Key, b.Key) })
		networks = slices.DeleteFunc(networks, func(n Network) bool {
			return n.Prefix.Addr().Is4() == f.isIPv4() && setCovers(elements, n.Prefix)
		})
	}
	return networks, nil
}

// setCovers reports whether the sorted elements of an interval set hold all of p.
func setCovers(elements []nftables.SetElement, p netip.Prefix) bool {
	first, last := p.Addr().AsSlice(), lastOf(p).AsSlice()
	for i, e := range elements {
		if e.IntervalEnd || bytes.Compare(e.Key, first) > 0 {
			continue
		}
		if i+1 == len(elements) || bytes.Compare(elements[i+1].Key, last) > 0 {
			return true
		}
	}
	return false
}
