package cc_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// cellular is a run over a trace: 20 ms of base round trip, 2 MB of buffer.
func cellular(trace *sim.Trace, d time.Duration, algorithms ...string) sim.Scenario {
	return over(sim.LinkConfig{Trace: trace, QueueBytes: 2e6}, 20*ms, d, algorithms...)
}

// over is a run of flows, a fifth of it apart, over a link with that base round trip.
func over(link sim.LinkConfig, base, d time.Duration, algorithms ...string) sim.Scenario {
	link.Delay = base / 2
	s := sim.Scenario{Down: link, Up: sim.LinkConfig{Delay: base / 2}, RawRTT: true, Duration: d, Seed: 1}
	for i, name := range algorithms {
		s.Flows = append(s.Flows, sim.FlowConfig{Algorithm: name, Start: time.Duration(i) * d / 5})
	}
	return s
}

func play(t *testing.T, s sim.Scenario) sim.Result {
	t.Helper()
	r, err := sim.Run(s)
	require.NoError(t, err)
	return r
}

// TestPenstockFillsCellularLinksWithAShortQueue runs what its figures were chosen
// on (tuned) and what they were not.
func TestPenstockFillsCellularLinksWithAShortQueue(t *testing.T) {
	for _, tt := range []struct {
		model string
		seed  uint64
		tuned bool
		p95   time.Duration
	}{
		{"lte", 1, true, 90 * ms},
		{"lte", 2, true, 90 * ms},
		{"lte", 3, false, 90 * ms},
		{"walk", 4, false, 90 * ms},
		{"rapid", 5, false, 60 * ms},
		{"highway", 6, false, 90 * ms},
	} {
		trace, err := sim.Generate(tt.model, tt.seed, time.Minute)
		require.NoError(t, err)
		r := play(t, cellular(trace, time.Minute, "penstock"))
		assert.GreaterOrEqual(t, r.Utilisation, 0.95, "%s:%d, tuned on it: %v", tt.model, tt.seed, tt.tuned)
		assert.LessOrEqual(t, r.Queueing.P95, tt.p95, "%s:%d, tuned on it: %v", tt.model, tt.seed, tt.tuned)
	}
}

func TestPenstockFillsRecordedLinksWithAShortQueue(t *testing.T) {
	for _, tt := range []struct {
		file  string
		tuned bool
	}{
		{"mahimahi/Verizon-LTE-short.down", true},
		{"mahimahi/TMobile-LTE-short.up", true},
		{"alcc/highwayGold", true},
		{"alcc/CampusWalk", true},
		{"alcc/City", true},
		{"mahimahi/ATT-LTE-driving-2016.down", true},
		{"mahimahi/TMobile-LTE-short.down", true},
		{"mahimahi/Verizon-LTE-short.up", false},
		{"alcc/CityDrive", false},
		{"alcc/Highway", false},
		{"alcc/rapidGold", false},
	} {
		t.Run(filepath.Base(tt.file), func(t *testing.T) {
			f, err := os.Open(filepath.Join("../../shared/traces", tt.file))
			if err != nil {
				t.Skipf("no recorded trace %s here", tt.file)
			}
			defer f.Close()
			trace, err := sim.ReadTrace(tt.file, f)
			require.NoError(t, err)
			r := play(t, cellular(trace, 2*time.Minute, "penstock"))
			assert.GreaterOrEqual(t, r.Utilisation, 0.95, "tuned on it: %v", tt.tuned)
			assert.LessOrEqual(t, r.Queueing.P95, 90*ms, "tuned on it: %v", tt.tuned)
		})
	}
}

// TestPenstockBesideCubic shares a buffer of one bandwidth-delay product: from
// half of its share up, and never so much that Cubic is left with less than a
// quarter of its own.
func TestPenstockBesideCubic(t *testing.T) {
	for _, rate := range []cc.Rate{5e6, 12e6, 50e6} {
		for _, base := range []time.Duration{20 * ms, 40 * ms, 100 * ms} {
			for _, flows := range [][]string{{"penstock", "cubic"}, {"cubic", "penstock"}} {
				link := sim.LinkConfig{Rate: rate, QueueBytes: max(rate.BytesIn(base), 8*1500)}
				s := over(link, base, 50*time.Second, flows...)
				s.Warmup = 15 * time.Second
				r := play(t, s)
				share := map[string]float64{}
				for _, f := range r.Flows {
					share[f.Algorithm] = f.Throughput.Mbps() / (r.Flows[0].Throughput + r.Flows[1].Throughput).Mbps()
				}
				name := fmt.Sprintf("%v, %v, %v", rate, base, flows)
				assert.GreaterOrEqual(t, share["penstock"], 0.25, name)
				assert.GreaterOrEqual(t, share["cubic"], 0.125, name)
				assert.GreaterOrEqual(t, r.Utilisation, 0.95, name)
			}
		}
	}
}

