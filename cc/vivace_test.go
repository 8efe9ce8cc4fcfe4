package cc

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestVivaceUtility(t *testing.T) {
	for _, tt := range []struct {
		ref            string
		x, slope, loss float64
		want           float64
	}{
		{"vivace", 10, 0, 0, 7.943},
		{"vivace", 10, 0.01, 0, -82.06},
		{"vivace", 10, 0, 0.01, 6.808},
		{"vivace:uspace", 10, 0, 0.01, -9992},
		{"vivace:loss", 10, 0.5, 0, 7.943},
	} {
		v := as[*vivace](newPath(t, tt.ref))
		assert.InDelta(t, tt.want, v.utilityOf(tt.x, tt.slope, tt.loss), max(0.005, math.Abs(tt.want)/1e4),
			"worked number: %+v", tt)
	}
}

// Where loss alone counts, more rate pays off until its marginal loss outweighs it.
func TestVivaceToleratesLoss(t *testing.T) {
	v := as[*vivace](newPath(t, "vivace:loss"))
	for rate, tolerated := range map[float64]float64{10: 0.063, 100: 0.050} {
		slope := func(loss float64) float64 {
			return (v.utilityOf(rate+0.01, 0, loss) - v.utilityOf(rate-0.01, 0, loss)) / 0.02
		}
		assert.Positive(t, slope(tolerated-0.001), "worked number: %v Mbit/s", rate)
		assert.Negative(t, slope(tolerated+0.001), "worked number: %v Mbit/s", rate)
	}
}

func TestVivaceSteps(t *testing.T) {
	v := as[*vivace](newPath(t, "vivace"))
	code := as[*vivace](newPath(t, "vivace:uspace"))
	for i, want := range []float64{1, 2, 3, 5, 7, 9} {
		assert.InDelta(t, want, v.streakFactor(i+1), 1e-9, "worked number: τ=%d", i+1)
		assert.InDelta(t, 0.1*float64(10+i), code.streakFactor(i+1), 1e-9, "PCC-Uspace: 10, 11, 12, … tenths")
	}

	v.streak = 1
	assert.InDelta(t, 0.5, v.boundedStep(100, 10), 1e-9, "worked number: 10 Mbit/s change by 5 % at most")
	assert.InDelta(t, 0.15, v.bound, 1e-9, "and next by 15 %")
	assert.InDelta(t, -1.5, v.boundedStep(-100, 10), 1e-9)
	assert.InDelta(t, 0.25, v.bound, 1e-9)
	assert.InDelta(t, 0.7, v.boundedStep(0.7, 10), 1e-9, "within the bound: as the gradient has it")
	assert.InDelta(t, 0.05, v.bound, 1e-9, "and the bound is back")
	assert.InDelta(t, 0.1, v.boundedStep(1e-6, 10), 1e-9, "worked number: a tiny gradient still moves it by 1 %")
	assert.InDelta(t, -0.1, v.boundedStep(-1e-6, 10), 1e-9)
	v.streak = 3
	assert.InDelta(t, 0.3, v.boundedStep(0.1, 10), 1e-9)

	assert.InDelta(t, 1, code.boundedStep(100, 10), 1e-9)
	assert.InDelta(t, 0.15, code.bound, 1e-9)
}

// settled is an interval of 100 ms at rate, all of whose bytes are accounted
// for, whose round trip grew by slope and which lost a part.
func settled(rate, slope, loss float64) interval {
	i := interval{
		rate: rate, from: linkStart, to: linkStart.Add(100 * ms), before: linkStart.Add(40 * ms),
		heard: linkStart.Add(140 * ms),
	}
	sent := rate * 1e6 / 8 / 10
	i.lost = Bytes(loss * sent)
	i.acked = Bytes(sent) - i.lost
	for k := range 20 {
		at := float64(k) * 0.005
		i.slope.addPoint(at, 0.04+slope*at)
	}
	return i
}

// probed is a vivace at 10 Mbit/s whose four probes grew the round trip so.
func probed(t *testing.T, ref string, highFirst bool, slopes [4]float64) *vivace {
	t.Helper()
	v := as[*vivace](newPath(t, ref))
	v.rate, v.started, v.state, v.highFirst, v.srtt = 10, true, vivaceProbing, highFirst, 40*ms
	for k, slope := range slopes {
		rate := 10 * (1 - v.epsilon)
		if highFirst == (k == 0 || k == 3) {
			rate = 10 * (1 + v.epsilon)
		}
		v.intervals[k] = settled(rate, slope, 0)
	}
	v.planned = 4
	v.decideProbes(linkStart.Add(200 * ms))
	return v
}

