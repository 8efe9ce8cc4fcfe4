package cc_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

const ms = time.Millisecond

// playHints runs algorithms over a link of 12 Mbit/s and 40 ms that tells of
// itself every 10 ms; change alters the scenario.
func playHints(t *testing.T, change func(*sim.Scenario), refs ...string) sim.Result {
	t.Helper()
	s := sim.Scenario{
		Down:  sim.LinkConfig{Rate: 12e6, Delay: 20 * ms, QueueBytes: 2e6},
		Up:    sim.LinkConfig{Delay: 20 * ms},
		Hints: 10 * ms, Duration: 10 * time.Second, Warmup: time.Second, Seed: 1,
	}
	for _, ref := range refs {
		algorithm, params, err := cc.Parse(ref)
		require.NoError(t, err)
		s.Flows = append(s.Flows, sim.FlowConfig{Algorithm: algorithm, Params: params})
	}
	if change != nil {
		change(&s)
	}
	r, err := sim.Run(s)
	require.NoError(t, err)
	return r
}

func TestACapOfAllThatTheLinkHasLeavesAllOfIt(t *testing.T) {
	for _, ref := range []string{"reno", "cubic", "copa", "bbr", "penstock"} {
		r := playHints(t, func(s *sim.Scenario) { s.Flows[0].HintCap = 1 }, ref)
		assert.Greater(t, r.Utilisation, 0.97, ref)
		assert.Less(t, r.Queueing.P95, 10*ms, ref)
		half := playHints(t, func(s *sim.Scenario) { s.Flows[0].HintCap = 0.5 }, ref)
		assert.InDelta(t, 0.5, half.Utilisation, 0.03, ref)
	}
}

func TestNaccUsesTheFractionOfTheLinkThatItIsTold(t *testing.T) {
	r := playHints(t, nil, "nacc:wired")
	assert.Greater(t, r.Utilisation, 0.9)
	assert.Less(t, r.Queueing.P95, 15*ms)

	r = playHints(t, nil, "nacc")
	assert.InDelta(t, 0.2, r.Utilisation, 0.1, "a sixth of it, by default, and what the floor of 10 packets adds")
}

func TestNaccDoesNotTakeTheRadiosLossesForCongestion(t *testing.T) {
	lossy := func(s *sim.Scenario) { s.Down.Loss = 0.01 }
	r := playHints(t, lossy, "nacc:wired")
	assert.Greater(t, r.Utilisation, 0.9)
	reno := playHints(t, lossy, "reno")
	assert.Less(t, reno.Utilisation, 0.6, "which one that is not told does")
}

func TestNaccFlowsShareEqually(t *testing.T) {
	r := playHints(t, func(s *sim.Scenario) { s.Flows[1].Start = 2 * time.Second; s.Warmup = 4 * time.Second }, "nacc:wired", "nacc:wired")
	assert.Greater(t, r.Jain, 0.98)
	assert.Greater(t, r.Utilisation, 0.9)
	assert.Zero(t, r.Drops)
}

func TestNaccSharesByPriority(t *testing.T) {
	const app = "nacc:wired,application,priority="
	change := func(s *sim.Scenario) { s.Down.Rate, s.Down.QueueBytes = 100e6, 2e6 }
	r := playHints(t, change, app+"4", app+"2")
	assert.Greater(t, r.Flows[0].Throughput, 5*r.Flows[1].Throughput/4, "priorities 4 and 2")
	assert.Greater(t, r.Utilisation, 0.8)
	r = playHints(t, change, app+"2", app+"4", app+"1")
	assert.Greater(t, r.Flows[1].Throughput, r.Flows[0].Throughput, "priorities 2, 4 and 1")
	assert.Greater(t, r.Flows[0].Throughput, r.Flows[2].Throughput)
}

// naccRadio is a radio link as in J. Commun. Netw. 25(6) §VII: it loses one packet
// in a hundred, and says so.
func naccRadio(s *sim.Scenario) {
	s.Down = sim.LinkConfig{Rate: 54e6, Delay: 10 * ms, QueuePackets: 100, Loss: 0.01}
	s.Up.Delay = 10 * ms
	s.Duration, s.Warmup, s.Sample = 30*time.Second, 2*time.Second, 10*ms
}

// variation is the coefficient of variation of the first flow's window.
func variation(r sim.Result) float64 {
	n, sum, squares := 0.0, 0.0, 0.0
	for _, s := range r.Flows[0].Samples {
		if s.At >= r.Flows[0].From {
			n, sum, squares = n+1, sum+float64(s.Share), squares+float64(s.Share)*float64(s.Share)
		}
	}
	return math.Sqrt(n*squares-sum*sum) / sum
}

