package eventloop

import (
	"encoding/binary"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls of this file do not wait on a non-blocking socket, so they do not tell Go's scheduler of themselves. It
// takes the processor from a goroutine if a call lasts for more than 20 µs, and the goroutine then waits for another
// processor. Calls last that long when the kernel handles packets in them, as connect(2) over loopback does.

// Receive is recv(2). It costs less than read(2), which passes through the file system's layer.
func Receive(fd int, b []byte, flags int) (int, error) {
	first := unsafe.Pointer(unsafe.SliceData(b))
	return errnoResult(unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(first), uintptr(len(b)),
		uintptr(flags), 0, 0))
}

// Send is send(2) without a signal. It costs less than write(2).
func Send(fd int, b []byte) (int, error) {
	first := unsafe.Pointer(unsafe.SliceData(b))
	return errnoResult(unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(first), uintptr(len(b)),
		unix.MSG_NOSIGNAL, 0, 0))
}

// SetOption is setsockopt(2).
func SetOption[T int32 | uint | unix.Linger](fd, level, option int, value T) error {
	_, err := errnoResult(unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&value)), unsafe.Sizeof(value), 0))
	return err
}

// signalEvent adds one to an eventfd, which wakes who waits for it.
func signalEvent(fd int) {
	one := uint64(1)
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&one)), unsafe.Sizeof(one))
}

// epollAdd adds a descriptor to an epoll instance.
func epollAdd(epoll, fd int, event *unix.EpollEvent) error {
	_, err := errnoResult(unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epoll), unix.EPOLL_CTL_ADD, uintptr(fd),
		uintptr(unsafe.Pointer(event)), 0, 0))
	return err
}

// Shutdown is shutdown(2).
func Shutdown(fd, how int) error {
	_, err := errnoResult(unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), uintptr(how), 0))
	return err
}

// Close is close(2). The socket must not linger, since close(2) would wait for its bytes to arrive.
func Close(fd int) error {
	_, err := errnoResult(unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0))
	return err
}

// epollReady is epoll_wait(2) without waiting.
func epollReady(epoll int, events []unix.EpollEvent) (int, error) {
	first := unsafe.Pointer(unsafe.SliceData(events))
	return errnoResult(unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(first), uintptr(len(events)),
		0, 0, 0))
}

// Connect is connect(2). scope is the interface of an address with a zone.
func Connect(fd int, to netip.AddrPort, scope uint32) error {
	port := [2]byte(binary.BigEndian.AppendUint16(nil, to.Port()))
	var at unsafe.Pointer
	var size uintptr
	if to.Addr().Is4() {
		sa := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr().As4()}
		*(*[2]byte)(unsafe.Pointer(&sa.Port)) = port
		at, size = unsafe.Pointer(&sa), unix.SizeofSockaddrInet4
	} else {
		sa := unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: to.Addr().As16(), Scope_id: scope}
		*(*[2]byte)(unsafe.Pointer(&sa.Port)) = port
		at, size = unsafe.Pointer(&sa), unix.SizeofSockaddrInet6
	}
	_, err := errnoResult(unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(at), size))
	return err
}

// Accept is accept4(2): a non-blocking connection that a program which is started does not inherit, and its peer.
func Accept(fd int) (conn int, from netip.AddrPort, err error) {
	var at unix.RawSockaddrInet6
	size := uint32(unix.SizeofSockaddrInet6)
	conn, err = errnoResult(unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(&at)),
		uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0))
	return conn, addrPortOf(&at), err
}

// LocalAddrPort is getsockname(2).
func LocalAddrPort(fd int) (netip.AddrPort, error) { return nameOf(unix.SYS_GETSOCKNAME, fd) }

// RemoteAddrPort is getpeername(2).
func RemoteAddrPort(fd int) (netip.AddrPort, error) { return nameOf(unix.SYS_GETPEERNAME, fd) }

// nameOf returns the address that a system call writes.
func nameOf(call uintptr, fd int) (netip.AddrPort, error) {
	var at unix.RawSockaddrInet6
	size := uint32(unix.SizeofSockaddrInet6)
	_, err := errnoResult(unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&at)),
		uintptr(unsafe.Pointer(&size))))
	return addrPortOf(&at), err
}

// addrPortOf returns an address that the kernel has written; invalid: it is of another family. A zone is the number of
// its interface, since the name would take a dump of all interfaces.
func addrPortOf(at *unix.RawSockaddrInet6) netip.AddrPort {
	var addr netip.Addr
	switch at.Family {
	case unix.AF_INET:
		addr = netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(at)).Addr)
	case unix.AF_INET6:
		if addr = netip.AddrFrom16(at.Addr); at.Scope_id != 0 {
			addr = addr.WithZone(strconv.Itoa(int(at.Scope_id)))
		}
	default:
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&at.Port))[:]))
}

// errnoResult turns the result of a raw system call into Go's. n is 0 with an error.
func errnoResult(n, _ uintptr, errno unix.Errno) (int, error) {
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
