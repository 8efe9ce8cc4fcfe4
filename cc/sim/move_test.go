package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// switching is a flow that changes its algorithm in the middle of a run over
// 12 Mbit/s and 40 ms with room for 100 packets.
func switching(from, to string) (s Scenario) {
	return Scenario{
		Down:     LinkConfig{Rate: 12e6, Delay: 20 * ms, QueuePackets: 100},
		Up:       LinkConfig{Delay: 20 * ms},
		Flows:    []FlowConfig{{Algorithm: from}},
		Changes:  []Change{{At: 10 * time.Second, Flow: "1", Terms: flow.Terms{Algorithm: to}}},
		Duration: 20 * time.Second, Sample: 100 * ms,
	}
}

// watch calls see with each packet of data that is sent between from and to.
func watch(s *Scenario, from, to time.Duration, see func(Packet)) {
	s.Watch = func(p Packet) {
		if !p.Up && p.At >= from && p.At < to {
			see(p)
		}
	}
}

func TestAMoveToAnAlgorithmThatFillsQueuesDoesNotOverrunThem(t *testing.T) {
	for _, from := range []string{"copa", "penstock"} {
		for _, to := range []string{"cubic", "reno", "vegas"} {
			s := switching(from, to)
			drops, carried := 0, cc.Bytes(0)
			watch(&s, 10*time.Second, 11*time.Second, func(p Packet) {
				if p.Dropped != DropNone {
					drops++
				} else {
					carried += p.Size
				}
			})
			r, err := Run(s)
			require.NoError(t, err)
			assert.Zero(t, drops, "%s to %s", from, to)
			assert.Greater(t, float64(carried), 0.9*12e6/8, "%s to %s: the link stays busy", from, to)
			assert.Equal(t, to, r.Flows[0].Final.Algorithm)
		}
	}
}

func TestAMoveFromAFullQueueStallsNoLongerThanTwoRoundTrips(t *testing.T) {
	for _, to := range []string{"copa", "penstock", "vegas"} {
		s := switching("cubic", to)
		rtt := 40*ms + cc.Rate(12e6).TimeFor(100*OpportunityBytes) // with the queue full
		var last, longest time.Duration
		watch(&s, 9900*ms, 15*time.Second, func(p Packet) {
			if last != 0 && p.At > 10*time.Second {
				longest = max(longest, p.At-max(last, 10*time.Second))
			}
			last = p.At
		})
		_, err := Run(s)
		require.NoError(t, err)
		assert.Positive(t, last)
		assert.Less(t, longest, 2*rtt, "cubic to %s", to)
	}
}

func TestMovesByName(t *testing.T) {
	with := func(move Change) Scenario {
		return Scenario{
			Down: LinkConfig{Rate: 12e6, Delay: 20 * ms}, Up: LinkConfig{Delay: 20 * ms}, Duration: 4 * time.Second,
			Flows: []FlowConfig{{Algorithm: "cubic", Name: "a", Group: "g"}}, Changes: []Change{move},
		}
	}
	r, err := Run(with(Change{At: 2 * time.Second, Flow: "a", Terms: flow.Terms{Algorithm: "reno"}}))
	require.NoError(t, err)
	assert.Equal(t, "reno", r.Flows[0].Final.Algorithm)
	assert.Equal(t, "g", r.Flows[0].Final.Group)
	for says, move := range map[string]Change{
		"which is not there":     {Flow: "b", Terms: flow.Terms{Algorithm: "reno"}},
		"nope":                   {Flow: "a", Terms: flow.Terms{Algorithm: "nope"}},
		"none leaves the window": {Flow: "a", Terms: flow.Terms{Algorithm: "none"}},
	} {
		assert.ErrorContains(t, with(move).Check(), says)
	}
}
