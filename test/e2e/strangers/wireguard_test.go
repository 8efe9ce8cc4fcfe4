//go:build linux

package strangers

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

// A WireGuard client as Debian has it, and its address inside.
const (
	device = "wgstranger"
	inner  = "10.9.0.2"
)

// keys are those of a gateway and its one peer.
type keys struct {
	own  string // the file with the peer's private key
	edge access.Key
	edge.Options
	peers string // the file with the peer, where it is in one
}

func newKeys(t *testing.T) keys {
	t.Helper()
	private, err := access.GenerateKey()
	require.NoError(t, err)
	public, err := private.Public()
	require.NoError(t, err)
	key, err := access.GenerateKey()
	require.NoError(t, err)
	own := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(own, []byte(key.String()), 0o600))
	peer, err := key.Public()
	require.NoError(t, err)
	listener := fmt.Sprintf("{name: edge, mode: wireguard, address: \":51820\", wireguard: {private_key: %q, "+
		"peers: [{name: laptop, public_key: %q, allowed_ips: [%s/32]}]}}", private, peer, inner)
	return keys{own: own, edge: public, Options: edge.Options{Listener: listener}}
}

// wireGuardGo has wireguard-go make an interface, until the test ends.
func (s *scene) wireGuardGo(at *netlab.Node, is map[string]string, device string) {
	s.t.Helper()
	s.serve(at, 0, is["wireguard-go"], "-f", device)
	s.t.Cleanup(func() { _ = os.Remove("/var/run/wireguard/" + device + ".sock") })
	require.Eventually(s.t, func() bool {
		return at.Command(s.t.Context(), is["wg"], "show", device).Run() == nil
	}, patience, 10*time.Millisecond)
}

// wireGuard brings the client's tunnel to the edge up; what is for the server takes it.
func (s *scene) wireGuard(is map[string]string, k keys) {
	s.t.Helper()
	s.wireGuardAt(is, k, s.EdgeNear.V4)
}

// wireGuardAt is wireGuard with the edge at an address outside.
func (s *scene) wireGuardAt(is map[string]string, k keys, outside netip.Addr) {
	s.t.Helper()
	s.wireGuardGo(s.Client, is, device)
	s.run(nil, is["wg"], "set", device, "private-key", k.own, "peer", k.edge.String(),
		"endpoint", netip.AddrPortFrom(outside, 51820).String(), "allowed-ips", "10.77.2.0/24")
	s.run(nil, is["ip"], "addr", "add", inner+"/32", "dev", device)
	s.run(nil, is["ip"], "link", "set", device, "mtu", "1420", "up")
	s.run(nil, is["ip"], "route", "add", "10.77.2.0/24", "dev", device, "src", inner)
}

func TestWireGuardGo(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip", "nginx", "curl")
	k := newKeys(t)
	s := open(t, k.Options)
	file := s.file("file", 1, size)
	require.NoError(t, os.MkdirAll(s.dir+"/put", 0o755)) //nolint:gosec // the server's
	s.nginx(is["nginx"])
	s.wireGuard(is, k)

	at := fmt.Sprintf("http://%v/", s.ServerAddr.V4)
	s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-o", s.dir+"/got", at+"file")
	s.same(file, s.dir+"/got")
	s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-T", file, at+"put/file")
	s.same(file, s.dir+"/put/file")
	assert.NotContains(t, s.run(nil, is["wg"], "show", device, "latest-handshakes"), "\t0\n")
	s.carried(2)
}

func TestWireGuardGoOverARestartOfTheGateway(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip")
	k := newKeys(t)
	k.Args = []string{"--state-directory", t.TempDir()}
	s := open(t, k.Options)
	s.wireGuard(is, k)
	server := netip.AddrPortFrom(s.ServerAddr.V4, 7)

	// A download, which the restart ends.
	ln, err := s.Server.Listen("tcp", server.String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		if c, err := ln.Accept(); err == nil {
			_, _ = io.Copy(c, zeros{})
			_ = c.Close()
		}
	}()
	conn, err := s.Client.Dial("tcp", server.String())
	require.NoError(t, err)
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = io.CopyN(io.Discard, conn, size)
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, conn)
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-ended
	})

	pings := s.ping(server)
	pings.await(t, 1)
	s.restart(k.Options, pings, func() { require.NoError(t, s.proxy.Stop()) })
}

// A crash comes as soon after the first handshake as the proxy promises to have written down where the
// peer is.
func TestWireGuardGoOverACrashOfTheGateway(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip")
	k := newKeys(t)
	state := t.TempDir()
	k.Args = []string{"--state-directory", state}
	s := open(t, k.Options)
	s.wireGuard(is, k)
	pings := s.ping(netip.AddrPortFrom(s.ServerAddr.V4, 7))
	pings.await(t, 1)
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(state, "endpoints.json"))
		return err == nil
	}, 5*time.Second, 10*time.Millisecond)
	s.restart(k.Options, pings, s.proxy.Kill)
}

