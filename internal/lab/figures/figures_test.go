package figures

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestALabelIsShownAsItIs(t *testing.T) {
	f := &Figure{}
	f.AddPanel("", "")
	svg, err := f.WriteElement(`$0 and ${rate}, #000000 & "x"`)
	require.NoError(t, err)
	assert.Contains(t, svg, `<svg role="img" aria-label="$0 and ${rate}, #000000 &amp; &#34;x&#34;"`)
}

// The interval has the true ratio in about 95 of 100 samples; a percentile bootstrap of few values has it less often.
func TestTheIntervalOfARatioHasTheTrueOne(t *testing.T) {
	for _, c := range []struct {
		n     int
		least float64
	}{{6, 0.85}, {20, 0.91}} {
		n, least := c.n, c.least
		r := rand.New(rand.NewPCG(1, uint64(n)))
		held := 0
		const samples = 1000
		for range samples {
			ratios := make([]float64, n)
			for i := range ratios {
				ratios[i] = math.Exp(math.Log(0.4) + 0.3*r.NormFloat64())
			}
			if e := MeanRatio(ratios); e.Low <= 0.4 && 0.4 <= e.High {
				held++
			}
		}
		assert.GreaterOrEqual(t, float64(held)/samples, least, "%d ratios", n)
		assert.Less(t, float64(held)/samples, 0.99, "%d ratios: it would be wider than it need be", n)
	}
	assert.Equal(t, "0.50 [0.25, 1.00]", MeanRatio([]float64{1, 0.25}).String(), "the range of two")
	assert.Equal(t, "0.36", MeanRatio([]float64{0.36}).String())
}