func TestNaccIsFasterAndSteadierThanCubicOverARadio(t *testing.T) {
	cubic := playHints(t, naccRadio, "cubic")
	for ref, faster := range map[string]float64{"nacc": 1, "nacc:wired": 3} {
		r := playHints(t, naccRadio, ref)
		assert.GreaterOrEqual(t, r.Flows[0].Throughput.Mbps(), faster*cubic.Flows[0].Throughput.Mbps(), ref)
		assert.Less(t, variation(r), variation(cubic)/2, ref)
		t.Logf("%s: %.2f Mbit/s, window varies by %.2f; cubic %.2f Mbit/s, %.2f", ref, r.Flows[0].Throughput.Mbps(),
			variation(r), cubic.Flows[0].Throughput.Mbps(), variation(cubic))
	}
}

func TestNaccFollowsALinkThatChanges(t *testing.T) {
	trace, err := sim.Generate("lte", 1, sim.GeneratedLength)
	require.NoError(t, err)
	r := playHints(t, func(s *sim.Scenario) { s.Down.Trace, s.Duration = trace, 20*time.Second }, "nacc:wired")
	assert.Greater(t, r.Utilisation, 0.7)
	assert.Less(t, r.Queueing.P95, 100*ms)
}

func TestPbeSendsAtTheCapacityOfTheLink(t *testing.T) {
	r := playHints(t, nil, "pbe")
	assert.Greater(t, r.Utilisation, 0.98)
	assert.Less(t, r.Queueing.P95, 5*ms)

	r = playHints(t, func(s *sim.Scenario) { s.Down.Loss = 0.01 }, "pbe")
	assert.Greater(t, r.Utilisation, 0.98, "whatever the radio loses")

	r = playHints(t, func(s *sim.Scenario) { s.AckEvery = 10 * ms }, "pbe")
	assert.Greater(t, r.Utilisation, 0.97, "with acknowledgements in batches")
	assert.Less(t, r.Queueing.P95, 5*ms)
}

func TestPbeFlowsShareWhoeverWasFirst(t *testing.T) {
	for _, n := range []int{2, 3} {
		r := playHints(t, func(s *sim.Scenario) {
			for i := range s.Flows {
				s.Flows[i].Start = time.Duration(i) * time.Second
			}
			s.Warmup = 5 * time.Second
		}, []string{"pbe", "pbe", "pbe"}[:n]...)
		assert.Greater(t, r.Jain, 0.99, "%d flows", n)
		assert.Greater(t, r.Utilisation, 0.97, "%d flows", n)
		assert.Less(t, r.Queueing.P95, 25*ms, "%d flows", n)
	}
}

func TestPbeTakesWhatOthersLeave(t *testing.T) {
	r := playHints(t, func(s *sim.Scenario) { s.Flows[1].Rate = 3e6 }, "pbe", "pbe")
	assert.Greater(t, r.Flows[0].Throughput.Mbps(), 7.5)
	assert.InDelta(t, 3, r.Flows[1].Throughput.Mbps(), 0.2)
	assert.Less(t, r.Queueing.P95, 20*ms)
}

func TestPbeKeepsTheDelayOfAFadingLinkShort(t *testing.T) {
	trace, err := sim.Generate("lte", 1, sim.GeneratedLength)
	require.NoError(t, err)
	change := func(s *sim.Scenario) { s.Down.Trace, s.Duration = trace, 20*time.Second }
	pbe, bbr := playHints(t, change, "pbe"), playHints(t, change, "bbr")
	assert.Greater(t, pbe.Utilisation, 0.75)
	assert.Less(t, pbe.Queueing.P95, 80*ms)
	assert.Less(t, 3*pbe.Queueing.P95, bbr.Queueing.P95)
}

func TestPbeComesIntoItsShareAfterLittleUse(t *testing.T) {
	r := playHints(t, func(s *sim.Scenario) {
		s.Flows[1].On, s.Flows[1].Off = 2*time.Second, 2*time.Second
		s.Duration = 20 * time.Second
	}, "pbe", "pbe")
	for k := 5; k < 20; k += 4 {
		assert.Greater(t, r.Flows[1].PerSecond[k].Mbps(), 5.0, "second %d: both want all", k)
		assert.Greater(t, r.Flows[0].PerSecond[k+2].Mbps(), 11., "second %d: one wants all", k+2)
	}
	assert.Less(t, r.Queueing.P95, 30*ms)
}
