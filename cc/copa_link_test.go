package cc

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestCopaHoldsItsQueue(t *testing.T) {
	for _, tt := range []struct {
		delta float64
		batch time.Duration
		loss  float64
	}{
		{0.5, 0, 0},
		{0.5, ms, 0}, // reports once per millisecond
		{0.5, 0, 0.01},
		{0.1, 0, 0},
		{0.1, ms, 0},
	} {
		l := &bottleneck{rate: 1000, base: 50 * ms, batch: tt.batch, random: tt.loss}
		s := from(t, 0, "copa:delta="+strconv.FormatFloat(tt.delta, 'g', -1, 64))
		l.run(t, 60*time.Second, s)
		mean, p99 := l.queued(30*time.Second, 60*time.Second)
		assert.GreaterOrEqual(t, s.throughput(30*time.Second, 60*time.Second), 990.0*(1-tt.loss), "%+v", tt)
		assert.GreaterOrEqual(t, mean, 1/tt.delta, "%+v: mean queue at least 1/delta", tt)
		assert.LessOrEqual(t, mean, 2.5/tt.delta, "%+v: at most 2.5/delta", tt)
		if tt.loss == 0 {
			assert.LessOrEqual(t, p99, 2.5/tt.delta+2.5, "%+v", tt)
		}
	}
}

func TestCopaSharesByDelta(t *testing.T) {
	const from30, to60 = 30 * time.Second, 60 * time.Second
	l := &bottleneck{rate: 1000, base: 50 * ms}
	a, b := from(t, 0, "copa:delta=0.5"), from(t, 3*time.Second, "copa:delta=0.5")
	l.run(t, to60, a, b)
	assert.Greater(t, jain(a.throughput(from30, to60), b.throughput(from30, to60)), 0.99, "equal deltas share equally")
	_, p99 := l.queued(from30, to60)
	assert.LessOrEqual(t, p99, 2.5*4+1, "the queue is that of the sum")

	l = &bottleneck{rate: 2000, base: 50 * ms}
	a, b = from(t, 0, "copa:delta=0.5"), from(t, 3*time.Second, "copa:delta=0.25")
	l.run(t, to60, a, b)
	ratio := b.throughput(from30, to60) / a.throughput(from30, to60)
	assert.InDelta(t, 1.9, ratio, 0.3, "half the delta gets about twice the rate")
}

func TestCopaAgainstCubic(t *testing.T) {
	share := func(mode string) float64 {
		l := &bottleneck{rate: 1000, base: 50 * ms, buffer: 100}
		s := from(t, 0, "copa:delta=0.5,mode="+mode)
		l.run(t, 60*time.Second, s, from(t, 3*time.Second, "cubic"))
		return s.throughput(20*time.Second, 60*time.Second)
	}
	assert.Less(t, share("constant"), 200.0, "constant delta yields to a flow that fills the queue")
	assert.Greater(t, share("auto"), 300.0, "mode switching holds its ground")
	assert.Greater(t, share("coop"), 300.0)
}

func TestCopaAutoStaysInItsDefaultModeAmongItsOwnKind(t *testing.T) {
	l := &bottleneck{rate: 1000, base: 50 * ms, buffer: 200}
	a, b := from(t, 0, "copa:delta=0.5,mode=auto"), from(t, 3*time.Second, "copa:delta=0.5,mode=auto")
	l.run(t, 60*time.Second, a, b)
	mean, _ := l.queued(30*time.Second, 60*time.Second)
	assert.Less(t, mean, 15.0, "the queue of two constant deltas is 6")
	assert.Greater(t, jain(a.throughput(30*time.Second, 60*time.Second),
		b.throughput(30*time.Second, 60*time.Second)), 0.95)
}

func TestCopaEndsWhenAPolicerDropsAThirdAndMore(t *testing.T) {
	l := &bottleneck{rate: 1000, base: 50 * ms, buffer: 1}
	s := from(t, 0, "copa:delta=0.5")
	l.run(t, 30*time.Second, s)
	highest := 0.0
	for _, w := range s.cwnd[len(s.cwnd)/2:] {
		highest = max(highest, w)
	}
	assert.Less(t, highest, 200.0, "without any delay to see, loss bounds the window at a few times the BDP of 50")
}
