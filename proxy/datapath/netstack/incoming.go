package netstack

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/seqnum"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
)

const (
	maxStamps  = 4096 // timestamps of ours kept, one per millisecond, that the peer has not echoed yet
	minSegment = 536  // bytes, RFC 9293 §3.7.1
)

// incoming follows the receiving side of a connection, and bounds the window that it advertises.
// The bound is written into the segments that leave. The stack's own window and buffers do not
// change, so they have room for all that was advertised.
type incoming struct {
	mu       sync.Mutex
	counting bool     // Arrivals was called, so onSegmentReceived is needed
	ended    bool     // stopCounting was called
	window   cc.Bytes // bound of the window; 0: none but the stack's own
	scale    uint8    // window scale of ours (RFC 7323 §2)

	started   bool         // the stream's first byte is known
	ackSeq    seqnum.Value // up to which we have acknowledged
	acked     cc.Bytes     // the same as a stream offset
	windowEnd cc.Bytes     // stream offset up to which the peer may send; it never decreases

	highest cc.Bytes      // stream offset of the end of what has come, holes or not
	holes   int           // how often a segment came beyond highest
	mss     cc.Bytes      // the most that came in one segment
	rtt     time.Duration // of the newest timestamp that was echoed; 0: none was
	stamps  []stamp       // sent and not echoed yet, the oldest first
}

// stamp is a timestamp of ours, and when it first left.
type stamp struct {
	value uint32
	at    cc.Time
}

// onSegmentSent notes the acknowledgement in a segment that leaves, and reduces its window to the
// bound. The right edge of the window never moves to the left (RFC 9293 §3.8.6).
func (in *incoming) onSegmentSent(segment header.TCP, now cc.Time) {
	if !segment.Flags().Contains(header.TCPFlagAck) {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	ack := seqnum.Value(segment.AckNumber())
	if !in.started {
		in.started, in.ackSeq = true, ack
	}
	if news := cc.Bytes(int32(ack - in.ackSeq)); news > 0 {
		in.ackSeq, in.acked = ack, in.acked+news
	}
	scale := in.scale
	if segment.Flags().Contains(header.TCPFlagSyn) {
		scale = 0
	}
	field := cc.Bytes(segment.WindowSize())
	if in.window > 0 {
		step := cc.Bytes(1) << scale
		if least := (max(in.windowEnd-in.acked, in.window) + step - 1) / step; least < field {
			field = least
			var value [2]byte
			binary.BigEndian.PutUint16(value[:], uint16(field))
			RewriteSegment(segment, header.TCPWinSizeOffset, value[:])
		}
	}
	in.windowEnd = max(in.windowEnd, in.acked+field<<scale)
	if at := timestampIndex(segment); in.counting && at >= 0 {
		in.rememberTimestamp(binary.BigEndian.Uint32(segment[at:]), now)
	}
}

// rememberTimestamp remembers when a timestamp left first; in.mu is held.
func (in *incoming) rememberTimestamp(value uint32, now cc.Time) {
	if n := len(in.stamps); n > 0 && int32(value-in.stamps[n-1].value) <= 0 {
		return
	}
	if len(in.stamps) == maxStamps {
		in.stamps = slices.Delete(in.stamps, 0, maxStamps/2)
	}
	in.stamps = append(in.stamps, stamp{value, now})
}

// onSegmentReceived notes a segment with data. It measures a round trip at the first echo of a
// timestamp, since that was sent when the segment with the timestamp arrived.
func (in *incoming) onSegmentReceived(segment header.TCP, size cc.Bytes, now cc.Time) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.counting || !in.started {
		return
	}
	from := in.acked + cc.Bytes(int32(seqnum.Value(segment.SequenceNumber())-in.ackSeq))
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

// onProbe notes the stack's window scale, which the handshake has set.
func (in *incoming) onProbe(state *tcp.TCPEndpointState) {
	in.mu.Lock()
	in.scale = state.Receiver.RcvWndScale
	in.mu.Unlock()
}

// stopCounting makes onSegmentReceived ignore all segments from now on. It reports whether it was
// counting.
func (in *incoming) stopCounting() (wasCounting bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	wasCounting, in.counting, in.ended, in.stamps = in.counting, false, true, nil
	return wasCounting
}
