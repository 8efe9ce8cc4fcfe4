package ingress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// Waits after an accept that failed for want of a resource: each is twice the one before, from
// firstDelay up to lastDelay. The kernel keeps the connection in its queue meanwhile.
const (
	firstDelay      = 5 * time.Millisecond
	lastDelay       = time.Second
	complaintPeriod = 10 * time.Second // between two log lines
)

// Socket is a TCP listener of any mode. Its greeter does what the modes do differently.
type Socket struct {
	ln      Acceptor
	greeter atomic.Pointer[greeter]
	delay   atomic.Int64 // time.Duration of the last wait; 0: a connection has been accepted since
	guesses Guesses
	quiet   atomic.Bool // a complaint was logged less than complaintPeriod ago
}

// Listen opens a listener, or takes cfg.Socket, which it closes where it fails. ctx only bounds the opening.
func Listen(ctx context.Context, cfg Config, open Open) (_ *Socket, err error) {
	tcp := cfg.Socket
	defer func() {
		if err != nil && tcp != nil {
			_ = tcp.Close()
		}
	}()
	if err := cfg.validateConfig(); err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, err)
	}
	if tcp, err = cfg.openSocket(ctx); err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, explainError(cfg.Mode, err))
	}
	ln, err := open(tcp)
	if err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, err)
	}
	l, err := newListener(cfg, ln)
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	return l, nil
}

// openSocket opens the socket, or takes c.Socket.
func (c Config) openSocket(ctx context.Context) (*net.TCPListener, error) {
	if c.Socket != nil {
		return c.Socket, kernel.Adopt(c.Socket, c.Mode == access.TPROXY)
	}
	return kernel.Listen(ctx, c.Addr, c.Mode == access.TPROXY)
}

func newListener(cfg Config, ln Acceptor) (*Socket, error) {
	l := &Socket{ln: ln}
	g, err := newGreeter(cfg, addrPort(ln.Addr()), &l.guesses)
	if err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, err)
	}
	l.greeter.Store(g)
	return l, nil
}

// Apply prepares cfg, whose mode may be another, and whose Addr and Socket do not count. commit has it in
// force for clients that come from then on. An error changes nothing.
func (l *Socket) Apply(cfg Config) (commit func(), err error) {
	if err := cfg.validateConfig(); err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, err)
	}
	g, err := newGreeter(cfg, addrPort(l.Addr()), &l.guesses)
	if err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, err)
	}
	if cfg.Mode == access.TPROXY && l.currentConfig().Mode != access.TPROXY {
		if err := l.ln.SetTransparent(); err != nil {
			return nil, fmt.Errorf("listener %q: %w", cfg.Name, explainError(cfg.Mode, err))
		}
	}
	return func() { l.greeter.Store(g) }, nil
}

func (l *Socket) currentConfig() *Config { return &l.greeter.Load().cfg }

// explainError names the capability that a listener lacks and how to grant it.
func explainError(mode access.Mode, err error) error {
	var what, capability string
	switch {
	case mode == access.TPROXY && errors.Is(err, syscall.EPERM):
		what, capability = "TPROXY", "CAP_NET_ADMIN"
	case errors.Is(err, syscall.EACCES):
		what, capability = "a port this low", "CAP_NET_BIND_SERVICE"
	default:
		return err
	}
	return fmt.Errorf("%s needs %s: run as root, or setcap %s+ep on the binary, or AmbientCapabilities=%s in the "+
		"systemd unit: %w",
		what, capability, strings.ToLower(capability), capability, err)
}

// Addr implements Listener.
func (l *Socket) Addr() net.Addr { return l.ln.Addr() }

// Health implements Listener: a socket that fails ends Serve.
func (l *Socket) Health() error { return nil }

// Drain implements Listener.
func (l *Socket) Drain() { _ = l.Close() }

// Close implements Listener. Connections that were accepted go on.
func (l *Socket) Close() error { return l.ln.Close() }

// Serve implements Listener.
func (l *Socket) Serve(take func(datapath.Conn)) error {
	err := l.ln.Serve(func(conn datapath.Conn) {
		if l.delay.Load() != 0 {
			l.delay.Store(0)
		}
		take(l.wrapArrival(conn))
	}, l.acceptFailed)
	return fmt.Errorf("ingress: listener %q: accept: %w", l.currentConfig().Name, err)
}

// acceptFailed returns how long to wait after a failure of accept; below 0: it is permanent.
func (l *Socket) acceptFailed(err error) (pause time.Duration) {
	switch {
	case isOneOf(err, unaccepted):
		l.logFailure(err)
		return 0
	case !isOneOf(err, shortages):
		return -1
	}
	l.logFailure(err)
	pause = firstDelay
	if last := time.Duration(l.delay.Load()); last > 0 {
		pause = min(2*last, lastDelay)
	}
	l.delay.Store(int64(pause))
	return pause
}

// arrival is a connection that is not greeted yet, with the greeter that was the listener's when it
// came: Apply may have replaced that since.
type arrival struct {
	datapath.Conn
	by       *greeter
	original netip.AddrPort // destination in mode redirect; invalid: conntrack knows of none
}

func (l *Socket) wrapArrival(conn datapath.Conn) datapath.Conn {
	a := &arrival{Conn: conn, by: l.greeter.Load()}
	if a.by.cfg.Mode != access.Redirect {
		return a
	}
	if original, err := originalDestination(conn); err == nil {
		a.original = original
	}
	return a
}

// arrivalOf is what is known of a connection that is to be greeted.
func (l *Socket) arrivalOf(conn datapath.Conn) *arrival {
	if a, ok := conn.(*arrival); ok {
		return a
	}
	return &arrival{Conn: conn, by: l.greeter.Load()}
}

// shortages are the errors of accept4(2) and epoll_ctl(2) that pass once resources are there again.
var shortages = []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ENOSPC}

// unaccepted are errors of one connection: it is gone, the firewall refused it, or the network
// has an error for it, which Linux passes on (accept(2), "Error handling").
var unaccepted = []syscall.Errno{
	syscall.ECONNABORTED, syscall.EPERM, syscall.ENETDOWN, syscall.EPROTO, syscall.ENOPROTOOPT, syscall.EHOSTDOWN,
	syscall.EHOSTUNREACH, syscall.EOPNOTSUPP, syscall.ENETUNREACH,
}

// isOneOf tells whether an error is, or wraps, one of these.
func isOneOf(err error, these []syscall.Errno) bool {
	return slices.ContainsFunc(these, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

func (l *Socket) logFailure(err error) {
	cfg := l.currentConfig()
	if cfg.Log == nil || !l.quiet.CompareAndSwap(false, true) {
		return
	}
	cfg.Log.Warn("cannot accept a connection", "listener", cfg.Name, "err", err)
	time.AfterFunc(complaintPeriod, func() { l.quiet.Store(false) })
}

// addrPort is addr with IPv4 out of IPv6 and without a zone, since netip.Prefix.Contains is false of
// such addresses; invalid where addr is not of TCP.
func addrPort(addr net.Addr) netip.AddrPort {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || tcp == nil {
		return netip.AddrPort{}
	}
	return plainAddrPort(tcp.AddrPort())
}

// plainAddrPort is addrPort of what is an AddrPort already.
func plainAddrPort(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}
