package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestWindowedFilter(t *testing.T) {
	const window = time.Second
	at := func(d time.Duration) Time { return Time(time.Hour).Add(d) }

	f := newMinFilter()
	assert.Zero(t, f.extreme(), "nothing before the first sample")

	f.addSample(at(0), 50*ms, window)
	f.addSample(at(100*ms), 60*ms, window)
	assert.Equal(t, 50*ms, f.extreme(), "the least wins")
	f.addSample(at(1000*ms), 70*ms, window)
	assert.Equal(t, 50*ms, f.extreme(), "a sample as old as the window still counts")
	f.addSample(at(1001*ms), 70*ms, window)
	assert.Equal(t, 60*ms, f.extreme(), "the next takes over when it is older")
	f.addSample(at(1050*ms), 40*ms, window)
	assert.Equal(t, 40*ms, f.extreme(), "a lesser one takes over at once")
	f.addSample(at(time.Minute), 90*ms, window)
	assert.Equal(t, 90*ms, f.extreme(), "after a silence only the new sample counts")
	assert.Equal(t, 90*ms, f.extreme(), "which stays for any length of time")

	f.reset()
	assert.Zero(t, f.extreme())

	g := newMaxFilter()
	g.addSample(at(0), 50*ms, window)
	g.addSample(at(ms), 60*ms, window)
	g.addSample(at(2*ms), 55*ms, window)
	assert.Equal(t, 60*ms, g.extreme(), "the greatest wins")
}

type timedSample struct {
	at Time
	v  time.Duration
}

// extreme is the definition: over all samples of the last window.
func extreme(samples []timedSample, now Time, window time.Duration, less func(a, b time.Duration) bool) time.Duration {
	best := samples[len(samples)-1].v
	for _, s := range samples {
		if now.Sub(s.at) <= window && less(s.v, best) {
			best = s.v
		}
	}
	return best
}

func TestWindowedFilterAgreesWithItsDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := newMinFilter()
		if rapid.Bool().Draw(t, "max") {
			f = newMaxFilter()
		}
		window := time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "window"))
		scale := rapid.Int64Range(1, int64(window)+2).Draw(t, "longest gap")
		now := Time(1)
		var samples []timedSample
		for range rapid.IntRange(1, 400).Draw(t, "samples") {
			now += Time(rapid.Int64Range(0, scale).Draw(t, "gap"))
			v := time.Duration(rapid.Int64Range(1, 100).Draw(t, "v"))
			samples = append(samples, timedSample{now, v})
			f.addSample(now, v, window)

			got := f.extreme()
			whole := extreme(samples, now, window, f.less)
			shorter := extreme(samples, now, window-window/filterSlots-1, f.less)
			require.False(t, f.less(got, whole), "%v is more extreme than all samples of the window: %v", got, whole)
			require.False(t, f.less(shorter, got), "%v misses %v, which is well within the window", got, shorter)
			require.LessOrEqual(t, f.n, len(f.ring))
		}
	})
}

func TestWindowedFilterWithAWindowThatChanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := newMinFilter()
		now := Time(1)
		var samples []timedSample
		for range rapid.IntRange(1, 600).Draw(t, "samples") {
			now += Time(rapid.Int64Range(0, 1000).Draw(t, "gap"))
			window := time.Duration(1) << rapid.IntRange(0, 30).Draw(t, "window")
			// Rising samples are the most there can be to remember.
			v := time.Duration(now) + time.Duration(rapid.Int64Range(0, 100).Draw(t, "jitter"))
			samples = append(samples, timedSample{now, v})
			f.addSample(now, v, window)
			require.GreaterOrEqual(t, f.extreme(), extreme(samples, now, window, f.less))
			require.LessOrEqual(t, f.extreme(), v, "never more than the newest sample")
			require.LessOrEqual(t, f.n, len(f.ring))
		}
	})
}

func TestWindowedFilterThatIsFullStillTakesTheNewest(t *testing.T) {
	f := newMinFilter()
	now, v := Time(1), time.Duration(1)
	full := false
	for _, spacing := range []time.Duration{1, 1 << 7, 1 << 14} {
		for range filterSlots * 3 / 4 { // nothing expires
			now, v = now.Add(spacing), v+1
			full = full || f.n == len(f.ring)
			f.addSample(now, v, spacing*filterSlots)
			require.Equal(t, filterSample{now, v}, *f.sampleAt(f.n - 1))
		}
	}
	assert.True(t, full, "each widening finds the samples of the one before")
}
