package linkstat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/nldump"
)

// machine asks the kernel, in the network namespace in which it was opened. One goroutine uses it
// at a time.
type machine struct {
	links *netlink.Handle
	// sockets are by netlink protocol, for requests that the library has no function for.
	sockets  map[int]*nl.SocketHandle
	families map[string]*netlink.GenlFamily // by name, once they were asked for
	// ask is askFamily; tests answer in its place.
	ask func(family string, command uint8, flags int, attrs ...*nl.RtAttr) ([]attributes, error)
}

// openMachine opens the sockets in the network namespace of the calling thread.
func openMachine() (*machine, error) {
	m := &machine{sockets: map[int]*nl.SocketHandle{}, families: map[string]*netlink.GenlFamily{}}
	m.ask = m.askFamily
	err := m.openSockets()
	if err != nil {
		m.closeSockets()
		return nil, fmt.Errorf("linkstat: %w (systemd: RestrictAddressFamilies needs AF_NETLINK)", err)
	}
	return m, nil
}

// openSockets opens a socket of each protocol. An error leaves those that are open to closeSockets.
func (m *machine) openSockets() (err error) {
	if m.links, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_GENERIC); err != nil {
		return err
	}
	for _, protocol := range []int{unix.NETLINK_ROUTE, unix.NETLINK_GENERIC} {
		s, err := nl.Subscribe(protocol) // opens a socket; it subscribes to no group
		if err != nil {
			return err
		}
		m.sockets[protocol] = &nl.SocketHandle{Socket: s}
		if err := s.SetReceiveTimeout(&nl.SocketTimeoutTv); err != nil {
			return err
		}
	}
	return nil
}

// closeSockets closes what openSockets has opened.
func (m *machine) closeSockets() {
	for _, s := range m.sockets {
		s.Close()
	}
	if m.links != nil {
		m.links.Close()
	}
}

// Interface is a network interface that a Source could read.
type Interface struct {
	Name string
	// Queue is the kind of its root queueing discipline, such as fq_codel.
	Queue string
	// Rate is that of its queue or its cable. 0: neither has one.
	Rate cc.Rate
	// Radio reports whether nl80211 knows the interface.
	Radio bool
}

// Interfaces returns the interfaces of the thread's network namespace that are up, without
// loopback.
func Interfaces() ([]Interface, error) {
	m, err := openMachine()
	if err != nil {
		return nil, err
	}
	defer m.closeSockets()
	all, err := nldump.Retry(m.links.LinkList)
	if err != nil {
		return nil, fmt.Errorf("linkstat: %w", err)
	}
	return m.describeInterfaces(all)
}

// describeInterfaces returns the interfaces in listed that are up, without loopback. It leaves out those that have
// gone since they were listed.
func (m *machine) describeInterfaces(listed []netlink.Link) (out []Interface, err error) {
	for _, l := range listed {
		attrs := l.Attrs()
		if attrs.Flags&net.FlagUp == 0 || attrs.Flags&net.FlagLoopback != 0 {
			continue
		}
		d, err := m.describeDevice(attrs.Name)
		if err != nil {
			if _, goneErr := m.links.LinkByName(attrs.Name); errors.As(goneErr, new(netlink.LinkNotFoundError)) {
				continue
			}
			return nil, err
		}
		out = append(out, Interface{Name: attrs.Name, Queue: d.queue.kind, Rate: d.rate, Radio: d.radio != nil})
	}
	return out, nil
}

// device is an interface with the hosts behind it.
type device struct {
	link
	index int
	// upper is the index of the bridge or bond that has the interface's addresses and neighbours.
	// It is the interface's own index where there is none.
	upper    int
	prefixes []netip.Prefix // of its addresses
	others   []netip.Prefix // of other interfaces' addresses
	queue    queueID        // at its root
	radio    *radio         // nil: it has none
}

// describeDevice reads all that changes rarely about an interface.
func (m *machine) describeDevice(name string) (*device, error) {
	l, err := m.links.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("linkstat: %w", err)
	}
	attrs := l.Attrs()
	d := &device{index: attrs.Index, upper: attrs.Index, link: link{mtu: cc.Bytes(attrs.MTU)}}
	// In a VRF the interface itself has the addresses.
	if attrs.MasterIndex != 0 && (attrs.Slave == nil || attrs.Slave.SlaveType() != "vrf") {
		d.upper = attrs.MasterIndex
	}
	qs, err := m.listQdiscs(d.index, true)
	if err != nil {
		return nil, err
	}
	d.limit = limitOf(qs, attrs.TxQLen)
	q, err := rootQdisc(qs)
	if err != nil {
		return nil, err
	}
	d.queue, d.rate = q.queue, q.rate
	if q.kind == "htb" {
		if d.rate, err = m.sumClassRates(l); err != nil {
			return nil, err
		}
	}
	if d.rate == 0 {
		d.rate = m.readLinkSpeed(d.index)
	}
	if d.radio, err = m.describeRadio(d.index); err != nil {
		return nil, err
	}
	d.prefixes, d.others, err = m.listPrefixes(d.upper)
	return d, err
}

// sumClassRates returns the rate that htb gives all of its top classes together.
func (m *machine) sumClassRates(l netlink.Link) (sum cc.Rate, err error) {
	classes, err := nldump.Retry(func() ([]netlink.Class, error) { return m.links.ClassList(l, netlink.HANDLE_NONE) })
	if err != nil {
		return 0, fmt.Errorf("linkstat: read classes: %w", err)
	}
	for _, c := range classes {
		if htb, ok := c.(*netlink.HtbClass); ok && htb.Parent == rootHandle {
			sum += rateOfBytes(htb.Ceil)
		}
	}
	return sum, nil
}

