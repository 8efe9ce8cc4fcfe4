package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

const mss = cc.DefaultMSS

func TestSource(t *testing.T) {
	at := func(d time.Duration) cc.Time { return start.Add(d) }
	for _, c := range []struct {
		what  string
		cfg   FlowConfig
		taken cc.Bytes
		now   time.Duration
		n     cc.Bytes
		next  cc.Time
	}{
		{"an endless one always has something", FlowConfig{}, 1 << 30, 0, cc.MaxCwnd, 0},
		{"a finite one has what is left", FlowConfig{Bytes: 5000}, 4000, 0, 1000, 0},
		{"and then nothing, ever", FlowConfig{Bytes: 5000}, 5000, 0, 0, cc.Never},
		{"a paced one waits for a segment", FlowConfig{Rate: 8 * 1448 * 100}, 0, 5 * ms, 0, at(10 * ms)},
		{"and has whole segments", FlowConfig{Rate: 8 * 1448 * 100}, 0, 25 * ms, 2 * mss, 0},
		{"its last segment may be short", FlowConfig{Rate: 8e6, Bytes: 2000}, 1448, 2 * ms, 552, 0},
		{"in a pause there is nothing until it ends", FlowConfig{On: 10 * ms, Off: 5 * ms}, 0, 12 * ms, 0, at(15 * ms)},
		{"after a pause there is again", FlowConfig{On: 10 * ms, Off: 5 * ms}, 0, 15 * ms, cc.MaxCwnd, 0},
		{
			"a pause produces nothing",
			FlowConfig{Rate: 8 * 1448 * 100, On: 10 * ms, Off: 5 * ms},
			mss, 14 * ms, 0,
			at(25 * ms),
		},
	} {
		s := newSource(c.cfg, 0, start, 1)
		s.taken = c.taken
		n, next := s.available(at(c.now))
		assert.Equal(t, c.n, n, c.what)
		assert.Equal(t, c.next, next, c.what)
	}
}

// A source that says when it will have something has it then, and not before.
func TestSourceKeepsItsWord(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newSource(FlowConfig{
			Rate:   cc.Rate(rapid.Int64Range(0, 100_000_000).Draw(t, "rate")),
			On:     time.Duration(rapid.Int64Range(1, 50).Draw(t, "on")) * ms,
			Off:    time.Duration(rapid.Int64Range(0, 50).Draw(t, "off")) * ms,
			Random: rapid.Bool().Draw(t, "random"),
		}, 0, start, rapid.Uint64().Draw(t, "seed"))
		now := start
		for range 50 {
			n, next := s.available(now)
			if n > 0 {
				s.taken += min(n, 10*mss)
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(20*ms)).Draw(t, "wait")))
				continue
			}
			if next <= now {
				t.Fatalf("at %d it has nothing, and promises some for %d", now, next)
			}
			if n, _ := s.available(next - 1); n > 0 {
				t.Fatalf("it has %d bytes before the time it named", n)
			}
			if n, _ := s.available(next); n == 0 {
				t.Fatalf("it has nothing at the time it named")
			}
			now = next
		}
	})
}

func TestReceiver(t *testing.T) {
	r := receiver{}
	for _, c := range []struct {
		n     int64
		fresh bool
		next  int64
	}{{0, true, 1}, {2, true, 1}, {2, false, 1}, {4, true, 1}, {1, true, 3}, {0, false, 3}, {3, true, 5}} {
		assert.Equal(t, c.fresh, r.addArrival(start, arrival{n: c.n}), "segment %d", c.n)
		assert.Equal(t, c.next, r.next, "segment %d", c.n)
	}
	assert.Empty(t, r.above)
	assert.Equal(t, 7, r.logged())
	assert.Len(t, r.takeNews(5), 5)
	assert.Equal(t, []arrival{{n: 0}, {n: 3}}, r.takeNews(7))
	assert.Equal(t, 7, r.logged())
}

func TestReceiverBatchesAcknowledgements(t *testing.T) {
	r := receiver{every: 10 * ms}
	at, ok := r.acknowledges(start.Add(ms))
	assert.True(t, ok)
	assert.Equal(t, start.Add(10*ms), at)
	_, ok = r.acknowledges(start.Add(2 * ms))
	assert.False(t, ok, "one is on its way")
	r.planned = false
	at, _ = r.acknowledges(start.Add(20 * ms))
	assert.Equal(t, start.Add(20*ms), at)
}

// What Linux acknowledges at once, although it delays.
func TestReceiverDelaysAsLinuxDoes(t *testing.T) {
	now, n := start, int64(0)
	r := receiver{delay: 40 * ms}
	// come has a segment arrive and tells whether it is acknowledged at once.
	come := func(a arrival) bool {
		r.addArrival(now, a)
		at, ok := r.acknowledges(now)
		if !ok || at != now {
			return false
		}
		r.acknowledge()
		return true
	}
	next := func() arrival { n++; return arrival{n: n - 1} }
	for i := range quickAcks {
		assert.True(t, come(next()), "segment %d of the first", i)
	}
	assert.False(t, come(next()))
	assert.True(t, come(next()), "every second one")

	assert.False(t, come(next()))
	assert.True(t, come(arrival{n: n + 1}), "behind a hole")
	assert.True(t, come(next()), "into the hole")
	n++
	assert.False(t, come(next()))
	r.acknowledge() // when its time has come

	pushed := next()
	pushed.pushed = true
	assert.True(t, come(pushed), "the end of a write")
	assert.False(t, come(next()))
	r.acknowledge()

	assert.True(t, come(arrival{n: 3}), "had before")
	for range quickAcks - 1 {
		assert.True(t, come(next()), "something is amiss")
	}
	assert.False(t, come(next()))
	r.acknowledge()

	now = now.Add(minRTO + ms)
	assert.True(t, come(next()), "after a pause")
}

