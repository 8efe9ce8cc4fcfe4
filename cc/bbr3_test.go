package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// bbr3Path feeds bbr3 with acknowledgements that carry a delivery rate, and losses.
// The tests are those of the draft's appendix A that look inside.
type bbr3Path struct {
	*path
	*bbr3
	rtt      time.Duration
	inflight float64 // packets after each acknowledgement
	flight   float64 // packets in flight when the acknowledged ones left
	limited  bool    // the application keeps the path from being used
	free     bool    // the window does not hold the sender back
}

func newBbr3Path(t *testing.T, ref string) *bbr3Path {
	t.Helper()
	p := newPath(t, ref)
	return &bbr3Path{path: p, bbr3: as[*bbr3](p), rtt: 40 * ms, inflight: 30, flight: 40}
}

// Ack acknowledges n packets that were delivered at rate, a round trip after the newest
// of them left.
func (p *bbr3Path) Ack(n float64, rate Rate) {
	s := &p.path.state
	flight := Bytes(p.flight * float64(DefaultMSS))
	s.Delivered += Bytes(n * float64(DefaultMSS))
	s.Inflight = Bytes(p.inflight * float64(DefaultMSS))
	s.CwndLimited = !p.limited && !p.free
	p.smooth(p.rtt)
	p.OnAck(Ack{
		State: *s, Acked: Bytes(n * float64(DefaultMSS)), RTT: p.rtt, DeliveryRate: rate,
		Sent: Sent{
			At: max(1, p.Now().Add(-p.rtt)), AppLimited: p.limited,
			Inflight: flight, Delivered: max(0, s.Delivered-flight),
		},
	})
}

func (p *bbr3Path) Now() Time { return p.path.state.Now }

func (p *bbr3Path) Lose(n float64) {
	p.path.state.Inflight = Bytes(p.inflight * float64(DefaultMSS))
	p.OnLoss(Loss{State: p.path.state, Lost: Bytes(n * float64(DefaultMSS)), SentAt: p.Now().Add(-p.rtt)})
}

// Rounds lets n round trips pass with one acknowledgement each.
func (p *bbr3Path) Rounds(n int, rate Rate) {
	for range n {
		p.Wait(p.rtt + 1)
		p.Ack(10, rate)
	}
}

// until lets round trips pass until the phase is another one.
func (p *bbr3Path) until(t *testing.T, phase string, rate Rate) {
	t.Helper()
	for range 200 {
		if p.Control().Phase == phase {
			return
		}
		p.Rounds(1, rate)
	}
	require.Fail(t, "never "+phase, "it is %s", p.Control().Phase)
}

// in is a bbr3 that has found 12 Mbit/s and 40 ms, which is 41.4 packets, and has come
// to a phase.
func in(t *testing.T, phase string) *bbr3Path {
	t.Helper()
	p := newBbr3Path(t, "bbr3")
	p.Rounds(6, 12e6)
	require.True(t, p.fullBw.reached)
	p.bbr3.cwnd = 80
	p.until(t, phase, 12e6)
	return p
}

func TestBbr3LeavesStartupOnAPlateau(t *testing.T) {
	p := newBbr3Path(t, "bbr3")
	first := 2.77 * RateOf(10*DefaultMSS, ms).Mbps()
	assert.InDelta(t, first, p.Control().PacingRate.Mbps(), 0.1, "the first window in 1 ms")
	for i, mbit := range []float64{1, 2, 4, 8, 8.5, 8.6} {
		p.Rounds(1, Rate(mbit*1e6))
		require.Equal(t, "startup", p.Control().Phase, "round trip %d", i+1)
	}
	p.inflight = 200
	p.Rounds(1, 8.7e6)
	assert.Equal(t, "drain", p.Control().Phase)
	assert.InDelta(t, 0.5*8.7*0.99, p.Control().PacingRate.Mbps(), 0.01)
	p.inflight = 20
	p.Rounds(1, 8.7e6)
	assert.Equal(t, "probe_bw_cruise", p.Control().Phase, "less is in flight than fills the path")
}

