package sim

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// download is a TCP download of a phone that the edge relays.
var download = FlowConfig{Name: "tcp", Algorithm: "penstock", Group: "phone"}

// heldDownload is a download of the same phone by a server's own transport, which the edge holds.
func heldDownload(algorithm string) FlowConfig {
	return FlowConfig{Name: "held", Algorithm: algorithm, Hold: "penstock", Group: "phone", Delay: 5 * ms, ECN: ECNOff}
}

// lastHops are links that a phone may have: of a fixed rate, and generated ones of radio.
func lastHops(t *testing.T) map[string]LinkConfig {
	t.Helper()
	hops := map[string]LinkConfig{
		"3 Mbit/s":  {Rate: 3e6, Delay: 30 * ms, QueueBytes: 2_000_000},
		"20 Mbit/s": {Rate: 20e6, Delay: 20 * ms, QueuePackets: 500},
		"50 Mbit/s": {Rate: 50e6, Delay: 10 * ms, QueueBytes: 2_000_000},
	}
	for _, model := range []string{"lte", "walk", "rapid", "highway"} {
		trace, err := Generate(model, 7, time.Minute)
		require.NoError(t, err)
		hops[model] = LinkConfig{Trace: trace, Delay: 20 * ms, QueueBytes: 2_000_000}
	}
	return hops
}

// over is a scenario of flows over a last hop for 40 seconds, of which the first three do not count.
func over(hop LinkConfig, flows ...FlowConfig) Scenario {
	return Scenario{
		Down: hop, Up: LinkConfig{Delay: hop.Delay}, Transport: Kernel, Flows: flows,
		Duration: 40 * time.Second, Warmup: 3 * time.Second, Seed: 1,
	}
}

// playOver runs what over returns.
func playOver(t *testing.T, hop LinkConfig, flows ...FlowConfig) Result {
	t.Helper()
	return play(t, over(hop, flows...))
}

// answers is how a host answers the echo requests of the edge that holds its packets.
type answers struct {
	loss       float64       // part of the requests that are lost
	perSecond  int           // the host answers no further request in a second; 0: no limit
	numberless bool          // answers do not say which request they are to
	beside     time.Duration // round trip to what answers in front of the bottleneck; 0: the host does
}

// edge has an edge get such answers.
func (c answers) edge(e *holdingEdge) func(sequence uint16) {
	var numbering flow.Numbering[uint16]
	rng := rand.New(rand.NewPCG(e.w.scenario.Seed, echoFlow))
	answered := map[cc.Time]int{} // by second
	mayAnswer := func() bool {
		second := e.w.now / cc.Time(time.Second)
		answered[second]++
		return c.perSecond == 0 || answered[second] <= c.perSecond
	}
	return func(sequence uint16) {
		receive := func() { e.receiveEcho(sequence) }
		if c.numberless {
			marked := numbering.Ask(e.w.now, sequence)
			receive = func() {
				if sequence, ok := numbering.Answer(e.w.now, marked); ok {
					e.receiveEcho(sequence)
				}
			}
		}
		switch {
		case rng.Float64() < c.loss:
		case c.beside > 0:
			e.w.at(e.w.now.Add(c.beside), receive)
		default:
			e.carryEcho(false, func() {
				if mayAnswer() {
					e.carryEcho(true, receive)
				}
			})
		}
	}
}

// playWithTrouble runs a scenario with one holding edge that gets such answers, and returns the edge's trouble at the
// end, too.
func playWithTrouble(t *testing.T, s Scenario, how answers) (Result, flow.Trouble) {
	t.Helper()
	require.NoError(t, s.Check())
	w := newWorld(s)
	w.ask = how.edge
	w.plan()
	w.run()
	require.NoError(t, w.err)
	trouble := flow.NoTrouble
	for _, e := range w.edges {
		trouble = max(trouble, e.member.Trouble())
	}
	return w.result(), trouble
}

func TestAHeldDownloadAloneIsLikeAManagedOne(t *testing.T) {
	for name, hop := range lastHops(t) {
		alone := playOver(t, hop, download)
		for _, algorithm := range []string{"cubic", "bbr", "reno"} {
			t.Run(fmt.Sprintf("%s over %s", algorithm, name), func(t *testing.T) {
				r := playOver(t, hop, heldDownload(algorithm))
				rate := float64(r.Flows[0].Throughput) / float64(alone.Flows[0].Throughput)
				t.Logf("rate %.2f of the managed one's, p95 of the queue %v and %v", rate, r.Queueing.P95,
					alone.Queueing.P95)
				least := 0.9
				if name == "lte" { // outages of a second cost a server's own transport more than the managed one
					least = 0.8
				}
				assert.GreaterOrEqual(t, rate, least)
				assert.LessOrEqual(t, r.Queueing.P95, max(3*alone.Queueing.P95/2, 5*ms))
			})
		}
	}
}

