package cc_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// TestPenstockOnAnyLink draws steady links: the window stays within bounds, and the link is used.
func TestPenstockOnAnyLink(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 1))
		between := func(least, most float64) float64 { return least * math.Pow(most/least, rng.Float64()) }
		rate, base := cc.Rate(between(50e3, 50e6)), time.Duration(between(1, 400)*float64(ms))
		queue := rate.BytesIn(time.Duration(between(0.1, 5) * float64(time.Second)))
		link := sim.LinkConfig{Rate: rate, QueueBytes: max(15e3, queue)}
		if seed%4 == 1 {
			link.Loss = between(0.001, 0.02)
		}
		s := over(link, base, 20*time.Second, "penstock")
		s.Seed, s.Sample = seed, 50*ms
		s.Transport = []sim.Transport{sim.Kernel, sim.Relay}[seed%2]
		if seed%3 == 2 {
			s.AckEvery, s.Timestamps = time.Duration(1+rng.IntN(20))*ms, sim.NoTimestamps
		}
		what := fmt.Sprintf("seed %d: %v, %v, loss %.3f, %v", seed, rate, base, link.Loss, s.Transport)
		r := play(t, s)
		assert.GreaterOrEqual(t, r.Utilisation, 0.5, what)
		most := 4*rate.BytesIn(base) + 4*link.QueueBytes + 40*cc.DefaultMSS
		for _, p := range r.Flows[0].Samples {
			if !assert.GreaterOrEqual(t, p.Cwnd, 2*cc.DefaultMSS, what) || !assert.LessOrEqual(t, p.Cwnd, most, what) {
				break
			}
		}
	}
}

// TestPenstockHoldsNothingOnASlowLink has two segments, acknowledged at once, take more than the short window's 50 ms.
func TestPenstockHoldsNothingOnASlowLink(t *testing.T) {
	for _, queue := range []cc.Bytes{15e3, 200e3} {
		s := over(sim.LinkConfig{Rate: 100e3, QueueBytes: queue}, 30*ms, 100*time.Second, "penstock")
		s.Transport, s.Warmup = sim.Kernel, 40*time.Second
		r := play(t, s)
		assert.GreaterOrEqual(t, r.Utilisation, 0.95, "%v", queue)
		assert.LessOrEqual(t, r.Queueing.P95, 500*ms, "%v: four packets take 480 ms", queue)
	}
}

// TestPenstockIsAloneAgain has others fill a queue of seconds, which shifts the plan of drainings by minutes.
func TestPenstockIsAloneAgain(t *testing.T) {
	for _, rival := range []string{"cubic", "reno", "bbr"} {
		for _, rate := range []cc.Rate{5e6, 27e6} {
			link := sim.LinkConfig{Rate: rate, QueueBytes: (4 * rate).BytesIn(time.Second)}
			s := over(link, 20*ms, 90*time.Second, "penstock")
			s.Transport, s.Warmup = sim.Kernel, 60*time.Second
			s.Flows = append(s.Flows,
				sim.FlowConfig{Algorithm: rival, Start: 7 * time.Second, Stop: 22 * time.Second},
				sim.FlowConfig{Algorithm: sim.UDP, Rate: rate * 11 / 10, Start: 9 * time.Second, Stop: 24 * time.Second})
			r := play(t, s)
			assert.GreaterOrEqual(t, r.Utilisation, 0.95, "%s, %v", rival, rate)
			assert.LessOrEqual(t, r.Queueing.P95, 80*ms, "%s, %v", rival, rate)
		}
	}
}

// TestPenstockFollowsALinkThatFalls has nothing be held for long on a slower link: its queue would grow for seconds.
func TestPenstockFollowsALinkThatFalls(t *testing.T) {
	for _, rate := range []cc.Rate{5e6, 3e6, 2e6, 1.5e6} {
		for _, base := range []time.Duration{20 * ms, 50 * ms, 100 * ms} {
			trace, err := sim.Steps("falls", 40*time.Second, sim.Step{Rate: 20e6}, sim.Step{At: 15 * time.Second, Rate: rate})
			assert.NoError(t, err)
			s := over(sim.LinkConfig{Trace: trace, QueueBytes: 2e6}, base, 40*time.Second, "penstock")
			s.Transport, s.Warmup = sim.Kernel, 20*time.Second
			r := play(t, s)
			assert.GreaterOrEqual(t, r.Utilisation, 0.95, "%v, %v", rate, base)
			assert.LessOrEqual(t, r.Queueing.P95, 300*ms, "%v, %v", rate, base)
		}
	}
}

// TestPenstockFillsALinkWithGrants has a link that serves each way once in 20 ms, as Wi-Fi does beside busy stations.
func TestPenstockFillsALinkWithGrants(t *testing.T) {
	grants := func(offset, packets int) *sim.Trace {
		var times strings.Builder
		for at := offset; at <= 2000; at += 20 {
			times.WriteString(strings.Repeat(strconv.Itoa(at)+"\n", packets))
		}
		trace, err := sim.ReadTrace("grants", strings.NewReader(times.String()))
		require.NoError(t, err)
		return trace
	}
	for _, packets := range []int{33, 250} { // in a grant: 20 and 150 Mbit/s
		for _, transport := range []sim.Transport{sim.Kernel, sim.Relay} {
			s := over(sim.LinkConfig{Trace: grants(20, packets), QueueBytes: 2e6}, 5*ms, time.Minute, "penstock")
			s.Up.Trace = grants(10, packets)
			s.Transport = transport
			r := play(t, s)
			t.Logf("%d packets, %v: %.1f %%, p95 %v", packets, transport, 100*r.Utilisation, r.Queueing.P95)
			assert.GreaterOrEqual(t, r.Utilisation, 0.98, "%d packets, %v", packets, transport)
			assert.LessOrEqual(t, r.Queueing.P95, 50*ms, "%d packets, %v", packets, transport)
		}
	}
}
