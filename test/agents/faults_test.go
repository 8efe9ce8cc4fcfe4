//go:build linux

package agents

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/test/agents/nonsense"
)

const (
	folds = `(def (Report (volatile acked 0)))
		(when true (:= Report.acked (+ Report.acked Ack.bytes_acked)) (fallthrough))
		(when (> Micros Flow.rtt_sample_us) (report) (:= Micros 0))`

	baseRTT = 40 * time.Millisecond
	most    = 200 // packets: max_window
	faultAt = 3 * time.Second
	overAt  = 5 * time.Second
)

// bus is between a datapath and an agent that answers each report with a window of twice
// the path's 40 packets, and does to messages what a test wants.
type bus struct {
	t     *testing.T
	agent *ccp.Agent
	code  *ccp.Code
	now   cc.Time
	gone  bool
	deaf  cc.Time // since when a message has waited; 0: none does

	stopped bool                         // the agent reads nothing
	unread  [][]byte                     // messages meanwhile
	creates int                          // announcements of flows that the agent has read
	from    func(answer []byte) [][]byte // what arrives of an answer; nil: itself
	lost    func() bool                  // whether a message to the agent is
	windows func() (cwnd, rate uint64)
}

func newBus(t *testing.T) *bus {
	b := &bus{t: t, now: cc.Time(time.Second)}
	var err error
	b.code, err = ccp.Compile(folds)
	require.NoError(t, err)
	b.agent, err = ccp.NewAgent("x", "", b.transmit)
	require.NoError(t, err)
	b.agent.Inline = true
	b.windows = func() (uint64, uint64) { return 80 * 1448, 0 }
	return b
}

func (b *bus) transmit(message []byte) error {
	switch {
	case b.gone:
		return errors.New("connection refused")
	case b.stopped:
		if b.deaf == 0 {
			b.deaf = b.now
			b.agent.SetUnread(b.deaf)
		}
		if len(b.unread) >= 10 { // as many as a socket has room for
			return ccp.ErrBusy
		}
		b.unread = append(b.unread, slices.Clone(message))
		return nil
	case b.lost != nil && b.lost():
		return nil
	}
	m, _, err := ccp.Next(message)
	require.NoError(b.t, err)
	switch m.Kind {
	case ccp.KindReady:
		b.hear(b.code.Install(1).Append(nil))
	case ccp.KindCreate:
		b.creates++
		b.hear(b.code.Install(1).Append(nil)) // as to a datapath whose Ready was lost
		b.hear(ccp.Change{Flow: m.Flow, Program: 1}.Append(nil))
	case ccp.KindMeasure:
		cwnd, rate := b.windows()
		set := []ccp.Update{{Register: b.code.Registers["Cwnd"], Value: cwnd}}
		if rate > 0 {
			set = append(set, ccp.Update{Register: b.code.Registers["Rate"], Value: rate})
		}
		b.hear(ccp.Change{Flow: m.Flow, Updates: set}.Append(nil))
	}
	return nil
}

// goOn has an agent that was stopped read and answer what waits.
func (b *bus) goOn() {
	b.stopped, b.deaf = false, 0
	b.agent.SetUnread(0)
	for _, message := range b.unread {
		require.NoError(b.t, b.transmit(message))
	}
	b.unread = nil
}

func (b *bus) hear(answer []byte) {
	datagrams := [][]byte{answer}
	if b.from != nil {
		datagrams = b.from(answer)
	}
	for _, d := range datagrams {
		if err := b.agent.Receive(b.now, d); err != nil {
			assert.ErrorIs(b.t, err, ccp.ErrMalformed)
		}
	}
}

// play has one download of 10 MB over 12 Mbit/s while the bus carries its messages. At
// faultAt and overAt it calls the functions, with no lock held.
func (b *bus) play(fault, over func()) sim.FlowResult {
	b.t.Helper()
	require.NoError(b.t, b.agent.Connect(b.now, 1))
	start := cc.Time(time.Second)
	// The packets of a trickle of datagrams are the clock: they come from no flow.
	const clock = 1
	due := []struct {
		at time.Duration
		do func()
	}{{faultAt, fault}, {overAt, over}}
	s := sim.Scenario{
		Down:     sim.LinkConfig{Rate: 12e6, Delay: baseRTT / 2, QueuePackets: 100},
		Up:       sim.LinkConfig{Delay: baseRTT / 2},
		Duration: 20 * time.Second, Seed: 1, Sample: 2 * time.Millisecond,
		Flows: []sim.FlowConfig{
			{Algorithm: "ccp:x", Params: cc.Params{"max_window": most}, Bytes: 10e6, Host: clock + 1},
			{Algorithm: sim.UDP, Rate: 1e5, Host: clock},
		},
		Watch: func(p sim.Packet) {
			b.now = start.Add(p.At)
			for !p.Up && p.Host == clock-1 && len(due) > 0 && p.At >= due[0].at {
				due[0].do()
				due = due[1:]
			}
		},
		Lookup: func(name string) (cc.Spec, error) {
			if name == b.agent.Spec().Name {
				return b.agent.Spec(), nil
			}
			return cc.Lookup(name)
		},
	}
	result, err := sim.Run(s)
	require.NoError(b.t, err)
	require.Empty(b.t, due)
	f := result.Flows[0]
	require.NotZero(b.t, f.Completed, "all of the download has arrived")
	assert.Less(b.t, f.Completed, 9*time.Second, "at nearly the link's rate: it takes 7 s")
	for _, s := range f.Samples {
		require.LessOrEqual(b.t, s.Cwnd, most*cc.DefaultMSS, "no window is beyond the rule's")
	}
	return f
}

