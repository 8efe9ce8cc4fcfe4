//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/capture"
)

// patience bounds every wait; nothing that works needs a tenth of it.
const patience = 30 * time.Second

const (
	telemetryAddr       = "127.0.0.1:9464" // of the edge
	secondTelemetryAddr = "127.0.0.1:9465" // of a second proxy there
	servicePort         = 8080             // of the server
)

// scene is a network with a proxy at its edge.
type scene struct {
	*netlab.Routed
	t          *testing.T
	proxy      *program
	cloneflags uintptr // namespaces that programs get for themselves
}

// newScene builds the network; start adds the proxy.
func newScene(t *testing.T) *scene {
	t.Helper()
	lab, err := netlab.NewRouted()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lab.Close()) })
	return &scene{Routed: lab, t: t}
}

// newCellular builds the network with an emulated link towards the client, whose
// other direction only delays, by as much.
func newCellular(t *testing.T, down sim.LinkConfig) (*scene, *netlab.Path) {
	t.Helper()
	need.OverLink(t)
	need.TUN(t)
	lab, err := netlab.NewCellular(netlab.CellularConfig{Down: down, Up: sim.LinkConfig{Delay: down.Delay}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lab.Close()) })
	return &scene{Routed: lab.Routed, t: t}, lab.Path
}

// program is a running penstock.
type program struct {
	t      *testing.T
	cmd    *netlab.Cmd
	edge   *netlab.Node
	pages  string // where its telemetry is
	said   *need.Output
	ended  chan struct{}
	client *http.Client
}

// start runs the proxy at the edge with a configuration, over the present tier
// unless that names an envelope, and waits until it is ready. command, if given,
// is put in front of the program.
func (s *scene) start(config string, command ...string) *program {
	s.t.Helper()
	command = append(slices.Clone(present.command), command...)
	s.proxy = s.launch(append(command, executable, "run", "--config", s.write(present.configure(config)))...)
	if !strings.Contains(config, "envelope:") {
		present.check(s.proxy)
	}
	return s.proxy
}

// startSecond runs another proxy at the edge, beside the first.
func (s *scene) startSecond(config string) *program {
	s.t.Helper()
	config = strings.ReplaceAll(config, telemetryAddr, secondTelemetryAddr)
	s.proxy = s.launchAt(secondTelemetryAddr, executable, "run", "--config", s.write(present.configure(config)))
	return s.proxy
}

// write puts a configuration, secrets and all, into a file that root and the
// group of the unprivileged tier can read.
func (s *scene) write(config string) string {
	s.t.Helper()
	dir, err := os.MkdirTemp("", "penstock-e2e-")
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(s.t, os.Chmod(dir, 0o755)) //nolint:gosec // read by another user
	path := filepath.Join(dir, "penstock.yaml")
	require.NoError(s.t, os.WriteFile(path, []byte(config), 0o640)) //nolint:gosec // as above
	// which only root can, and only root changes its user
	_ = os.Chown(path, -1, 65534)
	return path
}

// launch runs a command line at the edge and waits until telemetry says ready.
func (s *scene) launch(args ...string) *program {
	s.t.Helper()
	return s.launchAt(telemetryAddr, args...)
}

// launchAt is launch with telemetry elsewhere.
func (s *scene) launchAt(pages string, args ...string) *program {
	s.t.Helper()
	p := &program{t: s.t, edge: s.Edge, pages: pages, said: &need.Output{}, ended: make(chan struct{})}
	p.client = &http.Client{
		Transport: &http.Transport{DialContext: s.Edge.DialContext, DisableKeepAlives: true},
		Timeout:   patience,
	}
	p.cmd = s.Edge.Command(context.Background(), args[0], args[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = p.said, p.said
	p.cmd.Env = append(os.Environ(), "GORACE=halt_on_error=0 exitcode=66")
	p.cmd.SysProcAttr.Cloneflags |= s.cloneflags
	require.NoError(s.t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait() // how it ended is read from ProcessState
		close(p.ended)
	}()
	s.t.Cleanup(p.stop)
	require.Eventually(s.t, func() bool {
		select {
		case <-p.ended:
			s.t.Fatalf("the proxy ended at once:\n%s", p.said)
		default:
		}
		resp, err := p.client.Get("http://" + pages + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}, patience, 20*time.Millisecond, "the proxy is not ready")
	return p
}

// stop ends the program and checks what it left behind.
func (p *program) stop() {
	select {
	case <-p.ended:
		return
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Process.Signal(syscall.SIGINT) // a second signal ends the drain
	p.wait()
	require.NotContains(p.t, p.said.String(), "DATA RACE")
	require.NotContains(p.t, p.said.String(), "panic:")
	if p.t.Failed() {
		p.t.Logf("the proxy said:\n%s", p.said)
	}
}

func (p *program) wait() {
	select {
	case <-p.ended:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		p.t.Errorf("the proxy did not end:\n%s", p.said)
	}
}

// metric sums the samples of a metric whose labels contain all of the given
// "name=\"value\"" pairs.
func (p *program) metric(name string, labels ...string) float64 {
	p.t.Helper()
	sum := 0.0
next:
	for line := range strings.Lines(p.page("/metrics")) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || series != name && !strings.HasPrefix(series, name+"{") {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(series, l) {
				continue next
			}
		}
		v, err := strconv.ParseFloat(value, 64)
		require.NoError(p.t, err)
		sum += v
	}
	return sum
}

// awaitMetric waits until metric gives the value wanted.
func (p *program) awaitMetric(want float64, name string, labels ...string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return p.metric(name, labels...) == want }, patience, 10*time.Millisecond,
		"%s %v is not %v", name, labels, want)
}

// awaitSaid waits until the program's log has a text.
func (p *program) awaitSaid(text string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return strings.Contains(p.said.String(), text) }, patience, time.Millisecond,
		"%q is not said", text)
}

