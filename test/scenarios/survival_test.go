package scenarios

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

const ms = time.Millisecond

// ordeal is something that paths and applications do, and that no algorithm may
// come to a standstill over. Each meets it alone on a link of 12 Mbit/s and
// 40 ms, which is 40 packets in flight, in front of a queue of 250.
type ordeal struct {
	name   string
	change func(*sim.Scenario)
	spans  []span
	silent int // whole seconds in a row in which nothing may arrive
	twice  bool
}

// span is a part of the run and what must be used in it, at least.
type span struct {
	from, to int                      // whole seconds
	used     float64                  // of what of tells
	of       func(sim.Result) float64 // in Mbit/s; nil: of the link
	but      map[string]exception     // by algorithm
}

// exception is what one algorithm uses at least, where that is less.
type exception struct {
	used    float64
	because string
}

// surviving are settings for algorithms that do not mean to fill this link as
// they come.
var surviving = map[string]cc.Params{
	"nacc":   {"usable_fraction": 0.9}, // as its profile "wired"; a cellular link's word is for more than this user
	"static": {"cwnd_packets": 60},     // somewhat more than is in flight on the link
}

// mdiWanders is for all cases: mdi draws its window from a table, and its walk
// finds the rate of so steady a link after ten seconds or more.
var mdiWanders = map[string]exception{"mdi": {0.1, "its walk through a table takes its time on a steady link"}}

func except(more map[string]exception) map[string]exception {
	more["mdi"] = mdiWanders["mdi"]
	return more
}

var ordeals = []ordeal{
	{
		name:   "acknowledgements come every millisecond",
		change: func(s *sim.Scenario) { s.AckEvery = ms },
		spans:  []span{{from: 3, to: 10, used: 0.85, but: mdiWanders}},
	},
	{
		name:   "acknowledgements come every 10 ms",
		change: func(s *sim.Scenario) { s.AckEvery = 10 * ms },
		spans:  []span{{from: 3, to: 10, used: 0.85, but: mdiWanders}},
	},
	{
		// Two batches' worth must be in flight to fill the link, which is more than
		// those mean to have that keep the queue at a few packets.
		name:   "acknowledgements come every 50 ms, longer than the round trip",
		change: func(s *sim.Scenario) { s.AckEvery = 50 * ms },
		spans:  []span{{from: 3, to: 10, used: 0.5, but: mdiWanders}},
	},
	{
		name:   "one acknowledgement in ten is lost",
		change: func(s *sim.Scenario) { s.Up.Loss = 0.1 },
		spans:  []span{{from: 3, to: 10, used: 0.85, but: mdiWanders}},
	},
	{
		name:   "every other acknowledgement is lost",
		change: func(s *sim.Scenario) { s.Up.Loss = 0.5 },
		spans:  []span{{from: 3, to: 10, used: 0.8, but: mdiWanders}},
		twice:  true,
	},
	{
		name: "a slow application, then a greedy one in the same window",
		change: func(s *sim.Scenario) {
			s.Flows = []sim.FlowConfig{{Rate: 2e6}, {Start: 5 * time.Second}}
			s.Duration = 12 * time.Second
		},
		spans: []span{
			{from: 1, to: 5, used: 0.95, of: mbit(2), but: mdiWanders},
			{from: 7, to: 12, used: 0.85, but: mdiWanders},
		},
	},
	{
		// A paused flow's part of the window goes unused where the window leaves no queue.
		name: "an application that pauses, then a greedy one in the same window",
		change: func(s *sim.Scenario) {
			s.Flows = []sim.FlowConfig{{On: 200 * ms, Off: 300 * ms}, {Start: 5 * time.Second}}
			s.Duration = 12 * time.Second
		},
		spans: []span{
			{from: 1, to: 5, used: 0.15, but: mdiWanders}, // it produces for two fifths of the time
			{from: 7, to: 12, used: 0.7, but: mdiWanders},
		},
	},
	{
		// At this rate a packet takes three round trips to send.
		name:   "five seconds of 100 kbit per second",
		change: func(s *sim.Scenario) { s.Down.Trace, s.Duration = trickle, 16*time.Second },
		spans:  []span{{from: 13, to: 16, used: 0.8, but: mdiWanders}},
	},
	{
		// For ten seconds most know only the shorter path, and take the difference
		// for a queue.
		name: "a path that grows from 40 to 100 ms",
		change: func(s *sim.Scenario) {
			s.Changes = []sim.Change{{At: 5 * time.Second, Delay: 50 * ms}}
			s.Duration = 22 * time.Second
		},
		spans: []span{
			{from: 5, to: 17, used: 0.1},
			{from: 17, to: 22, used: 0.5, but: except(map[string]exception{
				"vegas": {0.02, "it never forgets its least round trip: Mo et al., INFOCOM 1999"},
			})},
		},
	},
	{
		// The packets behind the change overtake those before it.
		name: "a path that shrinks from 100 to 40 ms",
		change: func(s *sim.Scenario) {
			s.Down.Delay, s.Up.Delay = 50*ms, 50*ms
			s.Changes = []sim.Change{{At: 5 * time.Second, Delay: 20 * ms}}
			s.Duration = 14 * time.Second
		},
		spans: []span{{from: 7, to: 14, used: 0.85, but: mdiWanders}},
	},
	{
		name:   "two packets are overtaken ten times a second",
		change: func(s *sim.Scenario) { s.Changes = flips(100*ms, s.Duration, 20*ms, 18*ms) },
		spans: []span{{from: 3, to: 10, used: 0.85, but: except(map[string]exception{
			"vivace": {0.2, "it weighs the growth of the round trip 900-fold, and takes each jump for that"},
		})}},
	},
	{
		// Three are enough to be taken for lost, so this is a loss every 0.6 s.
		name:   "five packets are overtaken now and then",
		change: func(s *sim.Scenario) { s.Changes = flips(300*ms, s.Duration, 20*ms, 15*ms) },
		spans:  []span{{from: 3, to: 10, used: 0.4, but: mdiWanders}},
	},
}

