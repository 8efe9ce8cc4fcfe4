package cc

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// cubicAt returns a CUBIC flow in congestion avoidance.
func cubicAt(t *testing.T, ref string, cwnd float64) (*path, *cubic) {
	t.Helper()
	p := newPath(t, ref)
	c := as[*cubic](p)
	c.cwnd, c.ssthresh, c.wMax = cwnd, cwnd, cwnd
	return p, c
}

func TestCubicAfterALoss(t *testing.T) {
	p, c := cubicAt(t, "cubic", 100)
	p.Lose(1)
	assert.InDelta(t, 70, p.Cwnd(), 0.01, "a loss at 100 leaves 70")
	p.Wait(200 * ms)
	p.Ack(1, 100*ms)
	assert.InDelta(t, 4.217, c.k, 0.001, "the plateau is 4.217 s away")
	assert.InDelta(t, 70, c.wCubic(0), 0.01)
	assert.InDelta(t, 100, c.wCubic(c.k), 0.01, "at the old window")
	assert.InDelta(t, 130, c.wCubic(2*c.k), 0.01, "the other half mirrors the first")
	assert.InDelta(t, 102.27, c.wCubic(6), 0.01)

	c.cwnd = 90
	p.Wait(time.Second)
	p.Lose(1)
	assert.InDelta(t, 63, p.Cwnd(), 0.01, "the next loss, at 90, leaves 63")
	assert.InDelta(t, 76.5, c.wMax, 0.01, "and a plateau lowered for newcomers")
	p.Wait(200 * ms)
	p.Ack(1, 100*ms)
	assert.InDelta(t, 3.232, c.k, 0.001)
}

func TestCubicFollowsItsCurve(t *testing.T) {
	p, c := cubicAt(t, "cubic", 1000)
	p.srtt = 100 * ms
	p.Lose(1)
	p.Wait(200 * ms)
	for range 50 {
		p.Round(100 * ms)
	}
	since := p.state.Now.Sub(c.epochStart).Seconds()
	assert.InDelta(t, c.wCubic(since+0.1), p.Cwnd(), 3, "one round trip ahead, as the acknowledgements come in")
	assert.Greater(t, c.wCubic(since), c.wEst, "beyond Reno's window")
}

func TestCubicThroughputLaw(t *testing.T) {
	for _, tt := range []struct {
		every, mean float64 // packets
	}{
		{1e6, 5926},
		{1e8, 187_400},
	} {
		// From the cut to the plateau, C·K³ = (1−β)·W_max: the mean is a quarter of it below.
		p, c := cubicAt(t, "cubic", tt.mean/(1-(1-cubicBeta)/4))
		p.srtt = 100 * ms
		p.Lose(1)
		p.Wait(ms)
		const steps = 10 // events per round trip
		acked, n := 0.0, 0.0
		for c.epochStart == 0 || p.state.Now.Sub(c.epochStart).Seconds() < c.k {
			w := p.Cwnd() / steps
			p.Wait(100 * ms / steps)
			p.Ack(w, 100*ms)
			acked, n = acked+w, n+1
		}
		assert.InEpsilon(t, c.wMax, p.Cwnd(), 0.001)
		assert.InEpsilon(t, tt.every, acked, 0.02, "between two losses at 100 ms (RFC 9438 §5.1)")
		assert.InEpsilon(t, tt.mean, acked/n*steps, 0.02, "1.054·(RTT³/p³)^¼ in the mean")
	}
}

func TestCubicReachesNoFurtherThanHalfAWindowPerRoundTrip(t *testing.T) {
	p, c := cubicAt(t, "cubic", 10)
	p.srtt = 100 * ms
	p.Ack(1, 100*ms)
	c.epochStart = c.epochStart.Add(-time.Hour)
	c.cwnd, c.wEst = 10, 10
	p.Ack(10, 100*ms)
	assert.InDelta(t, 15, p.Cwnd(), 0.01)
}

func TestCubicInTheRenoFriendlyRegion(t *testing.T) {
	p, c := cubicAt(t, "cubic", 10)
	p.srtt = 10 * ms
	p.Lose(1)
	p.Wait(20 * ms)
	assert.InDelta(t, 7, p.Cwnd(), 0.01)
	p.Ack(0, 10*ms)
	start := p.state.Now
	for p.state.Now < start.Add(100*ms) {
		p.Round(10 * ms)
	}
	assert.InDelta(t, 1.957, c.k, 0.001)
	assert.InDelta(t, 7.44, c.wCubic(0.1), 0.01, "the cubic would be at 7.44 after ten round trips")
	assert.InDelta(t, 14.18, p.Cwnd(), 0.6, "Reno is at 14: 0.53 packets a round trip up to 10, then 1")
}