// inPhase is when a flow is in a phase for the first time, from a time on; 0: never.
func inPhase(f sim.FlowResult, phase string, from time.Duration) time.Duration {
	for _, s := range f.Samples {
		if s.At >= from && s.Phase == phase {
			return s.At
		}
	}
	return 0
}

// srttAt is the smoothed round trip at a time.
func srttAt(f sim.FlowResult, at time.Duration) time.Duration {
	for _, s := range f.Samples {
		if s.At >= at {
			return s.SRTT
		}
	}
	return 0
}

func TestAnAgentThatFailsLosesItsFlowsWithinThreeRoundTripsAndGetsThemBack(t *testing.T) {
	for name, c := range map[string]struct {
		fault, over func(*bus)
		creates     int
	}{
		"killed and started again": {
			func(b *bus) { b.gone = true },
			func(b *bus) {
				b.gone = false
				require.NoError(b.t, b.agent.Connect(b.now, 1))
			},
			2,
		},
		"stopped and continued": {
			func(b *bus) { b.stopped = true },
			(*bus).goOn,
			1,
		},
		"its host unreachable": {
			func(b *bus) {
				b.gone = true
				b.agent.Disconnect(b.now)
			},
			func(b *bus) {
				b.gone = false
				require.NoError(b.t, b.agent.Connect(b.now, 1))
			},
			2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBus(t)
			f := b.play(func() { c.fault(b) }, func() { c.over(b) })
			assert.Less(t, inPhase(f, "agent", 0), 100*time.Millisecond)
			fell, back := inPhase(f, "fallback", faultAt), inPhase(f, "agent", overAt)
			rtt := srttAt(f, faultAt)
			const trickle = 150 * time.Millisecond // between two ticks of the clock
			assert.Less(t, fell, faultAt+trickle+4*rtt, "one round trip until it reports, and three")
			assert.Greater(t, fell, faultAt)
			assert.Greater(t, back, overAt)
			assert.Less(t, back, overAt+trickle+200*time.Millisecond)
			assert.Equal(t, c.creates, b.creates, "an agent that was only slow does not begin anew")
			for i, s := range f.Samples {
				if i > 100 && s.At > 500*time.Millisecond && s.At < f.Completed-500*time.Millisecond {
					before := f.Samples[i-100] // 200 ms
					require.Greater(t, s.Delivered, before.Delivered, "it stands still at %v", s.At)
				}
			}
		})
	}
}

func TestTheWindowOfASlowAgentIsHandedOverSmoothly(t *testing.T) {
	b := newBus(t)
	f := b.play(func() { b.stopped = true }, b.goOn)
	const bdp = 40 * cc.DefaultMSS
	require.NotZero(t, inPhase(f, "agent", overAt))
	for i, s := range f.Samples {
		if s.At <= faultAt || s.At >= f.Completed {
			continue
		}
		before := f.Samples[i-1]
		if s.Phase != before.Phase || s.Phase == "agent" { // the rest is the fallback's business
			require.LessOrEqual(t, s.Cwnd, before.Cwnd+10*cc.DefaultMSS, "no burst at %v", s.At)
			require.GreaterOrEqual(t, s.Cwnd, min(before.Cwnd, bdp), "no collapse at %v", s.At)
		}
	}
}

func TestMessagesThatAreWrongCostNothing(t *testing.T) {
	kinds := append(nonsense.Kinds(), nonsense.Kind{Name: "a third is lost, either way"})
	draw := rand.New(rand.NewPCG(1, 1))
	for _, kind := range kinds {
		t.Run(kind.Name, func(t *testing.T) {
			b := newBus(t)
			if kind.Make != nil {
				b.from = kind.Make()
			} else {
				b.lost = func() bool { return draw.IntN(3) == 0 }
				b.from = func(answer []byte) [][]byte {
					if b.lost() {
						return nil
					}
					return [][]byte{answer}
				}
			}
			f := b.play(func() {}, func() {})
			agent := inPhase(f, "agent", 0)
			assert.NotZero(t, agent, "the agent decides")
			assert.Less(t, agent, 2*time.Second)
			assert.Zero(t, inPhase(f, "fallback", agent), "and goes on")
		})
	}
}

func TestAbsurdWindowsAreBounded(t *testing.T) {
	for name, limits := range nonsense.Limits {
		t.Run(name, func(t *testing.T) {
			b := newBus(t)
			turn := 0
			b.windows = func() (uint64, uint64) {
				turn++
				l := limits[turn%len(limits)]
				return l[0], l[1]
			}
			b.play(func() {}, func() {})
		})
	}
}
