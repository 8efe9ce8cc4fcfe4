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
