package proxy_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// listeners replaces them all.
func listeners(all ...access.Listener) func(*config.Config) {
	return func(c *config.Config) { c.Listeners = all }
}

// freePort is a UDP port that nothing has.
func freePort(t *testing.T) string {
	t.Helper()
	c, err := net.ListenPacket("udp", ":0")
	require.NoError(t, err)
	require.NoError(t, c.Close())
	return fmt.Sprintf(":%d", c.LocalAddr().(*net.UDPAddr).Port)
}

// through connects to an address and to the backend behind it, which says hello.
func (r *rig) through(address string, backend *net.TCPListener) (client, server net.Conn) {
	r.tb.Helper()
	client, err := net.Dial("tcp", address)
	require.NoError(r.tb, err)
	r.tb.Cleanup(func() { _ = client.Close() })
	require.NoError(r.tb, backend.SetDeadline(time.Now().Add(patience)))
	server, err = backend.AcceptTCP()
	require.NoError(r.tb, err)
	r.tb.Cleanup(func() { _ = server.Close() })
	send(r.tb.(*testing.T), server, "hello")
	hears(r.tb.(*testing.T), client, "hello")
	return client, server
}

// names are those of the listeners that are counted.
func (r *rig) names() (all []string) {
	for _, l := range r.proxy.Counters().Listeners {
		all = append(all, l.Listener)
	}
	return all
}

func TestAReloadOpensAndClosesListeners(t *testing.T) {
	const here = "127.43.0.1:18001"
	r := newRig(t, func(c *config.Config) { c.Shutdown.Drain = time.Hour })
	first := r.cfg.Listeners[0]
	second := access.Listener{Name: "second", Mode: "forward", Address: here, Target: first.Target}
	old, far := r.pair()

	done := r.reload(listeners(first, second))
	assert.Equal(t, proxy.Reloaded{Opened: 1}, done)
	assert.Equal(t, here, r.proxy.Addrs()["second"].String())
	client, server := r.through(here, r.backend)
	again := r.reload(listeners(first, second))
	assert.Equal(t, proxy.Reloaded{}, again, "what is open stays open")

	done = r.reload(listeners(first))
	assert.Equal(t, proxy.Reloaded{Closing: 1}, done)
	_, err := net.Dial("tcp", here)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	send(t, client, "still here")
	hears(t, server, "still here")
	send(t, far, "so am I")
	hears(t, old, "so am I")
	assert.Equal(t, []string{"fwd", "second"}, r.names(), "it counts as long as it has connections")
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
	require.Eventually(t, func() bool { return len(r.names()) == 1 }, patience, time.Millisecond)

	r.reload(listeners(first, second))
	r.through(here, r.backend)
	send(t, far, "and still")
	hears(t, old, "and still")
	assert.Contains(t, r.logs.String(), "listener drains")
	assert.Contains(t, r.logs.String(), "listener is closed")
}

func TestAListenerThatMovesKeepsItsCounts(t *testing.T) {
	const there = "127.43.0.2:18002"
	r := newRig(t, func(c *config.Config) { c.Shutdown.Drain = time.Hour })
	l := r.cfg.Listeners[0]
	client, server := r.pair()
	l.Address = there
	assert.Equal(t, proxy.Reloaded{Opened: 1, Closing: 1}, r.reload(listeners(l)))
	r.through(there, r.backend)
	send(t, server, "still here")
	hears(t, client, "still here")
	counts := r.proxy.Counters().Listeners
	require.Len(t, counts, 1)
	assert.EqualValues(t, 2, counts[0].Accepted)
	assert.Equal(t, 2, counts[0].Active)
}

