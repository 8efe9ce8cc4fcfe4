package telemetry

import (
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
)

var (
	tunnelUp = newGauge("tunnel_up",
		"Whether packets get through, as far as it is the proxy's; 0: a port or a device has gone and is being opened again.",
		"listener")
	tunnelPeers  = newGauge("tunnel_peers", "Peers that may use the tunnel.", "listener")
	tunnelActive = newGauge("tunnel_peers_active",
		"Peers whose session has not run out: WireGuard's that made a handshake in the last three minutes, and "+
			"CONNECT-IP's.", "listener")
	tunnelBytes = newCounter("tunnel_bytes_total",
		"Bytes of the packets inside the tunnel, their headers included, received from peers and sent to "+
			"them.", "listener", "direction")
	tunnelRefused = newCounter("tunnel_refused_packets_total",
		"Packets that were no peer's, or not from its addresses.", "listener")
	tunnelLost = newCounter("tunnel_lost_packets_total",
		"Packets to peers that were lost here, since more waited than may.", "listener")
	tunnelSendErrors = newCounter("tunnel_send_errors_total",
		"WireGuard's packets outside that the kernel did not take: too_large, unreachable (no route, or the device "+
			"is down), forbidden (a firewall of this machine), no_buffer (it had no memory), other.", "listener", "reason")
	tunnelHandshakes = newCounter("tunnel_dropped_handshakes_total",
		"Connections asked for that were not heard, since as many waited as may; clients ask again.", "listener")
	tunnelStalls = newCounter("tunnel_stalls_total",
		"How often a connection in user space had stopped retransmitting, and was made to go on.", "listener")
	tunnelInvalid = newCounter("tunnel_invalid_packets_total",
		"Packets out of the tunnel that were dropped: malformed (shorter than they say), checksum (one is wrong) "+
			"and flags "+
			"(no TCP sends them together).", "listener", "reason")
	tunnelExpired = newCounter("tunnel_expired_packets_total",
		"Packets out of the tunnel whose hop limit had run out.", "listener")

	tunnelDatagrams = newCounter("tunnel_datagrams_total",
		"UDP datagrams and echo messages that came from peers and that went to them.", "listener", "direction")
	tunnelDropped = newCounter("tunnel_datagrams_dropped_total",
		"UDP datagrams and echo messages that were dropped: refused by policy, "+
			"crowded (no room for another session), late (stood too long in its queue) and overflow (the queue was "+
			"full) on the way to a peer, or at a maximum rate on the way from it, "+
			"unsolicited (from whom the peer had not written to), failed (not taken by the network or the "+
			"tunnel).", "listener", "reason")
	tunnelSessions = newGauge("tunnel_datagram_sessions",
		"Addresses and ports of peers that have sent datagrams and may be answered.", "listener")
	tunnelEvicted = newCounter("tunnel_datagram_sessions_evicted_total",
		"Sessions that ended early to make room for others.", "listener")
	tunnelNotices = newCounter("tunnel_icmp_errors_total",
		"ICMP errors about datagrams that peers were told.", "listener")
)

// What is told of single peers, by the names that configuration, tokens or certificates
// give them.
var (
	peerBytes = newCounter("peer_bytes_total",
		"Bytes received from a peer and sent to it: WireGuard's with the tunnel's own, of a MASQUE client "+
			"those of the packets in its CONNECT-IP sessions.", "listener", "peer", "direction")
	peerHandshake = newGauge("peer_last_handshake_timestamp_seconds",
		"When WireGuard's last handshake with a peer was, in Unix time; absent: there was none.", "listener", "peer")
	peerConnections = newGauge("peer_connections_active", "Connections of a peer that are relayed.", "listener", "peer")
	peerQueueing    = newGauge("peer_queueing_delay_seconds",
		"Newest round-trip time towards a peer above the least, the greatest of the connections that have "+
			"something in flight under our congestion control; 0: none has.", "listener", "peer")
	peerRate = newGauge("peer_delivery_rate_bytes_per_second",
		"Newest delivery rates towards a peer, summed over the connections that have something in flight "+
			"under our congestion control.", "listener", "peer")
	peerRetransmitted = newCounter("peer_retransmitted_bytes_total", "Bytes that TCP sent to a peer again.", "listener",
		"peer")
)

