package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// home is a last hop of 20 Mbit/s with a second's worth of queue, and two flows of one peer. Unless it is alone,
// 30 Mbit/s of datagrams come for it from the fifth second on, held or not.
func home(algorithm string, datagrams ...FlowConfig) Scenario {
	return Scenario{
		Down: LinkConfig{Rate: 20e6, Delay: 20 * ms, QueueBytes: 2_500_000}, Up: LinkConfig{Delay: 20 * ms},
		Duration: 30 * time.Second, Warmup: 10 * time.Second,
		Flows: append([]FlowConfig{
			{Algorithm: algorithm, Name: "a", Group: "peer"}, {Algorithm: algorithm, Name: "b", Group: "peer"},
		}, datagrams...),
	}
}

func managedPart(r Result) float64 {
	return float64(r.Flows[0].Throughput+r.Flows[1].Throughput) / 20e6
}

// Datagrams weigh as their busy flow, and an algorithm that goes by rates does not take what is left for all there is.
func TestDatagramsThatTCPAcknowledgesHaveTheirPartOfTheWindow(t *testing.T) {
	for _, algorithm := range []string{"copa", "sprout", "bbr", "penstock"} {
		alone := play(t, home(algorithm))
		r := play(t, home(algorithm,
			FlowConfig{Algorithm: UDP, Start: 5 * time.Second, Rate: 30e6, Group: "peer", Hold: algorithm, NoEcho: true}))
		t.Logf("%s: managed %.3f, p95 of queueing %v, %v alone", algorithm, managedPart(r), r.Queueing.P95,
			alone.Queueing.P95)
		assert.InDelta(t, 0.65, managedPart(r), 0.05, algorithm)
		assert.GreaterOrEqual(t, r.Utilisation, 0.95, algorithm)
		assert.LessOrEqual(t, r.Queueing.P95, alone.Queueing.P95+5*ms, algorithm)
		assert.Greater(t, r.Jain, 0.95, algorithm)
	}
}

func TestDatagramsOutsideTheWindowTakeAllThereIs(t *testing.T) {
	r := play(t, home("copa", FlowConfig{Algorithm: UDP, Start: 5 * time.Second, Rate: 30e6}))
	assert.Less(t, managedPart(r), 0.05)
	assert.Greater(t, r.Queueing.P95, 900*ms)
}

func TestDatagramsHaveTheWholeWindowThatNobodyWants(t *testing.T) {
	r := play(t, Scenario{
		Down: LinkConfig{Rate: 20e6, Delay: 20 * ms, QueueBytes: 2500000},
		Up:   LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{
			{Algorithm: "copa", Name: "a", Group: "peer", Rate: 0.5e6},
			{Algorithm: "copa", Name: "b", Group: "peer", Rate: 0.5e6},
			{Algorithm: UDP, Rate: 16e6, Group: "peer", Hold: "copa", NoEcho: true},
		},
		Duration: 30 * time.Second, Warmup: 10 * time.Second,
	})
	assert.InDelta(t, 16*1400.0/1428, r.Flows[2].Throughput.Mbps(), 0.5)
	assert.InDelta(t, 0.05, managedPart(r), 0.01)
	assert.Zero(t, r.Flows[2].Drops)
}

func TestAFlowThatStartsBesideDatagramsTakesOverWithinSeconds(t *testing.T) {
	r := play(t, Scenario{
		Down: LinkConfig{Rate: 20e6, Delay: 20 * ms, QueueBytes: 2500000},
		Up:   LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{
			{Algorithm: UDP, Name: "udp", Rate: 19e6, Group: "peer", Hold: "copa", NoEcho: true},
			{Algorithm: "copa", Name: "a", Group: "peer", Start: 10 * time.Second},
			{Algorithm: "copa", Name: "b", Group: "peer", Start: 10 * time.Second},
		},
		Duration: 30 * time.Second,
	})
	between := func(i int, from, to time.Duration) float64 { return mean(r.Flows[i].PerSecond, from, to).Mbps() }
	assert.InDelta(t, 19*1400.0/1428, between(0, 2*time.Second, 10*time.Second), 0.5)
	assert.Greater(t, between(1, 13*time.Second, 30*time.Second)+between(2, 13*time.Second, 30*time.Second), 9.0)
}

// A call takes a twentieth of a cellular link that fades, beside a download and a
// flood of the same peer.
func TestACallLosesNothingBesideADownloadAndAFlood(t *testing.T) {
	for _, algorithm := range []string{"penstock", "copa", "bbr"} {
		for _, flood := range []bool{false, true} {
			for seed := range 4 {
				trace, err := Generate("lte", uint64(seed+1), GeneratedLength)
				require.NoError(t, err)
				s := Scenario{
					Down: LinkConfig{Trace: trace, Delay: 20 * ms, QueueBytes: 2_000_000}, Up: LinkConfig{Delay: 20 * ms},
					Duration: time.Minute, Warmup: 5 * time.Second,
					Flows: []FlowConfig{
						{Algorithm: algorithm, Name: "download", Group: "peer"},
						{Algorithm: UDP, Name: "call", Rate: 260e3, Group: "peer", Hold: algorithm, NoEcho: true},
					},
				}
				if flood {
					s.Flows = append(s.Flows, FlowConfig{
						Algorithm: UDP, Name: "flood", Rate: 30e6, Group: "peer", Hold: algorithm, NoEcho: true,
					})
				}
				r := play(t, s)
				call := r.Flows[1]
				t.Logf("%s seed %d flood %v: call lost %d of %d, p95 %v; download %v", algorithm, seed+1, flood,
					call.Drops, call.Packets, call.OneWay.P95, r.Flows[0].Throughput)
				assert.Zero(t, call.Drops)
				if !flood {
					continue
				}
				of := float64(r.Flows[0].Throughput + r.Flows[2].Throughput)
				assert.InDelta(t, 0.5, float64(r.Flows[2].Throughput)/of, 0.1, "the flood has its share and no more")
				assert.Less(t, r.Flows[2].OneWay.P50, call.OneWay.P50+300*ms, "its queue here is short")
			}
		}
	}
}
