package cc

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// tracking is a flow of 1000 packets/s over a path of 40 ms, past slow start.
func tracking(t *testing.T) (*path, *penstock) {
	t.Helper()
	p := newPath(t, "penstock")
	own := as[*penstock](p)
	for own.phase == penstockSlowStart {
		p.Round(40 * ms)
		p.Round(80 * ms) // a queue
	}
	for range 2000 {
		p.Wait(ms)
		p.Ack(1, 60*ms)
	}
	require.Equal(t, penstockTracking, own.phase)
	return p, own
}

func TestPenstockWindowIsRateTimesBaseAndTarget(t *testing.T) {
	p, own := tracking(t)
	assert.InEpsilon(t, 1000, own.rate/float64(DefaultMSS), 0.01) // a window ends between two packets
	assert.Equal(t, 40*ms, own.base.extreme())
	assert.InDelta(t, own.rate/float64(DefaultMSS)*(0.040+own.target), p.Cwnd(), 0.1)
	assert.Equal(t, "tracking", p.alg.Control().Phase)
}

func TestPenstockSlowStartEndsWithAQueueOrALoss(t *testing.T) {
	p := newPath(t, "penstock")
	p.Round(40 * ms)
	p.Round(40 * ms)
	assert.InDelta(t, 40, p.Cwnd(), 0.1, "twice as much each round trip")
	assert.Equal(t, "slow_start", p.alg.Control().Phase)
	p.Ack(1, 60*ms)
	assert.Equal(t, "tracking", p.alg.Control().Phase)

	p = newPath(t, "penstock")
	p.Round(40 * ms)
	p.Lose(1)
	assert.NotEqual(t, "slow_start", p.alg.Control().Phase)
}

func TestPenstockGoesOnFromAKnownWindow(t *testing.T) {
	p := newPath(t, "penstock")
	const known = 40 * DefaultMSS
	var err error
	p.alg, err = New("penstock", Config{InitialCwnd: known, Ssthresh: known})
	require.NoError(t, err)
	own := as[*penstock](p)
	p.state.SRTT, p.state.MinRTT = 40*ms, 40*ms
	p.Ack(1, 70*ms) // in the window's own queue
	assert.Equal(t, 40*ms, own.base.extreme(), "the path is known, too")
	for range 60 { // 1000 packets/s
		p.Wait(ms)
		p.Ack(1, 40*ms)
		require.LessOrEqual(t, p.Cwnd(), 41.0+1000*own.target)
	}
	assert.Equal(t, "tracking", p.alg.Control().Phase, "a round trip has shown the rate")
	p.Timeout()
	p.Round(40 * ms)
	assert.Equal(t, "slow_start", p.alg.Control().Phase, "the window is not known any more")
}

func TestPenstockKeepsItsWindowWhileTheApplicationPauses(t *testing.T) {
	p, _ := tracking(t)
	before := p.Cwnd()
	p.idle = true
	for range 500 { // a tenth of the rate
		p.Wait(10 * ms)
		p.Ack(1, 40*ms)
	}
	assert.GreaterOrEqual(t, p.Cwnd(), before)
}

func TestPenstockStartsAnewAfterATimeout(t *testing.T) {
	p, own := tracking(t)
	p.Timeout()
	assert.Equal(t, "slow_start", p.alg.Control().Phase)
	assert.InDelta(t, InitialCwndPackets, p.Cwnd(), 0.1)
	assert.Equal(t, 40*ms, own.base.extreme(), "the path is as long as it was")
}

func TestPenstockDrainsWhenTheBaseHasNotBeenSeen(t *testing.T) {
	p, own := tracking(t)
	drain := func(within int, least time.Duration) {
		waited := 0
		for ; own.phase == penstockTracking; waited++ {
			p.Wait(ms)
			p.Ack(1, 60*ms)
			require.LessOrEqual(t, waited, within)
		}
		assert.InDelta(t, 1000*0.040/2, p.Cwnd(), 1, "half of what the path holds")
		for own.phase == penstockDraining {
			p.Wait(ms)
			p.Ack(1, least)
		}
	}
	at := func() time.Duration { return time.Duration(p.state.Now) % drainEvery }
	drain(5001, 55*ms)
	assert.Less(t, at(), 500*ms, "at the multiples of the interval, as all flows")
	assert.Equal(t, 40*ms, own.base.extreme(), "that once may be a flow that began")
	drain(5010, 40*ms)
	drain(7500, 55*ms)
	assert.Less(t, at(), 500*ms, "the next of them at which the queue was not empty just before")
	assert.Equal(t, 40*ms, own.base.extreme(), "and so may this")
	drain(5010, 54*ms)
	assert.Equal(t, 54*ms, own.base.extreme(), "what does not drain twice is part of the path, the lesser of both")
	p.Wait(ms)
	p.Ack(1, 45*ms)
	assert.Equal(t, 45*ms, own.base.extreme(), "until something shorter is seen")
}

