package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// janus8 asks for 8 Mbit/s: 690.6 packets/s.
const janus8 = "janus:class=guarantee,target_mbit=8"

// janusPPS is a rate of the algorithm's, in packets/s.
func janusPPS(rate float64) float64 { return rate / float64(DefaultMSS) }

// janusTrip ends a round trip in which packets/s got through, the fastest in rtt.
func janusTrip(p *path, packets float64, rtt time.Duration) {
	j := as[*janus](p)
	p.Wait(rtt)
	j.meter.smp, j.meter.rtt = packets*float64(DefaultMSS), rtt
	if j.meter.base == 0 || rtt < j.meter.base {
		j.meter.base = rtt
	}
	j.meter.round.start = p.state.Now
	j.endRound(Ack{State: p.state})
}

// contentJanus returns a flow past the second round trip of its first conservative
// stage, with packets/s behind it.
func contentJanus(t *testing.T, ref string, packets float64, rtt time.Duration) (*path, *janus) {
	t.Helper()
	p := newPath(t, ref)
	j := as[*janus](p)
	p.Ack(1, rtt)
	janusTrip(p, packets, rtt)
	require.False(t, j.aggressive)
	janusTrip(p, packets, rtt)
	janusTrip(p, packets, rtt)
	require.Equal(t, janusProbe, j.rounds)
	return p, j
}

func TestJanusStartsTowardsItsTarget(t *testing.T) {
	p := newPath(t, janus8)
	j := as[*janus](p)
	assert.Equal(t, "slow_start", p.alg.Control().Phase)
	p.Ack(1, 90*ms)
	assert.InDelta(t, 62.2, j.cubic.ssthresh, 0.1, "where the target is reached as far as one knows")
	p.Ack(1, 60*ms)
	assert.InDelta(t, 690.6, janusPPS(j.target.now), 0.1)
	assert.InDelta(t, 41.4, j.cubic.ssthresh, 0.1, "worked number: 8 Mbit/s over 60 ms are 41.4 packets")
	p.Lose(1)
	p.Wait(time.Second)
	cut := j.cubic.ssthresh
	p.Ack(1, 50*ms)
	assert.InDelta(t, cut, j.cubic.ssthresh, 0, "a loss has the last word on slow start")

	p = newPath(t, "janus:class=guarantee,target_mbit=0.1")
	p.Ack(1, 60*ms)
	assert.InDelta(t, 2, as[*janus](p).cubic.ssthresh, 0, "never below two packets")
}

func TestJanusChangesStage(t *testing.T) {
	p := newPath(t, janus8)
	j := as[*janus](p)
	p.Ack(1, 60*ms)
	janusTrip(p, 690, 60*ms)
	assert.True(t, j.aggressive, "not yet what was asked for")
	j.meter.avg = 0
	janusTrip(p, 691, 60*ms)
	assert.False(t, j.aggressive, "the first time, one round trip's throughput is enough")
	assert.InDelta(t, 691, janusPPS(j.meter.avg), 0.1, "and starts the average")
	assert.Equal(t, "clearing", p.alg.Control().Phase)

	janusTrip(p, 100, 60*ms)
	assert.InDelta(t, 691, janusPPS(j.meter.avg), 0.1, "the pause that clearing the buffer makes is no loss of "+
		"throughput")
	janusTrip(p, 691, 60*ms)
	assert.Equal(t, "conservative", p.alg.Control().Phase)

	j.meter.avg = 553 * float64(DefaultMSS)
	janusTrip(p, 553, 60*ms)
	assert.False(t, j.aggressive, "worked number: 552.5 packets/s are enough")
	j.meter.avg = 552 * float64(DefaultMSS)
	janusTrip(p, 552, 60*ms)
	assert.True(t, j.aggressive, "below it is time to compete")

	janusTrip(p, 2000, 60*ms)
	assert.False(t, j.aggressive, "back again once the average, 733, is above the target")
	j.enterAggressive(p.state.Now)
	j.meter.avg = 500 * float64(DefaultMSS)
	janusTrip(p, 1500, 60*ms)
	assert.True(t, j.aggressive, "625 is not, whatever one round trip brought")
}

