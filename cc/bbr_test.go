package cc

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// bbrPath feeds bbr with acknowledgements that carry a delivery rate.
type bbrPath struct {
	*path
	*bbr
	rtt      time.Duration
	inflight float64 // packets after each acknowledgement
	limited  bool    // the application keeps the path from being used
}

func newBbrPath(t *testing.T, ref string, rtt time.Duration) *bbrPath {
	t.Helper()
	p := newPath(t, ref)
	return &bbrPath{path: p, bbr: as[*bbr](p), rtt: rtt, inflight: 20}
}

// Ack acknowledges n packets that were delivered at rate, a round trip after
// the newest of them left.
func (p *bbrPath) Ack(n float64, rate Rate) {
	p.path.state.Delivered += Bytes(n * float64(DefaultMSS))
	p.path.state.Inflight = Bytes(p.inflight * float64(DefaultMSS))
	p.path.state.CwndLimited = !p.limited
	p.smooth(p.rtt)
	p.OnAck(Ack{
		State: p.path.state, Acked: Bytes(n * float64(DefaultMSS)), RTT: p.rtt, DeliveryRate: rate,
		Sent: Sent{At: max(1, p.Now().Add(-p.rtt)), AppLimited: p.limited},
	})
}

func (p *bbrPath) Now() Time { return p.path.state.Now }

// Rounds lets n round trips pass with one acknowledgement each.
func (p *bbrPath) Rounds(n int, rate Rate) {
	for range n {
		p.Wait(p.rtt)
		p.Ack(10, rate)
	}
}

// cruising is a bbr that has found 12 Mbit/s and 40 ms, in the first phase that
// asks for nothing.
func cruising(t *testing.T, ref string) *bbrPath {
	t.Helper()
	p := newBbrPath(t, ref, 40*ms)
	p.Rounds(40, 12e6)
	require.Equal(t, "probe_bw", p.Control().Phase)
	p.cycle.phase, p.cycle.since = 2, p.Now()
	p.Ack(1, 12e6)
	return p
}

func TestBbrFillsTheBandwidthDelayProduct(t *testing.T) {
	m := bbrModel{segments: segments{DefaultMSS}, rtprop: 20 * ms}
	assert.InDelta(t, 82.9, m.bdpAt(48e6), 0.05, "worked number: 48 Mbit/s and 20 ms are 120000 bytes")
	assert.InDelta(t, 165.7, 2*m.bdpAt(48e6), 0.05)

	p := cruising(t, "bbr")
	p.Rounds(20, 12e6)
	// 12 Mbit/s in 40 ms: 41.4 packets; twice, rounded up, and three bursts of two; 2 more in the first phase.
	p.cycle.phase = 2
	p.Ack(10, 12e6)
	aggregated := p.bunched.allowance(&p.bbrModel, 12e6)
	assert.InDelta(t, 2*math.Ceil((math.Ceil(2*41.44)+aggregated+6)/2), p.Cwnd(), 1e-3)
}

func TestBbrLeavesStartupOnAPlateau(t *testing.T) {
	p := newBbrPath(t, "bbr", 40*ms)
	for i, mbit := range []float64{1, 2, 4, 8, 8.5, 8.6} {
		p.Rounds(1, Rate(mbit*1e6))
		require.Equal(t, "startup", p.Control().Phase, "round trip %d", i+1)
	}
	p.inflight = 200 // so that Drain lasts
	p.Rounds(1, 8.7e6)
	assert.Equal(t, "drain", p.Control().Phase, "worked number: 8.5, 8.6 and 8.7 are less than 10")
	assert.InDelta(t, 8.7*0.99*math.Ln2/2, p.Control().PacingRate.Mbps(), 0.01, "2/ln 2 the other way round")
	p.inflight = 20
	p.Rounds(1, 8.7e6)
	assert.Equal(t, "probe_bw", p.Control().Phase, "in flight is less than the path holds")
}

