package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.zx2c4.com/wireguard/device"
	wgnetstack "golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/wgclient"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/ingress"
)

const mtu = 1420

func TestMain(m *testing.M) {
	apart()
	need.ResolveLoopbackName()
	os.Exit(need.Run(m))
}

var inner = netip.MustParseAddr("10.9.0.2")

// endpoint starts a tunnel that knows the given peers, on loopback.
func endpoint(t *testing.T, key access.Key, peers ...access.Peer) (*WireGuard, ingress.Listener) {
	start := time.Now() //nolint:forbidigo // the stack under test runs on it
	stack, err := netstack.New(netstack.Config{
		MTU:   mtu,
		Clock: func() cc.Time { return cc.Time(time.Since(start)) + 1 },
	})
	require.NoError(t, err)
	w, err := ListenWireGuard(WireGuardConfig{Name: "vpn", PrivateKey: key, Peers: peers, MTU: mtu}, stack)
	require.NoError(t, err)
	l := Listen("vpn", stack, w)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	return w, l
}

// phone is a stock WireGuard client with a stack of its own.
func phone(t *testing.T, key, server access.Key, at net.Addr) *wgnetstack.Net {
	return wgclient.Client{
		PrivateKey: key, ServerKey: server, Endpoint: loopback(at), Addresses: []netip.Addr{inner}, MTU: mtu,
	}.Open(t)
}

// loopback is how a client on this host reaches a UDP socket.
func loopback(at net.Addr) string { return fmt.Sprintf("127.0.0.1:%d", at.(*net.UDPAddr).Port) }

func keys(t *testing.T) (private, public access.Key) {
	private, err := access.GenerateKey()
	require.NoError(t, err)
	public, err = private.Public()
	require.NoError(t, err)
	return private, public
}

func TestAPeersConnectionGoesWhereItWasMeantTo(t *testing.T) {
	private, public := keys(t)
	phoneKey, phonePublic := keys(t)
	w, l := endpoint(t, private, access.Peer{
		Name: "phone", PublicKey: phonePublic,
		AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)},
	})
	seen := echoing(t, l)
	n := phone(t, phoneKey, public, w.Addr())

	c, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort("203.0.113.7:443"))
	require.NoError(t, err)
	data := randomBytes(3 << 20)
	exchange(t, c, data)

	client := <-seen
	assert.Equal(t, "203.0.113.7:443", client.Target.String())
	assert.Equal(t, inner, client.Source.Addr())
	assert.Equal(t, "phone", client.Peer)
	states, err := w.States()
	require.NoError(t, err)
	require.Len(t, states, 1)
	assert.Equal(t, "phone", states[0].Name)
	assert.Greater(t, states[0].Received, uint64(len(data)))
	assert.False(t, states[0].Handshake.IsZero())
}

func TestARefusedConnectionIsResetBeforeItWasEverOpen(t *testing.T) {
	private, public := keys(t)
	phoneKey, phonePublic := keys(t)
	w, l := endpoint(t, private, access.Peer{
		Name: "phone", PublicKey: phonePublic,
		AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)},
	})
	answering(t, l, errors.New("nobody there"), nil)
	_, err := phone(t, phoneKey, public, w.Addr()).DialContextTCPAddrPort(deadlineOf(t),
		netip.MustParseAddrPort("203.0.113.7:443"))
	assert.ErrorContains(t, err, "refused")
}

func TestWhoHasNoKeyIsRefusedAndCounted(t *testing.T) {
	private, public := keys(t)
	stranger, _ := keys(t)
	w, _ := endpoint(t, private)
	n := phone(t, stranger, public, w.Addr())
	ctx, cancel := context.WithCancel(deadlineOf(t))
	ended := make(chan error, 1)
	go func() {
		_, err := n.DialContextTCPAddrPort(ctx, netip.MustParseAddrPort("203.0.113.7:443"))
		ended <- err
	}()
	require.Eventually(t, func() bool { return w.Refused() > 0 }, soon, 10*time.Millisecond)
	cancel()
	assert.Error(t, <-ended)
}

func TestPeersComeAndGoWhileTheEndpointRuns(t *testing.T) {
	private, public := keys(t)
	phoneKey, phonePublic := keys(t)
	w, l := endpoint(t, private)
	answering(t, l, nil, func(c ingress.Client) { assert.NoError(t, c.Conn.Close()) })
	p := access.Peer{Name: "phone", PublicKey: phonePublic, AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)}}
	require.NoError(t, w.SetPeers([]access.Peer{p}))
	n := phone(t, phoneKey, public, w.Addr())
	c, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort("203.0.113.7:443"))
	require.NoError(t, err)
	require.NoError(t, c.Close())

	p.Name = "tablet"
	require.NoError(t, w.SetPeers([]access.Peer{p}))
	assert.Equal(t, "tablet", w.Peer(inner))
	require.NoError(t, w.SetPeers(nil))
	assert.Empty(t, w.Peers())
	assert.Empty(t, w.Peer(inner))
}

