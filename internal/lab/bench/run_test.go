package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// What is asserted here follows from the link's virtual schedule and holds on
// a slow machine too; how well the senders do is for measurements to say.
func TestRealRun(t *testing.T) {
	labtest.Need(t)
	exe := labtest.Penstock(t)
	for name, ingress := range map[string]Ingress{"captured": IngressTPROXY, "forwarded": IngressForward} {
		t.Run(name, func(t *testing.T) {
			plan := testPlan(t)
			plan.Ingress, plan.Sample, plan.Packets = ingress, 50*time.Millisecond, true
			var steps []Progress
			b := Bench{Executable: exe, Version: "test", Progress: func(p Progress) { steps = append(steps, p) }}
			var told []Result
			results, err := b.Run(t.Context(), plan, func(r Result) error { told = append(told, r); return nil })
			require.NoError(t, err)
			require.Len(t, results, 2)
			assert.Equal(t, results, told)
			assert.GreaterOrEqual(t, len(steps), 4, "progress while it runs, and at each end")

			cubic, static := results[0], results[1]
			for _, r := range results {
				assert.InDelta(t, 12, r.Offered, 0.1)
				assert.LessOrEqual(t, r.Throughput, r.Offered+0.1)
				assert.Greater(t, r.Throughput, 1.0, "%s moved data", r.Sender)
				assert.InDelta(t, r.Queueing.P95+10, r.OneWay.P95, 0.01)
				assert.Positive(t, r.Lateness.P99)
				assert.Len(t, r.series, 30)
				assert.Empty(t, r.Discarded)
				d := r.Departures
				require.NotNil(t, d)
				assert.Zero(t, d.Missed)
				assert.InEpsilon(t, r.Packets, d.Packets, 0.2,
					"what left arrived at the queue, however late the emulator looked")
				assert.LessOrEqual(t, d.Inflight.P95, d.Inflight.Max)
				assert.Nil(t, d.Ratio, "nobody asked for a rate")
			}
			assert.Nil(t, cubic.CPUPerGB, "there is no proxy")
			assert.Nil(t, cubic.Window)
			// Nothing waits behind more than 250 packets of 1500 bytes.
			assert.LessOrEqual(t, cubic.Queueing.Max, 251.0)

			require.NotNil(t, static.CPUPerGB)
			assert.Positive(t, *static.CPUPerGB)
			require.NotNil(t, static.CPUShare)
			assert.Less(t, *static.CPUShare, float64(static.System.CPUs), "no more than there is")
			assert.Equal(t, ingress, static.Ingress)
			assert.NotEmpty(t, static.Envelope)
			require.NotNil(t, static.Window)
			assert.Positive(t, static.Window.Samples)
			assert.InDelta(t, 22, static.Window.Cwnd.Median, 0.5)
			// Not the most there was: on a machine that stands still the kernel helps itself.
			assert.LessOrEqual(t, static.Departures.Inflight.P50, 23.0, "the window, and a probe")
			// A window of 22 packets cannot queue more than itself.
			assert.LessOrEqual(t, static.Queueing.P95, 40.0)
			assert.Zero(t, static.QueueDrops)
		})
	}
}

func TestRealRunOverOurOwnControl(t *testing.T) {
	labtest.Need(t)
	if err := bpf.Check(); err != nil {
		t.Skip(err)
	}
	plan := testPlan(t)
	var err error
	plan.Senders, err = ParseSenders([]string{"static:cwnd_packets=40,pacing_mbit=6@ebpf"}, nil)
	require.NoError(t, err)
	plan.Packets, plan.Losses, plan.Sample = true, []float64{0, 0.01}, 50*time.Millisecond
	b := Bench{Executable: labtest.Penstock(t)}
	results, err := b.Run(t.Context(), plan, func(Result) error { return nil })
	require.NoError(t, err)
	require.Len(t, results, 2)
	for i, r := range results {
		assert.Equal(t, "ebpf", r.Envelope)
		assert.Empty(t, r.Discarded)
		assert.InDelta(t, plan.Losses[i], r.Loss, 0)
		require.NotNil(t, r.Answer)
		assert.Positive(t, r.Answer.Count)
		assert.Positive(t, r.Answer.P50)
		assert.LessOrEqual(t, r.Answer.P50, r.Answer.P99)
		require.NotNil(t, r.Departures)
		require.NotNil(t, r.Departures.Ratio)
		assert.InDelta(t, 1448*8/6., r.Departures.IdealGap, 1, "a full segment's payload at 6 Mbit/s, in µs")
		assert.Positive(t, r.Departures.Ratio.P50)
	}
	assert.Zero(t, results[0].RandomLosses)
	assert.LessOrEqual(t, results[0].Departures.Inflight.Max, 41.0, "the window, and a probe")
	assert.Positive(t, results[1].Departures.Again)
}

