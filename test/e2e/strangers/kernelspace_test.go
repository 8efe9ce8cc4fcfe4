//go:build linux

package strangers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

// edgeDevice is the interface at the edge, which wireguard-go has made: to us it is as the
// kernel's own.
const (
	edgeDevice = "wgedge"
	inner6     = "fd09::2" // the peer's, beside inner
)

// inKernel are keys and options of a gateway whose tunnel an interface ends, and the file
// of its peers.
func inKernel(t *testing.T, datapath string) (k keys, peers string) {
	t.Helper()
	dir := t.TempDir()
	private, err := access.GenerateKey()
	require.NoError(t, err)
	k.edge, err = private.Public()
	require.NoError(t, err)
	key, err := access.GenerateKey()
	require.NoError(t, err)
	peer, err := key.Public()
	require.NoError(t, err)
	k.own, peers = filepath.Join(dir, "key"), filepath.Join(dir, "peers.conf")
	require.NoError(t, os.WriteFile(k.own, []byte(key.String()), 0o600))
	laptop := fmt.Sprintf("[Peer]\n# Name = laptop\nPublicKey = %s\nAllowedIPs = %s/32, %s/128\n", peer, inner, inner6)
	require.NoError(t, os.WriteFile(peers, []byte(laptop), 0o600))
	more := ""
	if datapath == "kernel" {
		more = ", reachable_from: [10.77.2.0/24]"
	}
	k.Listener = fmt.Sprintf("{name: edge, mode: wireguard, address: \":51820\", device: %s, wireguard: "+
		"{datapath: %s, private_key: %q, peers_file: %q, pool: [10.9.0.0/24, \"fd09::/64\"]%s}}",
		edgeDevice, datapath, private, peers, more)
	return k, peers
}

// has is what the edge's kernel has of ours: the packet filter's tables, policy rules,
// routes, addresses, and the interface's key.
func (s *scene) has() string {
	s.t.Helper()
	var all strings.Builder
	require.NoError(s.t, s.Edge.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := c.ListTables()
		for _, table := range tables {
			fmt.Fprintln(&all, table.Name)
		}
		return err
	}))
	for _, c := range []string{
		"ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all",
		"ip -br addr show dev " + edgeDevice, "wg show " + edgeDevice + " private-key",
	} {
		words := strings.Fields(c)
		out, err := s.Edge.Command(s.t.Context(), words[0], words[1:]...).CombinedOutput()
		require.NoError(s.t, err, "%s: %s", c, out)
		all.Write(out)
	}
	return all.String()
}

// peer is what the gateway tells of a peer.
type peer struct {
	Name      string  `json:"name"`
	Endpoint  string  `json:"endpoint"`
	Handshake float64 `json:"handshake_seconds"`
	Received  uint64  `json:"received_bytes"`
	Sent      uint64  `json:"sent_bytes"`
}

// peers are what the gateway tells of all.
func (s *scene) peers() (all []peer) {
	s.t.Helper()
	page, err := s.proxy.Get(s.t.Context(), "/v1/peers")
	require.NoError(s.t, err)
	require.NoError(s.t, json.Unmarshal(page, &all))
	return all
}

