package flow

import (
	"sort"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// segments is the limits of the legs once the window is divided, without a report
// of theirs.
func segments(legs ...*leg) (all []float64) {
	legs[0].p.waitForDivision()
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
		p.waitForDivision()
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
		p.waitForDivision()
		assert.Equal(t, cc.Rate(4.8e6), a.limit.PacingRate)
		assert.Equal(t, cc.Rate(1.6e6), b.limit.PacingRate)
		assert.Equal(t, cc.Rate(1e6), c.limit.PacingRate)

		params = cc.Params{"cwnd_packets": 1e6, "pacing_mbit": 0.001}
		terms = Terms{Group: "slow", Algorithm: "static", Weight: 1000, Params: params}
		p.openEnforced(terms).fill()
		terms.Weight = 1
		light := p.openEnforced(terms)
		light.fill()
		p.waitForDivision()
		assert.Equal(t, cc.Rate(1), light.limit.PacingRate, "a rate of 0 would not pace")
	})
}

// Apply is called only with new limits: a leg need not act on each report.
func TestALegIsToldOnlyWhatChanges(t *testing.T) {
	p := newTestbed(t)
	f := p.openEnforced(static(100))
	f.fill()
	told := f.applied
	require.LessOrEqual(t, told, 2)
	for range 100 {
		p.wait(10 * time.Millisecond)
		f.write(mss, mss)
		f.ack(mss)
	}
	assert.Equal(t, told, f.applied)
}

// Members that begin all at once share the window, too: none of them gets what the
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

// crowd lets the members of one group send for a while over a path that
// returns every segment after 20 ms, and counts what each got through.
type crowd struct {
	*testbed
	legs []*leg
	wire []arrival
	got  []cc.Bytes
}

type arrival struct {
	at  cc.Time
	leg int
	n   cc.Bytes
}

func (c *crowd) run(d time.Duration, wants func(i int, now cc.Time) cc.Bytes) {
	for end := c.now.Add(d); c.now < end; c.wait(time.Millisecond) {
		for len(c.wire) > 0 && c.wire[0].at <= c.now {
			a := c.wire[0]
			c.wire = c.wire[1:]
			if c.legs[a.leg] != nil {
				c.got[a.leg] += a.n
				c.legs[a.leg].ack(a.n)
			}
			c.turn(wants)
		}
		c.wait(0)
		c.turn(wants)
	}
}

// turn lets every flow that is not parked send what it wants, as its relay would.
func (c *crowd) turn(wants func(int, cc.Time) cc.Bytes) {
	for again := true; again; {
		again = false
		for i, l := range c.legs {
			if l == nil || l.gate.waiting {
				continue
			}
			n := wants(i, c.now)
			if n == 0 {
				continue
			}
			if got := l.send(n); got > 0 {
				c.wire = append(c.wire, arrival{c.now.Add(20 * time.Millisecond), i, got})
				again = wants(i, c.now) > 0 && l.want > 0
			}
		}
	}
}

func (c *crowd) join(t Terms) int {
	c.legs = append(c.legs, c.open(t))
	c.got = append(c.got, 0)
	return len(c.legs) - 1
}

func greedy(int, cc.Time) cc.Bytes { return 64 * 1024 }

func TestMembersShareOneWindow(t *testing.T) {
	tests := []struct {
		name    string
		weights []int
	}{
		{"equally without weights", []int{0, 0, 0, 0, 0}},
		{"two flows equally", []int{1, 1}},
		{"by weight", []int{1, 2, 4}},
		{"by weight when the window is hardly a segment each", []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := &crowd{testbed: newTestbed(t)}
			total := 0
			for _, w := range tt.weights {
				terms := static(42)
				terms.Weight = w
				c.join(terms)
				total += max(1, w)
			}
			c.run(2*time.Second, greedy)
			var sum cc.Bytes
			for _, n := range c.got {
				sum += n
			}
			for i, w := range tt.weights {
				want := float64(sum) * float64(max(1, w)) / float64(total)
				assert.InEpsilon(t, want, float64(c.got[i]), 0.1, "member %d of weight %d", i, w)
			}
			assert.InEpsilon(t, float64(42*mss*100), float64(sum), 0.05, "together they use the window, and no more")
		})
	}
}

