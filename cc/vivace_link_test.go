package cc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Ten packets a round trip are 1 Mbit/s at first, and headers make 10 of 10.36.
func TestVivaceDoublesUntilItPaysNoMore(t *testing.T) {
	r := play(t, sim.Scenario{
		Down:     sim.LinkConfig{Rate: 10.36e6, Delay: 57500 * time.Microsecond},
		Up:       sim.LinkConfig{Delay: 57500 * time.Microsecond},
		Flows:    []sim.FlowConfig{{Algorithm: "vivace"}},
		Duration: 3 * time.Second, Sample: 1 * time.Millisecond,
	})
	var rates []float64
	for _, s := range r.Flows[0].Samples {
		if rate := s.PacingRate.Mbps(); s.SRTT > 0 && (len(rates) == 0 || rate != rates[len(rates)-1]) &&
			len(rates) < 6 {
			rates = append(rates, rate)
		}
	}
	assert.InDeltaSlice(t, []float64{1, 2, 4, 8, 16, 8}, rates, 0.5, "and then probes around 8")
}

func TestVivaceFillsALink(t *testing.T) {
	for _, tt := range []struct {
		profile string
		acks    time.Duration
		loss    float64
		least   float64
		p50     time.Duration
	}{
		{"vivace", ms, 0, 0.9, 10 * time.Millisecond},
		{"vivace", 10 * ms, 0, 0.9, 10 * time.Millisecond},
		{"vivace", ms, 0.01, 0.8, 20 * time.Millisecond},
		{"vivace:paper", ms, 0, 0.9, 10 * time.Millisecond},
		{"vivace:uspace", ms, 0, 0.85, 10 * time.Millisecond},
	} {
		name, params, err := cc.Parse(tt.profile)
		require.NoError(t, err)
		r := play(t, sim.Scenario{
			Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, Loss: tt.loss},
			Up:   sim.LinkConfig{Delay: 20 * time.Millisecond}, AckEvery: tt.acks,
			Flows:    []sim.FlowConfig{{Algorithm: name, Params: params}},
			Duration: 20 * time.Second, Warmup: 5 * time.Second,
		})
		assert.Greater(t, r.Utilisation, tt.least, "%+v", tt)
		assert.Less(t, r.Queueing.P50, tt.p50, "%+v", tt)
	}
}

func TestVivacesShare(t *testing.T) {
	r := play(t, sim.Scenario{
		Down:     sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond},
		Up:       sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows:    []sim.FlowConfig{{Algorithm: "vivace"}, {Algorithm: "vivace", Start: 3 * time.Second}},
		Duration: 40 * time.Second, Warmup: 20 * time.Second,
	})
	assert.Greater(t, r.Jain, 0.9)
	assert.Greater(t, r.Utilisation, 0.9)
}

func TestVivaceFollowsTheLink(t *testing.T) {
	r := play(t, sim.Scenario{
		Down: sim.LinkConfig{
			Delay: 20 * time.Millisecond,
			Trace: steps(t, 36*time.Second, sim.Step{Rate: 12e6}, sim.Step{At: 10 * time.Second, Rate: 3e6},
				sim.Step{At: 20 * time.Second, Rate: 12e6}),
		},
		Up:    sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows: []sim.FlowConfig{{Algorithm: "vivace"}}, Duration: 36 * time.Second,
	})
	f := r.Flows[0]
	assert.Greater(t, f.PerSecond[9].Mbps(), 9.0)
	assert.InDelta(t, 2.9, f.PerSecond[18].Mbps(), 0.5)
	assert.Greater(t, f.PerSecond[35].Mbps(), 9.0)
	assert.Less(t, r.Queueing.P95, 500*time.Millisecond, "what a quarter of the rate queues is let drain")
}

// What the application does not send says nothing of the path.
func TestVivaceKeepsItsRateWhileTheApplicationHasLittle(t *testing.T) {
	r := play(t, sim.Scenario{
		Down:     sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond},
		Up:       sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows:    []sim.FlowConfig{{Algorithm: "vivace", Rate: 1e6}},
		Duration: 20 * time.Second, Sample: 100 * time.Millisecond,
	})
	f := r.Flows[0]
	assert.InDelta(t, 1, f.Throughput.Mbps(), 0.05)
	last := f.Samples[len(f.Samples)-1]
	assert.GreaterOrEqual(t, last.Internals[0], 1.0)
	assert.LessOrEqual(t, last.Internals[0], 12.0, "it does not grow into what it never tried")
}
