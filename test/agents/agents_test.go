//go:build linux

// Package agents has the agents of agents/go, as processes of their own, decide in virtual
// time, and holds what comes of it against the algorithms that are built in.
package agents

import (
	"math"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/labtest"
)

// start builds the agent of a name and starts it.
func start(t testing.TB, name string) agents.Agents {
	t.Helper()
	dir := t.TempDir()
	program, socket := filepath.Join(dir, name), filepath.Join(dir, "socket")
	out, err := exec.Command("go", "build", "-o", program, "../../agents/go/"+name).CombinedOutput()
	require.NoError(t, err, "%s", out)
	labtest.StartAgent(t, exec.Command(program, socket), socket)
	return agents.Agents{{Name: name, Socket: socket}}
}

// distance is the two-sample Kolmogorov-Smirnov statistic.
func distance(a, b []float64) (most float64) {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	for i, j := 0, 0; i < len(a) && j < len(b); {
		v := min(a[i], b[j])
		for i < len(a) && a[i] == v {
			i++
		}
		for j < len(b) && b[j] == v {
			j++
		}
		most = max(most, math.Abs(float64(i)/float64(len(a))-float64(j)/float64(len(b))))
	}
	return most
}

func TestTheDistanceOfDistributions(t *testing.T) {
	assert.Zero(t, distance([]float64{3, 1, 2}, []float64{1, 2, 3}))
	assert.InDelta(t, 1, distance([]float64{1, 2}, []float64{3, 4}), 0)
	assert.InDelta(t, 0.5, distance([]float64{1, 1, 2, 2}, []float64{2, 2, 2, 2}), 0)
}

// links are those of the published comparison of agents with the kernel's own (Narayan,
// figure 3-2), with a generated trace for the recorded one.
func links(t testing.TB) map[string]sim.LinkConfig {
	t.Helper()
	lte, err := sim.Generate("lte", 1, sim.GeneratedLength)
	require.NoError(t, err)
	return map[string]sim.LinkConfig{
		"fixed": {Rate: 96e6, Delay: 10 * time.Millisecond, QueuePackets: 160},
		"cell":  {Trace: lte, Delay: 10 * time.Millisecond, QueuePackets: 100},
		"drop":  {Rate: 96e6, Delay: 10 * time.Millisecond, Loss: 1e-4},
	}
}

// perRTT is how many bytes leave in each 20 ms, and the queueing of each packet, in ms.
func perRTT(
	t testing.TB, run func(sim.Scenario) (sim.Result, error), algorithm string, link sim.LinkConfig, length time.Duration,
) (rates, delays []float64) {
	t.Helper()
	const rtt = 20 * time.Millisecond
	rates = make([]float64, length/rtt)
	name, params, err := cc.Parse(algorithm)
	require.NoError(t, err)
	_, err = run(sim.Scenario{
		Down: link, Up: sim.LinkConfig{Delay: link.Delay}, Duration: length, Seed: 1,
		Flows: []sim.FlowConfig{{Algorithm: name, Params: params}},
		Watch: func(p sim.Packet) {
			if p.Up || p.Dropped != sim.DropNone {
				return
			}
			rates[min(int(p.Departs/rtt), len(rates)-1)] += float64(p.Size)
			delays = append(delays, float64(p.Departs-p.At)/1e6)
		},
	})
	require.NoError(t, err)
	return rates, delays
}

// apart is how far an agent's runs are from those of the built-in algorithm of its name:
// the distances of throughput per round trip and of packets' queueing.
func apart(t testing.TB, who agents.Agents, link sim.LinkConfig, length time.Duration) (rate, delay float64) {
	t.Helper()
	builtIn := who[0].Name
	if builtIn == "cubic" {
		builtIn = "cubic:hystart=off" // the agent has none
	}
	theirs, theirDelays := perRTT(t, who.RunScenario, "ccp:"+who[0].Name, link, length)
	own, ownDelays := perRTT(t, who.RunScenario, builtIn, link, length)
	return distance(theirs, own), distance(theirDelays, ownDelays)
}