func TestVivaceProbes(t *testing.T) {
	for _, tt := range []struct {
		name      string
		highFirst bool
		slopes    [4]float64
		rate      float64
		phase     string
	}{
		{
			"the rates above are worth more: from the better of them 5 % more", true,
			[4]float64{},
			10.5 + 0.525,
			"moving",
		},
		{"in either order", false, [4]float64{}, 10.5 + 0.525, "moving"},
		{
			"those above grow the round trip: from below 5 % less", true,
			[4]float64{0.05, 0, 0, 0.05},
			9.5 - 0.475,
			"moving",
		},
		{"in either order", false, [4]float64{0, 0.05, 0.05, 0}, 9.5 - 0.475, "moving"},
		{
			"worked number: the first pair prefers high, the second low", true,
			[4]float64{0, 0.05, 0, 0.05},
			10,
			"probing",
		},
		{"less than a hundredth is noise", true, [4]float64{0.009, 0, 0, 0.009}, 10.5 + 0.525, "moving"},
		{
			"a round trip that shrinks is worth nothing", true,
			[4]float64{-0.1, -0.3, -0.3, -0.1},
			10.5 + 0.525,
			"moving",
		},
	} {
		v := probed(t, "vivace", tt.highFirst, tt.slopes)
		assert.Equal(t, tt.phase, v.Control().Phase, tt.name)
		assert.InDelta(t, tt.rate, v.rate, 1e-9, tt.name)
	}
	// 10.5^0.9 and 9.5^0.9, over 1 Mbit/s: a gradient of 0.715 is more than 5 %.
	assert.InDelta(t, 0.715, probed(t, "vivace", true, [4]float64{}).gradient, 1e-3)

	v := probed(t, "vivace", true, [4]float64{0, 0.05, 0, 0.05})
	assert.Equal(t, 4, v.planned, "new probes")
	assert.ElementsMatch(t, []float64{9.5, 9.5, 10.5, 10.5},
		[]float64{v.intervals[0].rate, v.intervals[1].rate, v.intervals[2].rate, v.intervals[3].rate})
	assert.InDelta(t, v.intervals[0].rate, v.intervals[3].rate, 0, "the second pair in the reverse order of the first")

	code := probed(t, "vivace:uspace", true, [4]float64{0.05, 0, 0.03, 0.05})
	assert.InDelta(t, (code.utilityOf(10.2, 0.05, 0)-code.utilityOf(9.8, 0.03, 0))/0.4, code.gradient, 1e-6,
		"PCC-Uspace: the last pair's slope")
}

func TestVivaceMoves(t *testing.T) {
	v := probed(t, "vivace", true, [4]float64{})
	move := func(slope, loss float64) {
		v.intervals[0] = settled(v.rate, slope, loss)
		v.planned = 1
		v.decideMove(linkStart.Add(200 * ms))
	}
	before := v.rate
	move(0, 0)
	assert.Equal(t, 2, v.streak)
	assert.InDelta(t, before*1.12, v.rate, 0.02*before, "twice the gradient of 0.71")
	last := v.rate
	move(0, 0)
	assert.Equal(t, 3, v.streak)
	before = v.rate
	move(0.2, 0)
	assert.Equal(t, "probing", v.Control().Phase, "the slope turns")
	assert.Less(t, v.rate, before)
	assert.Zero(t, v.streak)
	assert.InDelta(t, 0.05, v.bound, 1e-9)
	assert.Greater(t, v.rate, 0.94*last, "from the rate before, one step back")
}

