package ingress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
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

// Socket is a TCP listener of any mode: the accept loop. Its greeter is where the
// modes differ.
type Socket struct {
	ln      acceptor
	wrap    Wrap
	greeter atomic.Pointer[greeter]
	closed  chan struct{}
	closing sync.Once
	quiet   atomic.Bool // a complaint was logged less than complaintPeriod ago
}

// acceptor is what is needed of a *net.TCPListener.
type acceptor interface {
	AcceptTCP() (*net.TCPConn, error)
	Addr() net.Addr
	Close() error
}

// Listen opens a listener. ctx bounds only the opening.
func Listen(ctx context.Context, cfg Config, wrap Wrap) (*Socket, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("ingress: listener %q: %w", cfg.Name, err)
	}
	ln, err := cfg.listen(ctx)
	if err != nil {
		return nil, fmt.Errorf("ingress: listener %q: %w", cfg.Name, explain(cfg.Mode, err))
	}
	l, err := newListener(cfg, ln, wrap)
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

func newListener(cfg Config, ln acceptor, wrap Wrap) (*Socket, error) {
	g, err := newGreeter(cfg, addrPort(ln.Addr()))
	if err != nil {
		return nil, fmt.Errorf("ingress: listener %q: %w", cfg.Name, err)
	}
	l := &Socket{ln: ln, wrap: wrap, closed: make(chan struct{})}
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
	if tcp, ok := l.ln.(*net.TCPListener); ok && cfg.Mode == access.TPROXY && l.config().Mode != access.TPROXY {
		if err := kernel.Adopt(tcp, true); err != nil {
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

// Health implements Listener: a socket that fails ends Accept.
func (l *Socket) Health() error { return nil }

// Drain implements Listener.
func (l *Socket) Drain() { _ = l.Close() }

// Close implements Listener. Its connections are not the listener's.
func (l *Socket) Close() (err error) {
	l.closing.Do(func() {
		close(l.closed)
		err = l.ln.Close()
	})
	return err
}

// Accept implements Listener.
func (l *Socket) Accept() (datapath.Conn, error) {
	delay := firstDelay
	for {
		conn, accepted, err := l.take()
		if err == nil {
			return conn, nil
		}
		if !accepted && !transient(err) {
			return nil, fmt.Errorf("ingress: listener %q: accept: %w", l.config().Name, err)
		}
		l.complain(err)
		if !transient(err) {
			continue // this connection was at fault; it is closed and gone
		}
		if err := l.wait(delay); err != nil {
			return nil, fmt.Errorf("ingress: listener %q: accept: %w", l.config().Name, err)
		}
		delay = min(2*delay, lastDelay)
	}
}

// take accepts one connection and wraps it; accepted says which part failed.
func (l *Socket) take() (conn datapath.Conn, accepted bool, err error) {
	raw, err := l.ln.AcceptTCP()
	if err != nil {
		return nil, false, err
	}
	var original netip.AddrPort
	redirects := l.config().Mode == access.Redirect
	if redirects {
		// Asked for now, because a wrapped connection need not show its
		// descriptor.
		if original, err = originalDestination(raw); err != nil {
			original = netip.AddrPort{}
		}
	}
	conn, err = l.wrap(raw)
	if err != nil {
		_ = raw.Close()
		return nil, true, err
	}
	if redirects {
		conn = &redirected{Conn: conn, original: original}
	}
	return conn, true, nil
}

// redirected carries the original destination from Accept to Greet.
type redirected struct {
	datapath.Conn
	original netip.AddrPort // invalid: the kernel knows of none
}

// wait sleeps unless the listener is closed.
func (l *Socket) wait(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-l.closed:
		return net.ErrClosed
	}
}

// transient reports an accept error that passes: resources are short, or one
// connection was refused by the firewall (accept(2)).
func transient(err error) bool {
	for _, e := range []error{
		syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM,
		syscall.EPERM, syscall.ECONNABORTED, syscall.EPROTO, syscall.ENETDOWN,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (l *Socket) complain(err error) {
	cfg := l.config()
	if cfg.Log == nil || !l.quiet.CompareAndSwap(false, true) {
		return
	}
	cfg.Log.Warn("cannot accept a connection", "listener", cfg.Name, "err", err)
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
