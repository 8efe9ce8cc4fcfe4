package tunnel

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

// recovers waits until an outside has failed, with words about what, and works again.
func recovers(t *testing.T, o Outside, what string) {
	t.Helper()
	require.Eventually(t, func() bool { return o.Health() != nil }, 10*time.Second, time.Millisecond)
	assert.ErrorContains(t, o.Health(), what)
	require.Eventually(t, func() bool { return o.Health() == nil }, 10*time.Second, time.Millisecond)
}

func TestADeviceThatGoesIsMadeAgain(t *testing.T) {
	needNamespace(t)
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skipf("needs TUN devices: %v", err)
	}
	stack, err := netstack.New(netstack.Config{MTU: mtu, Clock: testClock()})
	require.NoError(t, err)
	dev, err := OpenTUN(TUNConfig{Name: "tun", Device: "tunnel0", MTU: mtu}, stack)
	require.NoError(t, err)
	l := Listen("tun", stack, dev)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	for range 2 {
		require.NoError(t, l.Health())
		link, err := netlink.LinkByName("tunnel0")
		require.NoError(t, err)
		require.NoError(t, netlink.LinkDel(link))
		recovers(t, dev, `TUN device "tunnel0" has gone`)
	}
	_, err = netlink.LinkByName("tunnel0")
	require.NoError(t, err)
}

// frail is WireGuard's own sockets, whose reads fail when they are told to.
type frail struct {
	conn.Bind
	mu   sync.Mutex
	fail chan struct{}
}

var errFrail = errors.New("the socket has had enough")

func (f *frail) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	fns, port, err := f.Bind.Open(port)
	fail := make(chan struct{})
	f.mu.Lock()
	f.fail = fail
	f.mu.Unlock()
	for i, receive := range fns {
		fns[i] = func(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
			n, err := receive(packets, sizes, from)
			select {
			case <-fail:
				return 0, &net.OpError{Op: "read", Net: "udp", Err: errFrail}
			default:
				return n, err
			}
		}
	}
	return fns, port, err
}

func TestAUDPPortThatFailsIsOpenedAgainAndSessionsGoOn(t *testing.T) {
	private, public := keys(t)
	phonePrivate, phonePublic := keys(t)
	stack, err := netstack.New(netstack.Config{MTU: mtu, Clock: testClock()})
	require.NoError(t, err)
	sockets := &frail{Bind: conn.NewDefaultBind()}
	w, err := ListenWireGuard(WireGuardConfig{
		Name: "vpn", PrivateKey: private, MTU: mtu, bind: sockets,
		Peers: []access.Peer{{Name: "phone", PublicKey: phonePublic, AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)}}},
	}, stack)
	require.NoError(t, err)
	at := w.Addr()
	l := Listen("vpn", stack, w)
	accepted := echoing(t, l)
	c, err := phone(t, phonePrivate, public, at).DialTCPAddrPort(netip.MustParseAddrPort("203.0.113.7:443"))
	require.NoError(t, err)
	<-accepted
	before, err := w.States()
	require.NoError(t, err)

	close(sockets.fail)
	_, err = c.Write([]byte("a")) // the sockets hear of it
	require.NoError(t, err)
	recovers(t, w, "had enough")
	assert.Equal(t, at, w.Addr())
	_, err = c.Write([]byte("b"))
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	assert.Equal(t, "ab", string(got))
	require.NoError(t, c.Close())
	after, err := w.States()
	require.NoError(t, err)
	assert.Equal(t, before[0].Handshake, after[0].Handshake)
}

func TestAMASQUESocketThatFailsIsOpenedAgain(t *testing.T) {
	m, l := masque(t, nil)
	accepted := echoing(t, l)
	at := m.Addr()
	for range 2 {
		_, udp := m.serving()
		require.NoError(t, udp.Close())
		recovers(t, m, "failed")
		assert.Equal(t, at.String(), m.Addr().String())
		s := dialMASQUE(t, m).mustStream("203.0.113.7:443")
		<-accepted
		exchange(t, s, []byte("hello"))
	}
}
