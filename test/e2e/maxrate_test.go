//go:build linux

package e2e

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// TestAMaximumRateBindsAllConnectionsOfAHost has a host send and receive all it can
// over many connections. From the start on, no more may have passed than the rate
// lets pass, whatever the machine is busy with.
func TestAMaximumRateBindsAllConnectionsOfAHost(t *testing.T) {
	const (
		rate   = 16e6 / 8 // bytes a second
		length = 2 * time.Second
		burst  = 128 << 10 // what a pacer lets go at once, and a window of each connection at the start
	)
	for name, cases := range map[string]map[string][]int{ // algorithms, and numbers of connections
		"tproxy over IPv4":    {"penstock": {1, 4, 32}, "cubic": {4}, "none": {4}},
		"socks5":              {"penstock": {4}, "none": {4}},
		"wireguard over IPv4": {"penstock": {4, 32}, "none": {4}},
		"masque over IPv4":    {"penstock": {4}},
	} {
		w := named(name)
		if w.tunnel != nil && present.envelope != kernel.EBPF {
			continue // nothing of it is the kernel's
		}
		for algorithm, numbers := range cases {
			for _, n := range numbers {
				t.Run(fmt.Sprintf("%s %s %d", name, algorithm, n), func(t *testing.T) {
					s := w.open(t, "defaults: {max_rate: 16mbit, algorithm: "+algorithm+"}\n")
					var passed [2]atomic.Int64 // down, up
					var ended sync.WaitGroup
					start := time.Now()
					var conns []*net.TCPConn
					for range n {
						client, server := w.pair(s)
						conns = append(conns, client, server)
						for i, way := range [2]struct{ from, to *net.TCPConn }{{server, client}, {client, server}} {
							ended.Go(func() {
								_, err := io.Copy(struct{ io.Writer }{way.from}, random(1, 1<<40))
								assert.Error(t, err, "it goes on until the connection is closed")
							})
							ended.Go(func() {
								_, _ = io.Copy(io.Discard, counted{way.to, &passed[i]})
							})
						}
					}
					time.Sleep(length)
					for i, way := range []string{"down", "up"} {
						got, elapsed := passed[i].Load(), time.Since(start).Seconds()
						t.Logf("%s: %.3f of the rate", way, float64(got)/(rate*elapsed))
						assert.LessOrEqual(t, float64(got), 1.02*rate*elapsed+burst, way)
						assert.Positive(t, got, way)
					}
					for _, c := range conns {
						require.NoError(t, c.SetLinger(0))
						require.NoError(t, c.Close())
					}
					ended.Wait()
				})
			}
		}
	}
}

// TestAMaximumRateBindsConnectionsOneAfterAnother has a host fetch, and send, small objects over a connection for
// each, as pages and apps do. Linux lets the first ten segments of each go whatever their pacing rate is.
func TestAMaximumRateBindsConnectionsOneAfterAnother(t *testing.T) {
	const (
		rate  = 2e6 / 8 // bytes a second
		size  = 14_000
		n     = 40
		burst = 16 << 10
	)
	for _, algorithm := range []string{"penstock", "copa", "none"} {
		for _, up := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s up %v", algorithm, up), func(t *testing.T) {
				w := named("tproxy over IPv4")
				s := w.open(t, "defaults: {max_rate: 2mbit, algorithm: "+algorithm+"}\n")
				start := time.Now()
				for range n {
					client, server := w.pair(s)
					from, to := server, client
					if up {
						from, to = client, server
					}
					_, err := from.Write(make([]byte, size))
					require.NoError(t, err)
					_, err = io.ReadFull(to, make([]byte, size))
					require.NoError(t, err)
					require.NoError(t, client.Close())
					require.NoError(t, server.Close())
				}
				elapsed := time.Since(start).Seconds()
				t.Logf("%.3f of the rate", n*size/(rate*elapsed))
				assert.LessOrEqual(t, float64(n*size), 1.02*rate*elapsed+burst)
			})
		}
	}
}

// TestAMaximumRateBindsWhatAPeerSendsByUDP has a phone send datagrams beside an upload,
// several times as many as its rule lets pass: both together have no more.
func TestAMaximumRateBindsWhatAPeerSendsByUDP(t *testing.T) {
	const (
		rate   = 4e6 / 8 // bytes a second
		length = 3 * time.Second
		burst  = 128 << 10
	)
	w := named("wireguard over IPv4")
	s := w.open(t, "defaults: {up: {max_rate: 4mbit, group: source}}\n")
	at := netip.AddrPortFrom(s.ServerAddr.V4, 4000)
	far, phone := listenUDP(t, s.Server, at), listenUDP(t, s.Client, netip.AddrPortFrom(phoneAddrs[0].Addr(), 0))
	client, server := w.pair(s)
	var byTCP, byUDP atomic.Int64
	var ended sync.WaitGroup
	start, over := time.Now(), make(chan struct{})
	ended.Go(func() { _, _ = io.Copy(struct{ io.Writer }{client}, random(1, 1<<40)) })
	ended.Go(func() { _, _ = io.Copy(io.Discard, counted{server, &byTCP}) })
	ended.Go(func() { // 20 Mbit/s
		tick := time.NewTicker(4 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
			}
			for range 10 {
				if _, err := phone.WriteToUDPAddrPort(make([]byte, 1000), at); err != nil {
					return
				}
			}
		}
	})
	ended.Go(func() {
		for b := make([]byte, 1500); ; {
			n, _, err := far.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			byUDP.Add(int64(n))
		}
	})
	time.Sleep(length)
	tcp, udp, elapsed := byTCP.Load(), byUDP.Load(), time.Since(start).Seconds()
	t.Logf("%.3f of the rate, TCP %d, UDP %d bytes", float64(tcp+udp)/(rate*elapsed), tcp, udp)
	assert.LessOrEqual(t, float64(tcp+udp), 1.02*rate*elapsed+burst)
	assert.Positive(t, tcp)
	assert.Positive(t, udp)
	close(over)
	for _, c := range []*net.TCPConn{client, server} {
		require.NoError(t, c.SetLinger(0))
		require.NoError(t, c.Close())
	}
	require.NoError(t, far.Close())
	ended.Wait()
}
