package tunnel

import (
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
)

// Status has the state and the counters of a tunnel, since its start.
type Status struct {
	// Received and Sent are bytes of inner packets from peers and to peers.
	Received, Sent uint64
	// Refused counts packets of no peer, or not from the peer's addresses.
	Refused uint64
	// Unauthorized counts requests with a wrong token. Refused has them too.
	Unauthorized uint64
	// Lost counts packets to peers that the queue had no room for.
	Lost uint64
	// Handshakes counts SYNs that were dropped because too many connections waited.
	Handshakes uint64
	// Stalls counts connections that had stopped retransmitting and were restarted.
	Stalls uint64
	// Packets from peers that were dropped. Malformed ones are shorter than they say, Damaged ones
	// have a wrong checksum, Senseless ones have TCP flags that exclude each other, and Expired
	// ones have no hop left.
	Malformed, Damaged, Senseless, Expired uint64
	SendErrors                             SendErrors
	Peers                                  []PeerState
	// Sessions are those of CONNECT-IP.
	Sessions []SessionState
	// Clients has the traffic of all CONNECT-IP sessions by peer, with past ones.
	Clients   map[string]Traffic
	Datagrams DatagramStats
}

// SendErrors counts WireGuard's packets that the kernel refused to send, by reason.
type SendErrors struct{ TooLarge, Unreachable, Forbidden, NoBuffer, Other uint64 }

// PeerState is a WireGuard peer as the tunnel sees it.
type PeerState struct {
	Name      string
	PublicKey access.Key
	// Addresses are inside the tunnel.
	Addresses []netip.Prefix
	// Endpoint is the address that the last packet came from; empty: none came.
	Endpoint string
	// Handshake is the time of the last one; zero: none yet.
	Handshake time.Time
	// Received and Sent are bytes, with the tunnel's own.
	Received uint64
	Sent     uint64
}

// Endpoints returns the last known address of each peer. Peers that never connected are absent.
func Endpoints(peers []PeerState) map[access.Key]netip.AddrPort {
	at := map[access.Key]netip.AddrPort{}
	for _, p := range peers {
		if where, err := netip.ParseAddrPort(p.Endpoint); err == nil {
			at[p.PublicKey] = where
		}
	}
	return at
}

// SessionState is a CONNECT-IP session as the listener sees it.
type SessionState struct {
	Name string
	// Endpoint is the address of the client outside.
	Endpoint       string
	Addresses      []netip.Addr
	Received, Sent uint64 // bytes of packets
}

// Traffic is bytes of packets from a peer and to it.
type Traffic struct{ Received, Sent uint64 }

// DatagramStats counts datagrams since the start. Bytes are of payload.
type DatagramStats struct {
	// Sessions and Peers are present ones.
	Sessions, Peers                                        int
	SentPackets, SentBytes, ReceivedPackets, ReceivedBytes uint64
	// Refused counts datagrams that policy refuses, or that are of no peer.
	Refused uint64
	// Crowded counts datagrams that were lost because there were too many sessions or sockets.
	Crowded uint64
	// Late counts datagrams that stood in a queue for too long, towards a peer or at a max_rate
	// from it.
	Late uint64
	// Overflow counts datagrams that found such a queue full.
	Overflow uint64
	// Failed counts datagrams, among those sent and received, that the network or the tunnel
	// refused.
	Failed uint64
	// Unsolicited counts datagrams from senders that the peer had not written to.
	Unsolicited uint64
	// Evicted counts sessions that ended to make room for others.
	Evicted uint64
	// Notices counts ICMP errors to peers.
	Notices uint64
}
