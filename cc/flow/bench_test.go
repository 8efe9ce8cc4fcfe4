package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

var everyone = to("10.0.0.0/8")

// stream keeps flows at their windows, one after the other: each step acknowledges a
// segment and takes the next; enforced: the leg sends it, up to the window it was told;
// stamped: and knows the peer's clock.
func stream(tb testing.TB, members, priorities int, enforced, apart, stamped bool) (step func(), mgr *Manager) {
	tb.Helper()
	mgr = &Manager{}
	due := cc.Never
	mgr.Arm = func(_ int, at cc.Time) { due = min(due, at) }
	flows := make([]*Flow, members)
	reports := make([]Report, members)
	limits := make([]Limit, members)
	now := cc.Time(time.Second)
	for i := range flows {
		f, err := mgr.Open(now, Terms{
			Group: "host", Host: hostAt(i), Algorithm: "copa", HintCap: 1, Priority: i % priorities,
		}, Leg{
			Enforces: enforced, Apply: func(l Limit) { limits[i] = l },
		})
		require.NoError(tb, err)
		flows[i] = f
	}
	i := 0
	return func() {
		now = now.Add(100 * time.Microsecond)
		if due <= now {
			due = cc.Never
			due = min(due, mgr.Tick(0, now))
		}
		f, r := flows[i], &reports[i]
		if enforced {
			n := max(0, min(limits[i].Cwnd, 1<<20)-r.Pipe)
			r.Unsent = 64 * 1024
			r.Written = r.Acked + r.Pipe + n + r.Unsent
			r.Pipe += n
		} else {
			g := f.Take(now, 64*1024)
			r.Written += g.Bytes
			r.Pipe += g.Bytes
		}
		if n := min(r.Pipe, mss); n > 0 {
			r.Acked += n
			r.Pipe -= n
		}
		r.At, r.MSS = now, mss
		if stamped {
			r.RTT, r.Peer = 20*time.Millisecond, PeerClock{now, uint32(now / cc.Time(time.Millisecond))}
		}
		if apart { // on ways of their own, and with hints
			r.RTT = time.Duration(20*(i+1)) * time.Millisecond
			mgr.Hint(everyone, cc.Hint{At: now, Capacity: 1e9, Share: 1})
		}
		f.Report(*r)
		i = (i + 1) % members
	}, mgr
}

func BenchmarkTakeReport(b *testing.B) {
	for _, bb := range []struct {
		name                string
		members, priorities int
		enforced, stamped   bool
	}{
		{"lone flow", 1, 1, false, false},
		{"8 members", 8, 1, false, false},
		{"100 members", 100, 1, false, false},
		{"100 members of three priorities", 100, 3, false, false},
		{"1000 members of three priorities", 1000, 3, false, false},
		{"5000 members", 5000, 1, false, false},
		{"lone enforced flow", 1, 1, true, false},
		{"lone enforced flow with timestamps", 1, 1, true, true},
		{"8 enforced members", 8, 1, true, false},
		{"100 enforced members", 100, 1, true, false},
		{"1000 enforced members", 1000, 1, true, false},
		{"5000 enforced members", 5000, 1, true, false},
	} {
		b.Run(bb.name, func(b *testing.B) {
			step, _ := stream(b, bb.members, bb.priorities, bb.enforced, false, bb.stamped)
			for range 5000 + 20*bb.members {
				step()
			}
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}

func TestTakeAndReportDoNotAllocate(t *testing.T) {
	need.OneGoroutine(t)
	for _, members := range []int{1, 8, 100} {
		for _, enforced := range []bool{false, true} {
			for _, apart := range []bool{false, true} {
				step, _ := stream(t, members, 2, enforced, apart, enforced)
				for range 20000 + 500*members { // let the ledgers reach their size
					step()
				}
				assert.Zero(t, testing.AllocsPerRun(2000, step), "%d members, enforced: %v, apart: %v", members,
					enforced, apart)
			}
		}
	}
}

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
		told += l.applied
	}
	assert.LessOrEqual(t, told, len(legs), "who rests is told once")
	assert.GreaterOrEqual(t, legs[0].limit.Cwnd, 100*mss)
}