func TestPenstockDrainsTheWindowThatAHostIsLetSendBetweenItsFlows(t *testing.T) {
	at := func(receives bool) time.Duration {
		p, own := tracking(t)
		own.receives = receives
		for drained := 0; drained < 2; drained++ {
			for own.phase == penstockTracking {
				p.Wait(ms)
				p.Ack(1, 60*ms)
			}
			for own.phase == penstockDraining {
				p.Wait(ms)
				p.Ack(1, 40*ms)
			}
		}
		return time.Duration(p.state.Now) % drainEvery
	}
	assert.Less(t, at(false), 500*ms)
	assert.InDelta(t, 2.5, at(true).Seconds(), 0.5)
}

func TestPenstockDoesNotDrainAfterAPause(t *testing.T) {
	p, own := tracking(t)
	for range 10 {
		p.Wait(4 * time.Second)
		p.idle = true
		p.Ack(1, 60*ms) // left with nothing before it
		p.idle = false
		assert.Equal(t, penstockTracking, own.phase)
	}
}

// TestPenstockTellsAPathThatGrewFromAQueue plays round trips as they are with so many packets in flight.
func TestPenstockTellsAPathThatGrewFromAQueue(t *testing.T) {
	for _, tt := range []struct {
		name string
		rtt  func(cwnd float64) time.Duration
		base time.Duration
		half bool // of the link is held
	}{
		{"a longer path", func(cwnd float64) time.Duration { return max(140*ms, time.Duration(cwnd)*ms) }, 140 * ms, false},
		{"a slower link", func(cwnd float64) time.Duration { return max(40*ms, 3*time.Duration(cwnd)*ms) }, 40 * ms, false},
		{"a queue of others", func(cwnd float64) time.Duration { return 140*ms + time.Duration(cwnd)*ms }, 40 * ms, true},
	} {
		p, own := tracking(t)
		for range 12 {
			p.Round(tt.rtt(p.Cwnd()))
		}
		assert.Equal(t, tt.base, own.base.extreme(), tt.name)
		assert.Equal(t, tt.half, own.rivalry.holds, tt.name)
		if tt.half {
			link := own.rivalry.link.rate() / float64(DefaultMSS)
			assert.InEpsilon(t, 1000, link, 0.15, "what it carried, nearly")
			for range 12 { // a draining among them
				p.Round(tt.rtt(p.Cwnd()))
			}
			rtt := tt.rtt(p.Cwnd())
			assert.InDelta(t, holdShare, p.Cwnd()/(link*rtt.Seconds()), 0.05, "as much as the others")
			p.Round(41 * ms)
			assert.False(t, own.rivalry.holds, "they have left")
		}
	}
}

func TestPenstockDoesNotFillALinkThatStandsStill(t *testing.T) {
	p, own := tracking(t)
	for !own.rivalry.holds || own.rivalry.rttBefore != 0 {
		p.Round(140*ms + time.Duration(p.Cwnd())*ms) // a queue of others
	}
	half := func(rtt time.Duration) float64 {
		return holdShare * own.rivalry.link.rate() * rtt.Seconds() / float64(DefaultMSS)
	}
	least, link := float64(own.rivalry.lastRTT), own.rivalry.link.rate()
	for _, n := range []float64{1.5, 2, 3} { // times the least round trip
		p.Wait(ms)
		p.Ack(1, time.Duration(n*least))
		assert.InDelta(t, half(time.Duration(min(n, 2)*least)), p.Cwnd(), 1)
	}
	p.Wait(ms)
	p.Ack(1, time.Duration(6*least))
	assert.False(t, own.rivalry.holds)
	assert.InEpsilon(t, link/holdStallDivisor, own.rivalry.link.rate(), 1e-9, "it may be slower now")
}