func TestBbr3LeavesStartupOnHeavyLoss(t *testing.T) {
	for _, tt := range []struct {
		name    string
		reports int
		each    float64 // packets
		want    string
	}{
		{"too few losses", 5, 1, "startup"},
		{"too little of a flight of 400", 6, 1, "startup"},
		{"six, more than 2 %", 6, 2, "drain"},
	} {
		p := newBbr3Path(t, "bbr3")
		p.Rounds(2, 8e6)
		p.limited, p.inflight, p.flight = true, 400, 400
		for range tt.reports {
			p.Wait(5 * ms)
			p.Lose(tt.each)
			p.Ack(2, 4e6)
		}
		require.Equal(t, "startup", p.Control().Phase, tt.name)
		for range 4 { // until what left after the first loss arrives
			p.Wait(5 * ms)
			p.Ack(2, 4e6)
		}
		assert.Equal(t, tt.want, p.Control().Phase, tt.name)
		if tt.want == "drain" {
			assert.InDelta(t, 400, p.inflightLong, 10, "what was delivered in a round trip")
		} else {
			assert.Equal(t, infinite, p.inflightLong)
		}
	}
}

func TestBbr3StaysInStartupWhileTheApplicationHasLittle(t *testing.T) {
	p := newBbr3Path(t, "bbr3")
	p.Rounds(1, 5e6)
	p.limited = true
	p.Rounds(50, 1e6)
	assert.Equal(t, "startup", p.Control().Phase)
	assert.Equal(t, Rate(5e6), p.maxBandwidth(), "what understates the path does not count")
}

func TestBbr3DrainsForThreeRoundTripsAtMost(t *testing.T) {
	p := newBbr3Path(t, "bbr3")
	p.inflight = 60 // more than the path holds, whatever it sends
	p.until(t, "drain", 12e6)
	p.Rounds(3, 10e6)
	assert.Equal(t, "drain", p.Control().Phase)
	p.Rounds(1, 10e6)
	assert.Equal(t, "probe_bw_down", p.Control().Phase)
}

func TestBbr3CyclesThroughItsPhases(t *testing.T) {
	p := in(t, "probe_bw_down")
	assert.InDelta(t, 0.9*0.99*12, p.Control().PacingRate.Mbps(), 0.01)
	began := p.Now()
	p.inflight = 60
	p.Rounds(3, 12e6)
	assert.Equal(t, "probe_bw_down", p.Control().Phase, "more is in flight than fills the path")
	p.inflight = 41
	p.Rounds(1, 12e6)
	assert.Equal(t, "probe_bw_cruise", p.Control().Phase)
	assert.InDelta(t, 0.99*12, p.Control().PacingRate.Mbps(), 0.01)
	p.until(t, "probe_bw_refill", 12e6)
	rounds := int(p.Now().Sub(began) / p.rtt)
	assert.InDelta(t, 41, rounds, 2, "as many round trips as packets fill the path: 1.6 s")
	assert.InDelta(t, 0.99*12, p.Control().PacingRate.Mbps(), 0.01)
	p.Rounds(1, 12e6)
	assert.Equal(t, "probe_bw_up", p.Control().Phase, "a round trip later")
	assert.InDelta(t, 1.25*0.99*12, p.Control().PacingRate.Mbps(), 0.01)
	p.Rounds(2, 12e6)
	assert.Equal(t, "probe_bw_up", p.Control().Phase)
	p.Rounds(1, 12e6)
	assert.Equal(t, "probe_bw_down", p.Control().Phase, "three round trips without a quarter more")
}

func TestBbr3ProbesAgainWithinThreeSeconds(t *testing.T) {
	p := in(t, "probe_bw_down")
	p.rtt, p.inflight = 200*ms, 300 // never drained: Cruise is left out
	began := p.Now()
	for p.Control().Phase == "probe_bw_down" {
		p.Rounds(1, 12e6)
		require.Contains(t, []string{"probe_bw_down", "probe_bw_refill"}, p.Control().Phase)
	}
	assert.GreaterOrEqual(t, p.Now().Sub(began), 2*time.Second)
	assert.LessOrEqual(t, p.Now().Sub(began), 3*time.Second+p.rtt)
}

