package proxy_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	wgnetstack "golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/wgclient"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// phone is a WireGuard client with a stack of its own, as an app has it.
type phone struct {
	name            string
	private, public access.Key
	inner           netip.Addr
	net             *wgnetstack.Net
}

func newPhone(tb testing.TB, name, inner string) *phone {
	tb.Helper()
	private, err := access.GenerateKey()
	require.NoError(tb, err)
	public, err := private.Public()
	require.NoError(tb, err)
	return &phone{name: name, private: private, public: public, inner: netip.MustParseAddr(inner)}
}

// peer is what the gateway is told of it.
func (p *phone) peer() access.Peer {
	return access.Peer{
		Name: p.name, PublicKey: p.public,
		AllowedIPs: []netip.Prefix{netip.PrefixFrom(p.inner, p.inner.BitLen())},
	}
}

// connect brings the tunnel to the gateway up.
func (p *phone) connect(g *gateway) {
	g.tb.Helper()
	p.net = wgclient.Client{
		PrivateKey: p.private, ServerKey: g.public,
		Endpoint:  fmt.Sprintf("127.0.0.1:%d", g.proxy.Addrs()["vpn"].(*net.UDPAddr).Port),
		Addresses: []netip.Addr{p.inner}, MTU: 1420,
	}.Open(g.tb)
}

func (p *phone) dial(t testing.TB, to string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return p.net.DialContextTCPAddrPort(ctx, netip.MustParseAddrPort(to))
}

// gateway is a proxy whose first listener is a WireGuard endpoint.
type gateway struct {
	*rig
	public access.Key
}

func newGateway(tb testing.TB, change func(*config.Config), phones ...*phone) *gateway {
	tb.Helper()
	private, err := access.GenerateKey()
	require.NoError(tb, err)
	public, err := private.Public()
	require.NoError(tb, err)
	return &gateway{public: public, rig: newRig(tb, func(c *config.Config) {
		l := access.Listener{Name: "vpn", Mode: "wireguard", Address: ":0", Allow: ownAddresses(tb)}
		l.WireGuard.PrivateKey = private
		for _, p := range phones {
			l.WireGuard.Peers = append(l.WireGuard.Peers, p.peer())
		}
		c.Listeners = []access.Listener{l}
		if change != nil {
			change(c)
		}
		require.NoError(tb, c.Validate())
	})}
}

// peers is the gateway's configuration with those peers.
func (g *gateway) peers(phones ...*phone) func(*config.Config) {
	return func(c *config.Config) {
		l := c.Listeners[0]
		l.WireGuard.Peers = nil
		for _, p := range phones {
			l.WireGuard.Peers = append(l.WireGuard.Peers, p.peer())
		}
		c.Listeners = []access.Listener{l}
	}
}

// pair opens a connection to backend; both ends are closed with the test.
func (p *phone) pair(t testing.TB, backend *net.TCPListener) (client, server net.Conn) {
	t.Helper()
	client, err := p.dial(t, backend.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	server, err = backend.AcceptTCP()
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Close() })
	return client, server
}

// download fetches a page through the tunnel and returns its hash.
func (p *phone) download(t testing.TB, url string) [32]byte {
	t.Helper()
	transport := &http.Transport{DialContext: p.net.DialContext, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: patience}
	resp, err := client.Get(url)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return sha256.Sum256(body)
}

// ownAddresses are where listenHere listens.
func ownAddresses(tb testing.TB) (out []netip.Prefix) {
	tb.Helper()
	addrs, err := net.InterfaceAddrs()
	require.NoError(tb, err)
	for _, a := range addrs {
		addr, ok := netip.AddrFromSlice(a.(*net.IPNet).IP)
		require.True(tb, ok)
		out = append(out, netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()))
	}
	return out
}

// listenHere listens on an address of this machine that is not a loopback one,
// which no packet out of a tunnel may be for. The traffic stays on the machine.
func listenHere(tb testing.TB) *net.TCPListener {
	tb.Helper()
	addrs, err := net.InterfaceAddrs()
	require.NoError(tb, err)
	for _, a := range addrs {
		ip := a.(*net.IPNet).IP.To4()
		if ip == nil || !ip.IsGlobalUnicast() {
			continue
		}
		ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: ip})
		require.NoError(tb, err)
		tb.Cleanup(func() { _ = ln.Close() })
		return ln
	}
	tb.Skip("needs an IPv4 address besides the loopback ones, to stand for a server")
	return nil
}

