package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/proxy/config"
)

func TestDescriptorsAreNeverPromisedTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total := rapid.IntRange(16, 1<<20).Draw(t, "total")
		listeners := rapid.SliceOfN(rapid.Custom(anyListener), 0, 6).Draw(t, "listeners")
		asked := 0
		for i := range listeners {
			listeners[i].Name = fmt.Sprint(i)
			asked += sessions(listeners[i])
		}
		d := divideDescriptors(total, listeners)
		given := 0
		for name, n := range d.Sessions {
			given += n
			i, err := strconv.Atoi(name)
			require.NoError(t, err)
			assert.LessOrEqual(t, n, sessions(listeners[i]), "no more than it asks for")
		}
		assert.Positive(t, d.Connections)
		assert.Positive(t, d.Pipes)
		sum := descriptorsPerConnection*d.Connections + 2*d.Pipes + given + descriptorsPerListener*len(listeners)
		assert.LessOrEqual(t, sum, total)
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

func anyListener(t *rapid.T) config.Listener {
	l := config.Listener{Mode: rapid.SampledFrom([]config.Mode{"mixed", "wireguard", "tun", "masque"}).Draw(t, "mode")}
	l.Tunnel.UDPSessions = new(rapid.IntRange(0, 4096).Draw(t, "udp_sessions"))
	l.WireGuard.Peers = make([]config.Peer, rapid.IntRange(0, 40).Draw(t, "peers"))
	return l
}

func TestLimiterCountsBothWays(t *testing.T) {
	l := limiter{global: 3, perSource: 2}
	a, b := &share{max: 2}, &share{}
	for range 2 {
		_, ok := l.enter(a)
		require.True(t, ok)
	}
	reason, ok := l.enter(a)
	assert.False(t, ok)
	assert.Equal(t, RejectedListenerLimit, reason)
	_, ok = l.enter(b)
	require.True(t, ok)
	reason, ok = l.enter(b)
	assert.False(t, ok)
	assert.Equal(t, RejectedGlobalLimit, reason)
	l.leave(a)
	_, ok = l.enter(b)
	assert.True(t, ok)

	host := netip.MustParseAddr("2001:db8:1:2::1")
	neighbour := netip.MustParseAddr("2001:db8:1:2::ffff")
	assert.True(t, l.enterSource(host))
	assert.True(t, l.enterSource(neighbour))
	assert.False(t, l.enterSource(host), "a /64 is one host")
	assert.True(t, l.enterSource(netip.MustParseAddr("2001:db8:1:3::1")))
	assert.True(t, l.enterSource(netip.MustParseAddr("192.0.2.1")))
	assert.True(t, l.enterSource(netip.MustParseAddr("::ffff:192.0.2.1")))
	assert.False(t, l.enterSource(netip.MustParseAddr("192.0.2.1")))
	for _, s := range []string{"2001:db8:1:2::1", "2001:db8:1:2::1", "2001:db8:1:3::1", "192.0.2.1", "192.0.2.1"} {
		l.leaveSource(netip.MustParseAddr(s))
	}
	_, sources, _ := l.counts()
	assert.Zero(t, sources, "hosts without connections are forgotten")
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
			l.change(config.Config{Limits: config.Limits{Connections: row.connections, PerSource: row.perSource}}, nil)
			for addr, want := range map[netip.Addr]int{
				far: row.far, near: row.near,
				netip.MustParseAddr("2001:db8::1"): row.another,
			} {
				in := 0
				for range 50 {
					if l.enterSource(addr) {
						in++
					}
				}
				assert.Equal(t, want, in, addr)
			}
		})
	}
	var l limiter
	l.change(config.Config{}, nil)
	assert.Equal(t, max(1, DescriptorBudget(nil).Connections/4), l.perSource, "of what descriptors have room for")
}

func TestLoopGuard(t *testing.T) {
	ap := netip.MustParseAddrPort
	g := newLoopGuard()
	g.listen([]netip.AddrPort{ap("[::]:7000"), ap("192.0.2.1:1080")})
	g.local = func(a netip.Addr) (bool, error) { return a == netip.MustParseAddr("192.0.2.1"), nil }
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
		assert.Equal(t, row.loop, g.check(ap(row.target)) != nil, row.target)
	}
	g.local = func(netip.Addr) (bool, error) { return false, errors.New("no netlink") }
	assert.Error(t, g.check(ap("203.0.113.5:7000")), "when in doubt, no loop")
}

func TestLoopGuardKnowsItsOwnConnections(t *testing.T) {
	ap := netip.MustParseAddrPort
	g := newLoopGuard()
	leg := wireOf(ap("192.0.2.1:50000"), ap("203.0.113.5:443"))
	other := wireOf(ap("192.0.2.1:50000"), ap("203.0.113.6:443")) // one port may serve two destinations
	require.NoError(t, g.dialled(leg))
	assert.Error(t, g.capture(leg), "our own connection has come back")
	assert.NoError(t, g.capture(other))
	assert.Error(t, g.dialled(other), "it was captured before we knew it")
	g.released(other)
	g.closed(leg)
	assert.NoError(t, g.capture(leg))
	g.released(leg)
	assert.Empty(t, g.captured)
	assert.Empty(t, g.dialling)
}
