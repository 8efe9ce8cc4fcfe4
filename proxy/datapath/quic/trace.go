// Package quic makes legs of HTTP/3 streams over quic-go: a stream that a CONNECT request has
// opened carries bytes as a TCP connection does.
//
// quic-go's statistics are of connections, not of streams, and its congestion control (Reno, one
// window for all streams of a connection) cannot be set. So a Trace receives the events that
// quic-go logs (qlog): which stream bytes each packet carries, which packets are acknowledged,
// which are lost. They are exact for each stream. The transport enforces neither window nor rate:
// the relay calls flow.Take before every write.
package quic

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	h3log "github.com/quic-go/quic-go/http3/qlog"
	"github.com/quic-go/quic-go/qlog"
	"github.com/quic-go/quic-go/qlogwriter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Tracer returns the quic.Config.Tracer of connections with streams that become legs. refused,
// unless nil, is called for each connection of a client with a certificate that is missing or not
// accepted.
func Tracer(clock func() cc.Time, refused func()) func(context.Context, bool, quic.ConnectionID) qlogwriter.Trace {
	return func(context.Context, bool, quic.ConnectionID) qlogwriter.Trace {
		return &Trace{clock: clock, refused: refused, fewLeft: make(chan struct{}, 1), streams: map[quic.StreamID]*signals{}}
	}
}

// Trace follows one QUIC connection by the events that quic-go logs. One lock serves all its
// streams, since the events of a connection come one after the other anyway.
//
// mu guards all fields below it, and the signals of all streams. Observers run with it held.
// QUIC's goroutine logs most events, HTTP/3's the frames and datagrams; legs take it for Info and
// Undelivered.
type Trace struct {
	clock        func() cc.Time
	refused      func()
	inboxes      sync.Map      // quic.StreamID to *Datagrams
	datagrams    atomic.Int64  // that QUIC has received and HTTP/3 has not taken yet
	fewLeft      chan struct{} // signals that only fewDatagrams are left
	waitTimedOut bool          // a wait for fewLeft has timed out; only QUIC's goroutine touches it
	sending      sync.Mutex    // held while a datagram is queued for QUIC, which may wait for room; taken before mu

	mu            sync.Mutex
	requestsBegun int64  // requests that the client has begun
	maxRequests   int64  // bound of requestsBegun
	onTooMany     func() // called once beyond maxRequests; nil: no bound, or it was called
	streams       map[quic.StreamID]*signals
	packets       flight
	unsent        []AckRequest  // of the datagrams that QUIC has queued, the oldest first
	changed       []*signals    // scratch: the streams that the current event is about
	ceCount       uint64        // packets that the peer says arrived with an ECN mark (CE)
	mss           cc.Bytes      // the most that one packet has carried of a stream
	blocked       bool          // the peer's window for the whole connection is full
	closed        bool          // the connection has ended
	cwnd          cc.Bytes      // the connection's, as are the following
	srtt          time.Duration // smoothed by quic-go
	minRTT        time.Duration
}

var (
	_ qlogwriter.Trace    = (*Trace)(nil)
	_ qlogwriter.Recorder = recorder{}
)

// AddProducer implements qlogwriter.Trace: QUIC and HTTP/3 both log to it.
func (t *Trace) AddProducer() qlogwriter.Recorder { return recorder{t} }

// recorder is a Trace as a qlogwriter.Recorder. Its Close is that of one producer, QUIC or
// HTTP/3, and ends nothing.
type recorder struct{ *Trace }

// Close implements qlogwriter.Recorder.
func (recorder) Close() error { return nil }

