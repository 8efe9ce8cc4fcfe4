package tunnel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

const (
	icmpHeader       = 8
	socketBuffer     = 1 << 20 // bytes towards us, as far as the system allows: what a burst may hold
	largestDatagrams = 1 << 16 // what the kernel hands over at once, several of one size
)

// socket is a session's way to the network outside. It does not wait to send.
type socket struct {
	file *os.File
	raw  syscall.RawConn
	six  bool
	echo bool
	id   int // of a raw socket's echo requests, which sees all replies; -1: the kernel sees to it
}

// openSocket opens the socket for what comes from an endpoint.
func (d *Datagrams) openSocket(from origin) (*socket, error) {
	s := &socket{six: from.Addr().Is6(), echo: from.echo, id: -1}
	family, protocol := unix.AF_INET, 0
	if s.six {
		family = unix.AF_INET6
	}
	if s.echo {
		protocol = unix.IPPROTO_ICMP
		if s.six {
			protocol = unix.IPPROTO_ICMPV6
		}
	}
	const flags = unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|flags, protocol)
	if s.echo && errors.Is(err, unix.EACCES) {
		s.id = int(d.ids.Add(1) & 0xffff)
		fd, err = unix.Socket(family, unix.SOCK_RAW|flags, protocol)
		if err != nil && !d.noted.Swap(true) {
			d.with.Log.Warn("tunnel: echo requests stay unanswered: net.ipv4.ping_group_range leaves out this process's group, and CAP_NET_RAW is missing", "err", err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("tunnel: open a socket: %w", err)
	}
	if err := s.set(fd, d.with.Mark); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("tunnel: set up a socket: %w", err)
	}
	s.file = os.NewFile(uintptr(fd), "datagrams")
	if s.raw, err = s.file.SyscallConn(); err != nil {
		_ = s.file.Close()
		return nil, fmt.Errorf("tunnel: %w", err)
	}
	return s, nil
}

func (s *socket) set(fd int, mark uint32) error {
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
	case !s.echo:
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) // older kernels hand over one by one
	case s.id >= 0 && s.six:
		only := unix.ICMPv6Filter{Data: [8]uint32{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}
		only.Data[echoReply6>>5] &^= 1 << (echoReply6 & 31)
		return unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &only)
	case s.id >= 0:
		const icmpFilter = 1 // of linux/icmp.h
		return unix.SetsockoptInt(fd, unix.SOL_RAW, icmpFilter, ^(1 << echoReply4))
	}
	return nil
}

const (
	echoReply4 = 0
	echoReply6 = 129
)

func (s *socket) close() { _ = s.file.Close() }

// send sends a datagram, or drops it where there is no room for it.
func (s *socket) send(target netip.AddrPort, payload []byte) error {
	if s.id >= 0 {
		binary.BigEndian.PutUint16(payload[4:], uint16(s.id))
		if !s.six { // the kernel sums up ICMPv6 only
			binary.BigEndian.PutUint16(payload[2:], 0)
			binary.BigEndian.PutUint16(payload[2:], ^sum(payload))
		}
	}
	var to unix.Sockaddr
	if s.six {
		to = &unix.SockaddrInet6{Port: int(target.Port()), Addr: target.Addr().As16()}
	} else {
		to = &unix.SockaddrInet4{Port: int(target.Port()), Addr: target.Addr().As4()}
	}
	var err error
	closed := s.raw.Control(func(fd uintptr) {
		err = unix.Sendto(int(fd), payload, unix.MSG_DONTWAIT, to)
		if pending(err) { // about an earlier one, which receive tells of
			err = unix.Sendto(int(fd), payload, unix.MSG_DONTWAIT, to)
		}
	})
	return errors.Join(closed, err)
}

// pending reports whether a socket's error may be about something sent before.
func pending(err error) bool {
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH),
		errors.Is(err, unix.EMSGSIZE), errors.Is(err, unix.EPROTO), errors.Is(err, unix.ENOPROTOOPT), errors.Is(err, unix.EACCES):
		return true
	}
	return false
}

