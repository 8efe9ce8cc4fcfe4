package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// pulse is an algorithm whose window of 40 segments doubles with every tick, 30 ms
// apart, up to four times, once there has been a loss; nothing else changes it.
type pulse struct {
	cc.NoTick
	window cc.Bytes
	next   cc.Time
}

func init() {
	start := func(cc.Config) cc.Algorithm { return &pulse{window: 40 * mss} }
	cc.Register(cc.Spec{Name: "pulse", About: "test double", New: start})
}

func (a *pulse) OnAck(cc.Ack)     {}
func (a *pulse) OnLoss(l cc.Loss) { a.next = l.Now.Add(30 * time.Millisecond) }

func (a *pulse) OnTick(s cc.State) {
	a.window, a.next = 2*a.window, s.Now.Add(30*time.Millisecond)
}

func (a *pulse) Control() cc.Control {
	if a.window >= 640*mss {
		return cc.Control{Cwnd: a.window}
	}
	return cc.Control{Cwnd: a.window, NextTick: a.next}
}

// stuck opens n flows over enforcing legs that wait for their windows to open, and from
// which no report comes any more. The path is 40 ms long.
func stuck(t *testing.T, n int, terms Terms) (p *testbed, legs []*leg) {
	p = newTestbed(t)
	for range n {
		l := p.openEnforced(terms)
		l.write(mss, mss)
		l.report()
		p.wait(40 * time.Millisecond)
		l.ack(mss)
		legs = append(legs, l)
	}
	for range 5 { // their shares shrink as the others come
		for _, l := range legs {
			l.fill()
		}
		p.wait(10 * time.Millisecond)
	}
	return p, legs
}

// sum is what legs are told together, in segments.
func sum(legs ...*leg) (n float64) {
	for _, l := range legs {
		n += float64(l.limit.Cwnd) / float64(mss)
	}
	return n
}

func TestAWindowThatChangesOnTicksAloneReachesTheLegs(t *testing.T) {
	for _, members := range []int{1, 2, 5, 50} {
		p, legs := stuck(t, members, under("pulse"))
		p.wait(10 * time.Millisecond)
		require.InDelta(t, max(40, 2*float64(members)), sum(legs...), 2, "%d members", members)
		legs[0].r.Lost = mss
		legs[0].report()
		for _, want := range []float64{80, 160, 320, 640} {
			p.wait(30 * time.Millisecond)
			for _, l := range legs {
				require.True(t, l.limit.Now || members > 5, "no acknowledgement brings it out")
			}
			p.wait(10 * time.Millisecond)
			require.InDelta(t, max(want, 2*float64(members)), sum(legs...), 2, "%d members", members)
			p.wait(-10 * time.Millisecond)
		}
	}
}

func TestAHintAndItsExpiryReachTheLegs(t *testing.T) {
	for _, members := range []int{1, 3} {
		p, legs := stuck(t, members, capped(300, 1))
		require.InDelta(t, 300, sum(legs...), 2)
		p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 20e6})
		p.wait(2 * tickInterval)
		assert.InDelta(t, 69+2*float64(members), sum(legs...), 3, "100 kB, and two segments each")
		for _, l := range legs {
			assert.Positive(t, l.limit.PacingRate)
		}
		p.wait(freshHint + 2*tickInterval)
		assert.InDelta(t, 300, sum(legs...), 2)
		for _, l := range legs {
			assert.Zero(t, l.limit.PacingRate)
			assert.True(t, l.limit.Now)
		}
	}
}

func TestTheDepartureOfAMemberReachesTheOthers(t *testing.T) {
	for name, depart := range map[string]func(*leg){
		"it closes": func(l *leg) { l.Close(l.p.now) },
		"it moves":  func(l *leg) { l.moveTo(static(31)) },
	} {
		for _, members := range []int{2, 4, 30} {
			p, legs := stuck(t, members, static(300))
			require.InDelta(t, 300, sum(legs...), 2)
			depart(legs[0])
			p.wait(20 * time.Millisecond)
			assert.InDelta(t, 300, sum(legs[1:]...), 2, "%s: %d members", name, members)
			assert.True(t, legs[1].limit.Now || members > 2)
		}
	}
}

func TestAMoveReachesTheLegThatMoves(t *testing.T) {
	_, legs := stuck(t, 1, static(20))
	told := legs[0].told
	legs[0].moveTo(static(77))
	assert.Equal(t, 77*mss, legs[0].limit.Cwnd)
	assert.Greater(t, legs[0].told, told)
}

// Copa starts anew after a silence in which nothing is acknowledged.
func TestCopasRestartReachesTheLegs(t *testing.T) {
	p := newTestbed(t)
	l := p.openEnforced(under("copa"))
	for range 12 { // round trips
		l.fill()
		p.wait(40 * time.Millisecond)
		l.r.RTT = 40 * time.Millisecond
		l.ack(l.r.Pipe)
	}
	l.fill()
	before, told := l.limit, l.told
	require.Greater(t, before.Cwnd, 20*mss)
	p.wait(time.Minute)
	assert.Less(t, l.limit.Cwnd, before.Cwnd)
	assert.Greater(t, l.told, told)
	assert.Equal(t, l.group().control.Cwnd, l.limit.Cwnd)
}

// What a target is worth in the window is known once the round trip is.
func TestATargetCountsOnceTheRoundTripIsKnown(t *testing.T) {
	p := newTestbed(t)
	a, b := p.openEnforced(static(200)), p.openEnforced(static(200).asGuarantee(5e6))
	a.fill()
	b.fill()
	p.settle()
	assert.Equal(t, 200.0, sum(a, b))
	assert.Equal(t, 100.0, sum(b))
	p.wait(100 * time.Millisecond)
	b.ack(mss)
	p.settle()
	assert.InDelta(t, 5e6*0.1/8, float64(b.limit.Cwnd), 2*float64(mss))
	assert.InDelta(t, 200, sum(a, b), 2)
}
