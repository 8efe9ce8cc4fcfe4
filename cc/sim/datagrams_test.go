package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// home is a last hop of 20 Mbit/s with a second's worth of queue, and two flows of
// one peer; 30 Mbit/s of datagrams come for it from the fifth second on.
func home(algorithm string, beside bool) Scenario {
	s := Scenario{
		Down:     LinkConfig{Rate: 20e6, Delay: 20 * ms, QueueBytes: 2_500_000},
		Up:       LinkConfig{Delay: 20 * ms},
		Duration: 30 * time.Second, Warmup: 10 * time.Second,
		Datagrams: []DatagramConfig{{Name: "udp", Rate: 30e6, Start: 5 * time.Second}},
	}
	for _, name := range []string{"a", "b"} {
		s.Flows = append(s.Flows, FlowConfig{Name: name, Algorithm: algorithm, Group: "peer"})
	}
	if beside {
		s.Datagrams[0].Beside, s.Datagrams[0].Share = "a", 0.5
	}
	return s
}

func managedPart(r Result) float64 {
	return float64(r.Flows[0].Throughput+r.Flows[1].Throughput) / 20e6
}

// What datagrams take from a window stands still in no queue, and an algorithm
// that goes by rates does not take what is left for all there is.
func TestDatagramsInTheWindowLeaveFlowsTheirPart(t *testing.T) {
	for _, c := range []struct {
		algorithm string
		more      time.Duration // queueing than without datagrams
	}{
		{"copa", 0},
		{"sprout", 15 * ms},
		{"bbr", 130 * ms}, // datagrams fill its window, of up to two bandwidth-delay products
	} {
		alone := home(c.algorithm, false)
		alone.Datagrams = nil
		r := play(t, home(c.algorithm, true))
		assert.GreaterOrEqual(t, managedPart(r), 0.45, c.algorithm)
		assert.GreaterOrEqual(t, r.Datagrams[0].Throughput.Mbps(), 8.0, c.algorithm)
		assert.GreaterOrEqual(t, r.Utilisation, 0.95, c.algorithm)
		assert.LessOrEqual(t, r.Queueing.P95, play(t, alone).Queueing.P95+c.more, c.algorithm)
		assert.Greater(t, r.Jain, 0.95, c.algorithm)
	}
}

func TestDatagramsOutsideTheWindowTakeAllThereIs(t *testing.T) {
	r := play(t, home("copa", false))
	assert.Less(t, managedPart(r), 0.05)
	assert.Greater(t, r.Queueing.P95, 900*ms)
}

func TestDatagramsHaveTheWholeWindowThatNobodyWants(t *testing.T) {
	s := home("copa", true)
	s.Datagrams[0].Rate = 16e6
	for i := range s.Flows {
		s.Flows[i].Rate = 500e3
	}
	r := play(t, s)
	assert.InDelta(t, 16.0, r.Datagrams[0].Throughput.Mbps(), 0.5)
	assert.InDelta(t, 0.05, managedPart(r), 0.01)
	assert.Zero(t, r.Datagrams[0].Drops)
}

func TestAFlowThatStartsBesideDatagramsTakesOverWithinSeconds(t *testing.T) {
	s := home("copa", true)
	s.Warmup = 0
	s.Datagrams[0].Start, s.Datagrams[0].Rate = 0, 19e6
	s.Flows[0].Start, s.Flows[1].Start = 10*time.Second, 10*time.Second
	r := play(t, s)
	assert.InDelta(t, 19.0, mean(r.Datagrams[0].PerSecond, 2*time.Second, 10*time.Second).Mbps(), 0.5)
	tcp := mean(r.Flows[0].PerSecond, 13*time.Second, 30*time.Second) + mean(r.Flows[1].PerSecond, 13*time.Second, 30*time.Second)
	assert.Greater(t, tcp.Mbps(), 9.0)
}

func TestDatagramsAreCheckedBeforeTheRun(t *testing.T) {
	for want, d := range map[string]DatagramConfig{
		"name":       {Rate: 1e6},
		"of their o": {Name: "a", Rate: 1e6},
		"a rate":     {Name: "udp"},
		"stop after": {Name: "udp", Rate: 1e6, Start: 2, Stop: 1},
		"no flow":    {Name: "udp", Rate: 1e6, Beside: "nobody", Share: 1},
		"share":      {Name: "udp", Rate: 1e6, Beside: "a"},
	} {
		s := home("copa", true)
		s.Datagrams[0] = d
		_, err := Run(s)
		assert.ErrorContains(t, err, want)
	}
}