func TestBbrStartupIgnoresWhatTheApplicationLimits(t *testing.T) {
	p := newBbrPath(t, "bbr", 40*ms)
	p.Rounds(1, 5e6)
	p.limited = true
	p.Rounds(20, 1e6)
	assert.Equal(t, "startup", p.Control().Phase)
	assert.Equal(t, Rate(5e6), p.bw.maxRate(), "a sample that understates does not count")
	p.Rounds(1, 6e6)
	assert.Equal(t, Rate(6e6), p.bw.maxRate(), "unless it says more than is known")
}

func TestBbrFirstPaces(t *testing.T) {
	p := newBbrPath(t, "bbr", 40*ms)
	initial := RateOf(10*DefaultMSS, ms).Mbps()
	assert.InDelta(t, 2.885*0.99*initial, p.Control().PacingRate.Mbps(), 0.1,
		"ten packets in 1 ms, before the first round trip")
	p.Ack(1, 0)
	assert.InDelta(t, 2.885*0.99*initial/40, p.Control().PacingRate.Mbps(), 0.1, "in the round trip, once it is known")
	p.Rounds(1, 12e6)
	fast := p.Control().PacingRate
	assert.InDelta(t, 2.885*0.99*12, fast.Mbps(), 0.1)
	p.fullRounds = math.MinInt
	p.Rounds(20, 3e6)
	assert.Equal(t, fast, p.Control().PacingRate, "in Startup it only rises")
}

func TestBbrRemembersRatesForTenRoundTrips(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rounds []int64
		rates  []Rate
		want   Rate
	}{
		{"nothing", nil, nil, 0},
		{"the largest of one round trip", []int64{1, 1, 1}, []Rate{3, 5, 4}, 5},
		{"nine round trips later it still counts", []int64{1, 10}, []Rate{5, 1}, 5},
		{"ten later it does not", []int64{1, 11}, []Rate{5, 1}, 1},
		{"the next largest takes its place", []int64{1, 3, 11}, []Rate{5, 4, 1}, 4},
		{"without samples it stays, however long", []int64{1}, []Rate{5}, 5},
		{"a long pause leaves the sample behind it", []int64{1, 2, 1000}, []Rate{5, 4, 1}, 1},
	} {
		var f roundMax
		for i, r := range tt.rounds {
			f.addRate(r, tt.rates[i])
		}
		assert.Equal(t, tt.want, f.maxRate(), tt.name)
	}
}

func TestBbrCycle(t *testing.T) {
	sum := 0.0
	for _, g := range bbrGains {
		sum += g
	}
	assert.InDelta(t, 1, sum/float64(len(bbrGains)), 1e-12, "the mean gain is 1")

	seen := map[int]bool{}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		var c bbrCycle
		c.startCycle(1, rng)
		seen[c.phase] = true
	}
	assert.Equal(t, map[int]bool{0: true, 2: true, 3: true, 4: true, 5: true, 6: true, 7: true}, seen,
		"it starts anywhere but draining")

	for _, tt := range []struct {
		phase    int
		elapsed  time.Duration
		inflight float64 // the path holds 40
		lossy    bool
		want     bool
	}{
		{0, 41 * ms, 49, false, false}, // it has not yet filled the path a quarter over
		{0, 41 * ms, 50, false, true},
		{0, 41 * ms, 10, true, true}, // it never will
		{0, 40 * ms, 60, true, false},
		{1, 10 * ms, 41, false, false},
		{1, 10 * ms, 40, false, true}, // drained
		{1, 41 * ms, 60, false, true}, // long enough
		{2, 40 * ms, 10, true, false},
		{2, 41 * ms, 60, false, true},
	} {
		c := bbrCycle{phase: tt.phase, since: 1}
		assert.Equal(t, tt.want, c.phaseIsOver(Time(1).Add(tt.elapsed), 40*ms, tt.inflight, 50, 40, tt.lossy), "%+v", tt)
	}
}

