package flow

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

// only returns the group of a manager that has one.
func only(t testing.TB, mgr *Manager) *group {
	require.Len(t, mgr.groups, 1)
	for _, g := range mgr.groups {
		return g.group
	}
	return nil
}

// A division visits each active member. However many there are, a step, which is a Take
// and a Report or a Report alone, costs no more such visits than among a few.
func TestAStepCostsAFewVisitsOfMembers(t *testing.T) {
	need.OneGoroutine(t)
	const most = 2 * fewMembers
	for _, members := range []int{1, 8, 100, 1000, 5000} {
		for _, enforced := range []bool{false, true} {
			step, mgr := stream(t, members, 1, enforced, false, false)
			for range 1000 + 10*members {
				step()
			}
			g := only(t, mgr)
			require.Len(t, g.allocator.active, members, "all are active")
			visits, at, steps := 0, g.divideAt, 1000+4*members
			for range steps {
				if step(); g.divideAt != at && g.divideAt != 0 {
					visits += len(g.allocator.active)
				}
				at = g.divideAt
			}
			assert.Positive(t, visits)
			assert.LessOrEqual(t, visits, most*steps, "%d members, enforced: %v", members, enforced)
		}
	}
}

// Losses among many cost divisions only as far as they make the window smaller.
func TestLossesAmongManyDivideTheWindowIfItShrinks(t *testing.T) {
	for _, algorithm := range []string{"static", "reno"} {
		p := newTestbed(t)
		var legs []*leg
		for range 100 {
			l := p.openEnforced(Terms{Group: "host", Algorithm: algorithm, Params: cc.Params{}})
			l.fill()
			legs = append(legs, l)
		}
		for _, l := range legs { // the round trip is known
			p.wait(time.Millisecond)
			l.ack(mss)
			l.fill()
		}
		g := only(t, p.mgr)
		p.wait(g.divideAt.Sub(p.now) + 1)
		before, window := g.dividedAt, g.control.Cwnd
		p.now = p.now.Add(time.Millisecond)
		for i, l := range legs[:50] {
			l.r.Lost += mss
			l.r.RTT = time.Duration(100+i) * time.Millisecond // shares depend on it
			l.ack(mss)
		}
		divided := g.dividedAt != before
		assert.Equal(t, g.control.Cwnd < window, divided, "%s: %d bytes, then %d", algorithm, window, g.control.Cwnd)
		assert.Equal(t, algorithm == "reno", divided, algorithm)
	}
}

// Members that have nothing to send cost nothing.
func TestAStepAmongThoseThatRestVisitsNone(t *testing.T) {
	p := newTestbed(t)
	var legs []*leg
	for range 5000 {
		l := p.openEnforced(reno())
		l.report()
		legs = append(legs, l)
	}
	told := 0
	for range 100 {
		legs[0].fill()
		p.wait(20 * time.Millisecond)
		legs[0].ack(legs[0].r.Pipe)
		require.Len(t, legs[0].group().allocator.active, 1)
	}
	for _, l := range legs[1:] {
		told += l.told
	}
	assert.LessOrEqual(t, told, len(legs), "who rests is told once")
	assert.GreaterOrEqual(t, legs[0].limit.Cwnd, 100*mss)
}

func crowded(tb testing.TB, flows int) *Manager {
	var mgr Manager
	for range flows {
		f, err := mgr.Open(1, reno(), Leg{})
		require.NoError(tb, err)
		f.Report(Report{At: 1, MSS: mss})
	}
	return &mgr
}

// Snapshots is linear: each flow's takes no more than among few.
func TestASnapshotCostsTheSameAmongMany(t *testing.T) {
	each := func(flows int) float64 {
		mgr := crowded(t, flows)
		require.Len(t, mgr.Snapshots(), flows)
		return testing.AllocsPerRun(2, func() { mgr.Snapshots() }) / float64(flows)
	}
	assert.LessOrEqual(t, each(10_000), each(100)+0.1)
}

// BenchmarkSnapshots shows the time of one flow's: the same among 100 and 10,000.
func BenchmarkSnapshots(b *testing.B) {
	for _, flows := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("%d flows", flows), func(b *testing.B) {
			mgr := crowded(b, flows)
			for b.Loop() {
				mgr.Snapshots()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(flows), "ns/flow")
		})
	}
}