// Connections that go on while their listener is left out, or has another name, count for the one of their
// listener's name that a later reload adds.
func TestAListenerThatIsAddedAgainKeepsItsCountsAndItsLimit(t *testing.T) {
	other := access.Listener{Name: "other", Mode: "mixed", Address: "127.43.0.4:18005"}
	renamed := func(l access.Listener) access.Listener {
		l.Name = "renamed"
		return l
	}
	for name, without := range map[string]func(access.Listener) access.Listener{
		"after it was left out": func(access.Listener) access.Listener { return other },
		"after a renaming":      renamed,
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *config.Config) {
				c.Shutdown.Drain = time.Hour
				c.Listeners[0].Connections = 1
			})
			client, server := r.pair()
			r.reload(listeners(without(r.cfg.Listeners[0])))
			assert.Contains(t, r.names(), "fwd", "it counts as long as it has connections")
			r.reload(listeners(r.cfg.Listeners[0]))
			require.Equal(t, 1, r.proxy.Counters().Listeners[0].Active)
			refused(t, r.addr())
			counts := r.proxy.Counters().Listeners
			require.Len(t, counts, 1)
			assert.EqualValues(t, 2, counts[0].Accepted)
			send(t, server, "still here")
			hears(t, client, "still here")
		})
	}
}

func TestAListenerChangesWhileItsSocketStaysOpen(t *testing.T) {
	other, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = other.Close() })
	r := newRig(t, nil)
	at := r.addr()
	client, server := r.pair()
	l := r.cfg.Listeners[0]

	l.Target = other.Addr().String()
	assert.Equal(t, proxy.Reloaded{}, r.reload(listeners(l)))
	r.through(at, other)

	l.Mode, l.Target = "connect", ""
	r.reload(listeners(l))
	asking, err := net.Dial("tcp", at)
	require.NoError(t, err)
	defer asking.Close()
	send(t, asking, fmt.Sprintf("CONNECT %s HTTP/1.1\r\n\r\n", r.backend.Addr()))
	hears(t, asking, "HTTP/1.1 403")

	l.Name = "renamed"
	assert.Equal(t, proxy.Reloaded{}, r.reload(listeners(l)))
	assert.Equal(t, at, r.proxy.Addrs()["renamed"].String())
	assert.Equal(t, []string{"renamed", "fwd"}, r.names(), "what has come under the other name goes on")
	l.Mode, l.Target = "forward", r.backend.Addr().String()
	r.reload(listeners(l))
	r.through(at, r.backend)
	assert.EqualValues(t, 1, r.proxy.Counters().Listeners[0].Accepted)

	send(t, client, "all the time")
	hears(t, server, "all the time")
}

func TestAListenerThatCannotBeOpenedLeavesAllAsItWas(t *testing.T) {
	const fine = "127.43.0.3:18003"
	taken, err := net.Listen("tcp", "127.43.0.3:18004")
	require.NoError(t, err)
	defer taken.Close()
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, nil, p)
	vpn := g.cfg.Listeners[0]
	p.connect(g)
	client, server := p.pair(t, listenHere(t))

	change := func(c *config.Config) {
		open := access.Listener{Name: "fine", Mode: "mixed", Address: fine}
		shut := access.Listener{Name: "shut", Mode: "mixed", Address: taken.Addr().String()}
		without := vpn
		without.WireGuard.Peers = nil
		c.Listeners = []access.Listener{without, open, shut}
		c.Defaults.Algorithm = "none"
	}
	_, err = g.proxy.Reload(g.with(change))
	require.ErrorContains(t, err, "listeners[2]")
	require.ErrorContains(t, err, "127.43.0.3:18004")
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	_, err = net.Dial("tcp", fine)
	require.ErrorIs(t, err, syscall.ECONNREFUSED, "what had been opened is closed")
	assert.Equal(t, []string{"vpn"}, g.names())
	require.Len(t, g.proxy.Tunnels()[0].Peers, 1)
	assert.NotEqual(t, "none", flowsOf(g.proxy)[0].Down.Algorithm)
	send(t, server, "still here")
	hears(t, client, "still here")
}