// RecordEvent implements qlogwriter.Recorder. quic-go calls it in the midst of its own work, so it
// must not block. The events of datagrams block on purpose: noteDatagrams, waitForRoom.
func (t *Trace) RecordEvent(e qlogwriter.Event) {
	switch e := e.(type) {
	case qlog.PacketSent:
		if e.Header.PacketType == qlog.PacketType1RTT {
			t.onPacketSent(int64(e.Header.PacketNumber), e.Frames)
		}
	case qlog.PacketReceived:
		if e.Header.PacketType == qlog.PacketType1RTT {
			// Owners of datagrams are called without t.mu, because they may send.
			if a := t.onPacketReceived(e.Frames); a.datagrams > 0 {
				a.asked.Owner.ReceiveAck(a.asked.Sequence, a.datagrams, a.delay)
			}
			t.noteDatagrams(e.Frames)
		}
	case qlog.DatagramDropped:
		if e.Direction == qlog.DirectionReceiving {
			t.noteDatagramTaken()
			return
		}
		t.mu.Lock()
		t.takeUnsent()
		t.mu.Unlock()
	case qlog.PacketLost:
		if e.Header.PacketType == qlog.PacketType1RTT {
			t.onPacketLost(int64(e.Header.PacketNumber))
		}
	case qlog.MetricsUpdated:
		t.onMetrics(e)
	case qlog.PTOCountUpdated:
		// The first probe asks whether the tail is lost; from the second on the peer has not
		// answered for as long as a retransmission timer waits.
		if e.PTOCount > 1 {
			t.onTimeout()
		}
	case h3log.FrameCreated:
		t.onFrameCreated(e)
	case h3log.DatagramParsed:
		t.noteDatagramTaken()
		if d, ok := t.inboxes.Load(quic.StreamID(4 * e.QuarterStreamID)); ok {
			d.(*Datagrams).waitForRoom()
		}
	case qlog.ConnectionClosed:
		t.mu.Lock()
		t.closed = true
		t.mu.Unlock()
		if t.refused != nil && e.ConnectionError != nil && aboutCertificate(uint64(*e.ConnectionError)) {
			t.refused()
		}
	}
}

// noteDatagrams counts the datagrams in a packet that QUIC has received, and waits if many are
// queued. After a wait that has timed out it does not wait again until few are queued.
func (t *Trace) noteDatagrams(frames []qlog.Frame) {
	n := int64(0)
	for _, f := range frames {
		if _, ok := f.Frame.(*qlog.DatagramFrame); ok {
			n++
		}
	}
	queued := t.datagrams.Add(n)
	if queued <= fewDatagrams {
		t.waitTimedOut = false
	}
	if queued <= manyDatagrams || t.waitTimedOut {
		return
	}
	select {
	case <-t.fewLeft: // a signal from before
	default:
	}
	if t.datagrams.Load() <= fewDatagrams {
		return
	}
	timer := time.NewTimer(maxTakeWait)
	defer timer.Stop()
	select {
	case <-t.fewLeft:
	case <-timer.C:
		t.waitTimedOut = true
	}
}

// noteDatagramTaken notes that HTTP/3 has taken a datagram, or that QUIC has lost it.
func (t *Trace) noteDatagramTaken() {
	if t.datagrams.Add(-1) == fewDatagrams {
		datapath.Signal(t.fewLeft)
	}
}

// aboutCertificate reports whether code is one of TLS's alerts about certificates (RFC 8446
// §6.2), as QUIC writes them (RFC 9001 §4.8).
func aboutCertificate(code uint64) bool {
	alert := code - 0x100
	return alert >= 42 && alert <= 48 || alert == 116
}

