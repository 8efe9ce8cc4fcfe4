package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// User is a name and a password with which a client may use a listener.
type User struct {
	Name, Password string // 1 to 255 bytes each, RFC 1929
}

// Config describes one listener.
type Config struct {
	Name string      // for logs, metrics and errors
	Mode access.Mode // one for TCP: not that of a tunnel
	Addr string      // "host:port"; an empty host is every address, both families
	Auth []User      // who may use it, in modes that ask for a password; empty: everybody

	Socket *net.TCPListener // listens at Addr already; nil: Listen opens one

	// TrustedProxies are peers that must begin each connection with a PROXY protocol header, v1
	// or v2. From any other peer such a header is data like any other.
	TrustedProxies []netip.Prefix

	Target           string        // "host:port" of mode forward
	HandshakeTimeout time.Duration // from accept until the destination is known; 0: 10 s
	Log              *slog.Logger  // for connections that cannot be accepted; nil: silent
}

// Acceptor is a listening socket of a transport.
type Acceptor interface {
	// Serve calls take, which must not wait, for each connection until Close. It calls failed
	// with the error of a connection that could not be accepted. failed returns how long to wait
	// before the next; below 0 Serve returns that error.
	Serve(take func(datapath.Conn), failed func(error) (pause time.Duration)) error
	SetTransparent() error // accept connections to addresses that are not this host's
	// Duplicate returns another descriptor of the socket, for another process.
	Duplicate() (fd int, err error)
	Addr() net.Addr
	Close() error
}

// Open makes a transport's Acceptor of a listener that kernel.Listen returned. The Acceptor owns
// it from then on. After an error the caller does.
type Open func(*net.TCPListener) (Acceptor, error)

// defaultHandshakeTimeout is that of a Config with none. A SOCKS5 client needs up to three round
// trips.
const defaultHandshakeTimeout = 10 * time.Second

// validateConfig refuses what no listener can do. Its errors begin with the key.
func (c Config) validateConfig() error {
	switch {
	case !c.Mode.Known() || c.Mode.Tunnels():
		return fmt.Errorf("mode %q is none of a listener for TCP", c.Mode)
	case len(c.Auth) > 0 && !c.Mode.Asks():
		return fmt.Errorf("auth: mode %s cannot ask for a password; use socks5, connect or mixed", c.Mode)
	case c.Mode == access.Forward && c.Target == "":
		return errors.New("target: mode forward needs a host:port to forward to")
	case c.Mode != access.Forward && c.Target != "":
		return fmt.Errorf("target: only mode forward has one, not %s", c.Mode)
	case c.HandshakeTimeout < 0:
		return errors.New("handshake_timeout: must not be negative")
	}
	for i, u := range c.Auth {
		if len(u.Name) < 1 || len(u.Name) > 255 || len(u.Password) < 1 || len(u.Password) > 255 {
			return fmt.Errorf("auth[%d]: name and password must have 1 to 255 bytes each", i)
		}
	}
	for i, p := range c.TrustedProxies {
		if !p.IsValid() {
			return fmt.Errorf("trusted_proxies[%d]: not a prefix", i)
		}
	}
	return nil
}

// Delays after an accept that failed for lack of a resource double from firstDelay to lastDelay.
// The kernel keeps the connection in its queue in the meantime.
const (
	firstDelay      = 5 * time.Millisecond
	lastDelay       = time.Second
	complaintPeriod = 10 * time.Second // between two log lines
)

// Socket is a TCP listener of any mode. Its greeter implements the modes. Its methods are safe for
// concurrent use: Apply replaces the greeter as a whole, and a client keeps the one that began to
// greet it.
type Socket struct {
	ln      Acceptor
	greeter atomic.Pointer[greeter]
	delay   atomic.Int64 // time.Duration of the last wait; 0: a connection has been accepted since
	guesses Guesses      // shared by all greeters, so that a reload does not reset them
	quiet   atomic.Bool  // a failure was logged less than complaintPeriod ago
}

// Listen opens a listener, or takes over cfg.Socket, which it closes on an error. ctx bounds only
// the opening.
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
	l, err := newSocket(cfg, ln)
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

// newSocket returns a Socket that accepts from ln. On an error the caller still owns ln.
func newSocket(cfg Config, ln Acceptor) (*Socket, error) {
	l := &Socket{ln: ln}
	g, err := newGreeter(cfg, datapath.AddrPortOf(ln.Addr()), &l.guesses)
	if err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, err)
	}
	l.greeter.Store(g)
	return l, nil
}

// Apply prepares a change to cfg, except for its Addr and Socket. commit puts cfg into force for
// clients that come from then on. An error changes nothing.
func (l *Socket) Apply(cfg Config) (commit func(), err error) {
	if err := cfg.validateConfig(); err != nil {
		return nil, fmt.Errorf("listener %q: %w", cfg.Name, err)
	}
	g, err := newGreeter(cfg, datapath.AddrPortOf(l.Addr()), &l.guesses)
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

// currentConfig returns the configuration in force.
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

// Duplicate returns another descriptor of the socket, for another process.
func (l *Socket) Duplicate() (fd int, err error) { return l.ln.Duplicate() }

// Health implements Listener: a socket that fails ends Serve.
func (l *Socket) Health() error { return nil }

// Drain implements Listener. It closes the socket, so that connections reach only another process
// that listens at the address.
func (l *Socket) Drain() { _ = l.Close() }

// Close implements Listener. Connections that were accepted go on.
func (l *Socket) Close() error { return l.ln.Close() }

// Serve implements Listener. Acceptors call take in their own goroutines or loops.
func (l *Socket) Serve(take func(datapath.Conn)) error {
	err := l.ln.Serve(func(conn datapath.Conn) {
		if l.delay.Load() != 0 {
			l.delay.Store(0)
		}
		take(conn)
	}, l.pauseAfterFailure)
	return fmt.Errorf("ingress: listener %q: accept: %w", l.currentConfig().Name, err)
}

// Greet implements Listener.
func (l *Socket) Greet(ctx context.Context, conn datapath.Conn) (Client, error) {
	return l.greeter.Load().greetClient(ctx, conn)
}

// pauseAfterFailure returns how long to wait after a failed accept; below 0: the failure is permanent.
func (l *Socket) pauseAfterFailure(err error) (pause time.Duration) {
	switch {
	case isOneOf(err, connErrors):
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

// shortages are the errors of accept4(2) and epoll_ctl(2) that pass once resources are there
// again.
var shortages = []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ENOSPC}

// connErrors are accept errors of one connection only: it is gone, the firewall refused it, or
// Linux passes on a network error of it (accept(2), "Error handling").
var connErrors = []syscall.Errno{
	syscall.ECONNABORTED, syscall.EPERM, syscall.ENETDOWN, syscall.EPROTO, syscall.ENOPROTOOPT, syscall.EHOSTDOWN,
	syscall.EHOSTUNREACH, syscall.EOPNOTSUPP, syscall.ENETUNREACH,
}

// isOneOf reports whether an error is, or wraps, one of these.
func isOneOf(err error, these []syscall.Errno) bool {
	return slices.ContainsFunc(these, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// logFailure logs a failed accept, at most once in complaintPeriod, because many may fail at once.
func (l *Socket) logFailure(err error) {
	cfg := l.currentConfig()
	if cfg.Log == nil || !l.quiet.CompareAndSwap(false, true) {
		return
	}
	cfg.Log.Warn("cannot accept a connection", "listener", cfg.Name, "err", err)
	time.AfterFunc(complaintPeriod, func() { l.quiet.Store(false) })
}