func TestATunnelIsOpenedDrainedAndClosedByAReload(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) {
		c.Listeners = append(c.Listeners, access.Listener{Name: "other", Mode: "mixed", Address: "127.0.0.1:0"})
		c.Shutdown.Drain = time.Hour
	}, p)
	vpn, other := g.cfg.Listeners[0], g.cfg.Listeners[1]
	assert.Equal(t, proxy.Reloaded{Closing: 1}, g.reload(listeners(other)))
	assert.Empty(t, g.proxy.Tunnels())
	require.Eventually(t, func() bool { return len(g.names()) == 1 }, patience, time.Millisecond)

	assert.Equal(t, proxy.Reloaded{Opened: 1}, g.reload(listeners(other, vpn)))
	p.connect(g)
	backend := listenHere(t)
	client, server := p.pair(t, backend)

	assert.Equal(t, proxy.Reloaded{Closing: 1}, g.reload(listeners(other)))
	send(t, server, "still here")
	hears(t, client, "still here")
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := p.net.DialContext(ctx, "tcp", backend.Addr().String())
	require.ErrorIs(t, err, context.DeadlineExceeded, "it takes nobody further")
	assert.Equal(t, []string{"other", "vpn"}, g.names())
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
	require.Eventually(t, func() bool { return len(g.names()) == 1 }, patience, time.Millisecond)
}

// A tunnel that has been left out keeps its port until its connections have ended.
func TestATunnelIsAddedAgainOnceItHasDrained(t *testing.T) {
	p, tablet := newPhone(t, "phone", "10.9.0.2"), newPhone(t, "tablet", "10.9.0.3")
	g := newGateway(t, func(c *config.Config) {
		c.Listeners[0].Address = freePort(t)
		c.Listeners = append(c.Listeners, access.Listener{Name: "other", Mode: "mixed", Address: "127.0.0.1:0"})
		c.Shutdown.Drain = time.Hour
	}, p, tablet)
	t.Cleanup(g.proxy.Abort) // what the tablet leaves would have an hour
	vpn, other := g.cfg.Listeners[0], g.cfg.Listeners[1]
	p.connect(g)
	backend := listenHere(t)
	client, server := p.pair(t, backend)
	send(t, server, "hello")
	hears(t, client, "hello")
	assert.Equal(t, proxy.Reloaded{Closing: 1}, g.reload(listeners(other)))
	add := g.with(listeners(other, vpn))
	_, err := g.proxy.Reload(add)
	require.ErrorContains(t, err, `listeners[1].address: the tunnel of listener "vpn" has it until its connections have `+
		"ended; restart")
	send(t, server, "still here")
	hears(t, client, "still here")

	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
	require.Eventually(t, func() bool { _, err := g.proxy.Reload(add); return err == nil }, patience, time.Millisecond)
	tablet.connect(g) // the phone finds out by itself, in 15 s
	tablet.pair(t, backend)
}

func TestWhatATunnelIsCannotChangeWhileItRuns(t *testing.T) {
	_, masque := masqueFiles(t)
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) {
		c.Listeners[0].Address, c.Listeners[0].WireGuard.Datapath = freePort(t), access.DatapathNetstack
	}, p)
	p.connect(g)
	client, server := p.pair(t, listenHere(t))
	vpn := g.cfg.Listeners[0]
	private, err := access.GenerateKey()
	require.NoError(t, err)
	for name, c := range map[string]struct {
		key    string
		change func(*access.Listener)
	}{
		"another datapath": {
			"wireguard.datapath", func(l *access.Listener) { l.WireGuard.Datapath = access.DatapathKernel },
		},
		"another MTU":         {"tunnel.mtu", func(l *access.Listener) { l.Tunnel.MTU = 1300 }},
		"another key":         {"wireguard.private_key", func(l *access.Listener) { l.WireGuard.PrivateKey = private }},
		"another port":        {"address", func(l *access.Listener) { l.Address = ":0" }},
		"another name for it": {"address", func(l *access.Listener) { l.Name = "other" }},
		"another tunnel at its port": {"address", func(l *access.Listener) {
			*l = masque.Listeners[0]
			l.Address = vpn.Address
		}},
		"another mode": {"mode", func(l *access.Listener) {
			*l = access.Listener{Name: vpn.Name, Mode: "mixed", Address: "127.0.0.1:0"}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			l := vpn
			c.change(&l)
			_, err := g.proxy.Reload(g.with(listeners(l)))
			var ce *config.Error
			require.ErrorAs(t, err, &ce)
			assert.Equal(t, "listeners[0]."+c.key, ce.Key)
			assert.ErrorContains(t, err, "restart the proxy, or ")
			assert.Equal(t, []string{"vpn"}, g.names())
			send(t, server, "still here")
			hears(t, client, "still here")
		})
	}
	l := vpn
	l.Tunnel.UDPSessions, l.Tunnel.Isolate = new(7), new(false)
	assert.Equal(t, proxy.Reloaded{}, g.reload(listeners(l)), "what becomes of datagrams can")
	beside := vpn
	beside.Name, beside.Address, beside.WireGuard.PrivateKey = "beside", freePort(t), private
	assert.Equal(t, proxy.Reloaded{Opened: 1}, g.reload(listeners(vpn, beside)))
	send(t, server, "all the time")
	hears(t, client, "all the time")
}

