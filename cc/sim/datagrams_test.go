package sim

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// home is a last hop of 20 Mbit/s with a second's worth of queue, and two flows of
// one peer; unless it is alone, 30 Mbit/s of datagrams come for it from the fifth
// second on, with or without a share of its window.
func home(algorithm, datagrams string) []string {
	lines := []string{
		"link 20mbit rtt 40ms queue 2500KB", "run 30s warmup 10s",
		"flow " + algorithm + " name a group peer", "flow " + algorithm + " name b group peer",
	}
	if datagrams != "" {
		lines = append(lines, "flow udp name udp start 5s "+datagrams)
	}
	return lines
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
		{"copa", 5 * ms},
		{"sprout", 15 * ms},
		{"bbr", 130 * ms}, // datagrams fill its window, of up to two bandwidth-delay products
	} {
		alone := playLines(t, home(c.algorithm, "")...)
		r := playLines(t, home(c.algorithm, "rate 30mbit group peer share 0.5")...)
		t.Logf("%s: managed %.3f, p95 of queueing %v, %v alone", c.algorithm, managedPart(r), r.Queueing.P95,
			alone.Queueing.P95)
		assert.GreaterOrEqual(t, managedPart(r), 0.45, c.algorithm)
		assert.GreaterOrEqual(t, r.Flows[2].Throughput.Mbps(), 8.0, c.algorithm)
		assert.GreaterOrEqual(t, r.Utilisation, 0.95, c.algorithm)
		assert.LessOrEqual(t, r.Queueing.P95, alone.Queueing.P95+c.more, c.algorithm)
		assert.Greater(t, r.Jain, 0.95, c.algorithm)
	}
}

func TestDatagramsOutsideTheWindowTakeAllThereIs(t *testing.T) {
	r := playLines(t, home("copa", "rate 30mbit")...)
	assert.Less(t, managedPart(r), 0.05)
	assert.Greater(t, r.Queueing.P95, 900*ms)
}

func TestDatagramsHaveTheWholeWindowThatNobodyWants(t *testing.T) {
	r := playLines(t, "link 20mbit rtt 40ms queue 2500KB", "run 30s warmup 10s",
		"flow copa name a group peer rate 500kbit", "flow copa name b group peer rate 500kbit",
		"flow udp rate 16mbit group peer share 0.5")
	assert.InDelta(t, 16*1400.0/1428, r.Flows[2].Throughput.Mbps(), 0.5)
	assert.InDelta(t, 0.05, managedPart(r), 0.01)
	assert.Zero(t, r.Flows[2].Drops)
}

func TestAFlowThatStartsBesideDatagramsTakesOverWithinSeconds(t *testing.T) {
	r := playLines(t, "link 20mbit rtt 40ms queue 2500KB", "run 30s",
		"flow udp name udp rate 19mbit group peer share 0.5",
		"flow copa name a group peer start 10s", "flow copa name b group peer start 10s")
	between := func(i int, from, to time.Duration) float64 { return mean(r.Flows[i].PerSecond, from, to).Mbps() }
	assert.InDelta(t, 19*1400.0/1428, between(0, 2*time.Second, 10*time.Second), 0.5)
	assert.Greater(t, between(1, 13*time.Second, 30*time.Second)+between(2, 13*time.Second, 30*time.Second), 9.0)
}

func TestAShareIsForDatagramsBesideAFlow(t *testing.T) {
	for _, c := range []struct{ want, line string }{
		{"share above 0", "flow udp rate 1mbit group a share 0"},
		{"share above 0", "flow udp rate 1mbit group a share 2"},
		{"group a share 0.5", "flow udp rate 1mbit share 0.5"},
		{"flows have weights", "flow copa group a share 0.5"},
	} {
		_, err := ReadCase("case", strings.NewReader("link 1mbit\nrun 1s\n"+c.line), nil)
		assert.ErrorContains(t, err, c.want)
	}
	nobody, err := ReadCase("case", strings.NewReader("link 1mbit\nrun 1s\nflow udp rate 1mbit group a share 0.5"), nil)
	assert.NoError(t, err)
	_, err = Run(nobody.Scenario)
	assert.ErrorContains(t, err, "no flow of group")
}

// A call takes a twentieth of a cellular link that fades, beside a download and a
// flood of the same peer.
func TestACallLosesNothingBesideADownloadAndAFlood(t *testing.T) {
	for _, algorithm := range []string{"penstock", "copa", "bbr"} {
		for _, flood := range []bool{false, true} {
			for seed := range 4 {
				lines := []string{
					"link rtt 40ms queue 2MB", fmt.Sprintf("trace lte seed %d", seed+1), "run 60s warmup 5s",
					"flow " + algorithm + " name download group peer", "flow udp name call rate 260kbit group peer " +
						"share 0.5",
				}
				if flood {
					lines = append(lines, "flow udp name flood rate 30mbit group peer share 0.5")
				}
				r := playLines(t, lines...)
				call := r.Flows[1]
				t.Logf("%s seed %d flood %v: call lost %d of %d, p95 %v; download %v", algorithm, seed+1, flood,
					call.Drops, call.Packets, call.OneWay.P95, r.Flows[0].Throughput)
				assert.Zero(t, call.Drops)
				if !flood {
					continue
				}
				of := float64(r.Flows[0].Throughput + r.Flows[2].Throughput)
				assert.InDelta(t, 0.5, float64(r.Flows[2].Throughput)/of, 0.1, "the flood has its share and no more")
				assert.Less(t, r.Flows[2].OneWay.P50, call.OneWay.P50+150*ms, "its queue here is short")
			}
		}
	}
}
