package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// measured opens held flows whose macroflow has seen a round trip of 100 ms, so
// that 1 Mbit/s is 12500 bytes in flight.
func measured(t *testing.T, terms ...Terms) (*path, []*leg) {
	t.Helper()
	p := newPath(t)
	var legs []*leg
	for _, each := range terms {
		l := p.openHeld(each)
		l.r.RTT = 100 * time.Millisecond
		l.write(mss, mss)
		p.wait(100 * time.Millisecond)
		l.ack(mss)
		l.r.RTT = 0
		legs = append(legs, l)
	}
	return p, legs
}

// mbit is the rate of a share over the round trip of measured.
func mbit(share cc.Bytes) float64 { return cc.RateOf(share, 100*time.Millisecond).Mbps() }

// windowOf is the static window for a rate over the round trip of measured.
func windowOf(rate cc.Rate) Terms {
	return static(float64(rate.BytesIn(100*time.Millisecond)) / float64(mss))
}

func (t Terms) asGuarantee(target cc.Rate) Terms {
	t.Class, t.Target = Guarantee, target
	return t
}

// shares has all legs want more and each learn of the others.
func shares(legs []*leg) (all []float64) {
	for _, l := range legs {
		l.write(1000*mss, 0)
		l.report()
	}
	for _, l := range legs {
		all = append(all, mbit(l.report().Cwnd))
	}
	return all
}

func TestGuaranteesShareByMaxMinUpToTheirTargets(t *testing.T) {
	tests := []struct {
		name     string
		capacity cc.Rate
		want     []float64
	}{
		{"more than there is: who asks for more has what the others leave", 25e6, []float64{7.5, 7.5, 6, 4}},
		{"much more than there is", 20e6, []float64{5.33, 5.33, 5.33, 4}},
		{"so much more that all are equal", 12e6, []float64{3, 3, 3, 3}},
		{"just what there is", 28e6, []float64{10, 8, 6, 4}},
		{"less than there is: a tenth above", 40e6, []float64{11, 8.8, 6.6, 4.4}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var terms []Terms
			for _, target := range []cc.Rate{10e6, 8e6, 6e6, 4e6} {
				terms = append(terms, windowOf(tt.capacity).asGuarantee(target))
			}
			_, legs := measured(t, terms...)
			const segment = float64(mss) * 8 / 1e5
			sum := 0.0
			for i, got := range shares(legs) {
				assert.InDelta(t, tt.want[i], got, 2.5*segment, "member %d", i)
				sum += got
			}
			assert.LessOrEqual(t, sum, tt.capacity.Mbps()+0.001)
		})
	}
}

