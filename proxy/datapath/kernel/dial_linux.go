package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

// Dial calls Connect and waits for its result.
func (d *Datapath) Dial(ctx context.Context, cfg DialConfig) (*Conn, error) {
	return awaitConn(ctx, func(done func(*Conn, error)) (cancel func()) { return d.Connect(cfg, done) })
}

// awaitConn waits for what connect gives to done, and cancels it once ctx has ended.
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
	return r.conn, nil // cancel came too late
}

// Connect opens a leg to a target and calls done once, perhaps before it returns. Where the target is an address, done
// runs on a loop and must not wait. Where it is a name, done has a goroutine of its own. The guard sees every address
// before it is tried, so a name cannot lead where an address may not. cancel ends the dial with an error, and does
// nothing once it is over.
func (d *Datapath) Connect(cfg DialConfig, done func(*Conn, error)) (cancel func()) {
	if at, err := netip.ParseAddrPort(cfg.Host); err == nil && !cfg.Target.IsValid() {
		cfg.Target = at
	}
	loop := d.loopFor(cfg)
	if cfg.Target.IsValid() {
		near, _ := cfg.Near.(*Conn)
		return d.connectTo(cfg, loop, near, done)
	}
	return d.connectName(cfg, loop, done)
}

// connectName dials a name on a goroutine of its own.
func (d *Datapath) connectName(cfg DialConfig, loop *eventloop.Loop, done func(*Conn, error)) (cancel func()) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		done(UntilReset(ctx, cfg.Near, func(ctx context.Context) (*Conn, error) { return d.dialName(ctx, loop, cfg) }))
	}()
	return cancel
}

// loopFor returns the loop for a new leg.
func (d *Datapath) loopFor(cfg DialConfig) *eventloop.Loop {
	if near, ok := cfg.Near.(*Conn); ok {
		return near.raw.Loop()
	}
	return d.loops.Least()
}

// UntilReset calls dial with a context that ends once near is reset and has no unread bytes for the other leg. The
// error is then an ErrNearReset. A near of another package is not watched.
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

// dialName connects to one of the addresses of a name (RFC 8305).
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

// clientOf returns the host that a dial's lookups and attempts are counted for: Near's peer. Empty: there is none.
func clientOf(cfg DialConfig) string {
	if cfg.Near == nil {
		return ""
	}
	return datapath.Host(datapath.RemoteOf(cfg.Near).Addr()).String()
}

// errLookups wraps the error of a lack of descriptors, which bounds lookups.
var errLookups = fmt.Errorf("too many names are being looked up: %w", unix.EMFILE)

// boundedResolver bounds the lookups of all clients. Each lookup has a socket beside those that a connection is
// counted for.
type boundedResolver struct {
	happyeyeballs.Resolver
	places *datapath.Places
	client string
}

// LookupNetIP implements happyeyeballs.Resolver. It waits for a place.
func (r boundedResolver) LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error) {
	if !r.places.Wait(ctx, r.client) {
		return nil, fmt.Errorf("%w: %w", errLookups, context.Cause(ctx))
	}
	defer r.places.Leave(r.client)
	addrs, err := r.Resolver.LookupNetIP(ctx, network, host)
	return addrs, wrapShortage(err)
}

// wrapShortage makes a DNS error wrap the lack of a descriptor, which package net only names in its text.
func wrapShortage(err error) error {
	var dns *net.DNSError
	if !errors.As(err, &dns) {
		return err
	}
	for _, errno := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS} {
		if strings.HasSuffix(dns.Err, errno.Error()) {
			short := *dns // lookups of the same name share it
			short.UnwrapErr = errno
			return &short
		}
	}
	return err
}