func TestBbrGoesThroughItsCycle(t *testing.T) {
	p := cruising(t, "bbr")
	var gains []float64
	for range 16 {
		p.inflight = 60 // which is enough for any phase
		p.Wait(41 * ms)
		p.Ack(10, 12e6)
		gains = append(gains, p.Inspect()[2])
	}
	assert.Equal(t, []float64{1, 1, 1, 1, 1, 1.25, 0.75, 1, 1, 1, 1, 1, 1, 1.25, 0.75, 1}, gains)
}

func TestBbrAllowsForBunchedAcknowledgements(t *testing.T) {
	p := cruising(t, "bbr")
	rate := RateOf(1000*DefaultMSS, time.Second)
	feed := func(n float64, every time.Duration, times int) float64 {
		p.bunched = bunching{since: p.Now()}
		for range times {
			p.Wait(every)
			p.Ack(n, rate)
		}
		return p.bunched.allowance(&p.bbrModel, rate)
	}
	p.bw = roundMax{}
	p.bw.addRate(p.bwRounds, rate)
	p.bbr.cwnd = 1000
	assert.InDelta(t, 1, feed(1, ms, 100), 0.01, "packet by packet there is hardly anything to allow for")
	assert.InDelta(t, 30, feed(30, 30*ms, 20), 0.1, "a link that lets go 30 packets every 30 ms")
	p.bbr.cwnd = 1000
	p.initial = 1000
	most := feed(400, 400*ms, 1)
	assert.InDelta(t, 100, most, 0.1, "never more than 100 ms at that rate")
	feed(30, 30*ms, 20)
	p.Rounds(2*bunchRounds, rate/100)
	assert.Less(t, max(p.bunched.most[0], p.bunched.most[1]), 30.0, "ten round trips later it is forgotten")
}

func TestBbrDrainsThePathToSeeItsRoundTrip(t *testing.T) {
	p := cruising(t, "bbr")
	p.Rounds(20, 12e6)
	p.rtt = 60 * ms // a queue that stays
	for p.Control().Phase == "probe_bw" {
		p.Rounds(1, 12e6)
	}
	entered := p.Now()
	assert.Greater(t, entered.Sub(p.bbr.rtpropAt), -ms)
	assert.Equal(t, "probe_rtt", p.Control().Phase)
	assert.InDelta(t, 4, p.Cwnd(), 1e-3)
	assert.Equal(t, 60*ms, p.rtprop, "what was believed has expired")
	p.Rounds(3, 1e6)
	assert.Zero(t, p.probeRTTDone, "in flight is still more than four packets")

	p.inflight, p.rtt = 4, 40*ms
	for p.Control().Phase == "probe_rtt" {
		p.Wait(10 * ms)
		p.Ack(1, 1e6)
		require.Less(t, p.Now().Sub(entered), time.Second)
	}
	assert.GreaterOrEqual(t, p.Now().Sub(entered), 3*60*ms+200*ms, "200 ms from when it was drained")
	assert.LessOrEqual(t, p.Now().Sub(entered), 3*60*ms+300*ms)
	assert.Equal(t, "probe_bw", p.Control().Phase)
	assert.Equal(t, 40*ms, p.rtprop)
	assert.Greater(t, p.Cwnd(), 83.0, "the window is what it was: twice what fills the path")
	assert.Equal(t, Rate(12e6), p.bw.maxRate(), "what four packets delivered says nothing of the path")
}

func TestBbrProbesNoRoundTripRightBehindAPause(t *testing.T) {
	p := cruising(t, "bbr")
	p.limited, p.inflight = true, 0
	p.Ack(1, 12e6)
	assert.InDelta(t, 0.99*12, p.Control().PacingRate.Mbps(), 0.01,
		"nothing in flight: the next packets ask for no more than the path gave")
	p.Wait(20 * time.Second)
	p.rtt, p.inflight = 70*ms, 10
	p.Ack(1, 12e6)
	assert.Equal(t, "probe_bw", p.Control().Phase, "the pause has drained the path already")
	assert.Equal(t, 70*ms, p.rtprop)
}