func TestAHeldDownloadSharesTheWindowOfAManagedOne(t *testing.T) {
	for name, hop := range lastHops(t) {
		alone := playOver(t, hop, download)
		for _, algorithm := range []string{"cubic", "bbr"} {
			for source, noEcho := range map[string]bool{"echoes": false, "TCP": true} {
				t.Run(fmt.Sprintf("%s over %s by %s", algorithm, name, source), func(t *testing.T) {
					other := heldDownload(algorithm)
					other.NoEcho = noEcho
					r := playOver(t, hop, download, other)
					managed, held := r.Flows[0].Throughput.Mbps(), r.Flows[1].Throughput.Mbps()
					t.Logf("managed %.2f, held %.2f Mbit/s, p95 of the queue %v, %v alone", managed, held,
						r.Queueing.P95, alone.Queueing.P95)
					most := 0.15
					if name == "lte" && noEcho { // outages of a second
						most = 0.2
					}
					assert.InDelta(t, 0.5, held/(managed+held), most)
					assert.GreaterOrEqual(t, managed+held, 0.9*alone.Flows[0].Throughput.Mbps())
					assert.LessOrEqual(t, r.Queueing.P95, max(5*alone.Queueing.P95/4, 5*ms))
				})
			}
		}
	}
}

func TestTwoHeldDownloadsWeighAsMuchAsTwo(t *testing.T) {
	second := heldDownload("cubic")
	second.Name = "another"
	r := playOver(t, lastHops(t)["20 Mbit/s"], download, heldDownload("cubic"), second)
	assert.GreaterOrEqual(t, r.Jain, 0.95)
}

// TestAHostWithAHeldDownloadHasAsMuchAsOneWithAManagedOne has each behind a window of its own.
func TestAHostWithAHeldDownloadHasAsMuchAsOneWithAManagedOne(t *testing.T) {
	other := download
	other.Name, other.Group = "other", "tablet"
	for _, algorithm := range []string{"reno", "cubic"} {
		for name, c := range map[string]struct {
			hop  LinkConfig
			most float64 // by which the ratio differs from 1
		}{
			"20 Mbit/s": {lastHops(t)["20 Mbit/s"], 0.075},
			"80 ms":     {LinkConfig{Rate: 20e6, Delay: 40 * ms, QueueBytes: 2_000_000}, 0.15},
			"50 Mbit/s": {LinkConfig{Rate: 50e6, Delay: 20 * ms, QueueBytes: 2_000_000}, 0.075},
		} {
			t.Run(fmt.Sprintf("%s, %s", algorithm, name), func(t *testing.T) {
				hop := c.hop
				r := play(t, Scenario{
					Down: hop, Up: LinkConfig{Delay: hop.Delay}, Transport: Kernel, Seed: 1,
					Flows: []FlowConfig{other, heldDownload(algorithm)}, Duration: time.Minute, Warmup: 20 * time.Second,
				})
				ratio := float64(r.Flows[1].Throughput) / float64(r.Flows[0].Throughput)
				t.Logf("held over managed %.2f", ratio)
				assert.InDelta(t, 1, ratio, c.most)
			})
		}
	}
}

// TestHeldDatagramsLeaveTheirHostItsPart plays a call and a flood beside downloads of the same host.
func TestHeldDatagramsLeaveTheirHostItsPart(t *testing.T) {
	hop := lastHops(t)["20 Mbit/s"]
	call := FlowConfig{
		Name: "call", Algorithm: UDP, Rate: 50 * 8 * cc.Rate(DatagramBytes), Hold: "penstock", Group: "phone",
	}
	for _, algorithm := range []string{"reno", "bbr"} {
		r := playOver(t, hop, download, heldDownload(algorithm), call)
		got := r.Flows[2]
		assert.Zero(t, got.Drops+got.Losses)
		assert.Less(t, DelaysOf(got.Jitter).P95, 10*ms, algorithm)
	}
	flood := call
	flood.Name, flood.Rate = "flood", 40e6
	r := playOver(t, hop, download, flood)
	assert.InDelta(t, 0.5, float64(r.Flows[0].Throughput)/20e6, 0.15)
	assert.Less(t, r.Flows[0].Queueing.P95, 100*ms)
}

