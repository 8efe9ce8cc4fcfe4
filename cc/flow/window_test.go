package flow

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// capped is a static window of n segments, and hints leave the part c.
func capped(n, c float64) Terms {
	t := static(n)
	t.HintCap = c
	return t
}

// warm lets l know its path's round trip of 40 ms.
func (l *leg) warm() *leg {
	l.send(mss)
	l.p.wait(40 * time.Millisecond)
	l.ack(mss)
	return l
}

func TestAHintCapsAnAlgorithmThatKnowsNothingOfHints(t *testing.T) {
	p := newTestbed(t)
	l := p.open(capped(1000, 0.5)).warm()
	require.Equal(t, 1000*mss, l.Snapshot().Cwnd)
	host := to("192.0.2.1")
	p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 20e6})
	p.wait(0)

	s := l.Snapshot()
	assert.Equal(t, cc.Rate(10e6).BytesIn(40*time.Millisecond)+2*mss, s.Cwnd,
		"half of the capacity for a round trip, and two segments")
	assert.Equal(t, cc.Rate(10e6), s.PacingRate)
	assert.True(t, p.mgr.Groups(p.now)[0].Capped)
	assert.LessOrEqual(t, l.send(1000*mss), s.Cwnd)

	p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 200e9})
	p.wait(0)
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd, "one that leaves more than the algorithm asks for")
	assert.False(t, p.mgr.Groups(p.now)[0].Capped)
	assert.EqualValues(t, 200e9/2, l.Snapshot().PacingRate, "it is only spread out")
}

func TestAStaleHintFreesTheWindowByItself(t *testing.T) {
	p := newTestbed(t)
	l := p.open(capped(1000, 1)).warm()
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 1e6})
	p.wait(0)
	for l.send(1000*mss) > 0 {
		p.wait(100 * time.Millisecond)
	}
	require.True(t, l.gate.waiting)
	woken := l.wakes
	p.wait(2 * time.Second)
	assert.Greater(t, l.wakes, woken, "no acknowledgement has come")
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd)
	assert.Zero(t, l.Snapshot().PacingRate)
	assert.False(t, p.mgr.Groups(p.now)[0].Capped)
}

func TestACellWithoutCapacityDoesNotStopAFlowForLong(t *testing.T) {
	p := newTestbed(t)
	terms := Terms{Group: "host", Host: addr("192.0.2.1"), Algorithm: "copa", HintCap: 1}
	l := p.open(terms).warm()
	host := to("192.0.2.1")
	for range 100 {
		p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 1}) // nothing, as told
		p.wait(0)
		l.send(mss)
		p.wait(10 * time.Millisecond)
	}
	assert.Less(t, l.r.Pipe, 10*mss)
	p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 100e6})
	p.wait(time.Second)
	p.wait(0)
	l.ack(l.r.Pipe)
	assert.Positive(t, l.send(100*mss))
}

func TestWithoutACapHintsChangeNoWindow(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(1000)).warm()
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 1e6})
	p.wait(0)
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd)
	assert.False(t, p.mgr.Groups(p.now)[0].Capped)

	l.moveTo(capped(1000, 1))
	assert.Less(t, l.Snapshot().Cwnd, 10*mss, "terms that bring one act at once")
	l.moveTo(static(1000))
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd)
}

func TestTheLeastCapOfTheMembersCounts(t *testing.T) {
	p := newTestbed(t)
	a := p.open(capped(1000, 1)).warm()
	b := p.open(capped(1000, 0.5))
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 20e6})
	p.wait(0)
	assert.Equal(t, cc.Rate(10e6).BytesIn(40*time.Millisecond)+4*mss, a.Snapshot().Cwnd)
	b.Close(p.now)
	a.warm()
	assert.Equal(t, cc.Rate(20e6).BytesIn(40*time.Millisecond)+2*mss, a.Snapshot().Cwnd)
}

func TestACapDoesNotLetAWindowGrowBehindIt(t *testing.T) {
	terms := reno()
	terms.HintCap = 1
	p := newTestbed(t)
	l := p.open(terms).warm()
	host := to("192.0.2.1")
	for range 200 {
		p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 4e6})
		p.wait(0)
		l.send(1000 * mss)
		p.wait(40 * time.Millisecond)
		p.wait(0)
		l.ack(l.r.Pipe)
	}
	p.wait(5 * time.Second)
	p.wait(0)
	assert.Less(t, l.Snapshot().Cwnd, 40*mss, "what was held back by the hint proves nothing of the path")
}

