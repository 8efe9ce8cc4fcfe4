package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// steadyVerus is past slow start, with the profile d(w) = 50+0.5w of 200
// windows. Its epoch ends 5 ms from now.
func steadyVerus(t *testing.T, ref string) (*path, *verus) {
	t.Helper()
	p := newPath(t, ref)
	v := as[*verus](p)
	v.profile = *delayProfileOf(200, verusLine)
	require.True(t, v.profile.fitCurve(50))
	v.slowStart = false
	v.dMin, v.dMaxLast, v.dTBar, v.dEst = 50, 100, 100, 100
	v.sampled = p.state.Now
	v.next, v.refit = p.state.Now.Add(5*ms), Never
	v.setWindow(p.state.Now, 100)
	p.state.CwndLimited, p.state.Inflight = true, 100*DefaultMSS
	return p, v
}

// verusEpoch lets the present epoch end.
func verusEpoch(p *path) {
	p.state.Now = max(p.state.Now, p.alg.Control().NextTick)
	p.alg.OnTick(p.state)
}

func TestVerusCredit(t *testing.T) {
	for _, tt := range []struct {
		row                  string
		dTBar, wBar, wCrt, s float64
	}{
		{"eleven epochs to a round trip: 60 − 50·9/10", 52, 60, 50, 15},
		{"less than one: what is missing", 4, 60, 50, 10},
		{"two: the window", 10, 60, 50, 60},
		{"quotient and credit are truncated: 60 − 6", 52, 60.9, 7, 54},
		{"more in flight than the window", 52, 60, 90, 0},
		{"and within one epoch", 4, 60, 90, 0},
		{"nothing in flight", 52, 60, 0, 60},
		{"no round trip yet", 0, 10, 4, 6},
	} {
		_, v := steadyVerus(t, "verus")
		v.dTBar, v.wBar = tt.dTBar, tt.wBar
		assert.InDelta(t, tt.s, v.packetsPerEpoch(tt.wCrt), 1e-9, tt.row)
	}
}

func TestVerusCreditIsTheEpochs(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	verusEpoch(p) // target 102: window 104 (103.99…), 20 epochs to a round trip of 100 ms
	credit := v.packetsPerEpoch(100)
	require.InDelta(t, 9, credit, 1.1)
	assert.InDelta(t, 100+credit, p.Cwnd(), 1e-6, "what is in flight and the credit")
	assert.Equal(t, RateOf(Bytes(credit)*DefaultMSS, 5*ms), p.alg.Control().PacingRate, "spread over the epoch")
	p.Ack(4, 100*ms)
	assert.InDelta(t, 96+credit, p.Cwnd(), 1e-6, "acknowledgements make no room for more")

	v.dMaxLast, v.dEst = 301, 51
	p.state.Inflight = 80 * DefaultMSS
	verusEpoch(p)
	assert.InDelta(t, 80, p.Cwnd(), 1e-6, "at the least delay, and still too long: send nothing")
	assert.Positive(t, p.alg.Control().PacingRate, "which is not the same as unpaced")
	p.Ack(80, 100*ms)
	assert.InDelta(t, 1, p.Cwnd(), 1e-9, "but never less than a segment")
}

func TestVerusEpochRule(t *testing.T) {
	for _, tt := range []struct {
		row                   string
		dMaxLast, dMax, after float64
	}{
		{"the delay rises by a millisecond", 100, 101, 79},
		{"it does not", 100, 100, 82},
		{"it falls", 100, 60, 82},
		{"it was above six times the least", 301, 301, 78},
		{"and has risen", 301, 400, 78},
		{"and has fallen", 301, 60, 78},
	} {
		p, v := steadyVerus(t, "verus")
		v.dEst, v.dMaxLast, v.dMax = 80, tt.dMaxLast, tt.dMax
		verusEpoch(p)
		assert.InDelta(t, tt.after, v.dEst, 1e-9, tt.row)
		assert.InDelta(t, 0.2*tt.dMaxLast+0.8*tt.dMax, v.dMaxLast, 1e-9, tt.row)
		assert.InDelta(t, float64(v.profile.windowForDelay(tt.after)), v.wBar, 1e-9, "%s: window of the target", tt.row)
	}

	p, v := steadyVerus(t, "verus:r=2,delta1_ms=0.5,delta2_ms=4,epoch_ms=10")
	v.dEst, v.dMax = 80, 101
	verusEpoch(p)
	assert.InDelta(t, 79.5, v.dEst, 1e-9, "delta1")
	assert.Equal(t, p.state.Now.Add(10*ms), p.alg.Control().NextTick)
	verusEpoch(p) // 100.8 is above 2·50
	assert.InDelta(t, 75.5, v.dEst, 1e-9, "delta2")
}