// restart starts the gateway again. By itself a client would go on with its old keys for
// 15 s (KEEPALIVE_TIMEOUT + REKEY_TIMEOUT).
func (s *scene) restart(o edge.Options, p *pings, end func()) {
	s.t.Helper()
	const longest = 3 * time.Second
	end()
	before := p.answers.Load()
	s.start(o)
	p.await(s.t, before+10)
	gap := time.Duration(p.gap.Load())
	s.t.Logf("a restart of the gateway: no answer for %v", gap.Round(time.Millisecond))
	assert.Less(s.t, gap, longest)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// pings are datagrams that are answered, one each 10 ms.
type pings struct {
	answers atomic.Int64
	gap     atomic.Int64 // the longest between two answers, in nanoseconds
}

// ping sends datagrams from the client to the server, which answers, until the test
// ends.
func (s *scene) ping(to netip.AddrPort) *pings {
	s.t.Helper()
	s.echo(to)
	client, err := s.Client.Dial("udp", to.String())
	require.NoError(s.t, err)
	p, stop, done := &pings{}, make(chan struct{}), make(chan struct{}, 2)
	go func() { // asks
		defer func() { done <- struct{}{} }()
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_, _ = client.Write([]byte("ping")) // an error tells of one before
			}
		}
	}()
	go func() { // listens
		defer func() { done <- struct{}{} }()
		b := make([]byte, 100)
		last := time.Now()
		for {
			_, err := client.Read(b)
			select {
			case <-stop:
				return
			default:
			}
			if err != nil { // an ICMP error
				continue
			}
			now := time.Now()
			if p.answers.Load() > 0 {
				p.gap.Store(max(p.gap.Load(), int64(now.Sub(last))))
			}
			last = now
			p.answers.Add(1)
		}
	}()
	s.t.Cleanup(func() {
		close(stop)
		_ = client.Close()
		for range cap(done) {
			<-done
		}
	})
	return p
}

// await waits for so many answers.
func (p *pings) await(t *testing.T, n int64) {
	t.Helper()
	require.Eventually(t, func() bool { return p.answers.Load() >= n }, patience, time.Millisecond)
}

// Where the path to a client carries less than a full packet of the tunnel, the first of them leave in
// fragments; then connections have segments that need none.
func TestWireGuardGoOverANarrowPath(t *testing.T) {
	link := func(mtu int) func(*scene, string) {
		return func(s *scene, ip string) {
			for _, n := range []*netlab.Node{s.Client, s.Edge} {
				s.do(n, ip, "link", "set", netlab.NearDevice, "mtu", strconv.Itoa(mtu))
			}
		}
	}
	route := func(s *scene, ip string) {
		for _, to := range []string{s.ClientAddr.V4.String() + "/32", s.ClientAddr.V6.String() + "/128"} {
			s.do(s.Edge, ip, "route", "add", to, "dev", netlab.NearDevice, "mtu", "1400")
		}
	}
	for name, c := range map[string]struct {
		narrow func(s *scene, ip string)
		six    bool
		during bool // a download runs already
	}{
		"a link of 1400":                    {narrow: link(1400)},
		"a link of 1280":                    {narrow: link(1280)},
		"a route of 1400":                   {narrow: route},
		"IPv6, a link of 1400":              {narrow: link(1400), six: true},
		"IPv6, a route of 1400":             {narrow: route, six: true},
		"a link of 1400 from now on":        {narrow: link(1400), during: true},
		"a route of 1400 from now on":       {narrow: route, during: true},
		"IPv6, a link of 1400 from now on":  {narrow: link(1400), six: true, during: true},
		"IPv6, a route of 1400 from now on": {narrow: route, six: true, during: true},
	} {
		t.Run(name, func(t *testing.T) {
			is := find(t, "wireguard-go", "wg", "ip", "nginx", "curl")
			k := newKeys(t)
			s := open(t, k.Options)
			s.file("file", 1, size)
			s.nginx(is["nginx"])
			outside := s.EdgeNear.V4
			if c.six {
				outside = s.EdgeNear.V6
			}
			if !c.during {
				c.narrow(s, is["ip"])
			}
			s.wireGuardAt(is, k, outside)
			url := fmt.Sprintf("http://%v/file", s.ServerAddr.V4)
			got := make(chan struct{})
			if c.during {
				slow := s.Client.Command(t.Context(), is["curl"], "-sS", "--fail", "--noproxy", "*",
					"--limit-rate", strconv.Itoa(size/2), "-o", s.dir+"/slow", url)
				require.NoError(t, slow.Start())
				go func() {
					defer close(got)
					assert.NoError(t, slow.Wait())
				}()
				require.Eventually(t, func() bool {
					begun, err := os.Stat(s.dir + "/slow")
					return err == nil && begun.Size() > size/8
				}, patience, 10*time.Millisecond)
				c.narrow(s, is["ip"])
				<-got
				s.same(s.dir+"/file", s.dir+"/slow")
			}
			download := func() {
				s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-o", s.dir+"/got", url)
				s.same(s.dir+"/file", s.dir+"/got")
			}
			download()
			before := s.fragments()
			download()
			assert.Equal(t, before, s.fragments(), "fragments of a download over a path that is known")
		})
	}
}

// do runs a command at a node.
func (s *scene) do(at *netlab.Node, program string, args ...string) {
	s.t.Helper()
	out, err := at.Command(s.t.Context(), program, args...).CombinedOutput()
	require.NoError(s.t, err, "%s %q: %s", program, args, out)
}

// fragments counts those that the edge has made.
func (s *scene) fragments() (n int) {
	s.t.Helper()
	require.NoError(s.t, s.Edge.Do(func() error {
		four, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		six, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(four) + string(six)) {
			f := strings.Fields(line)
			switch {
			case f[0] == "Ip6FragCreates":
				count, _ := strconv.Atoi(f[1])
				n += count
			case f[0] == "Ip:" && names == nil:
				names = f
			case f[0] == "Ip:":
				count, _ := strconv.Atoi(f[slices.Index(names, "FragCreates")])
				n += count
			}
		}
		return nil
	}))
	return n
}
