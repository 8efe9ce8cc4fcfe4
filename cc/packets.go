package cc

import (
	"math"
	"time"
)

// minDivisor stands in for any shorter time in a quotient; clocks below are coarse.
const minDivisor = time.Microsecond

// segments converts between the bytes of the seam and the packets of one
// segment each in which the literature counts windows.
type segments struct{ mss Bytes }

// setMSS adopts the sender's segment size; 0 leaves it as it is.
func (s *segments) setMSS(mss Bytes) {
	if mss > 0 {
		s.mss = mss
	}
}

// toPackets converts bytes; a fraction of a segment counts as that fraction.
func (s segments) toPackets(b Bytes) float64 { return float64(max(b, 0)) / float64(s.mss) }

// toBytes converts a window and keeps it within what Control allows.
func (s segments) toBytes(packets float64) Bytes {
	b := packets * float64(s.mss)
	switch {
	case b >= float64(MaxCwnd):
		return max(MaxCwnd, s.mss)
	case b > float64(s.mss):
		return Bytes(b)
	default: // also NaN
		return s.mss
	}
}

// clampWindow keeps a window between floor and the largest one there is, so that it
// never grows out of what a float counts exactly.
func (s segments) clampWindow(packets, floor float64) float64 {
	return min(max(packets, floor), max(float64(MaxCwnd)/float64(s.mss), floor))
}

// pacingRate returns the rate that sends gain windows per round trip; 0 without a round trip.
func (s segments) pacingRate(gain, packets float64, rtt time.Duration) Rate {
	if rtt <= 0 {
		return 0
	}
	return RateOf(s.toBytes(gain*packets), max(rtt, minDivisor))
}

// mbitToBytes and megabits convert between the Mbit/s of settings and traces
// and the bytes per second that some algorithms reckon in.
func mbitToBytes(mbit float64) float64  { return mbit * 1e6 / 8 }
func bytesToMbit(bytes float64) float64 { return bytes * 8 / 1e6 }

// toMillis is d for Inspect.
func toMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// finiteOrZero is v for Inspect: 0 where it is infinite.
func finiteOrZero(v float64) float64 {
	if math.IsInf(v, 0) {
		return 0
	}
	return v
}

// infinite is the slow-start threshold before the first congestion event.
var infinite = math.Inf(1)
