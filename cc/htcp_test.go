package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestHTCPGrowsFasterTheLongerNothingIsLost(t *testing.T) {
	h := htcp{cut: Time(time.Second), left: 0.5}
	for after, want := range map[time.Duration]float64{
		500 * ms: 1, time.Second: 1, 2 * time.Second: 1 + 10 + 0.25, 3 * time.Second: 1 + 20 + 1,
	} {
		assert.InDelta(t, want, h.growthPerRound(h.cut.Add(after)), 1e-9, after)
	}
	h.left = 0.8
	assert.InDelta(t, 0.4*11.25, h.growthPerRound(h.cut.Add(2*time.Second)), 1e-9, "less where a loss leaves more")
	assert.InDelta(t, 1, h.growthPerRound(h.cut), 1e-9, "but no less than Reno")
}

// The queue held a third of the round trip: a loss leaves two thirds of the window, once the
// throughput is steady.
func TestHTCPLeavesWhatThePathHolds(t *testing.T) {
	w := &lossWindow{segments: segments{DefaultMSS}, ssthresh: 10, cwnd: 100}
	h := htcp{}
	now, delivered := Time(time.Second), Bytes(0)
	lose := func() float64 {
		for _, rtt := range []time.Duration{40 * ms, 60 * ms} {
			now, delivered = now.Add(time.Second), delivered+1_000_000
			h.onAck(w, Ack{State: State{Now: now, MSS: DefaultMSS, Delivered: delivered}, RTT: rtt, Sent: Sent{At: now}})
		}
		now = now.Add(ms)
		before := w.cwnd
		assert.True(t, h.onLoss(w, Loss{State: State{Now: now, MSS: DefaultMSS, Delivered: delivered}, SentAt: now}))
		return w.cwnd / before
	}
	assert.InDelta(t, 0.5, lose(), 1e-9, "the first")
	assert.InDelta(t, 0.5, lose(), 1e-9, "there is no throughput to compare")
	assert.InDelta(t, 2./3, lose(), 1e-9)
	delivered += 10_000_000
	assert.InDelta(t, 0.5, lose(), 1e-9, "more got through than before: the path has changed")
}

func TestJanusTakesWhatIsAggressive(t *testing.T) {
	for ref, left := range map[string]float64{
		janus8: cubicBeta, janus8 + ",aggressive=reno": renoBeta, janus8 + ",aggressive=htcp": htcpLeast,
	} {
		p := newPath(t, ref)
		j := as[*janus](p)
		p.Ack(1, 90*ms)
		assert.True(t, j.aggressive, ref)
		before := j.cubic.cwnd
		p.Lose(1)
		assert.InDelta(t, left, j.cubic.cwnd/before, 1e-9, ref)
		assert.True(t, j.cubic.hasLost, ref)
	}
}
