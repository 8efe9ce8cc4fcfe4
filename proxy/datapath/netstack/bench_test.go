package netstack

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
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
	before := cpu(b)
	for b.Loop() {
		_, err := from.Write(buf)
		require.NoError(b, err)
	}
	require.NoError(b, from.CloseWrite())
	require.Equal(b, io.EOF, <-read)
	b.ReportMetric((cpu(b)-before)/(float64(b.N)*piece/1e9), "CPU-s/GB")
	require.NoError(b, to.Close())
	require.NoError(b, from.Close())
}

// cpu is the process's time so far, in seconds.
func cpu(b *testing.B) float64 {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