func TestAWireGuardInterfaceEndsTheTunnel(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip", "nginx", "curl")
	k, peers := inKernel(t, "kernel")
	k.Listener += "\n  - {name: camera, mode: forward, address: \":8554\", target: \"10.9.0.2:554\"}"
	k.Listener = strings.Replace(k.Listener, "device:", "allow: [10.77.2.0/24], device:", 1) // rules hold there, too
	k.Config = "rules: [{name: no-ntp, match: {protocol: udp, ports: [123]}, refuse: not through here}, " +
		"{name: no-camera, match: {protocol: tcp, ports: [8554]}, refuse: nor this}]"
	s := lay(t)
	s.wireGuardGo(s.Edge, is, edgeDevice)
	before := s.has()
	s.start(k.Options)
	file := s.file("file", 1, size)
	require.NoError(t, os.MkdirAll(s.dir+"/put", 0o755)) //nolint:gosec // the server's
	s.nginx(is["nginx"])
	s.wireGuard(is, k)
	s.run(nil, is["ip"], "route", "add", "10.9.0.0/24", "dev", device, "src", inner)
	s.run(nil, is["wg"], "set", device, "peer", k.edge.String(),
		"allowed-ips", "10.77.2.0/24,10.9.0.0/24,169.254.0.0/16,::/0")
	s.run(nil, is["ip"], "route", "add", "169.254.169.254/32", "dev", device, "src", inner)
	s.run(nil, is["ip"], "addr", "add", inner6+"/128", "dev", device)
	s.run(nil, is["ip"], "-6", "route", "add", s.ServerAddr.V6.String()+"/128", "dev", device, "src", inner6)

	// TCP goes through the proxy, what is not past it, and nothing to the machine itself.
	at := fmt.Sprintf("http://%v/", s.ServerAddr.V4)
	s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-o", s.dir+"/got", at+"file")
	s.same(file, s.dir+"/got")
	s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-T", file, at+"put/file")
	s.same(file, s.dir+"/put/file")
	s.carried(2)
	s.icmp(s.Client, inner, s.ServerAddr.V4)
	s.icmp(s.Client, inner, netip.MustParseAddr("10.9.0.1"))
	// The server reaches the client, which does not know it is not the gateway that asks.
	require.NoError(t, s.Server.Command(t.Context(), is["ip"], "route", "add", inner, "via", s.EdgeFar.V4.String()).Run())
	s.icmp(s.Server, s.ServerAddr.V4.String(), netip.MustParseAddr(inner))
	require.NoError(t, s.Server.Command(t.Context(), is["ip"], "-6", "route", "add", inner6, "via",
		s.EdgeFar.V6.String()).Run())
	s.prohibited(s.Server, netip.AddrPortFrom(netip.MustParseAddr(inner6), 9), syscall.EACCES)
	s.prohibited(s.Client, netip.AddrPortFrom(s.ServerAddr.V4, 123), syscall.EHOSTUNREACH)
	s.ping(netip.AddrPortFrom(s.ServerAddr.V4, 7)).await(t, 10)
	s.ping(netip.AddrPortFrom(s.ServerAddr.V6, 7)).await(t, 10)
	s.talk(s.Client, s.Server, netip.AddrPortFrom(s.ServerAddr.V6, 554), netip.AddrPortFrom(s.ServerAddr.V6, 554))
	s.talk(s.Server, s.Client, netip.AddrPortFrom(s.EdgeFar.V4, 8554), netip.MustParseAddrPort(inner+":554"))
	s.carried(4)
	_, err := s.Client.Dial("tcp", netip.AddrPortFrom(s.EdgeFar.V4, 8554).String())
	require.ErrorIs(t, err, syscall.EHOSTUNREACH)
	for what, target := range map[string]string{
		"the gateway's own": "http://10.9.0.1:9464/", "its address outside": fmt.Sprintf("http://%v:22/", s.EdgeNear.V4),
		"metadata": "http://169.254.169.254/", "nobody's": "http://10.9.0.77/",
	} {
		out, err := s.Client.Command(t.Context(), is["curl"], "-sS", "-m", "20", "--noproxy", "*", target).CombinedOutput()
		assert.Error(t, err, "%s: %s", what, out)
		assert.NotContains(t, string(out), "timed out", what)
	}

	require.Len(t, s.peers(), 1)
	p := s.peers()[0]
	assert.Equal(t, "laptop", p.Name)
	assert.Contains(t, p.Endpoint, s.ClientAddr.V4.String())
	assert.Positive(t, p.Handshake)
	assert.Greater(t, p.Received, uint64(size))
	assert.Greater(t, p.Sent, uint64(size))

	// Another peer disturbs nobody. One that is removed is gone at once, its connections, too.
	conn, err := s.Client.Dial("tcp", netip.AddrPortFrom(s.ServerAddr.V4, 80).String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	s.reload(peers, string(must(os.ReadFile(peers)))+
		"[Peer]\n# Name = tablet\nPublicKey = "+must(must(access.GenerateKey()).Public()).String()+
		"\nAllowedIPs = 10.9.0.3/32\n")
	require.Len(t, s.peers(), 2)
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = io.WriteString(conn, "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
	require.NoError(t, err)
	_, err = conn.Read(make([]byte, 1))
	require.NoError(t, err)
	s.reload(peers, "")
	require.Eventually(t, func() bool {
		flows, err := s.proxy.Flows(t.Context())
		return err == nil && len(flows) == 0
	}, patience, 10*time.Millisecond)
	left := must(s.Edge.Command(t.Context(), is["wg"], "show", edgeDevice, "peers").Output())
	assert.Empty(t, strings.TrimSpace(string(left)))

	require.NotEqual(t, before, s.has())
	require.NoError(t, s.proxy.Stop())
	assert.Equal(t, before, s.has())
}

// icmp sends an echo request from a node's address, again and again until it is answered.
func (s *scene) icmp(at *netlab.Node, from string, to netip.Addr) {
	s.t.Helper()
	var conn net.PacketConn
	require.NoError(s.t, at.Do(func() (err error) {
		conn, err = net.ListenPacket("ip4:icmp", from)
		return err
	}))
	defer func() { _ = conn.Close() }()
	request := []byte{8, 0, 0xe5, 0xca, 0x12, 0x34, 0, 1} // with its checksum
	require.Eventually(s.t, func() bool {
		if _, err := conn.WriteTo(request, &net.IPAddr{IP: to.AsSlice()}); err != nil {
			return false
		}
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		for b := make([]byte, 100); ; {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return false
			}
			if n == len(request) && b[0] == 0 && from.String() == to.String() {
				return true
			}
		}
	}, patience, time.Millisecond, "%v does not answer", to)
}

// reload has the proxy reread the file of its peers.
func (s *scene) reload(file, peers string) {
	s.t.Helper()
	require.NoError(s.t, os.WriteFile(file, []byte(peers), 0o600))
	refused, err := s.proxy.Reload(s.t.Context())
	require.NoError(s.t, err)
	require.Empty(s.t, refused)
}

// prohibited sends a datagram, which is answered by ICMP: as sockets tell, by why.
func (s *scene) prohibited(at *netlab.Node, to netip.AddrPort, why error) {
	s.t.Helper()
	conn, err := at.Dial("udp", to.String())
	require.NoError(s.t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(s.t, conn.SetReadDeadline(time.Now().Add(patience)))
	_, err = conn.Write([]byte("is anybody there?"))
	require.NoError(s.t, err)
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(s.t, err, why)
}

// talk has one dial to, and another answer at is.
func (s *scene) talk(one, another *netlab.Node, to, is netip.AddrPort) {
	s.t.Helper()
	ln, err := another.Listen("tcp", is.String())
	require.NoError(s.t, err)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		if c, err := ln.Accept(); err == nil {
			_, _ = c.Write([]byte("here"))
			_ = c.Close()
		}
	}()
	conn, err := one.Dial("tcp", to.String())
	require.NoError(s.t, err)
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(patience)))
	said, err := io.ReadAll(conn)
	require.NoError(s.t, err)
	assert.Equal(s.t, "here", string(said))
	_ = conn.Close()
	_ = ln.Close()
	<-answered
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// overAnInterface is a scene whose edge ends WireGuard by an interface, started with args, and a client
// that pings through it. before is what the edge had until it started.
func overAnInterface(t *testing.T, is map[string]string, args ...string) (s *scene, k keys, p *pings, before string) {
	t.Helper()
	k, k.peers = inKernel(t, "kernel")
	k.Args = args
	s = lay(t)
	s.wireGuardGo(s.Edge, is, edgeDevice)
	before = s.has()
	s.start(k.Options)
	s.wireGuard(is, k)
	p = s.ping(netip.AddrPortFrom(s.ServerAddr.V4, 7))
	p.await(t, 10)
	return s, k, p, before
}