func TestBbr3KeepsProbingWhileTheApplicationHasLittle(t *testing.T) {
	p := in(t, "probe_bw_refill")
	p.limited = true
	p.Rounds(60, 3e6)
	assert.Equal(t, "probe_bw_up", p.Control().Phase)
	assert.Equal(t, Rate(12e6), p.maxBandwidth())
}

func TestBbr3LowersWhatMayBeInFlightByTheLossesOfAProbe(t *testing.T) {
	for _, tt := range []struct {
		name    string
		lost    float64
		flight  float64
		limited bool
		want    float64 // packets
	}{
		{"one of 60 is no sign", 1, 60, false, infinite},
		{"two of 60 are: what was in flight up to where they passed 2 %", 2, 60, false, 58 + 0.02*58/0.98},
		{"all of many: no less than 0.7 of what fills the path", 20, 20, false, 0.7 * 41.44},
		{"what the application limits sets no bound", 10, 60, true, infinite},
	} {
		p := in(t, "probe_bw_up")
		p.Ack(1, 12e6)
		p.limited, p.flight = tt.limited, tt.flight-tt.lost
		p.Wait(5 * ms)
		p.Lose(tt.lost)
		p.flight = tt.flight - tt.lost
		p.Ack(1, 12e6)
		if tt.lost < 2 {
			assert.Equal(t, "probe_bw_up", p.Control().Phase, tt.name)
		} else {
			assert.Equal(t, "probe_bw_down", p.Control().Phase, tt.name)
			assert.True(t, p.cycle.tooHigh, tt.name)
		}
		if tt.want == infinite {
			assert.Equal(t, infinite, p.inflightLong, tt.name)
		} else {
			assert.InDelta(t, tt.want, p.inflightLong, 0.1, tt.name)
		}
	}
}

// onceTooHigh is a bbr3 in a phase whose last probe lost much at 50 packets.
func onceTooHigh(t *testing.T, phase string) *bbr3Path {
	t.Helper()
	p := in(t, "probe_bw_up")
	p.cycle.tooHigh, p.inflightLong = true, 50
	p.startDown(p.Now())
	p.flight = 30
	p.until(t, phase, 12e6)
	return p
}

func TestBbr3LeavesRoomForOthers(t *testing.T) {
	p := onceTooHigh(t, "probe_bw_cruise")
	p.Rounds(10, 12e6)
	assert.InDelta(t, 0.85*50, p.Cwnd(), 1e-3)
	p.until(t, "probe_bw_refill", 12e6)
	p.Rounds(1, 12e6)
	assert.Greater(t, p.Cwnd(), 0.85*50)
	assert.LessOrEqual(t, p.Cwnd(), 50.0, "a probe may use it")

	p = onceTooHigh(t, "probe_bw_down")
	p.inflight = 43
	p.Rounds(3, 12e6)
	assert.Equal(t, "probe_bw_down", p.Control().Phase, "the room is not there yet")
	p.inflight = 41
	p.Rounds(1, 12e6)
	assert.Equal(t, "probe_bw_cruise", p.Control().Phase)
}

func TestBbr3ProbesWithCautionAfterOneThatLostMuch(t *testing.T) {
	p := onceTooHigh(t, "probe_bw_up")
	p.inflight = 38
	p.Rounds(1, 12e6)
	require.Equal(t, "probe_bw_up", p.Control().Phase)
	p.inflight = 39.5 // and ten that were just acknowledged
	p.Ack(10, 12e6)
	require.Equal(t, "probe_bw_down", p.Control().Phase, "as much is in flight as was too much")
	assert.True(t, p.cycle.cautious)
	p.Rounds(1, 12e6)
	assert.Equal(t, "probe_bw_refill", p.Control().Phase, "nothing was lost: it probes again at once")
	p.Rounds(1, 12e6)
	p.Ack(10, 12e6)
	assert.Equal(t, "probe_bw_up", p.Control().Phase, "and goes on beyond")
}

