package linkstat

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	vnl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/nldump"
)

// machine is the way to ask the kernel, in the network namespace in which it
// was opened. It is not for several goroutines at once.
type machine struct {
	route   *netlink.Conn
	links   *vnl.Handle
	generic *genetlink.Conn
}

func openMachine() (m *machine, err error) {
	m = &machine{}
	if m.route, err = netlink.Dial(unix.NETLINK_ROUTE, nil); err == nil {
		m.generic, err = genetlink.Dial(nil)
	}
	if err == nil {
		m.links, err = vnl.NewHandle(unix.NETLINK_ROUTE)
	}
	if err != nil {
		m.closeSockets()
		return nil, fmt.Errorf("linkstat: %w (systemd: RestrictAddressFamilies needs AF_NETLINK)", err)
	}
	return m, nil
}

// interruptReads ends what is being read, and all that would be later. It may be
// called while others read.
func (m *machine) interruptReads() {
	_ = m.route.Close()
	_ = m.generic.Close()
}

func (m *machine) closeSockets() {
	if m.route != nil {
		_ = m.route.Close()
	}
	if m.generic != nil {
		_ = m.generic.Close()
	}
	if m.links != nil {
		m.links.Close()
	}
}

// Interface is a network interface that a Source could read.
type Interface struct {
	Name  string
	Queue string  // kind of its root queueing discipline, such as fq_codel
	Rate  cc.Rate // of its queue or its cable; 0: neither tells one
	Radio bool    // nl80211 knows it
}

// Interfaces returns those of the thread's network namespace that are up, loopback aside.
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

// describeInterfaces leaves out what has vanished since it was listed.
func (m *machine) describeInterfaces(listed []vnl.Link) (out []Interface, err error) {
	for _, l := range listed {
		attrs := l.Attrs()
		if attrs.Flags&net.FlagUp == 0 || attrs.Flags&net.FlagLoopback != 0 {
			continue
		}
		d, err := m.describeDevice(attrs.Name)
		if err != nil {
			if _, now := m.links.LinkByName(attrs.Name); errors.As(now, new(vnl.LinkNotFoundError)) {
				continue
			}
			return nil, err
		}
		out = append(out, Interface{Name: attrs.Name, Queue: d.queue.kind, Rate: d.rate, Radio: d.radio != nil})
	}
	return out, nil
}

// device is an interface with what is behind it.
type device struct {
	link
	index    int
	above    int            // index of the bridge or bond that has its addresses and neighbours; else its own
	prefixes []netip.Prefix // of its addresses
	others   []netip.Prefix // of other interfaces' addresses
	queue    queueID        // at its root
	radio    *radio         // nil: it has none
}

// describeDevice finds out what changes rarely about an interface.
func (m *machine) describeDevice(name string) (*device, error) {
	l, err := m.links.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("linkstat: %w", err)
	}
	attrs := l.Attrs()
	d := &device{index: attrs.Index, above: attrs.Index, link: link{mtu: cc.Bytes(attrs.MTU)}}
	if attrs.MasterIndex != 0 && (attrs.Slave == nil || attrs.Slave.SlaveType() != "vrf") { // which leaves them here
		d.above = attrs.MasterIndex
	}
	qs, err := listQdiscs(m.route, d.index, true)
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
		if d.rate, err = m.topClasses(l); err != nil {
			return nil, err
		}
	}
	if d.rate == 0 {
		d.rate = m.linkSpeed(d.index)
	}
	if d.radio, err = m.describeRadio(d.index); err != nil {
		return nil, err
	}
	d.prefixes, d.others, err = m.interfacePrefixes(d.above)
	return d, err
}

// topClasses is the rate that htb lets all of its top classes together have.
func (m *machine) topClasses(l vnl.Link) (sum cc.Rate, err error) {
	classes, err := nldump.Retry(func() ([]vnl.Class, error) { return m.links.ClassList(l, vnl.HANDLE_NONE) })
	if err != nil {
		return 0, fmt.Errorf("linkstat: read classes: %w", err)
	}
	for _, c := range classes {
		if htb, ok := c.(*vnl.HtbClass); ok && htb.Parent == rootHandle {
			sum += bitsOf(htb.Ceil)
		}
	}
	return sum, nil
}

// interfacePrefixes are those of an interface's addresses, and of all others'.
func (m *machine) interfacePrefixes(index int) (own, others []netip.Prefix, err error) {
	addrs, err := nldump.Retry(func() ([]vnl.Addr, error) { return m.links.AddrList(nil, vnl.FAMILY_ALL) })
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

// neighbourHosts are the hosts on an interface, by hardware address.
func (m *machine) neighbourHosts(index int) (map[string][]netip.Addr, error) {
	known, err := nldump.Retry(func() ([]vnl.Neigh, error) { return m.links.NeighList(index, vnl.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("linkstat: read neighbours: %w", err)
	}
	out := map[string][]netip.Addr{}
	for _, n := range known {
		if ip, ok := netip.AddrFromSlice(n.IP); ok && len(n.HardwareAddr) > 0 && n.State&vnl.NUD_FAILED == 0 {
			mac := string(n.HardwareAddr)
			out[mac] = append(out[mac], ip.Unmap())
		}
	}
	return out, nil
}

// readQueue takes a reading of an interface's queue. An interface that has none, or
// keeps it where only its driver knows, counts what it sends.
func (m *machine) readQueue(d *device, at cc.Time) (reading, error) {
	qs, err := listQdiscs(m.route, d.index, false)
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

// linkSpeed is the rate that both ends of the cable have agreed on; 0: it is not known.
func (m *machine) linkSpeed(index int) cc.Rate {
	const unknown = 1<<32 - 1
	family, err := m.generic.GetFamily(unix.ETHTOOL_GENL_NAME)
	if err != nil {
		return 0 // before Linux 5.6
	}
	ae := netlink.NewAttributeEncoder()
	ae.Nested(unix.ETHTOOL_A_LINKMODES_HEADER, func(ae *netlink.AttributeEncoder) error {
		ae.Uint32(unix.ETHTOOL_A_HEADER_DEV_INDEX, uint32(index))
		return nil
	})
	replies, err := m.sendRequest(family, unix.ETHTOOL_MSG_LINKMODES_GET, 0, ae)
	if err != nil {
		return 0 // its driver does not say
	}
	var mbit uint32
	err = eachAttribute(replies, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == unix.ETHTOOL_A_LINKMODES_SPEED {
			mbit = ad.Uint32()
		}
	})
	if err != nil || mbit == unknown {
		return 0
	}
	return cc.Rate(mbit) * 1_000_000
}

// sendRequest sends one request to a generic netlink family.
func (m *machine) sendRequest(f genetlink.Family, command uint8, flags netlink.HeaderFlags,
	ae *netlink.AttributeEncoder,
) ([]genetlink.Message, error) {
	data, err := ae.Encode()
	if err != nil {
		return nil, err
	}
	msg := genetlink.Message{Header: genetlink.Header{Command: command, Version: f.Version}, Data: data}
	return m.generic.Execute(msg, f.ID, netlink.Request|flags)
}

// eachAttribute calls f for each attribute of a request's answers.
func eachAttribute(replies []genetlink.Message, f func(*netlink.AttributeDecoder)) error {
	for _, reply := range replies {
		ad, err := netlink.NewAttributeDecoder(reply.Data)
		if err != nil {
			return err
		}
		for ad.Next() {
			f(ad)
		}
		if err := ad.Err(); err != nil {
			return err
		}
	}
	return nil
}

// isMissing tells whether what was asked for does not exist, or not for that interface.
func isMissing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP)
}
