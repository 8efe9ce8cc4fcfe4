//go:build linux

package e2e

import (
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

// denied waits until so many connections were denied, one of them for the reason.
func (p *program) denied(n int, reason string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		return p.metric("penstock_flow_rejections_total", `reason="denied"`) == float64(n) &&
			strings.Contains(p.said.String(), reason)
	}, patience, 5*time.Millisecond)
}

// A cloud answers its machines on a link-local address, with credentials. It
// keeps forwarded clients out, but cannot tell a captured one from the edge.
func TestCapturedClientsDoNotReachTheMetadataService(t *testing.T) {
	metadata := netip.MustParseAddrPort("169.254.169.254:80")
	for _, name := range []string{"tproxy over IPv4", "redirect over IPv4"} {
		for _, allowed := range []bool{false, true} {
			w := named(name)
			t.Run(name, func(t *testing.T) {
				if allowed {
					w.config += "\n    allow: [169.254.169.254]"
				}
				s := w.open(t, "")
				host := netip.PrefixFrom(metadata.Addr(), metadata.Addr().BitLen())
				require.NoError(t, s.Server.Address("lo", host))
				require.NoError(t, s.Edge.Route(host, s.ServerAddr.V4))
				need.Serve(t, s.listen(metadata), func(c net.Conn) { _, _ = io.WriteString(c, "credentials") })
				var said []byte
				c, err := s.Client.Dial("tcp", metadata.String())
				if err == nil { // the handshake is the edge's; the reset may come as soon as that
					defer c.Close()
					require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
					said, err = io.ReadAll(c)
				}
				if allowed {
					require.NoError(t, err)
					assert.Equal(t, "credentials", string(said))
					return
				}
				require.ErrorIs(t, err, syscall.ECONNRESET)
				assert.Empty(t, said)
				s.proxy.denied(1, "is a cloud metadata service")
			})
		}
	}
}

// To a firewall, what the proxy sends to its own machine is local traffic.
func TestClientsThatAskDoNotReachServicesOfTheEdge(t *testing.T) {
	for _, name := range []string{"socks5", "connect"} {
		w := named(name)
		t.Run(name, func(t *testing.T) {
			s := w.open(t, "")
			service, err := s.Edge.Listen("tcp", "[::]:9999")
			require.NoError(t, err)
			defer service.Close()
			own := []netip.Addr{s.EdgeNear.V4, s.EdgeNear.V6, s.EdgeFar.V4, s.EdgeFar.V6}
			for _, addr := range own {
				_, err := w.connect(s, netip.AddrPortFrom(addr, 9999))
				require.Error(t, err, "%v", addr)
			}
			s.proxy.denied(len(own), "is the proxy's own machine")

			// An address that comes while the proxy runs is its machine's as well.
			late := netip.MustParsePrefix("198.51.100.7/32")
			require.NoError(t, s.Edge.Address("lo", late))
			_, err = w.connect(s, netip.AddrPortFrom(late.Addr(), 9999))
			require.Error(t, err)
			s.proxy.denied(len(own)+1, "destination 198.51.100.7 is the proxy's own machine")
		})
	}
}
