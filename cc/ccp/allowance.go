package ccp

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// An agent that has lost its estimate of the path may ask for any window. The window that it gets is bounded by the
// larger of two: an initial window and twice the bytes delivered in a round trip, which leaves room for slow start;
// or four times the bytes of a round trip without a queue, which leaves room for BBR's gain of 2.89 on an estimate
// that is a round trip old.
const (
	flightGain = 2
	pathGain   = 4
)

// Maxima count for one to two spans. A span lasts spanRoundTrips, and minSpan at least.
const (
	spanRoundTrips = 10
	minSpan        = 100 * time.Millisecond
)

// allowance is the largest window that an agent may have at present.
type allowance struct {
	recent, earlier maxima   // of the current span, and of the one before
	since           cc.Time  // start of the current span
	unmeasured      cc.Bytes // acknowledged since a flight was measured last
	minRTT          time.Duration
}

// maxima are the largest samples of a span.
type maxima struct {
	flight cc.Bytes // delivered in a round trip
	rate   cc.Rate  // of delivery
}

// addAck adds the samples of an acknowledgement. Where the transport does not measure flights, the allowance grows as
// in slow start. A flight that the application did not fill ends no span, since it does not show what the path
// carries.
func (w *allowance) addAck(a cc.Ack) {
	w.minRTT = a.MinRTT
	if a.Sent.At == 0 || a.RTT <= 0 || a.DeliveryRate <= 0 {
		w.unmeasured = min(w.unmeasured+a.Acked, cc.MaxCwnd)
		return
	}
	w.unmeasured = 0
	if !a.Sent.AppLimited && a.Now.Sub(w.since) > max(spanRoundTrips*a.SRTT, minSpan) {
		w.earlier, w.recent, w.since = w.recent, maxima{}, a.Now
	}
	w.recent.flight = max(w.recent.flight, a.Delivered-a.Sent.Delivered)
	w.recent.rate = max(w.recent.rate, a.DeliveryRate)
}

// deliveredPerRTT returns the most that the path has recently delivered in a round trip without a queue.
func (w *allowance) deliveredPerRTT() cc.Bytes {
	return max(w.recent.rate, w.earlier.rate).BytesIn(w.minRTT)
}

// limitControl returns c with a window and a rate that the allowance permits.
func (w *allowance) limitControl(c cc.Control, initial cc.Bytes) cc.Control {
	flight := max(w.recent.flight, w.earlier.flight)
	most := max(initial+flightGain*flight, pathGain*w.deliveredPerRTT()) + w.unmeasured
	c.Cwnd = min(c.Cwnd, most)
	if rate := cc.RateOf(most, w.minRTT); rate > 0 {
		c.PacingRate = min(c.PacingRate, rate)
	}
	return c
}
