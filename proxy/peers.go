package proxy

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc"
)

// maxPeers bounds the peers that are counted one by one: certificates may name any number.
const maxPeers = 4096

// PeerCounters are what happened to the relayed connections of one peer of a tunnel.
type PeerCounters struct {
	Listener, Peer string
	Opened         uint64
	Active         int
	Retransmitted  cc.Bytes // by TCP, towards the peer
}

type peerKey struct{ listener, peer string }

func (p PeerCounters) compareTo(q PeerCounters) int {
	return cmp.Or(strings.Compare(p.Listener, q.Listener), strings.Compare(p.Peer, q.Peer))
}

// peerTotals are the counters of peers that have had connections, by peer. A nil map is
// ready.
type peerTotals map[peerKey]*PeerCounters

// countersOf returns the counters of a connection's peer; nil: it has none, or it is told apart
// by its address alone, of which there may be any number.
func (p *peerTotals) countersOf(c *connection) *PeerCounters {
	k := peerKey{c.listener.cfg.Name, c.chosen.Peer}
	if n := (*p)[k]; n != nil || k.peer == "" {
		return n
	}
	if isAddr(k.peer) || len(*p) >= maxPeers {
		return nil
	}
	if *p == nil {
		*p = peerTotals{}
	}
	(*p)[k] = &PeerCounters{Listener: k.listener, Peer: k.peer}
	return (*p)[k]
}

// isAddr reports whether a peer's name is nothing but its address.
func isAddr(name string) bool {
	_, err := netip.ParseAddr(name)
	return err == nil
}

// copyAll returns copies, in no order.
func (p peerTotals) copyAll() []PeerCounters {
	out := make([]PeerCounters, 0, len(p))
	for _, n := range p {
		out = append(out, *n)
	}
	return out
}

// addLive counts in what the peer of a live connection was sent again so far.
func addLive(peers []PeerCounters, f *FlowInfo) {
	of := PeerCounters{Listener: f.Listener, Peer: f.Peer}
	if i, found := slices.BinarySearchFunc(peers, of, PeerCounters.compareTo); found {
		peers[i].Retransmitted += f.Client.Retransmitted
	}
}
