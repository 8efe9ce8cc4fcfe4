package flow

import (
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// sampler turns the reports of one flow into what became of its bytes: how many are in flight, arrived and were
// lost, and the round trips and delivery rates that they show. No other type reads reports.
type sampler struct {
	enforced       bool // the leg enforces the window
	last           Report
	ledger         ledger
	newestArrived  cc.Bytes // highest stream offset known to have arrived
	joinOffset     cc.Bytes // stream offset sent before the flow joined its group; the algorithm hears nothing of it
	taken          cc.Bytes // bytes that have left, or are granted and on their way to the transport
	inflight       cc.Bytes
	rwndBlocked    cc.Bytes // bytes in flight that are unsent behind a closed receive window: they load no path
	legMeasuresRTT bool     // the leg has given round trips: the ledger's samples would be worse
	rtt            rttEstimator
	deliveryRate   cc.Rate // newest sample; 0: none
	oneWayDelays   oneWayEstimator
	reverseQueue   time.Duration // of the newest round trip, the queue on the way back
	oneWayKnown    bool          // reverseQueue is known
	timedOut       bool          // the retransmission timer fired, and nothing has been acknowledged since

	lossEvents    int      // OnLoss calls
	lossEpoch     uint64   // the group's loss event that the two fields below belong to
	recoveryPoint cc.Bytes // stream offset sent when that event began (RFC 6582)
	lossEpochAt   cc.Time  // when it began; 0: there was none
}

// reportDelta is what a report adds to the reports before it.
type reportDelta struct {
	acked, lost, marked cc.Bytes
	timeouts            int
}

// segmentSize returns the payload of a full segment.
func (s *sampler) segmentSize() cc.Bytes {
	if s.last.MSS > 0 {
		return s.last.MSS
	}
	return cc.DefaultMSS
}

// readReport stores a report and returns what is new in it. Counters never run backwards.
func (s *sampler) readReport(r Report) (delta reportDelta) {
	last := &s.last
	r.Written, r.Acked = max(r.Written, last.Written), max(r.Acked, last.Acked)
	r.Newest, r.Lost = max(r.Newest, 0), max(r.Lost, last.Lost)
	r.Marked, r.Timeouts = max(r.Marked, last.Marked), max(r.Timeouts, last.Timeouts)
	if r.MSS == 0 {
		r.MSS = last.MSS
	}
	if !s.enforced {
		// The transport cannot have more than was granted; its own figure may be an estimate.
		r.Written = min(r.Written, s.taken)
	}
	delta = reportDelta{r.Acked - last.Acked, r.Lost - last.Lost, r.Marked - last.Marked, r.Timeouts - last.Timeouts}
	s.last = r
	s.legMeasuresRTT = s.legMeasuresRTT || s.enforced && r.RTT > 0
	return delta
}

// newlyDeparted returns how many bytes have left, over a leg that enforces the window, since countSent last counted
// them. Call it after readReport.
func (s *sampler) newlyDeparted() cc.Bytes {
	if !s.enforced {
		return 0
	}
	return max(0, max(s.last.Written-s.last.Unsent, s.last.Acked)-s.taken)
}

// departureTime returns when the bytes left that a report is the first to show. That is the time of the report, or
// one round trip earlier if some of them (at most window bytes) are acknowledged already.
func (s *sampler) departureTime(before cc.Time, left, window cc.Bytes) cc.Time {
	r := &s.last
	if r.RTT == 0 || max(r.Acked, r.Newest) <= s.taken || left > window {
		return r.At
	}
	return min(r.At, max(before, r.At.Add(-r.RTT)))
}

// addSent counts n bytes in flight that leave now, with record c, in ledger chunks of about granule bytes.
func (s *sampler) addSent(n, granule cc.Bytes, c chunk) {
	s.ledger.addChunk(n, granule, c)
	s.taken += n
	s.inflight += n
}

// updateInflight brings the ledger and the bytes in flight up to date with the last report. Bytes that the transport
// has are counted by its own figures; granted bytes that have not reached it are ours. Where the leg enforces the
// window, only bytes on the wire count. Counting by acknowledgements alone would stall in each recovery and then
// release a burst.
func (s *sampler) updateInflight(delta reportDelta) {
	r := &s.last
	if delta.timeouts > 0 || delta.lost > 0 && r.Newest == 0 {
		s.ledger.markResent(delta.timeouts > 0)
	}
	s.ledger.markUnsent(r.Written-r.Unsent, r.At)
	inflight := s.taken - r.Acked
	switch {
	case s.enforced && r.Pipe >= 0:
		inflight = r.Pipe
	case r.Pipe >= 0:
		inflight = s.taken - r.Written + r.Pipe + r.Unsent
	}
	s.inflight, s.rwndBlocked = max(0, inflight), 0
	if r.RwndFull && !s.enforced {
		s.rwndBlocked = min(r.Unsent, s.inflight)
	}
}

// sentOffset returns the stream offset up to which bytes have left.
func (s *sampler) sentOffset() cc.Bytes {
	if s.enforced {
		return s.taken
	}
	return s.taken - s.last.Unsent
}

// joinLossEpoch records that the group's loss event with number epoch began at a time, if it is a new one. Call it
// before the rest of a report or request is processed, because it reads how far the flow has sent.
func (s *sampler) joinLossEpoch(epoch uint64, at cc.Time) {
	if s.lossEpoch != epoch {
		s.lossEpoch, s.recoveryPoint, s.lossEpochAt = epoch, s.sentOffset(), at
	}
}

// isRecovering reports whether a hole of the last loss event is still open. A loss then belongs to that event
// (RFC 6582's recovery point), however many round trips it takes.
func (s *sampler) isRecovering() bool {
	return s.lossEpochAt != 0 && s.last.Acked-s.last.Sacked < s.recoveryPoint
}

// ackSentBy counts what had left by sentBy as arrived, without a report, and returns its bytes.
func (s *sampler) ackSentBy(now, sentBy cc.Time) (n cc.Bytes) {
	s.ledger.dropSentBy(sentBy)
	n = s.taken - s.ledger.inFlight() - s.last.Acked
	s.last.At, s.last.Written, s.last.Acked = now, s.taken, s.last.Acked+n
	s.inflight = s.taken - s.last.Acked
	return n
}

// takeDelivered counts delta.acked bytes as delivered. It returns what they show: the record of the newest byte, its
// round trip and its delivery rate; 0 where there is none. leastRTT is the path's.
func (s *sampler) takeDelivered(delta reportDelta, d *delivery, leastRTT time.Duration) (
	sent cc.Sent, rtt time.Duration, rate cc.Rate,
) {
	r := &s.last
	d.addDelivered(delta.acked)
	s.newestArrived = max(s.newestArrived, r.Newest, r.Acked)
	c, ok := s.ledger.dropArrived(s.newestArrived)
	if ok && r.RTT > 0 { // exact, while the ledger has the time of the report that first showed it
		c.sent.At = min(r.At, max(d.firstSentAt, r.At.Add(-r.RTT)))
		d.firstSentAt = c.sent.At
	}
	switch {
	case ok && !c.resent:
		if !s.legMeasuresRTT {
			rtt = r.At.Sub(c.sent.At)
		}
		rate = d.deliveryRate(r.At, c, leastRTT)
		d.firstSentAt = c.sent.At
	case ok && s.rtt.srtt > 0: // it was resent a round trip ago; the time until the retransmission is not part of a flight
		d.firstSentAt = max(d.firstSentAt, r.At.Add(-s.rtt.srtt))
	}
	if r.RTT > 0 {
		rtt = r.RTT
	}
	d.deliveredAt = r.At
	if rtt > 0 {
		s.rtt.addSample(rtt)
	}
	if rate > 0 {
		s.deliveryRate = rate
	}
	return c.sent, rtt, rate
}

// delivery counts what the members of a group have delivered. Delivery rates are those of the group. Names follow the
// delivery rate estimation of draft-cardwell-iccrg-bbr §4.1.
type delivery struct {
	total           cc.Bytes      // by members past and present
	edgeTotal       *atomic.Int64 // bytes delivered by all groups with this algorithm
	deliveredAt     cc.Time       // when total last grew
	firstSentAt     cc.Time       // when the newest delivered byte had left
	appLimitedUntil cc.Bytes      // samples until total has reached this understate the path; 0: none do
}

// addDelivered counts n bytes.
func (d *delivery) addDelivered(n cc.Bytes) {
	d.total += n
	d.edgeTotal.Add(int64(n))
}

// restartMeasuring begins to measure rates at now. Call it when nothing is in flight.
func (d *delivery) restartMeasuring(now cc.Time) { d.deliveredAt, d.firstSentAt = now, now }

// deliveryRate returns the delivery rate over the flight of chunk c: bytes delivered since c left, over the longer of
// the time it took to send and to acknowledge them (draft-cardwell-iccrg-bbr §4.1.2.3). So bunched acknowledgements do
// not inflate it. It returns 0 for a burst shorter than a round trip.
func (d *delivery) deliveryRate(now cc.Time, c chunk, leastRTT time.Duration) cc.Rate {
	took := max(now.Sub(c.sent.DeliveredAt), c.sent.At.Sub(c.firstSentAt))
	if took < leastRTT {
		return 0
	}
	return cc.RateOf(d.total-c.sent.Delivered, took)
}

// rttEstimator smooths round-trip samples (RFC 6298 §2) and keeps their minimum. All fields are 0 before the first.
type rttEstimator struct {
	latest, srtt, rttvar, min time.Duration
}

// addSample adds one raw sample.
func (e *rttEstimator) addSample(sample time.Duration) {
	sample = max(sample, time.Microsecond) // clocks are coarse, and 0 means no sample
	e.latest = sample
	if e.srtt == 0 {
		e.srtt, e.rttvar, e.min = sample, sample/2, sample
		return
	}
	e.min = min(e.min, sample)
	e.rttvar += ((e.srtt - sample).Abs() - e.rttvar) / 4
	e.srtt += (sample - e.srtt) / 8
}

// shiftedBy returns e as it would be on a path with a base round trip that is d longer.
func (e rttEstimator) shiftedBy(d time.Duration) rttEstimator {
	for _, rtt := range []*time.Duration{&e.latest, &e.srtt, &e.min} {
		if *rtt > 0 {
			*rtt = max(*rtt+d, time.Microsecond)
		}
	}
	return e
}

// rto returns the retransmission timeout that the samples suggest (RFC 6298 §2.3, with Linux's 200 ms floor). It is
// one second before the first sample.
func (e *rttEstimator) rto() time.Duration {
	if e.srtt == 0 {
		return time.Second
	}
	return max(e.srtt+4*e.rttvar, 200*time.Millisecond)
}

// ledgerChunks bounds the memory of one flow's send ledger.
const ledgerChunks = 512

// ledger remembers when which bytes of the stream left. A transport that acknowledges a byte stream shows no packets,
// so chunks of at least a segment represent them. Chunks get larger where more is in flight than there are chunks:
// the ledger loses detail, never bytes.
type ledger struct {
	ring        []chunk // nil while nothing is recorded
	head        int     // index of the oldest chunk
	count       int
	startOffset cc.Bytes // stream offset at which the oldest chunk begins
}

// chunk is the record of bytes that left together.
type chunk struct {
	end         cc.Bytes // stream offset just past the chunk
	sent        cc.Sent
	firstSentAt cc.Time // delivery.firstSentAt when the chunk left
	resent      bool    // it may have been retransmitted: it gives no round trip (Karn)
}

// chunkAt returns the i-th oldest chunk.
func (l *ledger) chunkAt(i int) *chunk { return &l.ring[(l.head+i)%len(l.ring)] }

// endOffset returns the stream offset just past the newest chunk.
func (l *ledger) endOffset() cc.Bytes {
	if l.count == 0 {
		return l.startOffset
	}
	return l.chunkAt(l.count - 1).end
}

// chunkStart returns the stream offset at which chunk i begins.
func (l *ledger) chunkStart(i int) cc.Bytes {
	if i == 0 {
		return l.startOffset
	}
	return l.chunkAt(i - 1).end
}

// addChunk records n bytes in chunks of about granule bytes. Bytes that come little by little join the last chunk
// while the ring could not hold everything in flight in chunks that small. Merging only when the ring is full would
// make the oldest chunk grow faster than its bytes arrive.
func (l *ledger) addChunk(n, granule cc.Bytes, c chunk) {
	if l.ring == nil {
		l.ring = make([]chunk, 32)
	}
	if least := (l.endOffset() + n - l.startOffset) / ledgerChunks; l.count > 0 {
		if size := l.endOffset() - l.chunkStart(l.count-1); size < least && size+n <= 2*least {
			c.end, c.resent = l.endOffset()+n, c.resent || l.chunkAt(l.count-1).resent
			*l.chunkAt(l.count - 1) = c
			return
		}
	}
	for n > 0 {
		size := n
		if n >= 2*granule {
			size = granule
		}
		if l.count == len(l.ring) {
			l.makeRoom()
		}
		c.end = l.endOffset() + size
		l.count++
		*l.chunkAt(l.count - 1) = c
		n -= size
	}
}

// releaseRing frees the memory of a ledger with nothing in it.
func (l *ledger) releaseRing() {
	if l.count == 0 {
		l.ring, l.head = nil, 0
	}
}

// makeRoom grows the ring up to its bound. Beyond that it merges chunks in pairs. A merged pair keeps the record of
// the later chunk, which is exact for its newest byte.
func (l *ledger) makeRoom() {
	if len(l.ring) < ledgerChunks {
		ring := make([]chunk, 2*len(l.ring))
		for i := range l.count {
			ring[i] = *l.chunkAt(i)
		}
		l.ring, l.head = ring, 0
		return
	}
	for i := range l.count / 2 {
		first, second := l.chunkAt(2*i), *l.chunkAt(2*i + 1)
		second.resent = second.resent || first.resent
		*l.chunkAt(i) = second
	}
	l.count /= 2
}

// markUnsent moves the departure of the bytes from stream offset sent on to now: the transport accepted them earlier,
// but has not sent them yet.
func (l *ledger) markUnsent(sent cc.Bytes, now cc.Time) {
	for i := l.count - 1; i >= 0; i-- {
		if l.chunkAt(i).end <= sent {
			return
		}
		l.chunkAt(i).sent.At = now
	}
}

// markResent records that everything in flight may have been sent twice. After a timeout the transport sends all of it
// again, so it is not known when any of it left.
func (l *ledger) markResent(timeout bool) {
	for i := range l.count {
		c := l.chunkAt(i)
		c.resent = true
		if timeout {
			c.sent.At = 0
		}
	}
}

// rebaseRates makes what is in flight count as sent when the group had delivered these bytes. Rates are then
// measured from now on, and round trips stay as they were.
func (l *ledger) rebaseRates(now cc.Time, delivered cc.Bytes) {
	for i := range l.count {
		c := l.chunkAt(i)
		c.sent.Delivered, c.sent.DeliveredAt, c.firstSentAt = delivered, now, c.sent.At
	}
}

// dropArrived removes the chunks that have arrived up to stream offset newest and returns the last one. It counts as
// resent if any of them may have been: a filled hole delays the acknowledgement of everything above it.
func (l *ledger) dropArrived(newest cc.Bytes) (c chunk, ok bool) {
	for l.count > 0 && l.chunkAt(0).end <= newest {
		resent := c.resent
		c, ok = *l.chunkAt(0), true
		c.resent = c.resent || resent
		l.startOffset = c.end
		l.head = (l.head + 1) % len(l.ring)
		l.count--
	}
	return c, ok
}

// dropSentBy removes the chunks that had left by a time.
func (l *ledger) dropSentBy(at cc.Time) {
	for l.count > 0 && l.chunkAt(0).sent.At <= at {
		l.dropArrived(l.chunkAt(0).end)
	}
}

// inFlight returns the number of bytes that are recorded.
func (l *ledger) inFlight() cc.Bytes { return l.endOffset() - l.startOffset }
