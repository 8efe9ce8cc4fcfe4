package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRingIsFirstInFirstOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q Ring[int]
		var model []int
		for k := range rapid.IntRange(1, 5000).Draw(t, "operations") {
			if rapid.IntRange(0, 2).Draw(t, "op") > 0 {
				q.Push(k)
				model = append(model, k)
			} else if len(model) > 0 {
				require.Equal(t, model[len(model)/2], *q.At(len(model) / 2))
				require.Equal(t, model[0], q.Pop())
				model = model[1:]
			}
			require.Equal(t, len(model), q.Len())
		}
	})
}
