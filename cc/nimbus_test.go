package cc

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestNimbusReckonsTheCrossTraffic(t *testing.T) {
	for _, tt := range []struct{ mu, sent, received, want float64 }{
		{12, 6, 6, 6}, // worked numbers, Mbit/s: z = mu·S/R − S
		{12, 6, 5, 8.4},
		{12, 6, 4, 12},
		{12, 12, 12, 0},
		{12, 14, 12, 0},  // the queue takes what is beyond the link's rate
		{12, 6, 1, 12},   // not more than the link carries
		{12, 6, 0, 0},    // nothing arrived: nothing is known
		{12, 13, 14, 0},  // never below nothing
		{0, 6, 6, 0},     // nor without a capacity
		{12, 1, 1, 11},   // an empty queue reads as cross traffic that takes the rest
		{12, 0.5, 12, 0}, // acknowledgements that came in a burst
	} {
		assert.InDelta(t, tt.want, crossTraffic(tt.mu, tt.sent, tt.received), 1e-9, "%+v", tt)
	}
}

func TestNimbusPulsesTakeBackWhatTheyGive(t *testing.T) {
	const a, steps = 3.0, 100_000
	sum, most, least := 0.0, 0.0, 0.0
	atMost, atLeast := 0.0, 0.0
	for i := range steps {
		phase := (float64(i) + 0.5) / steps
		v := pulseRate(phase, a)
		sum += v / steps
		if v > most {
			most, atMost = v, phase
		}
		if v < least {
			least, atLeast = v, phase
		}
		assert.InDelta(t, sum/nimbusPulseHz, pulseIntegral(phase, a), 1e-5, "the integral, at %v", phase)
	}
	assert.InDelta(t, 0, sum, 1e-6, "mean over a period")
	assert.InDelta(t, a, most, 1e-6)
	assert.InDelta(t, 0.125, atMost, 1e-4)
	assert.InDelta(t, -a/3, least, 1e-6)
	assert.InDelta(t, 0.625, atLeast, 1e-4)
}

func TestNimbusDelayLaw(t *testing.T) {
	for _, tt := range []struct {
		mu, cross, sent float64
		rtt             time.Duration
		want            float64
	}{
		{12, 0, 12, 50 * ms, 13.5},                   // worked number: S + alpha·0 + 1.5
		{12, 0, 12, 62500 * time.Microsecond, 12},    // its fixed point: a queue of a quarter of the round trip
		{12, 0, 12, 75 * ms, 11},                     // longer queues slow it down
		{12, 6, 6, 62500 * time.Microsecond, 6},      // beside 6 there are 6
		{12, 6, 3, 62500 * time.Microsecond, 5.4},    // of which four fifths of what is missing are taken at once
		{12, 6, 12, 62500 * time.Microsecond, 7.2},   // and given back
		{12, 12, 0.6, 62500 * time.Microsecond, .12}, // crowded out
	} {
		assert.InDelta(t, tt.want, delayRate(tt.mu, tt.cross, tt.sent, tt.rtt, 50*ms, 1.25), 1e-9, "%+v", tt)
	}
}

// watch feeds synthetic cross traffic, and what arrives, for as long as the
// history is; it returns what the look made of it.
func watch(cross, received func(t float64) float64) *elasticity {
	e := newElasticity()
	for i := range nimbusHistory {
		at := float64(i) * nimbusGrid.Seconds()
		e.addSample(cross(at), received(at), 50*ms)
	}
	e.updateElasticity(12)
	return &e
}

func TestNimbusTellsElasticFromInelastic(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	noise := func() float64 { return 0.1 * rng.NormFloat64() }
	wave := func(hz float64) func(float64) float64 {
		return func(at float64) float64 { return 5 + math.Sin(2*math.Pi*hz*at) + noise() }
	}
	still := func(float64) float64 { return 5 + noise() }
	flat := 0.0
	for range 20 {
		assert.Greater(t, watch(wave(5), still).eta, 5.0, "an answer at the pulse's frequency")
		flat += watch(still, still).eta / 20
		assert.Less(t, watch(wave(7), still).eta, 1.0, "an oscillation beside it")
		assert.Less(t, watch(still, wave(5)).eta, 0.8, "our own pulse that arrives as it left counts for less")
	}
	assert.GreaterOrEqual(t, flat, 0.5, "noise alone is as strong here as there")
	assert.LessOrEqual(t, flat, 2.0, "noise alone is as strong here as there")
}