func TestAnInterfaceIsShakenHandsWithAtOnceAfterARestart(t *testing.T) {
	s, k, pings, _ := overAnInterface(t, find(t, "wireguard-go", "wg", "ip"),
		"--state-directory", t.TempDir())
	s.restart(k.Options, pings, func() { require.NoError(t, s.proxy.Stop()) })
}

// A crash takes the proxy alone: UDP goes on through the tunnel, new connections go past
// where the proxy was, and the next start takes over what is there.
func TestAnInterfaceCarriesOnAfterACrash(t *testing.T) {
	s, k, pings, _ := overAnInterface(t, find(t, "wireguard-go", "wg", "ip"))
	server := netip.AddrPortFrom(s.ServerAddr.V4, 554)
	s.talk(s.Client, s.Server, server, server)
	s.carried(1)
	s.proxy.Kill()
	pings.await(t, pings.answers.Load()+10)
	s.talk(s.Client, s.Server, server, server)
	s.start(k.Options)
	pings.await(t, pings.answers.Load()+10)
	s.talk(s.Client, s.Server, server, server)
	s.carried(1)
	require.Contains(t, s.has(), "penstock_"+edgeDevice)
	require.NoError(t, s.proxy.Stop())
	left := s.has()
	assert.NotContains(t, left, "penstock_"+edgeDevice)
	assert.NotContains(t, left, "iif "+edgeDevice)
	assert.NotContains(t, left, "10.9.0.1")
}

