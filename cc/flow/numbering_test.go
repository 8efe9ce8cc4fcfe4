package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// TestAnAnswerIsNeverTakenForOneToALaterRequest loses requests at random, but one marked one at most in three.
func TestAnAnswerIsNeverTakenForOneToALaterRequest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var n Numbering[int]
		type request struct {
			number int
			marked bool
		}
		var onTheWay []request
		now := cc.Time(1)
		for i := range 400 {
			now = now.Add(time.Millisecond)
			r := request{i, n.Ask(now, i)}
			if !rapid.Bool().Draw(t, "lost") || r.marked {
				onTheWay = append(onTheWay, r)
			}
			if len(onTheWay) < 5 {
				continue
			}
			r, onTheWay = onTheWay[0], onTheWay[1:]
			got, ok := n.Answer(now, r.marked)
			require.True(t, ok)
			require.LessOrEqual(t, got, r.number)
			require.Greater(t, got, r.number-markEvery)
			if r.marked {
				require.Equal(t, r.number, got)
			}
		}
	})
}

func TestAnAnswerWithoutARequestIsNone(t *testing.T) {
	var n Numbering[int]
	_, ok := n.Answer(1, false)
	assert.False(t, ok)
	require.True(t, n.Ask(1, 7))
	_, ok = n.Answer(1, false)
	assert.False(t, ok, "only a marked request is on its way")
	_, ok = n.Answer(cc.Time(numberingLimit)+2, true)
	assert.False(t, ok, "it is too old")
	for i := range 2 * maxUnanswered {
		n.Ask(cc.Time(10*time.Second), i)
	}
	assert.Len(t, n.requests, maxUnanswered)
}