func TestJanusStagesStartAfresh(t *testing.T) {
	p, j := contentJanus(t, janus8, 700, 60*ms)
	j.vegas.cwnd, j.vegas.ssthresh, j.vegas.base = 40, 100, 50*ms
	j.cubic.wMax, j.cubic.hasLost = 300, true
	j.enterAggressive(p.state.Now)
	assert.InDelta(t, 40, p.Cwnd(), 0.001, "the window stays")
	assert.InDelta(t, 40, j.cubic.ssthresh, 0, "in congestion avoidance")
	j.meter.avg = 500 * float64(DefaultMSS)
	for range 5 {
		p.Wait(60 * ms)
		p.Ack(p.Cwnd(), 60*ms)
		require.True(t, j.aggressive)
	}
	assert.InDelta(t, 40*1.276, p.Cwnd(), 1, "no loss is remembered: 5 % more each round trip")

	j.meter.avg = j.target.now
	janusTrip(p, 3000, 60*ms)
	require.False(t, j.aggressive)
	assert.Zero(t, j.vegas.base, "Vegas learns its base from what comes after the buffer is cleared")
	p.Ack(1, 65*ms)
	assert.Equal(t, 65*ms, j.vegas.base)
	assert.Equal(t, 60*ms, j.meter.base)
}

func TestJanusClearsTheBuffer(t *testing.T) {
	for _, tt := range []struct {
		name      string
		cwnd, avg float64
		want      float64
	}{
		{"worked number: 90 packets at 800 a second over 60 ms are 48", 90, 800, 48},
		{"a smaller window stays", 30, 800, 30},
		{"never below two", 30, 10, 2},
	} {
		p := newPath(t, janus8)
		j := as[*janus](p)
		j.cubic.cwnd, j.propagation = tt.cwnd, 60*ms
		j.first, j.meter.avg = false, tt.avg*float64(DefaultMSS)
		j.enterConservative(Ack{State: p.state})
		assert.InDelta(t, tt.want, p.Cwnd(), 0.01, tt.name)
		assert.InDelta(t, tt.want, j.vegas.ssthresh, 0.01, "%s: no slow start", tt.name)
	}
}

func TestJanusClearsTheBufferTimeAndAgain(t *testing.T) {
	for _, tt := range []struct {
		name    string
		packets float64 // a second; the target is 690.6
		limited bool
		want    float64
	}{
		{"what exceeds 600 a second over the 53.3 ms of equation 1", 600, false, 32},
		{"with a cap, here of 1.1·690.6 packets/s over 60 ms, there is no queue to clear", 780, false, 45.58},
		{"what the application leaves unused makes none", 600, true, 60},
	} {
		p, j := contentJanus(t, janus8, 700, 60*ms)
		j.propagation, j.vegas.base = 53333*time.Microsecond, 60*ms
		for j.rounds < janusClearEvery-1 {
			j.meter.avg = tt.packets * float64(DefaultMSS)
			j.meter.limited = tt.limited
			janusTrip(p, tt.packets, 60*ms)
			require.NotEqual(t, "clearing", p.alg.Control().Phase, "round trip %d", j.rounds)
		}
		j.vegas.cwnd = 60
		p.Ack(1, 60*ms)
		janusTrip(p, tt.packets, 60*ms)
		assert.InDelta(t, tt.want, p.Cwnd(), 0.1, tt.name)
		assert.Equal(t, 60*ms, j.vegas.base, "%s: the shortest round trip still counts", tt.name)
		assert.False(t, j.aggressive, tt.name)
	}
}

func TestJanusEstimatesThePropagationDelay(t *testing.T) {
	for _, tt := range []struct {
		name      string
		avg       float64
		rtt, base time.Duration
		want      time.Duration
	}{
		{"worked number: 65 ms with 4 packets at 800 a second in the queue are 60", 800, 65 * ms, 50 * ms, 60 * ms},
		{"a path that became longer", 800, 105 * ms, 50 * ms, 100 * ms},
		{"never below half the least round trip of all", 80, 65 * ms, 60 * ms, 30 * ms},
		{"fewer packets in flight than the queue should hold say nothing", 60, 65 * ms, 60 * ms, 77 * ms},
		{"nor does no throughput", 0, 65 * ms, 60 * ms, 77 * ms},
	} {
		j := as[*janus](newPath(t, janus8))
		j.propagation = 77 * ms
		j.meter.avg, j.meter.rtt, j.meter.base = tt.avg*float64(DefaultMSS), tt.rtt, tt.base
		j.estimatePropagation()
		assert.InDelta(t, toMillis(tt.want), toMillis(j.propagation), 0.01, tt.name)
	}

	p := newPath(t, janus8)
	j := as[*janus](p)
	p.Ack(1, 60*ms)
	janusTrip(p, 800, 60*ms)
	require.False(t, j.aggressive)
	janusTrip(p, 800, 90*ms)
	assert.Equal(t, 60*ms, j.propagation, "while the queue drains the least round trip of all stands for it")
	janusTrip(p, 800, 65*ms)
	assert.InDelta(t, 60, toMillis(j.propagation), 0.01, "the second round trip tells")
	janusTrip(p, 800, 61*ms)
	assert.InDelta(t, 60, toMillis(j.propagation), 0.01, "and only that one")
	assert.Zero(t, j.vegas.base, "it never becomes Vegas' base")
}

