package flow

import (
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

func TestGroupsTellOfEveryGroup(t *testing.T) {
	p := newTestbed(t)
	a, b := p.open(static(10)), p.open(static(10))
	b.send(mss)
	other := reno()
	other.Group = "aaa"
	other.Host = addr("192.0.2.9")
	p.open(other).Close(p.now)
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 7e6})

	a.send(100 * mss) // 9, of the 5 that it is due
	p.wait(20 * time.Millisecond)
	groups := p.mgr.Groups(p.now)
	require.Len(t, groups, 2, "in the order of their names")
	first, g := groups[0], groups[1]
	assert.NotEqual(t, first.Key, g.Key)
	assert.Equal(t, "aaa", first.Name)
	assert.Zero(t, first.Members)
	assert.Equal(t, 20*time.Millisecond, first.Idle)
	assert.Equal(t, []netip.Addr{addr("192.0.2.9")}, first.Hosts, "one that lingers knows where it led")

	assert.Equal(t, "host", g.Name)
	assert.Equal(t, "static", g.Algorithm)
	assert.Equal(t, "static", g.Phase)
	assert.Equal(t, []netip.Addr{addr("192.0.2.1")}, g.Hosts)
	assert.Equal(t, 2, g.Members)
	assert.Equal(t, 2, g.Active)
	assert.Equal(t, 10*mss, g.Cwnd)
	assert.Equal(t, 10*mss, g.Inflight)
	assert.Equal(t, 4*mss, g.Lent)
	assert.Zero(t, g.Unused)
	assert.EqualValues(t, 7e6, g.Hint.Capacity)

	a.ack(9 * mss)
	b.ack(mss)
	a.Take(p.now, mss)
	g = p.mgr.Groups(p.now)[1]
	assert.Equal(t, 20*time.Millisecond, g.MinRTT)
	assert.Equal(t, 10*mss, g.Delivered)
	assert.Equal(t, 9*mss, g.Unused, "nobody waits")
	assert.Zero(t, g.Lent)
	assert.Equal(t, 1, g.Active)
	assert.Positive(t, g.DeliveryRate)
}

func TestAlgorithmsAreToldWhatTheirOthersDeliver(t *testing.T) {
	p := newTestbed(t)
	var told cc.Bytes
	p.trace = func(e Event) { told = e.State.EdgeDelivered }
	deliver := func(group, algorithm string) {
		l := p.open(Terms{Group: group, Algorithm: algorithm})
		l.send(3 * mss)
		l.ack(3 * mss)
	}
	deliver("one", "copa")
	require.Equal(t, 3*mss, told)
	deliver("two", "copa")
	require.Equal(t, 6*mss, told, "those of another group count")
	deliver("three", "reno")
	require.Equal(t, 3*mss, told, "those under another algorithm do not")
}

func TestAHintForAPrefixReachesWhoLeadsNowhereElse(t *testing.T) {
	p := newTestbed(t)
	open := func(group, host string) *leg {
		return p.open(Terms{Group: group, Host: addr(host), Algorithm: "reno"})
	}
	open("a", "192.0.2.1")
	open("lan", "192.0.2.1")
	open("lan", "192.0.2.77")
	wide := open("wide", "192.0.2.2")
	away := open("wide", "198.51.100.1")
	open("mapped", "::ffff:192.0.2.3")
	open("six", "2001:db8::1%lan0")
	p.open(Terms{Group: "unknown", Algorithm: "reno"})

	hint := func(prefix string) int { return p.mgr.Hint(to(prefix), cc.Hint{At: p.now}) }
	assert.Equal(t, 1, hint("192.0.2.1"), "a, but not the whole of lan")
	assert.Equal(t, 3, hint("192.0.2.0/24"), "each once")
	assert.Equal(t, 3, hint("::ffff:192.0.2.0/120"), "however it is written")
	assert.Equal(t, 4, hint("0.0.0.0/0"))
	assert.Equal(t, 1, hint("2001:db8::/32"))
	assert.Zero(t, hint("203.0.113.0/24"))

	away.Close(p.now)
	assert.Equal(t, 4, hint("192.0.2.0/24"), "where members went that have left does not matter")
	wide.Close(p.now)
	assert.Equal(t, 3, hint("192.0.2.0/24"), "but without any it is as wide as it was")
	assert.Equal(t, 4, hint("0.0.0.0/0"))
}

