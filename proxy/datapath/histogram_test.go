package datapath

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestHistogram(t *testing.T) {
	h := NewDurations([]float64{0.1, 1})
	for _, d := range []time.Duration{0, 100 * time.Millisecond, 200 * time.Millisecond, time.Second, time.Minute} {
		h.Observe(d)
	}
	s := h.Snapshot()
	assert.Equal(t, []uint64{2, 2, 1}, s.Counts, "bounds are inclusive")
	assert.Equal(t, uint64(5), s.Count())
	assert.InDelta(t, 61.3, s.Sum, 1e-9)
}
