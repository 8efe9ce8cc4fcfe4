package capture

import (
	"bytes"
	"errors"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/nldump"
)

// Network is a network that this machine is on.
type Network struct {
	Prefix    netip.Prefix
	Interface string
}

// Networks returns the networks of this machine: those of its addresses, and those that its routes
// have on a link. It leaves out loopback and link-local ones, which are never captured. It needs no
// privilege.
func Networks() ([]Network, error) {
	m, err := readMachine()
	if err != nil {
		return nil, err
	}
	var found []Network
	for _, i := range m.interfaces {
		for _, n := range slices.Concat(i.networks, i.onLink) {
			found = append(found, Network{n, i.name})
		}
	}
	slices.SortFunc(found, func(a, b Network) int { return a.Prefix.Compare(b.Prefix) })
	return slices.Compact(found), nil
}

// CapturedNetworks returns networks of this machine that the installed rules capture, although such
// networks were left out when the rules were applied: they have come since. It needs CAP_NET_ADMIN.
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
		set, err := c.GetSetByName(table, connectedSet+f.version)
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

// machine has the interfaces that packets of the evaluation come in and leave by.
type machine struct {
	// interfaces are all but loopback.
	interfaces []*iface
}

// iface is an interface. With index 0 it is a name that no interface has.
type iface struct {
	name      string
	index     int // 0: there is none
	group     uint32
	addresses []netip.Addr
	// networks are those of its addresses.
	networks []netip.Prefix
	// routed are the networks that routes lead to, and onLink those of them that are on its link.
	routed, onLink []netip.Prefix
}

// readMachine reads interfaces, addresses and routes.
func readMachine() (m machine, err error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return m, explainError("open netlink", err)
	}
	defer h.Close()
	links, err := nldump.Retry(h.LinkList)
	if err != nil {
		return m, explainError("list the interfaces", err)
	}
	byIndex := map[int]*iface{}
	for _, l := range links {
		if l.Attrs().Flags&net.FlagLoopback == 0 {
			i := &iface{name: l.Attrs().Name, index: l.Attrs().Index, group: l.Attrs().Group}
			byIndex[i.index] = i
			m.interfaces = append(m.interfaces, i)
		}
	}
	addrs, err := nldump.Retry(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return m, explainError("list the addresses", err)
	}
	for _, a := range addrs {
		i := byIndex[a.LinkIndex]
		own, ok := netip.AddrFromSlice(a.IP)
		if i == nil || !ok {
			continue
		}
		i.addresses = append(i.addresses, own.Unmap())
		for _, n := range []*net.IPNet{a.IPNet, a.Peer} {
			i.networks = appendNetwork(i.networks, n)
		}
	}
	routes, err := nldump.Retry(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TYPE)
	})
	if err != nil {
		return m, explainError("list the routes", err)
	}
	for _, r := range routes {
		i := byIndex[r.LinkIndex]
		if i == nil {
			continue
		}
		i.routed = appendNetwork(i.routed, r.Dst)
		// An address need not be within the network that its link has.
		isAnnounced := r.Protocol == unix.RTPROT_KERNEL || r.Protocol == unix.RTPROT_RA || r.Protocol == unix.RTPROT_DHCP
		if isAnnounced && r.Gw == nil && r.Via == nil && len(r.MultiPath) == 0 {
			i.onLink = appendNetwork(i.onLink, r.Dst)
		}
	}
	return m, nil
}

// NextHop returns the gateway that this machine forwards packets to a host to, with its zone. It is not valid where the
// host is on a network of this machine, and where the link has no gateway. It needs no privilege, and sends nothing.
func NextHop(host netip.Addr) (netip.Addr, error) {
	routes, err := netlink.RouteGet(host.AsSlice())
	if err != nil {
		return netip.Addr{}, explainError("find the gateway", err)
	}
	for _, r := range routes {
		gateway, ok := netip.AddrFromSlice(r.Gw)
		if gateway = gateway.Unmap(); ok && gateway.IsLinkLocalUnicast() && gateway.Is6() {
			return gateway.WithZone(strconv.Itoa(r.LinkIndex)), nil
		} else if ok {
			return gateway, nil
		}
	}
	return netip.Addr{}, nil
}

