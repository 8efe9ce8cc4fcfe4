package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// acceptsAtOnce is how many connections a loop accepts before it does anything else.
const acceptsAtOnce = 16

// maxLoadGap is how many more sockets than another loop the accepting one may have before it hands over what it
// accepts. A loop serves the connections that it accepted itself at less cost.
const maxLoadGap = 8

// Listen returns a listener. Its connections are reset if anything but Conn.Close closes them. Datapath.Listener
// accepts them. MPTCP is off, since socket options and TCP_INFO must mean one path. A transparent listener also
// accepts connections to addresses that are not this host's, as TPROXY delivers them.
func Listen(ctx context.Context, addr string, transparent bool) (*net.TCPListener, error) {
	lc := net.ListenConfig{
		KeepAlive: -1, // prepareListener sets it
		Control: func(network, _ string, raw syscall.RawConn) error {
			return datapath.Control(raw, func(fd int) error { return prepareListener(fd, network, transparent) })
		},
	}
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	return ln.(*net.TCPListener), nil
}

// Adopt sets the socket options of Listen on a listener that another process opened. Connections that waited in it
// before do not have them.
func Adopt(ln *net.TCPListener, transparent bool) error {
	raw, err := ln.SyscallConn()
	if err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	return datapath.Control(raw, func(fd int) error {
		protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err != nil || protocol != unix.IPPROTO_TCP {
			return errors.Join(errors.New("kernel: the socket that was handed over is not of plain TCP, but of "+
				"MPTCP"), err)
		}
		return prepareListener(fd, networkOf(ln.Addr()), transparent)
	})
}

// prepareListener sets what accepted sockets inherit, and what a transparent listener needs.
func prepareListener(fd int, network string, transparent bool) error {
	if err := errors.Join(guardStream(fd), keepAlive(fd)); err != nil || !transparent {
		return err
	}
	return setTransparent(fd, network)
}

// Listener accepts legs. All loops watch its socket, and one that waits for events accepts what comes.
type Listener struct {
	dp      *Datapath
	addr    net.Addr
	fd      int
	accept  func(datapath.Conn)
	onError func(error) (pause time.Duration)
	closing sync.Once
	closed  chan struct{}

	mu           sync.Mutex
	loopListener *eventloop.Listener // nil: Serve has not begun
}

// Listener accepts the connections of a listener that Listen returned or that Adopt was called for. It owns ln from
// then on; after an error the caller still does.
func (d *Datapath) Listener(ln *net.TCPListener) (*Listener, error) {
	fd, err := duplicateFD(ln)
	if err != nil {
		return nil, fmt.Errorf("kernel: listener: %w", err)
	}
	_ = ln.Close()
	return &Listener{dp: d, addr: ln.Addr(), fd: fd, closed: make(chan struct{})}, nil
}

// Addr returns the address that it listens on.
func (n *Listener) Addr() net.Addr { return n.addr }

// Duplicate returns another descriptor of its socket, which a program that is started does not inherit.
func (n *Listener) Duplicate() (fd int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if datapath.IsClosed(n.closed) {
		return 0, net.ErrClosed
	}
	return unix.FcntlInt(uintptr(n.fd), unix.F_DUPFD_CLOEXEC, 0)
}

// SetTransparent makes it accept connections to addresses that are not this host's.
func (n *Listener) SetTransparent() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if datapath.IsClosed(n.closed) {
		return net.ErrClosed
	}
	return setTransparent(n.fd, networkOf(n.addr))
}

// Serve calls accept for each connection until Close, on a loop, where accept must not wait. onError gets the reason
// why a connection could not be accepted, and returns how long to wait before the next. Below 0 Serve ends with that
// error.
func (n *Listener) Serve(accept func(datapath.Conn), onError func(error) (pause time.Duration)) error {
	fatal := make(chan error, 1)
	n.accept = accept
	n.onError = func(err error) time.Duration {
		pause := onError(err)
		if pause >= 0 {
			return pause
		}
		select {
		case fatal <- err:
		default:
		}
		return time.Hour // Serve closes it
	}
	n.mu.Lock()
	if datapath.IsClosed(n.closed) {
		n.mu.Unlock()
		return net.ErrClosed
	}
	var err error
	n.loopListener, err = n.dp.loops.Listen(n.fd, n.acceptWaiting)
	n.mu.Unlock()
	if err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	select {
	case err := <-fatal:
		_ = n.Close()
		return err
	case <-n.closed:
		return net.ErrClosed
	}
}

// acceptWaiting accepts the connections that wait, up to a bound.
func (n *Listener) acceptWaiting(l *eventloop.Loop, most int) (pause time.Duration) {
	for range min(most, acceptsAtOnce) {
		fd, from, err := eventloop.Accept(n.fd)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return 0
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			if pause := n.onError(os.NewSyscallError("accept4", err)); pause != 0 {
				return pause
			}
			continue
		}
		if err := n.handToLoop(l, fd, from); err != nil {
			_ = unix.Close(fd)
			if pause := n.onError(err); pause != 0 {
				return pause
			}
		}
	}
	return 0
}

// handToLoop gives a connection to a loop: the one that has accepted it, unless another has much less to do.
func (n *Listener) handToLoop(l *eventloop.Loop, fd int, from netip.AddrPort) error {
	other := n.dp.loops.Least()
	if other.Load()+maxLoadGap >= l.Load() {
		other = l
	}
	raw, err := other.Watch(fd)
	if err != nil {
		return err
	}
	c := n.dp.newLeg(raw, from, false)
	if other == l {
		n.accept(c)
	} else {
		other.Do(func() { n.accept(c) })
	}
	return nil
}

// Close ends Serve. accept is not called after Close has returned. No loop may call Close.
func (n *Listener) Close() (err error) {
	err = net.ErrClosed
	n.closing.Do(func() {
		n.mu.Lock()
		loopListener := n.loopListener
		close(n.closed)
		n.mu.Unlock()
		if loopListener == nil {
			err = unix.Close(n.fd)
			return
		}
		err = loopListener.Close()
	})
	return err
}