// The interface is deleted, as by a hand that meant another one, and comes back: peers,
// addresses, routes and capture with it. A connection goes on, and nothing of it has left
// by another way.
func TestAnInterfaceThatIsDeletedIsPutBack(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip")
	s, k, pings, before := overAnInterface(t, is)
	server := netip.AddrPortFrom(s.ServerAddr.V4, 554)
	ln, err := s.Server.Listen("tcp", server.String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	conn, err := s.Client.Dial("tcp", server.String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	far, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = far.Close() })
	say := func(words string) {
		_, err := io.WriteString(far, words)
		require.NoError(t, err)
		got := make([]byte, len(words))
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
		_, err = io.ReadFull(conn, got)
		require.NoError(t, err)
		assert.Equal(t, words, string(got))
	}
	say("before")
	require.NotEmpty(t, s.peers()[0].Endpoint)

	const there = "penstock_tunnel_up{listener=\"edge\"} "
	require.Contains(t, s.metrics(), there+"1")
	require.NoError(t, s.Edge.Command(t.Context(), is["ip"], "link", "del", edgeDevice).Run())
	s.reload(k.peers, string(must(os.ReadFile(k.peers)))+ // before anybody has noticed
		"[Peer]\n# Name = tablet\nPublicKey = "+must(must(access.GenerateKey()).Public()).String()+
		"\nAllowedIPs = 10.9.0.3/32\n")
	require.Eventually(t, func() bool {
		return strings.Contains(s.metrics(), there+"0")
	}, patience, 10*time.Millisecond)
	_, err = s.proxy.Get(t.Context(), "/readyz")
	require.Error(t, err)
	assert.Len(t, s.peers(), 2)
	_, err = io.WriteString(far, "meanwhile")
	require.NoError(t, err)
	if s.Edge.Command(t.Context(), is["ip"], "link", "add", "wgtrial", "type", "wireguard").Run() != nil {
		for _, inside := range []string{inner, inner6} {
			out, err := s.Edge.Command(t.Context(), is["ip"], "route", "get", inside).CombinedOutput()
			assert.Error(t, err, "%s", out)
		}
		require.Eventually(t, func() bool { // the first has ended, and takes no socket away that is the second's
			_, err := os.Stat("/var/run/wireguard/" + edgeDevice + ".sock")
			return errors.Is(err, os.ErrNotExist)
		}, patience, 10*time.Millisecond)
		s.wireGuardGo(s.Edge, is, edgeDevice) // else the kernel's comes by itself
	}
	require.Eventually(t, func() bool {
		_, err := s.proxy.Get(t.Context(), "/readyz")
		return err == nil
	}, 2*patience, 10*time.Millisecond)
	assert.Contains(t, s.metrics(), there+"1")
	pings.await(t, pings.answers.Load()+10)
	got := make([]byte, len("meanwhile"))
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
	_, err = io.ReadFull(conn, got)
	require.NoError(t, err)
	say("and after")
	another := netip.AddrPortFrom(s.ServerAddr.V4, 555)
	s.talk(s.Client, s.Server, another, another)
	s.carried(1) // the first is still open
	require.NoError(t, s.proxy.Stop())
	if s.Edge.Command(t.Context(), is["wg"], "show", edgeDevice).Run() == nil { // wireguard-go's, which stays
		assert.Equal(t, before, s.has())
	}
}

// The table goes with "nft flush ruleset", addresses and routes go as a link is set down.
func TestWhatAnInterfaceHasLostIsPutBack(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip")
	s, _, _, _ := overAnInterface(t, is)
	all := s.has()
	back := func() bool { return s.has() == all }
	require.NoError(t, s.Edge.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		c.FlushRuleset()
		return c.Flush()
	}))
	require.Eventually(t, back, patience, 50*time.Millisecond)
	for _, state := range []string{"down", "up"} {
		require.NoError(t, s.Edge.Command(t.Context(), is["ip"], "link", "set", edgeDevice, state).Run())
	}
	require.False(t, back())
	require.Eventually(t, back, patience, 50*time.Millisecond)
}

