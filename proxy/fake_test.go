package proxy_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// fakeLeg is a leg in memory, with the test at its far end: what the test
// takes is thereby acknowledged.
type fakeLeg struct {
	net.Conn // nil: deadlines are nobody's business here
	local    net.Addr
	remote   net.Addr
	capacity int           // of the send buffer
	holds    datapath.Hold // what Info says
	mortal   bool          // what InProcess says
	slow     bool          // Reset returns once everybody has drawn the consequences

	mu       sync.Mutex
	change   *sync.Cond
	in       bytes.Buffer // from the test to the proxy
	inFin    bool
	rst      bool // the far end has reset the connection
	robbed   bool // a write has collected the reset's error
	out      bytes.Buffer
	outFin   bool
	closed   bool // by the proxy
	reset    bool // closed by Reset
	lost     int  // bytes that Reset threw away
	written  int
	acked    int
	observed int // written when Observe was called
	observer func(flow.Report)
	clock    func() cc.Time
	maxOut   int // most bytes ever unacknowledged
}

func newFakeLeg(clock func() cc.Time, port uint16, capacity int) *fakeLeg {
	l := &fakeLeg{
		clock: clock, capacity: capacity,
		local:  net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)),
		remote: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), port)),
	}
	l.change = sync.NewCond(&l.mu)
	return l
}

func (l *fakeLeg) LocalAddr() net.Addr  { return l.local }
func (l *fakeLeg) RemoteAddr() net.Addr { return l.remote }

func (l *fakeLeg) Read(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		switch {
		case l.closed:
			return 0, net.ErrClosed
		case l.in.Len() > 0:
			n, _ := l.in.Read(b)
			l.change.Broadcast()
			return n, nil
		case l.rst && !l.robbed:
			l.robbed = true
			return 0, syscall.ECONNRESET
		case l.inFin || l.rst:
			return 0, io.EOF
		}
		l.change.Wait()
	}
}

func (l *fakeLeg) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for n < len(b) {
		switch {
		case l.closed:
			return n, net.ErrClosed
		case l.rst && !l.robbed:
			l.robbed = true
			return n, syscall.ECONNRESET
		case l.rst, l.outFin:
			return n, syscall.EPIPE
		case l.out.Len() < l.capacity:
			m := min(len(b)-n, l.capacity-l.out.Len())
			l.out.Write(b[n : n+m])
			n += m
			l.written += m
			l.maxOut = max(l.maxOut, l.written-l.acked)
			l.change.Broadcast()
		default:
			l.change.Wait()
		}
	}
	return n, nil
}

func (l *fakeLeg) CloseWrite() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.change.Broadcast()
	if l.rst || l.closed {
		return syscall.ENOTCONN
	}
	l.outFin = true
	return nil
}

func (l *fakeLeg) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.observer = nil
	l.change.Broadcast()
	return nil
}

func (l *fakeLeg) Reset() error {
	l.mu.Lock()
	if !l.closed {
		l.reset, l.lost = true, l.out.Len()
		l.out.Reset()
	}
	l.mu.Unlock()
	err := l.Close()
	if l.slow {
		time.Sleep(time.Second)
	}
	return err
}

func (l *fakeLeg) Enforce(want datapath.Hold, _ int) datapath.Hold { return l.holds & want }

func (l *fakeLeg) Apply(flow.Limit) {}

func (l *fakeLeg) Observe(report func(flow.Report)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.observed = l.written
	l.observer = report
	l.report()
}

func (l *fakeLeg) report() {
	if l.observer != nil {
		l.observer(flow.Report{
			At: l.clock(), Written: cc.Bytes(l.written - l.observed), Acked: cc.Bytes(max(0, l.acked-l.observed)),
			Pipe: cc.Bytes(l.written - l.acked), MSS: cc.DefaultMSS,
		})
	}
}

func (l *fakeLeg) Info() datapath.Info { return datapath.Info{Tier: "fake", Holds: l.holds} }

func (l *fakeLeg) Undelivered() (cc.Bytes, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return cc.Bytes(l.out.Len()), nil
}

func (l *fakeLeg) Aborted() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rst
}

func (l *fakeLeg) InProcess() bool { return l.mortal }

// The far end, for tests.

func (l *fakeLeg) send(b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.in.Write(b)
	l.change.Broadcast()
}

func (l *fakeLeg) sendFin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inFin = true
	l.change.Broadcast()
}

// sendReset is a RST: what the proxy wrote and the test has not taken is gone,
// what the test sent before stays readable.
func (l *fakeLeg) sendReset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rst = true
	l.out.Reset()
	l.change.Broadcast()
}

// take waits for up to n bytes and acknowledges them; io.EOF after a FIN,
// ECONNRESET after a RST.
func (l *fakeLeg) take(n int) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.out.Len() == 0 {
		switch {
		case l.reset, l.rst:
			return nil, syscall.ECONNRESET
		case l.outFin, l.closed:
			return nil, io.EOF
		}
		l.change.Wait()
	}
	b := append([]byte(nil), l.out.Next(n)...)
	l.acked += len(b)
	l.report()
	l.change.Broadcast()
	return b, nil
}

// takeAll takes until the leg ends.
func (l *fakeLeg) takeAll(n int) ([]byte, error) {
	var all []byte
	for {
		b, err := l.take(n)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, b...)
	}
}

func (l *fakeLeg) wasReset() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reset
}