func TestNimbusJudgesByWhatElseItSees(t *testing.T) {
	level := func(v float64) func(float64) float64 { return func(float64) float64 { return v } }
	pulses := func(at float64) float64 { return 6 + math.Sin(2*math.Pi*5*at) }
	for _, tt := range []struct {
		name            string
		cross, received func(float64) float64
		want            float64
	}{
		{"so little cross traffic is none", level(1), pulses, 0},
		{"one that takes all crowds us out", level(11), pulses, 0.95*1 + 0.05*6},
		{"a pulse that cannot be seen to arrive", level(6), level(5), 0.95 * 1},
		{"none that answers", level(6), pulses, 0.95 * 1},
	} {
		assert.InDelta(t, tt.want, watch(tt.cross, tt.received).value, 1e-6, tt.name)
	}
	rng := rand.New(rand.NewPCG(4, 4))
	noisy := func(float64) float64 { return 5 + rng.NormFloat64() }
	blind := watch(level(6), noisy)
	assert.InDelta(t, 0.95+0.05*elasticityBlind, blind.value, 1e-6, "nothing to be seen of the pulse: rather compete")
}

func TestNimbusNeedsAFullHistory(t *testing.T) {
	e := newElasticity()
	for range nimbusHistory - 1 {
		e.addSample(6, 6, 50*ms)
	}
	e.updateElasticity(12)
	assert.Equal(t, elasticityStart, e.value)
	assert.Equal(t, 6.0, e.receivedAgo(10_000), "as long ago as is known")
	assert.Zero(t, new(elasticity).receivedAgo(0))
}

func TestNimbusMeasuresBothRatesOverTheSamePackets(t *testing.T) {
	var f FlightRates
	now, left, delivered := Time(time.Second), Time(time.Second).Add(-50*ms), Bytes(0)
	_, _, ok := f.Rates(nimbusSpan, 0)
	require.False(t, ok, "nothing is known")
	for range 500 { // sent at 6, arriving at 5 Mbit/s
		left = left.Add(Rate(6e6).TimeFor(DefaultMSS))
		now = now.Add(Rate(5e6).TimeFor(DefaultMSS))
		delivered += DefaultMSS
		f.Add(Ack{State: State{Now: now, Delivered: delivered}, Sent: Sent{At: left}}, nimbusSpan)
	}
	sent, received, ok := f.Rates(nimbusSpan, 10*DefaultMSS)
	require.True(t, ok)
	assert.InEpsilon(t, 6e6/8, sent, 0.001)
	assert.InEpsilon(t, 5e6/8, received, 0.001)
	_, _, ok = f.Rates(nimbusSpan, 1000*DefaultMSS)
	assert.False(t, ok, "too few packets")

	f.Add(Ack{State: State{Now: now.Add(ms), Delivered: delivered + DefaultMSS}}, nimbusSpan)
	f.Add(Ack{State: State{Now: now.Add(2 * ms), Delivered: delivered + DefaultMSS}, Sent: Sent{At: left}}, nimbusSpan)
	again, _, _ := f.Rates(nimbusSpan, 10*DefaultMSS)
	assert.Equal(t, sent, again, "bytes without a record, or sent again, leave no mark")
}

func TestNimbusMarksReachBackForTheSpanHoweverManyAcknowledgementsThereAre(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gap := time.Duration(rapid.IntRange(1_000, 20_000_000).Draw(t, "ns"))
		var f FlightRates
		now := Time(time.Second)
		for i := range 30 + int(4*nimbusSpan/gap) {
			now = now.Add(gap)
			f.Add(Ack{State: State{Now: now, Delivered: Bytes(i) * 1000}, Sent: Sent{At: now.Add(-20 * ms)}},
				nimbusSpan)
		}
		sent, received, ok := f.Rates(nimbusSpan, 10_000)
		require.True(t, ok)
		assert.InEpsilon(t, 1000/gap.Seconds(), sent, 0.01)
		assert.InEpsilon(t, sent, received, 0.001)
	})
}

