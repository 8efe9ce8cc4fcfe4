package hold

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// Neighbour is a host on a connected network: it answers requests for its hardware address whatever its firewall drops.
type Neighbour struct {
	address   netip.Addr
	device    int              // index of the interface on its network
	hardware  net.HardwareAddr // of the host
	requester net.HardwareAddr // of the interface
	// source is the address that requests come from, and marked that of marked ones. The answer goes to the same address,
	// and so shows which it answers.
	source, marked netip.Addr
}

// neighbourSocket asks neighbours: by ARP over IPv4 (RFC 826), by neighbour solicitations over IPv6 (RFC 4861 §7.2).
// Requests go to the host alone, as the kernel's own do for a neighbour that it knows, so they stand in its queue.
type neighbourSocket struct {
	arp, six int // of packets, and of raw ICMPv6; -1: not open
	routes   *netlink.Handle
	buffer   []byte
	control  []byte
}

// Message types, and lengths in bytes.
const (
	arpRequest, arpReply = 1, 2
	arpBytes             = 28 // over Ethernet, for IPv4
	advertisementBytes   = 24
	onLinkHops           = 255 // RFC 4861 §7.1: no router has forwarded the message
)

// openNeighbourSocket needs CAP_NET_RAW, later calls need nothing.
func openNeighbourSocket() (*neighbourSocket, error) {
	s := &neighbourSocket{arp: -1, six: -1, buffer: make([]byte, 1500), control: make([]byte, 128)}
	if err := s.open(); err != nil {
		s.close()
		return nil, fmt.Errorf("hold: sockets that ask neighbours: %w", err)
	}
	return s, nil
}

func (s *neighbourSocket) open() (err error) {
	const flags = unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	if s.routes, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	s.arp, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|flags, int(networkOrder(unix.ETH_P_ARP)))
	if err != nil {
		return err
	}
	if s.six, _ = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|flags, unix.IPPROTO_ICMPV6); s.six < 0 {
		return nil // a machine without IPv6
	}
	for option, value := range map[int]int{
		unix.IPV6_UNICAST_HOPS: onLinkHops, unix.IPV6_RECVHOPLIMIT: 1, unix.IPV6_RECVPKTINFO: 1,
	} {
		if err = unix.SetsockoptInt(s.six, unix.IPPROTO_IPV6, option, value); err != nil {
			return err
		}
	}
	return filterICMPv6(s.six, ipv6.ICMPTypeNeighborAdvertisement)
}

// FindNeighbour returns the neighbour at an address; false: it is not on a connected network, or the kernel does not
// know its hardware address.
func (s *neighbourSocket) FindNeighbour(address netip.Addr) (n Neighbour, ok bool) {
	if s == nil || address.Is6() && s.six < 0 {
		return n, false
	}
	routes, err := s.routes.RouteGet(address.AsSlice())
	if err != nil || len(routes) == 0 || routes[0].Gw != nil || routes[0].Via != nil {
		return n, false
	}
	link, err := s.routes.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return n, false
	}
	n = Neighbour{address: address, device: routes[0].LinkIndex, requester: link.Attrs().HardwareAddr}
	source, _ := netip.AddrFromSlice(routes[0].Src)
	n.source, n.marked = source.Unmap(), netip.IPv4Unspecified() // as an ARP probe's (RFC 5227 §2.1)
	family := netlink.FAMILY_V4
	if address.Is6() {
		// The kernel's own requests come from the link-local address, too. Answers to them count as answers to unmarked ones.
		family, n.source, n.marked = netlink.FAMILY_V6, s.linkLocalAddress(link), source
	}
	known, err := s.routes.NeighList(n.device, family)
	if err != nil {
		return n, false
	}
	for _, k := range known {
		if ip, _ := netip.AddrFromSlice(k.IP); ip.Unmap() == address {
			n.hardware = k.HardwareAddr
		}
	}
	return n, len(n.hardware) == 6 && len(n.requester) == 6 && n.source.IsValid() && n.marked.IsValid()
}

// linkLocalAddress returns the IPv6 address of an interface that its own network alone knows; not valid: it has none.
func (s *neighbourSocket) linkLocalAddress(link netlink.Link) netip.Addr {
	addresses, _ := s.routes.AddrList(link, netlink.FAMILY_V6)
	for _, a := range addresses {
		if ip, _ := netip.AddrFromSlice(a.IP); ip.IsLinkLocalUnicast() {
			return ip
		}
	}
	return netip.Addr{}
}

// AskNeighbour sends a request for a neighbour's hardware address. One that cannot be sent is lost, as the network may
// lose it.
func (s *neighbourSocket) AskNeighbour(n *Neighbour, marked bool) {
	source := n.source
	if marked {
		source = n.marked
	}
	if n.address.Is4() {
		to := &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ARP), Ifindex: n.device, Halen: 6}
		copy(to.Addr[:], n.hardware)
		_ = unix.Sendto(s.arp, n.appendARP(nil, source), unix.MSG_DONTWAIT, to)
		return
	}
	info := unix.PktInfo6(&unix.Inet6Pktinfo{Addr: source.As16(), Ifindex: uint32(n.device)})
	to := &unix.SockaddrInet6{Addr: n.address.As16(), ZoneId: uint32(n.device)}
	_ = unix.Sendmsg(s.six, n.appendSolicitation(nil), info, to, unix.MSG_DONTWAIT)
}

