package netstack

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/seqnum"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// signals follows the sending side of a connection and reports it. It is called, with the endpoint
// locked, when a segment leaves, and with the stack's state after each segment that came. Offsets
// count the bytes of the stream from 0.
type signals struct {
	mu           sync.Mutex
	observer     func(flow.Report) // called with mu held; nil: none
	stopped      bool              // closed: nothing is reported any more
	observedFrom cc.Bytes          // written before Observe, and not reported

	firstSeq seqnum.Value // of the stream's first byte
	started  bool         // firstSeq is known
	synAt    cc.Time      // when the first SYN or SYN-ACK left

	// What was sent.
	written       cc.Bytes // accepted by the stack
	sndMax        cc.Bytes // offset up to which all has been sent once
	resent        cc.Bytes // highest offset sent more than once
	retransmitted cc.Bytes // bytes sent again
	pipe          cc.Bytes // in flight (RFC 6675 §2)
	sentAt        cc.Time  // when bytes left last

	// What has arrived.
	una           cc.Bytes // offset up to which all is acknowledged
	unaSeq        seqnum.Value
	sacked        cc.Bytes // bytes beyond una
	sackBlocks    []span   // the ranges that are sacked
	keptBlocks    []span   // ranges sacked before a timeout, which the stack forgets then
	timeouts      int      // expiries of the retransmission timer that keptBlocks has seen
	newestArrived cc.Bytes // highest offset known to have arrived

	// The stack's state at its newest probe.
	probedAt     cc.Time
	peerWindow   cc.Bytes // the peer's receive window, from una
	mss          cc.Bytes
	cwnd         cc.Bytes // the stack's own
	srtt, minRTT time.Duration
	handshakeRTT time.Duration       // in whole milliseconds; 0: not known
	newestSentAt tcpip.MonotonicTime // when the newest segment left that has arrived (RACK, RFC 8985 §6.1)
	peerStamp    uint32              // newest timestamp of the peer; 0: none yet
	peerTick     flow.PeerClock
}

// span is a part of the stream, by offsets.
type span struct{ from, end cc.Bytes }

// offsetOf returns where seq lies in the stream.
func (g *signals) offsetOf(seq seqnum.Value) cc.Bytes {
	return g.una + cc.Bytes(int32(seq-g.unaSeq))
}

// onSegmentsSent notes that n bytes from seq leave, in segments of mss bytes. It returns by number
// which segments are to be left out, because the peer has SACKed them; nil: none. The stack sends
// such segments again if it has sent several as one and one of them was lost.
func (g *signals) onSegmentsSent(now cc.Time, seq uint32, n, mss int, syn bool) (omit []bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if syn {
		g.firstSeq, g.started = seqnum.Value(seq)+1, true
		g.unaSeq = g.firstSeq
		return nil
	}
	if n == 0 || !g.started {
		return nil
	}
	g.sentAt = now
	from := g.offsetOf(seqnum.Value(seq))
	end := from + cc.Bytes(n)
	if len(g.sackBlocks)+len(g.keptBlocks) == 0 {
		g.noteSentRange(from, end)
		return nil
	}
	for i := 0; from < end; i++ {
		part := span{from, min(end, from+cc.Bytes(mss))}
		within := func(b span) bool { return b.from <= part.from && part.end <= b.end }
		if slices.ContainsFunc(g.sackBlocks, within) || slices.ContainsFunc(g.keptBlocks, within) {
			if omit == nil {
				omit = make([]bool, (n+mss-1)/mss)
			}
			omit[i] = true
		} else {
			g.noteSentRange(part.from, part.end)
		}
		from = part.end
	}
	return omit
}

// noteSentRange notes that a part of the stream leaves.
func (g *signals) noteSentRange(from, end cc.Bytes) {
	if again := min(end, g.sndMax) - from; again > 0 {
		g.retransmitted += again
		g.resent = max(g.resent, from+again)
	}
	g.sndMax = max(g.sndMax, end)
	g.pipe += end - from
}

// updateTimestamp corrects the timestamp of a SYN or SYN-ACK that is sent again, in which the stack
// repeats the first one. Otherwise the timeout between them would be a part of the round trip that
// the acknowledgement measures (RFC 7323 §4.1).
func (g *signals) updateTimestamp(syn header.TCP, now cc.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.synAt == 0 {
		g.synAt = now
		return
	}
	late := uint32(now.Sub(g.synAt).Milliseconds()) // the stack's stamps are milliseconds, too
	at := timestampIndex(syn)
	if at < 0 || late < 2 {
		return
	}
	// The first stamp is up to a millisecond older than synAt, and none may be ahead of the
	// stack's clock.
	var value [4]byte
	binary.BigEndian.PutUint32(value[:], binary.BigEndian.Uint32(syn[at:])+late-1)
	RewriteSegment(syn, at, value[:])
}

// noteAccepted notes that the stack has accepted n bytes.
func (g *signals) noteAccepted(n int) {
	g.mu.Lock()
	g.written += cc.Bytes(n)
	g.mu.Unlock()
}

