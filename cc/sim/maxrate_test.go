package sim

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// A maximum rate is that of the group, however many flows it has and whoever holds
// the window.
func TestAMaximumRateIsTheGroups(t *testing.T) {
	for _, tt := range []struct {
		algorithm string
		transport Transport
		flows     []int
	}{
		{"penstock", Relay, []int{1, 2, 4, 16, 64}},
		{"cubic", Relay, []int{1, 4, 64}},
		{"bbr", Relay, []int{1, 4, 64}},
		{"copa", Relay, []int{1, 4, 64}},
		{"penstock", Kernel, []int{1, 2, 4, 16, 64}},
		{"cubic", Kernel, []int{1, 4, 16, 64}},
		{"bbr", Kernel, []int{1, 4}},
		{"copa", Kernel, []int{1, 4}},
	} {
		for _, n := range tt.flows {
			t.Run(fmt.Sprintf("%s %s %d", tt.algorithm, tt.transport, n), func(t *testing.T) {
				flows := slices.Repeat([]FlowConfig{{Algorithm: tt.algorithm, Group: "host", MaxRate: 10e6}}, n)
				assert.InEpsilon(t, 10, total(playMaxRate(t, tt.transport, flows...)), 0.02)
			})
		}
	}
}

// playMaxRate plays flows on a link that carries four times 10 Mbit/s.
func playMaxRate(t *testing.T, transport Transport, flows ...FlowConfig) Result {
	t.Helper()
	return play(t, Scenario{
		Down: LinkConfig{Rate: 40e6, Delay: 15 * ms, QueuePackets: 300}, Up: LinkConfig{Delay: 15 * ms},
		Transport: transport, Flows: flows, Duration: 15 * time.Second, Warmup: 3 * time.Second,
	})
}

func total(r Result) (mbit float64) {
	for _, f := range r.Flows {
		mbit += f.Throughput.Mbps()
	}
	return mbit
}

func TestFlowsUnderUnlikeAlgorithmsShareTheMaximumRateOfTheirGroup(t *testing.T) {
	for _, transport := range []Transport{Relay, Kernel} {
		r := playMaxRate(t, transport,
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6},
			FlowConfig{Algorithm: "cubic", Group: "host", MaxRate: 10e6},
			FlowConfig{Algorithm: "cubic", Group: "host", MaxRate: 10e6},
			FlowConfig{Algorithm: "copa", Group: "other", MaxRate: 10e6})
		other := r.Flows[3].Throughput.Mbps()
		assert.InEpsilon(t, 10, other, 0.02, "another group has its own")
		assert.InEpsilon(t, 10, total(r)-other, 0.02)
		for _, f := range r.Flows[:3] {
			assert.Greater(t, f.Throughput.Mbps(), 1.5, "%s has its turns", f.Name)
		}
	}
}

// What a maximum rate leaves is divided as a link would be.
func TestClassesAndWeightsHoldUnderAMaximumRate(t *testing.T) {
	for _, transport := range []Transport{Relay, Kernel} {
		f := playMaxRate(t, transport,
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6, Class: flow.Guarantee, Target: 4e6},
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6, Weight: 3},
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6}).Flows
		assert.InDelta(t, 4.2, f[0].Throughput.Mbps(), 0.4)
		assert.GreaterOrEqual(t, f[1].Throughput.Mbps(), 3.9)
		assert.InDelta(t, 1.45, f[2].Throughput.Mbps(), 0.25)
		f = playMaxRate(t, transport,
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6},
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6, Priority: 1}).Flows
		assert.GreaterOrEqual(t, f[0].Throughput.Mbps(), 8.0)
	}
}

// A maximum rate above what the link carries changes nothing.
func TestAMaximumRateAboveTheLinkDoesNotBind(t *testing.T) {
	for _, transport := range []Transport{Relay, Kernel} {
		for _, algorithm := range []string{"penstock", "cubic", "bbr", "copa"} {
			with := func(rate cc.Rate) Result {
				return playMaxRate(t, transport,
					slices.Repeat([]FlowConfig{{Algorithm: algorithm, Group: "host", MaxRate: rate}}, 3)...)
			}
			free, limited := with(0), with(100e6)
			require.InEpsilon(t, total(free), total(limited), 0.03, algorithm)
			assert.InDelta(t, free.Queueing.P95.Seconds(), limited.Queueing.P95.Seconds(), 0.005, algorithm)
		}
	}
}

func TestWhatSomeDoNotUseOfAMaximumRateOthersDo(t *testing.T) {
	for _, transport := range []Transport{Relay, Kernel} {
		f := playMaxRate(t, transport,
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6, Rate: 1e6},
			FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6}).Flows
		assert.GreaterOrEqual(t, f[0].Throughput.Mbps(), 0.97)
		assert.InDelta(t, 9, f[1].Throughput.Mbps(), 0.2)
	}
}

// Datagrams of a group count in its maximum rate, with connections beside them and
// without; one that is sparse loses nothing.
func TestDatagramsCountInTheMaximumRate(t *testing.T) {
	flood := FlowConfig{
		Algorithm: UDP, Group: "host", Hold: "penstock", NoEcho: true, MaxRate: 10e6, Rate: 20e6,
	}
	tcp := FlowConfig{Algorithm: "penstock", Group: "host", MaxRate: 10e6}
	sparseUDP := flood
	sparseUDP.Rate = 300e3
	late := tcp
	late.Start = 14999 * ms
	alone := playMaxRate(t, Relay, flood, late)
	assert.InEpsilon(t, 10, total(alone), 0.04)
	assert.Greater(t, total(alone), 9.0)

	for _, transport := range []Transport{Relay, Kernel} {
		both := playMaxRate(t, transport, flood, tcp)
		assert.GreaterOrEqual(t, both.Flows[0].Throughput.Mbps(), 3.0)
		assert.GreaterOrEqual(t, both.Flows[1].Throughput.Mbps(), 3.0)
		assert.LessOrEqual(t, total(both), 10.3)

		sparse := playMaxRate(t, transport, sparseUDP, tcp)
		assert.GreaterOrEqual(t, sparse.Flows[0].Throughput.Mbps(), 0.29)
		assert.InEpsilon(t, 10, total(sparse), 0.03)
	}
}
