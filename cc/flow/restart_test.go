package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

const restartRTT = 40 * time.Millisecond

// adaptive are the algorithms that set their windows themselves.
func adaptive(t *testing.T) (names []string) {
	for _, s := range cc.Specs() {
		if s.About != "test double" && s.Name != "none" && s.Name != "static" {
			names = append(names, s.Name)
		}
	}
	require.Greater(t, len(names), 10)
	return names
}

// busyFor has a leg send up to 200 segments at a time for d over a path of restartRTT,
// segment by segment, and then until all has arrived.
func (l *leg) busyFor(d time.Duration) {
	var wire []arrival
	end := l.p.now.Add(d)
	for l.p.now < end || len(wire) > 0 {
		for len(wire) > 0 && wire[0].at <= l.p.now {
			n := wire[0].n
			wire = wire[1:]
			if l.enforced {
				l.r.RTT = restartRTT
			}
			l.ack(n)
		}
		if l.p.now < end {
			for room := 200*mss - l.r.Pipe; room >= mss; room -= mss {
				n := l.offer(mss)
				if n == 0 {
					break
				}
				wire = append(wire, arrival{at: l.p.now.Add(restartRTT), n: n})
			}
		} else if l.want > 0 { // the last of it
			if n := l.offer(mss); n > 0 {
				wire = append(wire, arrival{at: l.p.now.Add(restartRTT), n: n})
			}
		}
		l.p.wait(time.Millisecond)
	}
}

// offer has n bytes go if they may: a leg that enforces the window paces as kernels do,
// two packets at once.
func (l *leg) offer(n cc.Bytes) cc.Bytes {
	if !l.enforced {
		if l.gate.waiting {
			return 0
		}
		return l.send(n)
	}
	if l.r.Unsent == 0 {
		l.write(n, 0)
		l.report()
	}
	rate := l.limit.PacingRate
	if l.r.Pipe+n > l.limit.Cwnd || rate > 0 && l.paced > l.p.now.Add(rate.TimeFor(n)) {
		return 0
	}
	if rate > 0 {
		l.paced = max(l.paced, l.p.now).Add(rate.TimeFor(n))
	}
	l.r.Unsent -= n
	l.r.Pipe += n
	l.report()
	return n
}

// burst is what goes at once, and until the first acknowledgement could be there.
func (l *leg) burst() (once, all cc.Bytes) {
	for n := l.offer(mss); n > 0 && once < 10_000*mss; n = l.offer(mss) {
		once += n
	}
	all = once
	for end := l.p.now.Add(restartRTT - time.Millisecond); l.p.now < end; {
		l.p.wait(time.Millisecond)
		for n := l.offer(mss); n > 0 && all < 10_000*mss; n = l.offer(mss) {
			all += n
		}
	}
	return once, all
}

func TestNoAlgorithmBurstsAfterSilence(t *testing.T) {
	need.OneGoroutine(t)
	for _, name := range adaptive(t) {
		for _, enforced := range []bool{false, true} {
			run := func(silence time.Duration) (l *leg, before cc.Bytes) {
				p := newTestbed(t)
				l = p.openOver(under(name), enforced)
				l.busyFor(3 * time.Second)
				before = l.limit.Cwnd
				p.wait(silence)
				return l, before
			}
			l, before := run(120 * time.Second)
			assert.LessOrEqual(t, l.limit.Cwnd, cc.InitialCwndPackets*mss, "%s, %v: a burst before it asks", name,
				enforced)
			once, all := l.burst()
			assert.Positive(t, once, name)
			assert.LessOrEqual(t, all, cc.InitialCwndPackets*mss, "%s, enforced: %v: of %v", name, enforced, before)

			l, before = run(time.Second)
			assert.LessOrEqual(t, l.limit.Cwnd, cc.InitialCwndPackets*mss, "%s, %v: a burst before it asks", name,
				enforced)
			once, all = l.burst()
			assert.LessOrEqual(t, all, max(before, l.limit.Cwnd)+2*mss, "%s, enforced: %v", name, enforced)
			most := max(before/5, 2*mss) // what a pacer may save is a tenth of a round trip
			assert.LessOrEqual(t, once, max(most, cc.InitialCwndPackets*mss), "%s, %v: of %v, paced", name, enforced,
				before)
			if before > cc.InitialCwndPackets*mss {
				rate := float64(l.limit.Cwnd) / restartRTT.Seconds() * 8
				assert.Positive(t, l.limit.PacingRate, "%s, enforced: %v", name, enforced)
				assert.LessOrEqual(t, float64(l.limit.PacingRate), 1.3*rate, "%s, enforced: %v", name, enforced)
			}
		}
	}
}

// One that keeps its connection open and begins again in a group with others that send is
// paced to its share as well.
func TestWhoComesBackToABusyGroupIsPaced(t *testing.T) {
	for _, enforced := range []bool{false, true} {
		p := newTestbed(t)
		other, l := p.openEnforced(static(100)), p.openOver(static(100), enforced)
		l.busyFor(time.Second)
		for range 20 {
			other.fill()
			p.wait(50 * time.Millisecond)
			other.ack(other.r.Pipe)
		}
		other.fill()
		assert.Equal(t, 10*mss, l.limit.Cwnd)
		l.offer(mss)
		assert.Equal(t, cc.RateOf(l.inflightLimit, l.group().rtt.srtt), l.limit.PacingRate)
	}
}

