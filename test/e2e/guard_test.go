//go:build linux

package e2e

import (
	"io"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
				ln := s.listen(metadata)
				go func() {
					for {
						c, err := ln.Accept()
						if err != nil {
							return
						}
						_, _ = io.WriteString(c, "credentials")
						_ = c.Close()
					}
				}()
				var said []byte
				c, err := s.Client.Dial("tcp", metadata.String())
				if err == nil { // the handshake is the edge's; the reset may come as soon as that
					defer c.Close()
					require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
					said, err = io.ReadAll(c)
				}
				denied := s.proxy.metric("penstock_flow_rejections_total", `reason="denied"`)
				if allowed {
					require.NoError(t, err)
					assert.Equal(t, "credentials", string(said))
					assert.Zero(t, denied)
					return
				}
				require.ErrorIs(t, err, syscall.ECONNRESET)
				assert.Empty(t, said)
				assert.EqualValues(t, 1, denied)
				assert.Contains(t, s.proxy.said.String(), "is a cloud metadata service")
			})
		}
	}
}