// updateFromState updates the signals from the stack's state, and reports them.
func (g *signals) updateFromState(state *tcp.TCPEndpointState, timeouts int, clock func() cc.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.started {
		return
	}
	now := clock() // with the lock held: reports are in the order of their times
	snd := &state.Sender
	sent := max(g.sndMax, g.written) // a FIN takes a sequence number, but is no byte
	una := min(g.offsetOf(snd.SndUna), sent)
	if una > g.una {
		g.una, g.unaSeq = una, g.firstSeq+seqnum.Value(una)
	}
	g.keepSACKs(timeouts)
	g.sacked, g.sackBlocks = 0, g.sackBlocks[:0]
	for _, b := range state.SACK.ReceivedBlocks {
		if s := (span{max(g.una, g.offsetOf(b.Start)), g.offsetOf(b.End)}); s.end > s.from {
			g.sacked += s.end - s.from
			g.sackBlocks = append(g.sackBlocks, s)
		}
	}
	g.newestArrived = 0
	if g.sacked > 0 {
		g.newestArrived = g.offsetOf(state.SACK.MaxSACKED)
	} else if g.una > g.resent {
		g.newestArrived = g.una
	}
	g.mss = cc.Bytes(snd.MaxPayloadSize)
	g.pipe = max(0, min(cc.Bytes(snd.Outstanding)*g.mss, g.sndMax-g.una-g.sacked))
	g.peerWindow = cc.Bytes(snd.SndWnd)
	if g.srtt == 0 {
		g.handshakeRTT = snd.RTTState.SRTT
	}
	g.srtt = snd.RTTState.SRTT
	rtt := time.Duration(0)
	if r := &snd.RACKState; r.XmitTime != g.newestSentAt && r.RTT > 0 {
		g.newestSentAt, rtt = r.XmitTime, r.RTT
		if g.minRTT == 0 || rtt < g.minRTT {
			g.minRTT = rtt
		}
	}
	// RecentTS is the timestamp of the newest segment in order. Unless it has changed, it may be
	// older than the segment that has just come.
	if stamp := state.RecentTS; stamp != g.peerStamp {
		if g.peerStamp != 0 { // the first one may be that of the SYN
			g.peerTick = flow.PeerClock{At: now, Value: stamp}
		}
		g.peerStamp = stamp
	}
	g.probedAt = now
	g.sendReport(now, rtt, timeouts)
}

// keepSACKs keeps SACKed ranges over a timeout. It drops them once an acknowledgement reaches a
// range and does not go beyond it, since the peer has then discarded that data (RFC 2018 §8).
func (g *signals) keepSACKs(timeouts int) {
	if timeouts > g.timeouts {
		g.timeouts = timeouts
		g.keptBlocks = append(g.keptBlocks, g.sackBlocks...)
	}
	g.keptBlocks = slices.DeleteFunc(g.keptBlocks, func(b span) bool { return b.end <= g.una })
	if slices.ContainsFunc(g.keptBlocks, func(b span) bool { return b.from <= g.una }) {
		g.keptBlocks = nil
	}
}

// peerTimestamps returns the newest timestamp of the peer, and the round trip of the handshake.
func (g *signals) peerTimestamps() (flow.PeerClock, time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.peerTick, g.handshakeRTT
}

// noteStackWindow notes how wide the stack's own window is, in segments.
func (g *signals) noteStackWindow(segments int) {
	g.mu.Lock()
	g.cwnd = cc.Bytes(segments) * g.mss
	g.mu.Unlock()
}

// reportWithoutSegment reports changes that no incoming segment shows. early: it did not, since the
// last segment came less than pollEvery ago. finished: the peer has acknowledged our FIN and with
// it all bytes, for which the stack does not call the probe.
func (g *signals) reportWithoutSegment(clock func() cc.Time, timeouts func() int, finished bool) (early bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := clock()
	if !g.started || g.written <= g.una {
		return false
	}
	if now.Sub(g.probedAt) < pollEvery {
		return true
	}
	if finished {
		g.una, g.unaSeq, g.sndMax = g.written, g.firstSeq+seqnum.Value(g.written), g.written
		g.sacked, g.newestArrived, g.pipe = 0, 0, 0
	}
	g.sendReport(now, 0, timeouts())
	return false
}

// setObserver sends reports to observer from now on.
func (g *signals) setObserver(clock func() cc.Time, observer func(flow.Report)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.observer, g.observedFrom = observer, g.written
	g.resent, g.retransmitted = 0, 0
	g.sendReport(clock(), 0, 0)
}

// sendReport calls the observer; g.mu is held.
func (g *signals) sendReport(now cc.Time, rtt time.Duration, timeouts int) {
	if g.observer == nil || g.stopped {
		return
	}
	after := func(offset cc.Bytes) cc.Bytes { return max(0, offset-g.observedFrom) }
	written := max(g.written, g.sndMax)
	unsent := written - max(g.sndMax, g.una)
	g.observer(flow.Report{
		At: now, Written: after(written), Acked: after(g.una + g.sacked), Newest: after(g.newestArrived), Sacked: g.sacked,
		Lost: g.retransmitted, Timeouts: timeouts, RTT: rtt, Peer: g.peerTick,
		Unsent: min(unsent, after(written)), Pipe: min(g.pipe, after(written)), MSS: g.mss,
		RwndFull: unsent > 0 && g.sndMax-g.una+g.mss > g.peerWindow,
	})
}

// stopReports stops reports for good: none comes after it has returned.
func (g *signals) stopReports() {
	g.mu.Lock()
	g.stopped = true
	g.mu.Unlock()
}

// isInFlight reports whether a segment that begins at seq may be in flight.
func (g *signals) isInFlight(seq seqnum.Value) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := g.offsetOf(seq)
	return g.started && g.una-1 <= at && at <= g.sndMax // a SYN lies before the stream
}

// quietTime returns the time since a segment came or bytes left.
func (g *signals) quietTime(now cc.Time) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return now.Sub(max(g.probedAt, g.sentAt))
}

// lastSegmentTime returns when the newest segment came.
func (g *signals) lastSegmentTime() cc.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.probedAt
}
