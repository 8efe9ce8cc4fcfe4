package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

// errTransparent says what IP_TRANSPARENT takes.
var errTransparent = errors.New("transparent addresses need CAP_NET_ADMIN or CAP_NET_RAW")

// Dial is Connect for callers that can wait.
func (d *Datapath) Dial(ctx context.Context, cfg DialConfig) (*Conn, error) {
	return awaitConn(ctx, func(done func(*Conn, error)) (cancel func()) { return d.Connect(cfg, done) })
}

// awaitConn waits for what connect is done with, and cancels it once ctx has ended.
func awaitConn(ctx context.Context, connect func(done func(*Conn, error)) (cancel func())) (*Conn, error) {
	type result struct {
		conn *Conn
		err  error
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("kernel: dial: %w", context.Cause(ctx))
	}
	came := make(chan result, 1)
	cancel := connect(func(c *Conn, err error) { came <- result{c, err} })
	select {
	case r := <-came:
		return r.conn, r.err
	case <-ctx.Done():
	}
	cancel()
	r := <-came
	if r.err != nil {
		return nil, fmt.Errorf("%w: %w", r.err, context.Cause(ctx))
	}
	return r.conn, nil // it came meanwhile
}

// Connect opens a leg to a target and calls done once, perhaps before it returns: on a loop
// where the target is an address, so that done must not wait, and on a goroutine of its own
// where it is a name. The guard sees every address before it is tried, so a name cannot
// lead where an address may not. cancel has it give up, and does nothing once it is over.
func (d *Datapath) Connect(cfg DialConfig, done func(*Conn, error)) (cancel func()) {
	if at, err := netip.ParseAddrPort(cfg.Host); err == nil && !cfg.Target.IsValid() {
		cfg.Target = at
	}
	loop := d.loopFor(cfg)
	if cfg.Target.IsValid() {
		near, _ := cfg.Near.(*Conn)
		return d.connectTo(cfg, loop, near, done)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		done(UntilReset(ctx, cfg.Near, func(ctx context.Context) (*Conn, error) { return d.dialName(ctx, loop, cfg) }))
	}()
	return cancel
}

// UntilReset calls dial with a context that ends once near is reset, if near is a leg of this package and has
// nothing for the other one; the error then is an ErrNearReset.
func UntilReset[C any](
	ctx context.Context, near datapath.Conn, dial func(context.Context) (C, error),
) (conn C, err error) {
	if c, ok := near.(*Conn); ok {
		in, end := context.WithCancelCause(ctx)
		defer end(nil)
		loop := c.raw.Loop()
		task := loop.Task(func() {
			if !hasUnread(c.raw) {
				end(ErrNearReset)
			}
		})
		loop.Do(func() { c.raw.OnBroken(task) })
		defer loop.Do(func() { c.raw.OnBroken(nil) })
		ctx = in
	}
	conn, err = dial(ctx)
	if why := context.Cause(ctx); err != nil && errors.Is(why, ErrNearReset) {
		err = fmt.Errorf("%w: %w", err, why)
	}
	return conn, err
}

// dialName connects to one of the addresses of a name.
func (d *Datapath) dialName(ctx context.Context, loop *eventloop.Loop, cfg DialConfig) (*Conn, error) {
	name, service, err := net.SplitHostPort(cfg.Host)
	if err != nil {
		return nil, fmt.Errorf("kernel: dial %q: %w", cfg.Host, err)
	}
	port, err := net.DefaultResolver.LookupPort(ctx, "tcp", service)
	if err != nil {
		return nil, fmt.Errorf("kernel: dial %q: %w", cfg.Host, err)
	}
	host := happyeyeballs.Host{
		Name: name, Source: cfg.Source.Addr(), Resolver: d.resolver, Timeout: cfg.Timeout, Spare: d.spareAttempts,
		Client: clientOf(cfg),
	}
	if d.lookups != nil {
		from := host.Resolver
		if from == nil {
			from = net.DefaultResolver
		}
		host.Resolver = boundedResolver{from, d.lookups, host.Client}
	}
	cfg.Timeout = 0 // of each attempt
	conn, err := happyeyeballs.Dial(ctx, host, func(ctx context.Context, addr netip.Addr) (*Conn, error) {
		to := cfg
		to.Target = netip.AddrPortFrom(addr, uint16(port))
		return awaitConn(ctx, func(done func(*Conn, error)) (cancel func()) { return d.connectTo(to, loop, nil, done) })
	}, func(late *Conn) { _ = late.Reset() })
	if err != nil {
		return nil, fmt.Errorf("kernel: dial %q: %w", cfg.Host, err)
	}
	return conn, nil
}

