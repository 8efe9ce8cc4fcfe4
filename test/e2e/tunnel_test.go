//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

// tunnelled is what brings the client's packets to a listener that ends a tunnel.
type tunnelled struct {
	privileged bool // the program has to be, too
	open       func(s *scene)
}

var (
	throughWireGuard = &tunnelled{open: func(s *scene) { s.connectPhone(phoneKey) }}
	throughDevice    = &tunnelled{privileged: true, open: (*scene).routeIntoDevice}
)

// The two ends of the tunnel, and the phone's addresses inside it.
var (
	gatewayKey, phoneKey = newKey(), newKey()

	phoneAddrs    = []netip.Prefix{netip.MustParsePrefix("10.9.0.2/32"), netip.MustParsePrefix("fd09::2/128")}
	gatewayConfig = fmt.Sprintf("mode: wireguard\n    address: \":%d\"\n    wireguard: {private_key: %q, peers: "+
		"[{name: "+
		"phone, public_key: %q, allowed_ips: [%q, %q]}]}",
		gatewayPort, gatewayKey, publicKey(phoneKey), phoneAddrs[0], phoneAddrs[1])
)

const (
	gatewayPort = 51820
	phoneDevice = "wg0"
	tunDevice   = "penstock0"
)

func newKey() access.Key {
	k, err := access.GenerateKey()
	if err != nil {
		panic(err) // there is no randomness
	}
	return k
}

func publicKey(private access.Key) access.Key {
	k, err := private.Public()
	if err != nil {
		panic(err) // which no key that was generated is
	}
	return k
}

// connectPhone brings a tunnel up inside the client, and the way to the server
// with it: from then on the client's ordinary sockets use it.
func (s *scene) connectPhone(private access.Key) *netlab.WireGuard {
	need.TUN(s.t)
	s.t.Helper()
	w, err := s.Client.WireGuard(netlab.WireGuardConfig{
		Device: phoneDevice, Addrs: phoneAddrs, MTU: 1420, PrivateKey: private,
		Peers: []netlab.WireGuardPeer{{
			PublicKey: publicKey(gatewayKey), Endpoint: netip.AddrPortFrom(s.EdgeNear.V4, gatewayPort),
			Allowed: []netip.Prefix{
				// the last has nobody
				netip.PrefixFrom(s.ServerAddr.V4, 24), netip.PrefixFrom(s.ServerAddr.V6,
					64), netip.MustParsePrefix("10.99.0.0/16"),
				netip.MustParsePrefix("10.9.0.0/24"), // other peers
			},
		}},
	})
	require.NoError(s.t, err)
	s.t.Cleanup(w.Close)
	return w
}

// routeIntoDevice has the edge's kernel route into the proxy's device whatever
// comes from the client.
func (s *scene) routeIntoDevice() {
	s.t.Helper()
	s.setUpDevice()
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rule := netlink.NewRule()
		rule.Family, rule.IifName, rule.Table = family, netlab.NearDevice, deviceTable
		require.NoError(s.t, s.Edge.Do(func() error { return netlink.RuleAdd(rule) }))
	}
}

const deviceTable = 100

// setUpDevice sets the device up, and the routes that go with it when it goes.
func (s *scene) setUpDevice() {
	s.t.Helper()
	require.NoError(s.t, s.Edge.Do(func() error {
		link, err := netlink.LinkByName(tunDevice)
		if err != nil {
			return err
		}
		err = netlink.LinkSetUp(link)
		for _, everything := range []string{"0.0.0.0/0", "::/0"} {
			_, dst, _ := net.ParseCIDR(everything)
			err = errors.Join(err, netlink.RouteAdd(&netlink.Route{
				LinkIndex: link.Attrs().Index, Dst: dst,
				Table: deviceTable,
			}))
		}
		return err
	}))
}

// TestTransfersThroughATunnelOverACellularLink is what a phone does.
func TestTransfersThroughATunnelOverACellularLink(t *testing.T) {
	trace, err := sim.Generate("lte", 1, time.Minute)
	require.NoError(t, err)
	for _, name := range []string{"wireguard over IPv4", "tun over IPv6", "masque over IPv4"} {
		t.Run(name, func(t *testing.T) {
			w := named(name)
			if w.privileged() {
				needsPrivilege(t)
			}
			s, path := newCellular(t, sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueueBytes: 2_000_000})
			s.start(w.yaml(""))
			s.capture(w)
			path.StartOnData()
			client, server := w.pair(s)
			exchange(t, client, server, 4*megabyte)
		})
	}
}

