//go:build linux

package netlab

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// A window of 20 packets on a link that has room for 8 in flight: 12 of them, and
// the packet's own transmission, are its time in the queue.
func TestASimulationIsReadAsAPathIs(t *testing.T) {
	link := sim.LinkConfig{Rate: 12_000_000, Delay: 4 * time.Millisecond, QueuePackets: 100}
	s := sim.Scenario{
		Down: link, Up: link, Duration: 10 * time.Second,
		Flows: []sim.FlowConfig{{Algorithm: "static", Params: cc.Params{"cwnd_packets": 20}}},
	}
	r, err := Simulate(t.Context(), s)
	require.NoError(t, err)
	report := r.Report(time.Second, 9*time.Second)
	assert.Equal(t, cc.Bytes(12_000_000), report.Down.Offered)
	assert.InDelta(t, 1, report.Down.Utilisation, 1e-3)
	assert.Equal(t, 8000, report.Down.Delivered)
	assert.Equal(t, report.Down.Queueing, report.Down.DataQueueing, "all of them carry data")
	assert.InDelta(t, 11.966, report.Down.Queueing.P50.Seconds()*1e3, 0.05)
	assert.Equal(t, report.Down.Queueing.P50+link.Delay, report.Down.DataOneWay.P50)
	assert.Zero(t, report.Down.Lateness, "there is no emulator")
	assert.Equal(t, 8000, report.Up.Delivered, "an acknowledgement for each")
	assert.Zero(t, report.Up.DataQueueing.Count)
	assert.Equal(t, link.Rate.TimeFor(52), report.Up.Queueing.P50, "its own transmission")

	points := r.Series(Down, s.Duration, 100*time.Millisecond)
	require.Len(t, points, 100)
	assert.Equal(t, cc.Rate(12_000_000), points[50].Offered)
	assert.Equal(t, cc.Rate(12_000_000), points[50].Throughput)
	assert.InDelta(t, 12, points[50].Queueing.Seconds()*1e3, 0.1)
}

// Two hosts in a cell, one with half the modulation: of each it can be asked what
// waited, and of all how much of the air was used.
func TestASimulatedCellIsReadByHost(t *testing.T) {
	s := sim.Scenario{
		Cell: &sim.CellConfig{
			Delay: 4 * time.Millisecond,
			Hosts: []sim.CellHost{{}, {BitsPerBlock: 250, Delay: time.Millisecond}},
		},
		Up: sim.LinkConfig{Delay: 4 * time.Millisecond}, Duration: 10 * time.Second,
		Flows: []sim.FlowConfig{
			{Algorithm: "static", Params: cc.Params{"cwnd_packets": 400}},
			{Algorithm: "static", Params: cc.Params{"cwnd_packets": 100}},
		},
	}
	r, err := Simulate(t.Context(), s)
	require.NoError(t, err)
	all := r.Report(time.Second, 9*time.Second).Down
	first, second := r.HostReport(0, time.Second, 9*time.Second).Down, r.HostReport(1, time.Second, 9*time.Second).Down
	assert.Equal(t, all.Bytes, first.Bytes+second.Bytes)
	assert.InDelta(t, 1, all.Utilisation, 2e-3)
	assert.InDelta(t, 0.5, first.Utilisation, 2e-3)
	assert.InDelta(t, 0.5, second.Utilisation, 2e-3)
	assert.InEpsilon(t, 25, first.Throughput.Mbps(), 0.01)
	assert.InEpsilon(t, 12.5, second.Throughput.Mbps(), 0.01)
	assert.Equal(t, first.Queueing.P95+4*time.Millisecond, first.DataOneWay.P95)
	assert.Equal(t, second.Queueing.P95+5*time.Millisecond, second.DataOneWay.P95)
	assert.InEpsilon(t, 2, float64(first.Queueing.P50)/float64(second.Queueing.P50), 0.15,
		"four times the window at twice the rate")
	assert.InEpsilon(t, 37.5, r.Series(Down, s.Duration, time.Second)[5].Throughput.Mbps(), 0.01)
}

// What still waits at the end has not left, whatever its schedule says.
func TestASimulationCountsWhatHasLeft(t *testing.T) {
	link := sim.LinkConfig{Rate: 1_200_000, Delay: time.Millisecond, QueuePackets: 1000}
	s := sim.Scenario{
		Down: link, Duration: 5 * time.Second,
		Flows: []sim.FlowConfig{{Algorithm: "static", Params: cc.Params{"cwnd_packets": 400}}},
	}
	s.Down.Loss, s.Down.Seed = 0.05, 3
	r, err := Simulate(t.Context(), s)
	require.NoError(t, err)
	down := r.Report(0, s.Duration).Down
	assert.Equal(t, r.Carried, down.Bytes)
	assert.Equal(t, r.Losses, down.Drops.Loss)
	assert.Positive(t, down.Drops.Loss)
	assert.Equal(t, r.Flows[0].Packets, down.Sent)
	assert.Less(t, down.Queueing.Count, r.Flows[0].Packets-r.Losses)
	assert.Less(t, down.Queueing.P50, r.Queueing.P50, "the simulator's own figure has those that wait as well")

	_, err = Simulate(t.Context(), sim.Scenario{})
	assert.ErrorContains(t, err, "duration is 0s")
}

func TestASimulationEndsWithItsContext(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	_, err := Simulate(ctx, sim.Scenario{
		Down: sim.LinkConfig{Rate: 100_000_000, QueuePackets: 100}, Duration: time.Hour,
		Flows: []sim.FlowConfig{{Algorithm: "static"}},
		Lookup: func(name string) (cc.Spec, error) {
			spec, err := cc.Lookup(name)
			made := spec.New
			spec.New = func(cfg cc.Config) cc.Algorithm {
				end(why)
				return made(cfg)
			}
			return spec, err
		},
	})
	assert.ErrorIs(t, err, why)
}
