package quic

import (
	"io"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
)

// cpu is the process's time so far, in seconds.
func cpu(t testing.TB) float64 {
	var u syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

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
	before := cpu(b)
	for b.Loop() {
		_, err := server.Write(buf)
		require.NoError(b, err)
	}
	require.NoError(b, server.CloseWrite())
	require.NoError(b, <-read)
	b.ReportMetric((cpu(b)-before)/(float64(b.N)*piece/1e9), "CPU-s/GB")
}
