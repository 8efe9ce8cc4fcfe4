package hold

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// answersBatch is how many messages are read from a socket at once.
const answersBatch = 64

// EchoSocket sends ICMP echo requests, and requests to neighbours, and receives their answers. One goroutine at a time
// may use it.
type EchoSocket struct {
	*neighbourSocket     // nil: this machine lets nothing ask neighbours
	four, six        int // raw sockets; -1: the family is not there
	buffer           []byte
	// cookie is the content of requests: answers to other programs have another one.
	cookie [8]byte
}

// OpenEchoSocket opens raw sockets for the families that this machine has. It needs CAP_NET_RAW, later calls need
// nothing.
func OpenEchoSocket() (*EchoSocket, error) {
	s := &EchoSocket{four: -1, six: -1, buffer: make([]byte, 1500)}
	_, _ = rand.Read(s.cookie[:]) // it never fails
	var err4, err6 error
	const kind = unix.SOCK_RAW | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	if s.four, err4 = unix.Socket(unix.AF_INET, kind, unix.IPPROTO_ICMP); err4 == nil {
		// Only answers: bit n keeps ICMP type n out (icmp(7)).
		const icmpFilter = 1
		allButReplies := ^(1 << int(ipv4.ICMPTypeEchoReply))
		err4 = unix.SetsockoptInt(s.four, unix.SOL_RAW, icmpFilter, allButReplies)
	}
	if s.six, err6 = unix.Socket(unix.AF_INET6, kind, unix.IPPROTO_ICMPV6); err6 == nil {
		err6 = filterICMPv6(s.six, ipv6.ICMPTypeEchoReply)
	}
	if s.four < 0 && s.six < 0 || err4 != nil && err6 != nil {
		s.Close()
		return nil, fmt.Errorf("hold: raw sockets for echo requests need CAP_NET_RAW: %w", errors.Join(err4, err6))
	}
	s.neighbourSocket, _ = openNeighbourSocket() // without it clients that answer no echo request have a share
	return s, nil
}

// filterICMPv6 keeps all messages but those of one type from a raw socket.
func filterICMPv6(socket int, kind ipv6.ICMPType) error {
	filter := unix.ICMPv6Filter{}
	for i := range filter.Data {
		filter.Data[i] = ^uint32(0)
	}
	filter.Data[kind/32] &^= 1 << (kind % 32)
	return unix.SetsockoptICMPv6Filter(socket, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &filter)
}

// Send sends an echo request. The zone of a link-local address is the number of an interface. A request that cannot be
// sent is lost, as the network may lose it.
func (s *EchoSocket) Send(to netip.Addr, id, sequence uint16) {
	var (
		kind    icmp.Type = ipv6.ICMPTypeEchoRequest
		socket            = s.six
		address unix.Sockaddr
	)
	if to.Is4() {
		kind, socket, address = ipv4.ICMPTypeEcho, s.four, &unix.SockaddrInet4{Addr: to.As4()}
	} else {
		zone, _ := strconv.ParseUint(to.Zone(), 10, 32) // 0 without one
		address = &unix.SockaddrInet6{Addr: to.As16(), ZoneId: uint32(zone)}
	}
	if socket < 0 {
		return
	}
	// The kernel computes the checksum over IPv6, since it needs the source address.
	message := icmp.Message{Type: kind, Body: &icmp.Echo{ID: int(id), Seq: int(sequence), Data: s.cookie[:]}}
	if packet, err := message.Marshal(nil); err == nil {
		_ = unix.Sendto(socket, packet, unix.MSG_DONTWAIT, address)
	}
}

// Receive calls handle with the answers that have come, at most a batch of each family. Others wait until the next
// call: a flood of them must not keep packets from their verdicts.
func (s *EchoSocket) Receive(handle func(from netip.Addr, id, sequence uint16)) {
	for _, socket := range [...]int{s.four, s.six} {
		for left := answersBatch; socket >= 0 && left > 0; left-- {
			n, from, err := unix.Recvfrom(socket, s.buffer, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				break
			}
			switch from := from.(type) {
			case *unix.SockaddrInet4:
				if id, sequence, ok := s.parseReply(s.buffer[:n], true); ok {
					handle(netip.AddrFrom4(from.Addr), id, sequence)
				}
			case *unix.SockaddrInet6:
				if id, sequence, ok := s.parseReply(s.buffer[:n], false); ok {
					handle(netip.AddrFrom16(from.Addr), id, sequence)
				}
			}
		}
	}
}

// parseReply reads an answer to a request of this socket: over IPv4 a raw socket shows it behind its IP header.
func (s *EchoSocket) parseReply(packet []byte, withHeader bool) (id, sequence uint16, ok bool) {
	want := byte(ipv6.ICMPTypeEchoReply)
	if withHeader {
		want = byte(ipv4.ICMPTypeEchoReply)
		if len(packet) == 0 || len(packet) < int(packet[0]&0xf)*4 {
			return 0, 0, false
		}
		packet = packet[int(packet[0]&0xf)*4:]
	}
	if len(packet) < 8 || packet[0] != want || !bytes.Equal(packet[8:], s.cookie[:]) {
		return 0, 0, false
	}
	return binary.BigEndian.Uint16(packet[4:]), binary.BigEndian.Uint16(packet[6:]), true
}

// descriptors returns the sockets that are open.
func (s *EchoSocket) descriptors() (fds []int) {
	for _, fd := range [...]int{s.four, s.six} {
		if fd >= 0 {
			fds = append(fds, fd)
		}
	}
	return append(fds, s.neighbourSocket.descriptors()...)
}

// Close closes the sockets.
func (s *EchoSocket) Close() {
	s.neighbourSocket.close()
	s.neighbourSocket = nil
	for _, fd := range s.descriptors() {
		_ = unix.Close(fd)
	}
	s.four, s.six = -1, -1
}