func TestVerusSmoothsTheLongestDelay(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	v.dMax = 150
	verusEpoch(p)
	assert.InDelta(t, 140, v.dMaxLast, 1e-9, "0.2·100 + 0.8·150")

	v.dMaxLast = 0
	p.Ack(1, 90*ms)
	p.Ack(1, 70*ms)
	verusEpoch(p)
	assert.InDelta(t, 90, v.dMaxLast, 1e-9, "the first epoch's is its own; the longest of it counts")
}

// Worked number: an outage backs off by itself.
func TestVerusBacksOffInSilence(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	v.dMaxLast, v.dEst = 30, 100
	p.Wait(35 * ms)
	v.next = p.state.Now.Add(5 * ms)
	for i := 1; i <= 10; i++ {
		verusEpoch(p)
		assert.InDelta(t, 100-float64(i), v.dEst, 1e-9, "%d ms of silence: a millisecond per epoch", 35+5*i)
	}
	p.Wait(time.Second)
	for range 100 {
		verusEpoch(p)
	}
	assert.InDelta(t, 50, v.dEst, 1e-9, "to the least delay")
	assert.InDelta(t, 1, v.wBar, 1e-9)
	assert.InDelta(t, 50, v.dMin, 1e-9, "of which silence says nothing")
}

func TestVerusMissedEpochsAreOne(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	first := v.next
	v.dEst = 80
	p.state.Now = first.Add(23 * ms)
	v.dMax = 100
	p.alg.OnTick(p.state)
	assert.InDelta(t, 82, v.dEst, 1e-9)
	assert.Equal(t, first.Add(25*ms), p.alg.Control().NextTick, "the next of the deadlines, which do not drift")
	p.state.Now = first.Add(24 * ms)
	p.alg.OnTick(p.state)
	assert.InDelta(t, 82, v.dEst, 1e-9, "not yet")
}

func TestVerusLoss(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	at80 := p.state.Now.Add(10 * ms)
	v.setWindow(at80, 80)
	p.Wait(50 * ms)
	v.setWindow(p.state.Now, 100)
	p.Wait(50 * ms)

	p.loseSent(1, at80.Add(ms))
	assert.InDelta(t, 56, v.wBar, 1e-9, "0.7 of the 80 that were in force when it left")
	assert.InDelta(t, verusLine(56), v.dEst, 1)
	assert.Equal(t, "recovery", p.alg.Control().Phase)
	p.Wait(10 * ms)
	p.Lose(1)
	assert.InDelta(t, 56, v.wBar, 1e-9, "a second loss of the same phase changes nothing")

	points := v.profile.count
	before := v.profile.points[100]
	p.Ack(1, 40*ms)
	assert.InDelta(t, 56.0179, v.wBar, 1e-4, "a 1/56 for each acknowledgement")
	assert.True(t, v.recovery, "which was sent before")
	assert.Equal(t, points, v.profile.count)
	assert.InDelta(t, before, v.profile.points[100], 0, "the profile rests")

	v.dMax, v.dMaxLast = 100, 100
	target := v.dEst
	verusEpoch(p)
	assert.InDelta(t, target, v.dEst, 1e-9, "and so does the target")

	p.Wait(30 * ms)
	p.Ack(1, 25*ms)
	assert.False(t, v.recovery, "a packet sent since, in a window of 56, ends the phase")
}