func TestNimbusRemembersTheLargestRate(t *testing.T) {
	c := capacity{slowest: newMinFilter()}
	assert.Zero(t, c.estimate())
	now := Time(time.Second)
	for range 100 {
		now = now.Add(nimbusGrid)
		c.addRate(now, 1.5e6, 10*time.Second)
	}
	assert.InEpsilon(t, 1.5e6, c.estimate(), 1e-3)
	c.addRate(now.Add(nimbusGrid), 15e6, 10*time.Second)
	assert.InEpsilon(t, 0.8*1.5e6+0.2*15e6, c.estimate(), 1e-3, "one sample moves it by a fifth")
	for range 1200 {
		now = now.Add(nimbusGrid)
		c.addRate(now, 0.5e6, 10*time.Second)
	}
	assert.InEpsilon(t, 0.5e6, c.estimate(), 1e-2, "and the window forgets")
	c.fixed = 2e6
	assert.Equal(t, 2e6, c.estimate(), "what it is told counts")
}

// between is a nimbus in the given mode with known rates, in bytes per second.
func between(t *testing.T, mode nimbusMode, run time.Duration) (*path, *nimbus) {
	t.Helper()
	p := newPath(t, "nimbus:mu_mbit=12")
	n := as[*nimbus](p)
	p.Ack(1, 50*ms)
	n.mode, n.sent, n.received = mode, 0.75e6, 0.75e6
	n.cwnd, n.ssthresh = 40, 40
	n.began = p.state.Now.Add(-run)
	for range nimbusHistory {
		n.elastic.addSample(0.75e6, 0.6e6, 50*ms)
	}
	return p, n
}

func TestNimbusSwitchesModes(t *testing.T) {
	for _, tt := range []struct {
		name  string
		mode  nimbusMode
		run   time.Duration
		since time.Duration // the last switch
		e     float64
		want  nimbusMode
	}{
		{"elastic cross traffic is competed with", nimbusDelay, time.Minute, time.Minute, 3, nimbusCompetitive},
		{"between the thresholds delay mode stays", nimbusDelay, time.Minute, time.Minute, 2.1, nimbusDelay},
		{"and so does competitive mode", nimbusCompetitive, time.Minute, time.Minute, 2.1, nimbusCompetitive},
		{"below them it ends", nimbusCompetitive, time.Minute, time.Minute, 1.9, nimbusDelay},
		{"but not within 5 s of the last switch", nimbusCompetitive, time.Minute, 4900 * ms, 1.9, nimbusCompetitive},
		{"nor anything in the first 15 s", nimbusDelay, 14900 * ms, 14900 * ms, 3, nimbusDelay},
	} {
		p, n := between(t, tt.mode, tt.run)
		n.elastic.n-- // no look: what was seen before decides
		n.elastic.value, n.looks, n.switched = tt.e, nimbusLook, p.state.Now.Add(-tt.since)
		n.chooseMode(p.state, n.mu.estimate())
		assert.Equal(t, tt.want, n.mode, tt.name)
	}
}

func TestNimbusTakesBackWhatItHadBeforeTheSwitch(t *testing.T) {
	for _, tt := range []struct {
		name      string
		had, want float64 // bytes/s
	}{
		{"the rate of 5 s ago", 1.2e6, 1.2e6},
		{"or half the capacity, where that was less", 0.1e6, 0.75e6},
	} {
		p, n := between(t, nimbusDelay, time.Minute)
		for range nimbusHistory {
			n.elastic.addSample(1.4e6, tt.had, 50*ms)
		}
		for range 300 { // the last 3 s: little is left
			n.elastic.addSample(1.4e6, 0.1e6, 50*ms)
		}
		n.elastic.n--
		n.elastic.value, n.looks = 3, nimbusLook
		n.chooseMode(p.state, n.mu.estimate())
		require.Equal(t, nimbusCompetitive, n.mode)
		assert.InEpsilon(t, tt.want*0.05/float64(DefaultMSS), n.cwnd, 1e-6, tt.name)
		assert.Equal(t, n.cwnd, n.ssthresh, "no slow start from there")
	}
}

