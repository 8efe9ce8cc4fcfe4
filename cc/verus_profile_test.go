package cc

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// delayProfileOf is a profile with the delay d of each window from 1 to last, in ms.
func delayProfileOf(last int, d func(w int) float64) *delayProfile {
	p := &delayProfile{}
	p.reserveWindows(float64(last))
	for w := 1; w <= last; w++ {
		p.addPoint(float64(w), d(w))
	}
	return p
}

func verusLine(w int) float64 { return 50 + 0.5*float64(w) }

// Worked numbers: d(w) = 50+0.5w for w up to 200.
func TestVerusProfileFindsTheDelayOfAWindowAndBack(t *testing.T) {
	p := delayProfileOf(200, verusLine)
	require.True(t, p.fitCurve(50))
	for w := 10; w <= 190; w++ {
		assert.InDelta(t, verusLine(w), p.delayAt(w), 1, "window %d", w)
	}
	assert.Equal(t, 100, p.windowForDelay(100), "101 is the least window above 100 ms")
	assert.Equal(t, 1, p.windowForDelay(50), "2 already is above 50 ms")
	assert.Equal(t, 200, p.last)
	assert.InDelta(t, 0.5, p.slope, 0.01, "ms per packet")
}

func TestVerusProfileSmoothsNoise(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		p := delayProfileOf(200, func(w int) float64 { return verusLine(w) + 10*rng.Float64() - 5 })
		require.True(t, p.fitCurve(50))
		for w := 10; w <= 190; w++ {
			require.InDelta(t, verusLine(w), p.delayAt(w), 2, "window %d of a line with ±5 ms", w)
		}
	}
}

func TestVerusProfileFollowsTheKneeOfAQueue(t *testing.T) {
	knee := func(w int) float64 { return max(50, float64(w)) } // 1000 packets/s over 50 ms
	p := delayProfileOf(300, knee)
	require.True(t, p.fitCurve(50))
	for w := 1; w <= 300; w++ {
		assert.InDelta(t, knee(w), p.delayAt(w), 5, "window %d", w)
	}
	assert.InDelta(t, 299, p.delayAt(299), 1)
}

func TestVerusProfileCoversWhatWasNotMeasured(t *testing.T) {
	sparse := &delayProfile{}
	sparse.reserveWindows(400)
	for w := 20; w <= 200; w += 20 {
		sparse.addPoint(float64(w), verusLine(w))
	}
	require.True(t, sparse.fitCurve(50.5))
	assert.InDelta(t, verusLine(90), sparse.delayAt(90), 1, "between points")
	assert.InDelta(t, 50.5, sparse.delayAt(1), 2, "a single packet meets the least delay")
	assert.InDelta(t, verusLine(220), sparse.delayAt(220), 1, "beyond the last, its slope goes on")
	assert.Equal(t, 250, sparse.windowForDelay(1e6), "but no further than a quarter above")

	flat := delayProfileOf(100, func(int) float64 { return 50 })
	require.True(t, flat.fitCurve(50))
	assert.InDelta(t, 50.1, flat.delayAt(110), 0.01, "ten packets at 0.01 ms, where the curve does not rise")
	assert.Equal(t, 125, flat.windowForDelay(60))
}

func TestVerusProfileNeedsFivePoints(t *testing.T) {
	p := &delayProfile{}
	p.reserveWindows(100)
	for w := 10; w < 14; w++ {
		p.addPoint(float64(w), 50)
		p.addPoint(float64(w), 51)
	}
	assert.False(t, p.fitCurve(50))
	assert.False(t, p.isFitted())
	p.addPoint(14, 50)
	assert.True(t, p.fitCurve(50))
	assert.True(t, p.isFitted())
}