func TestAHundredConnectionsThroughATunnelShareTheWindowOfTheirPeer(t *testing.T) {
	const flows, size = 100, megabyte / 4
	w := named("wireguard over IPv4")
	s := w.open(t, "defaults: {max_rate: 10gbit}\n") // so that they are in their group at once
	all := make(chan struct{})                       // closed once all connections stand
	wait := w.manyAtOnce(s, flows, size, func(conn net.Conn) {
		seed := make([]byte, 1)
		if _, err := io.ReadFull(conn, seed); err != nil {
			return
		}
		<-all
		_, _ = io.Copy(struct{ io.Writer }{conn}, random(uint64(seed[0]), size))
	}, func(i uint64, conn *net.TCPConn) {
		_, err := conn.Write([]byte{byte(i)})
		assert.NoError(t, err)
	})
	require.Eventually(t, func() bool {
		for _, f := range s.proxy.relaying(flows) {
			assert.Equal(t, "phone", f["peer"])
			control := f["down"].(map[string]any)["control"].(map[string]any)
			assert.Equal(t, "down|way|through phone", control["group"])
			if control["members"] != float64(flows) { // the last of them are still on their way there
				return false
			}
		}
		return true
	}, patience, 50*time.Millisecond)
	close(all)
	wait()
}

// TestATransferGoesOnWhenThePhoneChangesItsNetwork has the phone leave one outer
// address for another in the midst of a transfer, as from Wi-Fi to cellular.
func TestATransferGoesOnWhenThePhoneChangesItsNetwork(t *testing.T) {
	const size = 6 * megabyte
	w := named("wireguard over IPv4")
	s, path := newCellular(t, slow(100))
	s.start(w.yaml(""))
	phone := s.connectPhone(phoneKey)
	path.StartOnData()
	d := w.download(s, 1, size)
	d.reaches(size / 4)
	assert.Contains(t, s.proxy.page("/v1/peers"), s.ClientAddr.V4.String()+":")

	elsewhere := netip.MustParseAddr("10.77.1.200")
	require.NoError(t, s.Client.Do(func() error {
		link, err := netlink.LinkByName(netlab.NearDevice)
		if err != nil {
			return err
		}
		old, err := netlink.AddrList(link, netlink.FAMILY_V4)
		for i := range old {
			err = errors.Join(err, netlink.AddrDel(link, &old[i]))
		}
		return err
	}))
	require.NoError(t, s.Client.Address(netlab.NearDevice, netip.PrefixFrom(elsewhere, 24)))
	require.NoError(t, s.Client.Do(phone.Rebind))
	d.arrives()
	assert.Contains(t, s.proxy.page("/v1/peers"), elsewhere.String()+":")
}

// TestThePhoneComesBackAfterARestartOfTheGateway: WireGuard asks for another
// session 15 s after nothing was answered in the old one.
func TestThePhoneComesBackAfterARestartOfTheGateway(t *testing.T) {
	w := named("wireguard over IPv4")
	s := w.open(t, "")
	client, server := w.pair(s)
	exchange(t, client, server, megabyte)
	s.proxy.stop()
	s.start(w.yaml(""))
	need.Serve(t, s.listen(w.target(s, servicePort)), func(c net.Conn) {
		_, _ = io.Copy(struct{ io.Writer }{c}, random(3, megabyte))
	})
	require.Eventually(t, func() bool {
		d := net.Dialer{Timeout: time.Second}
		conn, err := s.Client.DialWith(t.Context(), &d, "tcp", w.target(s, servicePort).String())
		if err != nil {
			return false
		}
		defer conn.Close()
		assert.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		got, _, err := digest(conn)
		assert.NoError(t, err)
		return assert.Equal(t, digestOf(3, megabyte), got)
	}, 2*patience, 20*time.Millisecond)
}

func TestAWrongKeyIsRefusedAndCounted(t *testing.T) {
	w := named("wireguard over IPv4")
	s := newScene(t)
	p := s.start(w.yaml(""))
	s.connectPhone(newKey())
	s.listen(w.target(s, servicePort))
	d := net.Dialer{Timeout: time.Second}
	_, err := s.Client.DialWith(t.Context(), &d, "tcp", w.target(s, servicePort).String())
	var failed net.Error
	require.ErrorAs(t, err, &failed)
	assert.True(t, failed.Timeout(), "there is no tunnel")
	require.Eventually(t, func() bool { return p.metric("penstock_tunnel_refused_packets_total") > 0 }, patience,
		20*time.Millisecond)
	assert.Zero(t, p.metric("penstock_tunnel_peers_active"))
	assert.Zero(t, p.metric("penstock_flows_total"))
}

