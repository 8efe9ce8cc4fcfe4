package userspace

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// What the peers of a group send outside never exceeds their maximum rate, and all of it
// arrives, in turns.
func TestWhatPeersSendIsHeldToTheMaximumRateOfTheirGroup(t *testing.T) {
	const (
		rate    = 8 * 1000 * 1000 // bit/s: a byte each microsecond
		each    = 40              // datagrams: what waits is gone before CoDel has seen it stand
		payload = 1000
		wire    = payload + 28
		burst   = 32 * wire // a turn of each, and what is sparse at first
	)
	f := newForwarder(t, 100)
	f.up = func(tunnel.Sent) flow.Terms { return flow.Terms{Group: "guests", Algorithm: "none", MaxRate: rate} }
	start := cc.Time(time.Hour)
	f.still.Store(int64(start))
	to := silent(t)
	sources := []netip.AddrPort{netip.MustParseAddrPort("10.9.0.2:1000"), netip.MustParseAddrPort("10.9.0.3:1000")}
	for range each {
		for _, from := range sources {
			f.UDP(from, to, 64, make([]byte, payload))
		}
	}
	require.LessOrEqual(t, f.Stats().SentPackets*wire, uint64(burst), "the rest waits")
	now := start
	require.Eventually(t, func() bool {
		now = now.Add(100 * time.Microsecond)
		f.still.Store(int64(now))
		f.flows.Tick(0, now)
		sent := f.Stats().SentPackets
		assert.LessOrEqual(t, float64(sent)*wire, now.Sub(start).Seconds()*rate/8*1.02+burst)
		return sent == 2*each
	}, soon, 100*time.Microsecond)
	assert.Zero(t, f.Stats().Late+f.Stats().Overflow+f.Stats().Failed)
}

// With the usual group each host has a rate of its own: as many as may be held to are.
func TestThereIsRoomForSoManyMaximumRatesOfAPeer(t *testing.T) {
	f := newForwarder(t, 100)
	f.up = func(s tunnel.Sent) flow.Terms {
		return flow.Terms{Group: s.Target.String(), Algorithm: "none", MaxRate: 1e6}
	}
	f.still.Store(1)
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	from := netip.MustParseAddrPort("10.9.0.2:1000")
	for i := range 2*maxUplinks + 1 { // the first is the last
		f.still.Add(1)
		f.UDP(from, netip.AddrPortFrom(outside4, uint16(20000+i%(2*maxUplinks))), 64, []byte("hello"))
	}
	f.mu.Lock()
	p := f.peers["10.9.0.2"]
	assert.Len(t, p.uplinks, maxUplinks)
	first := f.sessions[origin{AddrPort: from}].remotes[netip.AddrPortFrom(outside4, 20000)]
	assert.False(t, first.evicted)
	assert.Equal(t, first, p.uplinks[rateLimit{first.terms.Group, first.terms.MaxRate}])
	f.mu.Unlock()
	f.still.Add(int64(time.Hour))
	f.endStaleSessions(cc.Time(f.still.Load()))
	assert.Zero(t, f.Stats().Sessions)
	assert.Empty(t, p.uplinks)
	assert.Zero(t, f.queued.Load())
}