func TestANewGroupHearsTheNewestFreshHintOfItsHost(t *testing.T) {
	p := newTestbed(t)
	wide := reno()
	wide.Group = "wide"
	p.open(wide)
	wide.Host = addr("192.0.2.2")
	p.open(wide)
	p.open(static(10))
	p.mgr.Hint(to("192.0.2.0/24"), cc.Hint{At: p.now, Capacity: 1})
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 5})
	p.wait(time.Millisecond)
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 6})

	heard := func(group string) *cc.Hint {
		late := reno()
		late.Group = group
		p.open(late)
		for _, g := range p.mgr.Groups(p.now) {
			if g.Name == group {
				return g.Hint
			}
		}
		return nil
	}
	require.NotNil(t, heard("late"))
	assert.EqualValues(t, 6, heard("later").Capacity, "of those that lead there alone")
	p.wait(freshHint + time.Millisecond)
	assert.Nil(t, heard("too late"))
}

func TestHintsMovesGroupsAndClosesMayRunAtOnce(t *testing.T) {
	mgr := Manager{}
	const rounds = 300
	var wg sync.WaitGroup
	at := func(n int) cc.Time { return cc.Time(n+1) * cc.Time(time.Millisecond) }
	for k := range 3 {
		wg.Go(func() {
			for n := range rounds {
				terms := Terms{
					Group: "g", Host: hostAt((n + k) % 5), Algorithm: "reno", HintCap: float64(n % 2),
					Target: cc.Rate(n % 3),
				}
				f, err := mgr.Open(at(n), terms, Leg{})
				if !assert.NoError(t, err) {
					return
				}
				g := f.Take(at(n), 4*mss)
				r := Report{
					At: at(n), Written: g.Bytes, Acked: g.Bytes, MSS: mss,
					RTT: time.Duration(1+n%7) * 10 * time.Millisecond,
				}
				f.Report(r)
				terms.Group, terms.Host = []string{"g", "h"}[n%2], hostAt(n%4)
				assert.NoError(t, f.Move(at(n), terms))
				f.Close(at(n))
			}
		})
		wg.Go(func() {
			for n := range rounds {
				mgr.Hint(to("10.0.0.0/8"), cc.Hint{At: at(n), Capacity: 1e6, Flows: 3})
				mgr.Hint(netip.PrefixFrom(hostAt(n%5), 32), cc.Hint{At: at(n), Capacity: 2e6})
				mgr.Tick(0, at(n))
				for _, g := range mgr.Groups(at(n)) {
					assert.GreaterOrEqual(t, g.Inflight, cc.Bytes(0))
					assert.LessOrEqual(t, g.Active, g.Members)
				}
			}
		})
	}
	wg.Wait()
	for _, g := range mgr.Groups(at(rounds)) {
		assert.Zero(t, g.Members)
		assert.Zero(t, g.Inflight)
	}
}

// claiming is a flow to the i-th host with a priority and what it needs.
func claiming(i int, priority float64, target cc.Rate) Terms {
	return Terms{
		Group: string(rune('a' + i)), Host: hostAt(i), Algorithm: "nacc", Target: target,
		Params: cc.Params{"mode": 1, "priority": priority},
	}
}