// sum is the Internet checksum (RFC 1071), not yet inverted.
func sum(b []byte) uint16 {
	var s uint32
	for ; len(b) > 1; b = b[2:] {
		s += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// received is what came from outside: datagrams from one sender, each but the last
// of segment bytes (0: there is one), or what the network said of one sent to from.
type received struct {
	from    netip.AddrPort
	payload []byte
	segment int
	failure *netstack.Unreachable
	memory  *[largestDatagrams]byte
}

var memories = sync.Pool{New: func() any { return new([largestDatagrams]byte) }}

func (r received) release() { memories.Put(r.memory) }

// receive waits for something from outside, until the socket is closed.
func (s *socket) receive() (news received, err error) {
	waited := s.raw.Read(func(fd uintptr) bool {
		news.memory = memories.Get().(*[largestDatagrams]byte) // only once there is something, for the many that are silent
		for {
			var more bool
			more, err = s.read(int(fd), &news)
			switch {
			case err != nil || more:
				return true
			case news.payload == nil:
				news.release()
				return false
			}
			news.payload = nil // of no use
		}
	})
	if waited != nil {
		return received{}, fmt.Errorf("tunnel: receive: %w", waited)
	}
	if err != nil {
		news.release()
	}
	return news, err
}

// read takes in one thing without waiting: ok if it is for the session; news
// without a payload: there is nothing.
func (s *socket) read(fd int, news *received) (ok bool, err error) {
	var control [128]byte
	n, oobn, _, from, err := unix.Recvmsg(fd, news.memory[:], control[:], unix.MSG_DONTWAIT)
	switch {
	case err == nil:
		news.payload, news.from, news.segment = news.memory[:n], addrPortOf(from), segmentSize(control[:oobn])
		return s.strip(news), nil
	case errors.Is(err, unix.EINTR):
		news.payload = news.memory[:0]
		return false, nil
	case !errors.Is(err, unix.EAGAIN) && !pending(err):
		return false, err
	}
	again := pending(err)
	n, oobn, _, from, err = unix.Recvmsg(fd, news.memory[:], control[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	if err != nil {
		if again {
			news.payload = news.memory[:0] // the error has been taken: there may be something behind it
		}
		return false, nil
	}
	news.payload, news.from, news.failure = news.memory[:n], addrPortOf(from), failureIn(control[:oobn])
	if s.echo {
		news.from = netip.AddrPortFrom(news.from.Addr(), 0)
	}
	return news.failure != nil, nil
}

// strip makes an echo reply of what an ICMP socket read; false: it is another's.
func (s *socket) strip(news *received) bool {
	if !s.echo {
		return true
	}
	b, reply := news.payload, byte(echoReply6)
	news.from = netip.AddrPortFrom(news.from.Addr(), 0)
	if !s.six {
		reply = echoReply4
		if s.id >= 0 { // with its IP header
			if len(b) == 0 || len(b) < int(b[0]&15)*4 {
				return false
			}
			b = b[int(b[0]&15)*4:]
		}
	}
	news.payload = b
	if len(b) < icmpHeader || b[0] != reply || s.id >= 0 && int(binary.BigEndian.Uint16(b[4:])) != s.id {
		news.payload = news.memory[:0]
		return false
	}
	return true
}

// segmentSize is how large datagrams are that the kernel has put together.
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

// failureIn is the ICMP error in a message of the error queue (struct
// sock_extended_err, and the address of whoever says so); nil: there is none.
func failureIn(control []byte) *netstack.Unreachable {
	const (
		fromICMP, fromICMP6 = 2, 3
		size                = 16
	)
	for len(control) >= unix.SizeofCmsghdr { // what is shorter would be read beyond its end
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		if err != nil {
			return nil
		}
		control = rest
		four := h.Level == unix.IPPROTO_IP && h.Type == unix.IP_RECVERR
		six := h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_RECVERR
		if !four && !six || len(data) < size || data[4] != fromICMP && data[4] != fromICMP6 {
			continue
		}
		u := &netstack.Unreachable{Type: data[5], Code: data[6]}
		if unix.Errno(binary.NativeEndian.Uint32(data)) == unix.EMSGSIZE {
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