func TestWhatAMemberIsDue(t *testing.T) {
	const capacity = 20e6
	bulk := windowOf(capacity)
	with := func(change func(*Terms)) Terms {
		terms := bulk
		change(&terms)
		return terms
	}
	const floor = 2 * float64(mss) * 8 / 1e5 // two segments
	tests := []struct {
		name  string
		terms []Terms
		want  []float64
	}{
		{"a guarantee has its target, the others the rest", []Terms{bulk, bulk.asGuarantee(5e6), bulk}, []float64{7.5, 5, 7.5}},
		{"guarantees for all there is leave the others their floors", []Terms{bulk, bulk.asGuarantee(30e6)}, []float64{floor, 20 - floor}},
		{"a guarantee of an unknown rate is one of the others", []Terms{bulk, bulk.asGuarantee(0)}, []float64{10, 10}},
		{"by weight where two guarantees ask for too much", []Terms{
			with(func(t *Terms) { *t = t.asGuarantee(30e6); t.Weight = 3 }), bulk.asGuarantee(30e6),
		}, []float64{15, 5}},
		{"a minimum is had under any weight", []Terms{
			with(func(t *Terms) { t.Weight = 1000 }), with(func(t *Terms) { t.MinRate = 8e6 }),
		}, []float64{12, 8}},
		{"a minimum is no more than that: who is due more has that", []Terms{
			bulk, with(func(t *Terms) { t.MinRate = 8e6 }),
		}, []float64{10, 10}},
		{"a minimum is had under any priority", []Terms{
			bulk, with(func(t *Terms) { t.Priority, t.MinRate = 1, 8e6 }), with(func(t *Terms) { t.Priority = 2 }),
		}, []float64{12 - floor, 8, floor}},
		{"minimums beyond the window, each at most the window, shrink together", []Terms{
			with(func(t *Terms) { t.MinRate = 30e6 }), with(func(t *Terms) { t.MinRate = 10e6 }), bulk,
		}, []float64{13.1, 6.6, floor}},
		{"a guarantee of lower priority waits", []Terms{
			bulk, with(func(t *Terms) { *t = t.asGuarantee(5e6); t.Priority = 1 }),
		}, []float64{20 - floor, floor}},
		{"one of higher priority leaves what is above its target", []Terms{
			with(func(t *Terms) { t.Priority = 1 }), bulk.asGuarantee(5e6),
		}, []float64{14.5, 5.5}},
		{"who may not send faster leaves the rest", []Terms{
			bulk, with(func(t *Terms) { t.MaxRate = 2e6 }),
		}, []float64{18 - floor, 2 + floor}},
		{"a maximum holds for a guarantee", []Terms{
			bulk, with(func(t *Terms) { *t = t.asGuarantee(8e6); t.MaxRate = 4e6 }),
		}, []float64{16, 4}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, legs := measured(t, tt.terms...)
			for i, got := range shares(legs) {
				assert.InDelta(t, tt.want[i], got, 0.25, "member %d, in Mbit/s", i)
			}
		})
		t.Run(tt.name+", where the relay asks, too", func(t *testing.T) {
			c := &crowd{path: newPath(t)}
			for _, terms := range tt.terms {
				scaled := terms             // the path of crowd is 20 ms long
				scaled.Params = bulk.Params // so five times the rate fits the same window
				scaled.Target, scaled.MinRate, scaled.MaxRate = 5*terms.Target, 5*terms.MinRate, 5*terms.MaxRate
				c.join(scaled)
			}
			insatiable := func(int, cc.Time) cc.Bytes { return 1 << 20 }
			c.run(200*time.Millisecond, insatiable)
			for i := range c.got {
				c.got[i] = 0
			}
			c.run(time.Second, insatiable)
			for i, got := range c.got {
				assert.InDelta(t, tt.want[i], cc.RateOf(got, time.Second).Mbps()/5, 0.6, "member %d, in Mbit/s", i)
			}
		})
	}
}

func TestAGuaranteeIsPacedAtATenthAboveItsTarget(t *testing.T) {
	_, legs := measured(t, windowOf(20e6).asGuarantee(5e6))
	assert.Equal(t, cc.Rate(5.5e6), legs[0].fill().PacingRate)
	s := legs[0].Snapshot()
	assert.Equal(t, Guarantee, s.Class)
	assert.Equal(t, cc.Rate(5e6), s.Target)
}

func TestAWindowDoesNotGrowForThoseThatMayNotUseIt(t *testing.T) {
	_, legs := measured(t, windowOf(20e6).asGuarantee(5e6), windowOf(20e6).asGuarantee(5e6))
	shares(legs)
	legs[0].macro.cwndFullAt = 0
	shares(legs)
	assert.Zero(t, legs[0].macro.cwndFullAt, "both have all they may")
	legs[0].Move(legs[0].p.now, windowOf(20e6)) //nolint:errcheck // to the same macroflow
	shares(legs)
	assert.NotZero(t, legs[0].macro.cwndFullAt)
}

