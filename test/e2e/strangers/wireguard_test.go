//go:build linux

package strangers

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
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
	s.wireGuardGo(s.Client, is, device)
	s.run(nil, is["wg"], "set", device, "private-key", k.own, "peer", k.edge.String(),
		"endpoint", netip.AddrPortFrom(s.EdgeNear.V4, 51820).String(), "allowed-ips", "10.77.2.0/24")
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
	good := filepath.Join(t.TempDir(), "good")
	k.Args = []string{"--last-good", good}
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
	s.restart(k.Options, pings)
}

// restart starts the gateway again. By itself a client would go on with its old keys for
// 15 s (KEEPALIVE_TIMEOUT + REKEY_TIMEOUT).
func (s *scene) restart(o edge.Options, p *pings) {
	s.t.Helper()
	const byItself = 15 * time.Second
	require.NoError(s.t, s.proxy.Stop())
	before := p.answers.Load()
	s.start(o)
	p.await(s.t, before+10)
	gap := time.Duration(p.gap.Load())
	s.t.Logf("a restart of the gateway: no answer for %v", gap.Round(time.Millisecond))
	assert.Less(s.t, gap, byItself)
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
