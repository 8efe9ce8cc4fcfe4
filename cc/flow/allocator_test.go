package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// measured opens flows over legs that enforce the window, in a group that has seen a
// round trip of 100 ms, so that 1 Mbit/s is 12500 bytes in flight.
func measured(t *testing.T, terms ...Terms) (*testbed, []*leg) {
	t.Helper()
	p := newTestbed(t)
	var legs []*leg
	for _, each := range terms {
		l := p.openEnforced(each)
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

// shares has all legs want more and returns the limit of each once the window is divided.
func shares(legs []*leg) (all []float64) {
	for _, l := range legs {
		l.write(1000*mss, 0)
		l.report()
	}
	legs[0].p.waitForDivision()
	for _, l := range legs {
		all = append(all, mbit(l.limit.Cwnd))
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
		{
			"a guarantee has its target, the others the rest",
			[]Terms{bulk, bulk.asGuarantee(5e6), bulk},
			[]float64{7.5, 5, 7.5},
		},
		{
			"guarantees for all there is leave the others their floors",
			[]Terms{bulk, bulk.asGuarantee(30e6)},
			[]float64{floor, 20 - floor},
		},
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
			c := &crowd{testbed: newTestbed(t)}
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
	legs[0].group().cwndFullAt = 0
	shares(legs)
	assert.Zero(t, legs[0].group().cwndFullAt, "both have all they may")
	legs[0].Move(legs[0].p.now, windowOf(20e6)) //nolint:errcheck // to the same group
	shares(legs)
	assert.NotZero(t, legs[0].group().cwndFullAt)
}

func TestOnceAllHaveAllTheyMayTheWindowIsSaidNotToLimit(t *testing.T) {
	_, legs := measured(t, windowOf(20e6).asGuarantee(5e6), windowOf(20e6).asGuarantee(5e6))
	g := legs[0].group()
	shares(legs)
	g.cwndFullAt = legs[0].p.now // though it did less than a round trip ago
	assert.False(t, g.cwndLimited())
	legs[0].Move(legs[0].p.now, windowOf(20e6)) //nolint:errcheck // to the same group
	shares(legs)
	assert.True(t, g.cwndLimited())
}

func TestANewcomerGetsItsShareOverARoundTrip(t *testing.T) {
	join := func(class Class) (at []float64) {
		c := &crowd{testbed: newTestbed(t)}
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

func TestOneThatEnforcesItsWindowIsPacedToItsShareForARoundTripAfterSilence(t *testing.T) {
	p, legs := measured(t, static(100), static(100))
	a, b := legs[0], legs[1]
	a.fill()
	p.waitForDivision()
	assert.Zero(t, b.limit.PacingRate, "what it knows of the others is new")
	for range 20 { // a is never without bytes in flight
		p.wait(100 * time.Millisecond)
		a.ack(mss)
		a.write(0, 0)
		a.fill()
	}
	assert.Equal(t, 10*mss, b.limit.Cwnd, "before it sends it is told what it may burst")
	b.write(100*mss, 10*mss)
	b.report()
	assert.Equal(t, 50*mss, b.limit.Cwnd)
	share := cc.RateOf(50*mss, 100*time.Millisecond)
	assert.Equal(t, share, b.limit.PacingRate, "and once it does, its share over a round trip")
	p.wait(100 * time.Millisecond)
	assert.Zero(t, b.ack(mss).PacingRate, "until it is answered")
	assert.Equal(t, 50*mss, b.limit.Cwnd)
}

func TestAMemberLendsWhatItIsDueAndDoesNotWant(t *testing.T) {
	p := newTestbed(t)
	a, b := p.open(static(100)), p.open(static(100))
	b.send(mss)
	for a.send(64*mss) > 0 {
	}
	p.waitForDivision()
	assert.Equal(t, 50*mss, b.Snapshot().Share)
	assert.Equal(t, 49*mss, b.Snapshot().Lent)
	assert.Zero(t, a.Snapshot().Lent)
	b.send(10 * mss)
	assert.Equal(t, 39*mss, b.Snapshot().Lent)
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
		_, err := new(Manager).Open(1, terms, Leg{})
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
		g := legs[0].group()
		for _, l := range legs {
			if rapid.Bool().Draw(rt, "idle") {
				l.r.Pipe = cc.Bytes(rapid.IntRange(0, 100).Draw(rt, "pipe")) * mss
				l.r.Written = l.r.Acked + l.r.Pipe
			} else {
				l.write(1000*mss, 0)
			}
			l.report()
		}
		p.wait(time.Duration(rapid.IntRange(1, 1000).Draw(rt, "ms")) * time.Millisecond)
		g.divideWindow(p.now)
		W := g.control.Cwnd
		var due, shared, floors cc.Bytes // of the members that contend
		var least, most cc.Bytes         // that the others use
		hungry := false                  // a member could use more
		active := g.allocator.active
		for _, m := range active {
			if !m.contends {
				require.LessOrEqual(rt, m.usable, m.counted)
				least += m.usableFloor
				most += m.usable
				continue
			}
			due += m.allotted
			shared += m.inflightLimit
			floors += m.minimum
			hungry = hungry || m.allotted < m.usable
			require.GreaterOrEqual(rt, m.allotted, m.usableFloor)
			require.GreaterOrEqual(rt, m.inflightLimit, min(W, m.minimum))
			if len(active) > 1 { // a lone member has all of the window, whatever its terms
				require.LessOrEqual(rt, m.allotted, m.usable)
				require.LessOrEqual(rt, m.inflightLimit, m.allotted+ackedTogether*m.segment)
			}
		}
		require.LessOrEqual(rt, due+least, max(W, floors+least), "no more is given than there is")
		require.LessOrEqual(rt, shared+least, max(W, floors+least)+cc.Bytes(len(active)),
			"nor is it when it is cut to whole pairs")
		if hungry {
			require.GreaterOrEqual(rt, due+most, W-cc.Bytes(len(active))*16,
				"nothing is kept from those that could use it")
		}
		// Max-min: who is due less for its weight than an equal is due as much as it may.
		for _, a := range active {
			for _, b := range active {
				if !a.contends || !b.contends {
					continue
				}
				able := a.usable
				if a.targetBytes > 0 {
					able = min(able, a.targetBytes)
				}
				if a.priority == b.priority && (a.targetBytes > 0) == (b.targetBytes > 0) && a.allotted < able && b.allotted > b.usableFloor {
					require.GreaterOrEqual(rt, a.allotted/a.weight+2, b.allotted/b.weight, "weighted max-min")
				}
				if a.priority < b.priority && a.allotted+8 < a.usable {
					require.LessOrEqual(rt, b.allotted, b.usableFloor+16, "strict priority")
				}
			}
		}
	})
}

func TestOneFullQueueIsOneLossEventForAllMembers(t *testing.T) {
	losses := watchLosses(t)
	watchedCwnd = 100 * mss
	t.Cleanup(func() { watchedCwnd = 10 * mss })
	p, legs := measured(t, under("watched"), under("watched"))
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
	b.r.Lost, b.r.Sacked = mss, 3*mss
	b.ack(3 * mss)
	require.Len(t, *losses, 2)
	assert.Equal(t, first, (*losses)[1].SentAt, "what it lost had left when the first loss was found")
	b.r.Sacked = 0
	b.ack(47 * mss)
	b.r.Lost = 2 * mss
	b.report()
	require.Len(t, *losses, 3)
	assert.Equal(t, p.now.Add(-b.group().rtt.srtt), (*losses)[2].SentAt, "what left later is another")
}