// grown is a flow with a Reno window that has grown to n segments over a path of 40 ms.
func grown(p *testbed, t Terms, n cc.Bytes) *leg {
	l := p.open(t)
	for l.Snapshot().Cwnd < n*mss {
		require.Positive(p.t, l.send(n*mss))
		p.wait(40 * time.Millisecond)
		l.ack(l.r.Pipe)
	}
	return l
}

func TestAWindowIsRememberedForAWhile(t *testing.T) {
	const rto = 200 * time.Millisecond // of steady round trips of 40 ms
	for _, tt := range []struct {
		name   string
		idle   time.Duration
		halved int
		known  bool // the path's base round trip and what it carried
	}{
		{"after 5 s all is as it was", 5 * time.Second, 0, true},
		{"until 10 s are over", linger, 0, true},
		{"then it halves once with each timeout", linger + rto, 1, true},
		{"a bit later, no more", linger + rto + rto/2, 1, true},
		{"twice", linger + 2*rto, 2, true},
		{"after 12 s it is at the usual first window, and stays", 12 * time.Second, 3, true},
		{"after 4 minutes still", 4 * time.Minute, 3, true},
		{"after 5 minutes nothing is known", 5*time.Minute + time.Second, 3, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newTestbed(t)
			l := grown(p, reno(), 80)
			before := l.Snapshot()
			require.Equal(t, 80*mss, before.Cwnd)
			l.Close(p.now)
			p.wait(tt.idle)
			want := max(80*mss>>tt.halved, 10*mss)
			if tt.known {
				groups := p.mgr.Groups(p.now)
				require.Len(t, groups, 1)
				assert.Equal(t, want, groups[0].Cwnd)
				assert.Equal(t, tt.idle, groups[0].Idle)
			}

			l = p.open(reno())
			l.send(want)
			s := l.Snapshot()
			assert.Equal(t, want, s.Cwnd)
			if !tt.known {
				assert.Zero(t, s.MinRTT)
				return
			}
			assert.Equal(t, before.MinRTT, s.MinRTT)
			p.wait(40 * time.Millisecond)
			l.ack(l.r.Pipe)
			assert.LessOrEqual(t, l.Snapshot().Cwnd, 2*want)
			for range 10 {
				l.send(200 * mss)
				p.wait(40 * time.Millisecond)
				l.ack(l.r.Pipe)
			}
			if tt.halved > 0 {
				assert.InDelta(t, 88, float64(l.Snapshot().Cwnd)/float64(mss), 8,
					"slow start ends where the path was known to carry it")
			}
		})
	}
}

// As tcp_slow_start_after_idle has it: no algorithm is left, and the window halves once with each timeout.
func TestAWindowThatRestartsFadesAtOnce(t *testing.T) {
	const rto = 200 * time.Millisecond // of steady round trips of 40 ms
	for idle, want := range map[time.Duration]cc.Bytes{
		rto / 2: 80, rto + rto/2: 40, 2*rto + rto/2: 20, 5 * rto: 10, time.Minute: 10,
	} {
		p := newTestbed(t)
		terms := reno()
		terms.Restarts = true
		l := grown(p, terms, 80)
		l.Take(p.now, 0) // it wants no more
		p.wait(idle)
		l.send(want * mss)
		s := l.Snapshot()
		assert.Equal(t, want*mss, s.Cwnd, "%v", idle)
		assert.Equal(t, 40*time.Millisecond, s.MinRTT)
	}
}

func TestASlowPathIsRememberedForLonger(t *testing.T) {
	p := newTestbed(t)
	l := p.open(reno())
	l.send(10 * mss)
	p.wait(2 * time.Second) // RFC 6298: the first sample makes a timeout of three times as much
	l.ack(l.r.Pipe)
	window := l.Snapshot().Cwnd
	l.Close(p.now)
	p.wait(17 * time.Second)
	l = p.open(reno())
	l.send(mss)
	assert.Equal(t, window, l.Snapshot().Cwnd, "three timeouts of 6 s are not over")
}