func TestSharesGoByPriorityAndTraffic(t *testing.T) {
	for _, tt := range []struct {
		name  string
		flows []Terms
		hint  cc.Hint
		want  []float64
	}{
		{
			"priorities 4 and 2, equal traffic",
			[]Terms{claiming(0, 4, 0), claiming(1, 2, 0)},
			cc.Hint{},
			[]float64{2. / 3, 1. / 3},
		},
		{
			"priorities 2, 4 and 1",
			[]Terms{claiming(0, 2, 0), claiming(1, 4, 0), claiming(2, 1, 0)},
			cc.Hint{},
			[]float64{2. / 7, 4. / 7, 1. / 7},
		},
		{
			"1000 B each 10 ms at priority 2, 500 B at 4",
			[]Terms{claiming(0, 2, 800_000), claiming(1, 4, 400_000)},
			cc.Hint{},
			[]float64{0.5, 0.5},
		},
		{
			"traffic that is not known of all is not counted",
			[]Terms{claiming(0, 2, 800_000), claiming(1, 4, 0)},
			cc.Hint{},
			[]float64{1. / 3, 2. / 3},
		},
		{
			"an algorithm without a priority counts as 1",
			[]Terms{claiming(0, 3, 0), {Host: hostAt(1), Algorithm: "reno"}},
			cc.Hint{},
			[]float64{0.75, 0.25},
		},
		{
			"flows of one host add up",
			[]Terms{claiming(0, 1, 0), claiming(0, 1, 0), claiming(1, 2, 0)},
			cc.Hint{},
			[]float64{0.5, 0.5, 0.5},
		},
		{
			"flows that the network counts and we do not see claim 1 each",
			[]Terms{claiming(0, 2, 0)},
			cc.Hint{Flows: 3},
			[]float64{0.5},
		},
		{
			"what the network assigns stays",
			[]Terms{claiming(0, 4, 0), claiming(1, 2, 0)},
			cc.Hint{Share: 0.25},
			[]float64{0.25, 0.25},
		},
	} {
		p := newTestbed(t)
		for _, terms := range tt.flows {
			p.open(terms)
		}
		tt.hint.At = p.now
		p.mgr.Hint(to("10.0.0.0/16"), tt.hint)
		for i, want := range tt.want {
			shares := map[string]float64{}
			for _, g := range p.mgr.Groups(p.now) {
				shares[g.Name] = g.Hint.Share
			}
			assert.InDelta(t, want, shares[tt.flows[i].Group], 1e-9, "%s: flow %d", tt.name, i+1)
		}
	}
}

func TestWhoTellsOfHostsOneByOneDividesByClaims(t *testing.T) {
	p := newTestbed(t)
	p.open(claiming(0, 4, 0))
	p.open(claiming(1, 2, 0))
	all := p.mgr.Claims(to("10.0.0.0/16"))
	assert.InDelta(t, 2./3, p.mgr.Claims(to(hostAt(0).String())).Of(all), 1e-9)
	assert.Zero(t, p.mgr.Claims(to("192.0.2.1")).Of(all))
	assert.Zero(t, Claims{}.Of(Claims{}))
}

func (l *leg) moveTo(t Terms) {
	l.p.t.Helper()
	require.NoError(l.p.t, l.Move(l.p.now, t))
}

func TestWhatIsInFlightMovesAlong(t *testing.T) {
	p := newTestbed(t)
	f, other := p.open(static(10)), p.open(static(10))
	require.Equal(t, 5*mss, f.send(5*mss))
	require.Equal(t, 2*mss, other.send(2*mss))
	from := f.group()

	f.moveTo(static(30))
	assert.Equal(t, 2*mss, from.inflight, "what stays is the other's")
	assert.Equal(t, 5*mss, f.group().inflight)
	s := f.Snapshot()
	assert.Equal(t, 30*mss, s.Cwnd)
	assert.Equal(t, 5*mss, s.Inflight)
	assert.Equal(t, 1, s.Members)
	assert.Equal(t, 1, other.Snapshot().Members)

	p.wait(20 * time.Millisecond)
	f.ack(5 * mss)
	assert.Zero(t, f.group().inflight)
	s = f.Snapshot()
	assert.Equal(t, s.Taken, s.Delivered)
	assert.Equal(t, 20*time.Millisecond, s.LatestRTT, "when a byte left does not change by moving")
	assert.Equal(t, 30*mss, f.send(100*mss), "and the new window is its own")
}

