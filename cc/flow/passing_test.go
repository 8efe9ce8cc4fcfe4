package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// TestTheRateOfWhatPassesFollowsItsCounts checks a steady rate, a counter that begins anew, and counts that end.
func TestTheRateOfWhatPassesFollowsItsCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p passing
		every := time.Duration(rapid.IntRange(20, 500).Draw(t, "ms between counts")) * time.Millisecond
		rate := cc.Rate(rapid.Int64Range(8000, 1e9).Draw(t, "rate"))
		total, now := cc.Bytes(rapid.Int64Range(0, 1e12).Draw(t, "before")), cc.Time(time.Second)
		for range 12 {
			p.addCount(now, total)
			assert.LessOrEqual(t, p.rateAt(now), rate, "what came before the first count is not in it")
			now, total = now.Add(every), total+rate.BytesIn(every)
		}
		last := now.Add(-every)
		assert.InEpsilon(t, float64(rate), float64(p.rateAt(last)), 0.06)
		assert.Zero(t, p.rateAt(last.Add(passingLasts+1)))
		p.addCount(now, 0)
		assert.Zero(t, p.rateAt(now))
	})
}
