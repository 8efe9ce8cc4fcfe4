package telemetry

import (
	"fmt"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// maxPerSource bounds the connections of one other host at a port: a browser opens six.
const maxPerSource = 8

// BoundedListener closes connections beyond its bounds at once, because each takes a descriptor that the proxy needs
// for its clients. All connections together have a total. Other hosts have at most three quarters of it. One of them
// has at most maxPerSource, and gets none while it has as many as are free (datapath.Places). Only the total bounds
// this machine. On a Unix socket a user counts as a host.
type BoundedListener struct {
	net.Listener
	total     int // connections at most
	dialled   func(from, to netip.AddrPort) bool
	onRefused func(proxy.Reason)
	refused   tally[proxy.Reason]

	mu     sync.Mutex
	open   int              // connections now
	others *datapath.Places // those of other hosts, by host
}

// Bound limits ln to total open connections. dialled reports whether the proxy opened a connection for a client, which
// then does not count as one of this machine; nil: none is. onRefused is called with the bound for each connection
// that is closed at once; nil: it is not.
func Bound(
	ln net.Listener, total int, dialled func(from, to netip.AddrPort) bool, onRefused func(proxy.Reason),
) *BoundedListener {
	return &BoundedListener{
		Listener: ln, total: total, dialled: dialled, onRefused: onRefused,
		others: datapath.NewPlaces(max(2, total*3/4)),
	}
}

// Refused returns how many connections were closed for each bound.
func (l *BoundedListener) Refused() map[proxy.Reason]uint64 {
	return l.refused.outcomeCounts(proxy.RejectedListenerLimit, proxy.RejectedSourceLimit)
}

// Accept implements net.Listener.
func (l *BoundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		who := l.sourceOf(conn)
		if reason, ok := l.admitHost(who); !ok {
			if tcp, ok := conn.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0) // a reset, so that the kernel keeps no TIME_WAIT state either
			}
			_ = conn.Close()
			l.refused.countOutcome(reason, 1)
			if l.onRefused != nil {
				l.onRefused(reason)
			}
			continue
		}
		return &boundedConn{Conn: conn, release: sync.OnceFunc(func() { l.releaseHost(who) })}, nil
	}
}

// admitHost counts a connection of who, or returns the bound that forbids it.
func (l *BoundedListener) admitHost(who string) (proxy.Reason, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.open >= l.total:
		return proxy.RejectedListenerLimit, false
	case who != "" && (l.others.TakenBy(who) >= maxPerSource || !l.others.Take(who)):
		return proxy.RejectedSourceLimit, false
	}
	l.open++
	return "", true
}

// releaseHost frees the place of a connection that has closed.
func (l *BoundedListener) releaseHost(who string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if who != "" {
		l.others.Leave(who)
	}
}

// sourceOf returns the host or user that a connection counts for; empty: this machine, which has no bound of its own.
func (l *BoundedListener) sourceOf(conn net.Conn) string {
	if user, ok := userOf(conn); ok {
		return user
	}
	from, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil {
		return "unknown"
	}
	if to, err := netip.ParseAddrPort(conn.LocalAddr().String()); err == nil && ofThisMachine(from, to, l.dialled) {
		return ""
	}
	return datapath.Host(from.Addr()).String()
}

// userOf returns the user who has connected to a Unix socket (SO_PEERCRED, unix(7)); ok is false for other sockets.
func userOf(conn net.Conn) (string, bool) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return "", false
	}
	user := "unknown"
	raw, err := socket.SyscallConn()
	if err != nil {
		return user, true
	}
	_ = raw.Control(func(fd uintptr) {
		if who, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			user = fmt.Sprint("user ", who.Uid)
		}
	})
	return user, true
}

// boundedConn frees its place at the first Close.
type boundedConn struct {
	net.Conn
	release func() // does nothing when called again
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
