package userspace

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath/quic"
)

const (
	checkEvery     = 5 * time.Millisecond   // between two checks of an active shaper's timers
	activeTime     = time.Second            // a shaper is active until this long after its last packet
	countFlowsTime = 100 * time.Millisecond // between two counts of busy flows
	unmanaged      = "none"                 // the algorithm of a window that bounds nothing
)

// pinger finds out whether a peer answers echo requests inside the tunnel. If it does, its answers
// acknowledge the packets for it. A request has the addresses of the packet before it, because
// packets with these pass the tunnel's routes and the peer's filters. The shaper's mu guards it.
type pinger struct {
	from, to netip.Addr   // of the newest packet; invalid: none can be followed by a request
	isUseful bool         // the window is an algorithm's
	probing  flow.Probing // while the peer is not known to answer
}

// pingDue sends an echo request behind what has left, if one is due. The caller holds s.mu.
func (s *shaper) pingDue(now cc.Time) {
	p := &s.pinger
	switch {
	case !p.isUseful || !p.to.IsValid():
	case s.window.Source() == flow.ByEcho:
		if s.window.NextEcho() <= now {
			s.sendPing(s.window.SendEcho(now))
		}
	case p.probing.Ask(now):
		s.sendPing(0)
	}
}

// sendPing sends an echo request. One that cannot be sent is lost, as the network may lose it.
func (s *shaper) sendPing(sequence uint16) {
	message := make([]byte, icmpHeader, icmpHeader+len(s.d.cookie))
	message[0] = echoRequest4
	if s.pinger.to.Is6() {
		message[0] = echoRequest6
	}
	binary.BigEndian.PutUint16(message[6:], sequence)
	_ = s.d.stack.SendICMP(s.pinger.from, s.pinger.to, append(message, s.d.cookie[:]...))
}

// ReceiveAck implements quic.AckReceiver. It takes in one answer to n echo requests, the newest by its sequence number.
func (s *shaper) ReceiveAck(sequence uint16, n int, delay time.Duration) {
	now := s.d.with.Clock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queue == nil {
		return
	}
	defer s.accountQueued(s.queuedBytes())
	if s.window.Source() == flow.ByEcho {
		s.window.ReceiveAck(now, sequence, n, delay)
	} else {
		s.window.AcknowledgeBy(now, flow.ByEcho)
		s.pinger.probing.Asked = 0
	}
	s.sendQueued(now)
}

// isPing reports whether an echo message is a request of ours, or the answer to one.
func (d *Datagrams) isPing(message []byte) bool {
	return bytes.Equal(message[icmpHeader:], d.cookie[:])
}

// ackRequest asks for QUIC's acknowledgement of a packet into the tunnel if that is an echo request of ours. That
// acknowledgement counts as the answer, because the client may answer no echo requests. d may be nil.
func (d *Datagrams) ackRequest(packet []byte) (ack quic.AckRequest) {
	head, kind := ipv4Header, byte(echoRequest4) // of our packets, which have no options
	if packet[0]>>4 == 6 {
		head, kind = ipv6Header, echoRequest6
	}
	if d == nil || len(packet) != head+icmpHeader+len(d.cookie) || packet[head] != kind || !d.isPing(packet[head:]) {
		return ack
	}
	_, to, _ := endsOf(packet)
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.peers[d.inside.Peer(to)]; p != nil {
		ack = quic.AckRequest{Owner: &p.shaper, Sequence: binary.BigEndian.Uint16(packet[head+4+2:])}
	}
	return ack
}

// checkTimers sends echo requests that are due, gives up those without an answer, and counts busy
// flows. It reports whether the shaper has packets, or had some within activeTime.
func (s *shaper) checkTimers(now cc.Time) (active bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queue == nil {
		return false
	}
	defer s.accountQueued(s.queuedBytes())
	if now.Sub(s.countedAt) >= countFlowsTime {
		s.countFlows(now)
	}
	if s.window.NextTimeout() <= now {
		s.window.Expire(now)
		s.sendQueued(now)
	}
	if s.window.Trouble() != flow.NoTrouble {
		s.window.AcknowledgeBy(now, flow.ByTransport)
		s.pinger.probing = flow.ProbingLater(now)
		s.sendQueued(now)
	}
	s.pingDue(now)
	packets, _ := s.queue.Len()
	s.isListed = packets > 0 || now.Sub(s.usedAt) < activeTime
	return s.isListed
}

// countFlows gives the window as much weight as it has busy flows. The caller holds s.mu.
func (s *shaper) countFlows(now cc.Time) {
	s.countedAt = now
	busy := max(1, s.queue.BusyFlows(now))
	if busy == s.busy {
		return
	}
	s.busy = busy
	if err := s.window.SetFlows(now, busy); err != nil {
		s.d.with.Log.Error("tunnel: weight of datagrams", "err", err)
	}
}

// addToActive makes serveTimers call checkTimers until the shaper is idle. The caller holds s.mu.
func (s *shaper) addToActive() {
	if s.isListed {
		return
	}
	s.isListed = true
	s.d.wakeMu.Lock()
	s.d.activeShapers = append(s.d.activeShapers, s)
	s.d.wakeMu.Unlock()
	s.d.signalWake()
}

// checkActive checks the timers of all active shapers, and reports whether any is still active.
func (d *Datagrams) checkActive(now cc.Time) bool {
	d.wakeMu.Lock()
	all := d.activeShapers
	d.activeShapers = nil
	d.wakeMu.Unlock()
	kept := all[:0]
	for _, s := range all {
		if s.checkTimers(now) {
			kept = append(kept, s)
		}
	}
	d.wakeMu.Lock()
	d.activeShapers = append(kept, d.activeShapers...)
	defer d.wakeMu.Unlock()
	return len(d.activeShapers) > 0
}