func TestVerusProfileAveragesAndForgets(t *testing.T) {
	p := delayProfileOf(100, verusLine)
	p.addPoint(40, 150)
	assert.InDelta(t, 0.875*70+0.125*150, float64(p.points[40]), 1e-3, "0.875 of a point stays")
	p.addPoint(90, 0)
	assert.InDelta(t, 95, float64(p.points[90]), 1e-3, "a delay of 0 is none")
	p.dropFrom(60)
	assert.Equal(t, 59, p.count)
	assert.Equal(t, 59, p.top)
	p.addPoint(1e9, 100)
	assert.Equal(t, 59, p.count, "a window without room is not remembered")
	p.reset()
	assert.Zero(t, p.count)
	assert.False(t, p.fitCurve(50))
}

func TestVerusProfileMemoryIsBounded(t *testing.T) {
	p := &delayProfile{}
	p.reserveWindows(10)
	assert.Len(t, p.points, 64, "a short flow's")
	p.reserveWindows(1e9)
	assert.Len(t, p.points, profileSteps+1)
	assert.LessOrEqual(t, 4*(len(p.points)+len(p.curve)), 17_000, "bytes")

	big := delayProfileOf(profileMaxWindow-1, func(w int) float64 { return 50 + float64(w)/100 })
	require.True(t, big.fitCurve(50))
	for _, w := range []int{1, 511, 512, 513, 1023, 1024, 5000, 39_999} {
		assert.InDelta(t, 50+float64(w)/100, big.delayAt(w), 0.02*float64(w)/100+0.05, "window %d", w)
	}
	assert.Zero(t, testing.AllocsPerRun(10, func() { big.fitCurve(50) }))
}

// The steps tile the windows: each window has one, in order, as wide as it says.
func TestVerusProfileSteps(t *testing.T) {
	seen := map[int][]int{}
	for w := 1; w < profileMaxWindow; w++ {
		i := profileStep(w)
		if n := len(seen[i]); n > 0 {
			require.Equal(t, w-1, seen[i][n-1], "a step is contiguous")
		}
		seen[i] = append(seen[i], w)
	}
	require.Len(t, seen, profileSteps)
	for i := 1; i < profileSteps; i++ { // the last one is cut short
		middle, width := profileWindow(i)
		require.InDelta(t, float64(len(seen[i])), width, 0)
		require.InDelta(t, float64(seen[i][0]+seen[i][len(seen[i])-1])/2, middle, 0)
		require.LessOrEqual(t, width, max(1, 0.004*middle), "step %d", i)
	}
}

func TestVerusProfileIsMonotoneWhateverWasMeasured(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := &delayProfile{}
		p.reserveWindows(profileMaxWindow)
		reach := rapid.SampledFrom([]int{20, 300, 3000, 39_999}).Draw(t, "reach")
		for range rapid.IntRange(5, 200).Draw(t, "points") {
			p.addPoint(float64(rapid.IntRange(1, reach).Draw(t, "w")), rapid.Float64Range(0.001, 1e5).Draw(t, "delay"))
		}
		if !p.fitCurve(rapid.Float64Range(0.001, 100).Draw(t, "base")) {
			return
		}
		for w := 2; w <= p.largestToTry()+1; w++ {
			if p.delayAt(w) < p.delayAt(w-1) {
				t.Fatalf("window %d has %v ms, the one before %v", w, p.delayAt(w), p.delayAt(w-1))
			}
		}
		target := rapid.Float64Range(0, 2e5).Draw(t, "target")
		w := 1
		for w < p.largestToTry() && p.delayAt(w+1) <= target {
			w++
		}
		require.Equal(t, w, p.windowForDelay(target), "what a scan from below finds")
	})
}

func TestDelayProfilePoolsWhatViolatesTheOrder(t *testing.T) {
	for _, tt := range []struct{ y, want []float32 }{
		{[]float32{1, 2, 3}, []float32{1, 2, 3}},
		{[]float32{3, 2, 1}, []float32{2, 2, 2}},
		{[]float32{1, 3, 2, 4}, []float32{1, 2.5, 2.5, 4}},
		{[]float32{5, 1, 1, 9, 8}, []float32{7. / 3, 7. / 3, 7. / 3, 8.5, 8.5}},
	} {
		got := slices.Clone(tt.y)
		makeMonotone(got)
		assert.InDeltaSlice(t, tt.want, got, 1e-5, "%v", tt.y)
	}
}
