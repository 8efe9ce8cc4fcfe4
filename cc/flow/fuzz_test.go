package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// seen is all that a report may change: what two flows of one group show, their limits,
// and how much the group counts.
type seen struct {
	flows  [2]Snapshot
	limits [2]Limit
	group  cc.Bytes
}

func see(legs []*leg) (s seen) {
	for i, l := range legs {
		s.flows[i], s.limits[i] = l.Snapshot(), l.limit
	}
	s.group = legs[0].group().inflight
	return s
}

// pair opens two flows of one group, under any algorithm, over legs of either kind.
func pair(t *testing.T, rt *rapid.T, names []string) (*testbed, []*leg) {
	p := newTestbed(t)
	terms := under(rapid.SampledFrom(names).Draw(rt, "algorithm"))
	var legs []*leg
	for range 2 {
		legs = append(legs, p.openOver(terms, rapid.Bool().Draw(rt, "enforced")))
	}
	return p, legs
}

// act has a leg do something that its transport truly reports.
func (l *leg) act(rt *rapid.T) {
	bytes := func(most cc.Bytes) cc.Bytes { return cc.Bytes(rapid.IntRange(0, int(most)).Draw(rt, "bytes")) }
	switch rapid.IntRange(0, 4).Draw(rt, "what") {
	case 0, 1:
		if !l.enforced {
			l.send(bytes(50_000) + 1)
		} else if room := l.limit.Cwnd - l.r.Pipe; room > 0 {
			l.write(bytes(50_000)+1, 0)
			n := min(l.r.Unsent, room)
			l.r.Unsent -= n
			l.r.Pipe += n
		}
	case 2, 3:
		n := bytes(l.r.Pipe)
		l.r.Acked += n
		l.r.Pipe -= n
		l.r.Marked += min(n, bytes(1000))
	case 4:
		l.r.Lost += min(mss, l.r.Pipe)
		l.r.Timeouts += rapid.IntRange(0, 1).Draw(rt, "timeout")
	}
	l.report()
}

func TestCountersThatRunBackwardsChangeNothing(t *testing.T) {
	names := adaptive(t)
	rapid.Check(t, func(rt *rapid.T) {
		p, legs := pair(t, rt, names)
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			p.wait(time.Duration(rapid.IntRange(0, 100).Draw(rt, "ms")) * time.Millisecond)
			l := legs[rapid.IntRange(0, 1).Draw(rt, "leg")]
			l.act(rt)
			p.wait(0)
			l.report() // what the limits have become since decides what it is limited by
			before := see(legs)
			back := l.r
			for _, counter := range []*cc.Bytes{&back.Written, &back.Acked, &back.Lost, &back.Marked, &back.Newest} {
				*counter -= cc.Bytes(rapid.Int64Range(0, 1<<40).Draw(rt, "back"))
			}
			back.Timeouts -= rapid.IntRange(0, 10).Draw(rt, "timeouts")
			l.Report(back)
			require.Equal(rt, before, see(legs))
			back.At--
			back.Pipe, back.Unsent = 1<<30, 1<<30
			l.Report(back)
			require.Equal(rt, before, see(legs), "nor does a stale report")
		}
	})
}

// Whatever a transport reports, the accounts add up and limits stay limits.
func TestAnyReportLeavesTheAccountsRight(t *testing.T) {
	names := adaptive(t)
	rapid.Check(t, func(rt *rapid.T) {
		p, legs := pair(t, rt, names)
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			p.wait(time.Duration(rapid.IntRange(0, 1000).Draw(rt, "ms")) * time.Millisecond)
			l := legs[rapid.IntRange(0, 1).Draw(rt, "leg")]
			if rapid.IntRange(0, 3).Draw(rt, "honest") > 0 {
				l.act(rt)
			} else {
				drawn := func(name string) cc.Bytes { return cc.Bytes(rapid.Int64Range(-1<<24, 1<<24).Draw(rt, name)) }
				l.Report(Report{
					At: p.now, Written: drawn("written"), Acked: drawn("acked"), Newest: drawn("newest"), Sacked: drawn("sacked"),
					Lost: drawn("lost"), Marked: drawn("marked"), Timeouts: rapid.IntRange(-3, 3).Draw(rt, "timeouts"),
					RTT: time.Duration(drawn("rtt")) * time.Microsecond, Unsent: drawn("unsent"), Pipe: drawn("pipe"),
					MSS: drawn("mss") / 1000, RwndFull: rapid.Bool().Draw(rt, "rwnd"),
				})
			}
			var counts cc.Bytes
			for _, l := range legs {
				s := l.Snapshot()
				require.GreaterOrEqual(rt, s.Inflight, cc.Bytes(0))
				require.GreaterOrEqual(rt, s.Delivered, cc.Bytes(0))
				require.GreaterOrEqual(rt, s.Taken, cc.Bytes(0))
				require.GreaterOrEqual(rt, s.DeliveryRate, cc.Rate(0))
				require.GreaterOrEqual(rt, s.SRTT, time.Duration(0))
				require.LessOrEqual(rt, s.MinRTT, s.SRTT)
				require.True(rt, l.applied == 0 || l.limit.Cwnd > 0, "%v", l.limit)
				require.GreaterOrEqual(rt, l.limit.PacingRate, cc.Rate(0))
				require.LessOrEqual(rt, len(l.ledger.ring), ledgerChunks)
				counts += l.counted
			}
			g := legs[0].group()
			require.Equal(rt, counts, g.inflight)
			require.GreaterOrEqual(rt, g.wanting, 0)
			require.GreaterOrEqual(rt, g.aboveFloors, 0)
		}
		for _, l := range legs {
			l.Close(p.now)
		}
		g := legs[0].group()
		require.Zero(rt, g.inflight)
		require.Zero(rt, g.wanting)
		require.Zero(rt, g.aboveFloors)
		require.Empty(rt, g.allocator.active)
	})
}