// trickle is the link, with five seconds of little.
var trickle = steps(30*time.Second, sim.Step{Rate: 12e6}, sim.Step{At: 5 * time.Second, Rate: 1e5}, sim.Step{At: 10 * time.Second, Rate: 12e6})

// gaps are outages. What waits in the queue meanwhile is acknowledged when they end.
// Before a short queue on a long path, two thirds of what is in flight is lost, and
// so is what the retransmission timer sends.
func gaps() (all []ordeal) {
	for _, path := range []struct {
		name   string
		rate   cc.Rate
		delay  time.Duration
		queue  int
		within int // seconds after the return the link is in use again
		but    map[string]exception
	}{
		{"", 12e6, 20 * ms, 250, 3, mdiWanders},
		{", a long path and a short queue", 20e6, 50 * ms, 60, 6, except(map[string]exception{
			"verus": {0.5, "it has 6 to 13 Mbit/s there from second to second, with or without a gap"},
		})},
	} {
		for _, gap := range []int{1, 4, 10, 60} {
			back := 10 + gap
			end := back + 20
			link := steps(time.Duration(end)*time.Second, sim.Step{Rate: path.rate},
				sim.Step{At: 10 * time.Second}, sim.Step{At: time.Duration(back) * time.Second, Rate: path.rate})
			all = append(all, ordeal{
				name: fmt.Sprintf("a gap of %d s%s", gap, path.name),
				change: func(s *sim.Scenario) {
					s.Down = sim.LinkConfig{Trace: link, Delay: path.delay, QueuePackets: path.queue}
					s.Up.Delay, s.Duration = path.delay, time.Duration(end)*time.Second
				},
				spans: []span{
					{from: back + path.within, to: back + path.within + 3, used: 0.8, of: since(5, 10), but: path.but},
					{from: back + 15, to: end, used: 0.8, of: since(5, 10), but: path.but},
				},
				silent: gap + 1,
			})
		}
	}
	return all
}