func TestANewcomerGetsItsShareOverARoundTrip(t *testing.T) {
	join := func(class Class) (at []float64) {
		c := &crowd{path: newPath(t)}
		c.join(static(100))
		c.run(100*time.Millisecond, greedy)
		terms := static(100)
		terms.Class = class
		c.join(terms)
		for range 5 {
			c.run(5*time.Millisecond, greedy)
			at = append(at, float64(c.legs[1].inflight()/mss))
		}
		return at
	}
	gentle := join(Bulk)
	assert.InDelta(t, 17, gentle[0], 8, "a quarter of a round trip, and a burst")
	assert.InDelta(t, 30, gentle[1], 8)
	assert.InDelta(t, 50, gentle[4], 2)
	assert.InDelta(t, 50, join(DelaySensitive)[0], 1, "one that is awaited has it at once")
}

func TestOneThatHoldsItsWindowIsPacedToItsShareForARoundTrip(t *testing.T) {
	p, legs := measured(t, static(100), static(100))
	a, b := legs[0], legs[1]
	a.fill()
	assert.Zero(t, b.report().PacingRate, "what it knows of the others is new")
	p.wait(2 * time.Second)
	a.report()
	want := cc.RateOf(50*mss, 100*time.Millisecond)
	assert.Equal(t, want, b.report().PacingRate, "before it sends")
	p.wait(time.Millisecond)
	b.write(100*mss, 10*mss)
	assert.Equal(t, want, b.report().PacingRate, "and while it does")
	p.wait(100 * time.Millisecond)
	assert.Zero(t, b.ack(mss).PacingRate, "until it is answered")
	assert.Equal(t, 50*mss, b.report().Cwnd)
}

func TestTheAwaitedAreFirstInLine(t *testing.T) {
	p := newPath(t)
	awaited := static(20)
	awaited.Class = DelaySensitive
	first := p.open(static(20))
	require.Equal(t, 20*mss, first.send(20*mss))
	second, third := p.open(static(20)), p.open(awaited)
	for _, l := range []*leg{second, third} {
		for l.send(64*mss) > 0 {
		}
	}
	require.Zero(t, second.woken+third.woken)
	var order []string
	second.wake, third.wake = func() { order = append(order, "bulk") }, func() { order = append(order, "awaited") }
	p.wait(10 * time.Millisecond)
	second.r.Pipe, second.r.Written = 2*mss, 2*mss
	second.ack(2 * mss)
	third.ack(third.r.Pipe)
	assert.Equal(t, "awaited", order[len(order)-1])
	_ = first
}

func TestAMemberLendsWhatItIsDueAndDoesNotWant(t *testing.T) {
	p := newPath(t)
	a, b := p.open(static(100)), p.open(static(100))
	for a.send(64*mss) > 0 {
	}
	assert.Equal(t, 50*mss, b.Snapshot().Share)
	assert.Equal(t, 50*mss, b.Snapshot().Lent)
	assert.Zero(t, a.Snapshot().Lent)
	b.send(10 * mss)
	assert.LessOrEqual(t, b.Snapshot().Lent, 50*mss)
	b.Close(p.now)
	assert.Zero(t, b.Snapshot().Lent)
}

func TestTermsThatContradictThemselvesAreRefused(t *testing.T) {
	for want, change := range map[string]func(*Terms){
		"class 7 is none":      func(t *Terms) { t.Class = 7 },
		"must not be negative": func(t *Terms) { t.MinRate = -1 },
		"a minimum rate of 6mbit is above the target of 5mbit":    func(t *Terms) { *t = t.asGuarantee(5e6); t.MinRate = 6e6 },
		"a minimum rate of 6mbit is above the maximum of 5mbit":   func(t *Terms) { t.MaxRate, t.MinRate = 5e6, 6e6 },
		"target -1bit and minimum rate 0bit must not be negative": func(t *Terms) { *t = t.asGuarantee(-1) },
	} {
		terms := static(10)
		change(&terms)
		require.ErrorContains(t, terms.Check(), want)
		_, err := new(Manager).Open(1, terms, nil)
		require.ErrorContains(t, err, "flow: ")
	}
	require.NoError(t, static(10).Check())
}

