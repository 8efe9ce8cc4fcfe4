package telemetry

import (
	"net/http"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/proxy"
)

var (
	tunnelPeers      = gauge("tunnel_peers", "Peers that may use the tunnel.", "listener")
	tunnelActive     = gauge("tunnel_peers_active", "Peers whose session has not run out: WireGuard's that made a handshake in the last three minutes, and CONNECT-IP's.", "listener")
	tunnelBytes      = counter("tunnel_bytes_total", "Bytes of the packets inside the tunnel, their headers included, received from peers and sent to them.", "listener", "direction")
	tunnelRefused    = counter("tunnel_refused_packets_total", "Packets that were no peer's, or not from its addresses.", "listener")
	tunnelLost       = counter("tunnel_lost_packets_total", "Packets to peers that were lost here, since more waited than may.", "listener")
	tunnelHandshakes = counter("tunnel_dropped_handshakes_total", "Connections asked for that were not heard, since as many waited as may; clients ask again.", "listener")
	tunnelStalls     = counter("tunnel_stalls_total", "How often a connection in user space had stopped retransmitting, and was made to go on.", "listener")
)

// sessionLife is how long after its handshake a WireGuard session ends at the latest.
const sessionLife = 3 * time.Minute

// tunnel writes what is known of a tunnel; now is the wall clock's.
func (s sink) tunnel(t proxy.TunnelInfo, now time.Time) {
	active := len(t.Sessions)
	for _, p := range t.Peers {
		if !p.Handshake.IsZero() && now.Sub(p.Handshake) < sessionLife {
			active++
		}
	}
	s.put(tunnelPeers, float64(len(t.Peers)), t.Listener)
	s.put(tunnelActive, float64(active), t.Listener)
	s.put(tunnelBytes, float64(t.Received), t.Listener, "received")
	s.put(tunnelBytes, float64(t.Sent), t.Listener, "sent")
	s.put(tunnelRefused, float64(t.Refused), t.Listener)
	s.put(tunnelLost, float64(t.Lost), t.Listener)
	s.put(tunnelHandshakes, float64(t.Handshakes), t.Listener)
	s.put(tunnelStalls, float64(t.Stalls), t.Listener)
}

// Peer is one peer of a WireGuard tunnel as /v1/peers lists it, or one session of
// a MASQUE client that sends packets.
type Peer struct {
	Listener  string         `json:"listener"`
	Name      string         `json:"name"`
	PublicKey string         `json:"public_key,omitempty"` // WireGuard's
	Addresses []netip.Prefix `json:"addresses"`            // inside the tunnel
	Endpoint  string         `json:"endpoint,omitempty"`   // where it was last heard from; empty: never
	Handshake float64        `json:"handshake_seconds"`    // when WireGuard's last was, in Unix time; 0: never
	Received  uint64         `json:"received_bytes"`       // WireGuard's with the tunnel's own
	Sent      uint64         `json:"sent_bytes"`
}

func (p Pages) peers(w http.ResponseWriter, r *http.Request) {
	var peers []Peer
	for _, t := range p.Source.Tunnels() {
		for _, s := range t.Peers {
			out := Peer{
				Listener: t.Listener, Name: s.Name, PublicKey: s.PublicKey.String(), Addresses: s.Addresses,
				Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent,
			}
			if !s.Handshake.IsZero() {
				out.Handshake = float64(s.Handshake.UnixMilli()) / 1e3
			}
			peers = append(peers, out)
		}
		for _, s := range t.Sessions {
			out := Peer{Listener: t.Listener, Name: s.Name, Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent}
			for _, a := range s.Addresses {
				out.Addresses = append(out.Addresses, netip.PrefixFrom(a, a.BitLen()))
			}
			peers = append(peers, out)
		}
	}
	p.list(w, r, len(peers), func(i int) any { return peers[i] })
}
