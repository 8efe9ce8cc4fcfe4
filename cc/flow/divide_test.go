package flow

import (
	"sort"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// segments is what the legs are told of the window once it is divided, without a report
// of theirs.
func segments(legs ...*leg) (all []float64) {
	legs[0].p.settle()
	for _, l := range legs {
		all = append(all, float64(l.limit.Cwnd)/float64(mss))
	}
	return all
}

func weighted(packets float64, w int) Terms {
	terms := static(packets)
	terms.Weight = w
	return terms
}

// several opens n flows over enforcing legs that all have more to send.
func (p *testbed) several(n int, terms Terms) (legs []*leg) {
	for range n {
		l := p.openEnforced(terms)
		l.fill()
		legs = append(legs, l)
	}
	return legs
}

func TestALegGetsNoShareThatItsPeerDoesNotLetItUse(t *testing.T) {
	p := newTestbed(t)
	a, b := p.openEnforced(static(40)), p.openEnforced(static(40))
	b.write(30*mss, 10*mss)
	b.r.RwndFull = true
	b.report()
	a.fill()
	assert.Equal(t, 30.0, segments(a, b)[0], "what is on the wire is on the wire; the rest waits for the peer")
	b.r.RwndFull = false
	b.report()
	assert.Equal(t, []float64{20, 20}, segments(a, b))
}

func TestMembersAreToldTheirShares(t *testing.T) {
	t.Run("one alone has the window", func(t *testing.T) {
		p := newTestbed(t)
		f := p.openEnforced(static(10.5))
		assert.Equal(t, cc.Bytes(10.5*float64(mss)), f.fill().Cwnd)
	})
	t.Run("a newcomer has its level at once, and the others leave it", func(t *testing.T) {
		p := newTestbed(t)
		a, b := p.openEnforced(static(100)), p.openEnforced(static(100))
		assert.Equal(t, 100*mss, a.fill().Cwnd, "alone it has the whole window")
		b.write(mss, 0)
		assert.Equal(t, 50*mss, b.report().Cwnd)
		assert.Equal(t, []float64{50, 50}, segments(a, b))
	})
	t.Run("the first of several has the window with its first grant", func(t *testing.T) {
		p := newTestbed(t)
		a := p.open(static(100))
		p.open(static(100))
		assert.Equal(t, 100*mss, a.send(200*mss))
	})
	t.Run("one that has not sent is told what it may burst", func(t *testing.T) {
		p := newTestbed(t)
		a, b := p.openEnforced(static(100)), p.openEnforced(static(100))
		a.fill()
		assert.Equal(t, 10*mss, b.report().Cwnd)
	})
	t.Run("who uses less leaves the rest to those that want it", func(t *testing.T) {
		p := newTestbed(t)
		a, b, c := p.openEnforced(static(100)), p.openEnforced(static(100)), p.openEnforced(static(100))
		a.fill()
		b.fill()
		c.write(10*mss, 10*mss)
		c.report()
		assert.ElementsMatch(t, []float64{44, 46}, segments(a, b), "in pairs")
		assert.InDelta(t, 33, segments(c)[0], 1, "its own level stays open to it")
	})
	t.Run("who has more in flight than its level and wants no more is due its level", func(t *testing.T) {
		p := newTestbed(t)
		a, b := p.openEnforced(static(100)), p.openEnforced(static(100))
		a.fill()
		a.r.Unsent = 0
		a.r.Written = a.r.Pipe
		a.report()
		b.fill()
		assert.Equal(t, 50.0, segments(b)[0])
	})
	t.Run("by weight", func(t *testing.T) {
		p := newTestbed(t)
		a, b, c := p.openEnforced(weighted(100, 1)), p.openEnforced(weighted(100, 2)), p.openEnforced(weighted(100, 7))
		for _, l := range []*leg{a, b, c} {
			l.fill()
		}
		assert.Equal(t, []float64{10, 20, 70}, segments(a, b, c))
	})
	t.Run("the floor of the light is taken from the heavy", func(t *testing.T) {
		p := newTestbed(t)
		legs := append(p.several(1, weighted(100, 1000)), p.several(10, weighted(100, 1))...)
		assert.Equal(t, []float64{80, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}, segments(legs...))
	})
	t.Run("nobody has less than the floor, whatever the window", func(t *testing.T) {
		assert.Equal(t, []float64{2, 2, 2}, segments(newTestbed(t).several(3, static(3))...))
	})
	t.Run("lower priorities first, and the floor for the rest", func(t *testing.T) {
		p := newTestbed(t)
		later := static(100)
		later.Priority = 1
		a, b := p.openEnforced(later), p.openEnforced(static(100))
		a.fill()
		b.write(mss, 0)
		assert.GreaterOrEqual(t, b.report().Cwnd, 98*mss, "at once, though the other has a window in flight")
		assert.Equal(t, []float64{2, 98}, segments(a, b))
		a.r.Written, a.r.Unsent = a.r.Pipe, 0
		a.report()
		assert.Equal(t, 98.0, segments(b)[0], "also when that wants no more")
		a.write(mss, 0)
		a.report()
		b.r.Unsent, b.r.Pipe = 0, mss
		b.report()
		assert.Equal(t, 99.0, segments(a)[0])
	})
	t.Run("the odd pairs go round, and all are told without a report", func(t *testing.T) {
		p := newTestbed(t)
		legs := p.several(5, static(18))
		p.settle()
		had := make([]float64, len(legs))
		for range 5 {
			told := segments(legs...)
			for i, n := range told {
				had[i] += n
			}
			sort.Float64s(told)
			assert.Equal(t, []float64{2, 4, 4, 4, 4}, told)
			p.wait(turnRTTs*time.Millisecond - tickInterval) // there has been no round trip
		}
		assert.Equal(t, []float64{18, 18, 18, 18, 18}, had)
	})
	t.Run("no segment is left by itself", func(t *testing.T) {
		for window := 6.0; window < 40; window++ {
			sum := 0.0
			for _, n := range segments(newTestbed(t).several(3, static(window))...) {
				assert.Zero(t, int(n)%ackedTogether, "window of %v", window)
				sum += n
			}
			assert.LessOrEqual(t, sum, window)
			assert.GreaterOrEqual(t, sum, window-1, "window of %v", window)
		}
	})
	t.Run("who falls silent while it wants to send is not waited for", func(t *testing.T) {
		p := newTestbed(t)
		a, b := p.openEnforced(static(100)), p.openEnforced(static(100))
		a.fill()
		b.write(10*mss, mss)
		b.report()
		assert.Equal(t, 50.0, segments(a)[0])
		p.wait(2 * time.Second)
		assert.Equal(t, 99.0, segments(a)[0])
	})
	t.Run("who leaves gives its share back", func(t *testing.T) {
		p := newTestbed(t)
		legs := p.several(2, static(100))
		assert.Equal(t, []float64{50, 50}, segments(legs...))
		legs[1].Close(p.now)
		assert.Equal(t, 100*mss, legs[0].limit.Cwnd, "at once")
		assert.Equal(t, legs[0].r.Pipe, legs[0].group().inflight)
	})
	t.Run("the rate is shared as the window is", func(t *testing.T) {
		p := newTestbed(t)
		params := cc.Params{"cwnd_packets": 100, "pacing_mbit": 8}
		terms := Terms{Group: "host", Algorithm: "static", Weight: 3, Params: params}
		a := p.openEnforced(terms)
		terms.Weight = 1
		b := p.openEnforced(terms)
		terms.MaxRate = 1e6
		c := p.openEnforced(terms)
		assert.Equal(t, cc.Rate(8e6), p.openEnforced(Terms{
			Algorithm: "static",
			Params:    terms.Params,
		}).fill().PacingRate)
		for _, l := range []*leg{a, b, c} {
			l.fill()
		}
		p.settle()
		assert.Equal(t, cc.Rate(4.8e6), a.limit.PacingRate)
		assert.Equal(t, cc.Rate(1.6e6), b.limit.PacingRate)
		assert.Equal(t, cc.Rate(1e6), c.limit.PacingRate)

		params = cc.Params{"cwnd_packets": 1e6, "pacing_mbit": 0.001}
		terms = Terms{Group: "slow", Algorithm: "static", Weight: 1000, Params: params}
		p.openEnforced(terms).fill()
		terms.Weight = 1
		light := p.openEnforced(terms)
		light.fill()
		p.settle()
		assert.Equal(t, cc.Rate(1), light.limit.PacingRate, "a rate of 0 would not pace")
	})
}

// A leg that is told nothing new is not told at all: it need not act on each report.
func TestALegIsToldOnlyWhatChanges(t *testing.T) {
	p := newTestbed(t)
	f := p.openEnforced(static(100))
	f.fill()
	told := f.told
	require.LessOrEqual(t, told, 2)
	for range 100 {
		p.wait(10 * time.Millisecond)
		f.write(mss, mss)
		f.ack(mss)
	}
	assert.Equal(t, told, f.told)
}

// Members that begin all at once share the window, too: none of them is told what the
// others had before it came.
func TestACrowdThatComesAtOnceSharesTheWindow(t *testing.T) {
	for _, members := range []int{5, 30, 300} {
		for _, enforced := range []bool{false, true} {
			p := newTestbed(t)
			first := p.openOver(static(1000), enforced)
			first.write(mss, mss)
			first.report()
			p.wait(100 * time.Millisecond)
			first.ack(mss)
			var legs []*leg
			var told cc.Bytes
			for range members {
				l := p.openOver(static(1000), enforced)
				if enforced {
					l.write(100*mss, 0)
					l.report()
				} else {
					l.send(2000 * mss)
				}
				legs = append(legs, l)
			}
			for _, l := range legs {
				told += l.limit.Cwnd
			}
			assert.LessOrEqual(t, told, 1000*mss*5/4, "%d members, enforced: %v", members, enforced)
		}
	}
}