// TestTheWindowIsDividedWell draws any members and checks what a division promises.
func TestTheWindowIsDividedWell(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		window := rapid.Float64Range(1, 300).Draw(rt, "window")
		var terms []Terms
		for range rapid.IntRange(2, 12).Draw(rt, "members") {
			each := static(window)
			each.Weight = rapid.IntRange(0, 5).Draw(rt, "weight")
			each.Priority = rapid.IntRange(-1, 1).Draw(rt, "priority")
			each.Class = Class(rapid.IntRange(0, 2).Draw(rt, "class"))
			if each.Class == Guarantee {
				each.Target = cc.Rate(rapid.IntRange(0, 20e6).Draw(rt, "target"))
			}
			if rapid.Bool().Draw(rt, "minimum") {
				each.MinRate = cc.Rate(rapid.IntRange(0, 20e6).Draw(rt, "min"))
			}
			if each.Target > 0 {
				each.MinRate = min(each.MinRate, each.Target)
			}
			terms = append(terms, each)
		}
		p, legs := measured(t, terms...)
		m := legs[0].macro
		var used cc.Bytes // by those that do not contend
		for _, l := range legs {
			if rapid.Bool().Draw(rt, "idle") {
				l.r.Pipe = cc.Bytes(rapid.IntRange(0, 100).Draw(rt, "pipe")) * mss
				l.r.Written = l.r.Acked + l.r.Pipe
			} else {
				l.write(1000*mss, 0)
			}
			l.report()
		}
		m.allot(p.now, nil)
		W := m.ctl.Cwnd
		var sum, floors, shared cc.Bytes
		hungry := false // somebody could use more
		for _, f := range m.members {
			c := f.claim
			sum += c.due
			shared += c.share
			if c.contends {
				floors += min(W, f.floor())
				hungry = hungry || c.due < c.most
				require.GreaterOrEqual(rt, c.share, min(W, f.floor()))
				require.LessOrEqual(rt, c.share, max(c.due+f.mss()-1, c.least))
			} else {
				floors += min(f.floor(), c.due)
				used += c.due
				require.LessOrEqual(rt, c.due, f.counted())
			}
			require.LessOrEqual(rt, c.due, c.most)
			require.GreaterOrEqual(rt, c.due, c.least)
		}
		require.LessOrEqual(rt, sum, max(W, floors), "no more is given than there is")
		require.LessOrEqual(rt, shared+used, max(W, floors))
		if hungry {
			require.GreaterOrEqual(rt, sum, W-cc.Bytes(len(legs))*16, "nothing is kept from those that could use it")
		}
		// Max-min: who is due less for its weight than an equal is due as much as it may.
		for _, f := range m.members {
			for _, g := range m.members {
				if f.place == g.place && f.claim.due < f.claim.most && g.claim.due > g.claim.least && f.target == 0 {
					require.GreaterOrEqual(rt, f.claim.due/f.weight+2, g.claim.due/g.weight, "weighted max-min")
				}
				if f.terms.Priority < g.terms.Priority && f.claim.due+8 < f.claim.most {
					require.LessOrEqual(rt, g.claim.due, g.claim.least+16, "strict priority")
				}
			}
		}
	})
}

func TestOneFullQueueIsOneLossEventForAllMembers(t *testing.T) {
	p, legs := measured(t, static(100), static(100))
	a, b := legs[0], legs[1]
	for _, l := range legs {
		l.write(50*mss, 50*mss)
		l.report()
	}
	p.wait(100 * time.Millisecond)
	a.r.Lost, a.r.Sacked = mss, 3*mss
	a.ack(3 * mss)
	first := p.now
	p.wait(150 * time.Millisecond)
	b.r.At, b.r.Acked, b.r.Sacked = p.now, b.r.Acked+3*mss, 3*mss
	assert.Equal(t, first, b.lostSince(b.r), "what it lost had left when the first loss was found")
	b.r.Acked, b.r.Sacked = b.r.Acked+47*mss, 0
	assert.Equal(t, p.now.Add(-b.macro.rtt.srtt), b.lostSince(b.r), "what left later is another")
}