// listPrefixes returns the prefixes of an interface's addresses, and those of all other interfaces.
func (m *machine) listPrefixes(index int) (own, others []netip.Prefix, err error) {
	addrs, err := nldump.Retry(func() ([]netlink.Addr, error) { return m.links.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, nil, fmt.Errorf("linkstat: read addresses: %w", err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok || ip.IsLinkLocalUnicast() {
			continue
		}
		bits, _ := a.Mask.Size()
		p := netip.PrefixFrom(ip.Unmap(), bits).Masked()
		if a.LinkIndex == index {
			own = append(own, p)
		} else {
			others = append(others, p)
		}
	}
	return own, others, nil
}

// listNeighbours returns the hosts on an interface, by hardware address.
func (m *machine) listNeighbours(index int) (map[string][]netip.Addr, error) {
	known, err := nldump.Retry(func() ([]netlink.Neigh, error) { return m.links.NeighList(index, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("linkstat: read neighbours: %w", err)
	}
	out := map[string][]netip.Addr{}
	for _, n := range known {
		if ip, ok := netip.AddrFromSlice(n.IP); ok && len(n.HardwareAddr) > 0 && n.State&netlink.NUD_FAILED == 0 {
			mac := string(n.HardwareAddr)
			out[mac] = append(out[mac], ip.Unmap())
		}
	}
	return out, nil
}

// readQueue reads the state of an interface's queue. For an interface without a queueing discipline it reads the
// counters of sent packets and, for a radio, of the radio's own queues.
func (m *machine) readQueue(d *device, at cc.Time) (reading, error) {
	qs, err := m.listQdiscs(d.index, false)
	if err != nil {
		return reading{}, err
	}
	q, err := rootQdisc(qs)
	if err != nil {
		return reading{}, err
	}
	r := q.reading
	r.at = at
	if r.queue.kind != kindNone {
		return r, nil
	}
	l, err := m.links.LinkByIndex(d.index)
	if err != nil {
		return reading{}, fmt.Errorf("linkstat: %w", err)
	}
	if s := l.Attrs().Statistics; s != nil {
		r.sent, r.packets, r.dropped = cc.Bytes(s.TxBytes), uint32(s.TxPackets), uint32(s.TxDropped)
	}
	if d.radio != nil {
		return r, m.addRadioQueue(d, &r)
	}
	return r, nil
}

// readLinkSpeed returns the rate that both ends of the cable have agreed on. 0: the driver does
// not know it.
func (m *machine) readLinkSpeed(index int) cc.Rate {
	const unknown = 1<<32 - 1
	header := nl.NewRtAttr(unix.ETHTOOL_A_LINKMODES_HEADER|unix.NLA_F_NESTED, nil)
	header.AddRtAttr(unix.ETHTOOL_A_HEADER_DEV_INDEX, nl.Uint32Attr(uint32(index)))
	replies, err := m.ask(unix.ETHTOOL_GENL_NAME, unix.ETHTOOL_MSG_LINKMODES_GET, 0, header)
	if err != nil || len(replies) == 0 {
		return 0
	}
	mbit := replies[0].number(unix.ETHTOOL_A_LINKMODES_SPEED)
	if mbit == unknown {
		return 0
	}
	return cc.Rate(mbit) * 1_000_000
}

// askFamily sends one request to a family of generic netlink, and returns the attributes of each
// answer.
func (m *machine) askFamily(name string, command uint8, flags int, attrs ...*nl.RtAttr) ([]attributes, error) {
	family := m.families[name]
	if family == nil {
		var err error
		if family, err = m.links.GenlFamilyGet(name); err != nil {
			return nil, err
		}
		m.families[name] = family
	}
	answers, err := nldump.Retry(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(int(family.ID), flags)
		req.Sockets = m.sockets
		req.AddData(&nl.Genlmsg{Command: command, Version: uint8(family.Version)})
		for _, a := range attrs {
			req.AddData(a)
		}
		return req.Execute(unix.NETLINK_GENERIC, 0)
	})
	if err != nil {
		delete(m.families, name) // a module that is loaded again has another number
		return nil, err
	}
	replies := make([]attributes, 0, len(answers))
	for _, b := range answers {
		reply, err := parseAttributes(b[min(nl.SizeofGenlmsg, len(b)):])
		if err != nil {
			return nil, err
		}
		replies = append(replies, reply)
	}
	return replies, nil
}

// isMissing reports whether the kernel has no such thing, or not for that interface.
func isMissing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP)
}

// attributes are the attributes of a netlink message, by type without flags. If a type occurs several times, it has
// the last.
type attributes map[uint16][]byte

var errMalformed = errors.New("a malformed netlink message")

// parseAttributes reads attributes (struct nlattr of linux/netlink.h).
func parseAttributes(b []byte) (attributes, error) {
	attrs := attributes{}
	for len(b) >= unix.SizeofNlAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofNlAttr || size > len(b) {
			return nil, errMalformed
		}
		attrs[binary.NativeEndian.Uint16(b[2:])&nl.NLA_TYPE_MASK] = b[unix.SizeofNlAttr:size]
		aligned := (size + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
		b = b[min(aligned, len(b)):]
	}
	return attrs, nil
}

// nested returns the attributes within one; none: it is absent or malformed.
func (a attributes) nested(kind uint16) attributes {
	inner, _ := parseAttributes(a[kind])
	return inner
}

// number returns an attribute of 1, 2, 4 or 8 bytes; 0: it is absent.
func (a attributes) number(kind uint16) uint64 {
	switch b := a[kind]; len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.NativeEndian.Uint16(b))
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	case 8:
		return binary.NativeEndian.Uint64(b)
	}
	return 0
}
