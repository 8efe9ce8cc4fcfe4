package proxy_test

import (
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// freePort is a UDP port that nothing has.
func freePort(t *testing.T) string {
	t.Helper()
	c, err := net.ListenPacket("udp", ":0")
	require.NoError(t, err)
	require.NoError(t, c.Close())
	return fmt.Sprintf(":%d", c.LocalAddr().(*net.UDPAddr).Port)
}

// newGatewayAt has its tunnel end in this process, at a port that stays the same. What a
// reload leaves out may go on for an hour.
func newGatewayAt(t *testing.T, more []config.Listener, phones ...*phone) *gateway {
	t.Helper()
	g := newGateway(t, func(c *config.Config) {
		c.Listeners[0].Address, c.Listeners[0].WireGuard.Datapath = freePort(t), config.DatapathNetstack
		c.Listeners = append(c.Listeners, more...)
		c.Shutdown.Drain = time.Hour
	}, phones...)
	t.Cleanup(g.proxy.Abort)
	return g
}

func TestATunnelIsReplacedAtItsPortByOneReload(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGatewayAt(t, nil, p)
	p.connect(g)
	backend := listenHere(t)
	client, server := p.pair(t, backend)
	send(t, server, "hello")
	hears(t, client, "hello")

	next := g.cfg.Listeners[0]
	next.Name, next.Tunnel.MTU = "other", 1300
	assert.Equal(t, proxy.Reloaded{Opened: 1, Closing: 1}, g.reload(listeners(next)))
	require.Eventually(t, func() bool { return len(g.names()) == 1 }, patience, time.Millisecond)
	assert.Equal(t, []string{"other"}, g.names())
	send(t, client, "anyone there?")
	require.NoError(t, client.SetReadDeadline(time.Now().Add(patience)))
	_, err := client.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset", "the next one answers in its place")
	client, server = p.pair(t, backend)
	send(t, server, "hello again")
	hears(t, client, "hello again")
}

// What replaces a tunnel is opened and then has to go, since another cannot be.
func TestATunnelGoesOnWhereItIsNotReplacedAfterAll(t *testing.T) {
	_, loaded := masqueFiles(t)
	masque := loaded.Listeners[0]
	masque.Address = freePort(t)
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGatewayAt(t, []config.Listener{masque}, p)
	p.connect(g)
	backend := listenHere(t)
	client, server := p.pair(t, backend)
	for range 3 {
		first, second := g.cfg.Listeners[0], g.cfg.Listeners[0]
		first.Name = "first"
		second.Name, second.Address = "second", masque.Address // where QUIC's socket leaves no room for WireGuard's
		_, err := g.proxy.Reload(g.with(listeners(first, second)))
		require.ErrorIs(t, err, syscall.EADDRINUSE)
		require.ErrorContains(t, err, "listeners[1]")
		require.ErrorContains(t, err, "leave that out by one reload")
		assert.Equal(t, []string{"vpn", masque.Name}, g.names())
		require.NoError(t, g.proxy.Health())
		send(t, server, "still here")
		hears(t, client, "still here")
		send(t, client, "so am I")
		hears(t, server, "so am I")
	}
	p.pair(t, backend)
}

// What is refused in the midst takes nothing from peers that it would have taken out.
func TestPeersAreShakenHandsWithAfterAReloadThatIsRefused(t *testing.T) {
	other := config.Listener{Name: "other", Mode: "wireguard", Address: freePort(t)}
	private, err := access.GenerateKey()
	require.NoError(t, err)
	other.WireGuard.PrivateKey = private
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGatewayAt(t, []config.Listener{other}, p)
	p.connect(g)
	client, server := p.pair(t, listenHere(t))
	send(t, server, "it is relayed") // while it is not, it is refused like a new one
	hears(t, client, "it is relayed")

	without, another := g.cfg.Listeners[0], g.cfg.Listeners[1]
	without.WireGuard.Peers = nil
	another.Name, another.Device, another.WireGuard.Datapath = "another", "lo", config.DatapathKernel
	_, err = g.proxy.Reload(g.with(listeners(without, another)))
	require.ErrorContains(t, err, "listeners[1]")
	const byItself = 15 * time.Second // the phone would notice: WireGuard's keepalive and rekey timeouts
	shaken := func() bool { return !g.proxy.Tunnels()[0].Peers[0].Handshake.IsZero() }
	require.Eventually(t, shaken, byItself*2/3, time.Millisecond)
	send(t, server, "still here")
	hears(t, client, "still here")
}
