package sim

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// told is what a host was told, and when.
type told struct {
	at cc.Time
	cc.Hint
}

// listener is a flow's algorithm with a fixed window; it notes every hint once.
type listener struct {
	cc.Algorithm
	now   cc.Time
	heard []told
}

func (l *listener) OnTick(s cc.State) {
	l.now = s.Now
	if h := s.Hint; h != nil && (len(l.heard) == 0 || l.heard[len(l.heard)-1].Hint != *h) {
		l.heard = append(l.heard, told{s.Now, *h})
	}
}

func (l *listener) OnAck(a cc.Ack) {
	l.OnTick(a.State)
	l.Algorithm.OnAck(a)
}

func (l *listener) Control() cc.Control {
	ctl := l.Algorithm.Control()
	ctl.NextTick = l.now.Add(ms)
	return ctl
}

var listeners []*listener

func init() {
	cc.Register(cc.Spec{
		Name: "listener", About: "notes hints", Source: "this test",
		Params: []cc.Param{
			{Name: "cwnd_packets", Min: 1, Max: 1e6, Default: 22},
			{Name: "pacing_mbit", Min: 0, Max: 1e6},
			{Name: "priority", Min: 1, Max: 9, Default: 1},
		},
		New: func(cfg cc.Config) cc.Algorithm {
			inner, err := cc.New("static", cc.Config{MSS: cfg.MSS, Params: cc.Params{
				"cwnd_packets": cfg.Params["cwnd_packets"], "pacing_mbit": cfg.Params["pacing_mbit"],
			}})
			if err != nil {
				panic(err)
			}
			l := &listener{Algorithm: inner}
			listeners = append(listeners, l)
			return l
		},
	})
}

// hear runs a scenario and returns what each flow's group was told.
func hear(t *testing.T, s Scenario) []*listener {
	t.Helper()
	listeners = nil
	_, err := Run(s)
	require.NoError(t, err)
	require.NotEmpty(t, listeners)
	return listeners
}

// last is the newest hint at most at d.
func (l *listener) last(t *testing.T, d time.Duration) told {
	t.Helper()
	for i := len(l.heard) - 1; i >= 0; i-- {
		if l.heard[i].at <= start.Add(d) {
			return l.heard[i]
		}
	}
	require.Fail(t, "nothing was heard")
	return told{}
}

// paced is a flow of r Mbit/s.
func paced(mbit float64) FlowConfig {
	return FlowConfig{Algorithm: "listener", Params: cc.Params{"cwnd_packets": 1000, "pacing_mbit": mbit}}
}

// full is what a rate on the wire leaves for payload.
func full(r float64) float64 { return r * 1448 / 1500 }

func TestALinkTellsOfItsCapacity(t *testing.T) {
	l := hear(t, Scenario{
		Down:  LinkConfig{Rate: 12e6, Delay: 20 * ms, QueueBytes: 150_000},
		Up:    LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(4)}, Hints: 10 * ms, Duration: 2 * time.Second,
	})[0]
	h := l.last(t, time.Second)
	assert.InEpsilon(t, full(12e6), float64(h.Capacity), 0.01, "its own part and all that is idle")
	assert.InEpsilon(t, full(12e6), float64(h.FairShare), 0.01, "alone")
	assert.InEpsilon(t, 12e6, float64(h.LinkRate), 0.001)
	assert.InEpsilon(t, 4e6*1500/1448, float64(h.ArrivalRate), 0.1, "packets of 1 ms over 40 ms")
	assert.InDelta(t, 150_000, float64(h.QueueRoom), 1500)
	assert.Equal(t, 1, h.Flows)
	assert.Zero(t, h.RadioLost)
	assert.Positive(t, h.Share, "this algorithm has a priority")
	assert.GreaterOrEqual(t, h.at.Sub(h.At), 20*ms, "a report takes the way back")
	assert.Less(t, h.at.Sub(h.At), 22*ms, "and the next event shows it")
}