func TestNimbusCompetesAsCubicDoes(t *testing.T) {
	p, n := between(t, nimbusCompetitive, time.Minute)
	n.enterCompetitiveMode(p.state.Now, 40)
	p.Wait(ms)
	p.Lose(1)
	assert.InEpsilon(t, 28, n.cwnd, 1e-9, "CUBIC's cut")
	p.Lose(1)
	assert.InEpsilon(t, 28, n.cwnd, 1e-9, "once for what left before it")
	_, n = between(t, nimbusDelay, time.Minute)
	n.OnLoss(Loss{State: p.state, Lost: DefaultMSS, SentAt: p.state.Now})
	assert.Equal(t, 40.0, n.cwnd, "in delay mode the rates steer")
}

func TestNimbusLowersItsTargetGently(t *testing.T) {
	p, n := between(t, nimbusDelay, 5*time.Second)
	n.enterDelayMode(p.state, 2)
	assert.InDelta(t, 2, n.ratio, 1e-9, "a queue that is there")
	n.grid = p.state.Now.Add(nimbusGrid)
	p.Wait(100 * ms)
	n.OnTick(p.state)
	assert.InDelta(t, 1.95, n.ratio, 1e-9, "0.05 in 100 ms")
	p.Wait(1900 * ms)
	n.OnTick(p.state)
	assert.InDelta(t, 1.25, n.ratio, 1e-9, "down to where it settles")
}

func TestNimbusLetsAQueueOutThatHidesTheLeastRoundTrip(t *testing.T) {
	p, n := between(t, nimbusDelay, 5*time.Second)
	n.near, n.rtt, n.sent = p.state.Now, 62500*time.Microsecond, 1.5e6
	n.cross = 0
	n.setRate(p.state)
	before := n.rate
	p.Wait(nimbusDrainAfter)
	n.setRate(p.state)
	assert.InEpsilon(t, before/2, n.rate, 1e-9)
	p.Wait(nimbusDrainRTTs * n.rtt)
	n.setRate(p.state)
	assert.InEpsilon(t, before, n.rate, 1e-9, "for three round trips")
}

func TestNimbusStartsAnewAfterASilence(t *testing.T) {
	p, n := between(t, nimbusDelay, time.Minute)
	require.Equal(t, "delay", n.Control().Phase)
	p.Wait(nimbusSilence)
	n.OnTick(p.state)
	assert.Equal(t, "slow_start", n.Control().Phase)
	assert.Equal(t, 10.0, p.Cwnd())
	assert.Zero(t, n.Control().NextTick, "nothing is awaited")
}

func TestNimbusPacesWithItsPulse(t *testing.T) {
	p, n := between(t, nimbusDelay, 5*time.Second)
	n.cross, n.sent, n.rtt = 0, 1.5e6, 62500*time.Microsecond
	least, most, sum := Rate(math.MaxInt64), Rate(0), 0.0
	for range 20 { // one pulse
		p.Wait(nimbusGrid)
		n.setRate(p.state)
		ctl := n.Control()
		least, most, sum = min(least, ctl.PacingRate), max(most, ctl.PacingRate), sum+float64(ctl.PacingRate)/20
		assert.InEpsilon(t, 2*1.5e6*0.0625, float64(ctl.Cwnd), 0.001, "two windows")
	}
	assert.InDelta(t, 15e6, float64(most), 0.3e6, "a quarter of the capacity more")
	assert.InDelta(t, 11e6, float64(least), 0.1e6, "a twelfth less")
	assert.InDelta(t, 12e6, sum, 0.05e6)
}
