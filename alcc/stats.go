package alcc

import (
	"net"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Tiers of connections: what holds the window.
const (
	TierEBPF    = "ebpf"     // the kernel, packet by packet
	TierTCPInfo = "tcp_info" // Write
	TierOwnAcks = "own_acks" // both ends
	TierNone    = "none"     // nothing
)

// Stats is the state of a connection at one moment.
type Stats struct {
	Tier    string   // one of the constants above
	Missing []string // what this machine does not give, in words
	// Snapshot is the state of what the connection sends: windows in bytes, rates in bit/s. Zero with TierNone.
	flow.Snapshot
}

// Stats returns the state of the connection.
func (c *Conn) Stats() Stats {
	if f, ok := c.leg.(*framed); ok {
		s := Stats{Tier: TierOwnAcks}
		if f.flow != nil {
			s.Snapshot = f.flow.Snapshot()
		}
		return s
	}
	if c.flow == nil {
		s := Stats{Tier: TierNone}
		if c.missing != "" {
			s.Missing = []string{c.missing}
		}
		return s
	}
	s := Stats{Tier: TierEBPF, Snapshot: c.flow.Snapshot()}
	if c.asks {
		s.Tier = TierTCPInfo
	}
	if l, ok := c.leg.(datapath.Conn); ok {
		s.Missing = l.Info().Missing
	}
	return s
}

// StatsOf returns the state of the Conn below conn, such as below a *tls.Conn; false: there is none.
func StatsOf(conn net.Conn) (Stats, bool) {
	for {
		switch c := conn.(type) {
		case *Conn:
			return c.Stats(), true
		case interface{ NetConn() net.Conn }:
			conn = c.NetConn()
		default:
			return Stats{}, false
		}
	}
}