func TestVivaceCountsWhatLeftInAnInterval(t *testing.T) {
	m := monitor{segments: segments{DefaultMSS}, unit: 1e6, srtt: 40 * ms}
	start := linkStart
	m.beginPlan(start, 10, 12)
	assert.Equal(t, start.Add(40*ms), m.intervalEnd(), "a round trip, which is more than 20 packets take")
	m.endInterval(start.Add(39 * ms))
	assert.Equal(t, 0, m.sending)
	m.endInterval(start.Add(42 * ms)) // late
	assert.Equal(t, 1, m.sending)
	assert.Equal(t, start.Add(82*ms), m.intervalEnd())
	m.endInterval(start.Add(82 * ms))
	assert.Zero(t, m.intervalEnd(), "it coasts")

	ack := func(left time.Duration, n Bytes) bool {
		return m.onAck(Ack{
			State: State{Now: start.Add(left + 40*ms), SRTT: 40 * ms}, RTT: 40 * ms, Acked: n,
			Sent: Sent{At: start.Add(left)},
		})
	}
	ack(-1, 100) // before
	ack(0, 1000)
	ack(41*ms, 2000)
	m.onLoss(500) // known now, so it left about when these did
	ack(42*ms, 4000)
	m.onLoss(250)
	assert.Equal(t, 0, m.known, "what left behind the first interval has hardly arrived: more of it may be lost")
	ack(47*ms, 8000)
	assert.Equal(t, 1, m.known, "four packets at 10 Mbit/s later it has")
	m.onLoss(125)
	assert.False(t, ack(83*ms, 16000))
	assert.True(t, ack(87*ms, 16000), "and that completes the plan")
	assert.Equal(t, []Bytes{3000, 12000}, []Bytes{m.intervals[0].acked, m.intervals[1].acked})
	assert.Equal(t, []Bytes{750, 125}, []Bytes{m.intervals[0].lost, m.intervals[1].lost})
	assert.InDelta(t, 750./3750, m.intervals[0].lossRate(), 1e-9)

	m.beginPlan(start, 0.5)
	assert.InDelta(t, (20 * 1448 * 8 / 0.5e6), m.intervalEnd().Sub(start).Seconds(), 1e-6, "20 packets at the least")
	m.gap = 20 * ms
	m.beginPlan(start, 10)
	assert.Equal(t, start.Add(120*ms), m.intervalEnd(), "as long as six bunches of acknowledgements")
}

func TestVivaceJudgesOnlyWhatTellsOfItsRate(t *testing.T) {
	for _, tt := range []struct {
		name            string
		change          func(*interval)
		usable, overrun bool
	}{
		{"all of it came through", func(*interval) {}, true, false},
		{"the application had too little", func(i *interval) { i.limited = true }, false, false},
		{"nothing left for a round trip", func(i *interval) { i.paused = true }, false, false},
		{"four samples", func(i *interval) { i.slope.n = 4 }, false, false},
		{
			"less than three quarters left, as something else limits it",
			func(i *interval) { i.acked = 7 * i.acked / 10 }, false, false,
		},
		{
			"that much came through over half again the time",
			func(i *interval) { i.heard = i.before.Add(150 * ms) }, true, true,
		},
		{"of it half was lost", func(i *interval) { i.acked /= 2; i.lost = i.acked }, true, true},
		{"a little was lost, and gave few " +
			"samples", func(i *interval) { i.lost = 1448; i.slope = slope{} }, true, false},
	} {
		i := settled(10, 0, 0)
		tt.change(&i)
		assert.Equal(t, tt.usable, i.isUsable(1e6), tt.name)
		assert.Equal(t, tt.overrun, i.overruns(1e6), tt.name)
	}
}

func TestVivaceTellsAPauseFromABatchOfAcknowledgements(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rate   float64
		acked  Bytes // every 50 ms, which is longer than the round trip
		paused bool
	}{
		{"all that 10 Mbit/s send in that time", 10, 62_500, false},
		{"a quarter of it, in one go", 10, 15_625, false},
		{"one packet at 10 Mbit/s", 10, 1448, true},
		{"one packet at a rate at which they are that far apart", 8 * 0.001448 / 0.05, 1448, false},
	} {
		m := monitor{segments: segments{DefaultMSS}, unit: 1e6, srtt: 40 * ms, gap: 40 * ms}
		m.beginPlan(linkStart, tt.rate)
		for left := 50 * ms; left <= 200*ms; left += 50 * ms {
			m.onAck(Ack{
				State: State{Now: linkStart.Add(left + 40*ms), SRTT: 40 * ms},
				RTT:   40 * ms, Acked: tt.acked, Sent: Sent{At: linkStart.Add(left)},
			})
		}
		assert.Equal(t, tt.paused, m.intervals[0].paused, tt.name)
	}
}