func TestCubicBeforeTheFirstLoss(t *testing.T) {
	grow := func(ref string) float64 {
		p, c := cubicAt(t, ref, 1000)
		p.srtt = 50 * ms
		c.wMax = 0
		for range 3 {
			p.Round(50 * ms)
		}
		return p.Cwnd()
	}
	assert.InDelta(t, 1157, grow("cubic:pre_loss_growth=linux"), 3, "Linux: 5 % per round trip")
	assert.Less(t, grow("cubic"), 1005.0, "the RFC: a cubic that starts flat")

	p, _ := cubicAt(t, "cubic:pre_loss_growth=linux", 1000)
	p.srtt = 50 * ms
	p.Lose(1)
	p.Wait(100 * ms)
	before := p.Cwnd()
	p.Round(50 * ms)
	assert.Less(t, p.Cwnd(), before*1.04, "after a loss Linux follows the cubic too")
	p.Wait(time.Second)
	p.Timeout()
	assert.False(t, as[*cubic](p).hasLost, "a timeout brings it back")
}

func TestCubicTimeout(t *testing.T) {
	p, c := cubicAt(t, "cubic", 100)
	p.Timeout()
	assert.InDelta(t, 1, p.Cwnd(), 0)
	assert.InDelta(t, 70, c.ssthresh, 0.01)
	p.Wait(time.Second)
	for c.cwnd < 70 {
		p.Round(10 * ms)
	}
	p.Ack(1, 10*ms)
	assert.Zero(t, c.k, "the next epoch starts on its plateau")
	assert.InDelta(t, 70, c.wMax, 1)
}

func TestCubicLeavesIdleTimeOut(t *testing.T) {
	p, c := cubicAt(t, "cubic", 100)
	p.srtt = 100 * ms
	p.Lose(1)
	p.Wait(200 * ms)
	p.Round(100 * ms)
	start, used := c.epochStart, p.state.Now

	p.idle = true // less to send than the window allows
	for range 50 {
		p.Wait(100 * ms)
		p.Ack(1, 100*ms)
	}
	p.Wait(10 * time.Second) // nothing at all
	p.idle = false
	p.Wait(100 * ms)
	before := p.Cwnd()
	p.Ack(1, 100*ms)
	idle := p.state.Now.Add(-100 * ms).Sub(used)
	assert.Equal(t, start.Add(idle), c.epochStart, "15 s without use are no part of the epoch")
	assert.InDelta(t, before, p.Cwnd(), 1, "and the window does not leap")
}

func TestCubicPacing(t *testing.T) {
	p, c := cubicAt(t, "cubic:pacing=on", 100)
	p.srtt = 100 * ms
	assert.Zero(t, p.alg.Control().PacingRate, "no rate before the first sample")
	p.Ack(0, 100*ms)
	assert.InDelta(t, 1200*8*1448, float64(p.alg.Control().PacingRate), 8*1448, "1.2 windows per round trip")
	c.ssthresh = infinite
	assert.InDelta(t, 2000*8*1448, float64(p.alg.Control().PacingRate), 8*1448, "2 in slow start")

	p, _ = cubicAt(t, "cubic", 100)
	p.Ack(1, 100*ms)
	assert.Zero(t, p.alg.Control().PacingRate, "off by default")
}

func TestHystart(t *testing.T) {
	p := newPath(t, "cubic")
	c := as[*cubic](p)
	p.Round(100 * ms)
	p.Round(100 * ms)
	assert.InDelta(t, 40, p.Cwnd(), 0.01, "doubles while the round trip stays")

	p.Round(112 * ms)
	assert.False(t, c.hy.isConservative(), "12 ms more than 100 ms is within an eighth")
	p.Round(130 * ms)
	assert.Equal(t, "conservative_slow_start", p.alg.Control().Phase, "18 ms more is beyond the greatest allowance")

	before := p.Cwnd()
	p.Round(130 * ms)
	assert.InDelta(t, before*1.25, p.Cwnd(), before*0.05, "a quarter of the growth")

	other := newPath(t, "cubic")
	other.Round(100 * ms)
	other.Round(100 * ms)
	other.Round(130 * ms)
	assert.Equal(t, "conservative_slow_start", other.alg.Control().Phase)
	other.Timeout()
	assert.Equal(t, "slow_start", other.alg.Control().Phase, "the second one grows as ever")

	p.Round(100 * ms)
	assert.False(t, c.hy.isConservative(), "back at the old round trip it was jitter")

	p.Round(130 * ms)
	assert.True(t, c.hy.isConservative())
	for range 7 {
		p.Round(130 * ms)
	}
	assert.False(t, math.IsInf(c.ssthresh, 1), "several rounds of it end slow start")
	assert.Equal(t, "congestion_avoidance", p.alg.Control().Phase)

	q := newPath(t, "cubic:hystart=off")
	for range 3 {
		q.Round(100 * ms)
	}
	q.Round(200 * ms)
	q.Round(300 * ms)
	assert.InDelta(t, 320, q.Cwnd(), 0.01, "off, only a loss ends slow start")
}

