//go:build linux

package strangers

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/proxy/access"
)

// TestHAProxy has one at the client, which sends PROXY headers, and one at the
// server, which reads those that the proxy sends on.
func TestHAProxy(t *testing.T) {
	is := find(t, "haproxy", "nginx", "curl")
	for _, version := range []string{"v1", "v2"} {
		t.Run(version, func(t *testing.T) {
			s := open(t, edge.Options{
				Config: "defaults: {send_proxy: " + version + "}",
				Listener: "{name: edge, mode: forward, address: \"10.77.1.1:7000\", target: \"10.77.2.2:8080\", " +
					"proxy_protocol: {from: [10.77.1.0/24]}}",
			})
			file := s.file("file", 1, size)
			s.nginx(is["nginx"])
			send := map[string]string{"v1": "send-proxy", "v2": "send-proxy-v2"}[version]
			const timeouts = "defaults\n timeout connect 10s\n timeout client 60s\n timeout server 60s\n"
			s.serve(s.Client, 8000, is["haproxy"], "-db", "-f", s.write("near.cfg", timeouts+
				" mode tcp\nlisten near\n bind 127.0.0.1:8000\n server edge 10.77.1.1:7000 "+send+"\n"))
			s.serve(s.Server, 8080, is["haproxy"], "-db", "-f", s.write("far.cfg", timeouts+
				" mode http\nlisten far\n bind 10.77.2.2:8080 accept-proxy\n"+
				" http-request return status 200 content-type text/plain lf-string %[src] if { path /who }\n"+
				" server files 10.77.2.2:80\n"))
			curl := func(args ...string) string {
				t.Helper()
				return s.run(nil, is["curl"], append([]string{"-sS", "--fail", "--noproxy", "*"}, args...)...)
			}
			assert.Equal(t, "127.0.0.1", curl("http://127.0.0.1:8000/who"), "the address of haproxy's own client")
			curl("-o", s.dir+"/got", "http://127.0.0.1:8000/file")
			s.same(file, s.dir+"/got")
			s.carried(2)
		})
	}
}

func TestWireGuardGo(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip", "nginx", "curl")
	private, err := access.GenerateKey()
	require.NoError(t, err)
	public, err := private.Public()
	require.NoError(t, err)
	const device, inner = "wgstranger", "10.9.0.2"
	dir := t.TempDir()
	own := filepath.Join(dir, "key")
	key, err := access.GenerateKey()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(own, []byte(key.String()), 0o600))
	peer, err := key.Public()
	require.NoError(t, err)
	s := open(t, edge.Options{Listener: fmt.Sprintf("{name: edge, mode: wireguard, address: \":51820\", "+
		"wireguard: {private_key: %q, peers: [{name: laptop, public_key: %q, allowed_ips: [%s/32]}]}}",
		private, peer, inner)})
	file := s.file("file", 1, size)
	require.NoError(t, os.MkdirAll(s.dir+"/put", 0o755)) //nolint:gosec // the server's
	s.nginx(is["nginx"])

	s.serve(s.Client, 0, is["wireguard-go"], "-f", device)
	t.Cleanup(func() { _ = os.Remove("/var/run/wireguard/" + device + ".sock") })
	require.Eventually(t, func() bool {
		return s.Client.Command(t.Context(), is["wg"], "show", device).Run() == nil
	}, patience, 10*time.Millisecond)
	s.run(nil, is["wg"], "set", device, "private-key", own, "peer", public.String(),
		"endpoint", netip.AddrPortFrom(s.EdgeNear.V4, 51820).String(), "allowed-ips", "10.77.2.0/24")
	s.run(nil, is["ip"], "addr", "add", inner+"/32", "dev", device)
	s.run(nil, is["ip"], "link", "set", device, "mtu", "1420", "up")
	s.run(nil, is["ip"], "route", "add", "10.77.2.0/24", "dev", device, "src", inner)

	at := fmt.Sprintf("http://%v/", s.ServerAddr.V4)
	s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-o", s.dir+"/got", at+"file")
	s.same(file, s.dir+"/got")
	s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-T", file, at+"put/file")
	s.same(file, s.dir+"/put/file")
	assert.NotContains(t, s.run(nil, is["wg"], "show", device, "latest-handshakes"), "\t0\n")
	s.carried(2)
}
