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

// Waits after an accept that failed for want of a resource: doubling from the
// first to the last. The kernel keeps the connection in its queue meanwhile.
const (
	firstDelay      = 5 * time.Millisecond
	lastDelay       = time.Second
	complaintPeriod = 10 * time.Second // at most one log line in this time
)

// Socket is a TCP listener of any mode. Its greeter is where the modes differ.
type Socket struct {
	ln      Acceptor
	greeter atomic.Pointer[greeter]
	delay   atomic.Int64 // of the last failure, as time.Duration; 0: there was none since a connection
	quiet   atomic.Bool  // a complaint was logged less than complaintPeriod ago
}

// Listen opens a listener. ctx bounds only the opening.
func Listen(ctx context.Context, cfg Config, open Open) (*Socket, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("ingress: listener %q: %w", cfg.Name, err)
	}
	tcp, err := cfg.listen(ctx)
	if err != nil {
		return nil, fmt.Errorf("ingress: listener %q: %w", cfg.Name, explain(cfg.Mode, err))
	}
	ln, err := open(tcp)
	if err != nil {
		_ = tcp.Close()
		return nil, fmt.Errorf("ingress: listener %q: %w", cfg.Name, err)
	}
	l, err := newListener(cfg, ln)
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	return l, nil
}

// listen opens the socket, or takes the one that there is.
func (c Config) listen(ctx context.Context) (*net.TCPListener, error) {
	if c.Socket != nil {
		return c.Socket, kernel.Adopt(c.Socket, c.Mode == access.TPROXY)
	}
	return kernel.Listen(ctx, c.Addr, c.Mode == access.TPROXY)
}

func newListener(cfg Config, ln Acceptor) (*Socket, error) {
	g, err := newGreeter(cfg, addrPort(ln.Addr()))
	if err != nil {
		return nil, fmt.Errorf("ingress: listener %q: %w", cfg.Name, err)
	}
	l := &Socket{ln: ln}
	l.greeter.Store(g)
	return l, nil
}

// Apply has clients that come from now on treated as cfg says, in another mode even;
// cfg.Addr and cfg.Socket do not count. An error changes nothing.
func (l *Socket) Apply(cfg Config) error {
	if err := cfg.validate(); err != nil {
		return fmt.Errorf("ingress: listener %q: %w", cfg.Name, err)
	}
	g, err := newGreeter(cfg, addrPort(l.Addr()))
	if err != nil {
		return fmt.Errorf("ingress: listener %q: %w", cfg.Name, err)
	}
	if cfg.Mode == access.TPROXY && l.config().Mode != access.TPROXY {
		if err := l.ln.SetTransparent(); err != nil {
			return fmt.Errorf("ingress: listener %q: %w", cfg.Name, explain(cfg.Mode, err))
		}
	}
	l.greeter.Store(g)
	return nil
}

func (l *Socket) config() *Config { return &l.greeter.Load().cfg }

// explain names the capability that a listener lacks and how to grant it.
func explain(mode access.Mode, err error) error {
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

// Close implements Listener. Its connections are not the listener's.
func (l *Socket) Close() error { return l.ln.Close() }

// Serve implements Listener.
func (l *Socket) Serve(take func(datapath.Conn)) error {
	err := l.ln.Serve(func(conn datapath.Conn) {
		if l.delay.Load() != 0 {
			l.delay.Store(0)
		}
		take(l.arrived(conn))
	}, l.failed)
	return fmt.Errorf("ingress: listener %q: accept: %w", l.config().Name, err)
}

// failed says how long to wait after a failure; below 0: for ever.
func (l *Socket) failed(err error) (pause time.Duration) {
	switch {
	case isOneOf(err, unaccepted):
		l.complain(err)
		return 0
	case !isOneOf(err, shortages):
		return -1
	}
	l.complain(err)
	pause = firstDelay
	if last := time.Duration(l.delay.Load()); last > 0 {
		pause = min(2*last, lastDelay)
	}
	l.delay.Store(int64(pause))
	return pause
}

// arrival is a connection with what greets it: another may, before it is greeted, for those
// that come later.
type arrival struct {
	datapath.Conn
	by       *greeter
	original netip.AddrPort // of mode redirect; invalid: the kernel knows of none
}

func (l *Socket) arrived(conn datapath.Conn) datapath.Conn {
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

// isOneOf tells whether an error comes from one of these.
func isOneOf(err error, these []syscall.Errno) bool {
	return slices.ContainsFunc(these, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

func (l *Socket) complain(err error) {
	cfg := l.config()
	if cfg.Log == nil || !l.quiet.CompareAndSwap(false, true) {
		return
	}
	go cfg.Log.Warn("cannot accept a connection", "listener", cfg.Name, "err", err) // who reads it may be slow
	time.AfterFunc(complaintPeriod, func() { l.quiet.Store(false) })
}

// addrPort is addr without the two disguises that would slip past a prefix:
// IPv4 mapped into IPv6, and zones.
func addrPort(addr net.Addr) netip.AddrPort {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || tcp == nil {
		return netip.AddrPort{}
	}
	return plain(tcp.AddrPort())
}

func plain(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}