// onFrameCreated notes that a frame of HTTP/3 is about to be written to a stream.
func (t *Trace) onFrameCreated(e h3log.FrameCreated) {
	payload := 0
	if _, data := e.Frame.Frame.(h3log.DataFrame); data {
		payload = e.Raw.PayloadLength
	}
	if e.Raw.Length <= 0 || e.StreamID%4 != 0 { // only streams of requests, not the control stream
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.streams[e.StreamID]
	if s == nil {
		s = &signals{trace: t, id: e.StreamID}
		t.streams[e.StreamID] = s
	}
	s.layout.addFrame(int64(e.Raw.Length), int64(payload))
}

// onPacketSent notes what packet number pn carries.
func (t *Trace) onPacketSent(pn int64, frames []qlog.Frame) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changed = t.changed[:0]
	var p packet
	for _, f := range frames {
		switch f := f.Frame.(type) {
		case *qlog.StreamFrame:
			s := t.streams[f.StreamID]
			if s == nil {
				continue
			}
			if f.Length > 0 || f.Fin {
				t.mss = max(t.mss, cc.Bytes(f.Length))
				b := s.noteSent(f.Offset, f.Offset+f.Length)
				b.fin = f.Fin
				p.addSpan(b)
			}
			if f.Fin && !s.leg {
				delete(t.streams, s.id)
			}
		case *qlog.ResetStreamFrame:
			if s := t.streams[f.StreamID]; s != nil {
				s.reset = true
				if !s.leg {
					delete(t.streams, s.id)
				}
			}
		case *qlog.StreamDataBlockedFrame:
			if s := t.streams[f.StreamID]; s != nil {
				s.blockedAt = int64(f.MaximumStreamData)
				t.markChanged(s)
			}
		case *qlog.DatagramFrame:
			if a := t.takeUnsent(); a.Owner != nil {
				p.addDatagram(a)
			}
		case *qlog.DataBlockedFrame:
			t.blocked = true
			for _, s := range t.streams {
				t.markChanged(s)
			}
		}
	}
	if p.first.signals != nil || p.datagrams > 0 {
		p.at = t.clock()
		t.packets.addPacket(pn, p)
	}
	t.reportChanged(0)
}

// takeUnsent removes and returns the request of the datagram that leaves QUIC's queue. The caller
// holds t.mu.
func (t *Trace) takeUnsent() (a AckRequest) {
	if len(t.unsent) > 0 {
		a, t.unsent = t.unsent[0], t.unsent[1:]
	}
	return a
}

// ackedDatagrams are the datagrams that a packet from the peer acknowledges.
type ackedDatagrams struct {
	packet               // the newest one with datagrams; datagrams counts those of all packets of its owner
	delay  time.Duration // for which the peer kept the acknowledgement
}

// addPacket adds a packet that the peer acknowledges. Datagrams of another owner than the newest packet's are not
// counted.
func (a *ackedDatagrams) addPacket(p *packet) {
	switch {
	case p.datagrams == 0:
	case p.at >= a.at:
		n := p.datagrams
		if p.asked.Owner == a.asked.Owner {
			n += a.datagrams
		}
		a.packet = *p
		a.datagrams = n
	case p.asked.Owner == a.asked.Owner:
		a.datagrams += p.datagrams
	}
}

// onPacketReceived notes what a packet from the peer acknowledges, and the flow control limits in
// it. It returns the datagrams that have arrived.
func (t *Trace) onPacketReceived(frames []qlog.Frame) (arrived ackedDatagrams) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changed = t.changed[:0]
	var rtt time.Duration
	for _, f := range frames {
		switch f := f.Frame.(type) {
		case *qlog.AckFrame:
			rtt = t.onAckFrame(f, &arrived)
		case *qlog.MaxStreamDataFrame:
			if s := t.streams[f.StreamID]; s != nil && int64(f.MaximumStreamData) > s.blockedAt {
				s.blockedAt = 0
			}
		case *qlog.MaxDataFrame:
			t.blocked = false
		case *qlog.StreamFrame:
			if f.StreamID%4 == 0 { // a client's, both ways (RFC 9000 §2.1)
				t.requestsBegun = max(t.requestsBegun, int64(f.StreamID/4)+1)
			}
		}
	}
	t.checkRequestBound()
	t.reportChanged(rtt)
	return arrived
}

