package userspace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/datapath/udpbatch"
)

const (
	icmpHeader       = 8
	socketBuffer     = 256 << 10 // bytes towards us, as far as the system allows: what a burst may hold
	largestDatagrams = 1 << 16   // bytes that the kernel hands over at once: several datagrams of one size
)

// socket is a session's socket to the network outside. Sending does not block.
type socket struct {
	file *os.File
	conn syscall.RawConn
	six  bool
	kind kind
}

// kind is the purpose of a socket.
type kind uint8

const (
	forUDP  kind = iota
	forPing      // one session's echo requests: the kernel sets and checks the identifier
	forRaw       // all sessions' echo requests, where the kernel permits no other; it sees all replies
)

// isShared reports whether all sessions of a family share the socket.
func (s *socket) isShared() bool { return s.kind == forRaw }

func newSocket(k kind, six bool, mark uint32) (*socket, error) {
	s := &socket{six: six, kind: k}
	family, typ, protocol := unix.AF_INET, unix.SOCK_DGRAM, 0
	if six {
		family = unix.AF_INET6
	}
	if k != forUDP {
		protocol = unix.IPPROTO_ICMP
		if six {
			protocol = unix.IPPROTO_ICMPV6
		}
	}
	if k == forRaw {
		typ = unix.SOCK_RAW
	}
	fd, err := unix.Socket(family, typ|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("tunnel: open a socket: %w", err)
	}
	if err := s.setOptions(fd, mark); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("tunnel: set up a socket: %w", err)
	}
	s.file = os.NewFile(uintptr(fd), "datagrams")
	if s.conn, err = s.file.SyscallConn(); err != nil {
		_ = s.file.Close()
		return nil, fmt.Errorf("tunnel: %w", err)
	}
	return s, nil
}

// setOptions sets the mark, buffers, and the queue of errors, with filters for raw sockets.
func (s *socket) setOptions(fd int, mark uint32) error {
	if mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			return fmt.Errorf("mark %d: %w", mark, err)
		}
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, socketBuffer)
	// Errors of the network are read, with what they say, from a queue of their own.
	if s.six {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1); err != nil {
			return err
		}
	} else if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1); err != nil {
		return err
	}
	switch {
	case s.kind == forUDP:
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) // older kernels hand over one by one
	case s.isShared() && s.six:
		only := unix.ICMPv6Filter{Data: [8]uint32{
			0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff,
			0xffffffff, 0xffffffff,
		}}
		only.Data[echoReply6>>5] &^= 1 << (echoReply6 & 31)
		return unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &only)
	case s.isShared():
		const icmpFilter = 1 // of linux/icmp.h
		return unix.SetsockoptInt(fd, unix.SOL_RAW, icmpFilter, ^(1 << echoReply4))
	}
	return nil
}

const (
	echoReply4   = 0
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply6   = 129
)

func (s *socket) closeSocket() { _ = s.file.Close() }

// releaseSocket closes the socket unless sessions share it.
func (s *socket) releaseSocket() {
	if !s.isShared() {
		s.closeSocket()
	}
}

// sendDatagram sends a datagram with a hop limit of hops. It drops the datagram if the socket has
// no room. id is the identifier of an echo request on a raw socket.
func (s *socket) sendDatagram(target netip.AddrPort, payload []byte, id uint16, hops uint8) error {
	if s.isShared() {
		binary.BigEndian.PutUint16(payload[4:], id)
		if !s.six { // the kernel sums up ICMPv6 only
			binary.BigEndian.PutUint16(payload[2:], 0)
			binary.BigEndian.PutUint16(payload[2:], ^checksum.Checksum(payload, 0))
		}
	}
	var to unix.Sockaddr
	if s.six {
		to = &unix.SockaddrInet6{Port: int(target.Port()), Addr: target.Addr().As16()}
	} else {
		to = &unix.SockaddrInet4{Port: int(target.Port()), Addr: target.Addr().As4()}
	}
	control := s.hopLimitMessage(hops)
	var err error
	closed := s.conn.Control(func(fd uintptr) {
		_, err = unix.SendmsgN(int(fd), payload, control, to, unix.MSG_DONTWAIT)
		if isPendingError(err) { // about an earlier datagram: receiveOne returns it
			_, err = unix.SendmsgN(int(fd), payload, control, to, unix.MSG_DONTWAIT)
		}
	})
	return errors.Join(closed, err)
}