func TestVerusCutsAgainWhenLossesGoOn(t *testing.T) {
	p, v := steadyVerus(t, "verus:m=0.5")
	p.srtt = 100 * ms
	p.Ack(1, 100*ms)
	sent := p.state.Now
	p.loseSent(1, sent)
	require.InDelta(t, 50, v.wBar, 1e-9)
	p.Wait(200 * ms)
	p.loseSent(10, sent)
	assert.InDelta(t, 50, v.wBar, 1e-9, "within two round trips they are of one event")
	p.Wait(ms)
	p.loseSent(10, sent)
	assert.InDelta(t, 25, v.wBar, 1e-9, "after that it has not helped")
}

func TestVerusLossLeavesNoRoomForABurst(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	verusEpoch(p)
	require.Greater(t, p.Cwnd(), 100.0)
	p.alg.OnLoss(Loss{
		State: State{Now: p.state.Now, MSS: DefaultMSS, Inflight: 40 * DefaultMSS},
		Lost:  60 * DefaultMSS, SentAt: p.state.Now,
	})
	assert.InDelta(t, 40+v.packetsPerEpoch(40), p.Cwnd(), 1e-6, "an epoch's credit above what is still in flight")
}

func TestVerusSlowStart(t *testing.T) {
	p := newPath(t, "verus")
	v := as[*verus](p)
	assert.Equal(t, Control{Cwnd: 10 * DefaultMSS, Phase: "slow_start"}, p.alg.Control(), "no pacing, no clock")
	p.Ack(1, 50*ms)
	assert.InDelta(t, 11, p.Cwnd(), 1e-9, "one more for each acknowledgement")
	assert.Equal(t, p.state.Now.Add(5*ms), p.alg.Control().NextTick)
	p.idle = true
	p.Ack(1, 50*ms)
	assert.InDelta(t, 11, p.Cwnd(), 1e-9, "unless the window is not used")
	p.idle = false
	for range 4 {
		p.Round(50 * ms)
		verusEpoch(p)
	}
	require.Greater(t, v.profile.count, profileMinPoints)
	grown := v.wBar
	p.Wait(20 * ms)
	p.Ack(1, 500*ms)
	assert.InDelta(t, grown+1, v.wBar, 1e-9, "15·50 is more than half a second, which is not exceeded")
	p.Ack(1, 501*ms)
	assert.Equal(t, "recovery", p.alg.Control().Phase)
	assert.InDelta(t, 7+1./7, v.wBar, 1e-9, "0.7 of the 10 of half a second ago, and recovery's share of this one")
	assert.True(t, v.profile.isFitted())
	assert.InDelta(t, 50, v.dEst, 2, "which met 50 ms")

	v.dMaxLast = 400
	target := v.dEst
	verusEpoch(p)
	assert.InDelta(t, target, v.dEst, 1e-9, "what is above r·dMin is slow start's queue")
	p.Wait(100 * ms)
	p.Ack(1, 90*ms)
	assert.Equal(t, "profile", p.alg.Control().Phase)
	assert.False(t, v.leaving)
}

func TestVerusSlowStartEndsByTheLeastDelay(t *testing.T) {
	for _, tt := range []struct {
		row          string
		ref          string
		least, limit float64
	}{
		{"15 times the least", "verus", 20, 300},
		{"at the most exit_ms", "verus", 50, 500},
		{"a short path's jitter is no queue", "verus", 1, 100},
		{"a long path is none either", "verus", 600, 1200},
		{"as set", "verus:exit_ms=200", 50, 200},
	} {
		v := as[*verus](newPath(t, tt.ref))
		v.dMin = tt.least
		assert.InDelta(t, tt.limit, v.exitDelay(), 1e-9, tt.row)
	}
}

func TestVerusSlowStartEndsWithoutSamples(t *testing.T) {
	p := newPath(t, "verus")
	p.Ack(1, 20*ms)
	p.Wait(299 * ms)
	p.Ack(1, 0)
	assert.Equal(t, "slow_start", p.alg.Control().Phase)
	p.Wait(2 * ms)
	p.Ack(1, 0)
	assert.Equal(t, "recovery", p.alg.Control().Phase, "the delay is at least the time since the last")
}

