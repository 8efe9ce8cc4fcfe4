package kernel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// attempt is a connection to an address that is being made. After begin only its loop's
// goroutine touches it.
type attempt struct {
	dp         *Datapath
	cfg        DialConfig
	loop       *eventloop.Loop
	fd         int // until there is raw
	raw        *eventloop.Socket
	done       func(*Conn, error)
	foreignErr error // Source can only be one of this host's addresses; nil: it can be any
	keepDSCP   bool  // the DSCP of what comes is to be read
	deadline   eventloop.Deadline
	near       *eventloop.Socket // of the leg that it belongs to; nil: there is none
}

// connectTo makes a connection to cfg.Target, unless cancel is called or near is reset; nil: there is no near leg.
func (d *Datapath) connectTo(
	cfg DialConfig, loop *eventloop.Loop, near *Conn, done func(*Conn, error),
) (cancel func()) {
	cfg.Target = netip.AddrPortFrom(cfg.Target.Addr().Unmap(), cfg.Target.Port())
	a := &attempt{dp: d, cfg: cfg, loop: loop, done: done}
	if near != nil {
		a.near = near.raw
	}
	if err := a.beginConnect(); err != nil {
		done(nil, a.dialError(err))
		return func() {}
	}
	a.loop.Do(a.waitForEvents) // where nothing can end it meanwhile
	return a.cancelAttempt
}

// cancelAttempt ends the attempt from any goroutine, unless it is over.
func (a *attempt) cancelAttempt() { a.loop.Do(func() { a.endWithError(context.Canceled) }) }

// beginConnect has the kernel connect a socket; after an error there is none.
func (a *attempt) beginConnect() (err error) {
	if a.cfg.Guard != nil {
		if err := a.cfg.Guard(a.cfg.Target); err != nil {
			return err
		}
	}
	family, network := unix.AF_INET, "tcp4"
	if a.cfg.Target.Addr().Is6() {
		family, network = unix.AF_INET6, "tcp6"
	}
	a.fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err := a.startSocket(a.fd, network); err != nil {
		_ = unix.Close(a.fd)
		return err
	}
	return nil
}

// waitForEvents has the loop tell what becomes of the attempt.
func (a *attempt) waitForEvents() {
	var err error
	if a.raw, err = a.loop.Watch(a.fd); err != nil {
		_ = unix.Close(a.fd)
		a.done(nil, a.dialError(err))
		return
	}
	if a.cfg.Timeout > 0 {
		a.loop.Expect(&a.deadline, a.cfg.Timeout, func() { a.endWithError(os.ErrDeadlineExceeded) })
	}
	task := a.loop.Task(a.checkOutcome)
	a.raw.Drive(task)
	if a.near != nil {
		a.near.OnBroken(task)
	}
}

// loopFor returns the loop for a new leg.
func (d *Datapath) loopFor(cfg DialConfig) *eventloop.Loop {
	if near, ok := cfg.Near.(*Conn); ok {
		return near.raw.Loop()
	}
	return d.loops.Least()
}

// startSocket has a socket connect.
func (a *attempt) startSocket(fd int, network string) (err error) {
	if a.foreignErr, err = prepareSocket(fd, network, a.cfg); err != nil {
		return err
	}
	if from := a.cfg.Source; from.IsValid() {
		if from.Addr().Unmap().Is4() != a.cfg.Target.Addr().Is4() {
			return fmt.Errorf("from %v: %w", from.Addr(), unix.EAFNOSUPPORT)
		}
		if err := unix.Bind(fd, sockaddrOf(from)); err != nil {
			return os.NewSyscallError("bind", err)
		}
	}
	if a.cfg.DSCP != nil {
		var dscp uint8
		if dscp, a.keepDSCP = a.cfg.DSCP(a.cfg.Target); a.keepDSCP {
			if err := a.dp.markDialled(fd, a.cfg.Target.Addr().Is4(), dscp); err != nil {
				return err
			}
		}
	}
	err = eventloop.Connect(fd, a.cfg.Target, scopeID(a.cfg.Target.Addr()))
	if errors.Is(err, unix.EINPROGRESS) || errors.Is(err, unix.EINTR) {
		return nil
	}
	return os.NewSyscallError("connect", err)
}

