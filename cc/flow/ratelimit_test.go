package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

func limited(group, algorithm string, rate cc.Rate) Terms {
	return Terms{Group: group, Algorithm: algorithm, MaxRate: rate}
}

// second lets each leg send all it may for a second, by the manager's clock, and
// returns what each sent.
func second(p *testbed, legs ...*leg) []cc.Bytes {
	sent := make([]cc.Bytes, len(legs))
	for end := p.now.Add(time.Second); p.now < end; p.wait(min(time.Millisecond, max(0, p.due.Sub(p.now)))) {
		for i, l := range legs {
			for !l.gate.blocked {
				sent[i] += l.send(100 * mss)
			}
		}
	}
	return sent
}

func TestAGroupsMaximumRateBindsAllItsFlows(t *testing.T) {
	const rate = 8e6 // 1 MB a second
	tests := []struct {
		name  string
		terms []Terms
		want  []float64 // MB
	}{
		{"one flow", []Terms{limited("a", "none", rate)}, []float64{1}},
		{"two flows", []Terms{limited("a", "none", rate), limited("a", "none", rate)}, []float64{0.5, 0.5}},
		{
			"under unlike algorithms",
			[]Terms{limited("a", "none", rate), limited("a", "static", rate)},
			[]float64{0.5, 0.5},
		},
		{"two groups", []Terms{limited("a", "none", rate), limited("b", "none", rate)}, []float64{1, 1}},
		{"two rates in a group", []Terms{limited("a", "none", rate), limited("a", "none", 2*rate)}, []float64{1, 2}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newTestbed(t)
			var legs []*leg
			for _, terms := range tt.terms {
				if terms.Algorithm == "static" {
					terms.Params = cc.Params{"cwnd_packets": 1e5}
				}
				legs = append(legs, p.open(terms))
			}
			second(p, legs...)
			for i, n := range second(p, legs...) {
				assert.InEpsilon(t, tt.want[i], float64(n)/1e6, 0.03, "flow %d", i)
			}
		})
	}
}

func TestAMaximumRateOutlivesTheConnectionsThatUsedItUp(t *testing.T) {
	p := newTestbed(t)
	sent := cc.Bytes(0)
	for range 1000 { // one after another, for a second
		l := p.open(limited("host", "none", 8e6))
		sent += l.send(100 * mss)
		l.Close(p.now)
		p.wait(time.Millisecond)
	}
	assert.InEpsilon(t, 1e6, float64(sent), 0.05)
	p.wait(time.Minute)
	p.open(Terms{Algorithm: "none"}).Close(p.now)
	assert.Empty(t, p.mgr.limits, "who owes nothing is forgotten")
	assert.Empty(t, p.mgr.unused)
}

// Connections come faster than a maximum rate lets them go on, and their clients give up after
// a while. They must not leave their turns behind: later ones would wait for ever longer.
func TestWhoGivesUpWaitingForAMaximumRateDelaysNobody(t *testing.T) {
	const rate, patience = 8e6, 5 * time.Second
	p := newTestbed(t)
	open := func() *leg {
		l := p.openEnforced(limited("host", "none", rate))
		l.report()
		l.woken = 1
		return l
	}
	open() // so that the rate is never a single one's, which its transport would hold
	var legs []*leg
	sent, seconds := cc.Bytes(0), 0
	for ; seconds < 40; seconds++ {
		for range 200 {
			if legs = append(legs, open()); len(legs) > 200*int(patience/time.Second) {
				legs[0].Close(p.now)
				legs = legs[1:]
			}
			for range 5 {
				for _, l := range legs {
					if l.woken > 0 {
						l.woken = 0
						for n := mss; n > 0; sent += n {
							n = l.Take(p.now, 20*mss).Bytes
						}
					}
				}
				p.wait(time.Millisecond)
			}
		}
	}
	assert.InEpsilon(t, rate/8*seconds, float64(sent), 0.05)

	late := open()
	for _, l := range legs {
		l.Close(p.now)
	}
	if late.woken = 0; late.Take(p.now, 20*mss).Bytes == 0 {
		p.wait(100 * time.Millisecond)
		assert.Positive(t, late.woken)
	}
}