func TestJanusLimitsTheRateOfAGuarantee(t *testing.T) {
	p, j := contentJanus(t, janus8, 700, 60*ms)
	j.meter.avg = 759 * float64(DefaultMSS)
	janusTrip(p, 759, 60*ms)
	assert.Zero(t, j.cap, "a tenth more than asked for is fine")
	j.meter.avg = 761 * float64(DefaultMSS)
	janusTrip(p, 761, 60*ms)
	assert.InDelta(t, 45.6, j.cap, 0.05, "worked number: 1.1·690.6 packets/s over 60 ms")
	assert.Equal(t, "capped", p.alg.Control().Phase)
	j.vegas.cwnd = 60
	p.Ack(1, 60*ms)
	assert.InDelta(t, 45.6, p.Cwnd(), 0.05)

	j.meter.avg = 700 * float64(DefaultMSS)
	janusTrip(p, 700, 80*ms)
	assert.InDelta(t, 60.8, j.cap, 0.05, "it follows the round trip")
	j.meter.avg = 690 * float64(DefaultMSS)
	janusTrip(p, 690, 60*ms)
	assert.Zero(t, j.cap, "below what was asked for it goes")

	j.target.now = 0.8 * j.target.original
	j.meter.avg = 0.9 * j.target.original
	janusTrip(p, janusPPS(j.meter.avg), 60*ms)
	assert.Zero(t, j.cap, "a lowered target is no reason: it could never rise again")

	p, j = contentJanus(t, "janus:class=guarantee,target_mbit=0.1", 20, 60*ms)
	janusTrip(p, 20, 60*ms)
	assert.InDelta(t, 2, j.cap, 0, "never below two packets")
	p.Ack(1, 60*ms)
	assert.GreaterOrEqual(t, p.Cwnd(), 2.0)
}

// janusAim returns a target of 10, for which the unit does not matter.
func janusAim(floor float64) *janusTarget {
	a := &janusTarget{gamma: 0.2, tau: 20}
	a.setOriginal(10, floor)
	return a
}

func TestJanusLowersItsTargetAndRaisesItAgain(t *testing.T) {
	for _, tt := range []struct {
		floor float64
		want  []float64
	}{
		{0, []float64{8, 6.4, 5.12, 4.096, 3.2768}},
		{5, []float64{8, 6.4, 5.12, 5, 5}},
		{20, []float64{10, 10}},
	} {
		a := janusAim(tt.floor)
		now, rtt := Time(time.Second), 60*ms
		a.beginAggressive(now, rtt)
		for i, want := range tt.want {
			now, rtt = now.Add(time.Second), rtt+5*ms
			a.lowerTarget(now, rtt, 0, 0)
			assert.InDelta(t, want, a.now, 1e-9, "cut %d with a floor of %v", i+1, tt.floor)
		}
	}

	a := janusAim(0)
	a.now = 5.12
	for _, tt := range []struct{ avg, want float64 }{
		{6.39, 5.12},
		{6.41, 6.4},
		{7.9, 6.4},
		{8.01, 8},
		{9.9, 8},
		{10.01, 10},
		{30, 10},
	} {
		a.raiseTarget(tt.avg)
		assert.InDelta(t, tt.want, a.now, 1e-9, "at %v", tt.avg)
	}
	a.now = 9.77
	a.raiseTarget(10.5)
	assert.InDelta(t, 10, a.now, 1e-9, "a floor puts steps elsewhere; whoever has it all aims at it all")

	free := &janusTarget{gamma: 0.2, tau: 20, now: 8}
	free.raiseTarget(10.01)
	free.raiseTarget(12.6)
	assert.InDelta(t, 12.5, free.now, 1e-9, "a target from the network has no upper bound")
	free.now = 1
	free.beginAggressive(1, 60*ms)
	free.lowerTarget(Time(time.Hour), time.Second, 0, 0.9)
	assert.InDelta(t, 0.9, free.now, 1e-9, "but a lower one: from nothing it could not rise")
	free.lowerTarget(2*Time(time.Hour), 2*time.Second, 0, 5)
	assert.InDelta(t, 0.9, free.now, 1e-9, "which never raises it")
}