// clientOf is whom a dial counts against: the host that Near leads to.
func clientOf(cfg DialConfig) string {
	if cfg.Near == nil {
		return ""
	}
	from, _ := netip.ParseAddrPort(cfg.Near.RemoteAddr().String())
	return datapath.Host(from.Addr()).String()
}

// explainDialError says more of a failed dial: why, if it is known, it cannot be made from an address that is not this
// host's, or that all local ports are in use. Over IPv6 there may be no address to dial from instead.
func explainDialError(err, why error) error {
	var op *net.OpError
	if !errors.Is(err, unix.EADDRNOTAVAIL) || !errors.As(err, &op) {
		return err
	}
	if why != nil {
		return fmt.Errorf("%w: %w", err, why)
	}
	if to, ok := op.Addr.(*net.TCPAddr); ok && to.IP.To4() != nil {
		return fmt.Errorf("%w: %w", err, ErrNoPort)
	}
	return err
}

// prepareSocket sets what must be set before the socket is bound. Without the
// privilege for transparency the source may still be an address of this host,
// so that failure is handed back for the case that it is not.
func prepareSocket(fd int, network string, cfg DialConfig) (foreign, err error) {
	if err := guardStream(fd); err != nil {
		return nil, err
	}
	if cfg.Mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(cfg.Mark)); err != nil {
			return nil, fmt.Errorf("set SO_MARK: %w (needs CAP_NET_ADMIN)", err)
		}
	}
	if cfg.Hops != 0 {
		level, option := unix.IPPROTO_IP, unix.IP_TTL
		if strings.HasSuffix(network, "6") {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		}
		if err := unix.SetsockoptInt(fd, level, option, int(cfg.Hops)); err != nil {
			return nil, fmt.Errorf("set a hop limit of %d: %w", cfg.Hops, err)
		}
	}
	if !cfg.Source.IsValid() {
		return nil, nil
	}
	foreign = setTransparent(fd, network)
	if cfg.Source.Port() == 0 {
		// The port is then chosen at connect, when it need only be unique for
		// this target: a client has as many connections as it likes.
		err = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	} else {
		// One client port may be in use towards several targets.
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err != nil {
		return foreign, fmt.Errorf("bind as %s: %w", cfg.Source, err)
	}
	return foreign, nil
}

// guardStream sets what keeps a stream from being cut unnoticed. It must be set
// before the first byte can come; accepted sockets inherit it from the listener.
func guardStream(fd int) error {
	// An urgent byte stays in its place of the stream; otherwise a second one can drop it.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1); err != nil {
		return fmt.Errorf("set SO_OOBINLINE: %w", err)
	}
	// If the process dies, the kernel resets the connection instead of ending it
	// in good order. Conn.Close takes this back.
	if err := setLinger(fd, reset); err != nil {
		return fmt.Errorf("set SO_LINGER: %w", err)
	}
	// What is written goes out at once.
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return nil
}

// keepAlive has the kernel find out by itself that a peer has vanished.
func keepAlive(fd int) error {
	for _, o := range [...]struct {
		level, option, value int
	}{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(keepAliveIdle / time.Second)},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(keepAliveInterval / time.Second)},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keepAliveCount},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.option, o.value); err != nil {
			return fmt.Errorf("set the keep-alive of a connection: %w", err)
		}
	}
	return nil
}

// KeepAlive implements datapath.KeepAliver. An accepted leg has it from its listener.
func (c *Conn) KeepAlive() error {
	if !c.dialled {
		return nil
	}
	return c.raw.Visit(keepAlive)
}

// setTransparent lets a socket use addresses that are not this host's. The
// LocalAddr of what a transparent listener accepts is the client's destination.
func setTransparent(fd int, network string) error {
	// On an IPv6 socket, the IPv4 option covers its IPv4 side.
	err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	if strings.HasSuffix(network, "6") {
		err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: %w", errTransparent, err)
	}
	return os.NewSyscallError("setsockopt IP_TRANSPARENT", err)
}

// Listen returns a listener whose connections are reset where anything but Conn.Close
// closes them; see Datapath.Listener. MPTCP is off, since socket options and TCP_INFO must
// mean one path. A transparent listener also accepts connections to addresses that
// are not this host's, as TPROXY delivers them.
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

// Adopt sets the socket options of Listen on a listener that another process opened. Connections
// that waited in it before do not have them.
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

// networkOf is package net's name for the network of a listener's address.
func networkOf(a net.Addr) string {
	if a, ok := a.(*net.TCPAddr); ok && a.IP.To4() != nil {
		return "tcp4"
	}
	return "tcp6"
}

// prepareListener sets what accepted sockets inherit, and what a transparent listener needs.
func prepareListener(fd int, network string, transparent bool) error {
	if err := errors.Join(guardStream(fd), keepAlive(fd)); err != nil || !transparent {
		return err
	}
	return setTransparent(fd, network)
}
