package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// virtualPlan is testPlan's with other senders.
func virtualPlan(t *testing.T, senders ...string) Plan {
	t.Helper()
	plan := testPlan(t)
	var err error
	plan.Senders, err = ParseSenders(senders, nil)
	require.NoError(t, err)
	return plan
}

func TestAVirtualRunIsMadeOfThePlan(t *testing.T) {
	plan := virtualPlan(t, "copa:delta=0.1@sim")
	plan.Losses, plan.Seeds = []float64{0.01}, []uint64{7}
	back, err := ParseLink("2mbit")
	require.NoError(t, err)
	plan.Up = &back
	trial := plan.Trials()[0]
	s, err := plan.scenario(trial)
	require.NoError(t, err)
	down, up, err := plan.directions(trial)
	require.NoError(t, err)
	assert.Equal(t, down, s.Down, "what the emulator would be told")
	assert.Equal(t, up, s.Up)
	assert.Equal(t, cc.Rate(2e6), s.Up.Rate)
	assert.Equal(t, plan.Duration, s.Duration)
	assert.Equal(t, uint64(7), s.Seed)
	assert.Zero(t, s.Warmup, "from the first data packet on")
	require.Len(t, s.Flows, 1)
	assert.Equal(t, "copa", s.Flows[0].Algorithm)
	assert.Equal(t, cc.Params{"delta": 0.1}, s.Flows[0].Params)
}

// A window of 22 packets and a path that has 20 in flight.
func TestVirtualRun(t *testing.T) {
	plan := virtualPlan(t, "static:cwnd_packets=22@sim")
	plan.Sample, plan.Packets, plan.Retry, plan.Losses = 50*time.Millisecond, true, true, []float64{0, 0.02}
	assert.False(t, plan.Real())
	var steps []Progress
	b := Bench{Version: "test", Progress: func(p Progress) { steps = append(steps, p) }}
	results, err := b.Run(t.Context(), plan, func(Result) error { return nil })
	require.NoError(t, err)
	require.Len(t, results, 2)
	assert.Len(t, steps, 2, "the end of each is all there is to tell")

	r := results[0]
	assert.Equal(t, "static:cwnd_packets=22@sim", r.Sender)
	assert.Equal(t, "sim", r.Envelope)
	assert.Empty(t, r.Ingress)
	assert.InDelta(t, 12, r.Offered, 1e-9)
	assert.InDelta(t, 1, r.Utilisation, 0.005)
	assert.InDelta(t, 12, r.Throughput, 0.05)
	assert.InDelta(t, 2, r.Queueing.P50, 0.1, "two of the window's packets wait: one, and the one that is sent")
	assert.InDelta(t, r.Queueing.P95+10, r.OneWay.P95, 1e-9)
	assert.Less(t, r.UpQueueing.Max, 0.1, "acknowledgements do not wait")
	assert.InDelta(t, 3000, r.Packets, 30)
	assert.Zero(t, r.QueueDrops+r.RandomLosses)
	assert.Zero(t, r.Retransmitted)
	assert.Len(t, r.series, 30)
	assert.Nil(t, r.CPUPerGB)
	assert.Nil(t, r.CPUShare)
	assert.Nil(t, r.Window)
	assert.Nil(t, r.Departures)
	assert.False(t, r.Noisy)
	assert.Zero(t, r.Lateness)
	assert.Empty(t, r.Discarded)

	lossy := results[1]
	assert.InDelta(t, 0.02, float64(lossy.RandomLosses)/float64(lossy.Packets), 0.01)
	assert.InDelta(t, 0.02, lossy.Retransmitted, 0.01)

	again, err := b.Run(t.Context(), plan, func(Result) error { return nil })
	require.NoError(t, err)
	for i := range results {
		results[i].StartedAt = again[i].StartedAt
	}
	assert.Equal(t, results, again, "one seed, one result")
}

func TestVirtualRunThatCannotBe(t *testing.T) {
	plan := virtualPlan(t, "copa@sim")
	plan.Duration = 2 * time.Hour
	_, err := (&Bench{}).Run(t.Context(), plan, func(Result) error { return nil })
	assert.ErrorContains(t, err, "copa@sim on 12mbit: sim: duration is 2h0m0s")
}

func TestAPlanIsRealWithOneRealSender(t *testing.T) {
	assert.True(t, virtualPlan(t, "copa@sim", "copa").Real())
	assert.True(t, virtualPlan(t, "cubic").Real())
	assert.False(t, virtualPlan(t, "copa@sim", "cubic@sim").Real())
}

func TestVirtualTimeHasTheTransportOfTheRealRuns(t *testing.T) {
	for name, c := range map[string]struct {
		senders []string
		want    sim.Transport
	}{
		"none beside it":               {[]string{"copa@sim"}, sim.Kernel},
		"our control in the kernel":    {[]string{"copa@ebpf", "copa@sim"}, sim.Kernel},
		"the proxy's own choice":       {[]string{"copa", "copa@sim"}, sim.Kernel},
		"a tunnel":                     {[]string{"copa@wireguard", "copa@sim"}, sim.Relay},
		"a relay above bbr":            {[]string{"copa@sim", "copa@bbr", "cubic"}, sim.Relay},
		"both":                         {[]string{"copa@bbr", "copa@ebpf", "copa@sim"}, sim.Kernel},
		"another algorithm's":          {[]string{"penstock@bbr", "copa@sim"}, sim.Kernel},
		"the same with other settings": {[]string{"copa:delta=0.5@bbr", "copa@sim"}, sim.Kernel},
	} {
		plan := virtualPlan(t, c.senders...)
		for _, trial := range plan.Trials() {
			if !trial.Sender.Virtual() {
				continue
			}
			s, err := plan.scenario(trial)
			require.NoError(t, err)
			assert.Equal(t, c.want, s.Transport, name)
			assert.True(t, s.RawRTT, name)
		}
	}
}