// hopLimitMessage returns the control message that sets a datagram's hop limit.
func (s *socket) hopLimitMessage(hops uint8) []byte {
	value := binary.NativeEndian.AppendUint32(nil, uint32(hops))
	if s.six {
		return udpbatch.AppendControl(nil, unix.IPPROTO_IPV6, unix.IPV6_HOPLIMIT, value)
	}
	return udpbatch.AppendControl(nil, unix.IPPROTO_IP, unix.IP_TTL, value)
}

// isPendingError reports whether a socket's error may be about an earlier datagram.
func isPendingError(err error) bool {
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH),
		errors.Is(err, unix.EHOSTDOWN), errors.Is(err, unix.ENONET), errors.Is(err, unix.EOPNOTSUPP),
		errors.Is(err, unix.EMSGSIZE), errors.Is(err, unix.EPROTO), errors.Is(err, unix.ENOPROTOOPT),
		errors.Is(err, unix.EACCES):
		return true
	}
	return false
}

// unreachableCodes are the codes of Destination Unreachable for errors of the kernel, for IPv4 (RFC
// 792, RFC 1812 §5.2.7.1) and IPv6 (RFC 4443 §3.1). The error queue reports a datagram that is too
// big, with the MTU.
var unreachableCodes = []struct {
	err          error
	code4, code6 uint8
}{
	{unix.ENETUNREACH, 0, 0},
	{unix.EHOSTUNREACH, 1, 3},
	{unix.ECONNREFUSED, 3, 4},
	{unix.EACCES, 13, 1},
	{unix.EPERM, 13, 1},
}

// icmpErrorFor returns the ICMP error for the sender of a datagram that the kernel refused; false:
// there is none.
func icmpErrorFor(err error, target netip.AddrPort) (netstack.Unreachable, bool) {
	for _, e := range unreachableCodes {
		if !errors.Is(err, e.err) {
			continue
		}
		if target.Addr().Is6() {
			return netstack.Unreachable{Type: 1, Code: e.code6}, true
		}
		return netstack.Unreachable{Type: 3, Code: e.code4}, true
	}
	return netstack.Unreachable{}, false
}

// translateICMP translates an ICMP error into the other family: into IPv6 if six, else into IPv4.
func translateICMP(u netstack.Unreachable, six bool) netstack.Unreachable {
	to := netstack.Unreachable{Type: 3, Code: 1} // the host is
	if six {
		to = netstack.Unreachable{Type: 1, Code: 3}
	}
	for _, e := range unreachableCodes {
		switch {
		case six && u.Type == 3 && u.Code == e.code4:
			to.Code = e.code6
		case !six && u.Type == 1 && u.Code == e.code6:
			to.Code = e.code4
		}
	}
	return to
}

// received is what came from outside: datagrams of one sender, or an ICMP error about a datagram
// that was sent to from.
type received struct {
	from    netip.AddrPort
	payload []byte
	// id is that of an echo request on a raw socket.
	id uint16
	// segment is the size of each datagram but the last, in bytes. 0: there is one.
	segment   int
	icmpError *netstack.Unreachable
	memory    *[largestDatagrams]byte
}

var memories = sync.Pool{New: func() any { return new([largestDatagrams]byte) }}

func (r received) releaseMemory() { memories.Put(r.memory) }

// receiveOne waits for something from outside, until the socket is closed. It takes memory only
// once there is something, because most sessions are silent.
func (s *socket) receiveOne() (news received, err error) {
	ended := s.conn.Read(func(fd uintptr) bool {
		news.memory = memories.Get().(*[largestDatagrams]byte)
		for {
			var more bool
			more, err = s.readOne(int(fd), &news)
			switch {
			case err != nil || more:
				return true
			case news.payload == nil:
				news.releaseMemory()
				return false
			}
			news.payload = nil // it was not for the session
		}
	})
	if ended != nil {
		return received{}, fmt.Errorf("tunnel: receive: %w", ended)
	}
	if err != nil {
		news.releaseMemory()
	}
	return news, err
}