// What is refused in the midst takes nothing from peers that it would have taken out.
func TestPeersAreShakenHandsWithAfterAReloadThatIsRefused(t *testing.T) {
	other := access.Listener{Name: "other", Mode: "wireguard", Address: freePort(t)}
	private, err := access.GenerateKey()
	require.NoError(t, err)
	other.WireGuard.PrivateKey = private
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) {
		c.Listeners[0].Address, c.Listeners[0].WireGuard.Datapath = freePort(t), access.DatapathNetstack
		c.Listeners = append(c.Listeners, other)
	}, p)
	p.connect(g)
	client, server := p.pair(t, listenHere(t))
	send(t, server, "it is relayed") // while it is not, it is refused like a new one
	hears(t, client, "it is relayed")

	without, another := g.cfg.Listeners[0], g.cfg.Listeners[1]
	without.WireGuard.Peers = nil
	another.Name, another.Device, another.WireGuard.Datapath = "another", "lo", access.DatapathKernel
	_, err = g.proxy.Reload(g.with(listeners(without, another)))
	require.ErrorContains(t, err, "listeners[1]")
	const byItself = 15 * time.Second // the phone would notice: WireGuard's keepalive and rekey timeouts
	shaken := func() bool { return !g.proxy.Tunnels()[0].Peers[0].Handshake.IsZero() }
	require.Eventually(t, shaken, byItself*2/3, time.Millisecond)
	send(t, server, "still here")
	hears(t, client, "still here")
}

// A listener that is left out has its connections reset once shutdown.drain is over,
// and nobody else's.
func TestTheConnectionsOfAListenerThatIsLeftOutHaveTheTimeOfADrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ways := map[string]*fakeListener{"a": newFakeListener(), "b": newFakeListener()}
		dialled := make(chan *fakeLeg, 2)
		b := &bench{dialled: dialled, clock: func() cc.Time { return cc.Time(time.Since(start)) + 1 }, capacity: 1 << 16}
		cfg := config.Default()
		cfg.Defaults.Algorithm = "none"
		cfg.Shutdown.Drain = 30 * time.Second
		cfg.Listeners = []access.Listener{
			{Name: "a", Mode: "forward", Address: "192.0.2.1:1", Target: "203.0.113.9:443"},
			{Name: "b", Mode: "forward", Address: "192.0.2.1:2", Target: "203.0.113.9:443"},
		}
		s, err := proxy.New(cfg, proxy.Parts{
			Clock: b.clock, Flows: &flow.Manager{}, Dial: b.dial, Log: slog.New(slog.DiscardHandler),
			Open: func(l proxy.ListenerConfig) (proxy.Listener, error) { return ways[l.Name], nil },
		})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		served := make(chan error, 1)
		go func() { served <- s.Serve(ctx) }()
		clients := map[string]*fakeLeg{}
		for name, way := range ways {
			clients[name] = newFakeLeg(b.clock, 10000, 1<<16)
			way.legs <- clients[name]
			<-dialled
		}
		synctest.Wait()
		cfg.Listeners = cfg.Listeners[:1]
		_, err = s.Reload(cfg)
		require.NoError(t, err)
		began := time.Now()
		_, err = clients["b"].take(1)
		assert.ErrorIs(t, err, syscall.ECONNRESET)
		assert.Equal(t, 30*time.Second, time.Since(began))
		synctest.Wait()
		assert.False(t, clients["a"].wasReset())
		assert.Len(t, s.Counters().Listeners, 1)
		clients["a"].sendReset()
		cancel()
		require.NoError(t, <-served)
		_, err = s.Reload(cfg)
		assert.ErrorContains(t, err, "ending")
	})
}

