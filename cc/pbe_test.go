package cc

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pbePath is a path through a cellular link that speaks with each acknowledgement,
// unless it is mute.
type pbePath struct {
	*path
	*pbe
	hint Hint
	mute bool
}

func newPbePath(t *testing.T, ref string, capacity, fair Rate) *pbePath {
	t.Helper()
	p := newPath(t, ref)
	return &pbePath{path: p, pbe: as[*pbe](p), hint: Hint{Capacity: capacity, FairShare: fair}}
}

func (c *pbePath) now() Time { return c.path.state.Now }

// speak is the state with a hint.
func (c *pbePath) speak() State {
	if !c.mute {
		c.hint.At = c.now()
		h := c.hint
		c.path.state.Hint = &h
	}
	return c.path.state
}

// Ack acknowledges n packets, delivered at rate; the newest took rtt.
func (c *pbePath) Ack(n float64, rtt time.Duration, rate Rate) {
	acked := Bytes(n * float64(c.path.state.MSS))
	c.path.state.Delivered += acked
	c.path.state.Inflight = 20 * c.path.state.MSS
	c.path.state.CwndLimited = true
	c.smooth(rtt)
	c.OnAck(Ack{
		State: c.speak(), Acked: acked, RTT: rtt, DeliveryRate: rate,
		Sent: Sent{At: max(1, c.now().Add(-rtt))},
	})
}

// Tick lets d pass without an acknowledgement.
func (c *pbePath) Tick(d time.Duration) {
	c.Wait(d)
	c.OnTick(c.speak())
}

func (c *pbePath) phase() string { return c.Control().Phase }

// steadyPbe is a path of 40 ms on which the link's 12 Mbit/s are what is delivered.
func steadyPbe(t *testing.T, ref string) *pbePath {
	t.Helper()
	c := newPbePath(t, ref, 12e6, 12e6)
	for range 8 {
		c.Ack(10, 40*ms, 12e6)
		c.Wait(40 * ms)
	}
	require.Equal(t, "wireless", c.phase())
	return c
}

func TestPbeRampsUpToItsFairShare(t *testing.T) {
	c := newPbePath(t, "pbe", 15e6, 16_666_667)
	c.Ack(1, 40*ms, 0)
	assert.Equal(t, "ramp", c.phase())
	assert.InDelta(t, 10*1448*8/0.04/1e6, c.Control().PacingRate.Mbps(), 0.01, "it begins with the initial window")
	for _, tt := range []struct {
		after time.Duration
		want  float64
	}{
		{60 * ms, 8.33}, // worked numbers: C_f 16.67 Mbit/s, RTprop 40 ms
		{90 * ms, 12.5},
		{119 * ms, 16.53},
	} {
		c.path.state.Now = Time(time.Second).Add(tt.after)
		c.OnTick(c.speak())
		assert.InDelta(t, tt.want, c.Control().PacingRate.Mbps(), 0.01, "after %v", tt.after)
		assert.InDelta(t, 1.25*tt.want*1e6*0.04/8/1448+3, float64(c.Control().Cwnd)/1448, 0.1, "after %v", tt.after)
	}
	c.path.state.Now = Time(time.Second).Add(120 * ms)
	c.Ack(1, 40*ms, 0)
	assert.Equal(t, "wireless", c.phase())
	assert.InDelta(t, 16.67, c.Control().PacingRate.Mbps(), 0.01, "worked number: C_f from 120 ms on")
	c.hint.FairShare = 10e6
	c.Ack(1, 40*ms, 0)
	assert.InDelta(t, 15, c.Control().PacingRate.Mbps(), 0.01, "then it is the capacity that counts")
}

func TestPbeEndsItsRampWhereTheLinkIsFull(t *testing.T) {
	c := newPbePath(t, "pbe", 5e6, 10e6)
	c.Ack(1, 40*ms, 0)
	c.Wait(20 * ms)
	c.Ack(1, 40*ms, 5e6)
	assert.Equal(t, "ramp", c.phase(), "all that others leave is not yet its share")
	c.Ack(1, 40*ms, 9.6e6)
	assert.Equal(t, "wireless", c.phase())
}