func TestBbrEndsProbeRTTWhileNothingIsSent(t *testing.T) {
	p := cruising(t, "bbr")
	p.Rounds(251, 12e6)
	p.rtt = 41 * ms
	for p.Control().Phase == "probe_bw" {
		p.Rounds(1, 12e6)
	}
	p.inflight, p.limited = 0, true
	p.Ack(1, 1e6)
	p.Ack(1, 1e6)
	due := p.Control().NextTick
	require.NotZero(t, due)
	p.path.state.Now = due
	p.OnTick(p.path.state)
	assert.Equal(t, "probe_bw", p.Control().Phase)
	assert.Greater(t, p.Cwnd(), 40.0)
	assert.Zero(t, p.Control().NextTick)
}

func TestBbrRecoversFromLoss(t *testing.T) {
	p := cruising(t, "bbr")
	p.Rounds(10, 12e6)
	before := p.Cwnd()
	lose := func(n float64, ago time.Duration) {
		p.path.state.Inflight = Bytes(p.inflight * float64(DefaultMSS))
		p.OnLoss(Loss{State: p.path.state, Lost: Bytes(n * float64(DefaultMSS)), SentAt: p.Now().Add(-ago)})
	}
	p.inflight = 30
	lose(2, 40*ms)
	p.Ack(1, 12e6)
	assert.InDelta(t, 31, p.Cwnd(), 1e-3, "the first round trip sends what is delivered")
	p.Wait(10 * ms)
	lose(3, 41*ms)
	assert.InDelta(t, 28, p.Cwnd(), 1e-3, "each lost packet takes one away")
	p.inflight = 20
	p.Ack(2, 12e6)
	assert.InDelta(t, 28, p.Cwnd(), 1e-3, "and the window does not grow over it")
	p.inflight = 29
	p.Ack(2, 12e6)
	assert.InDelta(t, 31, p.Cwnd(), 1e-3)
	p.Wait(40 * ms)
	p.Ack(1, 12e6)
	assert.GreaterOrEqual(t, p.Cwnd(), before-2, "what left since then arrives: the window is what it was")
	assert.Equal(t, Rate(12e6), p.bw.maxRate(), "the rate never changed")
	lose(20, 120*ms)
	assert.InDelta(t, before-20, p.Cwnd(), 2, "bytes of before the recovery, lost after its end")
	p.Wait(50 * ms)
	p.Ack(1, 12e6)
	assert.GreaterOrEqual(t, p.Cwnd(), before-2, "such losses do not lower the window for longer, either")
}

func TestBbrStartsFromOnePacketAfterATimeout(t *testing.T) {
	p := cruising(t, "bbr")
	p.Rounds(10, 12e6)
	before := p.Cwnd()
	p.path.Timeout()
	assert.InDelta(t, 1, p.Cwnd(), 1e-3)
	assert.Zero(t, p.fullBw)
	assert.Equal(t, Rate(12e6), p.bw.maxRate(), "the model stays")
	p.Wait(10 * ms)
	p.Ack(5, 0)
	assert.InDelta(t, 6, p.Cwnd(), 1e-3)
	p.Wait(50 * ms)
	p.Ack(1, 0)
	assert.GreaterOrEqual(t, p.Cwnd(), before-2)
}

// lossyRounds is intervals of round trips in which rate arrives and a quarter of
// what arrives is lost besides.
func lossyRounds(p *bbrPath, n int, rate Rate) {
	perRound := float64(rate.BytesIn(p.rtt)) / float64(DefaultMSS)
	for range n {
		p.Wait(p.rtt)
		p.OnLoss(Loss{
			State: p.path.state, Lost: Bytes(perRound / 4 * float64(DefaultMSS)),
			SentAt: p.Now().Add(-p.rtt),
		})
		p.Ack(perRound, rate)
	}
}

