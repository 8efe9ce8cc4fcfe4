package netstack

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/seqnum"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// signals is what is known of a connection's sending side. The stack calls it, with
// the endpoint locked, when a segment leaves, and with its whole state after each
// segment that came.
type signals struct {
	mu       sync.Mutex
	observer func(flow.Report) // nil: nobody observes
	over     bool              // closed: nothing is reported any more
	base     cc.Bytes          // written before Observe

	first   seqnum.Value // of the stream's first byte
	started bool         // first is known
	synAt   cc.Time      // when the first SYN or SYN-ACK left
	una     cc.Bytes     // stream offset up to which all is acknowledged
	unaSeq  seqnum.Value
	sndMax  cc.Bytes // up to which all has been sent once
	resent  cc.Bytes // highest offset sent more than once
	written cc.Bytes // accepted by the stack
	sacked  cc.Bytes // beyond una
	blocks  []span   // the ranges that are sacked
	kept    []span   // those sacked before a timeout, at which the stack forgets them
	expired int      // timeouts
	newest  cc.Bytes // highest offset known to have arrived
	lost    cc.Bytes // sent again
	pipe    cc.Bytes // in flight (RFC 6675 §2)
	window  cc.Bytes // the peer's receive window, from una
	mss     cc.Bytes
	cwnd    cc.Bytes // the stack's own
	srtt    time.Duration
	shake   time.Duration // round trip of the handshake, in whole milliseconds; 0: not known
	minRTT  time.Duration
	xmit    tcpip.MonotonicTime // when the newest segment left that has arrived
	at      cc.Time             // of the newest probe
	left    cc.Time             // when bytes left last
	stamp   uint32              // newest timestamp of the peer; 0: none yet
	peer    flow.PeerClock
}

// offsetOf is where seq lies in the stream.
func (g *signals) offsetOf(seq seqnum.Value) cc.Bytes {
	return g.una + cc.Bytes(int32(seq-g.unaSeq))
}

// span is a part of the stream, by offsets.
type span struct{ from, end cc.Bytes }

// onSegmentsSent notes that n bytes from seq leave, in segments of mss bytes, and returns which segments,
// by their numbers, are to be left out; nil: none. Those are what the peer has SACKed: the stack
// sends it again if it has sent several segments as one and one of them was lost.
func (g *signals) onSegmentsSent(now cc.Time, seq uint32, n, mss int, syn bool) (omit []bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if syn {
		g.first, g.started = seqnum.Value(seq)+1, true
		g.unaSeq = g.first
		return nil
	}
	if n == 0 || !g.started {
		return nil
	}
	g.left = now
	from := g.offsetOf(seqnum.Value(seq))
	end := from + cc.Bytes(n)
	if len(g.blocks)+len(g.kept) == 0 {
		g.noteSentRange(from, end)
		return nil
	}
	for i := 0; from < end; i++ {
		part := span{from, min(end, from+cc.Bytes(mss))}
		within := func(b span) bool { return b.from <= part.from && part.end <= b.end }
		if slices.ContainsFunc(g.blocks, within) || slices.ContainsFunc(g.kept, within) {
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
		g.lost += again
		g.resent = max(g.resent, from+again)
	}
	g.sndMax = max(g.sndMax, end)
	g.pipe += end - from
}

// updateTimestamp corrects the timestamp of a SYN or SYN-ACK that is sent again. The stack repeats
// that of the first, so that the timeout between them would be a part of the round trip that
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
	// The first stamp is up to a millisecond older than synAt, and none may be ahead of the stack's clock.
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

// onProbe is called by the stack after each segment that came.
func (s *Stack) onProbe(state *tcp.TCPEndpointState) {
	id := stack.TransportEndpointID{
		LocalPort: state.ID.LocalPort, LocalAddress: state.ID.LocalAddress,
		RemotePort: state.ID.RemotePort, RemoteAddress: state.ID.RemoteAddress,
	}
	if c := s.conns.findConn(id); c != nil {
		c.onProbe(state)
	}
}

// onProbe takes in the stack's state after a segment that came, and reports it. The
// stack holds its lock of the endpoint: a report that waited for another goroutine
// would cost a switch for each segment, and come out of order with what the stack does
// next. A report takes no lock that anybody holds who waits for an endpoint.
func (c *Conn) onProbe(state *tcp.TCPEndpointState) {
	e := c.tcpEndpoint()
	if e == nil {
		return
	}
	snd, ok := senderOf(e)
	if ok {
		snd.correctOutstanding(state.SACK.ReceivedBlocks)
		state.Sender.Outstanding = snd.Outstanding
	}
	if ok && !c.settled {
		c.settled = c.delayTailProbe(e, snd.probe)
	}
	c.incoming.onProbe(state)
	c.signals.updateFromState(state, endpointTimeouts(e), c.stack.clock)
	if ok {
		window := c.window.Load()
		snd.widenCwnd(cc.Bytes(window))
		c.widened.Store(window)
		state.Sender.SndCwnd = snd.SndCwnd
	}
	c.signals.noteStackWindow(state.Sender.SndCwnd)
}

// updateFromState takes in the stack's state and reports it.
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
		g.una, g.unaSeq = una, g.first+seqnum.Value(una)
	}
	g.keepSACKs(timeouts)
	g.sacked, g.blocks = 0, g.blocks[:0]
	for _, b := range state.SACK.ReceivedBlocks {
		if s := (span{max(g.una, g.offsetOf(b.Start)), g.offsetOf(b.End)}); s.end > s.from {
			g.sacked += s.end - s.from
			g.blocks = append(g.blocks, s)
		}
	}
	g.newest = 0
	if g.sacked > 0 {
		g.newest = g.offsetOf(state.SACK.MaxSACKED)
	} else if g.una > g.resent {
		g.newest = g.una
	}
	g.mss = cc.Bytes(snd.MaxPayloadSize)
	g.pipe = max(0, min(cc.Bytes(snd.Outstanding)*g.mss, g.sndMax-g.una-g.sacked))
	g.window = cc.Bytes(snd.SndWnd)
	if g.srtt == 0 {
		g.shake = snd.RTTState.SRTT
	}
	g.srtt = snd.RTTState.SRTT
	rtt := time.Duration(0)
	if r := &snd.RACKState; r.XmitTime != g.xmit && r.RTT > 0 {
		g.xmit, rtt = r.XmitTime, r.RTT
		if g.minRTT == 0 || rtt < g.minRTT {
			g.minRTT = rtt
		}
	}
	// RecentTS is of the newest segment in order: if it has not changed, it may be of an earlier
	// one than the segment that has just come.
	if stamp := state.RecentTS; stamp != g.stamp {
		if g.stamp != 0 { // what the first segment shows may be that of the SYN
			g.peer = flow.PeerClock{At: now, Value: stamp}
		}
		g.stamp = stamp
	}
	g.at = now
	g.sendReport(now, rtt, timeouts)
}

