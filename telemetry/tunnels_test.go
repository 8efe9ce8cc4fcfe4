package telemetry

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy"
	vpn "github.com/penstock-net/penstock/proxy/tunnel"
)

func TestPeersHaveSeriesByTheirNames(t *testing.T) {
	src := busyProxy()
	src.flows[0].Listener, src.flows[0].Peer = "vpn", "phone"
	idle := src.flows[0]
	idle.ID, idle.Down.Flow.Inflight, idle.Down.Flow.QueueingDelay = 3, 0, 1e9
	src.flows = append(src.flows, idle)
	var names []string
	for _, m := range families {
		if strings.HasPrefix(m.name, "penstock_peer_") {
			names = append(names, m.name)
		}
	}
	want := `
# HELP penstock_peer_bytes_total Bytes received from a peer and sent to it: WireGuard's with the tunnel's own, of a MASQUE client those of the packets in its CONNECT-IP sessions.
# TYPE penstock_peer_bytes_total counter
penstock_peer_bytes_total{direction="received",listener="vpn",peer="phone"} 1100
penstock_peer_bytes_total{direction="received",listener="vpn",peer="tablet"} 0
penstock_peer_bytes_total{direction="received",listener="vpn2",peer="browser"} 0
penstock_peer_bytes_total{direction="received",listener="vpn2",peer="laptop"} 5700
penstock_peer_bytes_total{direction="sent",listener="vpn",peer="phone"} 9900
penstock_peer_bytes_total{direction="sent",listener="vpn",peer="tablet"} 0
penstock_peer_bytes_total{direction="sent",listener="vpn2",peer="browser"} 0
penstock_peer_bytes_total{direction="sent",listener="vpn2",peer="laptop"} 6800
# HELP penstock_peer_connections_active Connections of a peer that are relayed.
# TYPE penstock_peer_connections_active gauge
penstock_peer_connections_active{listener="vpn",peer="phone"} 2
penstock_peer_connections_active{listener="vpn",peer="tablet"} 0
penstock_peer_connections_active{listener="vpn2",peer="browser"} 1
penstock_peer_connections_active{listener="vpn2",peer="laptop"} 0
# HELP penstock_peer_delivery_rate_bytes_per_second Newest delivery rates towards a peer, summed over the connections that have something in flight under our congestion control.
# TYPE penstock_peer_delivery_rate_bytes_per_second gauge
penstock_peer_delivery_rate_bytes_per_second{listener="vpn",peer="phone"} 1.5e+06
penstock_peer_delivery_rate_bytes_per_second{listener="vpn",peer="tablet"} 0
penstock_peer_delivery_rate_bytes_per_second{listener="vpn2",peer="browser"} 0
penstock_peer_delivery_rate_bytes_per_second{listener="vpn2",peer="laptop"} 0
# HELP penstock_peer_last_handshake_timestamp_seconds When WireGuard's last handshake with a peer was, in Unix time; absent: there was none.
# TYPE penstock_peer_last_handshake_timestamp_seconds gauge
penstock_peer_last_handshake_timestamp_seconds{listener="vpn",peer="phone"} 1.7000000005e+09
# HELP penstock_peer_queueing_delay_seconds Newest round-trip time towards a peer above the least, the greatest of the connections that have something in flight under our congestion control; 0: none has.
# TYPE penstock_peer_queueing_delay_seconds gauge
penstock_peer_queueing_delay_seconds{listener="vpn",peer="phone"} 0.025
penstock_peer_queueing_delay_seconds{listener="vpn",peer="tablet"} 0
penstock_peer_queueing_delay_seconds{listener="vpn2",peer="browser"} 0
penstock_peer_queueing_delay_seconds{listener="vpn2",peer="laptop"} 0
# HELP penstock_peer_retransmitted_bytes_total Bytes that TCP sent to a peer again.
# TYPE penstock_peer_retransmitted_bytes_total counter
penstock_peer_retransmitted_bytes_total{listener="vpn",peer="phone"} 4344
penstock_peer_retransmitted_bytes_total{listener="vpn",peer="tablet"} 0
penstock_peer_retransmitted_bytes_total{listener="vpn2",peer="browser"} 2896
penstock_peer_retransmitted_bytes_total{listener="vpn2",peer="laptop"} 0
`
	require.NoError(t, testutil.GatherAndCompare(NewRegistry(src, busyOptions(&handClock{t: 1})), strings.NewReader(want),
		names...))
}

func TestPeersBeyondTheBoundHaveNoSeries(t *testing.T) {
	src := busyProxy()
	var peers []vpn.PeerState
	for i := range maxPeerSeries + 10 {
		peers = append(peers, vpn.PeerState{Name: fmt.Sprintf("peer%04d", i)})
	}
	src.tunnels = []proxy.TunnelInfo{{Listener: "vpn", Status: vpn.Status{Peers: peers}}}
	shown := gather(t, NewRegistry(src, busyOptions(&handClock{t: 1})))
	assert.Len(t, shown["penstock_peer_queueing_delay_seconds"].GetMetric(), maxPeerSeries)
}
