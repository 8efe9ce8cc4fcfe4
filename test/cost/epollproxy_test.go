//go:build linux

package cost

import (
	"errors"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// epollThreads is how many threads the proxy of event loops has, as its peers have.
const epollThreads = 2

// runEpollProxy is the least that a proxy of event loops in Go does: two of them, each with a listening socket of its
// own (SO_REUSEPORT), copy what is small and splice the rest. It ends with its process.
func runEpollProxy(listen, backend string) error {
	at, err := netip.ParseAddrPort(listen)
	if err != nil {
		return err
	}
	to, err := netip.ParseAddrPort(backend)
	if err != nil {
		return err
	}
	eventloop.ReserveProcessors(epollThreads)
	var all sync.WaitGroup
	errs := make([]error, epollThreads)
	for i := range errs {
		all.Go(func() { errs[i] = runEpollLoop(at, to) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// epollLeg is one of the two sockets of a connection.
type epollLeg struct {
	fd     int
	peer   *epollLeg
	pipe   [2]int // of bytes on their way from fd to the peer; 0: none is made
	piped  int    // bytes in pipe
	held   []byte // read from fd and not yet written
	full   bool   // a read filled the buffer: there may be more
	ended  bool   // fd sends no more
	closed bool   // the peer has been sent the end
}

// runEpollLoop accepts and serves connections.
func runEpollLoop(at, to netip.AddrPort) error {
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	epoll, err := unix.EpollCreate1(0)
	err = errors.Join(err,
		unix.SetsockoptInt(listener, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
		unix.SetsockoptInt(listener, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.Bind(listener, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}),
		unix.Listen(listener, 8192),
		unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, listener, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(listener)}))
	if err != nil {
		return err
	}
	legs := map[int32]*epollLeg{}
	events := make([]unix.EpollEvent, 128)
	buf := make([]byte, 16<<10)
	var slice eventloop.Slice
	for {
		n, err := unix.EpollWait(epoll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		slice.Renew()
		for _, e := range events[:max(n, 0)] {
			if e.Fd == int32(listener) {
				acceptLeg(epoll, listener, to, legs)
				continue
			}
			x := legs[e.Fd]
			if x == nil {
				continue // it ended in this batch
			}
			x.full = x.full || e.Events&unix.EPOLLIN != 0
			if x.move(buf) != nil || x.peer.move(buf) != nil || x.closed && x.peer.closed {
				x.close(legs)
				x.peer.close(legs)
			}
		}
	}
}

// acceptLeg accepts a connection and begins one to the server.
func acceptLeg(epoll, listener int, to netip.AddrPort, legs map[int32]*epollLeg) {
	client, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK)
	if err != nil {
		return // the other loop has it
	}
	server, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		_ = unix.Close(client)
		return
	}
	_ = unix.SetsockoptInt(server, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	a, b := &epollLeg{fd: client}, &epollLeg{fd: server}
	a.peer, b.peer = b, a
	legs[int32(client)], legs[int32(server)] = a, b
	if err := eventloop.Connect(server, to, 0); err == nil || errors.Is(err, unix.EINPROGRESS) {
		const all = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET
		for _, fd := range []int{client, server} {
			event := unix.EpollEvent{Events: all & (1<<32 - 1), Fd: int32(fd)}
			err = errors.Join(err, unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &event))
		}
		if err == nil || errors.Is(err, unix.EINPROGRESS) {
			return
		}
	}
	a.close(legs)
	b.close(legs)
}

// move moves what it can from the leg to its peer. An error ends both.
func (x *epollLeg) move(buf []byte) (err error) {
	for !x.closed {
		var n int
		switch {
		case x.piped > 0:
			var m int64
			m, err = unix.Splice(x.pipe[0], nil, x.peer.fd, nil, x.piped, unix.SPLICE_F_NONBLOCK)
			x.piped -= int(max(m, 0))
		case len(x.held) > 0:
			n, err = eventloop.Send(x.peer.fd, x.held)
			x.held = x.held[n:]
		case x.ended:
			x.closed = true
			err = eventloop.Shutdown(x.peer.fd, unix.SHUT_WR)
		case !x.full:
			return nil
		case x.pipe[0] != 0:
			var m int64
			m, err = unix.Splice(x.fd, nil, x.pipe[1], nil, 1<<20, unix.SPLICE_F_NONBLOCK)
			x.piped, x.ended = int(max(m, 0)), m == 0 && err == nil
			x.full = !errors.Is(err, unix.EAGAIN)
		default:
			n, err = eventloop.Receive(x.fd, buf, 0)
			x.ended = n == 0 && err == nil
			x.full = !errors.Is(err, unix.EAGAIN)
			if n == len(buf) {
				err = errors.Join(err, unix.Pipe2(x.pipe[:], unix.O_NONBLOCK))
				_, _ = unix.FcntlInt(uintptr(x.pipe[1]), unix.F_SETPIPE_SZ, 1<<20)
			}
			x.held = append(x.held[:0], buf[:n]...)
		}
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// close closes the leg, once.
func (x *epollLeg) close(legs map[int32]*epollLeg) {
	if legs[int32(x.fd)] != x {
		return
	}
	delete(legs, int32(x.fd))
	_ = unix.Close(x.fd)
	if x.pipe[0] != 0 {
		_, _ = unix.Close(x.pipe[0]), unix.Close(x.pipe[1])
	}
}