// TestAFlowGoesOnWithItsWindowElsewhere has two flows of a host move to another manager, from a busy group and from one
// that has been idle for so long that its algorithm is gone. Both find their common window there.
func TestAFlowGoesOnWithItsWindowElsewhere(t *testing.T) {
	need.OneGoroutine(t)
	for _, name := range adaptive(t) {
		for _, enforced := range []bool{false, true} {
			for _, silence := range []time.Duration{0, 20 * time.Second} {
				p, q := newTestbed(t), newTestbed(t)
				l := p.openOver(under(name), enforced)
				l.busyFor(3 * time.Second)
				p.wait(silence)
				d := l.Dormant(p.now)
				if enforced {
					assert.Equal(t, restartRTT, d.BaseRTT, name)
				}
				assert.Positive(t, d.Cwnd, name)
				assert.EqualValues(t, mss, d.MSS, name)

				one, two := q.resume(under(name), enforced, d), q.resume(under(name), enforced, d)
				g := one.group()
				assert.Equal(t, d.Cwnd, g.idle.saved.Cwnd, "%s: it counts once", name)
				one.offer(mss)
				two.offer(mss)
				assert.Equal(t, []cc.Bytes{d.Cwnd, d.Cwnd}, []cc.Bytes{g.initialCwnd, g.ssthresh}, name)
				assert.Equal(t, d.BaseRTT, g.rtt.min, name)
				assert.Positive(t, one.limit.Cwnd, name)

				fresh := q.resume(Terms{Group: "other", Algorithm: name}, enforced, Dormant{Cwnd: d.Cwnd})
				fresh.offer(mss)
				assert.Zero(t, fresh.group().initialCwnd, "%s: a window without a round trip says nothing", name)
			}
		}
	}
}

// TestFlowsThatGoOnElsewhereShareTheirWindowAtOnce has eight flows go on with an eighth of their window in flight
// each. The first that asks for more does not get what the others have in flight.
func TestFlowsThatGoOnElsewhereShareTheirWindowAtOnce(t *testing.T) {
	const flows, part = 8, 10 * mss
	p := newTestbed(t)
	d := Dormant{Cwnd: flows * part, BaseRTT: restartRTT, Rate: cc.RateOf(flows*part, restartRTT), MSS: mss}
	var all []*leg
	for range flows {
		l := p.resume(static(float64(d.Cwnd/mss)), false, d)
		l.r.Pipe = part // the transport has it from before
		l.report()
		all = append(all, l)
	}
	for _, l := range all {
		assert.LessOrEqual(t, l.send(100*mss), 2*mss, "the window is full")
	}
	p.waitForDivision()
	for _, l := range all {
		l.r.Pipe -= mss // which the transport has heard of, though these reports do not count it
		l.report()
	}
	var sent cc.Bytes
	for _, l := range all {
		sent += l.send(100 * mss)
	}
	assert.Positive(t, sent)
	assert.LessOrEqual(t, sent, 3*flows*mss)
}

// TestAHostFindsItsRateAtAnotherEdge moves a client to another edge, which has a memory of it but no flow. It has four
// fifths of its former rate there within two round trips, whether it was busy or idle.
func TestAHostFindsItsRateAtAnotherEdge(t *testing.T) {
	need.OneGoroutine(t)
	delivered := func(l *leg, d time.Duration) cc.Rate {
		before := l.r.Acked
		l.busyFor(d)
		return cc.RateOf(l.r.Acked-before, d)
	}
	for _, enforced := range []bool{false, true} {
		for _, silence := range []time.Duration{0, 2 * time.Second} {
			p, q := newTestbed(t), newTestbed(t)
			terms := under(cc.Default)
			terms.Host = addr("192.0.2.1")
			l := p.openOver(terms, enforced)
			l.busyFor(3 * time.Second)
			former := delivered(l, time.Second)
			p.wait(silence)

			known := p.mgr.Memories(p.now)
			require.Len(t, known, 1)
			assert.Equal(t, Terms{
				Group: terms.Group, Host: terms.Host, Algorithm: cc.Default, Params: l.group().params,
			}, known[0].Terms)
			for range 2 { // the second one replaces the first
				require.NoError(t, q.mgr.Remember(q.now, known[0]))
			}
			assert.Equal(t, 1, q.mgr.idleGroups.Len())
			q.wait(5 * time.Second)
			moved := q.openOver(terms, enforced)
			// What leaves in the first round trip arrives in the second.
			assert.Greater(t, float64(delivered(moved, restartRTT)), 0.8*float64(former), "%v, %v", enforced, silence)

			require.NoError(t, q.mgr.Remember(q.now, Memory{known[0].Terms, Dormant{Cwnd: mss, BaseRTT: 1}}))
			assert.Greater(t, moved.group().control.Cwnd, 10*mss, "a group with members knows more")
			fresh := newTestbed(t).openOver(terms, enforced)
			assert.Less(t, float64(delivered(fresh, restartRTT)), 0.5*float64(former), "without memory")
		}
	}
	assert.Error(t, new(Manager).Remember(1, Memory{Terms: Terms{Algorithm: "unknown"}}))
}
