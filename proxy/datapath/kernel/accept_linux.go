package kernel

import (
	"errors"
	"fmt"
	"net"
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

// uneven is how many sockets more than another a loop may have before it hands that one the
// connections that it accepts. A loop serves those that it accepted itself at less cost.
const maxLoadGap = 8

// Listener accepts legs.
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

// Listener accepts the connections of a listener that Listen returned or that Adopt was called
// for, and owns it from then on; after an error the caller does.
func (d *Datapath) Listener(ln *net.TCPListener) (*Listener, error) {
	fd, err := duplicateFD(ln)
	if err != nil {
		return nil, fmt.Errorf("kernel: listener: %w", err)
	}
	_ = ln.Close()
	return &Listener{dp: d, addr: ln.Addr(), fd: fd, closed: make(chan struct{})}, nil
}

// duplicateFD returns another descriptor of a socket, which Go's poller does not watch.
func duplicateFD(socket syscall.Conn) (own int, err error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return 0, err
	}
	err = datapath.Control(raw, func(fd int) (err error) {
		own, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	return own, err
}

// Addr is where it listens.
func (n *Listener) Addr() net.Addr { return n.addr }

// SetTransparent has it accept connections to addresses that are not this host's.
func (n *Listener) SetTransparent() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.isClosed() {
		return net.ErrClosed
	}
	return setTransparent(n.fd, networkOf(n.addr))
}

// isClosed tells whether Close was called. mu is held.
func (n *Listener) isClosed() bool {
	select {
	case <-n.closed:
		return true
	default:
		return false
	}
}

// Serve calls take for each connection until Close, on a loop, where take must not wait. failed is
// told why a connection could not be accepted, and returns how long to wait before the next; below
// 0 Serve ends with that error.
func (n *Listener) Serve(take func(datapath.Conn), failed func(error) (pause time.Duration)) error {
	fatal := make(chan error, 1)
	n.accept = take
	n.onError = func(err error) time.Duration {
		pause := failed(err)
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
	if n.isClosed() {
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

// acceptWaiting accepts what waits, up to a bound.
func (n *Listener) acceptWaiting(l *eventloop.Loop, most int) (pause time.Duration) {
	for range min(most, acceptsAtOnce) {
		fd, from, err := syscall.Accept4(n.fd, syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC)
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
		if err := n.handToLoop(l, fd, tcpAddr(from)); err != nil {
			_ = unix.Close(fd)
			if pause := n.onError(err); pause != 0 {
				return pause
			}
		}
	}
	return 0
}

// handToLoop has a loop serve a connection: the one that has accepted it, unless another has less to do.
func (n *Listener) handToLoop(l *eventloop.Loop, fd int, from *net.TCPAddr) error {
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

// Close has it accept no more. take is not called after it has returned; no loop may call it.
func (n *Listener) Close() (err error) {
	err = net.ErrClosed
	n.closing.Do(func() {
		n.mu.Lock()
		watched := n.loopListener
		close(n.closed)
		n.mu.Unlock()
		if watched == nil {
			err = unix.Close(n.fd)
			return
		}
		err = watched.Close()
	})
	return err
}

// adoptConn makes a leg, of the loop, of a connection that package net has made, which it takes over.
func (d *Datapath) adoptConn(tcp *net.TCPConn, loop *eventloop.Loop, dialled bool) (*Conn, error) {
	defer tcp.Close() //nolint:errcheck // the leg has a descriptor of its own
	own, err := duplicateFD(tcp)
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	socket, err := loop.Watch(own)
	if err != nil {
		_ = unix.Close(own)
		return nil, fmt.Errorf("kernel: %w", err)
	}
	return d.newLeg(socket, tcp.RemoteAddr().(*net.TCPAddr), dialled), nil
}
