package telemetry

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy"
	vpn "github.com/penstock-net/penstock/proxy/tunnel"
)

// BenchmarkScrape asks for the metrics of a proxy that has many flows, each to a host of its own and busy since the
// last scrape. The cost of the proxy's own snapshot is not in it.
func BenchmarkScrape(b *testing.B) {
	for _, c := range []struct{ flows, peers int }{{0, 0}, {8000, 0}, {8000, maxPeerSeries}} {
		for _, encoding := range []string{"identity", "gzip"} {
			b.Run(fmt.Sprintf("flows=%d/peers=%d/%s", c.flows, c.peers, encoding), func(b *testing.B) {
				src, clock := crowdedProxy(c.flows, c.peers), &handClock{t: 1}
				p := Pages{Source: src, Metrics: NewRegistry(src, busyOptions(clock))}
				handler := p.Handler(false)
				req := httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody)
				req.Header.Set("Accept-Encoding", encoding)
				b.ReportAllocs()
				begin := cpuTime(b)
				for b.Loop() {
					clock.t = clock.t.Add(sampleEvery)
					for i := range src.flows {
						src.flows[i].Down.Written += 1448
					}
					rec := httptest.NewRecorder()
					handler.ServeHTTP(rec, req)
					require.Equal(b, http.StatusOK, rec.Code)
					b.ReportMetric(float64(rec.Body.Len()), "bytes")
				}
				b.ReportMetric(float64(cpuTime(b)-begin)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// cpuTime returns the processor time of the process, in nanoseconds. A collector works on goroutines of its own, and
// other processes may use the machine, so the time that passes says less.
func cpuTime(b *testing.B) int64 {
	b.Helper()
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return used.Utime.Nano() + used.Stime.Nano()
}

// crowdedProxy is busyProxy with more flows of more hosts, and a tunnel of more peers.
func crowdedProxy(flows, peers int) *still {
	src := busyProxy()
	flow, group := src.flows[0], src.groups[0]
	src.flows, src.groups = nil, nil
	for i := range flows {
		host := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		flow.ID, flow.Source = uint64(i+1), netip.AddrPortFrom(host, 1234)
		group.Name = "down|lan|" + host.String()
		src.flows, src.groups = append(src.flows, flow), append(src.groups, group)
	}
	route, listener := src.counters.Routes[0], src.counters.Listeners[0]
	for i := range 4 {
		listener.Listener = fmt.Sprint("listener", i)
		src.counters.Listeners = append(src.counters.Listeners, listener)
		for j := range 4 {
			route.Listener, route.Rule = listener.Listener, fmt.Sprint("rule", j)
			src.counters.Routes = append(src.counters.Routes, route)
		}
	}
	var states []vpn.PeerState
	for i := range peers {
		states = append(states, vpn.PeerState{Name: fmt.Sprintf("peer%04d", i), Handshake: time.Unix(1.7e9, 0)})
	}
	src.tunnels = append(src.tunnels, proxy.TunnelInfo{Listener: "vpn3", Up: true, Status: vpn.Status{Peers: states}})
	return src
}
