package recipe

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/proxy/datapath"
)

func TestQuantilesOfAHistogram(t *testing.T) {
	h := datapath.Histogram{Bounds: []float64{0.001, 0.002, 0.004}, Counts: []uint64{0, 50, 50, 0}, Sum: 0.2}
	q := within(h)
	assert.InDelta(t, 2, q.Mean, 1e-9)
	assert.InDelta(t, 2, q.P50, 1e-9)
	assert.InDelta(t, 3.8, q.P95, 1e-9)
	assert.InDelta(t, 4, q.Max, 1e-9)
	h.Counts = []uint64{0, 0, 0, 1}
	assert.True(t, math.IsInf(within(h).P50, 1), "beyond the last bound")
	assert.True(t, math.IsNaN(within(datapath.Histogram{}).P50))
}

func TestWhatIsUsedAndWhatLeaves(t *testing.T) {
	r := Run{
		Stage: stage.Stage{Duration: 140 * time.Millisecond, Warmup: 40 * time.Millisecond},
		Record: stage.Record{
			CPU: 3 * time.Second, Decided: stage.Decided{CPU: time.Second}, Left: []cc.Bytes{9, 9, 2500, 5000, 0, 0, 7},
			Actors: []stage.ActorRecord{{Bytes: []cc.Bytes{1e9, 1e9}}},
		},
	}
	assert.InDelta(t, 2, r.cpu(), 1e-9, "seconds per GB")
	each, err := r.each(0.04)
	require.NoError(t, err)
	assert.Equal(t, []float64{1.5, 0}, each, "whole steps after the warm-up")
	for _, step := range []any{0, 0.01, 0.05} {
		_, err = r.each(step)
		assert.ErrorContains(t, err, "steps are of 0.02 or a multiple")
	}
	r.Record.CPU = 0
	assert.True(t, math.IsNaN(r.cpu()))
}
