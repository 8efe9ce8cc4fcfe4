package cc_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
)

// longestIn is how long a flow was in a phase without a break.
func longestIn(f sim.FlowResult, phase string) (longest time.Duration, entered int) {
	var since time.Duration
	was := false
	for _, s := range f.Samples {
		if s.Phase == phase {
			if !was {
				since = s.At
				entered++
			}
			longest = max(longest, s.At-since)
		}
		was = s.Phase == phase
	}
	return longest, entered
}

func TestBbr3AloneOnALink(t *testing.T) {
	for _, transport := range []string{"relay", "kernel"} {
		r := playLines(t,
			"link 12mbit rtt 40ms queue 80pkt", "transport "+transport, "flow bbr3", "run 40s warmup 2s sample 10ms")
		f := r.Flows[0]
		assert.GreaterOrEqual(t, r.Utilisation, 0.95, transport)
		assert.Zero(t, r.Drops, transport)
		assert.Less(t, r.Queueing.P95, 45*time.Millisecond, transport)
		last := f.Samples[len(f.Samples)-1]
		assert.InDelta(t, 12*1448./1500, last.Internals[0], 0.25, "%s: the rate of the link, within 2 %%", transport)
		assert.InDelta(t, 41, last.Internals[2], 1, "%s: its round trip", transport)
		lasts, entered := longestIn(f, "probe_rtt")
		assert.InDelta(t, 7, entered, 1, "%s: every five seconds, behind what they take", transport)
		assert.InDelta(t, 0.25, lasts.Seconds(), 0.06, transport)
	}
}

// An eighth of the packets that fill the path fit into the queue.
func TestBbr3LosesLittleBeforeAShortQueue(t *testing.T) {
	v1 := playLines(t, "link 12mbit rtt 40ms queue 5pkt", "flow bbr", "run 40s warmup 5s")
	v3 := playLines(t, "link 12mbit rtt 40ms queue 5pkt", "flow bbr3", "run 40s warmup 5s sample 10ms")
	assert.Greater(t, v3.Utilisation, 0.85)
	assert.Less(t, 3*v3.Drops, v1.Drops)
	bound := 0.0
	for _, s := range v3.Flows[0].Samples {
		if bound = s.Internals[4]; s.At > 10*time.Second {
			assert.InDelta(t, 46, bound, 25, "at %v: what fills the path and the queue, about", s.At)
		}
	}
	assert.Positive(t, bound)
}

func TestBbr3FindsTenTimesTheRate(t *testing.T) {
	r := playLines(t, "link 10mbit rtt 40ms", "step 8s 100mbit", "flow bbr3", "run 20s")
	f := r.Flows[0]
	assert.Greater(t, f.PerSecond[7].Mbps(), 9.0)
	assert.Greater(t, f.PerSecond[12].Mbps(), 85.0, "a probe is due within three seconds")
}

func TestBbr3FollowsADropToATenth(t *testing.T) {
	r := playLines(t, "link 100mbit rtt 40ms queue 500KB", "step 8s 10mbit", "flow bbr3", "run 30s sample 10ms")
	f := r.Flows[0]
	for _, s := range f.Samples {
		if s.At >= 16*time.Second {
			assert.InDelta(t, 9.7, s.Internals[0], 1, "at %v it knows of the new rate", s.At)
		}
	}
	for second := 12; second < 30; second++ {
		assert.Greater(t, f.PerSecond[second].Mbps(), 8.0, "second %d", second)
	}
}

func TestBbr3BearsOnePercentOfLoss(t *testing.T) {
	r := playLines(t, "link 12mbit rtt 40ms queue 80pkt loss 0.01", "flow bbr3", "run 40s warmup 5s")
	assert.Greater(t, r.Utilisation, 0.75)
	cubic := playLines(t, "link 12mbit rtt 40ms queue 80pkt loss 0.01", "flow cubic", "run 40s warmup 5s")
	assert.Greater(t, r.Utilisation, 1.5*cubic.Utilisation)
}

func TestBbr3sShare(t *testing.T) {
	for _, queue := range []string{"30pkt", "200pkt"} {
		r := playLines(t, "link 12mbit rtt 40ms queue "+queue, "flow bbr3", "flow bbr3 start 5s", "run 60s warmup 30s")
		assert.Greater(t, r.Jain, 0.9, queue)
		assert.GreaterOrEqual(t, r.Utilisation, 0.9, queue)
	}
}

// A queue of one and a half of what fills the path is what BBR is made for.
func TestBbr3LeavesCubicItsShare(t *testing.T) {
	for _, tt := range []struct {
		queue       string
		least, most float64 // bbr3's part
	}{
		{"60pkt", 0.25, 0.75},
		{"160pkt", 0.2, 0.7},
	} {
		r := playLines(t,
			"link 12mbit rtt 40ms queue "+tt.queue, "flow bbr3", "flow cubic start 2s", "run 60s warmup 20s")
		share := r.Flows[0].Throughput.Mbps() / (r.Flows[0].Throughput.Mbps() + r.Flows[1].Throughput.Mbps())
		assert.GreaterOrEqual(t, share, tt.least, tt.queue)
		assert.LessOrEqual(t, share, tt.most, tt.queue)
		assert.Greater(t, r.Utilisation, 0.95, tt.queue)
	}
}

func TestBbr3KeepsItsRateWhereAcknowledgementsComeInBunches(t *testing.T) {
	for _, every := range []string{"5ms", "20ms", "60ms"} {
		r := playLines(t, "link 12mbit rtt 40ms", "acks every "+every, "flow bbr3", "run 15s warmup 5s")
		assert.Greater(t, r.Utilisation, 0.9, every)
	}
}

func TestBbr3IsNotMisledByAnApplicationThatPauses(t *testing.T) {
	r := playLines(t, "link 12mbit rtt 40ms", "flow bbr3 rate 2mbit on 1s off 1s", "run 30s sample 10ms")
	assert.InDelta(t, 1, r.Flows[0].Throughput.Mbps(), 0.1, "all that there was")
	_, probes := longestIn(r.Flows[0], "probe_rtt")
	assert.Zero(t, probes, "the pauses drain the path")
	last := r.Flows[0].Samples[len(r.Flows[0].Samples)-1]
	assert.GreaterOrEqual(t, last.Internals[0], 1.9, "the path gave at least what the application sent")
	require.InDelta(t, 41, last.Internals[2], 1)
	assert.Less(t, r.Queueing.P99, 12*time.Millisecond, fmt.Sprint(r.Queueing))
}