func TestAMaximumRateMovesWithItsFlow(t *testing.T) {
	p := newTestbed(t)
	a, b := p.open(limited("host", "none", 8e6)), p.open(limited("host", "none", 8e6))
	second(p, a, b)
	require.Zero(t, a.send(mss))
	require.NoError(t, a.Move(p.now, limited("host", "none", 80e6)))
	assert.Positive(t, a.woken, "what no rate holds back any more may go at once")
	second(p, a, b)
	sent := second(p, a, b)
	assert.InEpsilon(t, 10e6, float64(sent[0]), 0.03)
	assert.InEpsilon(t, 1e6, float64(sent[1]), 0.03)
	require.NoError(t, a.Move(p.now, Terms{Group: "host", Algorithm: "none"}))
	require.NoError(t, b.Move(p.now, Terms{Group: "host", Algorithm: "none"}))
	assert.False(t, a.HasMaxRate())
	assert.Equal(t, 100*mss, b.send(100*mss))
}

// A leg that enforces the window is asked all the same: what has not been
// written cannot be sent, whatever becomes of the window.
func TestAMaximumRateHoldsBackWhatIsWrittenToALegThatEnforcesTheWindow(t *testing.T) {
	p := newTestbed(t)
	a, b := p.openEnforced(limited("host", "none", 8e6)), p.openEnforced(limited("host", "none", 8e6))
	a.report()
	b.report()
	total := cc.Bytes(0)
	for end := p.now.Add(time.Second); p.now < end; p.wait(time.Millisecond) {
		p.wait(0)
		total += a.Take(p.now, 1<<20).Bytes + b.Take(p.now, 1<<20).Bytes
		a.report() // which must not take their turns away
		b.report()
	}
	assert.InEpsilon(t, 1e6, float64(total), 0.05)
	assert.Positive(t, a.woken)

	b.Close(p.now)
	assert.Equal(t, cc.Bytes(1<<20), a.Take(p.now, 1<<20).Bytes, "one flow alone is held by its transport")
}

func TestWhoWaitsForAMaximumRateAsksAgainAfterAMoveThoughNothingIsKnownOfIt(t *testing.T) {
	p := newTestbed(t)
	terms := limited("host", "none", 8e6)
	a, b := p.openEnforced(terms), p.openEnforced(terms)
	for a.Take(p.now, mss).Bytes+b.Take(p.now, mss).Bytes > 0 {
	}
	require.Zero(t, b.woken)
	terms.Weight = 2
	require.NoError(t, b.Move(p.now, terms))
	assert.Positive(t, b.woken)
}

func TestRateLimitNeverPassesMoreThanItsRateAndBurst(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rate := cc.Rate(rapid.Int64Range(1e5, 1e10).Draw(rt, "rate"))
		size := cc.Bytes(rapid.Int64Range(100, 65535).Draw(rt, "segment"))
		l := &rateLimit{timers: &timers{}, bucket: pacer{rate: rate, most: limitBurst}}
		flows := make([]waiter, rapid.IntRange(1, 5).Draw(rt, "flows"))
		now, passed := cc.Time(1), cc.Bytes(0)
		for range 200 {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(30*time.Millisecond)).Draw(rt, "wait")))
			i := rapid.IntRange(0, len(flows)-1).Draw(rt, "flow")
			want := cc.Bytes(rapid.Int64Range(1, 1<<20).Draw(rt, "want"))
			n := l.take(now, &flows[i], want, min(want, size), size)
			require.LessOrEqual(rt, n, want)
			require.Equal(rt, n == 0, flows[i].turn.Load() == turnWaits, "who gets nothing waits for a turn")
			passed += n
			most := rate.BytesIn(now.Sub(1)) + rate.BytesIn(l.bucket.burst(size)) + 2
			require.LessOrEqual(rt, passed, most)
		}
	})
}
