package cc

import "time"

// flightSlots bounds the memory of FlightRates; acknowledgements closer
// together than the span over flightSlots/4 share a mark.
const flightSlots = 128

// FlightRates measures at which rate bytes left and at which rate the same
// bytes arrived, from the marks that acknowledgements leave.
type FlightRates struct {
	ring [flightSlots]flightMark
	head int // index of the oldest
	n    int
}

// flightMark says that the newest byte of the first delivered ones left and was
// acknowledged then.
type flightMark struct {
	left, acked Time
	delivered   Bytes
}

func (f *FlightRates) markAt(i int) *flightMark { return &f.ring[(f.head+i)%flightSlots] }

// Add takes an acknowledgement; span is that of Rates. Bytes that may have left twice are counted with
// those behind them.
func (f *FlightRates) Add(a Ack, span time.Duration) {
	m := flightMark{left: a.Sent.At, acked: a.Now, delivered: a.Delivered}
	if m.left == 0 {
		return
	}
	if f.n > 0 && m.left <= f.markAt(f.n-1).left {
		return
	}
	if f.n > 1 && m.acked.Sub(f.markAt(f.n-2).acked) < span*4/flightSlots {
		*f.markAt(f.n - 1) = m
		return
	}
	if f.n == flightSlots {
		f.head = (f.head + 1) % flightSlots
		f.n--
	}
	f.n++
	*f.markAt(f.n - 1) = m
}

func (f *FlightRates) reset() { f.head, f.n = 0, 0 }

// Rates returns in bytes per second how fast the newest bytes left (S) and
// arrived (R): those of at least span, and at least least of them.
func (f *FlightRates) Rates(span time.Duration, least Bytes) (sent, received float64, ok bool) {
	if f.n < 2 {
		return 0, 0, false
	}
	newest := f.markAt(f.n - 1)
	i := f.n - 2
	for i > 0 && (newest.acked.Sub(f.markAt(i).acked) < span || newest.delivered-f.markAt(i).delivered < least) {
		i--
	}
	first := f.markAt(i)
	n, toLeave, toArrive := newest.delivered-first.delivered, newest.left.Sub(first.left), newest.acked.Sub(first.acked)
	if n < least || toLeave < minDivisor || toArrive < minDivisor {
		return 0, 0, false
	}
	return float64(n) / toLeave.Seconds(), float64(n) / toArrive.Seconds(), true
}

// crossTraffic returns the rate of the other flows at a bottleneck of rate mu with a queue that does not run
// empty. Flows get parts of mu in proportion to their rates in front of it, so the other flows' rate
// follows from our rates sent and received.
func crossTraffic(mu, sent, received float64) float64 {
	if received <= 0 {
		return 0
	}
	return min(max(mu*sent/received-sent, 0), mu)
}

// capacity is the largest rate at which bytes arrived within a window. The filter keeps the times of a fixed
// number of bytes, so its least time is the largest rate.
type capacity struct {
	fixed   float64 // bytes/s; 0: measured
	smooth  float64 // bytes/s
	slowest windowedFilter
}

// capacityUnit is what the filter's times are for: a byte a second still takes
// less than the longest duration.
const capacityUnit = 1 << 30 // bytes

// addRate takes a sample of the rate received, in bytes per second.
func (c *capacity) addRate(now Time, received float64, window time.Duration) {
	if c.smooth == 0 {
		c.smooth = received
	}
	c.smooth += nimbusSmoothing * (received - c.smooth)
	c.slowest.addSample(now, time.Duration(capacityUnit/max(c.smooth, 1)*float64(time.Second)), window)
}

// estimate returns the capacity in bytes per second; 0: not known yet.
func (c *capacity) estimate() float64 {
	if c.fixed > 0 {
		return c.fixed
	}
	if c.slowest.n == 0 {
		return 0
	}
	return capacityUnit / max(c.slowest.extreme(), time.Nanosecond).Seconds()
}