func steps(length time.Duration, all ...sim.Step) *sim.Trace {
	trace, err := sim.Steps("steps", length, all...)
	if err != nil {
		panic(err)
	}
	return trace
}

// flips lets the delay change between two values.
func flips(every, until, one, other time.Duration) (all []sim.Change) {
	for at := every; at < until; at += every {
		one, other = other, one
		all = append(all, sim.Change{At: at, Delay: one})
	}
	return all
}

func mbit(rate float64) func(sim.Result) float64 {
	return func(sim.Result) float64 { return rate }
}

func since(from, to int) func(sim.Result) float64 {
	return func(r sim.Result) float64 { return throughput(r, from, to) }
}

// fullLink is the payload that the link carries, in Mbit/s.
const fullLink = 12. * 1448 / 1500

// throughput is the mean of all flows together, in Mbit/s.
func throughput(r sim.Result, from, to int) float64 {
	sum := 0.0
	for _, f := range r.Flows {
		for _, rate := range f.PerSecond[from:to] {
			sum += rate.Mbps()
		}
	}
	return sum / float64(to-from)
}

// scenario is the ordeal as put to one algorithm.
func (o ordeal) scenario(spec cc.Spec) sim.Scenario {
	s := sim.Scenario{
		Down:  sim.LinkConfig{Rate: 12e6, Delay: 20 * ms, QueuePackets: 250},
		Up:    sim.LinkConfig{Delay: 20 * ms},
		Flows: make([]sim.FlowConfig, 1), Duration: 10 * time.Second, Sample: 500 * ms, Seed: 1,
	}
	o.change(&s)
	for i := range s.Flows {
		f := &s.Flows[i]
		f.Algorithm, f.Params, f.Group = spec.Name, surviving[spec.Name], "one window"
	}
	if slices.Contains(spec.Needs, cc.NeedsHints) {
		s.Hints = 10 * ms
	}
	return s
}

func TestEveryAlgorithmSurvives(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a third of what all other tests in virtual time take")
	}
	for _, o := range slices.Concat(ordeals, gaps()) {
		t.Run(o.name, func(t *testing.T) {
			for _, spec := range sim.Algorithms() {
				t.Run(spec.Name, func(t *testing.T) {
					t.Parallel()
					o.meet(t, spec)
				})
			}
		})
	}
}

func (o ordeal) meet(t *testing.T, spec cc.Spec) {
	t.Helper()
	r, err := sim.Run(o.scenario(spec))
	require.NoError(t, err)
	for _, p := range o.spans {
		want, of := p.used, fullLink
		if e, ok := p.but[spec.Name]; ok {
			want = e.used
		}
		if p.of != nil {
			of = p.of(r)
		}
		got := throughput(r, p.from, p.to) / of
		t.Logf("%.0f %% of %.3g Mbit/s from %d s to %d s", 100*got, of, p.from, p.to)
		assert.GreaterOrEqual(t, got, want, "of %.3g Mbit/s used from %d s to %d s", of, p.from, p.to)
	}
	for _, f := range r.Flows {
		silent, at := longestSilence(f)
		assert.LessOrEqual(t, silent, o.silent, "flow %s delivers nothing for %d s from second %d on", f.Name, silent, at)
		for _, s := range f.Samples {
			for i, v := range s.Internals {
				assert.False(t, math.IsNaN(v) || math.IsInf(v, 0), "at %v it holds %v in its %d. value", s.At, v, i+1)
			}
		}
	}
	if o.twice {
		again, err := sim.Run(o.scenario(spec))
		require.NoError(t, err)
		assert.Equal(t, r, again, "one seed gives one result")
	}
}

// An exception for an algorithm that is gone excuses nobody.
func TestEveryExceptionIsOfAnAlgorithm(t *testing.T) {
	names := map[string]bool{}
	for _, spec := range sim.Algorithms() {
		names[spec.Name] = true
	}
	for _, o := range slices.Concat(ordeals, gaps()) {
		for _, p := range o.spans {
			for name, e := range p.but {
				assert.True(t, names[name], "%s: %s", o.name, name)
				assert.NotEmpty(t, e.because, "%s: %s", o.name, name)
				assert.Less(t, e.used, p.used, "%s: %s", o.name, name)
			}
		}
	}
}