func TestAFadedWindowIsNotForAnotherHost(t *testing.T) {
	p := newTestbed(t)
	l := grown(p, reno(), 80)
	l.Close(p.now)
	p.wait(linger + time.Millisecond)
	other := reno()
	other.Host = addr("192.0.2.2")
	l = p.open(other)
	l.send(mss)
	s := l.Snapshot()
	assert.Equal(t, 10*mss, s.Cwnd)
	assert.Zero(t, s.MinRTT)
}

func TestWhatHasFadedHoldsNoAlgorithm(t *testing.T) {
	p := newTestbed(t)
	for i := range 20 {
		terms := reno()
		terms.Group = string(rune('a' + i))
		l := p.open(terms)
		l.send(mss)
		l.Close(p.now)
	}
	p.wait(linger + 4*time.Second)
	p.open(reno()) // others' coming and going is when it is noticed
	for _, g := range p.mgr.groups {
		if len(g.members) == 0 {
			assert.Nil(t, g.algorithm)
		}
	}
	assert.Zero(t, p.mgr.idleGroups.Len())
	assert.Equal(t, 20, p.mgr.forgottenGroups.Len())
	p.wait(memoryLasts)
	p.open(reno())
	assert.Zero(t, p.mgr.forgottenGroups.Len())
	assert.Len(t, p.mgr.groups, 1)
	assert.Len(t, p.mgr.hosts, 1)
}

// steered is an algorithm with a window that is set from outside.
type steered struct {
	cc.NoTick
	cfg    cc.Config
	set    *cc.Bytes
	cwnd   cc.Bytes
	closed int
}

func (s *steered) OnAck(cc.Ack)        { s.cwnd = *s.set }
func (s *steered) OnLoss(cc.Loss)      {}
func (s *steered) OnTick(cc.State)     { s.cwnd = *s.set }
func (s *steered) Close()              { s.closed++ }
func (s *steered) Control() cc.Control { return cc.Control{Cwnd: s.cwnd, Phase: "steered"} }

// newSteered is a testbed with an algorithm "steered"; set is its window.
func newSteered(t *testing.T, set *cc.Bytes) (p *testbed, built *[]*steered) {
	p, built = newTestbed(t), &[]*steered{}
	p.mgr.Lookup = func(name string) (cc.Spec, error) {
		if name != "steered" {
			return cc.Lookup(name)
		}
		return cc.Spec{Name: name, New: func(cfg cc.Config) cc.Algorithm {
			s := &steered{cfg: cfg, set: set, cwnd: cfg.InitialCwnd}
			*built = append(*built, s)
			return s
		}}.Answering(), nil
	}
	return p, built
}

func TestAWokenAlgorithmsLimitsAreInForceAtOnce(t *testing.T) {
	set := 40 * mss
	p, built := newSteered(t, &set)
	l := p.open(Terms{Group: "a", Algorithm: "steered"})
	require.Equal(t, 10*mss, l.send(100*mss))
	require.Zero(t, l.send(mss), "the window is full")
	require.Len(t, *built, 1)
	(*built)[0].cfg.Wake(p.now)
	assert.Equal(t, 40*mss, l.limit.Cwnd)
	assert.Equal(t, 1, l.wakes)
	assert.Equal(t, 30*mss, l.send(100*mss))
}

func TestAnAlgorithmIsToldTheEndsOfAFlowThatIsAlone(t *testing.T) {
	ends := cc.Ends{From: netip.MustParseAddrPort("192.0.2.1:443"), To: netip.MustParseAddrPort("10.0.0.7:50000")}
	set := 40 * mss
	for _, row := range []struct {
		terms Terms
		want  cc.Ends
	}{
		{Terms{Alone: true, Ends: &ends}, ends},
		{Terms{}, cc.Ends{To: netip.MustParseAddrPort("10.0.0.7:0")}},
	} {
		p, built := newSteered(t, &set)
		row.terms.Group, row.terms.Algorithm, row.terms.Host = "a", "steered", ends.To.Addr()
		p.open(row.terms).send(mss)
		assert.Equal(t, row.want, (*built)[0].cfg.Ends)
	}
}