func (p *program) page(path string) string {
	p.t.Helper()
	resp, err := p.client.Get("http://" + p.pages + path)
	require.NoError(p.t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(p.t, err)
	return string(body)
}

// flows reads /flows.
func (p *program) flows() []map[string]any {
	p.t.Helper()
	var page any
	require.NoError(p.t, json.Unmarshal([]byte(p.page("/flows")), &page))
	if m, ok := page.(map[string]any); ok {
		page = m["flows"]
	}
	var flows []map[string]any
	for _, f := range page.([]any) {
		flows = append(flows, f.(map[string]any))
	}
	return flows
}

// relaying waits until there are so many flows, all with both legs, and returns
// them.
func (p *program) relaying(n int) (flows []map[string]any) {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		flows = p.flows()
		return len(flows) == n && !slices.ContainsFunc(flows,
			func(f map[string]any) bool { return f["client_leg"] == nil })
	}, patience, 5*time.Millisecond)
	return flows
}

// announced is what the program said at its start under a key of the datapath's.
func (p *program) announced(key string) string {
	p.t.Helper()
	var said map[string]any
	require.Eventually(p.t, func() bool {
		for line := range strings.Lines(p.said.String()) {
			if said = nil; json.Unmarshal([]byte(line), &said) == nil && said["tier"] != nil {
				return true
			}
		}
		return false
	}, patience, time.Millisecond, "nothing is said about the datapath")
	value, _ := said[key].(string)
	return value
}

// envelope is what managed legs get.
func (p *program) envelope() string { return p.announced("envelope") }

// rss is the program's resident memory in bytes.
func (p *program) rss() int {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	require.NoError(p.t, err)
	_, rest, ok := strings.Cut(string(status), "VmRSS:")
	require.True(p.t, ok)
	kb, err := strconv.Atoi(strings.Fields(rest)[0])
	require.NoError(p.t, err)
	return kb << 10
}

// way is one way from the client through the proxy to a server.
type way struct {
	name   string
	config string // of the listener
	// capture is what brings packets to the listener; nil for explicit ways.
	capture *capture.Rules
	// tunnel is what the client's packets come through; nil: none.
	tunnel *tunnelled
	v6     bool
	// dial connects through the proxy; nil: straight to the target.
	dial func(s *scene, target netip.AddrPort) (net.Conn, error)
	// forwards tells that the listener knows one target only.
	forwards bool
	// sees is the address the server sees: "client" or "edge".
	sees string
}

// envelope is what is below our window towards the client.
func (w way) envelope(p *program) string {
	if w.tunnel != nil {
		return "reno" // the stack's own, over every tier
	}
	return p.envelope()
}

// privileged tells whether the program needs to be root for it.
func (w way) privileged() bool { return w.capture != nil || w.tunnel != nil && w.tunnel.privileged }

// port is where a scene's proxy listens, and secondPort where a second one does.
const (
	port       = 7000
	secondPort = 7001
)