// attempt is a connection to one address while it is being made.
//
//	beginConnect ──▶ waitForEvents (on the loop) ──▶ checkOutcome, at each event ──▶ a leg, or an error
//	                                                endWithError: timeout, cancel, a reset of near
//
// From waitForEvents on only the loop's goroutine touches it. raw is nil before that and once the attempt is over. The
// memory of an attempt that has succeeded serves a later one, perhaps of another loop. A cancel of the former must not
// end the latter, so it compares generation first, on the loop of the former.
type attempt struct {
	generation atomic.Uint32 // attempts that have succeeded in this memory

	// Made once.
	task                 eventloop.Task // runs checkOutcome
	wait, check, timeOut func()

	dp         *Datapath
	cfg        DialConfig
	loop       *eventloop.Loop
	fd         int // until there is raw
	raw        *eventloop.Socket
	done       func(*Conn, error)
	foreignErr error // why Source can only be an address of this host; nil: it can be any
	keepDSCP   bool  // ReceivedDSCP is to know the server's mark
	deadline   eventloop.Deadline
	near       *eventloop.Socket // of the leg that it will be relayed with; nil: none
}

// connectTo makes a connection to cfg.Target, unless cancel is called or near is reset. near may be nil.
func (d *Datapath) connectTo(
	cfg DialConfig, loop *eventloop.Loop, near *Conn, done func(*Conn, error),
) (cancel func()) {
	cfg.Target = netip.AddrPortFrom(cfg.Target.Addr().Unmap(), cfg.Target.Port())
	a := freeAttempts.Get().(*attempt)
	if a.wait == nil {
		a.wait, a.check = a.waitForEvents, a.checkOutcome
		a.timeOut = func() { a.endWithError(os.ErrDeadlineExceeded) }
	}
	a.dp, a.cfg, a.loop, a.done = d, cfg, loop, done
	if near != nil {
		a.near = near.raw
	}
	if err := a.beginConnect(); err != nil {
		done(nil, a.dialError(err))
		return func() {}
	}
	generation := a.generation.Load() // before the loop can end the attempt
	loop.Do(a.wait)                   // on the loop, so that nothing ends the attempt before it watches
	return func() {
		loop.Do(func() {
			if a.generation.Load() == generation {
				a.endWithError(context.Canceled)
			}
		})
	}
}

// freeAttempts has the memory that recycle was called for.
var freeAttempts = sync.Pool{New: func() any { return new(attempt) }}

// recycle gives the memory of an attempt that has succeeded to a later one. Its socket and near must not post its task
// any more.
func (a *attempt) recycle() {
	a.generation.Add(1)
	a.cfg, a.done, a.near, a.foreignErr, a.keepDSCP = DialConfig{}, nil, nil, nil, false
	freeAttempts.Put(a)
}

// beginConnect opens a socket and has the kernel connect it. After an error there is no socket.
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