func TestJain(t *testing.T) {
	assert.InDelta(t, 1, Jain(3, 3, 3), 1e-9)
	assert.InDelta(t, 0.25, Jain(5, 0, 0, 0), 1e-9)
	assert.InDelta(t, 0.8, Jain(1, 3), 1e-9)
	assert.Zero(t, Jain())
	assert.Zero(t, Jain(0, 0))
}

func TestDelaysAreNearestRanks(t *testing.T) {
	var all []time.Duration
	for i := 200; i > 0; i-- {
		all = append(all, time.Duration(i)*ms)
	}
	assert.Equal(t, Delays{Mean: 100*ms + ms/2, P50: 100 * ms, P95: 190 * ms, P99: 198 * ms, Max: 200 * ms},
		DelaysOf(all))
	assert.Equal(t, Delays{Mean: ms, P50: ms, P95: ms, P99: ms, Max: ms}, DelaysOf([]time.Duration{ms}))
	assert.Zero(t, DelaysOf(nil))
}

// What a full send buffer takes is what was acknowledged, so that no more is ever in flight than it holds.
func TestASendBufferBoundsWhatIsInFlight(t *testing.T) {
	for _, transport := range []Transport{Kernel, Native} {
		for _, buffer := range []cc.Bytes{20 * mss, 100*mss + 1} {
			result := play(t, Scenario{
				Down:      LinkConfig{Rate: 12e6, Delay: 20 * ms, QueueBytes: 2e6},
				Up:        LinkConfig{Delay: 20 * ms},
				Transport: transport, Flows: []FlowConfig{{Algorithm: "cubic", SendBuffer: buffer}},
				Duration: 10 * time.Second, Sample: 10 * ms, Seed: 1,
			})
			most := cc.Bytes(0)
			for _, s := range result.Flows[0].Samples {
				most = max(most, s.Inflight)
			}
			assert.LessOrEqual(t, most, buffer, "%v", transport)
			assert.Greater(t, most, buffer*9/10, "%v: and it is used", transport)
			link, perRound := 12e6*float64(mss)/float64(mss+HeaderBytes), float64(buffer)*8/0.041
			assert.InDelta(t, min(link, perRound), float64(result.Flows[0].Throughput),
				0.6e6, "%v", transport)
		}
	}
}

func TestARequestThatIsLostIsRepeatedAsTheTimerHasIt(t *testing.T) {
	r := play(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms}, Up: LinkConfig{Delay: 20 * ms, Loss: 0.2},
		Flows:    []FlowConfig{{Algorithm: "cubic", Bytes: 1, Every: 2 * time.Second}},
		Duration: time.Minute, Seed: 1,
	})
	came := map[time.Duration]int{}
	for _, o := range r.Flows[0].Objects[1:] {
		came[o.Took.Round(2*ms)]++
	}
	assert.Equal(t, 29, came[40*ms]+came[240*ms]+came[640*ms]+came[1440*ms], "it backs off: %v", came)
	assert.Positive(t, came[240*ms], came)
	assert.Positive(t, came[1440*ms], came)
}

func TestWhatWasWrittenBeforeARestIsSentInIt(t *testing.T) {
	r := play(t, Scenario{
		Down: LinkConfig{Rate: 50e6, Delay: 20 * ms, QueuePackets: 250}, Up: LinkConfig{Delay: 20 * ms},
		Transport: Kernel, Sample: 10 * ms, Duration: 5 * time.Second,
		Flows: []FlowConfig{{Algorithm: "cubic", On: 2 * time.Second, Off: 3 * time.Second}},
	})
	for _, s := range r.Flows[0].Samples {
		if s.At > 2500*ms {
			assert.Zero(t, s.Inflight+s.Unsent, "at %v", s.At)
		}
	}
}

func TestAServersWindowRestartsAfterARest(t *testing.T) {
	for _, restarts := range []bool{false, true} {
		r := play(t, Scenario{
			Down: LinkConfig{Rate: 50e6, Delay: 20 * ms, QueuePackets: 250}, Up: LinkConfig{Delay: 20 * ms},
			Transport: Kernel, Sample: 10 * ms, Duration: 6 * time.Second,
			Flows: []FlowConfig{{Algorithm: "cubic", On: 2 * time.Second, Off: 3 * time.Second, Restarts: restarts}},
		})
		most := cc.Bytes(0)
		for _, s := range r.Flows[0].Samples {
			if s.At >= 5*time.Second && s.At <= 5040*ms {
				most = max(most, s.Inflight/cc.DefaultMSS)
			}
		}
		assert.Equal(t, restarts, most <= 10, "%v packets at once", most)
	}
}