// TestPenstockManyOfAHostAgainstOne is a window that many flows share beside one
// that a single flow has, over transports and receivers as they are: their windows
// come in whole packets, and a packet by itself is acknowledged late.
func TestPenstockManyOfAHostAgainstOne(t *testing.T) {
	for _, rate := range []cc.Rate{12e6, 24e6, 50e6} {
		for _, base := range []time.Duration{20 * ms, 40 * ms} {
			s := over(sim.LinkConfig{Rate: rate, QueueBytes: 1e6}, base, time.Minute)
			s.Transport, s.Warmup = sim.Kernel, 20*time.Second
			for range 8 {
				s.Flows = append(s.Flows, sim.FlowConfig{Algorithm: "penstock", Group: "many"})
			}
			s.Flows = append(s.Flows, sim.FlowConfig{Algorithm: "penstock"})
			r := play(t, s)
			var many cc.Rate
			for _, f := range r.Flows[:8] {
				many += f.Throughput
			}
			name := fmt.Sprintf("%v, %v", rate, base)
			ratio := float64(many) / float64(r.Flows[8].Throughput)
			t.Logf("%s: the eight have %.2f of the one's", name, ratio)
			// On the slowest and shortest of them two segments for each are more than half of the path.
			assert.InDelta(t, 1, ratio, 0.5, name)
			assert.LessOrEqual(t, r.Queueing.P95, 50*ms, name)
			assert.GreaterOrEqual(t, r.Utilisation, 0.98, name)
		}
	}
}

func TestPenstockBesideItself(t *testing.T) {
	for _, rate := range []cc.Rate{5e6, 12e6, 50e6} {
		for _, base := range []time.Duration{20 * ms, 40 * ms, 100 * ms} {
			s := over(sim.LinkConfig{Rate: rate, QueueBytes: 2e6}, base, 50*time.Second, "penstock", "penstock")
			s.Warmup = 20 * time.Second
			r := play(t, s)
			name := fmt.Sprintf("%v, %v", rate, base)
			assert.GreaterOrEqual(t, r.Jain, 0.95, name)
			assert.GreaterOrEqual(t, r.Utilisation, 0.95, name)
			assert.LessOrEqual(t, r.Queueing.P95, 60*ms+base*6/10, "%s: the base of either is not the other's queue", name)
		}
	}
	s := over(sim.LinkConfig{Rate: 12e6, QueueBytes: 2e6}, 40*ms, 60*time.Second, "penstock", "penstock", "penstock", "penstock")
	s.Warmup = 40 * time.Second
	r := play(t, s)
	assert.GreaterOrEqual(t, r.Jain, 0.95, "four")
}

func TestPenstockDoesNotTakeRandomLossForCongestion(t *testing.T) {
	for loss, least := range map[float64]float64{0.01: 0.97, 0.03: 0.95, 0.1: 0.90} {
		s := over(sim.LinkConfig{Rate: 12e6, QueueBytes: 2e6, Loss: loss}, 40*ms, 30*time.Second, "penstock")
		s.Warmup = 5 * time.Second
		assert.GreaterOrEqual(t, play(t, s).Utilisation, least, "%v on a fixed link", loss)
	}
	trace, err := sim.Generate("lte", 3, time.Minute)
	require.NoError(t, err)
	s := cellular(trace, time.Minute, "penstock")
	s.Down.Loss = 0.01
	r := play(t, s)
	assert.GreaterOrEqual(t, r.Utilisation, 0.92, "on a cellular link")
	assert.LessOrEqual(t, r.Queueing.P95, 100*ms)
}

func TestPenstockKeepsTheQueueShorterThanAShortBuffer(t *testing.T) {
	s := over(sim.LinkConfig{Rate: 12e6, QueuePackets: 10}, 40*ms, 30*time.Second, "penstock")
	s.Warmup = 5 * time.Second
	r := play(t, s)
	assert.GreaterOrEqual(t, r.Utilisation, 0.95)
	assert.Less(t, float64(r.Drops), 0.05*float64(r.Flows[0].Packets))
}

func TestPenstockFollowsAPathThatGrows(t *testing.T) {
	s := over(sim.LinkConfig{Rate: 12e6, QueueBytes: 2e6}, 40*ms, 45*time.Second, "penstock")
	s.Changes = []sim.Change{{At: 15 * time.Second, Delay: 100 * ms}}
	r := play(t, s)
	least := r.Flows[0].PerSecond[26]
	for _, rate := range r.Flows[0].PerSecond[27:] {
		least = min(least, rate)
	}
	assert.Greater(t, least.Mbps(), 7.0, "within twice the time after which it drains")
}