// onAckFrame handles an acknowledgement. It adds the datagrams that have arrived to arrived, and returns the round
// trip of the newest packet in it, without the peer's own delay (RFC 9002 §5.3); 0: no sample.
func (t *Trace) onAckFrame(f *qlog.AckFrame, arrived *ackedDatagrams) time.Duration {
	var newest cc.Time
	arrived.delay = f.DelayTime
	packets := uint64(0)
	for _, r := range f.AckRanges {
		t.packets.takePackets(int64(r.Smallest), int64(r.Largest), func(p *packet) {
			packets++
			newest = max(newest, p.at)
			arrived.addPacket(p)
			for b := range p.eachSpan {
				b.signals.noteAcked(b)
				t.markChanged(b.signals)
			}
		})
	}
	t.packets.forgetBefore(int64(f.AckRanges[0].Largest) - maxPacketsBehind)
	if packets == 0 {
		return 0
	}
	if f.ECNCE > t.ceCount {
		for _, s := range t.changed {
			s.marked += s.newlyAcked * cc.Bytes(min(f.ECNCE-t.ceCount, packets)) / cc.Bytes(packets)
		}
		t.ceCount = f.ECNCE
	}
	rtt := t.clock().Sub(newest)
	if less := rtt - f.DelayTime; less >= t.minRTT && t.minRTT > 0 {
		rtt = less
	}
	return max(rtt, time.Nanosecond)
}

// onPacketLost notes that quic-go has declared a packet lost. It will send its bytes again in other
// packets.
func (t *Trace) onPacketLost(pn int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.packets.takePackets(pn, pn, func(p *packet) {
		for b := range p.eachSpan {
			b.signals.missing += b.signals.missingBytes(b.from, b.to)
		}
	})
	t.packets.dropDone()
}

// onMetrics notes window and round trips of the connection. A field that has not changed is 0.
func (t *Trace) onMetrics(e qlog.MetricsUpdated) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.CongestionWindow > 0 {
		t.cwnd = cc.Bytes(e.CongestionWindow)
	}
	if e.SmoothedRTT > 0 {
		t.srtt = e.SmoothedRTT
	}
	if e.MinRTT > 0 {
		t.minRTT = e.MinRTT
	}
}

// onTimeout counts a timeout for each stream that waits for an acknowledgement.
func (t *Trace) onTimeout() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changed = t.changed[:0]
	for _, s := range t.streams {
		if s.next > s.una {
			s.timeouts++
			t.markChanged(s)
		}
	}
	t.reportChanged(0)
}

// markChanged makes reportChanged report s.
func (t *Trace) markChanged(s *signals) {
	if !s.changed {
		s.changed, t.changed = true, append(t.changed, s)
	}
}

// reportChanged reports the streams that the current event is about.
func (t *Trace) reportChanged(rtt time.Duration) {
	if len(t.changed) == 0 {
		return
	}
	now := t.clock() // with the lock held: reports are in the order of their times
	for i, s := range t.changed {
		t.changed[i] = nil
		sample := rtt
		if s.newlyAcked == 0 {
			sample = 0
		}
		s.changed, s.newlyAcked = false, 0
		s.sendReport(now, sample)
	}
}

// signalsOf returns the signals of a stream that becomes a leg.
func (t *Trace) signalsOf(id quic.StreamID) *signals {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.streams[id]
	if s == nil { // it has written nothing yet
		s = &signals{trace: t, id: id}
		t.streams[id] = s
	}
	s.leg = true
	return s
}

// BoundRequests makes the trace call onTooMany, on a new goroutine, once the client has begun more
// than most requests on a connection. trace is the connection's QlogTrace, made by Tracer.
func BoundRequests(trace qlogwriter.Trace, most int64, onTooMany func()) {
	t, ok := trace.(*Trace)
	if !ok {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.maxRequests, t.onTooMany = most, onTooMany
	t.checkRequestBound()
}

// checkRequestBound calls onTooMany if the client has begun too many requests. The caller holds
// t.mu.
func (t *Trace) checkRequestBound() {
	if t.onTooMany != nil && t.requestsBegun > t.maxRequests {
		go t.onTooMany()
		t.onTooMany = nil
	}
}
