package cc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// Ten packets a round trip are 1 Mbit/s at first, and headers make 10 of 10.36.
func TestVivaceDoublesUntilItPaysNoMore(t *testing.T) {
	r := playLines(t, "link 10.36mbit rtt 115ms", "flow vivace", "run 3s sample 1ms")
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
		flow, acks, loss string
		least            float64
		p50              time.Duration
	}{
		{"vivace", "1ms", "0", 0.9, 10 * time.Millisecond},
		{"vivace", "10ms", "0", 0.9, 10 * time.Millisecond},
		{"vivace", "1ms", "0.01", 0.8, 20 * time.Millisecond},
		{"vivace:paper", "1ms", "0", 0.9, 10 * time.Millisecond},
		{"vivace:uspace", "1ms", "0", 0.85, 10 * time.Millisecond},
	} {
		r := playLines(t, "link 12mbit rtt 40ms loss "+tt.loss, "acks every "+tt.acks, "flow "+tt.flow,
			"run 20s warmup 5s")
		assert.Greater(t, r.Utilisation, tt.least, "%+v", tt)
		assert.Less(t, r.Queueing.P50, tt.p50, "%+v", tt)
	}
}

func TestVivacesShare(t *testing.T) {
	r := playLines(t, "link 12mbit rtt 40ms", "flow vivace", "flow vivace start 3s", "run 40s warmup 20s")
	assert.Greater(t, r.Jain, 0.9)
	assert.Greater(t, r.Utilisation, 0.9)
}

func TestVivaceFollowsTheLink(t *testing.T) {
	r := playLines(t, "link 12mbit rtt 40ms", "step 10s 3mbit", "step 20s 12mbit", "flow vivace", "run 36s")
	f := r.Flows[0]
	assert.Greater(t, f.PerSecond[9].Mbps(), 9.0)
	assert.InDelta(t, 2.9, f.PerSecond[18].Mbps(), 0.5)
	assert.Greater(t, f.PerSecond[35].Mbps(), 9.0)
	assert.Less(t, r.Queueing.P95, 500*time.Millisecond, "what a quarter of the rate queues is let drain")
}

// What the application does not send says nothing of the path.
func TestVivaceKeepsItsRateWhileTheApplicationHasLittle(t *testing.T) {
	r := playLines(t, "link 12mbit rtt 40ms", "flow vivace rate 1mbit", "run 20s sample 100ms")
	f := r.Flows[0]
	assert.InDelta(t, 1, f.Throughput.Mbps(), 0.05)
	last := f.Samples[len(f.Samples)-1]
	assert.GreaterOrEqual(t, last.Internals[0], 1.0)
	assert.LessOrEqual(t, last.Internals[0], 12.0, "it does not grow into what it never tried")
}
