package flow

import (
	"net/netip"
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
			for !l.gate.waiting {
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

func TestASharedRateFollowsItsPart(t *testing.T) {
	p := newTestbed(t)
	p.mgr.SharedRate = func(group string, most cc.Rate) cc.Rate {
		assert.Equal(t, "a", group)
		return most / 2
	}
	shared := limited("a", "none", 8e6)
	shared.Shared = true
	alike := limited("a", "static", 8e6)
	alike.Shared, alike.Weight, alike.Params = true, 3, cc.Params{"cwnd_packets": 1e5}
	one, two, own := p.open(shared), p.open(alike), p.open(limited("a", "none", 8e6))
	for _, rate := range []cc.Rate{4e6, 8e6, 1e6, 2e6} {
		p.mgr.SetSharedRate(p.now, "a", 8e6, rate)
		p.mgr.SetSharedRate(p.now, "b", 8e6, 1)
		second(p, one, two, own)
		before := p.mgr.SharedLimits(p.now)
		sent := second(p, one, two, own)
		assert.InEpsilon(t, float64(rate/8), float64(sent[0]+sent[1]), 0.05, "%v", rate)
		assert.InEpsilon(t, 1e6, float64(sent[2]), 0.05, "its rate is not shared")

		after := p.mgr.SharedLimits(p.now)
		require.Len(t, after, 1)
		assert.Equal(t, SharedLimit{"a", 8e6, rate, before[0].Passed + sent[0] + sent[1], 4, true}, after[0])
	}
}

// newHeldRate returns a testbed with a shared rate of a segment per second, which a flow has just used up.
func newHeldRate(t *testing.T) *testbed {
	t.Helper()
	p := newTestbed(t)
	terms := limited("a", "none", 8e6)
	terms.Shared = true
	l := p.open(terms)
	p.mgr.SetSharedRate(p.now, "a", 8e6, cc.Rate(8*mss))
	require.Equal(t, mss, l.send(mss))
	return p
}

// TestASharedRateIsHeldWhileOneWriteUsesItUp has a flow send a segment that takes the rate's time for a second.
func TestASharedRateIsHeldWhileOneWriteUsesItUp(t *testing.T) {
	p := newHeldRate(t)
	p.wait(500 * time.Millisecond)
	assert.True(t, p.mgr.SharedLimits(p.now)[0].Held)
	p.wait(time.Second)
	assert.False(t, p.mgr.SharedLimits(p.now)[0].Held)
}

// TestASharedRateIsHeldWhileFlowsWaitForTurns has waiters of no active flow, with turns that come one second apart.
func TestASharedRateIsHeldWhileFlowsWaitForTurns(t *testing.T) {
	p := newHeldRate(t)
	limit := p.mgr.rateLimits[limitKey{"a", 8e6, true}]
	for range 3 {
		limit.mu.Lock()
		assert.Zero(t, limit.passBytes(p.now, &waiter{wake: func(cc.Time) {}}, mss, mss, mss, 0))
		limit.mu.Unlock()
	}
	p.wait(1500 * time.Millisecond)
	assert.True(t, p.mgr.SharedLimits(p.now)[0].Held)
	p.wait(3 * time.Second)
	assert.False(t, p.mgr.SharedLimits(p.now)[0].Held)
}

func TestAMaximumRateOutlivesTheConnectionsThatUsedItUp(t *testing.T) {
	p := newTestbed(t)
	sent := cc.Bytes(0)
	for range 1000 { // one after another, for a second
		l := p.open(limited("host", "none", 8e6))
		sent += l.send(100 * mss)
		l.Close(p.now)
		assert.Len(t, p.mgr.unusedLimits, 1)
		p.wait(time.Millisecond)
	}
	assert.InEpsilon(t, 1e6, float64(sent), 0.05)
	p.wait(time.Minute)
	p.open(Terms{Algorithm: "none"}).Close(p.now)
	assert.Empty(t, p.mgr.rateLimits, "who owes nothing is forgotten")
	assert.Empty(t, p.mgr.unusedLimits)
}

// Connections come faster than a maximum rate lets them go on, and their clients give up after
// a while. They must not leave their turns behind: later ones would wait for ever longer.
func TestWhoGivesUpWaitingForAMaximumRateDelaysNobody(t *testing.T) {
	const rate, patience = 8e6, 5 * time.Second
	p := newTestbed(t)
	open := func() *leg {
		l := p.openEnforced(limited("host", "none", rate))
		l.report()
		l.wakes = 1
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
					if l.wakes > 0 {
						l.wakes = 0
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
	if late.wakes = 0; late.Take(p.now, 20*mss).Bytes == 0 {
		p.wait(100 * time.Millisecond)
		assert.Positive(t, late.wakes)
	}
}

func TestAMaximumRateMovesWithItsFlow(t *testing.T) {
	p := newTestbed(t)
	a, b := p.open(limited("host", "none", 8e6)), p.open(limited("host", "none", 8e6))
	second(p, a, b)
	require.Zero(t, a.send(mss))
	require.NoError(t, a.Move(p.now, limited("host", "none", 80e6)))
	assert.Positive(t, a.wakes, "what no rate holds back any more may go at once")
	second(p, a, b)
	sent := second(p, a, b)
	assert.InEpsilon(t, 10e6, float64(sent[0]), 0.03)
	assert.InEpsilon(t, 1e6, float64(sent[1]), 0.03)
	require.NoError(t, a.Move(p.now, Terms{Group: "host", Algorithm: "none"}))
	require.NoError(t, b.Move(p.now, Terms{Group: "host", Algorithm: "none"}))
	assert.False(t, a.NeedsGrants())
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
	assert.Positive(t, a.wakes)

	b.Close(p.now)
	total = 0
	for end := p.now.Add(time.Second); p.now < end; p.wait(time.Millisecond) {
		total += a.Take(p.now, 1<<20).Bytes
	}
	assert.InEpsilon(t, 1.01e6, float64(total), 0.07, "one flow alone as well, which may be ahead a little")
}

// fetch has connections one after another take size bytes each over legs that enforce the window, as fast as they
// are let, and returns what they had within a second.
func fetch(p *testbed, terms Terms, size cc.Bytes) (total cc.Bytes) {
	end := p.now.Add(time.Second)
	for p.now < end {
		l := p.openEnforced(terms)
		l.report()
		for left := size; left > 0 && p.now < end; {
			n := l.Take(p.now, left).Bytes
			if n == 0 {
				p.wait(time.Millisecond)
				continue
			}
			l.write(n, n)
			total, left = total+n, left-n
		}
		l.ack(l.r.Pipe)
		l.Close(p.now)
	}
	return total
}

// Linux sends the first ten segments of each connection whatever their pacing rate is.
func TestAMaximumRateHoldsFromTheFirstByteOfEachConnection(t *testing.T) {
	for _, algorithm := range []string{"none", "penstock", "copa", "cubic"} {
		for _, size := range []cc.Bytes{1, 14_000, 70_000, 1 << 30} {
			for _, rate := range []cc.Rate{64e3, 1e6, 100e6} {
				if size == 1 && rate > 64e3 {
					continue // connections would have to open faster than they can
				}
				p := newTestbed(t)
				bytes := float64(rate) / 8
				burst := bytes*(limitBurst+pacedAhead).Seconds() + float64(2*mss)
				first := float64(fetch(p, limited("host", algorithm, rate), size))
				assert.LessOrEqual(t, first, 1.011*bytes+burst, "%s, %d bytes at %v: first second", algorithm, size, rate)
				for range 4 {
					first += float64(fetch(p, limited("host", algorithm, rate), size))
				}
				assert.LessOrEqual(t, first, 5.055*bytes+burst, "%s, %d bytes at %v", algorithm, size, rate)
				if size > 1 {
					assert.GreaterOrEqual(t, first, 4.6*bytes, "%s, %d bytes at %v", algorithm, size, rate)
				}
			}
		}
	}
}

func TestARateOfItsOwnHoldsFromTheFirstByteOfAConnection(t *testing.T) {
	const rate = 64e3
	window := unpacedSegments * mss
	hint := func(p *testbed) {
		p.mgr.Hint(netip.MustParsePrefix("192.0.2.1/32"), cc.Hint{At: p.now, Capacity: 2 * rate})
	}
	for name, terms := range map[string]Terms{
		"connection_rate": {Group: "host", Host: addr("192.0.2.1"), Algorithm: "cubic", ConnectionRate: rate},
		"hint_cap":        {Group: "host", Host: addr("192.0.2.1"), Algorithm: "cubic", HintCap: 0.5},
	} {
		p := newTestbed(t)
		idle := p.openEnforced(terms) // hints are for groups that there are
		hint(p)
		idle.report()
		l := p.openEnforced(terms)
		l.report()
		require.True(t, l.NeedsGrants(), name)
		total, began := cc.Bytes(0), p.now
		for ; total < window && l.NeedsGrants(); p.wait(time.Millisecond) {
			hint(p)
			n := l.Take(p.now, 1<<20).Bytes
			require.LessOrEqual(t, n, 2*mss, name)
			l.write(n, n)
			total += n
			l.report()
		}
		assert.InEpsilon(t, float64(window-2*mss)*8, p.now.Sub(began).Seconds()*rate, 0.05, name)
		assert.False(t, l.NeedsGrants(), "%s: from then on the transport keeps the rate", name)
		assert.Equal(t, cc.Bytes(1<<20), l.Take(p.now, 1<<20).Bytes, name)
	}
}

func TestWhoWaitsForAMaximumRateAsksAgainAfterAMoveThoughNothingIsKnownOfIt(t *testing.T) {
	p := newTestbed(t)
	terms := limited("host", "none", 8e6)
	a, b := p.openEnforced(terms), p.openEnforced(terms)
	for a.Take(p.now, mss).Bytes+b.Take(p.now, mss).Bytes > 0 {
	}
	require.Zero(t, b.wakes)
	terms.Weight = 2
	require.NoError(t, b.Move(p.now, terms))
	assert.Positive(t, b.wakes)
}

func TestRateLimitNeverPassesMoreThanItsRateAndBurst(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rate := cc.Rate(rapid.Int64Range(1e5, 1e10).Draw(rt, "rate"))
		size := cc.Bytes(rapid.Int64Range(100, 65535).Draw(rt, "segment"))
		l := &rateLimit{timers: &timers{}, bucket: pacer{rate: rate, maxBurst: limitBurst}}
		flows := make([]waiter, rapid.IntRange(1, 5).Draw(rt, "flows"))
		now, passed := cc.Time(1), cc.Bytes(0)
		for range 200 {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(30*time.Millisecond)).Draw(rt, "wait")))
			i := rapid.IntRange(0, len(flows)-1).Draw(rt, "flow")
			want := cc.Bytes(rapid.Int64Range(1, 1<<20).Draw(rt, "want"))
			n := l.passBytes(now, &flows[i], want, min(want, size), size, 0)
			require.LessOrEqual(rt, n, want)
			require.Equal(rt, n == 0, flows[i].turn.Load() == turnWaits, "who gets nothing waits for a turn")
			passed += n
			most := rate.BytesIn(now.Sub(1)) + rate.BytesIn(l.bucket.burstTime(size)) + 2
			require.LessOrEqual(rt, passed, most)
		}
	})
}
