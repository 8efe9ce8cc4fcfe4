package recipe

import (
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

const ccpSource = "CCP, MIT 2019, "

// ccpShapes are what algorithms look like over the links of the congestion control plane's
// paper, which played them in an agent.
func ccpShapes() []Recipe { return []Recipe{ccpBBR(), ccpCopa(), ccpCubic()} }

// ccpStage is one download over a last hop.
func ccpStage(algorithm string, mbit float64, packets int, d time.Duration) stage.Stage {
	st := stage.Stage{Name: algorithm, Edge: edge(algorithm, perFlow), Duration: d, Warmup: 5 * time.Second, Seed: 1}
	st.Down, st.Up = hop(mbit, 20*time.Millisecond, packets)
	st.Actors = []stage.Actor{{Name: algorithm, Kind: stage.Bulk}}
	return st
}

// packetWindows are those of the only actor after the warm-up, in packets, at each step.
func (r Run) packetWindows() (packets []float64) {
	for _, w := range r.Record.Actors[0].Cwnd[r.Stage.Warmup/stage.Step:] {
		packets = append(packets, float64(w)/float64(cc.DefaultMSS))
	}
	return packets
}

func ccpBBR() Recipe {
	const mbit, bdp = 48, 80 // packets
	return Recipe{
		Name: "ccp-b2", Source: ccpSource + "figure 2-3",
		About: "BBR over 48 Mbit/s, 20 ms and two bandwidth-delay products of queue: it empties the queue every 10 s",
		Stages: func(s Scale) []stage.Stage {
			return []stage.Stage{ccpStage("bbr", mbit, 2*bdp, pick(s, time.Minute, 40*time.Second))}
		},
		Judge: func(o Outcome) (all []Finding) {
			r := o.of("bbr")
			least, most := math.Inf(1), 0.0 // seconds from one dip of the window to the next
			last := -1.0
			before := math.Inf(1)
			for i, w := range r.packetWindows() {
				if w < bdp/4 && before >= bdp/4 {
					at := float64(i) * stage.Step.Seconds()
					if last >= 0 {
						least, most = min(least, at-last), max(most, at-last)
					}
					last = at
				}
				before = w
			}
			return []Finding{
				within("shortest time between two dips", "10 s", least, 9, 11, "s"),
				within("longest time between two dips", "10 s", most, 9, 11, "s"),
				atMost("longest queueing over the round trip", "", millis(r.Record.Queueing.Max)/20, 1.25, ""),
				atLeast("utilisation", "", r.Record.Utilisation, 0.9, ""),
			}
		},
	}
}

func ccpCopa() Recipe {
	return Recipe{
		Name: "ccp-b6", Source: ccpSource + "figure 2-8",
		About: "Copa over 12 Mbit/s and 20 ms: its window oscillates around 22 packets",
		Stages: func(s Scale) []stage.Stage {
			return []stage.Stage{ccpStage("copa:paper", 12, 100, pick(s, time.Minute, 30*time.Second))}
		},
		Judge: func(o Outcome) []Finding {
			r := o.of("copa:paper")
			w := r.packetWindows()
			return []Finding{
				within("mean of the window", "about 22", sum(w)/float64(len(w)), 20, 26, "packets"),
				atLeast("utilisation", "", r.Record.Utilisation, 0.9, ""),
			}
		},
	}
}

func ccpCubic() Recipe {
	const mbit, bdp = 96, 160 // packets
	return Recipe{
		Name: "ccp-b7", Source: ccpSource + "figure 3-1",
		About: "CUBIC over 96 Mbit/s and 20 ms: each loss takes three tenths of the window",
		Stages: func(s Scale) []stage.Stage {
			return []stage.Stage{ccpStage("cubic", mbit, bdp, pick(s, time.Minute, 30*time.Second))}
		},
		Judge: func(o Outcome) []Finding {
			r := o.of("cubic")
			least, most, losses := math.Inf(1), 0.0, 0.0
			before := 0.0
			for _, w := range r.packetWindows() {
				if part := w / before; before > 0 && part < 0.9 {
					least, most = min(least, part), max(most, part)
					losses++
				}
				before = w
			}
			return []Finding{
				atLeast("losses", "", losses, 3, ""),
				within("least part of the window after a loss", "0.7", least, 0.63, 0.77, ""),
				within("largest part of the window after a loss", "0.7", most, 0.63, 0.77, ""),
			}
		},
	}
}
