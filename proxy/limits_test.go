package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

func TestDescriptorsAreNeverPromisedTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total := rapid.IntRange(16, 1<<20).Draw(t, "total")
		listeners := rapid.SliceOfN(rapid.Custom(anyListener), 0, 6).Draw(t, "listeners")
		asked := 0
		for i := range listeners {
			listeners[i].Name = fmt.Sprint(i)
			asked += sessionBound(listeners[i])
		}
		cfg := config.Config{Listeners: listeners}
		ports := 0
		for _, at := range []*string{&cfg.Telemetry.Address, &cfg.Telemetry.Health} {
			if *at = "off"; rapid.Bool().Draw(t, "is served") {
				*at = "[::]:9464"
				ports++
			}
		}
		if rapid.Bool().Draw(t, "hints by a socket") {
			cfg.Telemetry.Hints.Socket = "hints.sock"
			ports++
		}
		d := divideDescriptors(total, &cfg)
		given := 0
		for name, n := range d.Sessions {
			given += n
			i, err := strconv.Atoi(name)
			require.NoError(t, err)
			assert.LessOrEqual(t, n, sessionBound(listeners[i]), "no more than it asks for")
		}
		assert.Positive(t, d.Connections)
		assert.Positive(t, d.Pipes)
		sum := descriptorsPerConnection*d.Connections + 2*d.Pipes + d.Attempts + d.Lookups + given +
			descriptorsPerListener*len(listeners) + ports*d.Port
		if total >= 128 {
			assert.LessOrEqual(t, sum, total)
		}
		if total >= 1024 {
			assert.GreaterOrEqual(t, total-sum, descriptorHeadroom)
		}
		if total >= 128 {
			assert.Equal(t, asked > 0, given > 0)
		}
		if asked <= total/8 && total >= 1024 {
			assert.Equal(t, asked, given, "there is room for all")
		}
	})
}

func anyListener(t *rapid.T) access.Listener {
	l := access.Listener{Mode: rapid.SampledFrom([]access.Mode{"mixed", "wireguard", "tun", "masque"}).Draw(t, "mode")}
	l.Tunnel.UDPSessions = new(rapid.IntRange(0, 4096).Draw(t, "udp_sessions"))
	l.WireGuard.Peers = make([]access.Peer, rapid.IntRange(0, 40).Draw(t, "peers"))
	return l
}

func TestLimiterCountsBothWays(t *testing.T) {
	l := limiter{global: 3, perSource: 2}
	a, b := &share{max: 2}, &share{}
	for range 2 {
		_, ok := l.admitConnection(a)
		require.True(t, ok)
	}
	reason, ok := l.admitConnection(a)
	assert.False(t, ok)
	assert.Equal(t, RejectedListenerLimit, reason)
	_, ok = l.admitConnection(b)
	require.True(t, ok)
	reason, ok = l.admitConnection(b)
	assert.False(t, ok)
	assert.Equal(t, RejectedGlobalLimit, reason)
	l.releaseConnection(a)
	_, ok = l.admitConnection(b)
	assert.True(t, ok)

	assert.NotNil(t, l.enterSource(hostOf("2001:db8:1:2::1")))
	assert.NotNil(t, l.enterSource(hostOf("2001:db8:1:2::ffff")))
	assert.Nil(t, l.enterSource(hostOf("2001:db8:1:2::1")), "a /64 is one host")
	assert.NotNil(t, l.enterSource(hostOf("2001:db8:1:3::1")))
	assert.NotNil(t, l.enterSource(hostOf("192.0.2.1")))
	assert.NotNil(t, l.enterSource(hostOf("::ffff:192.0.2.1")))
	assert.Nil(t, l.enterSource(hostOf("192.0.2.1")))
	for _, s := range []string{"2001:db8:1:2::1", "2001:db8:1:2::1", "2001:db8:1:3::1", "192.0.2.1", "192.0.2.1"} {
		l.leaveSource(l.sources[hostOf(s)])
	}
	_, sources, _ := l.currentCounts()
	assert.Zero(t, sources, "hosts without connections are forgotten")
}

func hostOf(addr string) source { return source{host: datapath.Host(netip.MustParseAddr(addr))} }

// inTunnel is the way in of a tunnel with one peer, which has a network.
type inTunnel struct{ Listener }

type onePeer struct{ tunnel.Listener }

func (inTunnel) Tunnel() tunnel.Listener { return onePeer{} }

func (onePeer) Peer(inner netip.Addr) string {
	if netip.MustParsePrefix("10.9.0.0/24").Contains(inner) {
		return "site"
	}
	return ""
}

// from is a connection from an address.
type from struct {
	datapath.Conn
	addr string
}

func (f from) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(f.addr)} }

// told is one whose client has told its name.
type told struct {
	from
	name string
}

func (t told) Peer() string { return t.name }

// overQUIC is one over HTTP/3.
type overQUIC struct{ told }

func (q overQUIC) RemoteAddr() net.Addr { return &net.UDPAddr{IP: net.ParseIP(q.addr)} }

