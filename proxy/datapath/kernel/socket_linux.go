package kernel

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// socket is the connected socket of a leg, with its addresses.
type socket struct {
	dp     *Datapath
	raw    *eventloop.Socket
	remote netip.AddrPort
	local  netip.AddrPort // of a dialled leg; invalid: the kernel is asked each time
}

// LocalAddr implements net.Conn. On a captured connection it is the address that the client dialled.
func (s *socket) LocalAddr() net.Addr {
	if at := s.LocalAddrPort(); at.IsValid() {
		return net.TCPAddrFromAddrPort(at)
	}
	return (*net.TCPAddr)(nil)
}

// RemoteAddr implements net.Conn.
func (s *socket) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(s.remote) }

// LocalAddrPort implements datapath.Addressed.
func (s *socket) LocalAddrPort() netip.AddrPort {
	if s.local.IsValid() {
		return s.local
	}
	return s.readLocal()
}

// readLocal asks the kernel for the socket's address; invalid: it is closed.
func (s *socket) readLocal() (at netip.AddrPort) {
	_ = s.raw.Visit(func(fd int) (err error) {
		at, err = eventloop.LocalAddrPort(fd)
		return err
	})
	return at
}

// RemoteAddrPort implements datapath.Addressed.
func (s *socket) RemoteAddrPort() netip.AddrPort { return s.remote }

// isIPv4 reports whether the peer is reached over IPv4, also by a socket of both families.
func (s *socket) isIPv4() bool { return s.remote.Addr().Unmap().Is4() }

// SetDeadline implements net.Conn.
func (s *socket) SetDeadline(t time.Time) error {
	return errors.Join(s.raw.SetReadDeadline(t), s.raw.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (s *socket) SetReadDeadline(t time.Time) error { return s.raw.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (s *socket) SetWriteDeadline(t time.Time) error { return s.raw.SetWriteDeadline(t) }

// SyscallConn gives access to the socket, for its options. Bytes written through it are reported late: on an idle leg
// with the next write through the Conn.
func (s *socket) SyscallConn() (syscall.RawConn, error) { return s.raw, nil }

// readInfo reads TCP_INFO into info and returns how many bytes of it this kernel has.
func (s *socket) readInfo(info *unix.TCPInfo) (size uintptr, err error) {
	err = s.raw.Visit(func(fd int) (err error) {
		size, err = tcpInfo(fd, info)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("kernel: read TCP_INFO: %w", err)
	}
	return size, nil
}

// congestionName returns the name of the socket's congestion control; empty: unknown.
func (s *socket) congestionName() (name string) {
	_ = s.raw.Visit(func(fd int) error {
		name = envelopeOf(fd)
		return nil
	})
	return name
}

// setCongestion sets the socket's congestion control.
func (s *socket) setCongestion(name string) error {
	return s.raw.Visit(func(fd int) error {
		return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
	})
}

// readResult returns the result of a raw read, or of a splice out of the socket: n bytes, or the error that opFailure
// makes of poll and call. No bytes and no error are the end of the stream.
func (s *socket) readResult(n int, poll, call error, op string) (int, error) {
	if err := s.opFailure(op, poll, call); err != nil {
		return 0, err
	}
	if n <= 0 {
		return 0, io.EOF
	}
	return n, nil
}

// opFailure returns the error of an operation in the form that package net has; nil if both are. poll is the error of
// waiting for the socket, call that of the system call. datapath.ErrWait is returned as it is.
func (s *socket) opFailure(op string, poll, call error) error {
	err := poll
	if err == nil {
		err = os.NewSyscallError(op, call)
	}
	return datapath.OpError(s, op, "tcp", err)
}

// hasUnread reports whether bytes of the peer wait to be read. A reset leaves them there.
func hasUnread(s *eventloop.Socket) (waits bool) {
	_ = s.Visit(func(fd int) error {
		waits = hasArrived(fd)
		return nil
	})
	return waits
}

// sockaddrOf returns an address in the form that the kernel takes.
func sockaddrOf(at netip.AddrPort) unix.Sockaddr {
	if a := at.Addr().Unmap(); a.Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16(), ZoneId: scopeID(at.Addr())}
}

// scopeID returns the index of the interface that an address's zone names; 0: it has none.
func scopeID(at netip.Addr) uint32 {
	if zone := at.Zone(); zone != "" {
		if i, err := net.InterfaceByName(zone); err == nil {
			return uint32(i.Index)
		}
	}
	return 0
}

// networkOf returns the network of a listener's address as package net names it.
func networkOf(a net.Addr) string {
	if a, ok := a.(*net.TCPAddr); ok && a.IP.To4() != nil {
		return "tcp4"
	}
	return "tcp6"
}

// duplicateFD returns another descriptor of a socket, which Go's poller does not watch.
func duplicateFD(conn syscall.Conn) (own int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	err = datapath.Control(raw, func(fd int) (err error) {
		own, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	return own, err
}