func TestAPeerReachesNeitherTheGatewayNorOtherPeers(t *testing.T) {
	w := named("wireguard over IPv4")
	s := w.open(t, "")
	secret, err := s.Edge.Listen("tcp", netip.AddrPortFrom(s.EdgeFar.V4, 8443).String())
	require.NoError(t, err)
	t.Cleanup(func() { secret.Close() })
	for _, target := range []string{
		netip.AddrPortFrom(s.EdgeFar.V4, 8443).String(),
		netip.AddrPortFrom(s.EdgeFar.V6, 8443).String(),
		"10.9.0.3:80",
	} {
		_, err := w.connect(s, netip.MustParseAddrPort(target))
		assert.ErrorIs(t, err, syscall.ECONNREFUSED, target)
	}
	assert.Zero(t, s.proxy.metric("penstock_flows_active"))
}

// TestThePrintedConfigurationBringsAClientUp is of what penstock gateway peer add
// prints, with the clients that read it.
func TestThePrintedConfigurationBringsAClientUp(t *testing.T) {
	for name, up := range map[string]func(s *scene, file string){
		"wireguard-go":           wireguardGo,
		"the kernel's, wg-quick": wgQuick,
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			peers := s.write("") // none yet
			p := s.start(way{config: fmt.Sprintf("mode: wireguard\n    address: \":%d\"\n    wireguard: "+
				"{private_key: %q, "+
				"peers_file: %q, pool: [10.9.0.0/24, \"fd09::/64\"]}",
				gatewayPort, gatewayKey, peers)}.yaml(""))
			add := s.Edge.Command(t.Context(), executable, "gateway", "peer", "add", "laptop", "--config",
				p.cmd.Args[len(p.cmd.Args)-1],
				"--endpoint", s.EdgeNear.V4.String(), "--allowed-ips", "10.77.2.0/24,fd77:2::/64")
			printed, err := add.Output()
			require.NoError(t, err)
			file := filepath.Join(t.TempDir(), phoneDevice+".conf")
			require.NoError(t, os.WriteFile(file, printed, 0o600))
			up(s, file)
			for _, v6 := range []bool{false, true} {
				client, server := way{v6: v6}.pair(s)
				assert.Equal(t, "laptop", p.relaying(1)[0]["peer"])
				exchange(t, client, server, 5*megabyte)
				p.awaitMetric(0, "penstock_flows_active")
			}
		})
	}
}

// wireguardGo brings a client up as an app reads its file.
func wireguardGo(s *scene, file string) {
	s.t.Helper()
	need.TUN(s.t)
	text, err := os.ReadFile(file)
	require.NoError(s.t, err)
	is := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, " = "); ok {
			is[key] = strings.TrimSpace(value)
		}
	}
	prefixes := func(list string) (all []netip.Prefix) {
		for _, p := range strings.Split(list, ", ") {
			all = append(all, netip.MustParsePrefix(p))
		}
		return all
	}
	private, err := access.ParseKey(is["PrivateKey"])
	require.NoError(s.t, err)
	public, err := access.ParseKey(is["PublicKey"])
	require.NoError(s.t, err)
	mtu, err := strconv.Atoi(is["MTU"])
	require.NoError(s.t, err)
	w, err := s.Client.WireGuard(netlab.WireGuardConfig{
		Device: phoneDevice, Addrs: prefixes(is["Address"]), MTU: mtu, PrivateKey: private,
		Peers: []netlab.WireGuardPeer{{
			PublicKey: public, Endpoint: netip.MustParseAddrPort(is["Endpoint"]),
			Allowed: prefixes(is["AllowedIPs"]),
		}},
	})
	require.NoError(s.t, err)
	s.t.Cleanup(w.Close)
}

// wgQuick brings the kernel's client up.
func wgQuick(s *scene, file string) {
	s.t.Helper()
	if err := s.Client.Do(func() error {
		probe := &netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: phoneDevice}}
		return errors.Join(netlink.LinkAdd(probe), netlink.LinkDel(probe))
	}); err != nil {
		s.t.Skipf("needs a kernel with WireGuard (CONFIG_WIREGUARD): %v", err)
	}
	need.Programs(s.t, "wg", "wg-quick")
	out, err := s.Client.Command(s.t.Context(), "wg-quick", "up", file).CombinedOutput()
	require.NoError(s.t, err, string(out))
}