func TestOtherTermsOfTheSameGroupChangeInPlace(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(100))
	m := f.group()
	terms := static(100)
	terms.ConnectionRate, terms.Weight, terms.Priority = 8e6, 3, 1
	f.moveTo(terms)
	assert.Same(t, m, f.group())
	assert.Equal(t, cc.Bytes(3), f.weight)
	assert.Less(t, f.send(100*mss), 10*mss, "the new rate is kept")
	require.Zero(t, f.send(100*mss))

	f.moveTo(static(100))
	assert.Equal(t, 1, f.wakes, "what no rate holds back any more may go at once")
	assert.Greater(t, f.send(100*mss), 80*mss)
	assert.Equal(t, cc.Rate(0), f.report().PacingRate)
}

func TestAFlowThatWaitsIsWokenWhereItIsLetSendMore(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(10 * mss)
	require.Zero(t, f.send(20*mss))
	f.moveTo(static(5))
	assert.Zero(t, f.wakes, "a smaller window leaves it waiting")
	f.moveTo(static(20))
	assert.Equal(t, 1, f.wakes)
	assert.Equal(t, 10*mss, f.send(20*mss))

	require.Zero(t, f.send(mss))
	f.moveTo(static(5))
	p.wait(20 * time.Millisecond)
	f.ack(15 * mss)
	assert.Equal(t, 1, f.wakes, "what is left fills the smaller window")
	f.ack(2 * mss)
	assert.Equal(t, 2, f.wakes, "and then it is its turn again")
}

func TestWhoStaysMayUseWhatTheOtherLeaves(t *testing.T) {
	p := newTestbed(t)
	a, b := p.open(static(12)), p.open(static(12))
	for _, l := range []*leg{a, b, a, b} {
		l.send(100 * mss)
		p.waitForDivision()
	}
	require.Equal(t, 6*mss, b.limit.Cwnd)
	require.Zero(t, b.send(mss))
	b.wakes = 0
	a.moveTo(static(11))
	assert.Equal(t, 1, b.wakes)
	assert.Equal(t, 6*mss, b.send(100*mss))
}

func TestANewAlgorithmStartsFromWhatTheFlowHad(t *testing.T) {
	tests := []struct {
		name   string
		window float64 // packets, before
		member int
		least  cc.Bytes // of all windows together, after
		most   cc.Bytes
		wants  cc.Bytes // each at once
	}{
		{"one flow that fills its window", 40, 1, 39 * mss, 41 * mss, 64 * 1024},
		{"five flows of one window, together", 100, 5, 95 * mss, 101 * mss, 64 * 1024},
		{"a window of less than the usual first one", 4, 1, 4 * mss, 4 * mss, 64 * 1024},
		{"a window without a bound, of which little is used", 1e6, 1, 20 * mss, 24 * mss, 22 * mss},
		{"a flow that hardly sends: the usual first window", 1000, 1, 10 * mss, 10 * mss, mss},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := &crowd{testbed: newTestbed(t)}
			for range tt.member {
				c.join(static(tt.window))
			}
			wants := func(i int, _ cc.Time) cc.Bytes {
				if tt.wants < 64*1024 && c.legs[i].inflight() > 0 {
					return 0
				}
				return tt.wants
			}
			c.run(200*time.Millisecond, wants)
			for i, l := range c.legs {
				l.moveTo(under("reno"))
				if i == 0 && tt.member > 1 { // the news of others does not wait
					l.ack(0)
					c.legs[1].ack(0)
				}
			}
			s := c.legs[0].Snapshot()
			assert.Equal(t, tt.member, s.Members)
			assert.Equal(t, 20*time.Millisecond, s.MinRTT)
			assert.GreaterOrEqual(t, s.Cwnd, tt.least)
			assert.LessOrEqual(t, s.Cwnd, tt.most)

			before := append([]cc.Bytes(nil), c.got...)
			c.run(20*time.Millisecond, wants)
			var sum cc.Bytes
			for i := range c.got {
				sum += c.got[i] - before[i]
			}
			if tt.wants == 64*1024 {
				assert.GreaterOrEqual(t, sum, tt.least*9/10, "the round trip after the move carries as much as before")
			}
			s = c.legs[0].Snapshot()
			assert.Equal(t, 20*time.Millisecond, s.MinRTT)
			assert.InDelta(t, float64(20*time.Millisecond), float64(s.SRTT), float64(time.Millisecond))
		})
	}
}