// keepSACKs remembers over a timeout what the peer has SACKed, unless the peer has dropped that
// since (RFC 2018 §8): an acknowledgement that reaches a range must go beyond it.
func (g *signals) keepSACKs(timeouts int) {
	if timeouts > g.expired {
		g.expired = timeouts
		g.kept = append(g.kept, g.blocks...)
	}
	g.kept = slices.DeleteFunc(g.kept, func(b span) bool { return b.end <= g.una })
	if slices.ContainsFunc(g.kept, func(b span) bool { return b.from <= g.una }) {
		g.kept = nil
	}
}

// peerClock is the newest timestamp of the peer, and the round trip of the handshake.
func (g *signals) peerClock() (flow.PeerClock, time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.peer, g.shake
}

// noteStackWindow notes how wide the stack's own window is, in segments.
func (g *signals) noteStackWindow(segments int) {
	g.mu.Lock()
	g.cwnd = cc.Bytes(segments) * g.mss
	g.mu.Unlock()
}

// sendReport reports to whoever observes; g.mu is held.
func (g *signals) sendReport(now cc.Time, rtt time.Duration, timeouts int) {
	if g.observer == nil || g.over {
		return
	}
	after := func(offset cc.Bytes) cc.Bytes { return max(0, offset-g.base) }
	written := max(g.written, g.sndMax)
	unsent := written - max(g.sndMax, g.una)
	g.observer(flow.Report{
		At: now, Written: after(written), Acked: after(g.una + g.sacked), Newest: after(g.newest), Sacked: g.sacked,
		Lost: g.lost, Timeouts: timeouts, RTT: rtt, Peer: g.peer,
		Unsent: min(unsent, after(written)), Pipe: min(g.pipe, after(written)), MSS: g.mss,
		RwndFull: unsent > 0 && g.sndMax-g.una+g.mss > g.window,
	})
}

// checkSilently reports what changes without a segment that comes, and tells whether it is too early
// for that. finished says that the peer has acknowledged our FIN and with it all bytes: the
// stack does not call the probe then.
func (g *signals) checkSilently(clock func() cc.Time, timeouts func() int, finished bool) (early bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := clock()
	if !g.started || g.written <= g.una {
		return false
	}
	if now.Sub(g.at) < pollEvery {
		return true
	}
	if finished {
		g.una, g.unaSeq, g.sndMax = g.written, g.first+seqnum.Value(g.written), g.written
		g.sacked, g.newest, g.pipe = 0, 0, 0
	}
	g.sendReport(now, 0, timeouts())
	return false
}

// setObserver sends reports to observer from now on.
func (g *signals) setObserver(clock func() cc.Time, observer func(flow.Report)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.observer, g.base = observer, g.written
	g.resent, g.lost = 0, 0
	g.sendReport(clock(), 0, 0)
}

// stopReports stops reports for good.
func (g *signals) stopReports() {
	g.mu.Lock()
	g.over = true
	g.mu.Unlock()
}