func TestHystartEndsAfterFiveConservativeRounds(t *testing.T) {
	h := hystart{}
	now := Time(time.Hour)
	slow := 0 // rounds begun in the conservative phase
	for rounds := range 20 {
		now = now.Add(50 * ms)
		rtt := 50 * ms
		if rounds >= 2 {
			rtt = 70 * ms
		}
		if h.isConservative() {
			slow++
		}
		sent := now - 1 // after the start of the round that ends here, before that of the next
		for range 10 {
			if _, exit := h.onAck(Ack{State: State{Now: now}, RTT: rtt, Sent: Sent{At: sent}}); exit {
				assert.Equal(t, 5, slow, "the round in which the phase began counts, and four more")
				return
			}
			now++
		}
	}
	t.Error("slow start goes on")
}

func TestHystartThresholds(t *testing.T) {
	for _, tt := range []struct {
		name   string
		last   time.Duration
		newest time.Duration
		n      int
		want   bool
	}{
		{"base 10 ms allows 4 ms: 13.9 ms is no queue", 10 * ms, 13900 * time.Microsecond, 8, false},
		{"base 10 ms allows 4 ms: 14 ms is one", 10 * ms, 14 * ms, 8, true},
		{"base 80 ms allows 10 ms", 80 * ms, 90 * ms, 8, true},
		{"base 400 ms allows 16 ms, not 50", 400 * ms, 416 * ms, 8, true},
		{"seven samples are too few", 10 * ms, 50 * ms, 7, false},
		{"the first round has nothing to compare with", 0, 50 * ms, 8, false},
	} {
		h := hystart{last: tt.last, round: round{start: Time(time.Hour)}}
		for range tt.n {
			h.onAck(Ack{State: State{Now: Time(time.Hour)}, RTT: tt.newest, Sent: Sent{At: 1}})
		}
		assert.Equal(t, tt.want, h.isConservative(), tt.name)
	}
}

// TestLinuxHystart takes rounds of acknowledgements over a base of 40 ms.
func TestLinuxHystart(t *testing.T) {
	for _, tt := range []struct {
		name      string
		cwnd      float64
		rtt, gap  time.Duration // of each acknowledgement, and between two
		acks      int           // in the round
		endsAfter int           // of them; 0: slow start goes on
	}{
		{"2 ms apart for more than half of 40 ms: the eleventh after the first", 20, 40 * ms, 2 * ms, 15, 12},
		{"3 ms apart they are no train", 20, 40 * ms, 3 * ms, 15, 0},
		{"a rise of more than an eighth: the ninth sample", 20, 46 * ms, 3 * ms, 15, 9},
		{"a rise of an eighth is jitter", 20, 45 * ms, 3 * ms, 15, 0},
		{"eight samples are too few", 20, 60 * ms, 3 * ms, 8, 0},
		{"a window below 16 packets goes on", 15, 60 * ms, 2 * ms, 15, 0},
	} {
		h, now, ended := linuxHystart{}, Time(time.Hour), 0
		for i := range tt.acks {
			a := Ack{State: State{Now: now, MinRTT: 40 * ms}, RTT: tt.rtt, Sent: Sent{At: Time(time.Hour) - 1}}
			if h.endsSlowStart(a, tt.cwnd) && ended == 0 {
				ended = i + 1
			}
			now = now.Add(tt.gap)
		}
		assert.Equal(t, tt.endsAfter, ended, tt.name)
	}

	p := newPath(t, "cubic:hystart=linux")
	for p.Cwnd() < 100 {
		p.Round(100 * ms)
	}
	p.Timeout()
	for range 7 {
		p.Round(100 * ms)
	}
	assert.Greater(t, p.Cwnd(), 16.0)
	p.Round(130 * ms)
	before := p.Cwnd()
	p.Round(130 * ms)
	assert.Less(t, p.Cwnd(), before*1.2, "the slow start after a timeout ends as well")
	assert.Equal(t, "congestion_avoidance", p.alg.Control().Phase)
}

func TestCubicOnALink(t *testing.T) {
	l := &bottleneck{rate: 1000, base: 50 * ms, buffer: 50}
	s := from(t, 0, "cubic")
	l.run(t, 60*time.Second, s)
	assert.GreaterOrEqual(t, s.throughput(10*time.Second, 60*time.Second), 990.0, "keeps the link busy")
	assert.Less(t, s.lost, 200)
	highest, lowest := 0.0, math.Inf(1)
	for _, w := range s.cwnd[len(s.cwnd)/4:] {
		highest, lowest = max(highest, w), min(lowest, w)
	}
	assert.InDelta(t, 100, highest, 8, "up to BDP plus buffer")
	assert.InDelta(t, 70, lowest, 6, "down to seven tenths of it")
}