func TestBbr3GrowsExponentiallyInAProbe(t *testing.T) {
	p := onceTooHigh(t, "probe_bw_refill")
	p.cycle.tooHigh, p.inflight = false, 45
	p.bbr3.cwnd = 50
	p.Rounds(1, 12e6)
	require.Equal(t, "probe_bw_up", p.Control().Phase)
	var grown []float64
	for range 5 {
		before := p.inflightLong
		n := p.Cwnd()
		p.Wait(p.rtt + 1)
		for range int(n) {
			p.Wait(1)
			p.Ack(1, 12e6)
		}
		grown = append(grown, p.inflightLong-before)
	}
	for i, want := range []float64{2, 4, 8, 16, 32} {
		assert.InDelta(t, want, grown[i], want/4, "round trip %d", i+2)
	}
	assert.Equal(t, "probe_bw_up", p.Control().Phase, "the bound, not the path, kept the rate from growing")
}

func TestBbr3KeepsToWhatWasDeliveredWhereLossesAreNotAProbes(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	p.Rounds(2, 12e6)
	window := p.Cwnd()
	p.flight = 35
	p.Lose(1)
	p.Ack(1, 9e6)
	assert.Equal(t, Rate(12e6), p.bandwidth(), "the round trip is not over")
	p.Rounds(1, 9e6)
	assert.Equal(t, Rate(12e6), p.bandwidth(), "as much was delivered in it")
	p.Lose(1)
	p.Rounds(1, 9e6)
	assert.Equal(t, Rate(9e6), p.bandwidth(), "what was delivered in the round trip")
	assert.InDelta(t, max(35, 0.7*0.7*window), p.inflightShort, 1)
	p.Lose(1)
	p.Rounds(1, 1e6)
	p.Lose(1)
	p.Rounds(1, 1e6)
	assert.Equal(t, Rate(9e6*0.7), p.bandwidth(), "and no less than 0.7 of what it was")
	assert.Equal(t, Rate(12e6), p.maxBandwidth())
	p.until(t, "probe_bw_refill", 6e6)
	assert.Equal(t, Rate(12e6), p.bandwidth(), "until the next probe")
	assert.Equal(t, infinite, p.inflightShort)
}

func TestBbr3ForgetsARateAfterTwoCycles(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	p.inflight = 15
	for i, want := range []float64{12, 6} {
		p.shortestAt = p.Now() // no ProbeRTT, which counts as a cycle
		p.until(t, "probe_bw_up", 6e6)
		p.until(t, "probe_bw_cruise", 6e6)
		p.Rounds(2, 6e6)
		assert.InDelta(t, want, p.maxBandwidth().Mbps(), 1e-6, "cycle %d", i+1)
	}
}

func TestBbr3DrainsHalfOfThePathToSeeItsRoundTrip(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	seen := p.shortestAt
	p.rtt = 60 * ms
	p.until(t, "probe_rtt", 12e6)
	assert.InDelta(t, 5, p.Now().Sub(seen).Seconds(), 0.1)
	assert.InDelta(t, 0.5*41.4, p.Cwnd(), 0.1)
	assert.Equal(t, 40*ms, p.rtprop, "believed for ten seconds")
	p.Rounds(2, 6e6)
	assert.Zero(t, p.rttDone, "more than that is in flight")

	entered := p.Now()
	p.inflight, p.rtt = 20, 40*ms
	for p.Control().Phase == "probe_rtt" {
		p.Wait(10 * ms)
		p.Ack(1, 6e6)
		require.Less(t, p.Now().Sub(entered), time.Second)
	}
	assert.InDelta(t, 0.22, p.Now().Sub(entered).Seconds(), 0.02, "200 ms from when it was drained")
	assert.Equal(t, "probe_bw_cruise", p.Control().Phase)
	assert.Greater(t, p.Cwnd(), 70.0, "the window is what it was")
	assert.Equal(t, Rate(12e6), p.maxBandwidth(), "what half a flight delivered says nothing of the path")
}

func TestBbr3ReturnsToStartupFromProbeRTT(t *testing.T) {
	p := newBbr3Path(t, "bbr3")
	p.limited, p.inflight = true, 4
	p.Rounds(20, 1e6)
	p.rtt = 41 * ms
	p.until(t, "probe_rtt", 1e6)
	p.until(t, "startup", 1e6)
}

