package flow

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// paced asks to be called again after its own time, as a flow with a pacer does.
type paced struct {
	timers *timers
	every  time.Duration
	_      [1024]byte // of a flow and what belongs to it: none is in the cache when its turn comes
	calls  []cc.Time
	timer  timer
}

func (p *paced) onTimer(now cc.Time) {
	if p.every > 0 {
		p.timers.scheduleAt(&p.timer, now.Add(p.every))
	} else {
		p.calls = append(p.calls, now)
	}
}

func TestTimersCallInOrderWhatIsNotCancelled(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	var all timers
	due := map[*paced]cc.Time{}
	var tickers []*paced
	for range 500 {
		p := &paced{}
		p.timer.owner = p
		tickers = append(tickers, p)
		due[p] = cc.Time(1 + rng.IntN(1000))
		all.scheduleAt(&p.timer, due[p])
	}
	for range 1000 {
		p := tickers[rng.IntN(len(tickers))]
		if rng.IntN(4) == 0 {
			all.cancelTimer(&p.timer)
			delete(due, p)
			continue
		}
		at := cc.Time(1 + rng.IntN(1000))
		if before, waits := due[p]; !waits || at < before {
			due[p] = at
		}
		all.scheduleAt(&p.timer, at)
	}
	for now := all.runDue(0); now != cc.Never; now = all.runDue(now) {
		require.LessOrEqual(t, now, cc.Time(1000))
	}
	for _, p := range tickers {
		var want []cc.Time
		if at, waits := due[p]; waits {
			want = append(want, at)
		}
		require.True(t, slices.Equal(want, p.calls), "%v %v", want, p.calls)
	}
}

// BenchmarkTimers is a timer's part of the tick of 8,000 paced flows.
func BenchmarkTimers(b *testing.B) {
	const flows = 8000
	var all timers
	rng := rand.New(rand.NewPCG(1, 0))
	tickers := make([]*paced, flows)
	for i := range tickers {
		tickers[i] = &paced{timers: &all, every: time.Duration(5+rng.IntN(10)) * time.Millisecond}
		tickers[i].timer.owner = tickers[i]
	}
	rng.Shuffle(flows, func(i, j int) { tickers[i], tickers[j] = tickers[j], tickers[i] })
	now := cc.Time(time.Second)
	for _, p := range tickers {
		all.scheduleAt(&p.timer, now.Add(time.Duration(rng.Int64N(int64(10*time.Millisecond)))))
	}
	now = all.runDue(now)
	b.ReportAllocs()
	for b.Loop() {
		now = all.runDue(now)
	}
	assert.Len(b, all.due, flows)
}
