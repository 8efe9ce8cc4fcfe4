package cc

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// l4sPath is a path of a prague flow in congestion avoidance at about 40 packets.
func l4sPath(t *testing.T, rtt time.Duration) (*path, *prague) {
	t.Helper()
	p := newPath(t, "prague")
	p.l4s = true
	p.Round(rtt)
	p.Round(rtt)
	p.Round(rtt)
	own := as[*prague](p)
	own.ssthresh = own.cwnd
	return p, own
}

// marksOf acknowledges a window, every so manieth packet marked.
func (p *path) marksOf(every int, rtt time.Duration) {
	n := max(1, int(p.Cwnd()))
	for i := range n {
		p.marked = every > 0 && i%every == 0
		p.Wait(rtt / time.Duration(n))
		p.Ack(1, rtt)
	}
	p.marked = false
}

// RFC 8257 §3.3, equation 7, with the draft's gain.
func TestAlphaFollowsTheFractionMarked(t *testing.T) {
	p, own := l4sPath(t, 40*ms)
	for range 100 {
		p.marksOf(4, 40*ms)
	}
	assert.InDelta(t, 0.27, own.alpha, 0.05, "a quarter, and a little more in a short window")
	before := own.alpha
	p.marksOf(0, 40*ms)
	p.marksOf(0, 40*ms)
	assert.InDelta(t, before*15/16*15/16, own.alpha, 0.02)
}

// RFC 9331 §4.3: the window shrinks by half of alpha, once per round trip.
func TestTheWindowShrinksByHalfOfAlpha(t *testing.T) {
	p, own := l4sPath(t, 40*ms)
	own.alpha = 0.4
	before := own.cwnd
	p.marked = true
	p.Ack(1, 40*ms)
	assert.InDelta(t, 0.8*before, own.cwnd, 0.1)
	for range 30 {
		p.Wait(ms)
		p.Ack(1, 40*ms)
	}
	assert.InDelta(t, 0.8*before, own.cwnd, 0.1, "no further in the same round trip, and marked packets do not "+
		"extend it")
}

// The draft, §2.4.4: below 25 ms the window grows by less, so that the rate does not
// depend on the round trip.
func TestRatesDoNotDependOnShortRoundTrips(t *testing.T) {
	for _, rtt := range []time.Duration{5 * ms, 10 * ms, 25 * ms, 50 * ms} {
		p, own := l4sPath(t, rtt)
		before := own.cwnd
		for range 8 {
			p.marksOf(0, rtt)
		}
		part := min(1, rtt.Seconds()/0.025)
		assert.InDelta(t, 8*part*part, own.cwnd-before, 0.15*8*part*part, "%v", rtt)
	}
}

// RFC 9331 §4.3.
func TestLossesAreAnsweredClassically(t *testing.T) {
	p, own := l4sPath(t, 40*ms)
	own.alpha = 0
	before := own.cwnd
	p.Lose(1)
	assert.InDelta(t, before/2, own.cwnd, 0.1)
}

// RFC 9331 §4.3: a CoDel or PI2 queue marks rarely and stands.
func TestMarksOfAStandingQueueAreLosses(t *testing.T) {
	p, own := l4sPath(t, 40*ms)
	own.alpha = 0.1
	for range 6 {
		p.marksOf(1000, 46*ms)
		p.marksOf(0, 46*ms)
	}
	require.True(t, own.isClassic())
	before := own.cwnd
	p.marked = true
	p.Ack(1, 46*ms)
	assert.InDelta(t, before/2, own.cwnd, 0.1)
	p.marked = false
	for range 8 {
		p.marksOf(5, 41*ms)
	}
	assert.False(t, own.isClassic(), "an L4S queue again")
}

func TestTheMarksOfAFirstWindowSayNothing(t *testing.T) {
	p := newPath(t, "prague")
	p.l4s, p.marked = true, true
	for range 10 {
		p.Ack(1, 40*ms)
	}
	assert.Equal(t, "slow_start", p.alg.Control().Phase)
}

// A window above what the marks allow grows fast once there are none any more.
func TestWithoutMarksTheCeilingRises(t *testing.T) {
	rounds := func(l4s bool) (n int) {
		p := newPath(t, "static:cwnd_packets=400")
		p.l4s = l4s
		p.Round(40 * ms)
		p.Round(40 * ms)
		p.marked = true
		p.Ack(1, 40*ms)
		p.marked = false
		require.Less(t, p.Cwnd(), 300.0)
		for ; p.Cwnd() < 400; n++ {
			p.Round(40 * ms)
		}
		return n
	}
	assert.InDelta(t, 200, rounds(false), 10, "a packet per round trip")
	assert.InDelta(t, 20+16*math.Ln2, rounds(true), 12, "twice sqrt(200/2) round trips, then a sixteenth each")
}

func TestWhatScalesIsSaid(t *testing.T) {
	for name, scales := range map[string]bool{"prague": true, "penstock": true, "cubic": false, "none": false} {
		spec, err := Lookup(name)
		require.NoError(t, err)
		assert.Equal(t, scales, spec.Scales(), name)
	}
}