func TestRealRunThroughATunnel(t *testing.T) {
	labtest.Need(t)
	plan := testPlan(t)
	var err error
	plan.Senders, err = ParseSenders([]string{"static:cwnd_packets=22@wireguard"}, nil)
	require.NoError(t, err)
	plan.Sample = 50 * time.Millisecond
	b := Bench{Executable: labtest.Penstock(t)}
	results, err := b.Run(t.Context(), plan, func(Result) error { return nil })
	require.NoError(t, err)
	require.Len(t, results, 1)
	r := results[0]
	assert.Equal(t, IngressWireGuard, r.Ingress)
	assert.Equal(t, "wireguard", r.Envelope)
	assert.Empty(t, r.Discarded)
	assert.Positive(t, r.Throughput)
	require.NotNil(t, r.Window)
	assert.InDelta(t, 22, r.Window.Cwnd.Median, 1.5)
	assert.LessOrEqual(t, r.Queueing.P95, 40.0, "a window cannot queue more than itself")
	assert.Zero(t, r.QueueDrops)
}

func TestInterruptedRunKeepsWhatIsFinished(t *testing.T) {
	labtest.Need(t)
	plan := testPlan(t)
	plan.Senders, plan.Runs = plan.Senders[:1], 3
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	b := Bench{Progress: func(p Progress) {
		if p.Number == 2 {
			cancel(errors.New("enough"))
		}
	}}
	results, err := b.Run(ctx, plan, func(Result) error { return nil })
	require.ErrorContains(t, err, "stopped after 1 of 3 runs: enough")
	assert.Len(t, results, 1)
}

func TestProxyThatDoesNotStartIsExplained(t *testing.T) {
	labtest.Need(t)
	exe := filepath.Join(t.TempDir(), "penstock")
	require.NoError(t, os.WriteFile(exe, []byte("#!/bin/sh\necho cannot do that >&2\nexit 3\n"), 0o700))
	plan := testPlan(t)
	plan.Senders = plan.Senders[1:]
	b := Bench{Executable: exe}
	_, err := b.Run(t.Context(), plan, func(Result) error { return nil })
	require.ErrorContains(t, err, "exit status 3")
	assert.ErrorContains(t, err, "cannot do that")
	assert.ErrorContains(t, err, "static:cwnd_packets=22 on 12mbit")
}

// A native sender keeps its window by itself, without a proxy, and sends again what the
// link loses.
func TestANativeSenderHasNothingBelowIt(t *testing.T) {
	labtest.Need(t)
	plan := testPlan(t)
	var err error
	plan.Senders, err = ParseSenders([]string{"static:cwnd_packets=22@native"}, nil)
	require.NoError(t, err)
	plan.Packets, plan.Losses = false, []float64{0, 0.02}
	results, err := (&Bench{Version: "test"}).Run(t.Context(), plan, func(Result) error { return nil })
	require.NoError(t, err)
	require.Len(t, results, 2)
	for _, r := range results {
		assert.Greater(t, r.Throughput, 1.0)
		// Not the most there was: on a machine that stands still the timer fires in vain.
		assert.LessOrEqual(t, r.Queueing.P50, 23.0, "22 packets and what is left of one, at 1 ms each")
		assert.Empty(t, r.Discarded)
		assert.Nil(t, r.CPUPerGB, "there is no proxy")
	}
	assert.Positive(t, results[1].Retransmitted)
}
