package access

import (
	"net/netip"
	"time"
)

// Datagrams says what becomes of UDP and ICMP that come through a tunnel.
type Datagrams struct {
	Idle     time.Duration  // after which a session without packets is forgotten
	Sessions int            // of one peer at once, the longest idle goes first; 0: none, no datagram is forwarded
	Most     int            // of all peers: each session may take a descriptor
	Isolate  bool           // refuse what one peer sends to another, over TCP too
	DNS      netip.AddrPort // answers at the gateway's own addresses, over TCP too; invalid: none
}