// maxPeerSeries bounds the peers of a listener that have series of their own; the
// first by name have.
const maxPeerSeries = 1000

// peerKey names a peer.
type peerKey struct{ listener, name string }

// peerLoad is what the connections of a peer do.
type peerLoad struct {
	connections   int
	queueing      time.Duration
	rate          cc.Rate
	retransmitted cc.Bytes
}

// peerLoads sums up connections by their peers.
type peerLoads map[peerKey]peerLoad

// addFlow counts a connection in.
func (loads peerLoads) addFlow(f *proxy.FlowInfo) {
	s := &f.Down.Flow
	if f.Peer == "" || !f.Down.Managed || s.Inflight == 0 {
		return
	}
	k := peerKey{f.Listener, f.Peer}
	l := loads[k]
	l.queueing, l.rate = max(l.queueing, s.QueueingDelay), l.rate+s.DeliveryRate
	loads[k] = l
}

// addCounters adds what is counted of peers.
func (loads peerLoads) addCounters(peers []proxy.PeerCounters) {
	for _, p := range peers {
		k := peerKey{p.Listener, p.Peer}
		l := loads[k]
		l.connections, l.retransmitted = p.Active, p.Retransmitted
		loads[k] = l
	}
}

// writePeers writes what is known of a tunnel's peers.
func (s sink) writePeers(t proxy.TunnelInfo, loads peerLoads) {
	type state struct {
		received, sent uint64
		handshake      time.Time
	}
	known := map[string]state{}
	for _, p := range t.Peers {
		known[p.Name] = state{p.Received, p.Sent, p.Handshake}
	}
	for name, c := range t.Clients {
		known[name] = state{received: c.Received, sent: c.Sent}
	}
	for k := range loads { // a MASQUE client may have streams alone
		if _, counted := known[k.name]; !counted && k.listener == t.Listener && t.Clients != nil {
			known[k.name] = state{}
		}
	}
	names := slices.Sorted(maps.Keys(known))
	// Who is known by nothing but an address has no name, and there may be any number.
	names = slices.DeleteFunc(names, func(name string) bool { _, err := netip.ParseAddr(name); return err == nil })
	for _, name := range names[:min(len(names), maxPeerSeries)] {
		load, is := loads[peerKey{t.Listener, name}], known[name]
		s.putSample(peerBytes, float64(is.received), t.Listener, name, "received")
		s.putSample(peerBytes, float64(is.sent), t.Listener, name, "sent")
		if !is.handshake.IsZero() {
			s.putSample(peerHandshake, unixSeconds(is.handshake), t.Listener, name)
		}
		s.putSample(peerConnections, float64(load.connections), t.Listener, name)
		s.putSample(peerQueueing, load.queueing.Seconds(), t.Listener, name)
		s.putSample(peerRate, float64(load.rate)/8, t.Listener, name)
		s.putSample(peerRetransmitted, float64(load.retransmitted), t.Listener, name)
	}
}

func unixSeconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1e3 }

// sessionLife is how long after its handshake a WireGuard session ends at the latest.
const sessionLife = 3 * time.Minute

