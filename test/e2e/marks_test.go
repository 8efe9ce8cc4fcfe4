//go:build linux

package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestMarksShortenTheWindow: RFC 3168 §6.1.2. A Reno sender has about four packets in
// flight where a tenth is marked, and two where all are.
func TestMarksShortenTheWindow(t *testing.T) {
	for _, algorithm := range []string{"penstock", "copa", "bbr", "cubic"} {
		for _, m := range []struct {
			oneIn       int
			least, most int // packets in flight, median
		}{{0, 14, 1000}, {10, 1, 8}, {1, 1, 4}} {
			t.Run(fmt.Sprintf("%s, one in %d", algorithm, m.oneIn), func(t *testing.T) {
				t.Parallel() // the link is slow
				w := named("socks5")
				link := slow(200)
				if m.oneIn > 0 {
					link.Mark = 1 / float64(m.oneIn)
				}
				s, path := newCellular(t, link)
				require.NoError(t, s.Client.Sysctl("net.ipv4.tcp_ecn", "1"))
				s.start(w.yaml("defaults: {algorithm: " + algorithm + ", up: {algorithm: none}}\n"))
				path.StartOnData()
				d := w.download(s, 1, 64*megabyte)
				d.reaches(20 * segment)
				fd := s.proxy.borrow(d.peer())
				defer unix.Close(fd) //nolint:errcheck // a copy
				until(t, path, time.Second)
				moved, from := d.moved.Load(), path.Elapsed()
				var flight []int
				for path.Elapsed() < from+2*time.Second {
					i := tcpInfo(t, fd)
					flight = append(flight, int(i.Unacked-i.Sacked))
					time.Sleep(5 * time.Millisecond)
				}
				took := path.Elapsed() - from
				slices.Sort(flight)
				median := flight[len(flight)/2]
				i := tcpInfo(t, fd)
				t.Logf("%d packets in flight (p95 %d), %.2f Mbit/s, %d marked",
					median, flight[len(flight)*95/100], float64(d.moved.Load()-moved)*8/1e6/took.Seconds(), i.Delivered_ce)
				assert.NotZero(t, i.Options&tcpiOptECN, "ECN is negotiated")
				assert.Equal(t, m.oneIn > 0, i.Delivered_ce > 0)
				assert.GreaterOrEqual(t, median, m.least)
				assert.LessOrEqual(t, median, m.most)
				assert.Greater(t, d.moved.Load(), moved, "it goes on")
			})
		}
	}
}

const tcpiOptECN = 8 // TCPI_OPT_ECN: linux/tcp.h
