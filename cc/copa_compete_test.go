package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCopaNearlyEmpty(t *testing.T) {
	for _, tt := range []struct {
		name      string
		low, high time.Duration
		want      bool
	}{
		{"50.5 ms lie below the threshold of 51", 50500 * time.Microsecond, 60 * ms, true},
		{"51 ms are the threshold: not empty", 51 * ms, 60 * ms, false},
		{"55 ms", 55 * ms, 60 * ms, false},
		{"no queue at all", 50 * ms, 50 * ms, true},
	} {
		assert.Equal(t, tt.want, queueIsNearlyEmpty(50*ms, tt.low, tt.high), "least 50 ms, highest %v: %s", tt.high, tt.name)
	}
}

// rounds drives mode switching one round trip of 50 ms at a time.
type rounds struct {
	copaCompete
	now Time
}

func newRounds(mode copaMode, delta float64) *rounds {
	r := &rounds{copaCompete: newCopaCompete(mode, delta), now: Time(time.Hour)}
	r.reset()
	return r
}

// pass lets n round trips pass whose samples are all rtt, over a least of 50 ms.
func (r *rounds) pass(n int, rtt time.Duration) {
	for range n {
		r.now = r.now.Add(50 * ms)
		s := State{Now: r.now, SRTT: 50 * ms}
		r.addRTTSample(s, rtt)
		r.onAck(s, 50*ms)
	}
}

func (r *rounds) lose() {
	r.onLoss(Loss{State: State{Now: r.now}, SentAt: r.now.Add(-25 * ms)})
}

// full enters competitive mode.
func (r *rounds) full(t *testing.T) {
	t.Helper()
	for range 20 {
		if r.competitive {
			return
		}
		r.pass(1, 60*ms)
	}
	require.True(t, r.competitive)
}

func TestCopaEntersCompetitiveModeAfterTwoWindowsWithoutAnEmptyQueue(t *testing.T) {
	r := newRounds(copaAuto, 0.5)
	r.pass(20, 50*ms)
	assert.False(t, r.competitive)
	r.pass(10, 60*ms)
	assert.False(t, r.competitive, "one window of five round trips, and the next not yet over")
	r.pass(1, 60*ms)
	assert.True(t, r.competitive, "two of them")
	assert.Equal(t, "competitive", r.phaseName())
	assert.InDelta(t, 0.5, r.delta, 0)

	r.pass(1, 50*ms)
	assert.False(t, r.competitive, "a nearly empty queue ends it at once")
	assert.InDelta(t, 0.5, r.delta, 0)
	assert.Equal(t, "default", r.phaseName())

	r = newRounds(copaConstant, 0.5)
	r.pass(100, 60*ms)
	assert.False(t, r.competitive, "a constant delta stays constant")
	r.lose()
	assert.InDelta(t, 0.5, r.delta, 0)
}

func TestCopaWaitsForStartsToPass(t *testing.T) {
	r := newRounds(copaAuto, 0.5)
	r.beginSettling()
	r.pass(10+5, 60*ms)
	assert.False(t, r.competitive, "ten round trips after its own start nothing counts")
	r.pass(1, 60*ms)
	assert.True(t, r.competitive)

	r = newRounds(copaAuto, 0.5)
	r.pass(20, 52*ms)
	r.competitive = false
	r.busy = 0
	r.pass(10+5, 80*ms)
	assert.False(t, r.competitive, "nor after another's, which drives the delay to twice its highest")
	r.pass(1, 80*ms)
	assert.True(t, r.competitive)
}

func TestCopaCompetitiveDelta(t *testing.T) {
	r := newRounds(copaAuto, 0.5)
	r.full(t)
	var inverse []float64
	for range 4 {
		inverse = append(inverse, 1/r.delta)
		r.pass(1, 60*ms)
	}
	assert.InDeltaSlice(t, []float64{2, 3, 4, 5}, inverse, 1e-9, "1/delta grows by one per round trip")

	r.delta = 0.1
	r.lose()
	assert.InDelta(t, 5, 1/r.delta, 1e-9, "a loss at 10 leaves 5")
	r.lose()
	assert.InDelta(t, 5, 1/r.delta, 1e-9, "a second one in the round trip changes nothing")
	r.pass(1, 60*ms)
	assert.InDelta(t, 5, 1/r.delta, 1e-9, "nor does the round trip with the loss add")
	r.pass(1, 60*ms)
	assert.InDelta(t, 6, 1/r.delta, 1e-9)

	r.delta = 0.5
	r.lose()
	assert.InDelta(t, 0.5, r.delta, 1e-9, "delta as set is the ceiling")

	r = newRounds(copaCoop, 0.5)
	r.pass(1000, 60*ms)
	assert.InDelta(t, 0.004, r.delta, 1e-9, "and 0.004 the floor")
	r.pass(100, 50*ms)
	assert.True(t, r.competitive, "coop never leaves")
}

func TestCopaProbesWhetherTheQueueIsItsOwn(t *testing.T) {
	r := newRounds(copaAuto, 0.5)
	r.full(t)
	r.pass(6, 60*ms) // 1/delta from 2 to 8
	require.InDelta(t, 8, 1/r.delta, 1e-9)
	r.pass(19, 60*ms)
	assert.True(t, r.competitive)
	r.pass(1, 60*ms)
	assert.False(t, r.competitive, "20 round trips beyond four times the usual 1/delta, and no loss")
	assert.Equal(t, "probe", r.phaseName())
	assert.InDelta(t, 0.5, r.delta, 0)
	r.pass(9, 60*ms)
	assert.False(t, r.competitive, "ten round trips to empty the queue")
	r.pass(1, 60*ms)
	assert.True(t, r.competitive, "which it did not: somebody else fills it")

	r = newRounds(copaAuto, 0.5)
	r.full(t)
	for range 10 {
		r.pass(15, 60*ms)
		r.delta = 0.05
		r.lose()
	}
	assert.True(t, r.competitive, "losses show that there is a competitor")
}
