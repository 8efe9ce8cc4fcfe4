package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// vegasAt returns a Vegas flow at the end of a round of ten acknowledgements
// whose least round trip was rtt, above a base of 100 ms.
func vegasAt(t *testing.T, cwnd, ssthresh float64, rtt time.Duration) (*path, *vegas) {
	t.Helper()
	p := newPath(t, "vegas")
	v := as[*vegas](p)
	v.cwnd, v.ssthresh = cwnd, ssthresh
	v.base, v.least, v.acks = 100*ms, rtt, 10
	v.round.start = p.state.Now
	p.Wait(rtt)
	return p, v
}

func TestVegasOncePerRound(t *testing.T) {
	for _, tt := range []struct {
		name           string
		cwnd, ssthresh float64
		rtt            time.Duration
		want           float64
	}{
		{"20 packets at 110 ms queue 2: hold", 20, 15, 110 * ms, 20},
		{"20 packets at 109 ms queue 1 and a bit: one more", 20, 15, 109 * ms, 21},
		{"20 packets at 121 ms queue 4 and a bit: hold", 20, 15, 121 * ms, 20},
		{"20 packets at 125 ms queue 5: one less", 20, 15, 125 * ms, 19},
		{"slow start at 106 ms queues 1: goes on", 20, infinite, 106 * ms, 21},
		{"slow start at 110 ms queues 2: left, at its target of 18 and one", 20, infinite, 110 * ms, 19},
		{"never below two", 2, 1, 900 * ms, 2},
	} {
		p, v := vegasAt(t, tt.cwnd, tt.ssthresh, tt.rtt)
		p.Ack(1, tt.rtt)
		assert.InDelta(t, tt.want, p.Cwnd(), 0.001, tt.name)
		assert.GreaterOrEqual(t, v.ssthresh, 0.75*v.cwnd, tt.name)
	}

	_, v := vegasAt(t, 20, infinite, 110*ms)
	v.adjustWindow(1, true)
	assert.InDelta(t, 19, v.ssthresh, 0, "slow start at 110 ms leaves a threshold of 19")
}

func TestVegasWithinARound(t *testing.T) {
	p, v := vegasAt(t, 20, infinite, 100*ms)
	p.Ack(1, 100*ms)
	p.Wait(10 * ms)
	before := v.cwnd
	p.Ack(3, 100*ms)
	assert.InDelta(t, before+3, v.cwnd, 0.001, "slow start grows with every acknowledgement")

	p, v = vegasAt(t, 20, 10, 100*ms)
	p.Ack(1, 100*ms)
	p.Wait(10 * ms)
	before = v.cwnd
	p.Ack(3, 100*ms)
	assert.InDelta(t, before, v.cwnd, 0, "avoidance does not")
}

func TestVegasWithFewSamplesIsReno(t *testing.T) {
	p, v := vegasAt(t, 20, 10, 200*ms)
	v.acks = 1
	p.Ack(1, 200*ms)
	assert.InDelta(t, 20.05, p.Cwnd(), 0.001, "two samples of single packets are too few to call it a queue")

	p, v = vegasAt(t, 20, 10, 200*ms)
	v.acks = 0
	p.Ack(10, 200*ms)
	assert.InDelta(t, 19, p.Cwnd(), 0.001, "one event for ten packets stands for five acknowledgements")
}

func TestVegasLossAndPause(t *testing.T) {
	p, v := vegasAt(t, 20, 10, 100*ms)
	p.Lose(1)
	assert.InDelta(t, 10, p.Cwnd(), 0, "half, as Reno")
	assert.Equal(t, 100*ms, v.base, "the base round trip stays")
	assert.Zero(t, v.least, "the round starts afresh")
	p.Wait(50 * ms)
	p.Ack(5, 150*ms)
	assert.InDelta(t, 10, p.Cwnd(), 0, "no step while the flight of the loss is acknowledged")

	p.Timeout()
	assert.InDelta(t, 1, p.Cwnd(), 0)

	p, v = vegasAt(t, 20, 10, 100*ms)
	p.idle = true
	p.Ack(1, 100*ms)
	assert.InDelta(t, 20, p.Cwnd(), 0, "an unused window does not grow")
	p.Wait(time.Minute)
	p.idle = false
	v.least, v.acks = 300*ms, 10
	p.Ack(1, 300*ms)
	assert.Equal(t, p.state.Now, v.round.start, "after a pause the round starts afresh")
	assert.InDelta(t, 20, p.Cwnd(), 0, "without judging what came before")
}

func TestVegasOnALink(t *testing.T) {
	l := &bottleneck{rate: 1000, base: 100 * ms}
	alone := from(t, 0, "vegas")
	l.run(t, 90*time.Second, alone)
	assert.GreaterOrEqual(t, alone.throughput(30*time.Second, 60*time.Second), 990.0)
	assert.GreaterOrEqual(t, least(alone), 102.0, "one flow holds 2 to 5 packets beyond the BDP of 100")
	assert.LessOrEqual(t, alone.cwnd[len(alone.cwnd)-1], 105.0)
	mean, p99 := l.queued(60*time.Second, 90*time.Second)
	assert.GreaterOrEqual(t, mean, 2.0)
	assert.LessOrEqual(t, p99, 5.0+1, "and the one in service")

	// Together: whoever comes later takes the others' queue for the path.
	l = &bottleneck{rate: 1000, base: 100 * ms}
	one, two := from(t, 0, "vegas"), from(t, 30*ms, "vegas")
	l.run(t, 120*time.Second, one, two)
	mean, p99 = l.queued(90*time.Second, 120*time.Second)
	assert.GreaterOrEqual(t, mean, 3.5, "two flows hold 4 to 10 between them")
	assert.LessOrEqual(t, p99, 10.0)
	assert.InDelta(t, 1000, one.throughput(90*time.Second, 120*time.Second)+two.throughput(90*time.Second,
		120*time.Second), 10)
}

// least is the least window of the second half of a run.
func least(s *sender) float64 {
	low := infinite
	for _, w := range s.cwnd[len(s.cwnd)/2:] {
		low = min(low, w)
	}
	return low
}