func TestPbeFollowsTheCapacity(t *testing.T) {
	c := steadyPbe(t, "pbe")
	for _, capacity := range []Rate{12e6, 3e6, 30e6} {
		c.hint.Capacity, c.hint.FairShare = capacity, capacity/2
		c.Ack(1, 40*ms, capacity)
		ctl := c.Control()
		assert.Equal(t, capacity, ctl.PacingRate)
		assert.InDelta(t, 1.25*float64(capacity)*0.04/8/1448+3, float64(ctl.Cwnd)/1448, 0.01)
	}
	c.hint.Capacity, c.hint.FairShare = 6e6, 0
	c.Tick(10 * ms)
	assert.EqualValues(t, 6e6, c.Control().PacingRate, "news come without an acknowledgement, too")
	assert.Equal(t, c.now().Add(10*ms), c.Control().NextTick)
	c.hint.Capacity = 1
	c.Tick(10 * ms)
	ctl := c.Control()
	assert.InDelta(t, 4*1448*8/0.04, float64(ctl.PacingRate), 1, "a silent link is still asked")
	assert.InDelta(t, 1.25*4+3, float64(ctl.Cwnd)/1448, 0.01)
}

func TestPbeClaimsItsFairShare(t *testing.T) {
	for ref, want := range map[string]Rate{"pbe": 6e6, "pbe:paper": 4e6} {
		c := steadyPbe(t, ref)
		c.hint.Capacity, c.hint.FairShare = 4e6, 6e6
		c.Ack(1, 40*ms, 4e6)
		assert.Equal(t, want, c.Control().PacingRate, ref)
	}
}

func TestPbeThresholds(t *testing.T) {
	for _, tt := range []struct {
		name     string
		ref      string
		capacity Rate
		late     time.Duration
		row      float64
	}{
		{"worked numbers: 30 ms and 27; 12 Mbit/s in packets of 1500 bytes", "pbe", 12e6, 57 * ms, 6},
		{"a fast link", "pbe", 60e6, 57 * ms, 30},
		{"a slow one: no single packet says it", "pbe", 1e6, 57 * ms, 6},
		{"as set", "pbe:late_ms=50,subframes=12", 12e6, 80 * ms, 12},
	} {
		c := newPbePath(t, tt.ref, tt.capacity, tt.capacity)
		c.path.state.MSS = 1500
		c.Ack(1, 30*ms, 0)
		assert.Equal(t, tt.late, c.lateThreshold(), tt.name)
		assert.InDelta(t, tt.row, c.lateRow(), 1e-9, tt.name)
	}
}

func TestPbeFindsABottleneckElsewhereByDelay(t *testing.T) {
	for _, tt := range []struct {
		name      string
		ref       string
		rtt       time.Duration
		delivered Rate
		want      string
	}{
		{"late, and slower than the link would be", "pbe", 68 * ms, 6e6, "drain"},
		{"not late", "pbe", 67 * ms, 6e6, "wireless"},
		{"late, but the link is full: the queue is its own", "pbe", 100 * ms, 11e6, "wireless"},
		{"by delay alone, as the paper has it", "pbe:paper", 100 * ms, 11e6, "drain"},
		{"there is no telling how fast", "pbe", 100 * ms, 0, "wireless"},
		{"nor need there be, in the paper", "pbe:paper", 100 * ms, 0, "drain"},
	} {
		c := steadyPbe(t, tt.ref)
		c.Ack(3, tt.rtt, tt.delivered)
		c.Ack(1, 40*ms, 6e6)
		c.Ack(5, tt.rtt, tt.delivered)
		assert.Equal(t, "wireless", c.phase(), "%s: a packet in time ends the row", tt.name)
		c.Ack(2, tt.rtt, tt.delivered)
		assert.Equal(t, tt.want, c.phase(), tt.name)
	}
}

