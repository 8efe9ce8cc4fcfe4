package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
)

// What is sent again leaves no faster than what is new: a transport that holds the window paces both.
func TestRetransmissionsArePaced(t *testing.T) {
	const rate = cc.Rate(12e6)
	for _, transport := range []Transport{Kernel, Native} {
		for _, upload := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v, upload: %v", transport, upload), func(t *testing.T) {
				s := Scenario{
					Transport: transport, Duration: 10 * time.Second, AckEvery: 20 * ms,
					Down: LinkConfig{Rate: 10e6, Delay: 100 * ms, QueuePackets: 60},
					Up:   LinkConfig{Rate: 10e6, Delay: 100 * ms, QueuePackets: 60},
					Flows: []FlowConfig{{Algorithm: "static", Upload: upload, Params: cc.Params{
						"cwnd_packets": 400, "pacing_mbit": rate.Mbps(),
					}}},
				}
				var last time.Duration
				burst, most := 0.0, 0.0 // packets that left beyond the rate: the newest, the longest
				s.Watch = func(p Packet) {
					if p.Up != upload || p.Size < cc.DefaultMSS {
						return
					}
					burst = max(0, burst-float64(p.At-last)/float64(rate.TimeFor(cc.DefaultMSS))) + 1
					last, most = p.At, max(most, burst)
				}
				f := play(t, s).Flows[0]
				assert.Greater(t, f.Retransmits, 1000)
				assert.GreaterOrEqual(t, f.Throughput.Mbps(), 9.0, "nothing stalls")
				assert.LessOrEqual(t, most, 3.0)
			})
		}
	}
}