func TestJanusTakesItsTime(t *testing.T) {
	cuts := func(rtt func(time.Duration) time.Duration, rttvar time.Duration) (at []time.Duration) {
		a := janusAim(0)
		start := Time(time.Second)
		a.beginAggressive(start, 60*ms)
		before := a.now
		for d := 10 * ms; d <= time.Second; d += 10 * ms {
			a.lowerTarget(start.Add(d), rtt(d), rttvar, 0)
			if a.now != before {
				at, before = append(at, d), a.now
			}
		}
		return at
	}
	constant := func(time.Duration) time.Duration { return 60 * ms }
	rising := func(d time.Duration) time.Duration { return 60*ms + d/1000 } // too slowly to count as a rise within 1 s
	assert.Empty(t, cuts(constant, 0), "no rise, no cut")
	assert.Empty(t, cuts(rising, 0))

	from := func(start time.Duration) func(time.Duration) time.Duration {
		return func(d time.Duration) time.Duration { return 60*ms + max(0, d-start)/50 }
	}
	assert.Equal(t, []time.Duration{340 * ms, 480 * ms, 630 * ms, 790 * ms, 950 * ms}, cuts(from(0), 0),
		"after five round trips, 67 ms each by then, and then after two, of 70, 73, 76 and 79 ms")
	brief := cuts(func(d time.Duration) time.Duration { return 60*ms + d/100 }, 0)
	require.GreaterOrEqual(t, len(brief), 2)
	assert.Greater(t, brief[0], 300*ms, "worked number: never within 300 ms of 60 ms round trips")
	for i := range len(brief) - 1 {
		assert.GreaterOrEqual(t, brief[i+1]-brief[i], 120*ms, "nor twice within 120 ms")
	}
	late := cuts(from(500*ms), 0)
	require.NotEmpty(t, late)
	assert.Equal(t, 560*ms, late[0], "as soon as it rises by more than a millisecond")
	noisy := cuts(from(0), 8*ms)
	require.Len(t, noisy, 1)
	assert.Equal(t, 510*ms, noisy[0], "or by more than its standard deviation: 10 ms for a mean one of 8")

	for _, tt := range []struct {
		name string
		lost bool
		want float64
	}{
		{"behind a full buffer the round trip was longest at the last cut", false, 8},
		{"a loss has emptied part of it: growth counts from there", true, 6.4},
	} {
		p, j := contentJanus(t, "janus:class=guarantee,target_mbit=10", 1000, 60*ms)
		j.enterAggressive(p.state.Now)
		j.target.now, j.target.cuts, j.target.sinceRTT = mbitToBytes(8), 1, 175*ms
		j.meter.avg = mbitToBytes(4)
		p.state.RTTVar = 0
		if tt.lost {
			p.Lose(1)
		}
		for i := range 4 {
			janusTrip(p, 400, 130*ms+time.Duration(i)*ms)
		}
		assert.InDelta(t, tt.want, bytesToMbit(j.target.now), 1e-9, tt.name)
	}
}

func TestJanusLeavesTheTargetAloneOutsideTheAggressiveStage(t *testing.T) {
	p, j := contentJanus(t, janus8, 700, 60*ms)
	for i := range 20 {
		janusTrip(p, 700, 60*ms+time.Duration(5*i)*ms)
	}
	assert.InDelta(t, j.target.original, j.target.now, 0)
	p.Timeout()
	assert.InDelta(t, 1, p.Cwnd(), 0, "a timeout is the stage's own business")
	assert.False(t, j.aggressive)
	assert.InDelta(t, j.target.original, j.target.now, 0)
	j.enterAggressive(p.state.Now)
	p.Timeout()
	assert.InDelta(t, j.target.original, j.target.now, 0)
	assert.True(t, j.aggressive)
}

