//go:build linux

package strangers

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/internal/lab/edge"
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