func TestANewAlgorithmHearsOnlyOfWhatLeftUnderIt(t *testing.T) {
	c := &crowd{testbed: newTestbed(t)}
	c.join(static(40))
	c.run(200*time.Millisecond, greedy)
	f := c.legs[0]
	var heard []Event
	c.trace = func(e Event) { heard = append(heard, e) }
	f.moveTo(under("reno"))
	start := f.Snapshot().Cwnd
	f.r.Lost += mss // of what is in flight
	f.report()
	for range 38 {
		f.ack(mss)
		require.Zero(t, f.Snapshot().LossEvents)
	}
	require.Empty(t, heard)
	assert.Equal(t, start, f.Snapshot().Cwnd, "acknowledgements of what another window sent do not open this one")

	require.Positive(t, f.send(5*mss))
	p := f.r.Pipe
	f.ack(p - 2*mss)
	require.Len(t, heard, 1)
	assert.Equal(t, KindAck, heard[0].Kind)
	assert.Less(t, heard[0].Bytes, p-2*mss, "of what comes together, only its own part")
	f.r.Lost += mss
	f.report()
	assert.Equal(t, 1, f.Snapshot().LossEvents, "its own losses are told")

	g := c.open(static(40))
	require.Positive(t, g.send(10*mss))
	g.moveTo(under("cubic"))
	g.r.Timeouts++
	g.report()
	assert.Equal(t, 1, g.Snapshot().LossEvents, "and timeouts at once, since they say that nothing arrives at all")
}

func TestRatesAreRightAcrossAMove(t *testing.T) {
	c := &crowd{testbed: newTestbed(t)}
	c.join(static(40))
	c.run(200*time.Millisecond, greedy)
	rate := c.legs[0].Snapshot().DeliveryRate
	require.InEpsilon(t, float64(cc.RateOf(40*mss, 20*time.Millisecond)), float64(rate), 0.1)
	c.trace = func(e Event) {
		assert.GreaterOrEqual(t, e.State.Delivered, cc.Bytes(0))
		assert.LessOrEqual(t, e.State.Delivered, c.got[0], "an algorithm counts from its own start")
	}
	c.got[0] = 0
	c.legs[0].moveTo(static(41))
	for range 100 {
		c.run(time.Millisecond, greedy)
		assert.InEpsilon(t, float64(rate), float64(c.legs[0].Snapshot().DeliveryRate), 0.15)
	}
}

func TestAFlowThatJoinsOthersTakesItsShareThere(t *testing.T) {
	c := &crowd{testbed: newTestbed(t)}
	c.join(static(40))
	c.run(100*time.Millisecond, greedy)
	c.join(static(60))
	c.run(100*time.Millisecond, greedy)
	c.legs[1].moveTo(static(40))
	assert.Equal(t, 40*mss, c.legs[0].Snapshot().Cwnd)
	assert.InDelta(t, float64(100*mss), float64(c.legs[0].group().inflight), float64(2*mss))
	c.run(45*time.Millisecond, greedy)
	for _, l := range c.legs {
		assert.InDelta(t, 20, float64(l.inflight()/mss), 1)
	}
}