func TestWhatIsIdleIsSharedAmongTheActive(t *testing.T) {
	s := Scenario{
		Down:  LinkConfig{Rate: 12e6, Delay: 20 * ms, QueueBytes: 150_000},
		Up:    LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(4 * 1448. / 1500), paced(2 * 1448. / 1500)}, Hints: 10 * ms, Duration: 2 * time.Second,
	}
	both := hear(t, s)
	a, b := both[0].last(t, time.Second), both[1].last(t, time.Second)
	assert.InEpsilon(t, full(4e6+3e6), float64(a.Capacity), 0.05, "4 of its own, and half of the 6 that are idle")
	assert.InEpsilon(t, full(2e6+3e6), float64(b.Capacity), 0.05)
	assert.InEpsilon(t, full(6e6), float64(a.FairShare), 0.01)
	assert.Equal(t, 2, a.Flows)
	assert.InEpsilon(t, 6e6, float64(a.ArrivalRate), 0.1)
}

func TestALinkThatIsFullIsSharedEqually(t *testing.T) {
	s := Scenario{
		Down:  LinkConfig{Rate: 12e6, Delay: 20 * ms, QueueBytes: 5e6},
		Up:    LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(12), paced(7), paced(1 * 1448. / 1500)}, Hints: 10 * ms, Duration: 2 * time.Second,
	}
	all := hear(t, s)
	for i, want := range []float64{5.5e6, 5.5e6, 1e6} {
		assert.InDelta(t, full(want), float64(all[i].last(t, 1500*ms).Capacity), 0.3e6,
			"flow %d: the small one has all it wants, give or take a packet", i+1)
	}
}

func TestFlowsOfOneGroupAreOneHost(t *testing.T) {
	a, b := paced(2), paced(6)
	a.Group, b.Group = "phone", "phone"
	c := paced(12)
	l := hear(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms, QueueBytes: 5e6}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{a, b, c}, Hints: 10 * ms, Duration: 2 * time.Second,
	})
	assert.InEpsilon(t, full(6e6), float64(l[0].last(t, time.Second).Capacity), 0.1)
	assert.InEpsilon(t, full(6e6), float64(l[1].last(t, time.Second).FairShare), 0.01)
	assert.Equal(t, 3, l[2].last(t, time.Second).Flows)
}

func TestALinkThatIsSilentSaysSo(t *testing.T) {
	trace, err := Steps("steps", 3*time.Second, Step{Rate: 12e6}, Step{At: time.Second, Rate: 0},
		Step{At: 1200 * ms, Rate: 6e6})
	require.NoError(t, err)
	l := hear(t, Scenario{
		Down: LinkConfig{Trace: trace, Delay: 20 * ms}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(1)}, Hints: 10 * ms, Duration: 3 * time.Second,
	})[0]
	assert.InEpsilon(t, 12e6, float64(l.last(t, 900*ms).LinkRate), 0.01)
	i := slices.IndexFunc(l.heard, func(h told) bool { return h.At > start.Add(1150*ms) })
	require.Positive(t, i)
	h := l.heard[i]
	require.LessOrEqual(t, h.At, start.Add(1200*ms))
	assert.EqualValues(t, 1, h.LinkRate, "nothing, which is not the same as not knowing")
	assert.EqualValues(t, 1, h.Capacity)
	assert.InEpsilon(t, 6e6, float64(l.last(t, 2*time.Second).LinkRate), 0.05)
	assert.Equal(t, cc.MaxCwnd, h.QueueRoom, "a queue without a limit")
}

func TestLossesAtRandomAreTheRadios(t *testing.T) {
	s := Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms, Loss: 0.1, QueuePackets: 100}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(4), paced(2)}, Hints: 10 * ms, Duration: 5 * time.Second, Seed: 3,
	}
	listeners = nil
	r, err := Run(s)
	require.NoError(t, err)
	for i, l := range listeners {
		h := l.last(t, s.Duration)
		assert.InEpsilon(t, float64(r.Flows[i].Losses)*1448, float64(h.RadioLost), 0.1, "each host's own, so far")
		for k := range l.heard[1:] {
			require.GreaterOrEqual(t, l.heard[k+1].RadioLost, l.heard[k].RadioLost, "cumulative")
		}
	}
}