// checkOutcome finds out what has become of the attempt.
func (a *attempt) checkOutcome() {
	if a.raw == nil {
		return
	}
	if !a.raw.Writable() {
		if a.near != nil && a.near.Broken() && !hasUnread(a.near) {
			a.endWithError(ErrNearReset)
		}
		return
	}
	if a.raw.Ended() {
		var failed error
		err := a.raw.Visit(func(fd int) error {
			code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if code != 0 {
				failed = unix.Errno(code)
			}
			return err
		})
		if hasUnread(a.raw) {
			failed = nil // the server has spoken, and what it said comes before its reset
		}
		if err = cmp.Or(err, failed); err != nil {
			a.endWithError(os.NewSyscallError("connect", err))
			return
		}
	}
	c := a.dp.newLeg(a.raw, a.connectedPeer(), true)
	if local, ok := c.LocalAddr().(*net.TCPAddr); ok && local != nil && local.AddrPort() == c.remote.AddrPort() {
		a.endWithError(os.NewSyscallError("connect", unix.ECONNREFUSED)) // nobody listens there, so it met itself
		return
	}
	if a.keepDSCP {
		err := a.raw.Visit(func(fd int) (err error) {
			c.serverDSCP, err = a.dp.readDialled(fd, a.cfg.Target.Addr().Is4())
			return err
		})
		if err != nil {
			a.dp.log.Debug("a server's DSCP is not known", "target", a.cfg.Target, "err", err)
		}
	}
	a.noteOver()
	c.raw.Drive(nil)
	a.done(c, nil)
}

// hasUnread tells whether bytes of the peer's wait to be read. A reset leaves them there.
func hasUnread(s *eventloop.Socket) (waits bool) {
	_ = s.Visit(func(fd int) error {
		waits = hasArrived(fd)
		return nil
	})
	return waits
}

// connectedPeer is the address that the socket is connected to: one of this host where the target is unspecified.
func (a *attempt) connectedPeer() *net.TCPAddr {
	peer := net.TCPAddrFromAddrPort(a.cfg.Target)
	if !a.cfg.Target.Addr().IsUnspecified() {
		return peer
	}
	_ = a.raw.Visit(func(fd int) error {
		name, err := syscall.Getpeername(fd)
		if at := tcpAddr(name); at != nil {
			peer = at
		}
		return err
	})
	return peer
}

// endWithError ends the attempt with an error, unless it is over.
func (a *attempt) endWithError(err error) {
	if a.raw == nil {
		return // it is over
	}
	_ = a.raw.Close()
	a.noteOver()
	a.done(nil, a.dialError(err))
}

// noteOver notes that the attempt is over: neither cancel nor its timeout nor a reset of near ends it any more.
func (a *attempt) noteOver() {
	a.raw = nil
	a.loop.Forget(&a.deadline)
	if a.near != nil {
		a.near.OnBroken(nil)
	}
}

func (a *attempt) dialError(err error) error {
	failed := &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(a.cfg.Target), Err: err}
	if a.cfg.Source.IsValid() {
		failed.Source = net.TCPAddrFromAddrPort(a.cfg.Source)
	}
	return fmt.Errorf("kernel: %w", explainDialError(failed, a.foreignErr))
}

// sockaddrOf is an address as the kernel takes it.
func sockaddrOf(at netip.AddrPort) unix.Sockaddr {
	if a := at.Addr().Unmap(); a.Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16(), ZoneId: scopeID(at.Addr())}
}

// scopeID is the interface of an address with a zone.
func scopeID(at netip.Addr) uint32 {
	if zone := at.Zone(); zone != "" {
		if i, err := net.InterfaceByName(zone); err == nil {
			return uint32(i.Index)
		}
	}
	return 0
}

// tcpAddr is an address as the kernel gives it; nil: of another family. It is of package
// syscall, since package unix asks the kernel for the protocol of each.
func tcpAddr(sa syscall.Sockaddr) *net.TCPAddr {
	switch sa := sa.(type) {
	case *syscall.SockaddrInet4:
		return net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)))
	case *syscall.SockaddrInet6:
		a := &net.TCPAddr{IP: sa.Addr[:], Port: sa.Port}
		if sa.ZoneId != 0 {
			a.Zone = strconv.Itoa(int(sa.ZoneId)) // its name would take a dump of all interfaces
		}
		return a
	}
	return nil
}