// readOne reads without waiting. ok: what it has read is for the session. It leaves news without a
// payload if there was nothing to read.
func (s *socket) readOne(fd int, news *received) (ok bool, err error) {
	var control [128]byte
	n, oobn, _, from, err := unix.Recvmsg(fd, news.memory[:], control[:], unix.MSG_DONTWAIT)
	switch {
	case err == nil:
		news.payload, news.from, news.segment = news.memory[:n], addrPortOf(from), segmentSize(control[:oobn])
		return s.stripEchoReply(news), nil
	case errors.Is(err, unix.EINTR):
		news.payload = news.memory[:0]
		return false, nil
	case !errors.Is(err, unix.EAGAIN) && !isPendingError(err):
		return false, err
	}
	mayFollow := isPendingError(err)
	n, oobn, _, from, err = unix.Recvmsg(fd, news.memory[:], control[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	if err != nil {
		if mayFollow {
			news.payload = news.memory[:0] // the error has been read, and a datagram may follow it
		}
		return false, nil
	}
	news.payload, news.from, news.icmpError = news.memory[:n], addrPortOf(from), icmpErrorIn(control[:oobn])
	if s.kind != forUDP {
		news.from = netip.AddrPortFrom(news.from.Addr(), 0)
		if n >= icmpHeader { // the echo request that it is about
			news.id = binary.BigEndian.Uint16(news.payload[4:])
		}
	}
	return news.icmpError != nil, nil
}

// stripEchoReply reduces a message of an ICMP socket to an echo reply; false: it is no reply for
// this process.
func (s *socket) stripEchoReply(news *received) bool {
	if s.kind == forUDP {
		return true
	}
	b, reply := news.payload, byte(echoReply6)
	news.from = netip.AddrPortFrom(news.from.Addr(), 0)
	if !s.six {
		reply = echoReply4
		if s.isShared() { // with its IP header
			if len(b) == 0 || len(b) < int(b[0]&15)*4 {
				return false
			}
			b = b[int(b[0]&15)*4:]
		}
	}
	news.payload = b
	if len(b) < icmpHeader || b[0] != reply {
		news.payload = news.memory[:0]
		return false
	}
	news.id = binary.BigEndian.Uint16(b[4:])
	return true
}

// segmentSize returns the size of datagrams that the kernel has joined (UDP_GRO), in bytes. 0: it
// has joined none.
func segmentSize(control []byte) int {
	for len(control) >= unix.SizeofCmsghdr { // what is shorter would be read beyond its end
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		if err != nil {
			return 0
		}
		if h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(data) >= 4 {
			return int(binary.NativeEndian.Uint32(data))
		}
		control = rest
	}
	return 0
}

// icmpErrorIn reads the ICMP error in a message of the error queue (struct sock_extended_err, and
// the address of its sender); nil: there is none.
func icmpErrorIn(control []byte) *netstack.Unreachable {
	const (
		fromUs, fromICMP, fromICMP6 = 1, 2, 3
		size                        = 16
	)
	for len(control) >= unix.SizeofCmsghdr { // what is shorter would be read beyond its end
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		if err != nil {
			return nil
		}
		control = rest
		four := h.Level == unix.IPPROTO_IP && h.Type == unix.IP_RECVERR
		six := h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_RECVERR
		if !four && !six || len(data) < size {
			continue
		}
		tooBig := unix.Errno(binary.NativeEndian.Uint32(data)) == unix.EMSGSIZE
		u := &netstack.Unreachable{Type: data[5], Code: data[6]}
		switch origin := data[4]; {
		case origin == fromICMP || origin == fromICMP6:
		case origin == fromUs && tooBig && four: // what the kernel did not send since it does not fit
			u.Type, u.Code = 3, 4
		case origin == fromUs && tooBig:
			u.Type, u.Code = 2, 0
		default:
			continue // sendDatagram has returned it
		}
		if tooBig {
			u.MTU = binary.NativeEndian.Uint32(data[8:])
		}
		if offender := data[size:]; four && len(offender) >= 8 {
			u.From = netip.AddrFrom4([4]byte(offender[4:8]))
		} else if six && len(offender) >= 24 {
			u.From = netip.AddrFrom16([16]byte(offender[8:24]))
		}
		return u
	}
	return nil
}

func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// prohibitedError returns the ICMP error for datagrams that policy refuses (RFC 1812 §5.2.7.1, RFC
// 4443 §3.1).
func prohibitedError(target netip.AddrPort) netstack.Unreachable {
	if target.Addr().Is6() {
		return netstack.Unreachable{Type: 1, Code: 1}
	}
	return netstack.Unreachable{Type: 3, Code: 13}
}

// targetGone reports whether an ICMP error says that a target is unreachable. A datagram that is
// too big for the path does not say so.
func targetGone(u netstack.Unreachable, target netip.AddrPort) bool {
	const unreachable4, fragmentationNeeded, unreachable6 = 3, 4, 1
	if target.Addr().Is6() {
		return u.Type == unreachable6
	}
	return u.Type == unreachable4 && u.Code != fragmentationNeeded
}
