//go:build linux

package cost

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

// forwardEnv makes this test binary the end of a WireGuard tunnel that leaves
// the rest to the kernel's routes: "our private key, the client's public one".
const forwardEnv = "PENSTOCK_COST_FORWARD"

const (
	gatewayPort = 51820
	tunDevice   = "penstock0"
	tunnelMTU   = 1420
	wgDevice    = "wgcost"
	masqueToken = "a-token-of-a-phone-s-own"
)

var (
	insideEdge   = netip.MustParsePrefix("10.9.0.1/24")
	insideClient = netip.MustParsePrefix("10.9.0.2/32")
)

// BenchmarkTunnels downloads and uploads through a tunnel that ends at the edge: in
// wireguard-go, which forwards packets, and in Penstock, which ends connections.
// The client's end is wireguard-go or connect-ip-go in this process, whose time is
// not the gateway's. What uploads are received by has no algorithm.
//
//	go test -run '^$' -bench Tunnels/down/16flows -benchtime 1x -timeout 1h ./test/cost
func BenchmarkTunnels(b *testing.B) {
	executable := build(b)
	keys := newKeys(b)
	gateways := []gateway{
		{name: "wireguard-go"},
		{name: "wireguard-none", listener: keys.listener(), algorithm: "none"},
		{name: "wireguard", listener: keys.listener(), algorithm: cc.Default},
		{name: "kernel", listener: keys.inKernel(), algorithm: cc.Default}, // wireguard-go in place of the kernel's
		{name: "tun", listener: "{name: bench, mode: tun, device: " + tunDevice + "}", algorithm: cc.Default},
		{name: "masque", listener: masqueListener(b), algorithm: cc.Default},
	}
	for _, way := range []struct {
		name  string
		start direction
	}{{"down", startDownload}, {"up", startUpload}} {
		for _, flows := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/%dflows", way.name, flows), func(b *testing.B) {
				compareInTurns(b, gateways, []string{"Gbit/s", "CPU-s/GB", "both-ends-CPU-s/GB"}, func(g gateway) figures {
					return throughTunnel(b, executable, way.start, flows, g, keys)
				})
			})
		}
	}
}

// gateway is what ends the tunnel: Penstock with a listener, or without one what
// only forwards.
type gateway struct{ name, listener, algorithm string }

func (g gateway) label() string { return g.name }

func (g gateway) isPeer() bool { return g.listener == "" }

// throughTunnel carries the load once.
func throughTunnel(b *testing.B, executable string, start direction, flows int, g gateway, keys keys) figures {
	const warmUp, measure = 2 * time.Second, 4 * time.Second
	lab, err := netlab.NewRouted()
	require.NoError(b, err)
	defer func() { require.NoError(b, lab.Close()) }()
	edge := startGateway(b, lab, executable, g, keys)
	defer edge.stop(b)
	through := []netip.Prefix{netip.PrefixFrom(lab.ServerAddr.V4, 24)}
	switch {
	case strings.Contains(g.listener, tunDevice):
		require.NoError(b, lab.Edge.Do(routeIntoDevice))
	case strings.Contains(g.listener, masqueToken):
		phone, err := lab.Client.MASQUE(netlab.MASQUEConfig{
			Device: "masque0", MTU: access.MASQUEMTU, Gateway: netip.AddrPortFrom(lab.EdgeNear.V4,
				gatewayPort), Token: masqueToken, Through: through,
		})
		require.NoError(b, err)
		defer phone.Close()
	default:
		phone, err := lab.Client.WireGuard(netlab.WireGuardConfig{
			Device: "wg0", Addrs: []netip.Prefix{insideClient}, MTU: tunnelMTU, PrivateKey: keys.client,
			Peers: []netlab.WireGuardPeer{{
				PublicKey: keys.edgePublic, Endpoint: netip.AddrPortFrom(lab.EdgeNear.V4, gatewayPort),
				Allowed: through,
			}},
		})
		require.NoError(b, err)
		defer phone.Close()
	}
	var got atomic.Int64
	defer start(b, lab, flows, &got)()

	time.Sleep(warmUp)
	if g.listener != "" {
		edge.profile(b, g.name, measure)
	}
	ends := cpuTime(b, os.Getpid())
	foreign, before, cpuBefore, at := edge.foreignTime(b), got.Load(), edge.cpuTime(b), time.Now()
	time.Sleep(measure)
	u := usage{bytes: got.Load() - before, cpu: edge.cpuTime(b) - cpuBefore, wall: time.Since(at)}
	ends = cpuTime(b, os.Getpid()) - ends
	foreign = edge.foreignTime(b) - foreign
	return figures{
		"Gbit/s": u.mbps() / 1e3, "CPU-s/GB": u.perGB(),
		"both-ends-CPU-s/GB": usage{bytes: u.bytes, cpu: ends}.perGB(),
		"foreign-CPU-%":      100 * foreign.Seconds() / u.wall.Seconds(),
		"idle-CPU-%":         100 * (float64(runtime.NumCPU()) - (u.cpu+ends+foreign).Seconds()/u.wall.Seconds()),
	}
}