func TestBbrFindsAPolicer(t *testing.T) {
	p := cruising(t, "bbr")
	lossyRounds(p, 5, 3e6)
	assert.Zero(t, p.Inspect()[5], "one interval is none")
	lossyRounds(p, 5, 3.2e6)
	assert.InDelta(t, 3.1, p.Inspect()[5], 0.1, "two that agree within an eighth: the mean of both")
	assert.InDelta(t, 0.99*p.Inspect()[5], p.Control().PacingRate.Mbps(), 0.01, "at that rate, although more was seen")
	found := p.Inspect()[5]
	p.Rounds(45, 12e6) // two have passed
	assert.InDelta(t, found, p.Inspect()[5], 0, "believed for 48 round trips")
	p.Rounds(2, 12e6)
	assert.Zero(t, p.Inspect()[5])

	for name, feed := range map[string]func(*bbrPath){
		"two intervals that differ": func(p *bbrPath) { lossyRounds(p, 5, 3e6); lossyRounds(p, 5, 6e6) },
		"too little loss": func(p *bbrPath) {
			for range 12 {
				p.Wait(p.rtt)
				p.path.Lose(1)
				p.Ack(10, 3e6)
			}
		},
	} {
		p := cruising(t, "bbr")
		feed(p)
		assert.Zero(t, p.Inspect()[5], name)
	}
	p = cruising(t, "bbr:policer=ignore")
	lossyRounds(p, 20, 3e6)
	assert.Zero(t, p.Inspect()[5])
}

// An algorithm that knows a bound on the path may lend it to bbr's probes.
func TestBbrProbesUpToABound(t *testing.T) {
	p := cruising(t, "bbr")
	for _, tt := range []struct {
		phase int
		bound Rate
		want  float64 // Mbit/s
	}{
		{0, 0, 0.99 * 1.25 * 12},
		{0, 13e6, 13},
		{0, 20e6, 0.99 * 1.25 * 12},
		{1, 3e6, 0.99 * 0.75 * 12},
		{2, 3e6, 0.99 * 12},
	} {
		p.cycle.phase, p.cycle.since = tt.phase, p.Now()
		p.maxRate, p.inflight = tt.bound, 60
		p.Ack(1, 12e6)
		assert.InDelta(t, tt.want, p.Control().PacingRate.Mbps(), 0.01, fmt.Sprint(tt))
	}
}

// In the recovery from a timeout nothing is measured for many round trips.
func TestBbrKeepsItsRateWhileNoneIsMeasured(t *testing.T) {
	p := cruising(t, "bbr")
	p.Rounds(30, 0)
	p.Rounds(1, 1e6)
	assert.Equal(t, Rate(12e6), p.bw.maxRate())
	p.Rounds(10, 1e6)
	assert.Equal(t, Rate(1e6), p.bw.maxRate())
}

func TestBbrTakesAnOutageForNoPolicer(t *testing.T) {
	p := cruising(t, "bbr")
	p.path.Timeout()
	p.path.state.SRTT = 10 * time.Second // what is acknowledged left before the timer fired
	for range 20 {
		p.Wait(p.rtt)
		p.OnLoss(Loss{State: p.path.state, Lost: 3 * DefaultMSS, SentAt: 1})
		a := Ack{State: p.path.state, Acked: 10 * DefaultMSS, Sent: Sent{At: 2}}
		p.path.state.Delivered += a.Acked
		p.OnAck(a)
	}
	assert.Zero(t, p.Inspect()[5])
	assert.False(t, p.policer.sampling)
}

func TestBbrTakesWhatATimeoutHasLostOffTheWindowOnce(t *testing.T) {
	p := cruising(t, "bbr")
	left := p.Now()
	p.Wait(300 * ms)
	p.path.Timeout()
	p.Wait(10 * ms)
	p.Ack(5, 0)
	before := p.Cwnd()
	p.OnLoss(Loss{State: p.path.state, Lost: 4 * DefaultMSS, SentAt: left})
	assert.InDelta(t, before, p.Cwnd(), 1e-3)
}