func TestPenstockMeetsALossWithARivalAndLeavesItWhenTheQueueIsEmpty(t *testing.T) {
	p, own := tracking(t)
	tracked := p.Cwnd()
	p.Lose(1)
	require.True(t, own.rivalry.cubicActive)
	assert.InDelta(t, cubicBeta*tracked, own.cubic.cwnd, 0.1)
	p.Wait(ms)
	p.Ack(1, 60*ms)
	assert.InDelta(t, tracked, p.Cwnd(), 2, "one loss shows nothing: the window stays")
	own.cubic.cwnd = 3 * tracked
	p.Ack(1, 60*ms)
	assert.InDelta(t, 3*tracked, p.Cwnd(), 2)
	assert.Equal(t, "competing", p.alg.Control().Phase)
	p.Wait(ms)
	p.Ack(1, 41*ms)
	assert.False(t, own.rivalry.cubicActive, "nobody fills the queue")
	assert.InDelta(t, tracked, p.Cwnd(), 2)

	p = newPath(t, "penstock:compete=off")
	p.Round(40 * ms)
	p.Ack(1, 80*ms)
	p.Lose(1)
	assert.False(t, as[*penstock](p).rivalry.cubicActive)
}

func TestQueueTarget(t *testing.T) {
	const mbit = 1e6 / 8
	for _, tt := range []struct {
		name       string
		rate, base float64
		idle       float64 // of the time
		want       float64 // ms
	}{
		{"at 10 Mbit/s, as idle as wanted: as set", 10 * mbit, 0.02, idleWanted, 30},
		{"less idle: shorter", 10 * mbit, 0.02, 0, 30 * math.Exp(-idleWanted*idleGain)},
		{"more idle than wanted: longer", 10 * mbit, 0.02, idleWanted + 0.01, 30 * math.Exp(0.01*idleGain)},
		{"always idle: not without end", 10 * mbit, 0.02, 1, 30 * math.Exp(mostAdaptation)},
		{"a slower flow asks for more", 1 * mbit, 0.02, idleWanted, 30 * math.Pow(10, targetPower)},
		{"a faster for less", 100 * mbit, 0.02, idleWanted, 30 / math.Pow(10, targetPower)},
		{"a longer path needs more", 10 * mbit, 0.08, idleWanted, 30 * math.Pow(4, targetBasePower)},
		{"enough to grow by on the longest", 1000 * mbit, 0.6, 0, 600 * targetFloor},
	} {
		target := queueTarget{set: 0.030, idle: tt.idle * 60, total: 60, lossGuard: newLossGuard()}
		assert.InDelta(t, tt.want, 1e3*target.targetDelay(tt.rate, tt.base), 0.01, tt.name)
	}
}

func TestQueueTargetCountsIdleTimeOfTheLastMinute(t *testing.T) {
	target := queueTarget{set: 0.030, lossGuard: newLossGuard()}
	const base = 40 * ms
	now := Time(time.Second)
	// feed sends a packet every 10 ms, which finds a queue of that length.
	feed := func(d, queue time.Duration, counts bool) {
		for range int(d / (10 * ms)) {
			now = now.Add(10 * ms)
			a := Ack{State: State{Now: now}, Acked: 10_000, RTT: base + queue, Sent: Sent{At: now.Add(-base - queue)}}
			target.addAck(a, base, 1e6, queue, ms, counts)
		}
	}
	feed(10*ms, 0, true)
	assert.Zero(t, target.idleExcess(), "before anything is known")
	feed(time.Minute, 0, false)
	assert.Zero(t, target.idleExcess(), "what says nothing changes nothing")
	feed(time.Second, 0, true)
	assert.InDelta(t, (1-idleWanted)/idleSureAfter, target.idleExcess(), 0.01, "a second is half of what is sure")
	feed(4*time.Minute, 20*ms, true)
	assert.InDelta(t, -idleWanted, target.idleExcess(), 0.01, "there always was a queue")
	feed(6*time.Second, 0, true)
	assert.InDelta(t, 0.1-idleWanted, target.idleExcess(), 0.02, "a tenth of it")
}