func (l *fakeLeg) unread() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.in.Len()
}

// fakeListener hands out legs that know where they want to go.
type fakeListener struct {
	legs   chan *fakeLeg
	closed chan struct{}
	once   sync.Once
	greet  func(context.Context) error // nil: at once
	gone   atomic.Bool                 // its clients' peer is revoked
	asked  netip.AddrPort              // where clients want to go; invalid: they have no choice
	health error
}

func newFakeListener() *fakeListener {
	return &fakeListener{legs: make(chan *fakeLeg), closed: make(chan struct{})}
}

func (l *fakeListener) Serve(take func(datapath.Conn)) error {
	for {
		select {
		case leg := <-l.legs:
			take(leg)
		case <-l.closed:
			return net.ErrClosed
		}
	}
}

// handshakeTimeout is a listener's own.
const handshakeTimeout = 10 * time.Second

func (l *fakeListener) Greet(ctx context.Context, conn datapath.Conn) (ingress.Client, error) {
	if l.greet != nil {
		ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
		defer cancel()
		if err := l.greet(ctx); err != nil {
			_ = conn.Reset()
			return ingress.Client{}, err
		}
	}
	target := l.asked
	if !target.IsValid() {
		target = netip.MustParseAddrPort("203.0.113.9:443")
	}
	return ingress.Client{
		Conn: conn, Fixed: !l.asked.IsValid(),
		Source: netip.MustParseAddrPort("198.51.100.7:5000"), Target: target,
		Current: func() bool { return !l.gone.Load() },
		Answer: func(_ netip.AddrPort, err error) error {
			if err != nil {
				return conn.Reset()
			}
			return nil
		},
	}, nil
}

func (l *fakeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1} }

func (l *fakeListener) Health() error { return l.health }

func (l *fakeListener) Drain() { _ = l.Close() }

func (l *fakeListener) Apply(proxy.ListenerConfig) (func(), error) { return func() {}, nil }

func (l *fakeListener) Tunnel() tunnel.Listener { return nil }

func (l *fakeListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// bench is a server whose legs are all fakes.
type bench struct {
	tb       testing.TB
	server   *proxy.Server
	cfg      config.Config // it started with
	listener *fakeListener
	clock    func() cc.Time
	dialled  chan *fakeLeg // server legs, in the order of dialling
	capacity int           // of the legs' send buffers
	silent   bool          // servers do not answer
	holds    datapath.Hold
	mortal   bool // the client legs' transport is in this process
	logs     *need.Output
	cancel   context.CancelFunc
	served   chan error
	dialErr  error
	dialling func() // before each dial; nil: nothing happens

	addressed atomic.Pointer[[]netip.Addr] // this machine's; nil: those of all legs
}

// addresses are this machine's.
func (b *bench) addresses() []netip.Addr {
	if is := b.addressed.Load(); is != nil {
		return *is
	}
	return []netip.Addr{netip.MustParseAddr("192.0.2.1")}
}

func newBench(tb testing.TB, change func(*config.Config, *bench)) *bench {
	tb.Helper()
	start := time.Now()
	b := &bench{
		tb: tb, listener: newFakeListener(), capacity: 64 << 10, logs: &need.Output{},
		clock:   func() cc.Time { return cc.Time(time.Since(start)) + 1 },
		dialled: make(chan *fakeLeg, 100), served: make(chan error, 1),
	}
	cfg := config.Default()
	cfg.Listeners = []access.Listener{{
		Name: "fake", Mode: "forward", Address: "192.0.2.1:1",
		Target: "203.0.113.9:443",
	}}
	cfg.Defaults.Algorithm = "none"
	if change != nil {
		change(&cfg, b)
	}
	b.cfg = cfg
	var err error
	b.server, err = proxy.New(cfg, proxy.Parts{
		Clock: b.clock, Flows: &flow.Manager{},
		Open: func(proxy.ListenerConfig) (proxy.Listener, error) { return b.listener, nil },
		Dial: b.dial, Addresses: func() ([]netip.Addr, error) { return b.addresses(), nil }, Log: slog.New(slog.NewTextHandler(b.logs, nil)),
	})
	require.NoError(tb, err)
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	go func() { b.served <- b.server.Serve(ctx) }()
	return b
}

func (b *bench) dial(cfg kernel.DialConfig, done func(datapath.Conn, error)) (cancel func()) {
	if b.silent {
		return func() { done(nil, context.Canceled) }
	}
	done(b.serverLeg(cfg))
	return func() {}
}

func (b *bench) serverLeg(cfg kernel.DialConfig) (datapath.Conn, error) {
	if b.dialErr != nil {
		return nil, b.dialErr
	}
	if err := cfg.Guard(cfg.Target); err != nil {
		return nil, err
	}
	if b.dialling != nil {
		b.dialling()
	}
	leg := newFakeLeg(b.clock, 20000, b.capacity)
	leg.holds = b.holds
	b.dialled <- leg
	return leg, nil
}

// connect brings one connection through to where it is relayed.
func (b *bench) connect() (client, server *fakeLeg) {
	b.tb.Helper()
	client = newFakeLeg(b.clock, 10000, b.capacity)
	client.holds, client.mortal = b.holds, b.mortal
	b.listener.legs <- client
	return client, <-b.dialled
}

// end shuts the server down and checks that it went well.
func (b *bench) end() {
	b.tb.Helper()
	b.cancel()
	assert.NoError(b.tb, <-b.served)
}