func TestSharesShrinkAsMembersArrive(t *testing.T) {
	c := &crowd{testbed: newTestbed(t)}
	for n := 1; n <= 5; n++ {
		c.join(static(100))
		c.run(40*time.Millisecond, greedy)
		var sum cc.Bytes
		for _, l := range c.legs {
			s := l.Snapshot()
			part := float64(100 * mss / cc.Bytes(n))
			assert.InDelta(t, part, float64(s.Share), ackedTogether*float64(mss), "in pairs, if there are others")
			assert.InDelta(t, 100/n, float64(s.Inflight/mss), 2, "a newcomer has its share within two round trips")
			sum += s.Inflight
		}
		assert.LessOrEqual(t, sum, 100*mss)
	}
}

func TestAnIdleMemberLendsItsShareAndHasItBack(t *testing.T) {
	c := &crowd{testbed: newTestbed(t)}
	c.join(static(100))
	c.join(static(100))
	idle := true
	wants := func(i int, now cc.Time) cc.Bytes {
		if i == 1 && idle {
			return 0
		}
		return greedy(i, now)
	}
	c.run(100*time.Millisecond, wants)
	assert.InDelta(t, float64(100*mss), float64(c.legs[0].inflight()), float64(mss), "alone it has the whole window")
	idle = false
	c.run(45*time.Millisecond, wants)
	assert.InDelta(t, 50, float64(c.legs[1].inflight()/mss), 1)
	assert.InDelta(t, 50, float64(c.legs[0].inflight()/mss), 1)
	c.legs[0].Close(c.now)
	c.legs[0] = nil
	c.run(45*time.Millisecond, wants)
	assert.InDelta(t, float64(100*mss), float64(c.legs[1].inflight()), float64(mss),
		"what a member leaves behind goes to the others")
}

func TestPriorityComesFirstButNobodyStarves(t *testing.T) {
	c := &crowd{testbed: newTestbed(t)}
	first, second := static(40), static(40)
	second.Priority = 1
	c.join(second)
	c.join(first)
	c.run(time.Second, greedy)
	assert.Greater(t, c.got[1], 8*c.got[0])
	assert.GreaterOrEqual(t, c.got[0], 50*mss, "two segments a round trip are everybody's")
}

func TestGroupsDoNotShare(t *testing.T) {
	p := newTestbed(t)
	a, b := static(10), static(10)
	b.Group = "other"
	c := static(20)
	fa, fb, fc := p.open(a), p.open(b), p.open(c)
	assert.Equal(t, 10*mss, fa.send(100*mss))
	assert.Equal(t, 10*mss, fb.send(100*mss))
	assert.Equal(t, 20*mss, fc.send(100*mss), "the same host with other parameters is another group")
}

func TestAGroupOutlivesItsLastMemberForAWhile(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(mss)
	p.wait(30 * time.Millisecond)
	f.ack(mss)
	f.Close(p.now)

	p.wait(linger / 2)
	g := p.open(static(10))
	g.send(mss)
	assert.Equal(t, 30*time.Millisecond, g.Snapshot().MinRTT, "the next flow finds the path known")
	g.Close(p.now)

	p.wait(memoryLasts + time.Second)
	h := p.open(static(10))
	h.send(mss)
	assert.Zero(t, h.Snapshot().MinRTT)
	assert.Len(t, p.mgr.groups, 1)
}

func TestIdleGroupsAreBounded(t *testing.T) {
	p := newTestbed(t)
	for i := range maxIdleGroups + 100 {
		terms := static(10)
		terms.Group = string(rune(i))
		p.open(terms).Close(p.now)
	}
	assert.LessOrEqual(t, len(p.mgr.groups), maxIdleGroups)
}

