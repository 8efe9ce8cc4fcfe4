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