func TestPbeKeepsItsHeadInAFade(t *testing.T) {
	c := steadyPbe(t, "pbe")
	c.hint.Capacity = 2e6
	c.Tick(ms)
	c.Wait(10 * ms)
	c.hint.Capacity = 20e6
	for range 5 {
		c.Wait(ms)
		c.Ack(5, 80*ms, 4e6)
	}
	assert.Equal(t, "wireless", c.phase(), "while those packets were under way, the link had no more to give")
}

func TestPbeDrainsThenProbesUpToItsFairShare(t *testing.T) {
	c := steadyPbe(t, "pbe")
	c.hint.FairShare = 13e6
	c.hint.Capacity = 24e6
	c.Wait(200 * ms) // what the link said before is forgotten
	c.Ack(1, 40*ms, 12e6)
	for range 4 {
		c.Ack(4, 80*ms, 12e6)
	}
	require.Equal(t, "drain", c.phase())
	assert.InDelta(t, 6, c.Control().PacingRate.Mbps(), 0.1, "half of what was delivered")
	c.Wait(39 * ms)
	c.Ack(1, 80*ms, 12e6)
	require.Equal(t, "drain", c.phase())
	c.Wait(ms)
	c.Ack(1, 80*ms, 12e6)
	require.Equal(t, "internet", c.phase())
	assert.InDelta(t, 2*12e6*0.04/8/1448, float64(c.Control().Cwnd)/1448, 12,
		"two bandwidth-delay products, and bursts")

	fastest := Rate(0)
	for range 40 {
		c.Wait(20 * ms)
		c.Ack(10, 80*ms, 12e6)
		fastest = max(fastest, c.Control().PacingRate)
	}
	assert.EqualValues(t, 13e6, fastest, "a quarter more than 12 is more than its share")
	assert.Equal(t, "internet", c.phase(), "the delay is still there")
	c.Ack(20, 50*ms, 12e6)
	assert.Equal(t, "internet", c.phase(), "so is the bottleneck")
	c.Ack(20, 50*ms, 13e6)
	assert.Equal(t, "wireless", c.phase(), "its fair share arrives, in time")
}

func TestPbeComesBackWhenTheLinkIsTheBottleneckAgain(t *testing.T) {
	c := steadyPbe(t, "pbe:paper")
	c.Ack(20, 100*ms, 12e6)
	c.Wait(40 * ms)
	c.Ack(20, 100*ms, 12e6)
	require.Equal(t, "internet", c.phase())
	c.Ack(20, 100*ms, 12e6)
	assert.Equal(t, "internet", c.phase(), "delay alone says no")

	c = steadyPbe(t, "pbe")
	c.Ack(20, 100*ms, 6e6)
	c.Wait(40 * ms)
	c.Ack(20, 100*ms, 6e6)
	require.Equal(t, "internet", c.phase())
	c.Ack(20, 100*ms, 12e6)
	assert.Equal(t, "wireless", c.phase(), "late, but all that the link can carry")
}

func TestPbeDoesNotReactToLoss(t *testing.T) {
	c := steadyPbe(t, "pbe")
	before := c.Control()
	for range 5 {
		c.loseSent(3, c.now())
	}
	after := c.Control()
	assert.Equal(t, before.Cwnd, after.Cwnd)
	assert.Equal(t, before.PacingRate, after.PacingRate)

	c.Timeout()
	assert.Equal(t, "ramp", c.phase())
	assert.InDelta(t, 1.25*4+3, float64(c.Control().Cwnd)/1448, 0.01, "four packets a round trip, and room for bursts")
	for range 4 {
		c.Wait(30 * ms)
		c.Ack(1, 40*ms, 0)
	}
	assert.Equal(t, "wireless", c.phase())
}