func TestAQueueThatFillsHasLessRoom(t *testing.T) {
	l := hear(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms, QueuePackets: 50}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{{Algorithm: "listener", Params: cc.Params{"cwnd_packets": 70}}}, Hints: 10 * ms, Duration: 2 * time.Second,
	})[0]
	h := l.last(t, 2*time.Second)
	assert.InDelta(t, 20*1500, float64(h.QueueRoom), 3*1500, "40 of 70 packets are in flight, 30 wait")
	assert.InEpsilon(t, full(12e6), float64(h.Capacity), 0.01)
}

func TestSharesGoByPriorityAndTraffic(t *testing.T) {
	flow := func(priority float64, rate cc.Rate) FlowConfig {
		f := paced(2)
		f.Params["priority"] = priority
		f.Rate = rate
		return f
	}
	for _, tt := range []struct {
		name  string
		flows []FlowConfig
		want  []float64
	}{
		{
			"NACC equation 8: priorities 4 and 2, equal traffic",
			[]FlowConfig{flow(4, 0), flow(2, 0)},
			[]float64{2. / 3, 1. / 3},
		},
		{"priorities 2, 4 and 1", []FlowConfig{flow(2, 0), flow(4, 0), flow(1, 0)}, []float64{2. / 7, 4. / 7, 1. / 7}},
		{
			"1000 B each 10 ms at priority 2, 500 B at 4",
			[]FlowConfig{flow(2, 800_000), flow(4, 400_000)},
			[]float64{0.5, 0.5},
		},
		{"an algorithm without a priority counts as 1", []FlowConfig{flow(3, 0), {Algorithm: "reno"}}, []float64{0.75}},
	} {
		l := hear(t, Scenario{
			Down: LinkConfig{Rate: 12e6, Delay: 20 * ms, QueuePackets: 100}, Up: LinkConfig{Delay: 20 * ms},
			Flows: tt.flows, Hints: 10 * ms, Duration: time.Second,
		})
		require.Len(t, l, len(tt.want), tt.name)
		for i, want := range tt.want {
			assert.InDelta(t, want, l[i].last(t, time.Second).Share, 1e-9, "%s: flow %d", tt.name, i+1)
		}
	}
}

func TestAFlowThatHasEndedIsNoLongerCounted(t *testing.T) {
	a, b := paced(2), paced(2)
	b.Stop = 500 * ms
	l := hear(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{a, b}, Hints: 10 * ms, Duration: time.Second,
	})
	assert.Equal(t, 2, l[0].last(t, 400*ms).Flows)
	h := l[0].last(t, 900*ms)
	assert.Equal(t, 1, h.Flows)
	assert.InEpsilon(t, full(12e6), float64(h.FairShare), 0.01)
	assert.EqualValues(t, 1, h.Share)
	assert.LessOrEqual(t, l[1].heard[len(l[1].heard)-1].at, start.Add(500*ms))
}

func TestWithoutHintsNothingIsSaid(t *testing.T) {
	l := hear(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(2)}, Duration: time.Second,
	})
	assert.Empty(t, l[0].heard)
}

// A full fq_codel drops what waits in the longest queue.
func TestWhatAManagedQueueDropsWaitsNoMore(t *testing.T) {
	l := hear(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms, AQM: FQCoDel, QueuePackets: 50}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(4), {Algorithm: UDP, Rate: 24e6, Start: time.Second, Stop: 3 * time.Second}},
		Hints: 10 * ms, Duration: 4 * time.Second,
	})[0]
	assert.InEpsilon(t, full(4e6*1500/1448), float64(l.last(t, 2900*ms).Capacity), 0.1, "nothing is idle")
	assert.InEpsilon(t, full(12e6), float64(l.last(t, 3500*ms).Capacity), 0.01, "alone again")
}