func TestJanusDoesNotCompeteForWhatTheApplicationDoesNotSend(t *testing.T) {
	p, j := contentJanus(t, janus8, 700, 60*ms)
	p.idle = true
	for range 50 {
		p.Wait(60 * ms)
		p.Ack(5, 60*ms)
	}
	assert.False(t, j.aggressive, "83 packets/s are all there was")
	assert.InDelta(t, 700, janusPPS(j.meter.avg), 0.1, "and say nothing of the path")

	j.enterAggressive(p.state.Now)
	j.meter.avg = 600 * float64(DefaultMSS)
	for i := range 50 {
		p.Wait(60*ms + time.Duration(5*i)*ms)
		p.Ack(5, 60*ms+time.Duration(5*i)*ms)
	}
	require.True(t, j.aggressive)
	assert.InDelta(t, j.target.original, j.target.now, 0, "nor does the queue that others make lower the target then")
	assert.InDelta(t, 600, janusPPS(j.meter.avg), 0.1)
	p.Wait(60 * ms)
	p.Ack(60, 60*ms)
	assert.InDelta(t, 650, janusPPS(j.meter.avg), 0.5, "more than is known already counts all the same: 1000 packets/s")
}

func TestJanusLeavesIdleTimeOut(t *testing.T) {
	p, j := contentJanus(t, janus8, 700, 60*ms)
	p.Wait(60 * ms)
	p.state.CwndLimited, p.state.Inflight = true, 0
	j.meter.acked = 0
	p.alg.OnAck(Ack{State: p.state, Acked: 42 * DefaultMSS, RTT: 60 * ms, Sent: Sent{At: p.state.Now.Add(-60 * ms)}})
	require.Equal(t, p.state.Now, j.meter.round.start)
	require.Equal(t, p.state.Now, j.meter.idle, "nothing was left in flight")
	p.Wait(10*time.Second + 60*ms)
	p.alg.OnAck(Ack{State: p.state, Acked: 42 * DefaultMSS, RTT: 60 * ms, Sent: Sent{At: p.state.Now.Add(-60 * ms)}})
	assert.InDelta(t, 700, janusPPS(j.meter.smp), 0.1, "ten seconds without anything to send are no part of the "+
		"round trip")
}

func TestJanusMeasuresOncePerRoundTrip(t *testing.T) {
	p := newPath(t, "janus:class=guarantee,target_mbit=100")
	j := as[*janus](p)
	p.Round(100 * ms)
	p.Round(100 * ms)
	p.Round(100 * ms)
	assert.InDelta(t, 0.875*0.125*200+0.125*400, janusPPS(j.meter.avg), 40,
		"an eighth of each: 20 and 40 packets in 100 ms")
	before := j.meter.smp
	p.Wait(ms)
	p.Ack(1, 100*ms)
	assert.InDelta(t, before, j.meter.smp, 0)
	p.state.SRTT = 0
	q := newPath(t, janus8)
	for range 10 {
		q.Wait(ms)
		q.Ack(1, 0)
	}
	assert.Zero(t, as[*janus](q).meter.smp, "without a sample of the round trip there is none to measure by")
	assert.True(t, as[*janus](q).aggressive)
}

func TestJanusTakesTheTargetOfABulkFlowFromTheNetwork(t *testing.T) {
	for _, ref := range []string{
		"janus",
		"janus:class=delay_sensitive",
		"janus:class=guarantee",
		"janus:class=guarantee,target_mbit=0,min_mbit=1",
	} {
		p := newPath(t, ref)
		j := as[*janus](p)
		assert.False(t, j.aggressive, "%s starts with Vegas", ref)
		assert.Equal(t, "slow_start", p.alg.Control().Phase, ref)
		p.Ack(1, 60*ms)
		janusTrip(p, 500, 60*ms)
		assert.Zero(t, j.target.now, "%s: not while in slow start", ref)
		j.vegas.cwnd, j.vegas.ssthresh = 120, 120
		assert.Equal(t, "measuring", p.alg.Control().Phase, ref)
		janusTrip(p, 900, 60*ms)
		janusTrip(p, 950, 60*ms)
		assert.Zero(t, j.target.now, "%s: not in the first two round trips after it", ref)
		janusTrip(p, 1000, 60*ms)
		assert.InDelta(t, 1000, janusPPS(j.target.now), 0.1, ref)
		assert.InDelta(t, 1000, janusPPS(j.meter.avg), 0.1, ref)
		assert.InDelta(t, 60, p.Cwnd(), 0.01, "%s: what slow start put into the queue goes", ref)
		assert.Equal(t, 60*ms, j.vegas.base, "%s: nothing was switched", ref)

		for range 40 {
			janusTrip(p, 2000, 60*ms)
		}
		assert.Greater(t, janusPPS(j.target.now), 1500.0, "%s: it grows with the throughput", ref)
		assert.Zero(t, j.cap, "%s: which nothing caps", ref)
		for range 40 {
			janusTrip(p, 0, 60*ms)
		}
		assert.True(t, j.aggressive, ref)
	}

	p := newPath(t, "janus:class=guarantee,min_mbit=5")
	j := as[*janus](p)
	p.Ack(1, 60*ms)
	j.vegas.ssthresh = j.vegas.cwnd
	for range 3 {
		janusTrip(p, 100, 60*ms)
	}
	assert.InDelta(t, 5, bytesToMbit(j.target.now), 1e-9, "a target that was not known is not below the least one")
}