func TestPbeWithStaleHints(t *testing.T) {
	c := steadyPbe(t, "pbe")
	c.mute = true
	c.Wait(50 * ms)
	c.Ack(10, 40*ms, 12e6)
	assert.Equal(t, "wireless", c.phase(), "two round trips, or 100 ms")
	c.Wait(51 * ms)
	c.Ack(10, 40*ms, 12e6)
	require.Equal(t, "internet", c.phase())
	for range 20 {
		c.Wait(20 * ms)
		c.Ack(10, 40*ms, 12e6)
		assert.LessOrEqual(t, c.Control().PacingRate, Rate(12e6), "no more than has been delivered")
	}
	c.mute = false
	c.Ack(1, 40*ms, 6e6)
	assert.Equal(t, "wireless", c.phase(), "it was not delay that told it to leave")
	assert.EqualValues(t, 12e6, c.Control().PacingRate)

	c.mute = true
	c.Wait(101 * ms)
	c.Ack(10, 40*ms, 12e6)
	fastest := Rate(0)
	for range 100 {
		c.Wait(20 * ms)
		c.Ack(10, 40*ms, 12e6)
		fastest = max(fastest, c.Control().PacingRate)
	}
	assert.Equal(t, "probe_bw", c.phase(), "a second later it is BBR")
	assert.Greater(t, fastest, Rate(14e6), "and asks for more")
	c.mute = false
	c.Ack(1, 40*ms, 6e6)
	assert.Equal(t, "wireless", c.phase(), "without a ramp: it knows the path")
}

func TestPbeWithoutHintsIsBbr(t *testing.T) {
	for _, h := range []*Hint{nil, {At: 1, LinkRate: naccMbit}} { // or with hints that do not tell the capacity
		a, b := newPath(t, "pbe"), newPath(t, "bbr")
		rng := rand.New(rand.NewPCG(3, 4))
		for i := range 3000 {
			rtt := 40*ms + time.Duration(rng.IntN(40))*ms
			rate := Rate(1+rng.IntN(20)) * naccMbit
			for _, p := range []*path{a, b} {
				p.state.Hint = h
				p.Wait(5 * ms)
				p.smooth(rtt)
				p.fill()
				switch {
				case i%997 == 996:
					p.Timeout()
				case i%400 == 399:
					p.Lose(2)
				default:
					p.state.Delivered += 4 * DefaultMSS
					p.alg.OnAck(Ack{
						State: p.state, Acked: 4 * DefaultMSS, RTT: rtt, DeliveryRate: rate,
						Sent: Sent{At: p.state.Now.Add(-rtt)},
					})
				}
			}
			require.Equal(t, b.alg.Control(), a.alg.Control(), "event %d", i)
		}
	}
}

// pbeElsewhere is an algorithm behind a cellular link that is not the bottleneck:
// it says that it would carry capacity. The link's test driver measures no
// delivery rates, so it does.
type pbeElsewhere struct {
	Algorithm
	capacity Rate
	hint     Hint
}

func (e *pbeElsewhere) OnAck(a Ack) {
	e.hint = Hint{At: a.Now, Capacity: e.capacity, FairShare: e.capacity}
	a.Hint = &e.hint
	a.DeliveryRate = RateOf(a.Delivered-a.Sent.Delivered, a.Now.Sub(a.Sent.At))
	e.Algorithm.OnAck(a)
}

func TestPbeBehindABottleneckElsewhere(t *testing.T) {
	for _, ref := range []string{"pbe", "pbe:paper"} {
		l := &bottleneck{rate: 1000, base: 50 * ms, buffer: 1000}
		s := from(t, 0, ref)
		s.alg = &pbeElsewhere{Algorithm: s.alg, capacity: 40e6} // 3454 packets/s
		l.run(t, 20*time.Second, s)
		assert.Greater(t, s.throughput(5*time.Second, 20*time.Second), 930.0, ref)
		mean, p99 := l.queued(5*time.Second, 20*time.Second)
		assert.Less(t, mean, 40.0, "%s: BBR holds up to a bandwidth-delay product of 50 packets; the link's word "+
			"would hold 166", ref)
		assert.Less(t, p99, 100.0, ref)
		assert.Equal(t, "internet", s.alg.Control().Phase, ref)
	}
}