func TestVerusLossInSlowStart(t *testing.T) {
	p := newPath(t, "verus")
	v := as[*verus](p)
	v.setWindow(p.state.Now, 28)
	p.Ack(0, 50*ms)
	p.Wait(ms)
	p.Lose(1)
	assert.InDelta(t, 0.7*28, v.wBar, 1e-6)
	assert.Equal(t, "slow_start", p.alg.Control().Phase, "small windows go on")

	p = newPath(t, "verus")
	v = as[*verus](p)
	for range 4 {
		p.Round(50 * ms)
		verusEpoch(p)
	}
	require.Greater(t, v.wBar, 150.0)
	for w := 1; w < 160; w++ {
		v.profile.addPoint(float64(w), verusLine(w))
	}
	p.Wait(ms)
	sent := p.state.Now.Add(-50 * ms)
	lost := v.windows.windowAt(sent, 0)
	require.Less(t, lost, 100.0)
	p.loseSent(1, sent)
	assert.InDelta(t, 0.7*lost, v.wBar, 1e-3)
	assert.Equal(t, "recovery", p.alg.Control().Phase)
	assert.Equal(t, 99, v.profile.top, "points from 100 on are a full queue's")
	assert.True(t, v.profile.isFitted())
}

func TestVerusTimeout(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	p.Timeout()
	assert.InDelta(t, 50, v.dEst, 1e-9, "the target starts from the least delay")
	assert.InDelta(t, 1, v.wBar, 1e-9)
	assert.Equal(t, "recovery", p.alg.Control().Phase)
	assert.True(t, v.profile.isFitted(), "the profile stays")

	p = newPath(t, "verus")
	v = as[*verus](p)
	for range 4 {
		p.Round(50 * ms)
		verusEpoch(p)
	}
	p.Wait(ms)
	p.Timeout()
	assert.InDelta(t, 1, p.Cwnd(), 1e-9)
	assert.Zero(t, v.profile.count, "in slow start all is forgotten")
	assert.Equal(t, "slow_start", p.alg.Control().Phase)
	p.Ack(5, 50*ms)
	assert.InDelta(t, 1, p.Cwnd(), 1e-9, "what left before says nothing of the new session")
	assert.Zero(t, v.dMin)
	p.Wait(60 * ms)
	p.Ack(1, 50*ms)
	assert.InDelta(t, 2, p.Cwnd(), 1e-9)
}

func TestVerusUnusedWindowsTeachNothing(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	before := v.profile.points
	points := append([]float32(nil), before...)
	p.idle = true
	target := v.dEst
	for range 100 {
		p.Wait(5 * ms)
		p.Ack(1, 50*ms)
		p.state.Inflight = 2 * DefaultMSS
		verusEpoch(p)
	}
	assert.Equal(t, points, v.profile.points)
	assert.LessOrEqual(t, v.dEst, target, "nor does the target rise")

	v.setWindow(p.state.Now, 100)
	p.Wait(60 * ms)
	ack := Ack{
		State: p.state, Acked: DefaultMSS, RTT: 50 * ms,
		Sent: Sent{At: p.state.Now.Add(-50 * ms), AppLimited: true},
	}
	ack.CwndLimited = true
	p.alg.OnAck(ack)
	assert.Equal(t, points, v.profile.points, "nor does a packet that left when the application had no more")
	ack.Sent.AppLimited = false
	p.alg.OnAck(ack)
	assert.InDelta(t, 0.875*100+0.125*50, v.profile.points[100], 0.1, "others do")
}

