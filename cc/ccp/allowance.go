package ccp

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// An agent that has lost its estimate of the path asks for any window. What it gets is bounded by what the path has
// carried: by an initial window and twice what a round trip delivered, which leaves room for slow start, or by four
// times what a round trip without a queue would deliver, which leaves room for BBR's gain of 2.89 on an estimate that
// is a round trip old.
const (
	flightGain = 2
	pathGain   = 4
)

// A maximum counts for one to two spans of this many round trips.
const (
	spanRoundTrips = 10
	leastSpan      = 100 * time.Millisecond
)

// allowance is the largest window that an agent may have at present.
type allowance struct {
	recent, earlier maxima   // of the present span, and of the one before
	since           cc.Time  // start of the present span
	unmeasured      cc.Bytes // acknowledged since a flight was measured last
	minRTT          time.Duration
}

// maxima are the largest samples of a span.
type maxima struct {
	flight cc.Bytes // delivered in a round trip
	rate   cc.Rate  // of delivery
}

// addAck takes an acknowledgement. Where the transport does not tell of the flight, the allowance grows as in slow
// start. A flight that the application did not fill ends no span, since it does not show what the path carries.
func (w *allowance) addAck(a cc.Ack) {
	w.minRTT = a.MinRTT
	if a.Sent.At == 0 || a.RTT <= 0 || a.DeliveryRate <= 0 {
		w.unmeasured = min(w.unmeasured+a.Acked, cc.MaxCwnd)
		return
	}
	w.unmeasured = 0
	if !a.Sent.AppLimited && a.Now.Sub(w.since) > max(spanRoundTrips*a.SRTT, leastSpan) {
		w.earlier, w.recent, w.since = w.recent, maxima{}, a.Now
	}
	w.recent.flight = max(w.recent.flight, a.Delivered-a.Sent.Delivered)
	w.recent.rate = max(w.recent.rate, a.DeliveryRate)
}

// delivered is what the path has delivered of late in a round trip without a queue.
func (w *allowance) delivered() cc.Bytes { return max(w.recent.rate, w.earlier.rate).BytesIn(w.minRTT) }

// limit returns c with a window and a rate that the allowance permits.
func (w *allowance) limit(c cc.Control, initial cc.Bytes) cc.Control {
	flight := max(w.recent.flight, w.earlier.flight)
	most := max(initial+flightGain*flight, pathGain*w.delivered()) + w.unmeasured
	c.Cwnd = min(c.Cwnd, most)
	if rate := cc.RateOf(most, w.minRTT); rate > 0 {
		c.PacingRate = min(c.PacingRate, rate)
	}
	return c
}
