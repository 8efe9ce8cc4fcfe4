package tunnel

import (
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
)

// Status is how it goes with a tunnel.
type Status struct {
	Received, Sent uint64 // bytes of inner packets that came out of it and went into it
	Refused        uint64 // packets that were no peer's, or not from the peer's addresses
	Unauthorized   uint64 // requests with a wrong token; they count in Refused as well
	Lost           uint64 // packets to peers that the queue had no room for
	Handshakes     uint64 // SYNs dropped, since as many waited as may
	Stalls         uint64 // how often a connection had stopped retransmitting, and was made to go on
	// Packets that came out of it and were dropped: shorter than they said, with a
	// wrong checksum, with TCP flags that make no sense, and those whose hop limit had
	// run out.
	Malformed, Damaged, Senseless, Expired uint64
	SendErrors                             SendErrors
	Peers                                  []PeerState
	Sessions                               []SessionState     // CONNECT-IP's
	Clients                                map[string]Traffic // by all CONNECT-IP sessions of a peer, past ones too
	Datagrams                              DatagramStats
}

// SendErrors counts WireGuard's packets outside that the kernel did not take, by its reason.
type SendErrors struct{ TooLarge, Unreachable, Forbidden, NoBuffer, Other uint64 }

// PeerState is a WireGuard peer as the tunnel sees it.
type PeerState struct {
	Name      string
	PublicKey access.Key
	Addresses []netip.Prefix // inside the tunnel
	Endpoint  string         // where it was last heard from; empty: never
	Handshake time.Time      // the last; zero: none yet
	Received  uint64         // bytes, with the tunnel's own
	Sent      uint64
}

// Endpoints are where peers are, as far as it is known.
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
	Name           string
	Endpoint       string // where the client is
	Addresses      []netip.Addr
	Received, Sent uint64 // bytes of packets
}

// Traffic is bytes of packets that came from a peer and that went to it.
type Traffic struct{ Received, Sent uint64 }

// DatagramStats counts, since the start, what became of datagrams; bytes are of
// payload.
type DatagramStats struct {
	Sessions, Peers                                        int // at the moment
	SentPackets, SentBytes, ReceivedPackets, ReceivedBytes uint64
	Refused                                                uint64 // by policy, or of nobody
	// lost, since there were too many sessions, or sockets
	Crowded  uint64
	Late     uint64 // lost on their way to peers, or at a max_rate from them: they stood in a queue for too long
	Overflow uint64 // likewise: the queue was full
	// among sent and received: the network outside, or the tunnel, did not take them
	Failed      uint64
	Unsolicited uint64 // from whom the peer had not written to
	Evicted     uint64 // sessions that ended to make room for others
	Notices     uint64 // ICMP errors to peers
}