func TestLossGuard(t *testing.T) {
	play := func(periods int, loss func(bound float64) float64) *lossGuard {
		g := newLossGuard()
		s := State{Now: Time(time.Second), SRTT: 40 * ms, MSS: 1000}
		for range 400 * periods {
			s.Now = s.Now.Add(ms)
			share := loss(min(g.bound, 0.030))
			g.lost += 1000 * share
			g.onAck(s, 1000*(1-share), min(g.bound, 0.030))
		}
		return &g
	}
	overflow := func(bound float64) float64 { return max(0, bound-0.010) * 10 } // a queue of 10 ms
	assert.InDelta(t, 0.012, play(40, overflow).bound, 0.005, "loss that a shorter queue ends bounds it")
	constant := func(float64) float64 { return 0.10 }
	assert.Equal(t, guardFree, play(6, constant).bound, "loss that it does not end lets it be")
	assert.Equal(t, guardFree, play(20, func(float64) float64 { return 0.03 }).bound, "nor does a little")
}

// TestHistoryRate compares with the definition, within the spacing of its notes.
func TestHistoryRate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h history
		d := time.Duration(rapid.IntRange(20, 500).Draw(t, "window")) * ms
		var at []Time
		var total []Bytes
		now, sum := Time(time.Second), Bytes(0)
		for range rapid.IntRange(2, 800).Draw(t, "acks") {
			now = now.Add(time.Duration(rapid.IntRange(0, 20).Draw(t, "ms")) * ms)
			sum += Bytes(rapid.IntRange(0, 10_000).Draw(t, "bytes"))
			h.addMark(now, sum, d)
			at, total = append(at, now), append(total, sum)
		}
		got := h.rateOver(d)
		if now.Sub(at[0]) < d+10*ms {
			require.False(t, math.IsNaN(got) || got < 0)
			return
		}
		delivered := func(since Time) Bytes {
			before := total[0]
			for i := range at {
				if at[i] <= since {
					before = total[i]
				}
			}
			return sum - before
		}
		require.GreaterOrEqual(t, got*d.Seconds(), float64(delivered(now.Add(-d)))-1)
		require.LessOrEqual(t, got*d.Seconds(), float64(delivered(now.Add(-d-2*d/historySpacing)))+1)
	})
}

func TestHistoryGrowth(t *testing.T) {
	for _, tt := range []struct {
		name    string
		windows int
		each    float64 // bytes in a window, of those in the one before
		want    float64
	}{
		{"a rate that stays", 3, 1, 1},
		{"twice as much in each window", 3, 2, 2},
		{"half", 3, 0.5, 0.5},
		{"too short a time to compare", 1, 2, 0},
	} {
		var h history
		now, sum, step := Time(time.Second), 0., 10_000.
		h.addMark(now, 0, 400*ms)
		for range tt.windows {
			for range 10 {
				now = now.Add(10 * ms)
				sum += step
				h.addMark(now, Bytes(sum), 400*ms)
			}
			step *= tt.each
		}
		assert.InDelta(t, tt.want, h.growth(100*ms), 0.01, tt.name)
	}
}

func TestPenstockGivesUpWhatCoveredTheWayBack(t *testing.T) {
	p, _ := tracking(t)
	before := p.Cwnd()
	p.idle = true // paced, or bound by the receiver: the window is not full
	p.reverse = 700 * ms
	p.Ack(1, 745*ms)
	require.Greater(t, p.Cwnd(), before+500, "700 ms of acknowledgements are on their way")
	p.reverse = 0
	p.Wait(ms)
	p.Ack(1, 60*ms)
	assert.InDelta(t, before, p.Cwnd(), before/4)
}

func TestPenstockLearnsNothingNewFromWhatATimeoutHasLost(t *testing.T) {
	p, own := tracking(t)
	left := p.state.Now
	p.Wait(time.Second)
	p.Timeout()
	p.Ack(1, 40*ms)
	require.Equal(t, penstockSlowStart, own.phase)
	p.alg.OnLoss(Loss{State: p.state, Lost: 10 * DefaultMSS, SentAt: left})
	assert.Equal(t, penstockSlowStart, own.phase, "told as it is sent again")
	assert.Zero(t, own.queueTarget.lossGuard.lost)
	p.Wait(ms)
	p.alg.OnLoss(Loss{State: p.state, Lost: DefaultMSS, SentAt: p.state.Now})
	assert.Equal(t, penstockTracking, own.phase, "lost since")
}
