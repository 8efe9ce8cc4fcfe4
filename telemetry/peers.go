package telemetry

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
)

// maxPeerSeries bounds the peers of a listener with series of their own: they are the first by name.
const maxPeerSeries = 1000

// peerKey names a peer.
type peerKey struct{ listener, name string }

// peerLoad is the load of a peer's connections.
type peerLoad struct {
	connections   int           // that are relayed
	queueing      time.Duration // the greatest one of connections with bytes in flight
	rate          cc.Rate       // of delivery, summed over the same connections
	retransmitted cc.Bytes      // towards the peer, since the start
}

// peerLoads sums up connections by their peers.
type peerLoads map[peerKey]peerLoad

// addFlow adds a connection. It leaves out one without bytes in flight, because its newest delay and rate are old.
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

// addCounters adds what is counted of peers since the start. It is called once, after addFlow of all flows.
func (loads peerLoads) addCounters(peers []proxy.PeerCounters) {
	for _, p := range peers {
		k := peerKey{p.Listener, p.Peer}
		l := loads[k]
		l.connections, l.retransmitted = p.Active, p.Retransmitted
		loads[k] = l
	}
}

// writePeers writes the series of a tunnel's peers. WireGuard peers have series as soon as they are configured, MASQUE
// clients from their first connection on.
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
	for k := range loads { // a MASQUE client may have streams only, which t.Clients does not count
		if _, counted := known[k.name]; !counted && k.listener == t.Listener && t.Clients != nil {
			known[k.name] = state{}
		}
	}
	names := slices.Sorted(maps.Keys(known))
	// A client without a name is known by its address, and there may be any number of them.
	names = slices.DeleteFunc(names, func(name string) bool { _, err := netip.ParseAddr(name); return err == nil })
	for _, name := range names[:min(len(names), maxPeerSeries)] {
		load, peer := loads[peerKey{t.Listener, name}], known[name]
		s.putSample(peerBytes, float64(peer.received), t.Listener, name, "received")
		s.putSample(peerBytes, float64(peer.sent), t.Listener, name, "sent")
		if !peer.handshake.IsZero() {
			s.putSample(peerHandshake, unixSeconds(peer.handshake), t.Listener, name)
		}
		s.putSample(peerConnections, float64(load.connections), t.Listener, name)
		s.putSample(peerQueueing, load.queueing.Seconds(), t.Listener, name)
		s.putSample(peerRate, float64(load.rate)/8, t.Listener, name)
		s.putSample(peerRetransmitted, float64(load.retransmitted), t.Listener, name)
	}
}
