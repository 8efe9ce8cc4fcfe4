package userspace

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// watch is a log that looks at an outside's health whenever that has changed.
type watch struct {
	slog.Handler
	of   atomic.Pointer[tunnel.Condition]
	seen chan error
}

func newWatch() *watch { return &watch{Handler: slog.DiscardHandler, seen: make(chan error, 2)} }

func (w *watch) Enabled(context.Context, slog.Level) bool { return true }
func (w *watch) WithAttrs([]slog.Attr) slog.Handler       { return w }
func (w *watch) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "tunnel: nothing gets through") || r.Message == "tunnel: open again" {
		w.seen <- w.of.Load().Health()
	}
	return nil
}

// recovers waits until the outside has failed, with words about what, and works again.
func (w *watch) recovers(t *testing.T, what string) {
	t.Helper()
	next := func() error {
		select {
		case err := <-w.seen:
			return err
		case <-time.After(soon): //nolint:forbidigo // only a hang reaches it
			require.Fail(t, "the outside's health does not change")
			return nil
		}
	}
	require.ErrorContains(t, next(), what)
	require.NoError(t, next())
}

func TestADeviceThatGoesIsMadeAgain(t *testing.T) {
	needNamespace(t)
	need.TUN(t)
	stack, err := netstack.New(netstack.Config{MTU: mtu, Clock: testClock()})
	require.NoError(t, err)
	health := newWatch()
	dev, err := OpenTUN(TUNConfig{Name: "tun", Device: "tunnel0", MTU: mtu, Log: slog.New(health)}, stack)
	require.NoError(t, err)
	health.of.Store(&dev.Condition)
	l := Listen("tun", stack, dev)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	for range 2 {
		require.NoError(t, l.Health())
		link, err := netlink.LinkByName("tunnel0")
		require.NoError(t, err)
		require.NoError(t, netlink.LinkDel(link))
		health.recovers(t, `TUN device "tunnel0" has gone`)
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
	sockets, health := &frail{Bind: conn.NewDefaultBind()}, newWatch()
	w, err := ListenWireGuard(WireGuardConfig{
		Name: "vpn", PrivateKey: private, MTU: mtu, bind: sockets, Log: slog.New(health),
		Peers: []access.Peer{{
			Name: "phone", PublicKey: phonePublic,
			AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)},
		}},
	}, stack)
	require.NoError(t, err)
	health.of.Store(&w.Condition)
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
	health.recovers(t, "had enough")
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
	health := newWatch()
	m, l := masque(t, func(c *MASQUEConfig) { c.Log = slog.New(health) })
	health.of.Store(&m.Condition)
	accepted := echoing(t, l)
	at := m.Addr()
	for range 2 {
		require.NoError(t, m.currentServer().udp.Close())
		health.recovers(t, "failed")
		assert.Equal(t, at.String(), m.Addr().String())
		s := dialMASQUE(t, m).mustStream("203.0.113.7:443")
		<-accepted
		exchange(t, s, []byte("hello"))
	}
}
