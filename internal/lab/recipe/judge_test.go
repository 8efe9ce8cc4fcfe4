package recipe

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

func TestMaxMinSharesAreThePapers(t *testing.T) {
	wants := []float64{10, 8, 6, 4}
	for _, row := range []struct {
		capacity float64
		want     []float64
	}{
		{25, []float64{7.5, 7.5, 6, 4}},
		{20, []float64{16. / 3, 16. / 3, 16. / 3, 4}},
		{28, wants},
		{40, wants},
		{12, []float64{3, 3, 3, 3}},
	} {
		assert.InDeltaSlice(t, row.want, maxMin(row.capacity, wants), 1e-9, "%v", row.capacity)
	}
}

func TestBoundsAreInclusiveButForAbove(t *testing.T) {
	assert.True(t, within("", "", 1, 1, 2, "").OK)
	assert.True(t, within("", "", 2, 1, 2, "").OK)
	assert.False(t, within("", "", 2.01, 1, 2, "").OK)
	assert.True(t, atLeast("", "", 1, 1, "").OK)
	assert.False(t, atLeast("", "", 0.99, 1, "").OK)
	assert.True(t, atMost("", "", 1, 1, "").OK)
	assert.False(t, atMost("", "", 1.01, 1, "").OK)
	assert.False(t, above("", "", 1, 1, "").OK)
	assert.Equal(t, "at most 20 ms", atMost("", "", 1, 20, "ms").Bound)
	nan := 0.0
	nan /= nan
	assert.False(t, atMost("", "", nan, 1, "").OK, "what cannot be measured holds nothing")
}

func TestTheFirstMomentOfARateIsTheEndOfItsTime(t *testing.T) {
	bytes := make([]cc.Bytes, 20)
	for i := 10; i < 20; i++ {
		bytes[i] = 12_500 // 1 Mbit/s
	}
	r := Run{Record: stage.Record{Actors: []stage.ActorRecord{{Name: "a", Bytes: bytes}}}}
	at, ok := r.firstAt("a", 1, 3*stage.Step, 0, 2*time.Second)
	assert.True(t, ok)
	assert.Equal(t, 1300*time.Millisecond, at)
	_, ok = r.firstAt("a", 1.1, 3*stage.Step, 0, 2*time.Second)
	assert.False(t, ok)
}
