package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// stream keeps a flow at its window: each step acknowledges a segment and
// takes the next.
func stream(tb testing.TB, members int) func() {
	tb.Helper()
	var mgr Manager
	flows := make([]*Flow, members)
	reports := make([]Report, members)
	now := cc.Time(time.Second)
	for i := range flows {
		f, err := mgr.Open(now, Terms{Group: "host", Algorithm: "copa"}, func() {})
		require.NoError(tb, err)
		flows[i] = f
	}
	i := 0
	return func() {
		now = now.Add(100 * time.Microsecond)
		f, r := flows[i], &reports[i]
		g := f.Take(now, 64*1024)
		r.Written += g.Bytes
		r.Pipe += g.Bytes
		if n := min(r.Pipe, mss); n > 0 {
			r.Acked += n
			r.Pipe -= n
		}
		r.At, r.MSS = now, mss
		f.Report(*r)
		i = (i + 1) % members
	}
}

func BenchmarkTakeReport(b *testing.B) {
	for _, bb := range []struct {
		name    string
		members int
	}{{"lone flow", 1}, {"8 members", 8}, {"100 members", 100}} {
		b.Run(bb.name, func(b *testing.B) {
			step := stream(b, bb.members)
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
		step := stream(t, members)
		for range 20000 { // let the ledgers reach their size
			step()
		}
		assert.Zero(t, testing.AllocsPerRun(2000, step), "%d members", members)
	}
}