func TestALegIsToldTheNewLimitAtOnce(t *testing.T) {
	p := newTestbed(t)
	f := p.openEnforced(static(10))
	f.fill()
	p.wait(20 * time.Millisecond)
	f.r.RTT = 20 * time.Millisecond
	f.ack(mss)
	f.moveTo(static(25))
	s := f.Snapshot()
	assert.Equal(t, 9*mss, s.Inflight)
	assert.Equal(t, 20*time.Millisecond, s.SRTT)
	assert.Equal(t, 25*mss, f.limit.Cwnd)
	f.fill()
	assert.Equal(t, 25*mss, f.group().inflight)
	assert.Equal(t, f.r.Written-f.r.Unsent, f.Snapshot().Taken)
}

func TestMovesThatAreRefusedChangeNothing(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(mss)
	require.ErrorContains(t, f.Move(p.now, Terms{Algorithm: "nope"}), "nope")
	bad := static(10)
	bad.Weight = MaxWeight + 1
	require.ErrorContains(t, f.Move(p.now, bad), "weight")
	assert.Equal(t, 10*mss, f.Snapshot().Cwnd)

	f.Close(p.now)
	f.moveTo(static(20))
	assert.Zero(t, countMembers(p.mgr.Groups(p.now)))
	p.wait(memoryLasts + time.Second)
	p.open(static(5))
	assert.Len(t, p.mgr.groups, 1, "nothing is left of where it did not go")
}

func TestAGroupThatAllHaveLeftIsForgotten(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(mss)
	f.moveTo(static(20))
	require.Len(t, p.mgr.groups, 2)
	f.moveTo(static(10))
	assert.Equal(t, 10*mss, f.Snapshot().Cwnd)
	f.moveTo(static(20))
	p.wait(memoryLasts + time.Second)
	p.open(static(20))
	assert.Len(t, p.mgr.groups, 1)
}

// TestAccountingHoldsAcrossMoves moves the members of random crowds between
// groups and algorithms while they send.
func TestAGroupThatAnAloneFlowHasLeftIsForgottenAtOnce(t *testing.T) {
	p := newTestbed(t)
	l := p.open(Terms{Group: "a", Alone: true, Algorithm: "reno"})
	require.NoError(t, l.Move(p.now, Terms{Group: "a", Alone: true, Algorithm: "vegas"}))
	groups := p.mgr.Groups(p.now)
	require.Len(t, groups, 1)
	assert.Equal(t, "vegas", groups[0].Algorithm)
	l.Close(p.now)
	assert.Empty(t, p.mgr.Groups(p.now))
}

func TestAGroupThatIsRememberedAnewDelaysNoOther(t *testing.T) {
	p := newTestbed(t)
	known := Memory{
		Terms{Group: "a", Host: addr("192.0.2.1"), Algorithm: "reno"}, Dormant{Cwnd: mss, BaseRTT: 1, MSS: mss},
	}
	other := known
	other.Terms.Group = "b"
	for _, m := range []Memory{known, other} {
		require.NoError(t, p.mgr.Remember(p.now, m))
	}
	for range 2 {
		p.wait(memoryLasts/2 + time.Second)
		require.NoError(t, p.mgr.Remember(p.now, known))
	}
	groups := p.mgr.Groups(p.now)
	require.Len(t, groups, 1)
	assert.Equal(t, "a", groups[0].Name)
}

