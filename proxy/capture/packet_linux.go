package capture

import (
	"bytes"
	"encoding/binary"
	"math/big"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/nldump"
)

// Flags of the packets that begin a connection.
const (
	flagSYN = 0x02
	flagACK = 0x10
)

// statusDNAT is the bit of ct status of what was sent elsewhere than it was meant to (IPS_DST_NAT).
const statusDNAT = 1 << 5

// packet is a packet of TCP as it comes to a firewall. The zero value of an interface, an address or a port is unknown.
type packet struct {
	family                 family
	mark, known            uint32 // known: the bits of mark that are
	from, to               *iface // the interfaces that it comes in and leaves by
	source, target         netip.Addr
	sourcePort, targetPort uint16
	flags                  byte
	state                  uint32 // of connection tracking
	translated             bool   // to another destination
	reply                  bool   // it goes against the direction of the connection
	sourceType, targetType uint32 // RTN_…
}

// fields are those of a packet in which the packets of one passage differ.
type fields uint8

const (
	interfaceFields fields = 1 << iota
	sourceFields
	targetFields
	portFields
)

// withOnly returns the packet with nothing in these fields but those that were read.
func (p packet) withOnly(read fields) packet {
	if read&interfaceFields == 0 {
		p.from, p.to = nil, nil
	}
	if read&sourceFields == 0 {
		p.source = netip.Addr{}
	}
	if read&targetFields == 0 {
		p.target = netip.Addr{}
	}
	if read&portFields == 0 {
		p.sourcePort, p.targetPort = 0, 0
	}
	return p
}

// iface is an interface, or a name that none has.
type iface struct {
	name      string
	index     int // 0: there is none
	group     uint32
	addresses []netip.Addr
	networks  []netip.Prefix // of its addresses
	routed    []netip.Prefix // that routes lead to
}

// machine is what the evaluation has to know of this machine.
type machine struct {
	interfaces []*iface // all interfaces but loopback
}

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
		if i := byIndex[r.LinkIndex]; i != nil {
			i.routed = appendNetwork(i.routed, r.Dst)
		}
	}
	return m, nil
}

func appendNetwork(to []netip.Prefix, n *net.IPNet) []netip.Prefix {
	if p, ok := toPrefix(n); ok && p.Bits() > 0 && p.Addr().IsGlobalUnicast() && !slices.Contains(to, p) {
		return append(to, p)
	}
	return to
}

// clientAddresses returns addresses that may be clients', for each network that the interface has: several of each, because
// firewalls know ranges of addresses, too. Without a network, the address is unknown.
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

// spreadAddresses returns four addresses from all over a network, or as many as a smaller one has.
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

// address returns the first address of a family that the interface has.
func (i *iface) address(f family) netip.Addr {
	if i != nil {
		for _, a := range i.addresses {
			if a.Is4() == f.isIPv4() && a.IsGlobalUnicast() {
				return a
			}
		}
	}
	return netip.Addr{}
}

// serverAddresses stand for the world: one address of each of four continents, because firewalls know countries.
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

// anyInterface returns all interfaces, or one that nothing is known of.
func (m machine) anyInterface() []*iface {
	if len(m.interfaces) == 0 {
		return []*iface{nil}
	}
	return m.interfaces
}

func portValue(port uint16) value {
	if port == 0 {
		return value{}
	}
	return knownValue(binary.BigEndian.AppendUint16(nil, port))
}

func (p packet) markValue() value { return value{nativeBytes(p.mark), nativeBytes(p.known)} }

func (i *iface) nameValue() value {
	if i == nil {
		return value{}
	}
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, i.name)
	return knownValue(data)
}

func (i *iface) indexValue() value {
	if i == nil || i.index == 0 {
		return value{}
	}
	return nativeNumber(uint32(i.index))
}

func (i *iface) groupValue() value {
	if i == nil || i.index == 0 {
		return value{}
	}
	return nativeNumber(i.group)
}

