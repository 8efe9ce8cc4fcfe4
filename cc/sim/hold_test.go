package sim

import (
	"fmt"
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

// playOver runs flows over a last hop for 40 seconds, of which the first three do not count.
func playOver(t *testing.T, hop LinkConfig, flows ...FlowConfig) Result {
	t.Helper()
	return play(t, Scenario{
		Down: hop, Up: LinkConfig{Delay: hop.Delay}, Transport: Kernel, Flows: flows,
		Duration: 40 * time.Second, Warmup: 3 * time.Second, Seed: 1,
	})
}

func TestAHeldDownloadAloneIsLikeAManagedOne(t *testing.T) {
	for name, hop := range lastHops(t) {
		alone := playOver(t, hop, download)
		for _, algorithm := range []string{"cubic", "bbr", "reno"} {
			t.Run(fmt.Sprintf("%s over %s", algorithm, name), func(t *testing.T) {
				r := playOver(t, hop, heldDownload(algorithm))
				rate := float64(r.Flows[0].Throughput) / float64(alone.Flows[0].Throughput)
				t.Logf("rate %.2f of the managed one's, p95 of the queue %v and %v", rate, r.Queueing.P95, alone.Queueing.P95)
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
					assert.LessOrEqual(t, r.Queueing.P95, max(6*alone.Queueing.P95/5, 5*ms))
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