func TestEchoRequestsAreOneHundredthOfTheBytes(t *testing.T) {
	for _, algorithm := range []string{"cubic", "bbr"} {
		echoes, all := cc.Bytes(0), cc.Bytes(0)
		hop := lastHops(t)["20 Mbit/s"]
		play(t, Scenario{
			Down: hop, Up: LinkConfig{Delay: hop.Delay}, Transport: Kernel, Duration: 20 * time.Second,
			Flows: []FlowConfig{heldDownload(algorithm)},
			Watch: func(p Packet) {
				if p.Up {
					return
				}
				all += p.Size
				if p.Size == flow.EchoBytes {
					echoes += p.Size
				}
			},
		})
		assert.NotZero(t, echoes)
		assert.LessOrEqual(t, float64(echoes), 0.0105*float64(all), algorithm)
	}
}

func TestHeldDownloadsBearAnswersThatAreLostOrHaveNoNumber(t *testing.T) {
	for name, hop := range lastHops(t) {
		alone := playOver(t, hop, download)
		for what, c := range map[string]struct {
			echoes    answers
			rate      float64 // least, as a part of the managed download's
			queueing  float64 // most, p95 as a multiple of the managed download's
			algorithm string
		}{
			"all are answered without a number": {answers{numberless: true}, 0.8, 1.5, "cubic"},
			"some of those are lost":            {answers{numberless: true, loss: 0.05}, 0.8, 1.5, "bbr"},
			"a third is lost":                   {answers{loss: 0.3}, 0.7, 3.2, "cubic"},
			"a host of 250 answers a second":    {answers{perSecond: 250}, 0.7, 6, "cubic"},
		} {
			t.Run(fmt.Sprintf("%s over %s", what, name), func(t *testing.T) {
				r, trouble := playWithTrouble(t, over(hop, heldDownload(c.algorithm)), c.echoes)
				rate := float64(r.Flows[0].Throughput) / float64(alone.Flows[0].Throughput)
				t.Logf("rate %.2f of the managed one's, p95 of the queue %v and %v", rate, r.Queueing.P95,
					alone.Queueing.P95)
				assert.GreaterOrEqual(t, rate, c.rate)
				assert.LessOrEqual(t, r.Queueing.P95.Seconds(), max(c.queueing*alone.Queueing.P95.Seconds(), 0.005))
				assert.Equal(t, flow.NoTrouble, trouble)
			})
		}
	}
}

func TestTenAnswersASecondAreTooFew(t *testing.T) {
	_, trouble := playWithTrouble(t, over(lastHops(t)["20 Mbit/s"], heldDownload("cubic")), answers{perSecond: 10})
	assert.Equal(t, flow.RareAnswers, trouble)
}

// TestAnswersBesideThePathAreFoundOut has a router in front of the bottleneck answer in the host's place, or nobody.
func TestAnswersBesideThePathAreFoundOut(t *testing.T) {
	slow := download
	slow.Rate = 0.4e6
	pages := download
	pages.On, pages.Off, pages.Random = 300*ms, time.Second, true
	bursts := heldDownload("cubic")
	bursts.On, bursts.Off, bursts.Random = time.Second, time.Second, true
	for name, hop := range lastHops(t) {
		for what, flows := range map[string][2]FlowConfig{
			"two downloads":                {download, heldDownload("cubic")},
			"a BBR download":               {download, heldDownload("bbr")},
			"a call's worth of TCP":        {slow, heldDownload("cubic")},
			"pages beside":                 {pages, heldDownload("bbr")},
			"bursts beside a TCP download": {download, bursts},
			"bursts beside pages":          {pages, bursts},
		} {
			t.Run(fmt.Sprintf("%s over %s", what, name), func(t *testing.T) {
				s := over(hop, flows[0], flows[1])
				_, trouble := playWithTrouble(t, s, answers{})
				assert.Equal(t, flow.NoTrouble, trouble, "the host answers")
				if flows[0].Rate > 0 || flows[0].On > 0 || flows[1].On > 0 {
					return
				}
				s.Duration = 15 * time.Second
				_, trouble = playWithTrouble(t, s, answers{beside: 5 * ms})
				assert.Equal(t, flow.BesideThePath, trouble, "a router answers")
			})
		}
	}
}