func TestVivaceSlope(t *testing.T) {
	var line, flat, noisy slope
	for k := range 40 {
		x := float64(k) * 0.001
		line.addPoint(x, 0.05+0.3*x)
		flat.addPoint(x, 0.05)
		noisy.addPoint(x, 0.05+0.003*float64(k*7%5)+0.01*x)
	}
	assert.InDelta(t, 0.3, line.slopeValue(), 1e-9)
	assert.Zero(t, flat.slopeValue())
	assert.Zero(t, noisy.slopeValue(), "within two standard errors of none")
	var once slope
	once.addPoint(1, 2)
	once.addPoint(1, 3)
	once.addPoint(1, 4)
	assert.Zero(t, once.slopeValue(), "points of one time have no slope")
}

func TestVivaceFallsToWhatComesThrough(t *testing.T) {
	for ref, want := range map[string]float64{"vivace": 0.75 * 5, "vivace:paper": 10} {
		p := newPath(t, ref)
		v := as[*vivace](p)
		v.rate, v.started, v.state = 10, true, vivaceMoving
		v.intervals[0] = settled(10, 0, 0)
		v.intervals[0].heard = v.intervals[0].before.Add(200 * ms)
		v.intervals[1] = interval{rate: 10}
		v.planned, v.sending, v.overrun = 2, 1, 1
		p.state.Now = linkStart.Add(250 * ms)
		p.Ack(1, 40*ms)
		require.Equal(t, want == 10, v.overrun == 2, ref)
		assert.InDelta(t, want, v.rate, 0.1, ref)
	}
}

func TestVivaceStartsSlowly(t *testing.T) {
	p := newPath(t, "vivace")
	v := as[*vivace](p)
	assert.InDelta(t, 10*1448*8/0.1/1e6, p.alg.Control().PacingRate.Mbps(), 1e-6,
		"ten packets in 100 ms, for want of a round trip")
	p.Ack(1, 40*ms)
	assert.InDelta(t, 10*1448*8/0.04/1e6, p.alg.Control().PacingRate.Mbps(), 1e-6, "in a round trip")
	assert.InDelta(t, 2*10+10, p.Cwnd(), 0.01, "the window is two round trips and ten packets")
	assert.Equal(t, "starting", p.alg.Control().Phase)

	v.rate = 1
	p.Timeout()
	assert.InDelta(t, 0.5, v.rate, 1e-9, "a timeout halves the rate")
	p.Timeout()
	assert.InDelta(t, 0.5, v.rate, 1e-9, "the next ones are of the same outage until something is acknowledged")
	for range 5 {
		p.Ack(1, 40*ms)
		p.Timeout()
	}
	assert.InDelta(t, 0.1, v.rate, 1e-9, "down to its floor")
	v.state = vivaceMoving
	p.Timeout()
	assert.Equal(t, "probing", p.alg.Control().Phase)
}

func TestVivaceStartsAnewAfterASilence(t *testing.T) {
	p := newPath(t, "vivace")
	v := as[*vivace](p)
	p.Ack(1, 40*ms)
	v.state, v.rate, v.last = vivaceProbing, 5, worth{5, 4}
	v.beginState(p.state.Now, vivaceProbing)
	tick := func(d time.Duration) {
		p.Wait(d)
		p.alg.OnTick(p.state)
	}
	tick(1999 * ms)
	assert.Equal(t, "probing", p.alg.Control().Phase)
	assert.LessOrEqual(t, p.alg.Control().NextTick, p.state.Now.Add(40*ms))
	tick(1 * ms)
	assert.Equal(t, "starting", p.alg.Control().Phase)
	assert.InDelta(t, 5, v.rate, 1e-9)
	assert.Zero(t, v.last, "what was known before tells nothing now")

	p.idle = true
	p.Ack(1, 40*ms)
	v.beginState(p.state.Now, vivaceProbing)
	tick(10 * time.Second)
	assert.Equal(t, "probing", p.alg.Control().Phase, "nothing was in flight to be heard of")
}

func TestVivaceBlamesNoNewIntervalForWhatATimeoutHasLost(t *testing.T) {
	p := newPath(t, "vivace")
	v := as[*vivace](p)
	for range 20 {
		p.Ack(1, 40*ms)
		p.Wait(10 * ms)
	}
	left := p.state.Now
	p.Wait(time.Second)
	p.Timeout()
	p.Ack(1, 40*ms)
	p.alg.OnLoss(Loss{State: p.state, Lost: 10 * DefaultMSS, SentAt: left})
	for _, i := range v.intervals {
		assert.Zero(t, i.lost)
	}
}