// TestAccountingHolds drives random crowds and checks what must always be true.
func TestAccountingHolds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		window := rapid.Float64Range(2, 60).Draw(rt, "window")
		c := &crowd{testbed: newTestbed(t)}
		for range rapid.IntRange(1, 6).Draw(rt, "members") {
			terms := static(window)
			terms.Weight = rapid.IntRange(0, 5).Draw(rt, "weight")
			c.join(terms)
		}
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			i := rapid.IntRange(0, len(c.legs)-1).Draw(rt, "member")
			switch rapid.IntRange(0, 4).Draw(rt, "what") {
			case 0:
				c.run(time.Duration(rapid.IntRange(1, 50).Draw(rt, "ms"))*time.Millisecond, greedy)
			case 1:
				small := cc.Bytes(rapid.IntRange(1, 3000).Draw(rt, "bytes"))
				c.run(5*time.Millisecond, func(j int, _ cc.Time) cc.Bytes {
					if i == j && c.legs[j].inflight() == 0 {
						return small
					}
					return 0
				})
			case 2:
				if c.legs[i] != nil {
					c.legs[i].Close(c.now)
					c.legs[i] = nil
				}
			case 3:
				if l := c.legs[i]; l != nil && l.r.Pipe > 0 {
					l.r.Lost += min(mss, l.r.Pipe)
					l.r.Timeouts += rapid.IntRange(0, 1).Draw(rt, "timeout")
					l.report()
				}
			case 4:
				c.wait(time.Duration(rapid.IntRange(1, 5000).Draw(rt, "silence")) * time.Millisecond)
			}
			for _, l := range c.legs {
				if l == nil {
					continue
				}
				s := l.Snapshot()
				require.Equal(rt, s.Taken, s.Delivered+s.Inflight, "taken = acknowledged + in flight")
				require.Equal(rt, l.r.Pipe, s.Inflight)
				require.LessOrEqual(rt, s.Inflight, cc.Bytes(window*float64(mss)))
				require.LessOrEqual(rt, len(l.ledger.ring), ledgerChunks)
			}
		}
		// All members that are left still get through, and none has more than its share.
		before := append([]cc.Bytes(nil), c.got...)
		c.run(time.Second, greedy)
		var sum, floors cc.Bytes
		for _, l := range c.legs {
			if l != nil {
				sum += l.inflight()
				floors += floorSegments * mss
			}
		}
		require.LessOrEqual(rt, sum, cc.Bytes(window*float64(mss))+floors, "the odd pairs may just have gone round")
		for i, l := range c.legs {
			if l != nil {
				require.Greater(rt, c.got[i], before[i], "member %d starves", i)
			}
		}
	})
}

func TestAMemberWithAClosedReceiveWindowDoesNotTakeTheOthersShare(t *testing.T) {
	c := &crowd{testbed: newTestbed(t)}
	paused := c.open(static(40))
	require.Equal(t, 40*mss, paused.send(100*mss))
	paused.r.Pipe, paused.r.Acked, paused.r.Unsent, paused.r.RwndFull = 0, 10*mss, 30*mss, true
	paused.report()
	assert.Equal(t, 10*mss, paused.send(100*mss), "its own bytes still count for itself")
	paused.r.Pipe, paused.r.Unsent = 0, 40*mss // and go where the others are
	paused.report()

	other := c.join(static(40))
	c.run(100*time.Millisecond, greedy)
	assert.GreaterOrEqual(t, c.legs[other].inflight(), 19*mss, "half, while the paused one may still come back")
	c.run(2*time.Second, greedy)
	assert.GreaterOrEqual(t, c.legs[other].inflight(), 39*mss, "all, once it has not for a while")

	paused.r.RwndFull = false
	paused.report()
	assert.Equal(t, 40*mss, paused.inflight(), "once the window opens they are on their way")
}

func TestWeightsAreBounded(t *testing.T) {
	var m Manager
	terms := static(10)
	terms.Weight = MaxWeight + 1
	_, err := m.Open(1, terms, Leg{})
	require.ErrorContains(t, err, "weight")
}

// pulse is an algorithm with a window of 40 segments that doubles with every tick, 30 ms
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

// sum is the sum of the limits of legs, in segments.
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
	told := legs[0].applied
	legs[0].moveTo(static(77))
	assert.Equal(t, 77*mss, legs[0].limit.Cwnd)
	assert.Greater(t, legs[0].applied, told)
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
	before, told := l.limit, l.applied
	require.Greater(t, before.Cwnd, 20*mss)
	p.wait(time.Minute)
	assert.Less(t, l.limit.Cwnd, before.Cwnd)
	assert.Greater(t, l.applied, told)
	assert.Equal(t, l.group().control.Cwnd, l.limit.Cwnd)
}

// What a target is worth in the window is known once the round trip is.
func TestATargetCountsOnceTheRoundTripIsKnown(t *testing.T) {
	p := newTestbed(t)
	a, b := p.openEnforced(static(200)), p.openEnforced(static(200).asGuarantee(5e6))
	a.fill()
	b.fill()
	p.waitForDivision()
	assert.Equal(t, 200.0, sum(a, b))
	assert.Equal(t, 100.0, sum(b))
	p.wait(100 * time.Millisecond)
	b.ack(mss)
	p.waitForDivision()
	assert.InDelta(t, 5e6*0.1/8, float64(b.limit.Cwnd), 2*float64(mss))
	assert.InDelta(t, 200, sum(a, b), 2)
}
