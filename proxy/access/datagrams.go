package access

import (
	"net/netip"
	"time"
)

// Datagrams configures the forwarding of UDP and ICMP out of a tunnel.
type Datagrams struct {
	Idle        time.Duration  // a session without packets for so long ends
	Sessions    int            // of one peer at a time; a new one replaces the longest idle; 0: forward no datagrams
	MaxSessions int            // of all peers at a time: each session may take a descriptor
	Isolate     bool           // refuse packets from one peer to another, over TCP too
	DNS         netip.AddrPort // name server behind the gateway's own addresses, over TCP too; invalid: none
}