func TestAgentsSendAsTheBuiltInAlgorithmsDo(t *testing.T) {
	for _, name := range []string{"reno", "cubic"} {
		who := start(t, name)
		for at, link := range links(t) {
			t.Run(name+", "+at, func(t *testing.T) {
				rate, delay := apart(t, who, link, 20*time.Second)
				t.Logf("KS distance of throughput per round trip %.3f, of queueing %.3f", rate, delay)
				assert.Less(t, rate, 0.15)
				assert.Less(t, delay, 0.2)
			})
		}
	}
}

func TestVirtualTimeRepeats(t *testing.T) {
	who := start(t, "cubic")
	first, firstDelays := perRTT(t, who.RunScenario, "ccp:cubic", links(t)["drop"], 3*time.Second)
	again, againDelays := perRTT(t, who.RunScenario, "ccp:cubic", links(t)["drop"], 3*time.Second)
	assert.Equal(t, first, again)
	assert.Equal(t, firstDelays, againDelays)
}

// BenchmarkDistance is the comparison at the published length.
func BenchmarkDistance(b *testing.B) {
	for _, name := range []string{"reno", "cubic"} {
		who := start(b, name)
		for at, link := range links(b) {
			b.Run(name+"/"+at, func(b *testing.B) {
				var rate, delay float64
				for b.Loop() {
					rate, delay = apart(b, who, link, time.Minute)
				}
				b.ReportMetric(rate, "KS-throughput")
				b.ReportMetric(delay, "KS-queueing")
			})
		}
	}
}

// completions are how long downloads take that begin at random times and fill half of a
// link: most are of less than 10 kB, and most bytes are those of the few large ones.
func completions(t *testing.T, who agents.Agents, algorithm string) (small, all []float64) {
	t.Helper()
	s := sim.Scenario{
		Down:     sim.LinkConfig{Rate: 192e6, Delay: 50 * time.Millisecond, QueuePackets: 1600},
		Up:       sim.LinkConfig{Delay: 50 * time.Millisecond},
		Duration: 40 * time.Second, Seed: 1,
	}
	draw := rand.New(rand.NewPCG(1, 2))
	total := cc.Bytes(0)
	for at := time.Duration(0); at < 30*time.Second; at += time.Duration(draw.ExpFloat64() * 20e6) {
		f := sim.FlowConfig{Algorithm: algorithm, Start: at, Bytes: cc.Bytes(500 + draw.Int64N(9500))}
		switch p := draw.Float64(); {
		case p < 0.01:
			f.Bytes = cc.Bytes(1e6 * math.Pow(20, draw.Float64()))
		case p < 0.15:
			f.Bytes = cc.Bytes(1e4 * math.Pow(100, draw.Float64()))
		}
		total += f.Bytes
		s.Flows = append(s.Flows, f)
	}
	result, err := who.RunScenario(s)
	require.NoError(t, err)
	for i, f := range result.Flows {
		if f.Received == 0 {
			continue
		}
		ms := float64(f.Received) / 1e6
		all = append(all, ms)
		if s.Flows[i].Bytes < 1e4 {
			small = append(small, ms)
		}
	}
	t.Logf("%s: %d of %d downloads, %.0f MB", algorithm, len(all), len(s.Flows), float64(total)/1e6)
	require.Greater(t, len(all), len(s.Flows)*99/100)
	return small, all
}

// quantile sorts a copy.
func quantile(of []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[int(q*float64(len(sorted)-1))]
}

func TestDownloadsUnderAnAgentTakeAsLong(t *testing.T) {
	who := start(t, "reno")
	theirSmall, theirs := completions(t, who, "ccp:reno")
	ownSmall, own := completions(t, who, "reno")
	for _, c := range []struct {
		what            string
		a, b, tolerance float64
	}{
		{"median of the small ones", quantile(theirSmall, 0.5), quantile(ownSmall, 0.5), 0.05},
		{"median", quantile(theirs, 0.5), quantile(own, 0.5), 0.05},
		{"p95", quantile(theirs, 0.95), quantile(own, 0.95), 0.15},
		{"p99", quantile(theirs, 0.99), quantile(own, 0.99), 0.15},
	} {
		t.Logf("%s: agent %.1f ms, built in %.1f ms", c.what, c.a, c.b)
		assert.InEpsilon(t, c.b, c.a, c.tolerance, c.what)
	}
}
