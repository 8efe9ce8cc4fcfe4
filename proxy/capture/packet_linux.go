package capture

import (
	"encoding/binary"
	"net"
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

// packet is a packet of TCP, as far as it is known before it comes. A nil value is unknown.
type packet struct {
	family                 family
	mark                   value
	from, to               []iface // the interfaces that it may come in and leave by; none: unknown, or not at all
	sourcePort, targetPort value
	flags                  byte
	state                  uint32 // of connection tracking
	translated             bool   // to another destination
	reply                  bool   // it goes against the direction of the connection
	sourceType, targetType uint32 // RTN_…
	foreign                value  // addresses that its destination is not
}

// iface is an interface, or a name that none has.
type iface struct {
	name  string
	index int // 0: there is none
}

// machine is what the evaluation has to know of this machine.
type machine struct {
	outside   []iface // all interfaces but loopback
	addresses value
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
	for _, l := range links {
		if l.Attrs().Flags&net.FlagLoopback == 0 {
			m.outside = append(m.outside, iface{l.Attrs().Name, l.Attrs().Index})
		}
	}
	addrs, err := nldump.Retry(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return m, explainError("list the addresses", err)
	}
	for _, a := range addrs {
		b := a.IP.To4()
		if b == nil {
			b = a.IP.To16()
		}
		m.addresses = append(m.addresses, exactly(b))
	}
	return m, nil
}

// named returns the interfaces that rules name.
func (m machine) named(names []string) []iface {
	if slices.Contains(names, AnyInterface) || len(names) == 0 {
		return m.outside
	}
	var found []iface
	for _, name := range names {
		i := slices.IndexFunc(m.outside, func(f iface) bool { return f.name == name })
		if i < 0 {
			found = append(found, iface{name: name})
			continue
		}
		found = append(found, m.outside[i])
	}
	return found
}

// bearing is a mark whose bits are known where they are ours.
func bearing(mark uint32) value {
	return value{{data: nativeBytes(mark), known: nativeBytes(mark), native: true}}
}

func portValue(port uint16) value {
	return value{exactly(binary.BigEndian.AppendUint16(nil, port))}
}

func names(of []iface) value {
	var v value
	for _, i := range of {
		data := make([]byte, unix.IFNAMSIZ)
		copy(data, i.name)
		v = append(v, exactly(data))
	}
	return v
}

func indexes(of []iface) value {
	var v value
	for _, i := range of {
		if i.index == 0 {
			return nil
		}
		v = append(v, nativeNumber(uint32(i.index)))
	}
	return v
}

func (p packet) meta(key expr.MetaKey) value {
	switch key {
	case expr.MetaKeyMARK:
		return p.mark
	case expr.MetaKeyIIFNAME:
		return names(p.from)
	case expr.MetaKeyIIF:
		return indexes(p.from)
	case expr.MetaKeyOIFNAME:
		return names(p.to)
	case expr.MetaKeyOIF:
		return indexes(p.to)
	case expr.MetaKeyNFPROTO:
		return value{exactly([]byte{p.family.proto})}
	case expr.MetaKeyL4PROTO:
		return value{exactly([]byte{unix.IPPROTO_TCP})}
	case expr.MetaKeyPROTOCOL:
		if p.family.isIPv4() {
			return value{exactly(binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP))}
		}
		return value{exactly(binary.BigEndian.AppendUint16(nil, unix.ETH_P_IPV6))}
	case expr.MetaKeyPKTTYPE:
		return value{exactly([]byte{unix.PACKET_HOST})}
	}
	return nil
}

func (p packet) payload(base expr.PayloadBase, offset, length uint32) value {
	const protocol4, protocol6 = 9, 6 // where the headers name TCP
	const sourcePort, targetPort, flags = 0, 2, 13
	switch {
	case base == expr.PayloadBaseNetworkHeader && length == 1 &&
		(p.family.isIPv4() && offset == protocol4 || !p.family.isIPv4() && offset == protocol6):
		return value{exactly([]byte{unix.IPPROTO_TCP})}
	case base == expr.PayloadBaseNetworkHeader && length == p.family.length && offset == p.family.target:
		unknown := make([]byte, length)
		return value{{data: unknown, known: unknown, never: p.foreign}}
	case base != expr.PayloadBaseTransportHeader:
	case offset == sourcePort && length == 2:
		return p.sourcePort
	case offset == targetPort && length == 2:
		return p.targetPort
	case offset == flags && length == 1:
		return value{exactly([]byte{p.flags})}
	}
	return nil
}

func (p packet) ct(key expr.CtKey) value {
	switch key {
	case expr.CtKeySTATE:
		return value{nativeNumber(p.state)}
	case expr.CtKeySTATUS:
		status := bits{data: nativeBytes(0), known: nativeBytes(statusDNAT), native: true}
		if p.translated {
			status.data = nativeBytes(statusDNAT)
		}
		return value{status}
	case expr.CtKeyDIRECTION:
		if p.reply {
			return value{exactly([]byte{1})}
		}
		return value{exactly([]byte{0})}
	}
	return nil
}

func (p packet) fib(x *expr.Fib) value {
	switch {
	case !x.ResultADDRTYPE || x.FlagPRESENT:
		return nil
	case x.FlagDADDR:
		return value{nativeNumber(p.targetType)}
	case x.FlagSADDR:
		return value{nativeNumber(p.sourceType)}
	}
	return nil
}