func TestPeersThatContradictEachOtherChangeNothing(t *testing.T) {
	private, _ := keys(t)
	_, one := keys(t)
	_, two := keys(t)
	ips := []netip.Prefix{netip.PrefixFrom(inner, 32)}
	w, _ := endpoint(t, private, access.Peer{Name: "one", PublicKey: one, AllowedIPs: ips})
	for want, peers := range map[string][]access.Peer{
		"both have": {
			{Name: "one", PublicKey: one, AllowedIPs: ips},
			{Name: "two", PublicKey: two, AllowedIPs: ips},
		},
		"the same public key": {
			{Name: "one", PublicKey: one, AllowedIPs: ips},
			{Name: "two", PublicKey: one, AllowedIPs: ips},
		},
		"are called": {
			{Name: "one", PublicKey: one, AllowedIPs: ips},
			{Name: "one", PublicKey: two, AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.9.0.7/32")}},
		},
		"allowed_ips": {{Name: "one", PublicKey: one}},
	} {
		assert.ErrorContains(t, w.SetPeers(peers), want)
		assert.Equal(t, "one", w.Peer(inner))
	}
}

// Whoever is removed while it downloads is told, and is let in no further.
func TestAPeerThatGoesIsSentTheResetsOfItsConnections(t *testing.T) {
	for name, after := range map[string]func(p access.Peer) []access.Peer{
		"removed": func(access.Peer) []access.Peer { return nil },
		"another address": func(p access.Peer) []access.Peer {
			p.AllowedIPs = []netip.Prefix{netip.MustParsePrefix("10.9.0.7/32")}
			return []access.Peer{p}
		},
	} {
		t.Run(name, func(t *testing.T) {
			private, public := keys(t)
			phoneKey, phonePublic := keys(t)
			p := access.Peer{Name: "phone", PublicKey: phonePublic, AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)}}
			w, l := endpoint(t, private, p)
			open := make(chan ingress.Client, 1)
			answering(t, l, nil, func(c ingress.Client) { open <- c })
			n := phone(t, phoneKey, public, w.Addr())
			c, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort("203.0.113.7:443"))
			require.NoError(t, err)
			client := <-open

			require.NoError(t, w.SetPeers(after(p)))
			assert.False(t, client.Current())
			require.NoError(t, client.Conn.(interface{ Reset() error }).Reset()) // as the proxy does
			require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
			_, err = c.Read(make([]byte, 1))
			assert.ErrorContains(t, err, "reset")
			require.Eventually(t, func() bool { return w.leaving.Load() == nil }, soon, 10*time.Millisecond)
			states, err := w.States()
			require.NoError(t, err)
			assert.Len(t, states, len(after(p)))
			stays := len(after(p)) > 0
			assert.Equal(t, stays, w.device.LookupPeer(device.NoisePublicKey(phonePublic)) != nil, "its key")
		})
	}
}

func TestAPeerThatIsLeavingAsksForNothing(t *testing.T) {
	private, _ := keys(t)
	_, phonePublic := keys(t)
	p := access.Peer{Name: "phone", PublicKey: phonePublic, AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)}}
	w, _ := endpoint(t, private, p)
	packet := func(protocol, flags byte) []byte {
		b := make([]byte, ipv4Header+tcpHeader)
		b[0], b[9], b[ipv4Header+12], b[ipv4Header+13] = 0x45, protocol, 5<<4, flags
		copy(b[12:], inner.AsSlice())
		return b
	}
	ack, syn, ping := packet(protocolTCP, 0x10), packet(protocolTCP, 0x02), packet(protocolICMP, 0)
	for _, b := range [][]byte{ack, syn, ping} {
		assert.True(t, w.mayEnter(b))
	}
	require.NoError(t, w.SetPeers(nil))
	assert.True(t, w.mayEnter(ack), "it may answer a reset")
	assert.False(t, w.mayEnter(syn))
	assert.False(t, w.mayEnter(ping))
	states, err := w.States()
	require.NoError(t, err)
	assert.Empty(t, states)
	require.NoError(t, w.SetPeers([]access.Peer{p}))
	assert.True(t, w.mayEnter(syn), "it is back")
	assert.NotNil(t, w.device.LookupPeer(device.NoisePublicKey(phonePublic)))
}
