package netstack

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
)

// BenchmarkStream moves pieces of 64 KiB from one stack to another, each packet
// by Collect and Deliver; the time is both ends'.
func BenchmarkStream(b *testing.B) {
	const piece = 64 << 10
	from, to := connect(b, nil)
	from.Observe(func(flow.Report) {})
	read := make(chan error, 1)
	go func() {
		buf := make([]byte, piece)
		for {
			if _, err := to.Read(buf); err != nil {
				read <- err
				return
			}
		}
	}()
	buf := make([]byte, piece)
	b.SetBytes(piece)
	b.ReportAllocs()
	before := need.CPU(b)
	for b.Loop() {
		_, err := from.Write(buf)
		require.NoError(b, err)
	}
	require.NoError(b, from.CloseWrite())
	require.Equal(b, io.EOF, <-read)
	b.ReportMetric((need.CPU(b)-before).Seconds()/(float64(b.N)*piece/1e9), "CPU-s/GB")
	require.NoError(b, to.Close())
	require.NoError(b, from.Close())
}
