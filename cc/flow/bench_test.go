package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

var everyone = to("10.0.0.0/8")

// stream keeps a flow at its window: each step acknowledges a segment and
// takes the next; held: the transport sends it, up to the window it was told.
func stream(tb testing.TB, members, priorities int, held, apart bool) func() {
	tb.Helper()
	var mgr Manager
	flows := make([]*Flow, members)
	reports := make([]Report, members)
	limits := make([]Limit, members)
	now := cc.Time(time.Second)
	for i := range flows {
		f, err := mgr.Open(now, Terms{Group: "host", Host: hostAt(i), Algorithm: "copa", HintCap: 1, Priority: i % priorities}, func() {})
		require.NoError(tb, err)
		flows[i] = f
	}
	i := 0
	return func() {
		now = now.Add(100 * time.Microsecond)
		f, r := flows[i], &reports[i]
		if held {
			n := max(0, min(limits[i].Cwnd, 1<<20)-r.Pipe)
			r.Held, r.Unsent = true, 64*1024
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
		if apart { // on ways of their own, and with hints
			r.RTT = time.Duration(20*(i+1)) * time.Millisecond
			mgr.Hint(everyone, cc.Hint{At: now, Capacity: 1e9, Share: 1})
			mgr.Tick(now)
		}
		limits[i] = f.Report(*r)
		i = (i + 1) % members
	}
}

func BenchmarkTakeReport(b *testing.B) {
	for _, bb := range []struct {
		name                string
		members, priorities int
		held                bool
	}{
		{"lone flow", 1, 1, false},
		{"8 members", 8, 1, false},
		{"100 members", 100, 1, false},
		{"100 members of three priorities", 100, 3, false},
		{"400 members of three priorities", 400, 3, false},
		{"lone held flow", 1, 1, true},
		{"8 held members", 8, 1, true},
		{"100 held members", 100, 1, true},
	} {
		b.Run(bb.name, func(b *testing.B) {
			step := stream(b, bb.members, bb.priorities, bb.held, false)
			for range 5000 {
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
	for _, members := range []int{1, 8} {
		for _, held := range []bool{false, true} {
			for _, apart := range []bool{false, true} {
				step := stream(t, members, 2, held, apart)
				for range 20000 { // let the ledgers reach their size
					step()
				}
				assert.Zero(t, testing.AllocsPerRun(2000, step), "%d members, held: %v, apart: %v", members, held, apart)
			}
		}
	}
}