// writeTunnel writes what is known of a tunnel; now is the wall clock's.
func (s sink) writeTunnel(t proxy.TunnelInfo, now time.Time) {
	active := len(t.Sessions)
	for _, p := range t.Peers {
		if !p.Handshake.IsZero() && now.Sub(p.Handshake) < sessionLife {
			active++
		}
	}
	s.putSample(tunnelUp, oneIf(t.Up), t.Listener)
	s.putSample(tunnelPeers, float64(len(t.Peers)), t.Listener)
	s.putSample(tunnelActive, float64(active), t.Listener)
	s.putSample(tunnelBytes, float64(t.Received), t.Listener, "received")
	s.putSample(tunnelBytes, float64(t.Sent), t.Listener, "sent")
	s.putSample(tunnelRefused, float64(t.Refused), t.Listener)
	s.putSample(tunnelLost, float64(t.Lost), t.Listener)
	for reason, n := range map[string]uint64{
		"too_large": t.SendErrors.TooLarge, "unreachable": t.SendErrors.Unreachable, "forbidden": t.SendErrors.Forbidden,
		"no_buffer": t.SendErrors.NoBuffer, "other": t.SendErrors.Other,
	} {
		s.putSample(tunnelSendErrors, float64(n), t.Listener, reason)
	}
	s.putSample(tunnelHandshakes, float64(t.Handshakes), t.Listener)
	s.putSample(tunnelStalls, float64(t.Stalls), t.Listener)
	s.putSample(tunnelInvalid, float64(t.Malformed), t.Listener, "malformed")
	s.putSample(tunnelInvalid, float64(t.Damaged), t.Listener, "checksum")
	s.putSample(tunnelInvalid, float64(t.Senseless), t.Listener, "flags")
	s.putSample(tunnelExpired, float64(t.Expired), t.Listener)
	d := t.Datagrams
	s.putSample(tunnelDatagrams, float64(d.SentPackets), t.Listener, "received")
	s.putSample(tunnelDatagrams, float64(d.ReceivedPackets), t.Listener, "sent")
	for reason, n := range map[string]uint64{
		"refused": d.Refused, "crowded": d.Crowded, "late": d.Late,
		"overflow": d.Overflow, "unsolicited": d.Unsolicited, "failed": d.Failed,
	} {
		s.putSample(tunnelDropped, float64(n), t.Listener, reason)
	}
	s.putSample(tunnelSessions, float64(d.Sessions), t.Listener)
	s.putSample(tunnelEvicted, float64(d.Evicted), t.Listener)
	s.putSample(tunnelNotices, float64(d.Notices), t.Listener)
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

	// Of all connections of the listener's peer of that name; delay and rate are the
	// newest of those that have something in flight towards it.
	Connections   int      `json:"connections"`
	QueueingDelay float64  `json:"queueing_delay_seconds"`
	DeliveryRate  cc.Rate  `json:"delivery_bits_per_second"`
	Retransmitted cc.Bytes `json:"retransmitted_bytes"`
}

// withLoads adds what the connections of a peer do.
func (p Peer) withLoads(loads peerLoads) Peer {
	l := loads[peerKey{p.Listener, p.Name}]
	p.Connections, p.QueueingDelay = l.connections, l.queueing.Seconds()
	p.DeliveryRate, p.Retransmitted = l.rate, l.retransmitted
	return p
}

func (p Pages) servePeers(w http.ResponseWriter, r *http.Request) {
	var peers []Peer
	loads := peerLoads{}
	loads.addCounters(p.Source.Snapshot(loads.addFlow).Peers)
	for _, t := range p.Source.Tunnels() {
		for _, s := range t.Peers {
			out := Peer{
				Listener: t.Listener, Name: s.Name, PublicKey: s.PublicKey.String(), Addresses: s.Addresses,
				Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent,
			}
			if !s.Handshake.IsZero() {
				out.Handshake = unixSeconds(s.Handshake)
			}
			peers = append(peers, out.withLoads(loads))
		}
		for _, s := range t.Sessions {
			out := Peer{Listener: t.Listener, Name: s.Name, Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent}
			for _, a := range s.Addresses {
				out.Addresses = append(out.Addresses, netip.PrefixFrom(a, a.BitLen()))
			}
			peers = append(peers, out.withLoads(loads))
		}
	}
	p.serveList(w, r, len(peers), eachOf(peers, func(q *Peer) any { return q }))
}