// startSocket sets a socket's options and has it connect.
func (a *attempt) startSocket(fd int, network string) (err error) {
	if a.foreignErr, err = prepareSocket(fd, network, a.cfg); err != nil {
		return err
	}
	is4 := a.cfg.Target.Addr().Is4()
	if from := a.cfg.Source; from.IsValid() {
		if from.Addr().Unmap().Is4() != is4 {
			return fmt.Errorf("from %v: %w", from.Addr(), unix.EAFNOSUPPORT)
		}
		if err := unix.Bind(fd, sockaddrOf(from)); err != nil {
			return os.NewSyscallError("bind", err)
		}
	}
	if a.cfg.DSCP != nil {
		var dscp uint8
		if dscp, a.keepDSCP = a.cfg.DSCP(a.cfg.Target); a.keepDSCP {
			if err := setDSCP(fd, is4, dscp); err != nil {
				return err
			}
			if err := a.dp.tosReader.prepareSocket(fd, is4, a.dp.log); err != nil {
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

// prepareSocket sets what must be set before the socket is bound. foreign is why Source must be an address of this
// host: the privilege for transparency is missing. That is no failure before the kernel has refused the address.
func prepareSocket(fd int, network string, cfg DialConfig) (foreign, err error) {
	if err := guardStream(fd); err != nil {
		return nil, err
	}
	if cfg.Mark != 0 {
		if err := eventloop.SetOption(fd, unix.SOL_SOCKET, unix.SO_MARK, int32(cfg.Mark)); err != nil {
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
		// The kernel then chooses the port at connect, when it need only be unique for this target. So a client can
		// have any number of connections.
		err = eventloop.SetOption(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, int32(1))
	} else {
		// One client port may be in use towards several targets.
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err != nil {
		return foreign, fmt.Errorf("bind as %s: %w", cfg.Source, err)
	}
	return foreign, nil
}

// waitForEvents makes the loop call checkOutcome at the socket's events. It runs on the loop.
func (a *attempt) waitForEvents() {
	var err error
	if a.raw, err = a.loop.Watch(a.fd); err != nil {
		_ = unix.Close(a.fd)
		a.done(nil, a.dialError(err))
		return
	}
	if a.cfg.Timeout > 0 {
		a.loop.StartDeadline(&a.deadline, a.cfg.Timeout, a.timeOut)
	}
	a.task.Prepare(a.loop, a.check)
	a.raw.Drive(&a.task)
	if a.near != nil {
		a.near.OnBroken(&a.task)
	}
}

// checkOutcome ends the attempt if the socket is connected, has failed, or near was reset.
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
		if err := a.connectError(); err != nil {
			a.endWithError(os.NewSyscallError("connect", err))
			return
		}
	}
	c := a.dp.newLeg(a.raw, a.connectedPeer(), true)
	if c.local = c.readLocal(); c.local == c.remote { // nothing listens there, and the socket met itself
		a.endWithError(os.NewSyscallError("connect", unix.ECONNREFUSED))
		return
	}
	if a.keepDSCP {
		err := a.raw.Visit(func(fd int) (err error) {
			c.serverDSCP, err = a.dp.tosReader.readDSCP(fd, a.cfg.Target.Addr().Is4())
			return err
		})
		if err != nil {
			a.dp.log.Debug("a server's DSCP is not known", "target", a.cfg.Target, "err", err)
		}
	}
	a.stopWatching()
	c.raw.Drive(nil)
	done := a.done
	a.recycle()
	done(c, nil)
}

// connectError returns why a socket that has ended was not connected; nil: it was, and the server may have sent bytes.
func (a *attempt) connectError() (err error) {
	var code int
	err = a.raw.Visit(func(fd int) (err error) {
		code, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		return err
	})
	if err == nil && code != 0 && !hasUnread(a.raw) {
		err = unix.Errno(code)
	}
	return err
}

// connectedPeer returns the address that the socket is connected to. It differs from the target if that is
// unspecified: the kernel then takes one of this host.
func (a *attempt) connectedPeer() netip.AddrPort {
	if !a.cfg.Target.Addr().IsUnspecified() {
		return a.cfg.Target
	}
	peer := a.cfg.Target
	_ = a.raw.Visit(func(fd int) error {
		at, err := eventloop.RemoteAddrPort(fd)
		if err == nil {
			peer = at
		}
		return err
	})
	return peer
}

// endWithError ends the attempt with an error, unless it is over.
func (a *attempt) endWithError(err error) {
	if a.raw == nil {
		return
	}
	_ = a.raw.Close()
	a.stopWatching()
	a.done(nil, a.dialError(err))
}

// stopWatching ends the attempt: neither cancel nor its timeout nor a reset of near has an effect any more.
func (a *attempt) stopWatching() {
	a.raw = nil
	a.loop.CancelDeadline(&a.deadline)
	if a.near != nil {
		a.near.OnBroken(nil)
	}
}

// dialError returns an error in the form that package net has.
func (a *attempt) dialError(err error) error {
	failed := &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(a.cfg.Target), Err: err}
	if a.cfg.Source.IsValid() {
		failed.Source = net.TCPAddrFromAddrPort(a.cfg.Source)
	}
	return fmt.Errorf("kernel: %w", explainDialError(failed, a.foreignErr))
}

// explainDialError adds the cause to EADDRNOTAVAIL: foreign, the reason why the source must be this host's, or that
// all local ports are in use. Over IPv6 the cause may also be that this host has no address to dial from.
func explainDialError(err, foreign error) error {
	var op *net.OpError
	if !errors.Is(err, unix.EADDRNOTAVAIL) || !errors.As(err, &op) {
		return err
	}
	if foreign != nil {
		return fmt.Errorf("%w: %w", err, foreign)
	}
	if to, ok := op.Addr.(*net.TCPAddr); ok && to.IP.To4() != nil {
		return fmt.Errorf("%w: %w", err, ErrNoPort)
	}
	return err
}
