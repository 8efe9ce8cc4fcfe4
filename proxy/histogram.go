package proxy

import (
	"sort"
	"sync/atomic"
	"time"
)

// Bounds of the histograms, in seconds: connection set-up from a fast LAN to a
// dial timeout, connection lives from a request to a day.
var (
	setupBounds    = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	durationBounds = []float64{.01, .05, .1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400}
)

// Histogram is a copy of how often durations fell between bounds.
type Histogram struct {
	Bounds []float64 // upper bounds in seconds, inclusive; the last bucket has none
	Counts []uint64  // per bucket, not cumulative; one more than Bounds
	Sum    float64   // seconds
}

// Count is how many durations there were.
func (h Histogram) Count() uint64 {
	n := uint64(0)
	for _, c := range h.Counts {
		n += c
	}
	return n
}

// histogram counts without a lock.
type histogram struct {
	bounds []float64
	counts []atomic.Uint64
	sum    atomic.Int64 // nanoseconds
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]atomic.Uint64, len(bounds)+1)}
}

func (h *histogram) observe(d time.Duration) {
	h.counts[sort.SearchFloat64s(h.bounds, d.Seconds())].Add(1)
	h.sum.Add(int64(d))
}

func (h *histogram) snapshot() Histogram {
	out := Histogram{Bounds: h.bounds, Counts: make([]uint64, len(h.counts)), Sum: time.Duration(h.sum.Load()).Seconds()}
	for i := range h.counts {
		out.Counts[i] = h.counts[i].Load()
	}
	return out
}