// direction has so many connections between the client and the server carry what they
// can, and counts what arrives, until end.
type direction func(b *testing.B, lab *netlab.Routed, flows int, got *atomic.Int64) (end func())

func startDownload(b *testing.B, lab *netlab.Routed, flows int, got *atomic.Int64) (end func()) {
	from := startSource(b, lab, 0)
	to := startSink(b, lab, flows, netip.AddrPortFrom(lab.ServerAddr.V4, serverPort), got)
	return func() {
		to.close()
		_ = from.Close()
	}
}

func startUpload(b *testing.B, lab *netlab.Routed, flows int, got *atomic.Int64) (end func()) {
	to := startServer(b, lab, func(conn *net.TCPConn) { receive(conn, pieceOf(flows), got) })
	from := startClients(b, lab, flows, netip.AddrPortFrom(lab.ServerAddr.V4, serverPort),
		func(conn *net.TCPConn) { send(conn, 0) })
	return func() {
		from.close()
		_ = to.Close()
	}
}

// keys are both ends' private ones, and what is public of them.
type keys struct{ edge, client, edgePublic, clientPublic access.Key }

func newKeys(b *testing.B) (k keys) {
	for private, public := range map[*access.Key]*access.Key{&k.edge: &k.edgePublic, &k.client: &k.clientPublic} {
		var err error
		*private, err = access.GenerateKey()
		require.NoError(b, err)
		*public, err = private.Public()
		require.NoError(b, err)
	}
	return k
}

func (k keys) listener() string {
	return fmt.Sprintf("{name: bench, mode: wireguard, address: \":%d\", wireguard: {private_key: %q, peers: "+
		"[{name: phone, public_key: %q, allowed_ips: [%q]}]}}",
		gatewayPort, k.edge, k.clientPublic, insideClient)
}

// inKernel is a listener that has an interface there is end the tunnel.
func (k keys) inKernel() string {
	return strings.Replace(k.listener(), "wireguard: {",
		fmt.Sprintf("device: %s, wireguard: {datapath: kernel, pool: [%v], ",
			wgDevice, insideEdge.Masked()), 1)
}

func masqueListener(b *testing.B) string {
	certificate, key := certs.PEM(certs.SelfSigned("vpn.test"))
	return fmt.Sprintf("{name: bench, mode: masque, address: \":%d\", tls: {certificate: %q, key: %q}, masque: "+
		"{pool: [10.10.0.0/24], tokens: [{name: phone, token: %s}]}}",
		gatewayPort, certificate, key, masqueToken)
}

