package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// renoAt returns a Reno flow in congestion avoidance.
func renoAt(t *testing.T, cwnd float64) (*path, *reno) {
	t.Helper()
	p := newPath(t, "reno")
	r := as[*reno](p)
	r.cwnd, r.ssthresh = cwnd, cwnd
	return p, r
}

func TestRenoSlowStart(t *testing.T) {
	p := newPath(t, "reno")
	assert.InDelta(t, 10, p.Cwnd(), 0.01, "starts with ten segments")
	p.Round(100 * ms)
	assert.InDelta(t, 20, p.Cwnd(), 0.01, "doubles in a round trip")
	p.Ack(20, 100*ms)
	assert.InDelta(t, 40, p.Cwnd(), 0.01, "and as much when one event covers the window")
	p.Ack(1e6, 100*ms)
	assert.InDelta(t, 80, p.Cwnd(), 0.01, "but no more when one event covers far more")
	assert.Equal(t, "slow_start", p.alg.Control().Phase)

	as[*reno](p).ssthresh = 100
	p.Ack(30, 100*ms)
	assert.InDelta(t, 100.1, p.Cwnd(), 0.01, "the ten acknowledgements past ssthresh count as avoidance")
}

func TestRenoAvoidance(t *testing.T) {
	p, _ := renoAt(t, 10)
	for range 10 {
		p.Ack(1, 100*ms)
	}
	assert.InDelta(t, 10.96, p.Cwnd(), 0.01, "ten single acknowledgements of a window of ten add 0.96")
	assert.Equal(t, "congestion_avoidance", p.alg.Control().Phase)

	p, _ = renoAt(t, 10)
	p.Ack(10, 100*ms)
	assert.InDelta(t, 11, p.Cwnd(), 0.01, "one event for the same ten adds 1")
	p.Ack(0.5, 100*ms)
	assert.InDelta(t, 11.045, p.Cwnd(), 0.01, "half a segment counts half")

	p.idle = true
	before := p.Cwnd()
	p.Ack(10, 100*ms)
	assert.InDelta(t, before, p.Cwnd(), 0, "a window that is not used does not grow")
}

func TestRenoLoss(t *testing.T) {
	p, r := renoAt(t, 20)
	p.Lose(1)
	assert.InDelta(t, 10, p.Cwnd(), 0.01, "a loss at 20 leaves 10")
	assert.Equal(t, "recovery", p.alg.Control().Phase)

	p.Wait(50 * ms)
	p.loseSent(3, p.state.Now.Add(-60*ms))
	assert.InDelta(t, 10, p.Cwnd(), 0.01, "losses of the same flight do not count again")

	p.Ack(10, 100*ms)
	assert.InDelta(t, 10, p.Cwnd(), 0.01, "acknowledgements of that flight do not grow the window")

	p.Wait(200 * ms)
	p.Ack(10, 100*ms)
	assert.InDelta(t, 11, p.Cwnd(), 0.01, "those of the next do")
	assert.Equal(t, "congestion_avoidance", p.alg.Control().Phase)

	p.Lose(1)
	assert.InDelta(t, 5.5, p.Cwnd(), 0.01, "and its losses cut")

	r.cwnd = 3
	p.Wait(time.Second)
	p.Lose(1)
	assert.InDelta(t, 2, p.Cwnd(), 0.01, "a cut leaves two segments")
}

func TestRenoTimeout(t *testing.T) {
	p, r := renoAt(t, 20)
	p.Timeout()
	assert.InDelta(t, 1, p.Cwnd(), 0, "a timeout leaves one segment")
	assert.InDelta(t, 10, r.ssthresh, 0, "and half the window as threshold")

	p.Wait(400 * ms)
	p.loseSent(1, p.state.Now.Add(-time.Second))
	p.state.SRTT = time.Second
	p.alg.OnLoss(Loss{State: p.state, SentAt: p.state.Now.Add(-time.Second), Timeout: true})
	assert.InDelta(t, 10, r.ssthresh, 0, "the next one of the same flight leaves the threshold alone")
	assert.InDelta(t, 1, p.Cwnd(), 0)

	p.loseSent(1, p.state.Now.Add(-ms))
	assert.InDelta(t, 10, r.ssthresh, 0, "nor do losses of what left between the two")

	r.cwnd = 4
	p.Ack(50, 500*ms)
	assert.InDelta(t, 5, p.Cwnd(), 0.01, "a jump over what had arrived before counts for one segment")
	p.Wait(time.Second)
	p.Ack(4, 100*ms)
	assert.InDelta(t, 9, p.Cwnd(), 0.01, "new data count in full")
}

func TestRenoThroughputLaw(t *testing.T) {
	p, _ := renoAt(t, 100)
	mean, rounds := 0.0, 0.0
	for cycle := range 20 {
		for acked := 0.0; acked < 10_000; rounds++ {
			n := p.Cwnd()
			if cycle >= 10 {
				mean += n
			} else {
				rounds = 0
			}
			p.Wait(100 * ms)
			p.Ack(n, 100*ms)
			acked += n
		}
		p.Lose(1)
		p.Wait(time.Second)
	}
	assert.InDelta(t, 122, mean/rounds, 3, "a loss every 10 000 packets: a window of sqrt(1.5/p) in the mean")
}

func TestRenoFollowsTheSawtooth(t *testing.T) {
	l := &bottleneck{rate: 1000, base: 50 * ms, buffer: 50}
	s := from(t, 0, "reno")
	l.run(t, 60*time.Second, s)
	assert.GreaterOrEqual(t, s.throughput(10*time.Second, 60*time.Second), 990.0,
		"a buffer of one BDP keeps the link busy")
	mean := 0.0
	settled := s.cwnd[len(s.cwnd)/4:]
	for _, w := range settled {
		mean += w / float64(len(settled))
	}
	assert.InDelta(t, 75, mean, 8, "the window swings between BDP and BDP plus buffer: 50 and 100 packets")
	assert.Less(t, s.lost, 200, "few losses: one a sawtooth, and one overshoot")
}