// appendNetwork appends a global network once.
func appendNetwork(to []netip.Prefix, n *net.IPNet) []netip.Prefix {
	if n == nil {
		return to
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if addr = addr.Unmap(); !ok || bits != addr.BitLen() || ones == 0 {
		return to
	}
	p := netip.PrefixFrom(addr, ones).Masked()
	if p.Addr().IsGlobalUnicast() && !slices.Contains(to, p) {
		return append(to, p)
	}
	return to
}

// interfacesNamed returns the interfaces that rules name.
func (m machine) interfacesNamed(names []string) (found []*iface) {
	for _, name := range names {
		i := slices.IndexFunc(m.interfaces, func(f *iface) bool { return f.name == name })
		if i < 0 {
			found = append(found, &iface{name: name})
			continue
		}
		found = append(found, m.interfaces[i])
	}
	return found
}

// anyInterface returns all interfaces, or one unknown interface where there is none.
func (m machine) anyInterface() []*iface {
	if len(m.interfaces) == 0 {
		return []*iface{nil}
	}
	return m.interfaces
}

// clientAddresses returns possible addresses of clients, for each network of the interface. It
// returns several of each network, because firewalls know ranges, too. Without a network the
// address is unknown.
func (i *iface) clientAddresses(f family) (groups [][]netip.Addr) {
	if i == nil {
		return [][]netip.Addr{{{}}}
	}
	for _, networks := range [][]netip.Prefix{i.networks, i.routed} {
		for _, n := range networks {
			if n.Addr().Is4() != f.isIPv4() {
				continue
			}
			spread := spreadAddresses(n)
			spread = slices.DeleteFunc(spread, func(a netip.Addr) bool { return slices.Contains(i.addresses, a) })
			if len(spread) > 0 {
				groups = append(groups, spread)
			}
		}
		if len(groups) > 0 {
			return groups
		}
	}
	return [][]netip.Addr{{{}}}
}

// spreadAddresses returns four addresses spread over a network, or all of a smaller one.
func spreadAddresses(n netip.Prefix) (all []netip.Addr) {
	const quarters, oddity = 4, 9
	bits := n.Addr().BitLen() - n.Bits()
	for k := range quarters {
		number := new(big.Int).SetBytes(n.Masked().Addr().AsSlice())
		switch {
		case bits >= 3:
			number.Add(number, new(big.Int).Lsh(big.NewInt(int64(2*k+1)), uint(bits-3)))
			if bits >= 6 {
				number.Add(number, big.NewInt(oddity))
			}
		case k < 1<<bits:
			number.Add(number, big.NewInt(int64(k)))
		default:
			return all
		}
		a, _ := netip.AddrFromSlice(number.FillBytes(make([]byte, n.Addr().BitLen()/8)))
		all = append(all, a)
	}
	return all
}

// globalAddress returns the first global address of a family; invalid: the interface has none.
func (i *iface) globalAddress(f family) netip.Addr {
	if i != nil {
		for _, a := range i.addresses {
			if a.Is4() == f.isIPv4() && a.IsGlobalUnicast() {
				return a
			}
		}
	}
	return netip.Addr{}
}

// metaValue returns the name as nft has it, padded with zeros, the index or the group. All of an unknown interface is
// unknown, and of one that is not there all but the name.
func (i *iface) metaValue(key expr.MetaKey) value {
	switch {
	case i == nil:
		return value{}
	case key == expr.MetaKeyIIFNAME || key == expr.MetaKeyOIFNAME:
		data := make([]byte, unix.IFNAMSIZ)
		copy(data, i.name)
		return knownValue(data)
	case i.index == 0:
		return value{}
	case key == expr.MetaKeyIIF || key == expr.MetaKeyOIF:
		return nativeNumber(uint32(i.index))
	}
	return nativeNumber(i.group)
}

// serverAddresses returns an address of each of four continents, because firewalls know countries.
// They stand for all servers.
func serverAddresses(f family) []netip.Addr {
	if f.isIPv4() {
		return []netip.Addr{
			netip.AddrFrom4([4]byte{82, 130, 44, 10}), netip.AddrFrom4([4]byte{24, 60, 17, 90}),
			netip.AddrFrom4([4]byte{118, 27, 66, 20}), netip.AddrFrom4([4]byte{190, 104, 30, 40}),
		}
	}
	return []netip.Addr{
		netip.MustParseAddr("2a02:8100:44::10"), netip.MustParseAddr("2600:1700:17::90"),
		netip.MustParseAddr("2404:f800:66::20"), netip.MustParseAddr("2800:3f0:30::40"),
	}
}
