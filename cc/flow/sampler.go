package flow

import (
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// sampler turns the reports of one flow into what became of its bytes: how many are
// in flight, arrived and were lost, and the round trips and delivery rates that they
// show. It is the only place where reports are read.
type sampler struct {
	enforced bool // the leg enforces the window
	last     Report
	ledger   ledger
	newest   cc.Bytes // highest stream offset known to have arrived
	before   cc.Bytes // stream offset of what left before the flow came to its group: the algorithm is not told of it
	taken    cc.Bytes // has left, or is granted and on its way to the transport
	inflight cc.Bytes
	blocked  cc.Bytes // of those in flight, unsent behind a closed receive window: they load no path
	measured bool     // the leg has measured round trips: the ledger's samples would be worse
	rtt      rttEstimator
	rate     cc.Rate // newest delivery-rate sample
	ways     oneWayEstimator
	reverse  time.Duration // of the newest round trip, the queue on the way back
	oneWay   bool          // which is known
	timedOut bool          // the retransmission timer fired, and nothing has been acknowledged since

	losses    int      // events
	lossEpoch uint64   // the group's loss event that recover and lossAt are of
	recover   cc.Bytes // what had been sent when that event began
	lossAt    cc.Time  // when it did
}

// news is what a report adds to those before it.
type news struct {
	acked, lost, marked cc.Bytes
	timeouts            int
}

func (s *sampler) segmentSize() cc.Bytes {
	if s.last.MSS > 0 {
		return s.last.MSS
	}
	return cc.DefaultMSS
}

// readReport takes in a report and returns what is new in it. Counters never run backwards.
func (s *sampler) readReport(r Report) (n news) {
	last := &s.last
	r.Written, r.Acked = max(r.Written, last.Written), max(r.Acked, last.Acked)
	r.Newest, r.Lost = max(r.Newest, 0), max(r.Lost, last.Lost)
	r.Marked, r.Timeouts = max(r.Marked, last.Marked), max(r.Timeouts, last.Timeouts)
	if r.MSS == 0 {
		r.MSS = last.MSS
	}
	if !s.enforced {
		// The transport has got no more than was granted; the rest is its estimate's.
		r.Written = min(r.Written, s.taken)
	}
	n = news{r.Acked - last.Acked, r.Lost - last.Lost, r.Marked - last.Marked, r.Timeouts - last.Timeouts}
	s.last = r
	s.measured = s.measured || s.enforced && r.RTT > 0
	return n
}

// newlyDeparted returns how many bytes have left that were not known to have, over a leg that
// enforces the window. Call it after read.
func (s *sampler) newlyDeparted() cc.Bytes {
	if !s.enforced {
		return 0
	}
	return max(0, max(s.last.Written-s.last.Unsent, s.last.Acked)-s.taken)
}

// departureTime tells when the bytes left that a report is the first to show: just now,
// unless some of them have been acknowledged already, at most window bytes of them.
func (s *sampler) departureTime(before cc.Time, left, window cc.Bytes) cc.Time {
	r := &s.last
	if r.RTT == 0 || max(r.Acked, r.Newest) <= s.taken || left > window {
		return r.At
	}
	return min(r.At, max(before, r.At.Add(-r.RTT)))
}

// addSent counts n bytes in flight that leave with record c, kept in chunks of about granule.
func (s *sampler) addSent(n, granule cc.Bytes, c chunk) {
	s.ledger.addChunk(n, granule, c)
	s.taken += n
	s.inflight += n
}

// updateInflight brings the ledger and the bytes in flight up to the last report. What the
// transport has, on the wire or before it, is its word; what was taken and has not
// reached it yet is ours. Where the leg enforces the window, only what is on the wire
// counts. To count by acknowledgements alone would stall in every recovery and then
// release a burst.
func (s *sampler) updateInflight(n news) {
	r := &s.last
	if n.timeouts > 0 || n.lost > 0 && r.Newest == 0 {
		s.ledger.markResent(n.timeouts > 0)
	}
	s.ledger.noteUnsent(r.Written-r.Unsent, r.At)
	inflight := s.taken - r.Acked
	switch {
	case s.enforced && r.Pipe >= 0:
		inflight = r.Pipe
	case r.Pipe >= 0:
		inflight = s.taken - r.Written + r.Pipe + r.Unsent
	}
	s.inflight, s.blocked = max(0, inflight), 0
	if r.RwndFull && !s.enforced {
		s.blocked = min(r.Unsent, s.inflight)
	}
}

// sentOffset is the stream offset of what has left so far.
func (s *sampler) sentOffset() cc.Bytes {
	if s.enforced {
		return s.taken
	}
	return s.taken - s.last.Unsent
}

// noteLossEpoch notes that the group's loss event number epoch began at a time, unless
// that is known. Call it before anything else changes.
func (s *sampler) noteLossEpoch(epoch uint64, at cc.Time) {
	if s.lossEpoch != epoch {
		s.lossEpoch, s.recover, s.lossAt = epoch, s.sentOffset(), at
	}
}

// isRecovering reports whether a hole of the last loss event is still open: then a loss
// belongs to that event (RFC 6582's recovery point), however many round trips it takes.
func (s *sampler) isRecovering() bool {
	return s.lossAt != 0 && s.last.Acked-s.last.Sacked < s.recover
}

// takeDelivered takes n.acked bytes as delivered, with beside bytes of others, and returns
// the samples that they show: the record of the newest byte, its round trip and its
// delivery rate, 0 where there is none. leastRTT is the path's.
func (s *sampler) takeDelivered(n news, d *delivery, beside cc.Bytes, leastRTT time.Duration) (
	sent cc.Sent, rtt time.Duration, rate cc.Rate,
) {
	r := &s.last
	d.total += n.acked + beside
	d.edge.Add(int64(n.acked + beside))
	s.newest = max(s.newest, r.Newest, r.Acked)
	c, ok := s.ledger.dropArrived(s.newest)
	if ok && r.RTT > 0 { // known exactly, where the ledger knows the report that first showed it
		c.sent.At = min(r.At, max(d.firstSent, r.At.Add(-r.RTT)))
		d.firstSent = c.sent.At
	}
	switch {
	case ok && !c.resent:
		if !s.measured {
			rtt = r.At.Sub(c.sent.At)
		}
		rate = d.deliveryRate(r.At, c, leastRTT)
		d.firstSent = c.sent.At
	case ok && s.rtt.srtt > 0: // sent again, a round trip ago: what leaves now did not take as long as the timer ran
		d.firstSent = max(d.firstSent, r.At.Add(-s.rtt.srtt))
	}
	if r.RTT > 0 {
		rtt = r.RTT
	}
	d.at = r.At
	if rtt > 0 {
		s.rtt.addSample(rtt)
	}
	if rate > 0 {
		s.rate = rate
	}
	return c.sent, rtt, rate
}

// delivery counts what all members of a group have delivered. Delivery rates are
// those of the group.
type delivery struct {
	total      cc.Bytes      // by members past and present
	edge       *atomic.Int64 // bytes by all groups of the algorithm
	at         cc.Time       // when total last grew
	firstSent  cc.Time       // when the newest delivered byte had left
	appLimited cc.Bytes      // deliveries up to this count understate the path; 0: none do
}

// restartMeasuring has rates measured from now on: nothing is in flight.
func (d *delivery) restartMeasuring(now cc.Time) { d.at, d.firstSent = now, now }

// deliveryRate is the delivery rate over the flight of chunk c: bytes delivered since it
// left, over the longer of the time it took to send and to acknowledge them
// (draft-cardwell-iccrg-bbr §4.1.2.3), so that bunched acknowledgements do not inflate
// it; 0 for a burst shorter than a round trip.
func (d *delivery) deliveryRate(now cc.Time, c chunk, leastRTT time.Duration) cc.Rate {
	took := max(now.Sub(c.sent.DeliveredAt), c.sent.At.Sub(c.first))
	if took < leastRTT {
		return 0
	}
	return cc.RateOf(d.total-c.sent.Delivered, took)
}

// rttEstimator smooths round-trip samples (RFC 6298 §2) and keeps their minimum.
type rttEstimator struct {
	latest, srtt, rttvar, min time.Duration
}

func (e *rttEstimator) addSample(sample time.Duration) {
	sample = max(sample, time.Microsecond) // clocks are coarse; nothing may divide by zero
	e.latest = sample
	if e.srtt == 0 {
		e.srtt, e.rttvar, e.min = sample, sample/2, sample
		return
	}
	e.min = min(e.min, sample)
	e.rttvar += ((e.srtt - sample).Abs() - e.rttvar) / 4
	e.srtt += (sample - e.srtt) / 8
}

// shiftedBy is e for a path whose base round trip is d longer.
func (e rttEstimator) shiftedBy(d time.Duration) rttEstimator {
	for _, rtt := range []*time.Duration{&e.latest, &e.srtt, &e.min} {
		if *rtt > 0 {
			*rtt = max(*rtt+d, time.Microsecond)
		}
	}
	return e
}

// rto is the retransmission timeout the samples suggest (RFC 6298 §2.3, with
// Linux's 200 ms floor); one second before the first sample.
func (e *rttEstimator) rto() time.Duration {
	if e.srtt == 0 {
		return time.Second
	}
	return max(e.srtt+4*e.rttvar, 200*time.Millisecond)
}

// ledgerChunks bounds the memory of one flow's send ledger.
const ledgerChunks = 512

// ledger remembers when which bytes of the stream left. A transport that
// acknowledges a byte stream shows no packets, so chunks of at least a segment
// stand in for them, larger ones where more is in flight than there are chunks
// for: it forgets detail, never bytes.
type ledger struct {
	ring  []chunk
	head  int // index of the oldest
	n     int
	start cc.Bytes // stream offset at which the oldest chunk begins
}

type chunk struct {
	end    cc.Bytes // stream offset just past the chunk
	sent   cc.Sent
	first  cc.Time // when the newest byte delivered at sent.At had itself left
	resent bool    // maybe retransmitted: no round-trip sample (Karn)
}

func (l *ledger) chunkAt(i int) *chunk { return &l.ring[(l.head+i)%len(l.ring)] }

// endOffset is the stream offset of everything taken so far.
func (l *ledger) endOffset() cc.Bytes {
	if l.n == 0 {
		return l.start
	}
	return l.chunkAt(l.n - 1).end
}

// chunkStart is the stream offset at which chunk i begins.
func (l *ledger) chunkStart(i int) cc.Bytes {
	if i == 0 {
		return l.start
	}
	return l.chunkAt(i - 1).end
}

// addChunk records n bytes in chunks of about granule. Bytes that come little by
// little join the last chunk while chunks as small could not hold all that is in
// flight. To merge only once the ledger is full would not do for them: the oldest
// chunk would grow faster than its bytes arrive.
func (l *ledger) addChunk(n, granule cc.Bytes, c chunk) {
	if l.ring == nil {
		l.ring = make([]chunk, 32)
	}
	if least := (l.endOffset() + n - l.start) / ledgerChunks; l.n > 0 {
		if size := l.endOffset() - l.chunkStart(l.n-1); size < least && size+n <= 2*least {
			c.end, c.resent = l.endOffset()+n, c.resent || l.chunkAt(l.n-1).resent
			*l.chunkAt(l.n - 1) = c
			return
		}
	}
	for n > 0 {
		size := n
		if n >= 2*granule {
			size = granule
		}
		if l.n == len(l.ring) {
			l.makeRoom()
		}
		c.end = l.endOffset() + size
		l.n++
		*l.chunkAt(l.n - 1) = c
		n -= size
	}
}

// releaseRing gives back the ring of a ledger with nothing in it.
func (l *ledger) releaseRing() {
	if l.n == 0 {
		l.ring, l.head = nil, 0
	}
}

// makeRoom grows the ring up to its bound, then halves its resolution. A merged
// pair keeps the later chunk's record, which is exact for its newest byte.
func (l *ledger) makeRoom() {
	if len(l.ring) < ledgerChunks {
		ring := make([]chunk, 2*len(l.ring))
		for i := range l.n {
			ring[i] = *l.chunkAt(i)
		}
		l.ring, l.head = ring, 0
		return
	}
	for i := range l.n / 2 {
		first, second := l.chunkAt(2*i), *l.chunkAt(2*i + 1)
		second.resent = second.resent || first.resent
		*l.chunkAt(i) = second
	}
	l.n /= 2
}

// noteUnsent notes that the bytes from stream offset sent on had still not left
// at now, however long ago the transport took them.
func (l *ledger) noteUnsent(sent cc.Bytes, now cc.Time) {
	for i := l.n - 1; i >= 0; i-- {
		if l.chunkAt(i).end <= sent {
			return
		}
		l.chunkAt(i).sent.At = now
	}
}

// markResent notes that anything in flight may have been sent twice. After a timeout
// nothing is known of when it left: the transport sends all of it again.
func (l *ledger) markResent(timeout bool) {
	for i := range l.n {
		c := l.chunkAt(i)
		c.resent = true
		if timeout {
			c.sent.At = 0
		}
	}
}

// rebaseRates has what is in flight be as though it had left a group that had
// delivered so much by now: rates are measured from here, round trips as before.
func (l *ledger) rebaseRates(now cc.Time, delivered cc.Bytes) {
	for i := range l.n {
		c := l.chunkAt(i)
		c.sent.Delivered, c.sent.DeliveredAt, c.first = delivered, now, c.sent.At
	}
}

// dropArrived forgets the chunks that have arrived up to stream offset newest and
// returns the last of them. It counts as resent when any of them may have been:
// a hole that was filled holds back the news of all that lay behind it.
func (l *ledger) dropArrived(newest cc.Bytes) (c chunk, ok bool) {
	for l.n > 0 && l.chunkAt(0).end <= newest {
		resent := c.resent
		c, ok = *l.chunkAt(0), true
		c.resent = c.resent || resent
		l.start = c.end
		l.head = (l.head + 1) % len(l.ring)
		l.n--
	}
	return c, ok
}