func TestASmallRaiseWaitsForAnAcknowledgement(t *testing.T) {
	set := 40 * mss
	p, built := newSteered(t, &set)
	l := p.open(Terms{Group: "a", Algorithm: "steered"})
	require.Equal(t, 10*mss, l.send(100*mss))
	l.raise(t, &set, func() {
		(*built)[0].cfg.Wake(p.now)
	}, raise{40 * mss, true}, raise{44 * mss, false}, raise{50 * mss, true}, raise{49 * mss, false})
}

// raise is a window, and whether what it lets out is to go at once.
type raise struct {
	window cc.Bytes
	now    bool
}

// raise has the algorithm decide on each window, and the leg fill it.
func (l *leg) raise(t *testing.T, set *cc.Bytes, decide func(), all ...raise) {
	t.Helper()
	for _, r := range all {
		*set = r.window
		decide()
		assert.Equal(t, r.window, l.limit.Cwnd)
		assert.Equal(t, r.now, l.limit.Now, r.window)
		l.send(100 * mss)
	}
}

// TestARaiseThatAcknowledgementsDoNotLetOutGoesAtOnce has few packets in flight, as at the end of a draining.
func TestARaiseThatAcknowledgementsDoNotLetOutGoesAtOnce(t *testing.T) {
	set := 10 * mss
	p, _ := newSteered(t, &set)
	l := p.open(Terms{Group: "a", Algorithm: "steered"})
	require.Equal(t, 10*mss, l.send(100*mss))
	l.raise(t, &set, func() {
		p.wait(time.Millisecond)
		l.ack(mss)
	}, raise{18 * mss, false}, raise{40 * mss, true})
}

func TestAnAlgorithmIsClosedOnceItIsGivenUp(t *testing.T) {
	for name, giveUp := range map[string]func(p *testbed, l *leg){
		"moved away": func(p *testbed, l *leg) {
			require.NoError(t, l.Move(p.now, Terms{Group: "a", Algorithm: "reno"}))
		},
		"idle":             func(p *testbed, l *leg) { p.wait(time.Minute) },
		"alone and closed": func(p *testbed, l *leg) { l.Close(p.now) },
		"closed":           func(p *testbed, l *leg) { l.Close(p.now) },
		"closed with bytes in flight": func(p *testbed, l *leg) {
			l.send(2 * mss)
			l.Close(p.now)
		},
	} {
		t.Run(name, func(t *testing.T) {
			set := 40 * mss
			p, built := newSteered(t, &set)
			l := p.open(Terms{Group: "a", Alone: name == "alone and closed", Algorithm: "steered"})
			l.send(2 * mss)
			p.wait(20 * time.Millisecond)
			l.ack(2 * mss)
			require.Zero(t, (*built)[0].closed)
			giveUp(p, l)
			assert.Equal(t, 1, (*built)[0].closed)
			(*built)[0].cfg.Wake(p.now) // late: the algorithm is gone
			assert.Len(t, *built, 1)
		})
	}
}

func TestTheWindowOfAnAlgorithmThatIsGivenUpWithItsLastMemberIsRemembered(t *testing.T) {
	set := 40 * mss
	p, built := newSteered(t, &set)
	terms := Terms{Group: "a", Algorithm: "steered"}
	l, other := p.open(terms), p.open(terms)
	l.send(2 * mss)
	p.wait(20 * time.Millisecond)
	l.ack(2 * mss)
	(*built)[0].cfg.Wake(p.now)
	least := l.Snapshot().MinRTT
	l.Close(p.now)
	require.Zero(t, (*built)[0].closed, "another member is there")
	other.Close(p.now)
	require.Equal(t, 1, (*built)[0].closed)

	p.wait(5 * time.Second)
	groups := p.mgr.Groups(p.now)
	require.Len(t, groups, 1)
	assert.Equal(t, 40*mss, groups[0].Cwnd)
	l = p.open(terms)
	require.Positive(t, l.send(40*mss))
	assert.Equal(t, 40*mss, l.Snapshot().Cwnd)
	require.Len(t, *built, 2)
	assert.Equal(t, 40*mss, (*built)[1].cfg.InitialCwnd)
	assert.Equal(t, 40*mss, (*built)[1].cfg.Ssthresh)
	assert.Equal(t, least, l.Snapshot().MinRTT)
}