func website(tb testing.TB, content []byte) *httptest.Server {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "file", time.Time{}, bytes.NewReader(content))
	}))
	s.Listener.Close() //nolint:errcheck // another takes its place
	s.Listener = listenHere(tb)
	s.Start()
	tb.Cleanup(s.Close)
	return s
}

func TestAPhoneDownloadsThroughTheTunnel(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) { c.Defaults.Algorithm = "copa" }, p)
	p.connect(g)
	file := random(3, 8<<20)
	assert.Equal(t, sha256.Sum256(file), p.download(t, website(t, file).URL))

	require.Eventually(t, func() bool { return g.proxy.Counters().Active == 0 }, patience, time.Millisecond)
	routes := g.proxy.Counters().Routes
	require.Len(t, routes, 1)
	assert.Equal(t, "vpn", routes[0].Listener)
	assert.GreaterOrEqual(t, int(routes[0].Down.Written), len(file))
	tunnels := g.proxy.Tunnels()
	require.Len(t, tunnels, 1)
	assert.Equal(t, "wireguard", tunnels[0].Mode)
	assert.Greater(t, tunnels[0].Sent, uint64(len(file)))
	assert.NotZero(t, tunnels[0].Received)
	require.Len(t, tunnels[0].Peers, 1)
	assert.Equal(t, "phone", tunnels[0].Peers[0].Name)
	assert.False(t, tunnels[0].Peers[0].Handshake.IsZero())
	assert.Equal(t, []proxy.PeerCounters{{
		Listener: "vpn", Peer: "phone", Opened: 1,
		Retransmitted: routes[0].Down.Retransmitted,
	}},
		g.proxy.Counters().Peers)
}

func TestAnUploadOutOfATunnelIsHeld(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) { c.Defaults.Up.Receive = "penstock" }, p)
	p.connect(g)
	backend := listenHere(t)
	c, server := p.pair(t, backend)
	file := random(4, 8<<20)
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(file)
		sent <- err
	}()
	require.NoError(t, server.SetReadDeadline(time.Now().Add(patience)))
	got := make([]byte, len(file))
	_, err := io.ReadFull(server, got)
	require.NoError(t, err)
	require.NoError(t, <-sent)
	assert.Equal(t, sha256.Sum256(file), sha256.Sum256(got))

	flows := flowsOf(g.proxy)
	require.Len(t, flows, 1)
	held := flows[0].Up.Receive
	assert.True(t, held.Held, held.Why)
	assert.Equal(t, "from down|vpn|through phone", held.Flow.Group)
	assert.Greater(t, int(held.Flow.Delivered), len(file)/2)
	assert.Positive(t, held.Flow.MinRTT)
}

func TestConnectionsOutOfATunnelShareTheWindowOfTheirPeer(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) { c.Defaults.Algorithm = "cubic" }, p)
	p.connect(g)
	backend := listenHere(t)
	for range 2 {
		const much = 100_000 // more than goes without an algorithm
		c, server := p.pair(t, backend)
		send(t, server, string(random(1, much)))
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		_, err := io.ReadFull(c, make([]byte, much))
		require.NoError(t, err)
	}
	flows := flowsOf(g.proxy)
	require.Len(t, flows, 2)
	peers := g.proxy.Counters().Peers
	require.Len(t, peers, 1)
	assert.Equal(t, 2, peers[0].Active)
	for _, f := range flows {
		assert.Equal(t, "phone", f.Peer)
		assert.Equal(t, "down|vpn|through phone", f.Down.Flow.Group)
		assert.Equal(t, 2, f.Down.Flow.Members)
		assert.Equal(t, "up|vpn|to "+backend.Addr().(*net.TCPAddr).IP.String(), f.Up.Flow.Group)
		assert.Equal(t, "netstack", f.Client.Tier)
		assert.Equal(t, "kernel", f.Server.Tier)
	}
}

func TestWhatAPeerMayNotReachIsRefusedWithAReset(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, nil, p)
	p.connect(g)
	_, err := p.dial(t, "169.254.169.254:80")
	assert.ErrorContains(t, err, "refused")
	require.Eventually(t, g.rejected(proxy.RejectedDenied), patience, time.Millisecond)
}

