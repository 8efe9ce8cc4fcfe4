package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

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
		// Whoever is left still gets through, and nobody has more than is his.
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
