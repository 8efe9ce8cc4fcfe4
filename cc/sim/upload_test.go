package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
)

// uploads plays flows over an uplink for 60 s, in a queue of 2 MB unless the link has one.
func uploads(t *testing.T, up LinkConfig, transport Transport, flows ...FlowConfig) Result {
	t.Helper()
	up.Delay = 10 * ms
	if up.QueueBytes == 0 {
		up.QueueBytes = 2e6
	}
	down := LinkConfig{Rate: 12e6, Delay: 10 * ms, QueueBytes: 2e6}
	return play(t, Scenario{Down: down, Up: up, Transport: transport, Flows: flows, Duration: time.Minute, Seed: 1})
}

func upload(algorithm, receive string) FlowConfig {
	return FlowConfig{Algorithm: algorithm, Upload: true, Receive: receive, Host: 1}
}

// The client's own control stays as it is; only the window that it is let have is ours.
func TestAHeldWindowTakesTheQueueOutOfAFixedUplink(t *testing.T) {
	up := LinkConfig{Rate: 12e6, QueueBytes: 2e6}
	for _, algorithm := range []string{"cubic", "reno"} {
		without := uploads(t, up, Kernel, upload(algorithm, ""))
		require.Greater(t, without.Queueing.P95, time.Second, algorithm)
		for _, transport := range []Transport{Kernel, Relay} {
			with := uploads(t, up, transport, upload(algorithm, "penstock"))
			assert.LessOrEqual(t, with.Queueing.P95, without.Queueing.P95/10, "%s over %v", algorithm, transport)
			assert.GreaterOrEqual(t, with.Utilisation, 0.97*without.Utilisation, "%s over %v", algorithm, transport)
		}
	}
}

// A client that fills no queue by itself loses nothing.
func TestAHeldWindowLeavesAloneWhoFillsNoQueue(t *testing.T) {
	up := LinkConfig{Rate: 12e6, QueueBytes: 2e6}
	without, with := uploads(t, up, Kernel, upload("bbr", "")), uploads(t, up, Kernel, upload("bbr", "penstock"))
	assert.GreaterOrEqual(t, with.Utilisation, 0.99*without.Utilisation)
	assert.LessOrEqual(t, with.Queueing.P95, without.Queueing.P95+ms)

	slow := upload("cubic", "penstock")
	slow.Rate = 4e6
	with = uploads(t, up, Kernel, slow)
	assert.InEpsilon(t, 4e6, float64(with.Flows[0].Throughput), 0.01)
	assert.Greater(t, with.Flows[0].Window.Limited[flow.LimitedByApplication], 58*time.Second)

	short := func(receive string) time.Duration {
		request := upload("cubic", receive)
		request.Bytes = 60e3
		return uploads(t, up, Kernel, request).Flows[0].Received
	}
	assert.Equal(t, short(""), short("penstock"), "a short request is not delayed at all")
}

// On a fast and short path the window is never what holds the peer.
func TestAHeldWindowKeepsAFastUplinkFull(t *testing.T) {
	flows := func(receive string) Scenario {
		return Scenario{
			Down:      LinkConfig{Rate: 1e9, Delay: ms / 2},
			Up:        LinkConfig{Rate: 1e9, Delay: ms / 2, QueueBytes: 1e6},
			Transport: Kernel, Flows: []FlowConfig{upload("cubic", receive)}, Duration: 5 * time.Second,
		}
	}
	without, with := play(t, flows("")), play(t, flows("penstock"))
	assert.GreaterOrEqual(t, with.Utilisation, 0.97*without.Utilisation)
}

func TestEightUploadsOfAHostQueueNoMoreThanOne(t *testing.T) {
	up := LinkConfig{Rate: 12e6, QueueBytes: 2e6}
	one := uploads(t, up, Kernel, upload("cubic", "penstock"))
	var flows []FlowConfig
	for range 8 {
		flows = append(flows, upload("cubic", "penstock"))
	}
	eight := uploads(t, up, Kernel, flows...)
	assert.LessOrEqual(t, eight.Queueing.P95, one.Queueing.P95*3/2)
	assert.GreaterOrEqual(t, eight.Utilisation, 0.97)
	assert.GreaterOrEqual(t, eight.Jain, 0.99)
	assert.Equal(t, 8, eight.Flows[0].Window.Members)
}