// fakeTunnel is a listener whose peers send as soon as it is open.
type fakeTunnel struct {
	*fakeListener
	tunnel.Listener // nil: nobody asks for more
	verdict         func(tunnel.Sent) (down, up flow.Terms, err error)
	early           error // of the first
}

func (f *fakeTunnel) Addr() net.Addr                             { return nil }
func (f *fakeTunnel) Apply(proxy.ListenerConfig) (func(), error) { return func() {}, nil }
func (f *fakeTunnel) Close() error                               { return f.fakeListener.Close() }
func (f *fakeTunnel) Drain()                                     { f.fakeListener.Drain() }
func (f *fakeTunnel) Health() error                              { return nil }
func (f *fakeTunnel) Place(netip.Addr) tunnel.Place              { return tunnel.Elsewhere }
func (f *fakeTunnel) Serve(take func(datapath.Conn)) error       { return f.fakeListener.Serve(take) }
func (f *fakeTunnel) Status() (tunnel.Status, error)             { return tunnel.Status{}, nil }
func (f *fakeTunnel) Tunnel() tunnel.Listener                    { return f }
func (f *fakeTunnel) Greet(ctx context.Context, c datapath.Conn) (ingress.Client, error) {
	return f.fakeListener.Greet(ctx, c)
}

// sent is a datagram of a peer.
var sent = tunnel.Sent{
	Peer: "phone", Source: netip.MustParseAddrPort("10.9.0.2:5000"), Target: netip.MustParseAddrPort("203.0.113.9:443"),
}

func (f *fakeTunnel) Forward(_ access.Datagrams, with tunnel.Forwarding) {
	f.verdict = with.Verdict
	_, _, f.early = f.verdict(sent)
}

// At the start there are no rules yet, and in a reload those of the configuration before.
func TestDatagramsThatComeBeforeATunnelIsInForceAreRefused(t *testing.T) {
	ways := map[string]*fakeTunnel{"a": {fakeListener: newFakeListener()}, "b": {fakeListener: newFakeListener()}}
	b := &bench{clock: func() cc.Time { return 1 }}
	all := []access.Listener{{Name: "a", Mode: "tun", Device: "tun0"}, {Name: "b", Mode: "tun", Device: "tun1"}}
	cfg := config.Default()
	cfg.Listeners = all[:1]
	s, err := proxy.New(cfg, proxy.Parts{
		Clock: b.clock, Flows: &flow.Manager{}, Dial: b.dial, Log: slog.New(slog.DiscardHandler),
		Open: func(l proxy.ListenerConfig) (proxy.Listener, error) { return ways[l.Name], nil },
	})
	require.NoError(t, err)
	require.ErrorIs(t, ways["a"].early, syscall.EHOSTUNREACH)
	_, _, err = ways["a"].verdict(sent)
	require.NoError(t, err)

	cfg.Listeners = all
	cfg.Rules = []policy.RuleSettings{{Name: "closed", Match: policy.Match{Listeners: []string{"b"}}, Refuse: "no"}}
	_, err = s.Reload(cfg)
	require.NoError(t, err)
	require.ErrorIs(t, ways["b"].early, syscall.EHOSTUNREACH)
	_, _, err = ways["b"].verdict(sent)
	require.ErrorContains(t, err, "rule closed")
	_, _, err = ways["a"].verdict(sent)
	require.NoError(t, err)
}

// The way in has its next mode before the rest of a reload is in force, and greets clients by it.
func TestWhoeverChoosesATargetIsGuardedWhateverModeTheListenerHas(t *testing.T) {
	for target, why := range map[string]proxy.Reason{
		"127.0.0.1:22": proxy.RejectedDenied, "169.254.169.254:80": proxy.RejectedDenied, "": "",
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, nil) // of mode forward
			if target != "" {
				b.listener.asked = netip.MustParseAddrPort(target)
			}
			b.listener.legs <- newFakeLeg(b.clock, 10000, b.capacity)
			synctest.Wait()
			rejected := b.server.Counters().Listeners[0].Rejected
			if why == "" {
				assert.Empty(t, rejected)
			} else {
				assert.EqualValues(t, 1, rejected[why], target)
			}
			b.server.Abort()
			b.end()
		})
	}
}
