//go:build linux

package strangers

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

// quic-go raises the size of its packets to what the path carries, and does not lower it when the path becomes
// narrower.
func TestMASQUEOverANarrowPath(t *testing.T) {
	for name, during := range map[string]bool{"from the start": false, "from now on": true} {
		t.Run(name, func(t *testing.T) {
			is := find(t, "ip", "nginx", "curl")
			certificate, key := certs.PEM(certs.SelfSigned("vpn.test"))
			s := open(t, edge.Options{Listener: fmt.Sprintf("{name: edge, mode: masque, address: \":8443\", "+
				"tls: {certificate: %q, key: %q}, masque: {pool: [10.10.0.0/24], tokens: [{name: phone, "+
				"token: a-token-of-a-phone-s-own}]}}", certificate, key)})
			s.file("file", 1, size)
			s.nginx(is["nginx"])
			narrow := func() {
				for _, n := range []*netlab.Node{s.Client, s.Edge} {
					s.do(n, is["ip"], "link", "set", netlab.NearDevice, "mtu", "1400")
				}
			}
			if !during {
				narrow()
			}
			m, err := s.Client.MASQUE(netlab.MASQUEConfig{
				Device: "masque0", MTU: access.MASQUEMTU, Gateway: netip.AddrPortFrom(s.EdgeNear.V4, 8443),
				Token: "a-token-of-a-phone-s-own", Through: []netip.Prefix{netip.PrefixFrom(s.ServerAddr.V4, 24)},
			})
			require.NoError(t, err)
			t.Cleanup(m.Close)
			url := fmt.Sprintf("http://%v/file", s.ServerAddr.V4)
			if during {
				slow := s.Client.Command(t.Context(), is["curl"], "-sS", "--fail", "--noproxy", "*", "-m", "20",
					"--limit-rate", strconv.Itoa(size/2), "-o", s.dir+"/slow", url)
				require.NoError(t, slow.Start())
				got := make(chan struct{})
				go func() {
					defer close(got)
					assert.NoError(t, slow.Wait())
				}()
				require.Eventually(t, func() bool {
					begun, err := os.Stat(s.dir + "/slow")
					return err == nil && begun.Size() > size/8
				}, patience, 10*time.Millisecond)
				narrow()
				<-got
				s.same(s.dir+"/file", s.dir+"/slow")
			}
			s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-m", "20", "-o", s.dir+"/got", url)
			s.same(s.dir+"/file", s.dir+"/got")
		})
	}
}

// The kernel tells senders of packets that are too large, and the sender of those out of a TUN device is the
// server, as far as it knows: the proxy has to look itself.
func TestATUNDeviceBeforeANarrowPath(t *testing.T) {
	is := find(t, "ip", "nginx", "curl")
	s := open(t, edge.Options{Listener: "{name: edge, mode: tun, device: penstock0}"})
	s.file("file", 1, size)
	s.nginx(is["nginx"])
	server := s.ServerAddr.V4.String()
	s.do(s.Edge, is["ip"], "link", "set", "penstock0", "up")
	s.do(s.Edge, is["ip"], "route", "add", "default", "dev", "penstock0", "table", "100")
	s.do(s.Edge, is["ip"], "rule", "add", "iif", netlab.NearDevice, "to", server, "table", "100")
	download := func() {
		s.run(nil, is["curl"], "-sS", "--fail", "--noproxy", "*", "-m", "20", "-o", s.dir+"/got", "http://"+server+"/file")
		s.same(s.dir+"/file", s.dir+"/got")
	}
	download()
	s.do(s.Edge, is["ip"], "link", "set", netlab.NearDevice, "mtu", "1400")
	download()
	s.carried(2)
}
