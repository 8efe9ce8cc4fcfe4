package quic

import (
	"slices"
	"sort"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// signals follows the sending side of a stream and reports it. The trace's lock guards it. Offsets
// are those of QUIC's stream, with the headers of HTTP/3's frames.
type signals struct {
	trace        *Trace
	id           quic.StreamID
	leg          bool              // a Conn uses it
	observer     func(flow.Report) // called with trace.mu held; nil: none
	stopped      bool              // closed: nothing is reported any more
	finished     bool              // the FIN has been written
	ended        bool              // the FIN has arrived
	reset        bool              // bytes that have not arrived never will
	observedFrom cc.Bytes          // payload written before Observe

	layout        layout
	next          int64    // offset up to which all has been sent once
	una           int64    // offset up to which all has arrived
	beyond        []piece  // arrived beyond una, in order
	newest        int64    // highest offset known to have arrived by its first transmission
	missing       int64    // bytes found lost and not sent again yet
	blockedAt     int64    // offset at which the peer's window is full; 0: it is not
	retransmitted cc.Bytes // sent again
	marked        cc.Bytes // arrived with an ECN mark
	timeouts      int

	newlyAcked cc.Bytes // acknowledged by the current event
	changed    bool     // is in trace.changed
}

// piece is a part of the stream, by offsets.
type piece struct{ from, to int64 }

// noteSent notes that bytes are sent, and returns them for the packet that carries them.
func (s *signals) noteSent(from, to int64) span {
	b := span{signals: s, from: from, to: to, resent: from < s.next}
	if b.resent {
		n := min(to, s.next) - from
		s.retransmitted += cc.Bytes(n)
		s.missing = max(0, s.missing-n)
	}
	s.next = max(s.next, to)
	return b
}

// noteAcked notes that b is acknowledged. Bytes that were lost and sent again may be acknowledged
// twice, and count once.
func (s *signals) noteAcked(b span) {
	s.ended = s.ended || b.fin
	n := s.missingBytes(b.from, b.to)
	s.newlyAcked += cc.Bytes(n)
	if !b.resent && b.to > b.from {
		s.newest = max(s.newest, b.to)
	}
	if n == 0 {
		return
	}
	if b.from > s.una {
		s.insertPiece(b.from, b.to)
		return
	}
	s.una = max(s.una, b.to)
	for len(s.beyond) > 0 && s.beyond[0].from <= s.una {
		s.una = max(s.una, s.beyond[0].to)
		s.beyond = s.beyond[1:]
	}
	s.layout.forgetBefore(s.una)
}

// insertPiece adds a piece beyond a hole, joined with those that it touches.
func (s *signals) insertPiece(from, to int64) {
	i := sort.Search(len(s.beyond), func(i int) bool { return s.beyond[i].to >= from })
	j := i
	for ; j < len(s.beyond) && s.beyond[j].from <= to; j++ {
		from, to = min(from, s.beyond[j].from), max(to, s.beyond[j].to)
	}
	s.beyond = slices.Replace(s.beyond, i, j, piece{from, to})
}

// missingBytes counts the bytes between from and to that have not arrived.
func (s *signals) missingBytes(from, to int64) int64 {
	from = max(from, s.una)
	n := max(0, to-from)
	for _, p := range s.beyond {
		n -= max(0, min(to, p.to)-max(from, p.from))
	}
	return n
}

// sendReport calls the observer. Offsets of the stream become bytes of payload, counted from
// Observe.
func (s *signals) sendReport(now cc.Time, rtt time.Duration) {
	if s.observer == nil || s.stopped {
		return
	}
	after := func(payload int64) cc.Bytes { return max(0, cc.Bytes(payload)-s.observedFrom) }
	at := s.layout.payloadBefore
	sacked := int64(0)
	for _, p := range s.beyond {
		sacked += at(p.to) - at(p.from)
	}
	acked, written, sent := at(s.una)+sacked, s.layout.end, at(s.next)
	newest := at(s.newest)
	if newest < acked {
		newest = 0
	}
	unsent := written - sent
	s.observer(flow.Report{
		At: now, Written: after(written), Acked: after(acked), Newest: after(newest), Sacked: cc.Bytes(sacked),
		Lost: s.retransmitted, Marked: min(s.marked, after(acked)), Timeouts: s.timeouts, RTT: rtt,
		Unsent: min(cc.Bytes(unsent), after(written)),
		Pipe:   min(cc.Bytes(max(0, sent-acked-s.missing)), after(written)),
		MSS:    s.trace.mss, RwndFull: unsent > 0 && (s.trace.blocked || s.blockedAt > 0 && s.next >= s.blockedAt),
	})
}

// setObserver sends reports to observer from now on.
func (s *signals) setObserver(observer func(flow.Report)) {
	t := s.trace
	t.mu.Lock()
	defer t.mu.Unlock()
	s.observer, s.observedFrom = observer, cc.Bytes(s.layout.end)
	s.retransmitted, s.marked, s.timeouts = 0, 0, 0
	s.sendReport(t.clock(), 0)
}

// stopReports stops reports for good.
func (s *signals) stopReports() {
	t := s.trace
	t.mu.Lock()
	defer t.mu.Unlock()
	s.stopped = true
	delete(t.streams, s.id)
}

// noteFIN notes that the FIN is written.
func (s *signals) noteFIN() {
	s.trace.mu.Lock()
	defer s.trace.mu.Unlock()
	s.finished = true
}

// undeliveredBytes returns how much of the payload has not arrived. The FIN counts as a byte.
func (s *signals) undeliveredBytes() cc.Bytes {
	s.trace.mu.Lock()
	defer s.trace.mu.Unlock()
	if s.reset {
		return 0
	}
	at := s.layout.payloadBefore
	n := s.layout.end - at(s.una)
	for _, p := range s.beyond {
		n -= at(p.to) - at(p.from)
	}
	if s.finished && !s.ended {
		n++
	}
	return cc.Bytes(n)
}

// layout maps offsets of a QUIC stream to those of the payload in HTTP/3's DATA frames.
type layout struct {
	frames []frame // those that may not have arrived entirely, in order; the first one counts those before it
	wire   int64   // where the next frame begins
	end    int64   // payload in all frames
}

// frame is an HTTP/3 frame.
type frame struct {
	body   int64 // offset in the stream of its first byte of payload, or of its end if it has none
	before int64 // payload in the frames before it
}

// addFrame notes the next frame, of length bytes. Its last payload bytes are payload.
func (l *layout) addFrame(length, payload int64) {
	l.frames = append(l.frames, frame{body: l.wire + length - payload, before: l.end})
	l.wire += length
	l.end += payload
}

// payloadBefore returns how much payload lies before offset. An offset within a header is before
// the payload behind it.
func (l *layout) payloadBefore(offset int64) int64 {
	i := sort.Search(len(l.frames), func(i int) bool { return l.frames[i].body >= offset }) - 1
	if i < 0 {
		if len(l.frames) > 0 {
			return l.frames[0].before
		}
		return 0
	}
	next := l.end
	if i+1 < len(l.frames) {
		next = l.frames[i+1].before
	}
	return min(l.frames[i].before+offset-l.frames[i].body, next)
}

// forgetBefore forgets the frames that end before offset, up to which all has arrived.
func (l *layout) forgetBefore(offset int64) {
	n := 0
	for n+1 < len(l.frames) && l.frames[n+1].body <= offset {
		n++
	}
	l.frames = l.frames[n:]
}