func startGateway(b *testing.B, lab *netlab.Routed, executable string, g gateway, keys keys) *program {
	p := &program{edge: lab.Edge}
	if strings.Contains(g.listener, wgDevice) {
		p.end = startGateway(b, lab, executable, gateway{}, keys)
	}
	if g.listener == "" {
		self, err := os.Executable()
		require.NoError(b, err)
		p.cmd = lab.Edge.Command(context.Background(), self)
		p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%x %x", forwardEnv, keys.edge[:], keys.clientPublic[:]))
		ready, err := p.cmd.StdoutPipe()
		require.NoError(b, err)
		require.NoError(b, p.cmd.Start())
		_, err = ready.Read(make([]byte, 1))
		require.NoError(b, err)
		b.Cleanup(func() { _ = os.Remove("/var/run/wireguard/" + wgDevice + ".sock") })
		return p
	}
	config := filepath.Join(b.TempDir(), "penstock.yaml")
	require.NoError(b, os.WriteFile(config, fmt.Appendf(nil, `listeners: [%s]
defaults: {algorithm: %q, up: {algorithm: none}}
telemetry: {address: %q}
log: {level: warn, flows: false}
shutdown: {drain: 1ms}
`, g.listener, g.algorithm, telemetryAddr), 0o600))
	p.cmd = lab.Edge.Command(context.Background(), executable, "run", "--pprof", "--config", config)
	p.cmd.Stderr = &p.said
	require.NoError(b, p.cmd.Start())
	client := http.Client{Transport: &http.Transport{DialContext: lab.Edge.DialContext, DisableKeepAlives: true}}
	require.Eventually(b, func() bool {
		resp, err := client.Get("http://" + telemetryAddr + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}, 20*time.Second, 20*time.Millisecond, "the gateway is not ready")
	return p
}

// profileEnv names a directory for CPU profiles of Penstock, one for each run.
const profileEnv = "PENSTOCK_COST_PROFILES"

// profile writes down what the program does with its time, if profileEnv is set.
func (p *program) profile(b *testing.B, name string, wall time.Duration) {
	dir := os.Getenv(profileEnv)
	if dir == "" {
		return
	}
	file, err := os.Create(filepath.Join(dir, strings.ReplaceAll(b.Name()+"-"+name, "/", "-")+".pprof"))
	require.NoError(b, err)
	b.Cleanup(func() { _ = file.Close() })
	client := http.Client{Transport: &http.Transport{DialContext: p.edge.DialContext}}
	go func() {
		resp, err := client.Get(fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", telemetryAddr,
			int(wall.Seconds())-1))
		if err == nil {
			_, _ = io.Copy(file, resp.Body) // a profile that is cut short says so
			resp.Body.Close()
		}
	}()
}

// routeIntoDevice has the kernel route into the device what comes from the client.
func routeIntoDevice() error {
	const table = 100
	link, err := netlink.LinkByName(tunDevice)
	if err != nil {
		return err
	}
	_, everything, _ := net.ParseCIDR("0.0.0.0/0")
	rule := netlink.NewRule()
	rule.IifName, rule.Table = netlab.NearDevice, table
	return errors.Join(netlink.LinkSetUp(link),
		netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: everything, Table: table}),
		netlink.RuleAdd(rule))
}

// runForward is wireguard-go alone; it ends with its process.
func runForward(text string) error {
	private, public, _ := strings.Cut(text, " ")
	cfg := netlab.WireGuardConfig{
		Device: wgDevice, Addrs: []netip.Prefix{insideEdge}, MTU: tunnelMTU, Port: gatewayPort,
		Peers: []netlab.WireGuardPeer{{Allowed: []netip.Prefix{insideClient}}},
	}
	_, err := hex.Decode(cfg.PrivateKey[:], []byte(private))
	if err == nil {
		_, err = hex.Decode(cfg.Peers[0].PublicKey[:], []byte(public))
	}
	if err != nil {
		return err
	}
	w, err := netlab.OpenWireGuard(cfg)
	if err != nil {
		return err
	}
	if err := w.Serve(wgDevice); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}