func TestAPeerIsOneClientWithAllItsAddresses(t *testing.T) {
	l := &listenerState{openListener: &openListener{Listener: inTunnel{}}, cfg: access.Listener{Name: "vpn"}}
	site := l.sourceOf(from{addr: "10.9.0.2"})
	assert.Equal(t, site, l.sourceOf(from{addr: "10.9.0.3"}))
	assert.Equal(t, site, l.sourceOf(told{from{addr: "192.0.2.1"}, "site"}))
	assert.NotEqual(t, site, l.sourceOf(told{from{addr: "10.9.0.2"}, "phone"}), "at one address with another")
	assert.Equal(t, hostOf("192.0.2.1"), l.sourceOf(from{addr: "192.0.2.1"}))
	assert.Equal(t, hostOf("192.0.2.1"), l.sourceOf(told{from{addr: "192.0.2.1"}, "192.0.2.1"}),
		"whose name is its address")
	assert.Equal(t, hostOf("192.0.2.1"), l.sourceOf(overQUIC{told{from{addr: "192.0.2.1"}, "192.0.2.1"}}), "over UDP")

	var most limiter
	most.applyLimits(config.Config{Limits: config.Limits{PerSource: new(1)}}, nil)
	assert.NotNil(t, most.enterSource(site))
	assert.Nil(t, most.enterSource(l.sourceOf(from{addr: "10.9.0.3"})))
}

func TestOneHostDoesNotTakeEverySlotUnlessItMay(t *testing.T) {
	far, near := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("127.0.0.1")
	for _, row := range []struct {
		name               string
		connections        int
		perSource          *int
		far, near, another int // how many of 50 are let in
	}{
		{"not set", 40, nil, 10, 50, 10},
		{"not set, with little room", 3, nil, 1, 50, 1},
		{"no limit", 40, new(0), 50, 50, 50},
		{"a number", 40, new(7), 7, 7, 7},
	} {
		t.Run(row.name, func(t *testing.T) {
			var l limiter
			l.applyLimits(config.Config{Limits: config.Limits{Connections: row.connections, PerSource: row.perSource}}, nil)
			for addr, want := range map[netip.Addr]int{
				far: row.far, near: row.near,
				netip.IPv6Loopback():               row.near,
				netip.MustParseAddr("2001:db8::1"): row.another,
			} {
				in := 0
				for range 50 {
					if l.enterSource(source{host: datapath.Host(addr)}) != nil {
						in++
					}
				}
				assert.Equal(t, want, in, addr)
			}
		})
	}
	var l limiter
	l.applyLimits(config.Config{}, nil)
	assert.Equal(t, max(1, DescriptorBudget(&config.Config{}).Connections/4), l.perSource,
		"of what descriptors have room for")
}

func TestLoopGuard(t *testing.T) {
	ap := netip.MustParseAddrPort
	g := newLoopGuard(func(a netip.Addr) (bool, error) { return a == netip.MustParseAddr("192.0.2.1"), nil }, nil)
	g.setListeners([]netip.AddrPort{ap("[::]:7000"), ap("192.0.2.1:1080")})
	for _, row := range []struct {
		target string
		loop   bool
	}{
		{"192.0.2.1:7000", true},
		{"127.0.0.1:7000", true},
		{"[::1]:7000", true},
		{"0.0.0.0:7000", true},
		{"192.0.2.1:1080", true},
		{"127.0.0.1:1080", false}, // another service may be there
		{"192.0.2.1:22", false},   // other services of this machine are fine
		{"203.0.113.5:7000", false},
		{"203.0.113.5:443", false},
	} {
		assert.Equal(t, row.loop, g.checkTarget(ap(row.target)) != nil, row.target)
	}
	g.local = func(netip.Addr) (bool, error) { return false, errors.New("no netlink") }
	assert.Error(t, g.checkTarget(ap("203.0.113.5:7000")), "when in doubt, no loop")
}

func TestLoopGuardKnowsItsOwnConnections(t *testing.T) {
	ap := netip.MustParseAddrPort
	now := cc.Time(0)
	g := newLoopGuard(nil, func() cc.Time { return now })
	s := &Server{env: environment{loops: g}}
	s.SetServicePorts([]uint16{443, 9464})
	leg := wireOf(ap("192.0.2.1:50000"), ap("203.0.113.5:443"))
	other := wireOf(ap("192.0.2.1:50000"), ap("203.0.113.6:443")) // one port may serve two destinations
	require.NoError(t, g.addDialled(leg))
	assert.Error(t, g.addCaptured(leg), "our own connection has come back")
	assert.NoError(t, g.addCaptured(other))
	assert.Error(t, g.addDialled(other), "it was captured before we knew it")
	g.removeCaptured(other)
	g.removeDialled(leg)
	assert.NoError(t, g.addCaptured(leg))
	g.removeCaptured(leg)
	assert.Empty(t, g.captured)
	assert.Empty(t, g.dialling)
	assert.Empty(t, g.ended, "it led to another host, though to a port that is ours, too")

	here := wireOf(ap("127.0.0.1:50000"), ap("127.0.0.1:9464"))
	require.NoError(t, g.addDialled(here))
	g.removeDialled(here)
	isDialled := func() bool { return s.IsDialled(ap("127.0.0.1:50000"), ap("127.0.0.1:9464")) }
	assert.True(t, isDialled(), "what it brought may be read after its end")
	assert.NoError(t, g.addCaptured(here), "it has come to its end all the same")
	g.removeCaptured(here)
	for i := range 4 {
		now = now.Add(keepEnded / 2)
		assert.Equal(t, i < 3, isDialled(), "after %v", now)
	}
	require.NoError(t, g.addDialled(here))
	g.removeDialled(here)
	now = now.Add(2 * keepEnded)
	assert.False(t, isDialled(), "nothing ended in between")
}