func TestJanusParameters(t *testing.T) {
	j := as[*janus](newPath(t, "janus:class=guarantee,target_mbit=8,min_mbit=5"))
	assert.InDelta(t, 8, bytesToMbit(j.target.original), 1e-9)
	assert.InDelta(t, 5, bytesToMbit(j.target.floor), 1e-9)
	assert.Equal(t, Internals{8, 0, 0, 0, 0}, j.Inspect())

	for _, ref := range []string{
		"janus:class=video", "janus:target_mbit=-1", "janus:min_mbit=-1", "janus:gamma=1", "janus:gamma=0", "janus:epsilon=-0.1",
		"janus:queue_packets=-1", "janus:tau=-1", "janus:xi=0", "janus:target_mbit=many",
	} {
		_, _, err := Parse(ref)
		assert.Error(t, err, ref)
	}
	for ref, want := range map[string]string{
		"janus:class=bulk,target_mbit=8":         "janus: target_mbit goes with class=guarantee",
		"janus:target_mbit=8,min_mbit=5":         "janus: target_mbit goes with class=guarantee",
		"janus:class=delay_sensitive,min_mbit=5": "janus: min_mbit goes with class=guarantee",
		"janus:class=guarantee,target_mbit=8,min_mbit=8.1": "janus: min_mbit is 8.1, but must not be above " +
			"target_mbit, which is 8",
		"janus:class=guarantee,target_mbit=8,min_mbit=8":       "",
		"janus:class=guarantee,min_mbit=8":                     "",
		"janus:min_mbit=5,target_mbit=8,class=guarantee,xi=.5": "",
	} {
		_, _, err := Parse(ref)
		if want == "" {
			assert.NoError(t, err, ref)
		} else {
			assert.EqualError(t, err, want, ref)
		}
	}
}

func TestJanusTargetsStayWithinTheirBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		original := rapid.Float64Range(0, 100).Draw(t, "original")
		floor := rapid.Float64Range(0, 100).Draw(t, "floor")
		a := &janusTarget{
			gamma: rapid.Float64Range(0.01, 0.9).Draw(t, "gamma"),
			tau:   rapid.Float64Range(0, 1000).Draw(t, "tau"),
		}
		a.setOriginal(original, floor)
		if original == 0 {
			a.now = max(1, floor)
		}
		now := Time(1)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 10_000).Draw(t, "wait")) * ms)
			rtt := time.Duration(rapid.IntRange(1, 1000).Draw(t, "rtt")) * ms
			before := a.now
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0:
				a.beginAggressive(now, rtt)
				require.InDelta(t, before, a.now, 0)
			case 1:
				a.lowerTarget(now, rtt, ms, 0.01)
				require.LessOrEqual(t, a.now, before)
				require.GreaterOrEqual(t, a.now, before*(1-a.gamma)*(1-1e-12), "by one step at the most")
			case 2:
				a.raiseTarget(rapid.Float64Range(0, 1e6).Draw(t, "avg"))
				require.GreaterOrEqual(t, a.now, before)
			}
			require.Positive(t, a.now)
			require.GreaterOrEqual(t, a.now, min(floor, before))
			if original > 0 {
				require.LessOrEqual(t, a.now, original)
			}
		}
	})
}
