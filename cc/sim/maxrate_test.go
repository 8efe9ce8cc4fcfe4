package sim

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	overRelay  = "transport relay"
	overKernel = "transport kernel"
)

// A maximum rate is that of the group, however many flows it has and whoever holds
// the window.
func TestAMaximumRateIsTheGroups(t *testing.T) {
	for _, tt := range []struct {
		algorithm string
		transport string
		flows     []int
	}{
		{"penstock", overRelay, []int{1, 2, 4, 16, 64}},
		{"cubic", overRelay, []int{1, 4, 64}},
		{"bbr", overRelay, []int{1, 4, 64}},
		{"copa", overRelay, []int{1, 4, 64}},
		{"penstock", overKernel, []int{1, 2, 4, 16, 64}},
		{"cubic", overKernel, []int{1, 4, 16, 64}},
		{"bbr", overKernel, []int{1, 4}},
		{"copa", overKernel, []int{1, 4}},
	} {
		for _, n := range tt.flows {
			t.Run(fmt.Sprintf("%s %s %d", tt.algorithm, tt.transport, n), func(t *testing.T) {
				lines := []string{tt.transport}
				for i := range n {
					lines = append(lines, fmt.Sprintf("flow %s group host maxrate 10mbit name f%d", tt.algorithm, i))
				}
				assert.InEpsilon(t, 10, total(playMaxRate(t, lines...)), 0.02)
			})
		}
	}
}

// playMaxRate plays flows on a link that carries four times 10 Mbit/s.
func playMaxRate(t *testing.T, lines ...string) Result {
	t.Helper()
	return playLines(t, append([]string{"link 40mbit rtt 30ms queue 300pkt", "run 15s warmup 3s"}, lines...)...)
}

func total(r Result) (mbit float64) {
	for _, f := range r.Flows {
		mbit += f.Throughput.Mbps()
	}
	return mbit
}

func TestFlowsUnderUnlikeAlgorithmsShareTheMaximumRateOfTheirGroup(t *testing.T) {
	for _, transport := range []string{overRelay, overKernel} {
		r := playMaxRate(t, append([]string{transport},
			"flow penstock group host maxrate 10mbit",
			"flow cubic group host maxrate 10mbit",
			"flow cubic group host maxrate 10mbit",
			"flow copa group other maxrate 10mbit")...)
		other := r.Flows[3].Throughput.Mbps()
		assert.InEpsilon(t, 10, other, 0.02, "another group has its own")
		assert.InEpsilon(t, 10, total(r)-other, 0.02)
		for _, f := range r.Flows[:3] {
			assert.Greater(t, f.Throughput.Mbps(), 1.5, "%s has its turns", f.Name)
		}
	}
}

// What a maximum rate leaves is divided as a link would be.
func TestClassesAndWeightsHoldUnderAMaximumRate(t *testing.T) {
	for _, transport := range []string{overRelay, overKernel} {
		playMaxRate(t, append([]string{transport},
			"flow penstock group host maxrate 10mbit name call class guarantee target 4mbit",
			"flow penstock group host maxrate 10mbit name heavy weight 3",
			"flow penstock group host maxrate 10mbit name light",
			"expect call.throughput_mbit >= 3.8", "expect call.throughput_mbit <= 4.6",
			"expect heavy.throughput_mbit >= 3.9", "expect light.throughput_mbit <= 1.7",
			"expect light.throughput_mbit >= 1.2")...)
		playMaxRate(t, append([]string{transport},
			"flow penstock group host maxrate 10mbit name first priority 0",
			"flow penstock group host maxrate 10mbit name second priority 1",
			"expect first.throughput_mbit >= 8")...)
	}
}

// A maximum rate above what the link carries changes nothing.
func TestAMaximumRateAboveTheLinkDoesNotBind(t *testing.T) {
	for _, transport := range []string{overRelay, overKernel} {
		for _, algorithm := range []string{"penstock", "cubic", "bbr", "copa"} {
			with := func(rate string) Result {
				lines := []string{transport}
				for i := range 3 {
					lines = append(lines, fmt.Sprintf("flow %s group host name f%d %s", algorithm, i, rate))
				}
				return playMaxRate(t, lines...)
			}
			free, limited := with(""), with("maxrate 100mbit")
			require.InEpsilon(t, total(free), total(limited), 0.03, algorithm)
			assert.InDelta(t, free.Queueing.P95.Seconds(), limited.Queueing.P95.Seconds(), 0.005, algorithm)
		}
	}
}

func TestWhatSomeDoNotUseOfAMaximumRateOthersDo(t *testing.T) {
	for _, transport := range []string{overRelay, overKernel} {
		playMaxRate(t, append([]string{transport},
			"flow penstock group host maxrate 10mbit name little rate 1mbit",
			"flow penstock group host maxrate 10mbit name all",
			"expect little.throughput_mbit >= 0.97",
			"expect all.throughput_mbit >= 8.8",
			"expect all.throughput_mbit <= 9.2")...)
	}
}

// Datagrams of a group count in its maximum rate, with connections beside them and
// without; one that is sparse loses nothing.
func TestDatagramsCountInTheMaximumRate(t *testing.T) {
	flood := "flow udp name flood group host share 0.5 rate 20mbit"
	alone := playMaxRate(t, flood, "flow penstock name tcp group host maxrate 10mbit start 14999ms")
	assert.InEpsilon(t, 10, total(alone), 0.04)
	assert.Greater(t, total(alone), 9.0)

	for _, transport := range []string{overRelay, overKernel} {
		both := playMaxRate(t, append([]string{transport}, flood, "flow penstock name tcp group host maxrate 10mbit",
			"expect tcp.throughput_mbit >= 3", "expect flood.throughput_mbit >= 3")...)
		assert.LessOrEqual(t, total(both), 10.3)

		sparse := playMaxRate(t, append([]string{transport}, "flow udp name call group host share 0.5 rate 300kbit",
			"flow penstock name tcp group host maxrate 10mbit", "expect call.throughput_mbit >= 0.29")...)
		assert.InEpsilon(t, 10, total(sparse), 0.03)
	}
}