func TestPeersAreAddedAndRemovedByReload(t *testing.T) {
	phone, tablet := newPhone(t, "phone", "10.9.0.2"), newPhone(t, "tablet", "10.9.0.3")
	g := newGateway(t, nil, phone)
	page := website(t, []byte("hello"))
	phone.connect(g)
	phone.download(t, page.URL)
	backend := listenHere(t)
	client, server := phone.pair(t, backend)
	handshake := g.proxy.Tunnels()[0].Peers[0].Handshake

	// One that contradicts itself changes nothing.
	twin := newPhone(t, "twin", "10.9.0.2")
	_, err := g.proxy.Reload(g.with(g.peers(phone, twin)))
	require.ErrorContains(t, err, "both have 10.9.0.2/32")
	require.Len(t, g.proxy.Tunnels()[0].Peers, 1)

	g.reload(g.peers(phone, tablet))
	tablet.connect(g)
	tablet.download(t, page.URL)
	send(t, server, "still here")
	require.NoError(t, client.SetReadDeadline(time.Now().Add(patience)))
	_, err = io.ReadFull(client, make([]byte, len("still here")))
	require.NoError(t, err)
	assert.Equal(t, handshake, g.proxy.Tunnels()[0].Peers[0].Handshake, "the phone's session goes on")

	_, far := tablet.pair(t, backend)
	require.Eventually(t, func() bool { return flowsOf(g.proxy)[1].State == proxy.StateOpen }, patience, time.Millisecond)
	done := g.reload(g.peers(phone))
	assert.Equal(t, 1, done.Revoked)
	_, err = far.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset", "the connections of a peer that is gone end at once")
	require.Eventually(t, func() bool { // the line comes last
		return strings.Contains(g.logs.String(), "closed_by=proxy reason=revoked")
	}, patience, time.Millisecond)
	assert.Len(t, flowsOf(g.proxy), 1)
	peers := g.proxy.Counters().Peers
	require.Len(t, peers, 1, "nor is it counted any more")
	assert.Equal(t, "phone", peers[0].Peer)
	send(t, server, "still here")
	hears(t, client, "still here")
	require.Len(t, g.proxy.Tunnels()[0].Peers, 1)
	assert.Equal(t, "phone", g.proxy.Tunnels()[0].Peers[0].Name)
}

// A machine behind a TUN device: a network namespace of its own, whose only way
// out is the device.
func TestWhatIsRoutedIntoATUNDeviceGoesThroughTheProxy(t *testing.T) {
	if os.Geteuid() != 0 {
		need.Namespaces(t, os.ErrPermission)
	}
	need.TUN(t)
	file := random(4, 1<<20)
	page, own := website(t, file), ownAddresses(t)
	result := make(chan [32]byte, 1)
	go func() {
		defer close(result)
		runtime.LockOSThread() // and never unlocked: the thread ends with its namespace
		if !assert.NoError(t, unix.Unshare(unix.CLONE_NEWNET)) {
			return
		}
		r := newRig(t, func(c *config.Config) { // what it dials, it dials from outside
			c.Listeners = []access.Listener{{Name: "tun", Mode: "tun", Device: "penstock0", Allow: own}}
			assert.NoError(t, c.Validate())
		})
		if !assert.NoError(t, routeInto("penstock0")) {
			return
		}
		assert.Equal(t, "penstock0", r.proxy.Addrs()["tun"].String())
		body, err := fetchHere(page.Listener.Addr().(*net.TCPAddr))
		if assert.NoError(t, err) {
			_, content, _ := bytes.Cut(body, []byte("\r\n\r\n"))
			result <- sha256.Sum256(content)
		}
	}()
	assert.Equal(t, sha256.Sum256(file), <-result)
}

// routeInto sets the device up as the only way out of this namespace.
func routeInto(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{
		IP:   net.IPv4(10, 8, 0, 2),
		Mask: net.CIDRMask(24, 32),
	}}); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{
		LinkIndex: link.Attrs().Index,
		Dst:       &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)},
	})
}

// fetchHere asks for a page from the calling thread's namespace, which Go's own
// dialer might leave.
func fetchHere(at *net.TCPAddr) ([]byte, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "client")
	defer file.Close() //nolint:errcheck // read to its end
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: at.Port, Addr: [4]byte(at.IP.To4())}); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if _, err := file.WriteString("GET / HTTP/1.0\r\n\r\n"); err != nil {
		return nil, err
	}
	return io.ReadAll(file)
}
