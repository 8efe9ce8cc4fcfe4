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
	tunnelInvalid    = counter("tunnel_invalid_packets_total", "Packets out of the tunnel that were dropped: malformed (shorter than they say), checksum (one is wrong) and flags (no TCP sends them together).", "listener", "reason")
	tunnelExpired    = counter("tunnel_expired_packets_total", "Packets out of the tunnel whose hop limit had run out.", "listener")

	tunnelDatagrams = counter("tunnel_datagrams_total", "UDP datagrams and echo messages that came from peers and that went to them.", "listener", "direction")
	tunnelDropped   = counter("tunnel_datagrams_dropped_total", "UDP datagrams and echo messages that were dropped: refused by policy, "+
		"crowded (no room for another session), late (stood too long in its queue) and overflow (the queue was full) on the way to a peer, "+
		"unsolicited (from whom the peer had not written to), failed (not taken by the network or the tunnel).", "listener", "reason")
	tunnelSessions = gauge("tunnel_datagram_sessions", "Addresses and ports of peers that have sent datagrams and may be answered.", "listener")
	tunnelEvicted  = counter("tunnel_datagram_sessions_evicted_total", "Sessions that ended early to make room for others.", "listener")
	tunnelNotices  = counter("tunnel_icmp_errors_total", "ICMP errors about datagrams that peers were told.", "listener")
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
	s.put(tunnelInvalid, float64(t.Malformed), t.Listener, "malformed")
	s.put(tunnelInvalid, float64(t.Damaged), t.Listener, "checksum")
	s.put(tunnelInvalid, float64(t.Senseless), t.Listener, "flags")
	s.put(tunnelExpired, float64(t.Expired), t.Listener)
	d := t.Datagrams
	s.put(tunnelDatagrams, float64(d.SentPackets), t.Listener, "received")
	s.put(tunnelDatagrams, float64(d.ReceivedPackets), t.Listener, "sent")
	for reason, n := range map[string]uint64{
		"refused": d.Refused, "crowded": d.Crowded, "late": d.Late, "overflow": d.Overflow, "unsolicited": d.Unsolicited, "failed": d.Failed,
	} {
		s.put(tunnelDropped, float64(n), t.Listener, reason)
	}
	s.put(tunnelSessions, float64(d.Sessions), t.Listener)
	s.put(tunnelEvicted, float64(d.Evicted), t.Listener)
	s.put(tunnelNotices, float64(d.Notices), t.Listener)
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