func (p packet) metaValue(key expr.MetaKey) (value, fields) {
	switch key {
	case expr.MetaKeyMARK:
		return p.markValue(), 0
	case expr.MetaKeyIIFNAME:
		return p.from.nameValue(), interfaceFields
	case expr.MetaKeyIIF:
		return p.from.indexValue(), interfaceFields
	case expr.MetaKeyIIFGROUP:
		return p.from.groupValue(), interfaceFields
	case expr.MetaKeyOIFNAME:
		return p.to.nameValue(), interfaceFields
	case expr.MetaKeyOIF:
		return p.to.indexValue(), interfaceFields
	case expr.MetaKeyOIFGROUP:
		return p.to.groupValue(), interfaceFields
	case expr.MetaKeyNFPROTO:
		return knownValue([]byte{p.family.proto}), 0
	case expr.MetaKeyL4PROTO:
		return knownValue([]byte{unix.IPPROTO_TCP}), 0
	case expr.MetaKeyPROTOCOL:
		if p.family.isIPv4() {
			return knownValue(binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP)), 0
		}
		return knownValue(binary.BigEndian.AppendUint16(nil, unix.ETH_P_IPV6)), 0
	case expr.MetaKeyPKTTYPE:
		return knownValue([]byte{unix.PACKET_HOST}), 0
	case metaIPsec:
		return knownValue([]byte{0}), 0
	}
	return value{}, 0
}

// metaIPsec asks whether a packet came by IPsec (NFT_META_SECPATH).
const metaIPsec expr.MetaKey = 25

// Offsets in headers.
const (
	ethernetSource         = 6
	sourcePort, targetPort = 0, 2
	tcpFlags               = 13
	ports                  = 4 // bytes of both
)

// hardware is an address of the kind that no maker gives away: no rule knows it.
var clientMAC = []byte{0x0e, 0x9b, 0x51, 0xc7, 0x2d, 0x64}

// payloadValue returns a part of a header.
func (p packet) payloadValue(base expr.PayloadBase, offset, length uint32) (is value, read fields) {
	var h value
	put := func(at uint32, data ...byte) {
		copy(h.data[at:], data)
		copy(h.known[at:], bytes.Repeat([]byte{0xff}, len(data)))
	}
	begin := func(n int) { h = value{make([]byte, n), make([]byte, n)} }
	switch base {
	case expr.PayloadBaseLLHeader:
		begin(14)
		put(ethernetSource, clientMAC...)
	case expr.PayloadBaseNetworkHeader:
		if p.family.isIPv4() {
			begin(20)
			put(0, 0x45, 0) // neither options nor a class of service
			put(6, 0x40, 0) // not to be fragmented
			put(8, initialTTL, unix.IPPROTO_TCP)
		} else {
			begin(40)
			put(0, 0x60, 0, 0, 0)
			put(6, unix.IPPROTO_TCP, initialTTL)
		}
		source := p.family.target - p.family.length
		put(source, p.source.AsSlice()...)
		put(p.family.target, p.target.AsSlice()...)
		if offset < p.family.target && offset+length > source {
			read |= sourceFields
		}
		if offset+length > p.family.target {
			read |= targetFields
		}
	case expr.PayloadBaseTransportHeader:
		begin(20)
		put(sourcePort, portValue(p.sourcePort).data...)
		put(targetPort, portValue(p.targetPort).data...)
		put(tcpFlags, p.flags)
		if offset < ports {
			read = portFields
		}
	}
	if end := uint64(offset) + uint64(length); end <= uint64(len(h.data)) {
		is = value{h.data[offset:end], h.known[offset:end]}
	}
	return is, read
}

// ordinaryTTL is what clients and servers begin with.
const initialTTL = 64

func (p packet) ctValue(key expr.CtKey) value {
	switch key {
	case expr.CtKeySTATE:
		return nativeNumber(p.state)
	case expr.CtKeySTATUS:
		status := value{nativeBytes(0), nativeBytes(statusDNAT)}
		if p.translated {
			status.data = nativeBytes(statusDNAT)
		}
		return status
	case expr.CtKeyDIRECTION:
		if p.reply {
			return knownValue([]byte{1})
		}
		return knownValue([]byte{0})
	}
	return value{}
}

func (p packet) fibValue(x *expr.Fib) value {
	switch {
	case !x.ResultADDRTYPE || x.FlagPRESENT:
	case x.FlagDADDR:
		return nativeNumber(p.targetType)
	case x.FlagSADDR:
		return nativeNumber(p.sourceType)
	}
	return value{}
}
