package datapath

import (
	"sort"
	"sync/atomic"
	"time"
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

// Durations counts durations without a lock.
type Durations struct {
	bounds []float64
	counts []atomic.Uint64
	sum    atomic.Int64 // nanoseconds
}

// NewDurations counts by these upper bounds, in seconds.
func NewDurations(bounds []float64) *Durations {
	return &Durations{bounds: bounds, counts: make([]atomic.Uint64, len(bounds)+1)}
}

// Observe counts d.
func (h *Durations) Observe(d time.Duration) {
	h.counts[sort.SearchFloat64s(h.bounds, d.Seconds())].Add(1)
	h.sum.Add(int64(d))
}

// Snapshot returns the counts so far.
func (h *Durations) Snapshot() Histogram {
	out := Histogram{
		Bounds: h.bounds, Counts: make([]uint64, len(h.counts)),
		Sum: time.Duration(h.sum.Load()).Seconds(),
	}
	for i := range h.counts {
		out.Counts[i] = h.counts[i].Load()
	}
	return out
}
