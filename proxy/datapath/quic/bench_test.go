package quic

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
)

// BenchmarkStream moves pieces of 256 KiB from server to client over loopback;
// its CPU is both ends'.
func BenchmarkStream(b *testing.B) {
	const piece = 256 << 10
	server, client := newWire(b, 0).open(b)
	server.Observe(func(flow.Report) {})
	read := make(chan error, 1)
	go func() {
		_, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{client}, make([]byte, piece))
		read <- err
	}()
	buf := make([]byte, piece)
	b.SetBytes(piece)
	before := need.CPU(b)
	for b.Loop() {
		_, err := server.Write(buf)
		require.NoError(b, err)
	}
	require.NoError(b, server.CloseWrite())
	require.NoError(b, <-read)
	b.ReportMetric((need.CPU(b)-before).Seconds()/(float64(b.N)*piece/1e9), "CPU-s/GB")
}