func TestBbr3ProbesNoRoundTripRightBehindAPause(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	p.limited, p.inflight = true, 0
	p.Ack(1, 12e6)
	assert.InDelta(t, 0.99*12, p.Control().PacingRate.Mbps(), 0.01, "it asks for no more than the path gave")
	p.Wait(20 * time.Second)
	p.rtt, p.inflight = 70*ms, 10
	p.Ack(1, 12e6)
	assert.NotEqual(t, "probe_rtt", p.Control().Phase, "the pause has drained the path already")
	assert.Equal(t, 70*ms, p.rtprop)
}

func TestBbr3EndsProbeRTTWhileNothingIsSent(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	p.rtt = 41 * ms
	p.until(t, "probe_rtt", 12e6)
	p.inflight, p.limited = 0, true
	p.Ack(1, 1e6)
	p.Ack(1, 1e6)
	due := p.Control().NextTick
	require.NotZero(t, due)
	p.path.state.Now = due
	p.OnTick(p.path.state)
	assert.Equal(t, "probe_bw_cruise", p.Control().Phase)
	assert.Zero(t, p.Control().NextTick)
}

func TestBbr3StartsFromOnePacketAfterATimeout(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	before := p.Cwnd()
	p.path.state.Inflight = 0
	p.OnLoss(Loss{State: p.path.state, Lost: DefaultMSS, SentAt: p.Now(), Timeout: true})
	assert.InDelta(t, 1, p.Cwnd(), 1e-3)
	p.Wait(10 * ms)
	p.Ack(5, 0)
	assert.InDelta(t, 6, p.Cwnd(), 1e-3)
	p.Rounds(1, 12e6)
	assert.GreaterOrEqual(t, p.Cwnd(), 0.7*before, "what left since then arrives: the window is back, or nearly")
	assert.Equal(t, Rate(12e6), p.maxBandwidth(), "the model stays")
}

// Below a packet there must be room for receivers that acknowledge every second one.
func TestBbr3KeepsFourPackets(t *testing.T) {
	p := newBbr3Path(t, "bbr3")
	p.rtt, p.inflight, p.flight = ms, 1, 1
	for range 40 {
		p.Wait(Rate(100_000).TimeFor(DefaultMSS))
		p.Ack(1, 100_000)
	}
	assert.GreaterOrEqual(t, p.Cwnd(), 4.0)
	assert.LessOrEqual(t, p.Cwnd(), 8.0)
}

func TestBbr3AllowsForBunchedAcknowledgements(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	plain := p.Cwnd()
	for range 40 {
		p.Wait(30 * ms)
		p.Ack(31, 12e6) // which is what arrives in 30 ms
		p.until(t, "probe_bw_cruise", 12e6)
	}
	assert.Greater(t, p.Cwnd(), plain+15)
}

// Transports tell of what a timeout lost when they send it again, round trip by round trip.
func TestBbr3AnswersATimeoutOnce(t *testing.T) {
	p := in(t, "probe_bw_cruise")
	p.flight = 35
	fired := p.Now()
	p.OnLoss(Loss{State: p.path.state, Lost: DefaultMSS, SentAt: fired, Timeout: true})
	p.Rounds(1, 0)
	rate := p.bandwidth()
	for range 10 {
		p.OnLoss(Loss{State: p.path.state, Lost: 10 * DefaultMSS, SentAt: fired})
		p.Rounds(1, 0)
	}
	assert.GreaterOrEqual(t, p.bandwidth(), rate)
	assert.GreaterOrEqual(t, rate, Rate(0.7*12e6))
}

func TestBbr3RemembersWhatWasInFlightWhenAProbeTimedOut(t *testing.T) {
	p := in(t, "probe_bw_up")
	p.flight = 60
	p.Ack(1, 12e6)
	p.OnLoss(Loss{State: p.path.state, Lost: DefaultMSS, SentAt: p.Now(), Timeout: true})
	assert.Equal(t, "probe_bw_down", p.Control().Phase)
	assert.InDelta(t, 60, p.inflightLong, 1e-6)
}