// A reload neither moves a tunnel to another interface nor puts another tunnel in its place.
func TestATunnelKeepsItsInterfaceWhileItRuns(t *testing.T) {
	s, k, pings, before := overAnInterface(t, find(t, "wireguard-go", "wg", "ip"))
	running := s.has()
	for _, row := range []struct{ was, is, refusal string }{
		{"name: edge", "name: next", "the tunnel of listener \"edge\" has it"},
		{"device: " + edgeDevice, "device: other0", "device: cannot change"},
	} {
		require.NoError(t, s.proxy.RewriteListener(strings.Replace(k.Listener, row.was, row.is, 1)))
		refused, err := s.proxy.Reload(t.Context())
		require.NoError(t, err)
		assert.Contains(t, refused, row.refusal)
		assert.Equal(t, running, s.has())
		pings.await(t, pings.answers.Load()+10)
	}
	require.NoError(t, s.proxy.Stop())
	assert.Equal(t, before, s.has())
}

// A route that the machine has to addresses which a peer is to get stays, and the reload is refused.
func TestATunnelTakesNoRouteOfTheMachine(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip")
	k, peers := inKernel(t, "kernel")
	s := lay(t)
	s.wireGuardGo(s.Edge, is, edgeDevice)
	const network, network6 = "192.168.50.0/24", "fd50::/64"
	route := func(args ...string) {
		out, err := s.Edge.Command(t.Context(), is["ip"], args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	const measured = "192.168.60.0/24" // with a metric, as DHCP's have
	route("route", "add", network, "via", s.ServerAddr.V4.String())
	route("route", "add", measured, "via", s.ServerAddr.V4.String(), "metric", "100")
	route("-6", "route", "add", network6, "via", s.ServerAddr.V6.String())
	before := s.has()
	s.start(k.Options)
	running := s.has()
	laptop := strings.TrimSpace(string(must(os.ReadFile(peers))))
	for _, taken := range []string{network, measured, network6} {
		require.NoError(t, os.WriteFile(peers, []byte(laptop+", 10.9.5.0/24, "+taken+"\n"), 0o600))
		refused, err := s.proxy.Reload(t.Context())
		require.NoError(t, err)
		assert.Contains(t, refused, taken)
		assert.Equal(t, running, s.has())
	}
	s.reload(peers, laptop+", 10.9.5.0/24, fe80::/64\n") // each link has its own
	assert.Contains(t, s.has(), "10.9.5.0/24 dev "+edgeDevice)
	require.NoError(t, s.proxy.Stop())
	assert.Equal(t, before, s.has())
}

// What a crash has left is ours, although the key has been replaced since.
func TestAnInterfaceThatACrashLeftTakesAnotherKey(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip")
	k, _ := inKernel(t, "kernel")
	s := lay(t)
	s.wireGuardGo(s.Edge, is, edgeDevice)
	require.NoError(t, s.Edge.Command(t.Context(), is["wg"], "set", edgeDevice, "private-key", k.own).Run())
	require.NoError(t, s.Edge.Command(t.Context(), is["ip"], "link", "set", edgeDevice,
		"alias", "made by penstock").Run())
	s.start(k.Options)
	s.wireGuard(is, k)
	s.ping(netip.AddrPortFrom(s.ServerAddr.V4, 7)).await(t, 1)
}

// metrics are the gateway's.
func (s *scene) metrics() string {
	s.t.Helper()
	page, err := s.proxy.Get(s.t.Context(), "/metrics")
	require.NoError(s.t, err)
	return string(page)
}

// Without the module there is no interface, and netstack does the same.
func TestNetstackIsTakenWhereTheKernelHasNoWireGuard(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip")
	k, _ := inKernel(t, "auto")
	s := lay(t)
	if s.Edge.Command(t.Context(), is["ip"], "link", "add", "wgtrial", "type", "wireguard").Run() == nil {
		t.Skip("this kernel has WireGuard")
	}
	insists, _ := inKernel(t, "kernel")
	insists.Executable = labtest.Penstock(t)
	_, err := edge.Start(t.Context(), s.Edge, insists.Options)
	require.ErrorContains(t, err, "modprobe wireguard")
	s.start(k.Options)
	s.wireGuard(is, k)
	s.ping(netip.AddrPortFrom(s.ServerAddr.V4, 7)).await(t, 1)
	assert.Empty(t, must(s.Edge.Command(t.Context(), is["ip"], "link", "show", "type", "wireguard").Output()))
	assert.Equal(t, "laptop", s.peers()[0].Name)
}
