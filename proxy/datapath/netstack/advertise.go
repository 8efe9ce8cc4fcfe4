package netstack

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/seqnum"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var _ datapath.Advertiser = (*Conn)(nil)

// errNoTimestamps says why the queueing delay on a peer's path is not known.
var errNoTimestamps = errors.New("netstack: the peer sends no TCP timestamps, so that its round trips are not known")

const (
	mostStamps   = 4096 // timestamps of ours kept, one per millisecond, that the peer has not echoed yet
	leastSegment = 536  // bytes, RFC 9293 §3.7.1
)

// incoming is what is known of a connection's receiving side, and the bound of the window
// that it advertises. The bound is written into the segments that leave. The stack's own
// window and buffers stay as they are, so that there is room for all that was advertised.
type incoming struct {
	mu     sync.Mutex
	asked  bool     // Arrivals was called: comes is called for each segment
	over   bool     // nothing comes any more
	window cc.Bytes // bound of the window; 0: none but the stack's own
	scale  uint8    // window scale of ours (RFC 7323 §2)

	began bool         // the stream's first byte is known
	next  seqnum.Value // up to which we have acknowledged
	upTo  cc.Bytes     // the same as a stream offset
	edge  cc.Bytes     // stream offset up to which the peer may send

	highest cc.Bytes // stream offset of the end of what has come, holes or not
	holes   int
	mss     cc.Bytes // the most that came in one segment
	rtt     time.Duration
	stamps  []stamp // those that have left and were not echoed yet, the oldest first
}

// stamp is a timestamp of ours, and when it first left.
type stamp struct {
	value uint32
	at    cc.Time
}

// Arrivals implements datapath.Advertiser. Until data has shown a round trip, RTT is that
// of the handshake.
func (c *Conn) Arrivals() (flow.Arrivals, error) {
	e := c.tcpEndpoint()
	if e == nil {
		return flow.Arrivals{}, errNotAdmitted
	}
	e.LockUser()
	stamped := e.SendTSOk
	e.UnlockUser()
	if !stamped {
		return flow.Arrivals{}, errNoTimestamps
	}
	peer, handshake := c.signals.peerClock()
	in := &c.incoming
	in.mu.Lock()
	defer in.mu.Unlock()
	rtt := in.rtt
	if !in.asked && !in.over {
		in.asked = true
		c.stack.asked.Add(1)
	}
	if rtt == 0 {
		rtt = handshake
	}
	return flow.Arrivals{
		Received: in.upTo, RTT: rtt, Peer: peer, Window: max(0, in.edge-in.upTo), Holes: in.holes, MSS: in.mss,
	}, nil
}

// Advertise implements datapath.Advertiser. A window is rounded up to a multiple of what
// its scale allows, and is no less than two segments, since a sender may wait with less
// (RFC 9293 §3.8.6.2.1).
func (c *Conn) Advertise(window cc.Bytes) error {
	in := &c.incoming
	in.mu.Lock()
	defer in.mu.Unlock()
	in.window = window
	if window > 0 {
		in.window = max(window, 2*max(in.mss, leastSegment))
	}
	return nil
}

// onSegmentSent notes what a segment that leaves acknowledges, and reduces its window to the bound. The
// right edge of the window never moves to the left.
func (in *incoming) onSegmentSent(segment header.TCP, now cc.Time) {
	if !segment.Flags().Contains(header.TCPFlagAck) {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	ack := seqnum.Value(segment.AckNumber())
	if !in.began {
		in.began, in.next = true, ack
	}
	if news := cc.Bytes(int32(ack - in.next)); news > 0 {
		in.next, in.upTo = ack, in.upTo+news
	}
	scale := in.scale
	if segment.Flags().Contains(header.TCPFlagSyn) {
		scale = 0
	}
	field := cc.Bytes(segment.WindowSize())
	if in.window > 0 {
		step := cc.Bytes(1) << scale
		if least := (max(in.edge-in.upTo, in.window) + step - 1) / step; least < field {
			field = least
			var value [2]byte
			binary.BigEndian.PutUint16(value[:], uint16(field))
			RewriteSegment(segment, header.TCPWinSizeOffset, value[:])
		}
	}
	in.edge = max(in.edge, in.upTo+field<<scale)
	if at := timestampIndex(segment); in.asked && at >= 0 {
		in.rememberTimestamp(binary.BigEndian.Uint32(segment[at:]), now)
	}
}

// rememberTimestamp remembers when a timestamp left first; in.mu is held.
func (in *incoming) rememberTimestamp(value uint32, now cc.Time) {
	if n := len(in.stamps); n > 0 && int32(value-in.stamps[n-1].value) <= 0 {
		return
	}
	if len(in.stamps) == mostStamps {
		in.stamps = slices.Delete(in.stamps, 0, mostStamps/2)
	}
	in.stamps = append(in.stamps, stamp{value, now})
}

// onSegmentReceived notes a segment that brings data. The first one that echoes a timestamp was sent when the
// segment with that timestamp arrived.
func (in *incoming) onSegmentReceived(segment header.TCP, size cc.Bytes, now cc.Time) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.asked || !in.began {
		return
	}
	from := in.upTo + cc.Bytes(int32(seqnum.Value(segment.SequenceNumber())-in.next))
	if in.highest > 0 && from > in.highest {
		in.holes++
	}
	in.highest = max(in.highest, from+size)
	in.mss = max(in.mss, size)
	at := timestampIndex(segment)
	if at < 0 {
		return
	}
	echo := binary.BigEndian.Uint32(segment[at+4:])
	known := 0
	for known < len(in.stamps) && int32(in.stamps[known].value-echo) <= 0 {
		known++
	}
	if known == 0 {
		return
	}
	// The peer may echo a segment that left with the same stamp before Arrivals was called.
	if newest := in.stamps[known-1]; newest.value == echo && now > newest.at {
		in.rtt = now.Sub(newest.at)
	}
	in.stamps = slices.Delete(in.stamps, 0, known)
}

// onProbe notes the stack's window scale.
func (in *incoming) onProbe(state *tcp.TCPEndpointState) {
	in.mu.Lock()
	in.scale = state.Receiver.RcvWndScale
	in.mu.Unlock()
}

// stopCounting makes comes ignore all segments from now on, and tells whether it did not before.
func (in *incoming) stopCounting() (was bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	was, in.asked, in.over, in.stamps = in.asked, false, true, nil
	return was
}

// noteIncoming tells a valid packet's connection of the data in it, if there is such a connection.
func (s *Stack) noteIncoming(p []byte) {
	var id stack.TransportEndpointID
	var segment header.TCP
	if p[0]>>4 == 6 {
		if ip := header.IPv6(p); ip.NextHeader() == uint8(tcp.ProtocolNumber) {
			id.LocalAddress, id.RemoteAddress, segment = ip.DestinationAddress(), ip.SourceAddress(), ip.Payload()
		}
	} else if ip := header.IPv4(p); ip.TransportProtocol() == tcp.ProtocolNumber {
		id.LocalAddress, id.RemoteAddress, segment = ip.DestinationAddress(), ip.SourceAddress(), ip.Payload()
	}
	if len(segment) < header.TCPMinimumSize {
		return
	}
	head := int(segment.DataOffset())
	if head < header.TCPMinimumSize || head >= len(segment) || segment.Flags().Contains(header.TCPFlagSyn) {
		return
	}
	id.LocalPort, id.RemotePort = segment.DestinationPort(), segment.SourcePort()
	if c := s.conns.findConn(id); c != nil {
		c.incoming.onSegmentReceived(segment, cc.Bytes(len(segment)-head), s.clock())
	}
}