// Once past its first window, an algorithm looks at how much more was delivered,
// never at how much was: on the same path it sets the same limits beyond 4 GiB.
func TestEveryAlgorithmGoesOnBeyond4GiB(t *testing.T) {
	const soon, late = 1e6, 1<<32 - 1e6
	for _, spec := range sim.Algorithms() {
		t.Run(spec.Name, func(t *testing.T) {
			t.Parallel()
			small, _ := limits(t, spec, soon)
			large, delivered := limits(t, spec, late)
			require.Greater(t, delivered, cc.Bytes(1<<32), "it has gone past")
			for i := range small {
				require.Equal(t, small[i], large[i], "after %d ms", i)
			}
		})
	}
}

// limits runs an algorithm for five seconds over a link that sends a packet per
// millisecond, 40 ms long, with a queue of 250, and returns its limits in each
// millisecond. It starts with so much already delivered.
func limits(t *testing.T, spec cc.Spec, delivered cc.Bytes) ([]cc.Control, cc.Bytes) {
	t.Helper()
	type packet struct {
		cc.Sent
		settled cc.Time // when its acknowledgement or the news of its loss comes
		lost    bool
	}
	alg, err := cc.New(spec.Name, cc.Config{Params: surviving[spec.Name], Rand: rand.New(rand.NewPCG(1, 2))})
	require.NoError(t, err)
	start := cc.Time(time.Second)
	state := cc.State{Now: start, MSS: cc.DefaultMSS, Delivered: delivered, CwndLimited: true}
	var all []cc.Control
	var wire []packet
	busyUntil, paced, deliveredAt := start, start, start
	for state.Now < start.Add(5*time.Second) {
		state.Now = state.Now.Add(ms)
		for len(wire) > 0 && wire[0].settled <= state.Now {
			p := wire[0]
			wire = wire[1:]
			state.Inflight -= state.MSS
			if p.lost {
				alg.OnLoss(cc.Loss{State: state, Lost: state.MSS, SentAt: p.At})
				continue
			}
			rtt := state.Now.Sub(p.At)
			if state.SRTT == 0 {
				state.SRTT, state.RTTVar, state.MinRTT = rtt, rtt/2, rtt
			}
			state.SRTT += (rtt - state.SRTT) / 8
			state.MinRTT = min(state.MinRTT, rtt)
			state.Delivered += state.MSS
			deliveredAt = state.Now
			alg.OnAck(cc.Ack{
				State: state, Acked: state.MSS, RTT: rtt, Sent: p.Sent,
				DeliveryRate: cc.RateOf(state.Delivered-p.Delivered, state.Now.Sub(p.DeliveredAt)),
			})
		}
		if next := alg.Control().NextTick; next != 0 && next <= state.Now {
			alg.OnTick(state)
		}
		ctl := alg.Control()
		for state.Inflight+state.MSS <= ctl.Cwnd && (ctl.PacingRate == 0 || paced <= state.Now) {
			if ctl.PacingRate > 0 {
				paced = max(paced, state.Now.Add(-ms)).Add(ctl.PacingRate.TimeFor(state.MSS))
			}
			p := packet{Sent: cc.Sent{At: state.Now, DeliveredAt: deliveredAt, Cwnd: ctl.Cwnd, Inflight: state.Inflight, Delivered: state.Delivered}}
			busyUntil = max(busyUntil, state.Now)
			if p.lost = busyUntil.Sub(state.Now) >= 250*ms; !p.lost {
				busyUntil = busyUntil.Add(ms)
			}
			p.settled = busyUntil.Add(40 * ms)
			wire = append(wire, p)
			state.Inflight += state.MSS
		}
		all = append(all, ctl)
	}
	return all, state.Delivered
}