func TestAccountingHoldsAcrossMoves(t *testing.T) {
	need.OneGoroutine(t)
	var names []string
	for _, s := range cc.Specs() {
		names = append(names, s.Name)
	}
	rapid.Check(t, func(rt *rapid.T) {
		terms := func() Terms {
			return Terms{
				Group:     rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "group"),
				Algorithm: rapid.SampledFrom(names).Draw(rt, "algorithm"),
				Weight:    rapid.IntRange(0, 3).Draw(rt, "weight"),
				MaxRate:   rapid.SampledFrom([]cc.Rate{0, 0, 50e6}).Draw(rt, "rate"),
			}
		}
		c := &crowd{testbed: newTestbed(t)}
		wants := func(i int, _ cc.Time) cc.Bytes { // for some algorithms have no bound
			return max(0, min(64*1024, 100*mss-c.legs[i].inflight()))
		}
		for range rapid.IntRange(1, 5).Draw(rt, "members") {
			c.join(terms())
		}
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			i := rapid.IntRange(0, len(c.legs)-1).Draw(rt, "member")
			l := c.legs[i]
			switch rapid.IntRange(0, 4).Draw(rt, "what") {
			case 0, 1:
				c.run(time.Duration(rapid.IntRange(1, 50).Draw(rt, "ms"))*time.Millisecond, wants)
			case 2:
				if l != nil {
					require.NoError(rt, l.Move(c.now, terms()))
				}
			case 3:
				if l != nil && l.r.Pipe > 0 {
					l.r.Lost += min(mss, l.r.Pipe)
					l.report()
				}
			case 4:
				if l != nil && rapid.Bool().Draw(rt, "close") {
					l.Close(c.now)
					c.legs[i] = nil
				}
			}
			sums, weights := map[*group]cc.Bytes{}, map[*group]cc.Bytes{}
			members := 0
			for _, l := range c.legs {
				if l == nil {
					continue
				}
				s := l.Snapshot()
				sums[l.group()] += s.Inflight
				weights[l.group()] += l.weight
				members++
				require.Equal(rt, s.Taken, s.Delivered+s.Inflight, "taken = acknowledged + in flight")
				require.Equal(rt, l.r.Pipe, s.Inflight)
				require.True(rt, slices.Contains(l.group().members, &l.member))
				require.Same(rt, l.group(), l.home.Load())
				for j := range l.ledger.count {
					require.LessOrEqual(rt, l.ledger.chunkAt(j).sent.Delivered, l.group().delivered.total)
				}
			}
			for _, g := range c.mgr.groups {
				require.Equal(rt, sums[g.group], g.inflight, "a group counts what its members do")
				require.Equal(rt, weights[g.group], g.weights)
				members -= len(g.members)
				require.Equal(rt, len(g.members) == 0, g.idleElement != nil)
			}
			require.Zero(rt, members, "everybody is a member once")
		}
		// Whoever is left still gets through.
		before := append([]cc.Bytes(nil), c.got...)
		c.run(2*time.Second, wants)
		for i, l := range c.legs {
			if l != nil {
				require.Greater(rt, c.got[i], before[i], "member %d starves", i)
			}
		}
	})
}

func TestMovesTakesAndReportsMayRunAtOnce(t *testing.T) {
	var mgr Manager
	algorithms := []string{"cubic", "copa", "reno"}
	const flows, rounds = 4, 2000
	var wg sync.WaitGroup
	for i := range flows {
		f, err := mgr.Open(1, Terms{Group: "host", Algorithm: "cubic"}, Leg{})
		require.NoError(t, err)
		moved := make(chan struct{})
		wg.Go(func() {
			defer close(moved)
			for n := range rounds / 4 {
				terms := Terms{Group: "host", Algorithm: algorithms[(n+i)%3], Weight: n % 4}
				assert.NoError(t, f.Move(cc.Time(n+1)*cc.Time(time.Millisecond), terms))
			}
		})
		wg.Go(func() {
			r := Report{MSS: mss}
			for n := range rounds {
				now := cc.Time(n+1) * cc.Time(time.Millisecond)
				g := f.Take(now, 4*mss)
				r.Written += g.Bytes
				r.Pipe += g.Bytes
				r.At, r.Acked, r.Pipe = now, r.Acked+r.Pipe, 0
				f.Report(r)
				mgr.Tick(0, now)
				_ = f.Snapshot()
			}
			<-moved
			s := f.Snapshot()
			assert.Equal(t, s.Taken, s.Delivered+s.Inflight)
			f.Close(cc.Time(time.Hour))
		})
	}
	wg.Wait()
	for _, g := range mgr.groups {
		assert.Zero(t, g.inflight)
		assert.Empty(t, g.members)
	}
}