// appendARP appends an ARP request from an address.
func (n *Neighbour) appendARP(b []byte, source netip.Addr) []byte {
	b = append(b, 0, 1, 8, 0, 6, 4, 0, arpRequest) // of Ethernet addresses, for IPv4
	b = append(append(b, n.requester...), source.AsSlice()...)
	return append(append(b, n.hardware...), n.address.AsSlice()...)
}

// appendSolicitation appends a neighbour solicitation. The kernel computes its checksum.
func (n *Neighbour) appendSolicitation(b []byte) []byte {
	b = append(b, byte(ipv6.ICMPTypeNeighborSolicitation), 0, 0, 0, 0, 0, 0, 0)
	b = append(b, n.address.AsSlice()...)
	return append(append(b, 1, 1), n.requester...) // source link-layer address (RFC 4861 §4.6.1)
}

// neighbourAnswer is an answer that has come over an interface.
type neighbourAnswer struct {
	from, to netip.Addr
	device   int
	hardware net.HardwareAddr // of the host; nil: the answer does not show it
}

// matchRequest reports whether n gave the answer to one of our requests, and whether that was a marked one.
func (a *neighbourAnswer) matchRequest(n *Neighbour) (ok, marked bool) {
	ok = a.from == n.address && a.device == n.device && (a.to == n.source || a.to == n.marked) &&
		(a.hardware == nil || bytes.Equal(a.hardware, n.hardware))
	return ok, a.to == n.marked
}

// parseARP reads an ARP answer.
func parseARP(packet []byte) (a neighbourAnswer, ok bool) {
	if len(packet) < arpBytes || !bytes.Equal(packet[:8], []byte{0, 1, 8, 0, 6, 4, 0, arpReply}) {
		return a, false
	}
	a.hardware = bytes.Clone(packet[8:14])
	a.from, a.to = netip.AddrFrom4([4]byte(packet[14:18])), netip.AddrFrom4([4]byte(packet[24:28]))
	return a, true
}

// parseAdvertisement reads a neighbour advertisement from its ICMPv6 header on (RFC 4861 §4.4).
func parseAdvertisement(packet []byte) (a neighbourAnswer, ok bool) {
	const code, solicited, targetOption = 0, 1 << 6, 2
	if len(packet) < advertisementBytes || packet[0] != byte(ipv6.ICMPTypeNeighborAdvertisement) || packet[1] != code ||
		packet[4]&solicited == 0 {
		return a, false
	}
	a.from = netip.AddrFrom16([16]byte(packet[8:24]))
	for options := packet[advertisementBytes:]; len(options) >= 8; {
		length := int(options[1]) * 8
		if length == 0 || length > len(options) {
			return a, false
		}
		if options[0] == targetOption && length == 8 {
			a.hardware = bytes.Clone(options[2:8])
		}
		options = options[length:]
	}
	return a, true
}

// receiveAnswers calls handle with the answers that have come, at most a batch of each family.
func (s *neighbourSocket) receiveAnswers(handle func(neighbourAnswer)) {
	if s == nil {
		return
	}
	for range answersBatch {
		n, from, err := unix.Recvfrom(s.arp, s.buffer, unix.MSG_DONTWAIT)
		if err != nil && !errors.Is(err, unix.EINTR) {
			break
		}
		if link, ok := from.(*unix.SockaddrLinklayer); ok && link.Pkttype == unix.PACKET_HOST {
			if a, ok := parseARP(s.buffer[:n]); ok {
				a.device = link.Ifindex
				handle(a)
			}
		}
	}
	for left := answersBatch; s.six >= 0 && left > 0; left-- {
		n, controls, _, _, err := unix.Recvmsg(s.six, s.buffer, s.control, unix.MSG_DONTWAIT)
		if err != nil && !errors.Is(err, unix.EINTR) {
			break
		}
		if a, ok := parseAdvertisement(s.buffer[:max(n, 0)]); ok && a.readControls(s.control[:controls]) {
			handle(a)
		}
	}
}

// readControls reads where an advertisement has arrived; false: a router has forwarded it, or that is not known.
func (a *neighbourAnswer) readControls(b []byte) (ok bool) {
	messages, err := unix.ParseSocketControlMessage(b)
	if err != nil {
		return false
	}
	for _, m := range messages {
		switch {
		case m.Header.Level != unix.IPPROTO_IPV6:
		case m.Header.Type == unix.IPV6_HOPLIMIT && len(m.Data) >= 4:
			ok = binary.NativeEndian.Uint32(m.Data) == onLinkHops
		case m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			a.to, a.device = netip.AddrFrom16([16]byte(m.Data)), int(binary.NativeEndian.Uint32(m.Data[16:]))
		}
	}
	return ok && a.device != 0
}

// descriptors returns the sockets that are open.
func (s *neighbourSocket) descriptors() []int {
	switch {
	case s == nil:
		return nil
	case s.six < 0:
		return []int{s.arp}
	}
	return []int{s.arp, s.six}
}

func (s *neighbourSocket) close() {
	if s == nil {
		return
	}
	for _, fd := range []*int{&s.arp, &s.six} {
		if *fd >= 0 {
			_ = unix.Close(*fd)
			*fd = -1
		}
	}
	if s.routes != nil {
		s.routes.Close()
	}
}

// networkOrder returns a number as the kernel has it in network byte order.
func networkOrder(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}
