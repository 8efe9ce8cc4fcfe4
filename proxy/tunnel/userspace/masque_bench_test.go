package userspace

import (
	"io"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// BenchmarkConnectIP moves pieces of 256 KiB through a CONNECT-IP session over
// loopback, from the gateway's stack to a client's and back up; CPU is both ends'.
func BenchmarkConnectIP(b *testing.B) {
	const piece = 256 << 10
	for _, way := range []string{"down", "up"} {
		b.Run(way, func(b *testing.B) {
			m, l := masque(b, nil)
			accepted := make(chan ingress.Client, 1)
			answering(b, l, nil, func(c ingress.Client) { accepted <- c })
			near, err := dialMASQUE(b, m).tunnel(phoneToken).DialContextTCPAddrPort(deadlineOf(b),
				netip.MustParseAddrPort("203.0.113.7:443"))
			require.NoError(b, err)
			far := <-accepted
			var from halfCloser = far
			var to io.Reader = near
			if way == "up" {
				from, to = near, far
			}
			read := make(chan error, 1)
			go func() {
				_, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{to}, make([]byte, piece))
				read <- err
			}()
			buf := make([]byte, piece)
			b.SetBytes(piece)
			before := need.CPU(b)
			for b.Loop() {
				_, err := from.Write(buf)
				require.NoError(b, err)
			}
			require.NoError(b, from.CloseWrite())
			require.NoError(b, <-read)
			b.ReportMetric((need.CPU(b)-before).Seconds()/(float64(b.N)*piece/1e9), "CPU-s/GB")
			b.ReportMetric(float64(m.stack.Counts().Lost), "dropped")
			require.NoError(b, near.Close())
			require.NoError(b, far.Conn.Close())
		})
	}
}
