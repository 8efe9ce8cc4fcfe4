package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// shape is what one sees of a trace.
type shape struct {
	mean, min, max float64       // Mbit/s; the latter two over whole seconds
	gap            time.Duration // longest without an opportunity
	busy           float64       // part of the milliseconds that have any
}

func shapeOf(t *Trace) shape {
	s := shape{mean: t.MeanRate().Mbps(), min: 1e9}
	l := NewLink(LinkConfig{Trace: t}, start)
	for d := time.Duration(0); d+time.Second <= t.Duration(); d += time.Second {
		mbps := float64(l.Offered(0, start.Add(d), start.Add(d+time.Second))) * 8 / 1e6
		s.min, s.max = min(s.min, mbps), max(s.max, mbps)
	}
	busy, last := 0, int64(0)
	for _, at := range t.times {
		s.gap = max(s.gap, time.Duration(at-last)*ms)
		if at != last {
			busy++
		}
		last = at
	}
	s.busy = float64(busy) / float64(t.loop())
	return s
}

func TestModels(t *testing.T) {
	for _, c := range []struct {
		model                string
		meanLow, meanHigh    float64
		minBelow, maxAbove   float64
		maxBelow             float64
		gapAbove, gapBelow   time.Duration
		busyAbove, busyBelow float64
	}{
		// Recorded LTE: 4.6 to 16.7 Mbit/s, lowest second 0.2 to 1.5, highest 17
		// to 59, longest gap 0.9 to 1.4 s, 25 to 29 % of milliseconds busy.
		{"lte", 8, 9.5, 1.5, 25, 61, 700 * ms, 2000 * ms, 0.25, 0.35},
		{"rapid", 8.5, 12.5, 5, 15, 21.5, 5 * ms, 100 * ms, 0.4, 0.7},
		{"walk", 8, 10, 4, 14, 25, 20 * ms, 4 * time.Second, 0.35, 0.55},
		{"highway", 4.8, 6.2, 0.5, 9, 16, 1500 * ms, 4 * time.Second, 0.3, 0.5},
	} {
		for seed := range uint64(3) {
			trace, err := Generate(c.model, seed, GeneratedLength)
			require.NoError(t, err)
			s := shapeOf(trace)
			in := func(v, lo, hi float64, what string) {
				assert.True(t, lo <= v && v <= hi, "%s seed %d: %s is %.3g, but should be from %g to %g", c.model,
					seed, what, v, lo, hi)
			}
			assert.Equal(t, GeneratedLength, trace.Duration())
			in(s.mean, c.meanLow, c.meanHigh, "mean")
			in(s.min, 0, c.minBelow, "lowest second")
			in(s.max, c.maxAbove, c.maxBelow, "highest second")
			in(s.gap.Seconds(), c.gapAbove.Seconds(), c.gapBelow.Seconds(), "longest gap")
			in(s.busy, c.busyAbove, c.busyBelow, "busy part")
		}
	}
}

func TestGenerateRepeats(t *testing.T) {
	first, err := Generate("lte", 7, 20*time.Second)
	require.NoError(t, err)
	again, err := Generate("lte", 7, 20*time.Second)
	require.NoError(t, err)
	assert.Equal(t, first, again)
	other, err := Generate("lte", 8, 20*time.Second)
	require.NoError(t, err)
	assert.NotEqual(t, first.times, other.times)
}

func TestGrantsMoveOpportunitiesWithoutMakingAny(t *testing.T) {
	m, err := Model("walk")
	require.NoError(t, err)
	bursty, err := m.Generate(1, time.Minute)
	require.NoError(t, err)
	m.GrantShare = 0
	smooth, err := m.Generate(1, time.Minute)
	require.NoError(t, err)
	assert.InEpsilon(t, smooth.MeanRate().Mbps(), bursty.MeanRate().Mbps(), 0.05)
	assert.Greater(t, shapeOf(smooth).busy, shapeOf(bursty).busy)
}

func TestGenerateRefuses(t *testing.T) {
	_, err := Generate("frob", 1, time.Second)
	assert.ErrorContains(t, err, `no model "frob" of a link; there are lte, rapid, walk, highway`)
	for _, d := range []time.Duration{0, -1, time.Millisecond + 1, 2 * time.Hour} {
		_, err := Generate("lte", 1, d)
		assert.ErrorContains(t, err, "whole number of milliseconds", "%v", d)
	}
	_, err = Generate("lte", 1, time.Millisecond)
	assert.ErrorContains(t, err, "carries nothing in 1ms")
	_, err = GenConfig{Name: "torrent", Min: 1e12, Max: 1e12, Redraw: time.Second}.Generate(1, time.Second)
	assert.ErrorContains(t, err, "more than the 12582912 opportunities")
}

func TestSteps(t *testing.T) {
	trace, err := Steps("test", 40*ms, Step{0, 12e6}, Step{10 * ms, 0}, Step{30 * ms, 6e6})
	require.NoError(t, err)
	assert.Equal(t, []int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 32, 34, 36, 38, 40}, trace.times)
	trace, err = Steps("fine", 9*ms, Step{0, 4e6}, Step{ms, 4e6}, Step{2 * ms, 0}, Step{4 * ms, 4e6}, Step{5 * ms, 8e6})
	require.NoError(t, err)
	assert.Equal(t, []int64{5, 7, 8, 9}, trace.times, "a third of a packet in each of three steps make one")
	for complaint, steps := range map[string][]Step{
		"first step must be at 0 s":                            {{At: ms, Rate: 1e6}},
		"comes after the one at 30ms":                          {{0, 1e6}, {30 * ms, 1e6}, {20 * ms, 1e6}},
		"more than 12582912":                                   {{0, 1e15}},
		"test carries nothing in 40ms: give it a rate above 0": {{0, 0}},
		"carries nothing":                                      {{0, 0}, {20 * ms, 1e3}},
	} {
		_, err := Steps("test", 40*ms, steps...)
		assert.ErrorContains(t, err, complaint)
	}
}

func TestWithout(t *testing.T) {
	trace, err := readTrace(t, "1\n").Without(3*ms, 7*ms, 12*ms)
	require.NoError(t, err)
	assert.Equal(t, []int64{1, 2, 3, 8, 9, 10, 11, 12}, trace.times)
	trace, err = readTrace(t, "1\n").Without(ms, time.Second, 12*ms)
	require.NoError(t, err)
	assert.Equal(t, []int64{1, 12}, trace.times, "the end stays: it is the length")
	_, err = readTrace(t, "1\n").Without(0, time.Second, 12*ms)
	assert.ErrorContains(t, err, "carries nothing in 12ms")
	_, err = readTrace(t, "1\n").Without(0, 1, 0)
	assert.Error(t, err)
}