var ways = []way{
	{
		name: "tproxy over IPv4", config: "mode: tproxy\n    address: \"[::]:7000\"",
		capture: &capture.Rules{Mode: capture.TPROXY, Port: port}, sees: "edge",
	},
	{
		name: "tproxy over IPv6", config: "mode: tproxy\n    address: \"[::]:7000\"",
		capture: &capture.Rules{Mode: capture.TPROXY, Port: port}, v6: true, sees: "edge",
	},
	{
		name: "tproxy keeping the client's address over IPv4",
		config: "mode: tproxy\n    address: \"[::]:7000\"\n    keep_client: " +
			"true", capture: &capture.Rules{Mode: capture.TPROXY, Port: port}, sees: "client",
	},
	{
		name: "tproxy keeping the client's address over IPv6",
		config: "mode: tproxy\n    address: \"[::]:7000\"\n    keep_client: " +
			"true", capture: &capture.Rules{Mode: capture.TPROXY, Port: port}, v6: true, sees: "client",
	},
	{
		name: "redirect over IPv4", config: "mode: redirect\n    address: \"[::]:7000\"",
		capture: &capture.Rules{Mode: capture.Redirect, Port: port}, sees: "edge",
	},
	{
		name: "redirect over IPv6", config: "mode: redirect\n    address: \"[::]:7000\"",
		capture: &capture.Rules{Mode: capture.Redirect, Port: port}, v6: true, sees: "edge",
	},
	{
		name: "socks5", config: "mode: socks5\n    address: \"[::]:7000\"\n    users: [{name: ann, password: secret}]",
		dial: dialSOCKS, sees: "edge",
	},
	{name: "connect", config: "mode: connect\n    address: \"[::]:7000\"", dial: dialConnect, sees: "edge"},
	{
		name: "socks5 on the mixed port over IPv6", config: "mode: mixed\n    address: \"[::]:7000\"", dial: dialSOCKS,
		v6: true, sees: "edge",
	},
	{
		name: "forward", config: "mode: forward\n    address: \"[::]:7000\"\n    target: 10.77.2.2:8080", dial: dialEdge,
		forwards: true, sees: "edge",
	},
	{
		name: "forward behind a load balancer with PROXY protocol",
		config: "mode: forward\n    address: \"[::]:7000\"\n    target: 10.77.2.2:8080\n    proxy_protocol: {from: " +
			"[10.77.1.0/24]}", dial: dialWithProxyHeader, forwards: true, sees: "edge",
	},
	{name: "wireguard over IPv4", config: gatewayConfig, tunnel: throughWireGuard, sees: "edge"},
	{name: "wireguard over IPv6", config: gatewayConfig, tunnel: throughWireGuard, v6: true, sees: "edge"},
	{name: "tun over IPv4", config: "mode: tun\n    device: penstock0", tunnel: throughDevice, sees: "edge"},
	{name: "tun over IPv6", config: "mode: tun\n    device: penstock0", tunnel: throughDevice, v6: true, sees: "edge"},
	{name: "masque over IPv4", config: masqueConfig, tunnel: throughMASQUE, sees: "edge"},
	{name: "masque over IPv6", config: masqueConfig, tunnel: throughMASQUE, v6: true, sees: "edge"},
}

// named is the way of that name.
func named(name string) way {
	return ways[slices.IndexFunc(ways, func(w way) bool { return w.name == name })]
}

func (w way) yaml(extra string) string {
	return "listeners:\n  - name: way\n    " + w.config + "\ntelemetry: {address: \"" + telemetryAddr + "\"}\n" +
		"limits: {dial_timeout: 1s, handshake_timeout: 5s}\nlog: {level: debug}\nshutdown: {drain: 10s}\n" + extra
}

// open builds the network with a proxy that is reached this way.
func (w way) open(t *testing.T, extra string) *scene {
	t.Helper()
	if w.privileged() {
		needsPrivilege(t)
	}
	if w.tunnel == throughDevice {
		need.TUN(t)
	}
	s := newScene(t)
	s.start(w.yaml(extra))
	s.capture(w)
	return s
}

// capture brings the client's packets to the listener.
func (s *scene) capture(w way) {
	s.t.Helper()
	if w.tunnel != nil {
		w.tunnel.open(s)
	}
	if w.capture == nil {
		return
	}
	rules := *w.capture
	// the server is next to the edge
	rules.Interfaces, rules.Connected = []string{netlab.NearDevice}, capture.ConnectedCapture
	require.NoError(s.t, s.Edge.Do(func() error { return rules.Apply(s.t.Context()) }))
}

// target is the server's address as this way reaches it.
func (w way) target(s *scene, port uint16) netip.AddrPort {
	if w.v6 {
		return netip.AddrPortFrom(s.ServerAddr.V6, port)
	}
	return netip.AddrPortFrom(s.ServerAddr.V4, port)
}

// connect opens a connection through the proxy.
func (w way) connect(s *scene, target netip.AddrPort) (*net.TCPConn, error) {
	dial := w.dial
	if dial == nil {
		dial = func(s *scene, target netip.AddrPort) (net.Conn, error) {
			return s.Client.Dial("tcp", target.String())
		}
	}
	conn, err := dial(s, target)
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), conn.SetDeadline(time.Now().Add(2 * patience))
}

// pair opens a connection and returns both ends.
func (w way) pair(s *scene) (client, server *net.TCPConn) {
	s.t.Helper()
	ln := s.listen(w.target(s, servicePort))
	defer ln.Close() // the next pair listens there again
	type accepted struct {
		net.Conn
		error
	}
	got := make(chan accepted, 1)
	go func() {
		c, err := ln.Accept()
		got <- accepted{c, err}
	}()
	client, err := w.connect(s, w.target(s, servicePort))
	require.NoError(s.t, err)
	s.t.Cleanup(func() { client.Close() })
	select {
	case a := <-got:
		require.NoError(s.t, a.error)
		server = a.Conn.(*net.TCPConn)
	case <-time.After(patience):
		require.Fail(s.t, "no connection reached the server")
	}
	require.NoError(s.t, server.SetDeadline(time.Now().Add(2*patience)))
	s.t.Cleanup(func() { server.Close() })
	return client, server
}

// listen listens at the server until the test ends.
func (s *scene) listen(at netip.AddrPort) net.Listener {
	s.t.Helper()
	ln, err := s.Server.Listen("tcp", at.String())
	require.NoError(s.t, err)
	s.t.Cleanup(func() { ln.Close() })
	return ln
}