func TestAHeldWindowTakesTheQueueOutOfACellularUplink(t *testing.T) {
	model, err := Model("lte")
	require.NoError(t, err)
	generated, err := model.Generate(1, GeneratedLength)
	require.NoError(t, err)
	check := func(t *testing.T, trace *Trace) {
		up := LinkConfig{Trace: trace}
		// Reno fills the queue of the driven one to a tenth only, and BBR none.
		for algorithm, part := range map[string]time.Duration{"cubic": 10, "reno": 6, "bbr": 1} {
			without := uploads(t, up, Kernel, upload(algorithm, ""))
			with := uploads(t, up, Kernel, upload(algorithm, "penstock"))
			t.Logf("%s: p95 %v of %v, %.3f of the throughput", algorithm, with.Queueing.P95.Round(ms),
				without.Queueing.P95.Round(ms), with.Utilisation/without.Utilisation)
			assert.LessOrEqual(t, with.Queueing.P95, without.Queueing.P95/part, algorithm)
			assert.GreaterOrEqual(t, with.Utilisation, 0.9*without.Utilisation, algorithm)
		}
	}
	t.Run("generated", func(t *testing.T) { check(t, generated) })
	for _, name := range []string{"Verizon-LTE-short", "TMobile-LTE-short", "ATT-LTE-driving-2016"} {
		t.Run(name, func(t *testing.T) { check(t, recorded(t, "mahimahi/"+name+".up")) })
	}
}

// Beside an upload that fills its queue a download is left with what its acknowledgements
// let through.
func TestAHeldWindowLeavesTheOtherDirectionItsRate(t *testing.T) {
	up := LinkConfig{Rate: 12e6, QueueBytes: 2e6}
	down := FlowConfig{Algorithm: "penstock", Host: 1}
	without := uploads(t, up, Kernel, upload("cubic", ""), down)
	with := uploads(t, up, Kernel, upload("cubic", "penstock"), down)
	assert.Greater(t, without.Flows[1].Throughput.Mbps(), 9., "timestamps tell where its acknowledgements wait")
	assert.Greater(t, without.Flows[0].OneWay.P95, 500*ms)
	assert.Greater(t, with.Flows[1].Throughput.Mbps(), 9.)
	assert.Greater(t, with.Flows[0].Throughput.Mbps(), 7.)
	assert.Less(t, with.Flows[1].OneWay.P95+with.Flows[0].OneWay.P95, 145*ms)
}

// A client's upload and its download both keep their rate, from the start and after an
// outage of both ways: neither takes the other's queue, or the outage, for its own queue.
func TestAHeldWindowAndADownloadOutliveAnOutage(t *testing.T) {
	const length, from, to = 45 * time.Second, 15 * time.Second, 16 * time.Second
	trace, err := Steps("outage", length, Step{Rate: 12e6})
	require.NoError(t, err)
	trace, err = trace.Without(from, to, length)
	require.NoError(t, err)
	link := LinkConfig{Trace: trace, Delay: 10 * ms, QueueBytes: 2e6}
	r := play(t, Scenario{
		Down: link, Up: link, Transport: Kernel, Duration: length, Seed: 1,
		Flows: []FlowConfig{upload("cubic", "penstock"), {Algorithm: "penstock", Host: 1}},
	})
	for _, f := range r.Flows {
		for second, rate := range f.PerSecond {
			if at := time.Duration(second) * time.Second; at >= 2*time.Second && (at < from || at >= to+2*time.Second) {
				assert.Greater(t, rate.Mbps(), 6., "%s in second %d", f.Name, second)
			}
		}
	}
	assert.Less(t, r.Queueing.P95, 60*ms)
}

func TestUploadsAreChecked(t *testing.T) {
	for says, f := range map[string]FlowConfig{
		"nobody paces there": {Algorithm: "cubic", Upload: true, Receive: "bbr"},
		"there are cubic":    {Algorithm: "cubic", Upload: true, Receive: "nacc"},
	} {
		s := Scenario{Down: LinkConfig{Rate: 12e6}, Duration: time.Second, Flows: []FlowConfig{f}}
		assert.ErrorContains(t, s.Check(), says)
	}
}