func TestVerusLeastDelayGrowsOnlyWithEvidence(t *testing.T) {
	p, v := steadyVerus(t, "verus:r=2")
	p.Wait(200 * ms)
	v.dMaxLast, v.dEst = 200, 50
	lone := func(before Bytes) {
		v.dMaxLast, v.dMax = 200, 200
		p.state.Inflight = 0
		p.alg.OnAck(Ack{
			State: p.state, Acked: DefaultMSS, RTT: 65 * ms,
			Sent: Sent{At: p.state.Now.Add(-65 * ms), Inflight: before},
		})
		p.state.Inflight = DefaultMSS
		verusEpoch(p)
	}
	lone(20 * DefaultMSS)
	assert.InDelta(t, 50, v.dMin, 1e-9, "behind others of its own it met their queue")
	lone(0)
	assert.InDelta(t, 60, v.dMin, 1e-9, "a packet by itself did not: 10 ms per epoch")
	lone(0)
	assert.InDelta(t, 65, v.dMin, 1e-9, "up to what was measured")
	p.Wait(5 * ms)
	p.Ack(1, 40*ms)
	assert.InDelta(t, 40, v.dMin, 1e-9)
}

func TestVerusWithoutAProfileMovesByAPacket(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	v.profile.reset()
	v.dMax = 100
	verusEpoch(p)
	assert.InDelta(t, 101, v.wBar, 1e-9)
	v.dMax = 110
	verusEpoch(p)
	assert.InDelta(t, 100, v.wBar, 1e-9)
}

func TestVerusFitsTheProfileAnew(t *testing.T) {
	p, v := steadyVerus(t, "verus:refresh_s=0.5")
	v.refit = p.state.Now.Add(100 * ms)
	for w := 1; w <= 200; w++ {
		for range 50 {
			v.profile.addPoint(float64(w), 2*verusLine(w))
		}
	}
	at := v.profile.delayAt(100)
	for p.state.Now < v.refit.Add(-5*ms) {
		verusEpoch(p)
	}
	assert.InDelta(t, at, v.profile.delayAt(100), 1e-9, "not yet")
	verusEpoch(p)
	assert.InDelta(t, 2*at, v.profile.delayAt(100), 2)
	assert.Equal(t, p.state.Now.Add(500*ms), v.refit)
}

func TestVerusHasNoClockWhileNothingIsInFlight(t *testing.T) {
	p, v := steadyVerus(t, "verus")
	p.state.Inflight = 0
	verusEpoch(p)
	ctl := p.alg.Control()
	assert.Zero(t, ctl.NextTick)
	assert.InDelta(t, v.wBar, p.Cwnd(), 1, "who begins again has the window")
	require.Greater(t, v.dTBar, v.dMin)
	least := time.Duration(v.dMin * float64(ms))
	assert.Equal(t, v.pacingRate(1, v.wBar, least), ctl.PacingRate, "over the least round trip: there is no queue")
	p.Wait(time.Minute)
	p.Ack(1, 50*ms)
	assert.Equal(t, p.state.Now.Add(5*ms), p.alg.Control().NextTick)
	p.state.Inflight = 10 * DefaultMSS
	target := v.dEst
	verusEpoch(p)
	assert.GreaterOrEqual(t, v.dEst, target-1, "the pause was no outage")
}

func TestVerusWindowLog(t *testing.T) {
	var l windowLog
	assert.InDelta(t, 7, l.windowAt(5, 7), 0, "nothing is known")
	l.addChange(10, 1, 0)
	l.addChange(20, 2, 0)
	l.addChange(20, 3, 0)
	l.addChange(30, 3, 0)
	for _, tt := range []struct {
		left Time
		want float64
	}{{5, 1}, {10, 1}, {19, 1}, {20, 3}, {40, 3}} {
		assert.InDelta(t, tt.want, l.windowAt(tt.left, 7), 0, "left at %d", tt.left)
	}
	assert.Equal(t, 2, l.n, "an equal window is no change")

	for i := range 1000 {
		l.addChange(Time(1000+100*i), float64(i+10), 10)
	}
	assert.Equal(t, windowLogSlots, l.n)
	assert.InDelta(t, 1009, l.windowAt(Time(1_000_000), 7), 0)
	assert.InDelta(t, 1000-windowLogSlots+10, l.windowAt(1, 7), 0, "before the oldest: the oldest")
	n := l.n
	l.addChange(Time(1000+100*999+5), 5, 10)
	assert.Equal(t, n, l.n)
	assert.InDelta(t, 5, l.windowAt(Time(1_000_000), 7), 0, "close changes share a slot, which has the newest")
}
