package recipe

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// NACC's paper names neither rates nor round trips of its WiFi; ours are a nominal
// 54 Mbit/s, 20 ms, and a radio that loses one packet in a hundred.
const (
	naccMbit  = 54.0
	naccRTT   = 20 * time.Millisecond
	naccLoss  = 0.01
	naccQueue = 100
	naccHints = 20 * time.Millisecond
	// naccHeard is until a change shows: the hint's average, its way, and a round
	// trip, in whole steps of the record.
	naccHeard = 2 * stage.Step
)

const naccSource = "NACC, J. Commun. Netw. 2023, "

func nacc() []Recipe {
	return []Recipe{
		naccSteps(), naccLoad(), naccPriorities("nacc-d3", "4 and 2", 4, 2),
		naccPriorities("nacc-d4", "2, 4 and 1", 2, 4, 1),
	}
}

func naccStage(name, config string, loss float64, d time.Duration) stage.Stage {
	st := stage.Stage{Name: name, Edge: config, Hints: naccHints, Duration: d, Warmup: time.Second, Seed: 1}
	st.Down, st.Up = hop(naccMbit, naccRTT, naccQueue)
	st.Down.Loss = loss
	return st
}

func naccSteps() Recipe {
	const slow = naccMbit / 3
	at := 5 * time.Second
	play := func(name string, more ...stage.Actor) stage.Stage {
		st := naccStage(name, edge("nacc", perFlow), 0, 2*at)
		st.Actors = append([]stage.Actor{{Name: "ours", Kind: stage.Bulk}}, more...)
		return st
	}
	return Recipe{
		Name: "nacc-d1", Source: naccSource + "§VII-A",
		About: "the network reports more arrivals and less room, another flow, a slower link: the window falls",
		Stages: func(Scale) []stage.Stage {
			falls := play("the link slows down")
			trace, err := sim.Steps("falls", 2*at, sim.Step{Rate: rate(naccMbit)}, sim.Step{At: at, Rate: rate(slow)})
			if err != nil {
				panic(err) // constant
			}
			falls.Down.Trace = trace
			return []stage.Stage{
				play("more arrives and the queue fills",
					stage.Actor{
						Name: "cross", Kind: stage.UDP, Host: 1, Rate: rate(naccMbit), Start: at,
						Stop: at + time.Second,
					}),
				play("another flow", stage.Actor{Name: "other", Kind: stage.Bulk, Host: 1, Start: at}),
				falls,
			}
		},
		Judge: func(o Outcome) (all []Finding) {
			packets := func(r Run, at time.Duration) float64 {
				return float64(r.actor("ours").Cwnd[at/stage.Step]) / float64(cc.DefaultMSS)
			}
			for _, r := range o.Runs {
				least := math.Inf(1)
				for t := at + stage.Step; t <= at+naccHeard; t += stage.Step {
					least = min(least, packets(r, t))
				}
				all = append(all, Finding{
					What: "cwnd before and after, " + r.Stage.Name, Paper: "falls",
					Bound: fmt.Sprintf("less within %s", naccHeard), OK: least < packets(r, at),
					Got: fmt.Sprintf("%s, %s packets", figures.Number(packets(r, at)), figures.Number(least)),
				})
			}
			falls := o.of("the link slows down")
			upper := 10 + slow*1e6*0.16*naccRTT.Seconds()/(8*float64(cc.DefaultMSS)) // equation 2
			return append(all, atMost("cwnd over its new bound, the link slows down", "CWND_UP follows DR",
				packets(falls, at+naccHeard)/upper, 1, ""))
		},
	}
}

func naccLoad() Recipe {
	sizes := func(s Scale) []cc.Bytes {
		return pick(s, []cc.Bytes{1_000_000, 10_000_000, 50_000_000}, []cc.Bytes{1_000_000, 10_000_000})
	}
	name := func(algorithm string, size cc.Bytes) string {
		return fmt.Sprintf("%s, %d MB", algorithm, size/1_000_000)
	}
	rateOf := func(r Run) float64 {
		a := r.Record.Actors[0]
		last := 0
		for i, n := range a.Bytes {
			if n > 0 {
				last = i
			}
		}
		return a.Rate(0, time.Duration(last+1)*stage.Step).Mbps()
	}
	// variation is the coefficient of variation of the window while it is used.
	variation := func(r Run) float64 {
		var n, mean, squares float64
		for i, w := range r.Record.Actors[0].Cwnd {
			if i >= 5 && w > 0 && r.Record.Actors[0].Bytes[i] > 0 {
				n++
				mean += float64(w)
				squares += float64(w) * float64(w)
			}
		}
		mean /= n
		return math.Sqrt(max(0, squares/n-mean*mean)) / mean
	}
	return Recipe{
		Name: "nacc-d2", Source: naccSource + "§VII-B",
		About: "one download of up to 50 MB over an access point whose radio loses packets",
		Stages: func(s Scale) (all []stage.Stage) {
			for _, size := range sizes(s) {
				for _, algorithm := range []string{"nacc", "cubic"} {
					st := naccStage(name(algorithm, size), edge(algorithm, perFlow), naccLoss,
						time.Duration(float64(size)/200_000*float64(time.Second)))
					st.Warmup = 0
					st.Actors = []stage.Actor{{Name: "download", Kind: stage.Bulk, Size: size}}
					all = append(all, st)
				}
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			loads := sizes(o.Scale)
			for i, size := range loads {
				ours, cubic := o.of(name("nacc", size)), o.of(name("cubic", size))
				faster, steadier := rateOf(ours)/rateOf(cubic), variation(ours)/variation(cubic)
				if i < len(loads)-1 {
					all = append(all, beside(name("throughput over cubic's", size), "", figures.Number(faster)))
					continue
				}
				all = append(all,
					atLeast(name("throughput over cubic's", size), "about 3 at 50 MB", faster, 1, ""),
					atMost(name("variation of cwnd over cubic's", size), "more stable", steadier, 0.5, ""))
			}
			return all
		},
	}
}

func naccPriorities(name, listed string, priorities ...int) Recipe {
	actor := func(p int) string { return fmt.Sprint("priority ", p) }
	play := func(s Scale, name, config string) stage.Stage {
		st := naccStage(name, config, naccLoss, pick(s, 60*time.Second, 20*time.Second))
		for i, p := range priorities {
			st.Actors = append(st.Actors, stage.Actor{Name: actor(p), Kind: stage.Bulk, Host: i, Port: 8000 + p})
		}
		return st
	}
	return Recipe{
		Name: name, Source: naccSource + "§VII-C",
		About: "flows of priorities " + listed + ": the higher, the faster",
		Stages: func(s Scale) []stage.Stage {
			var rules []string
			for _, p := range priorities {
				rules = append(rules, rule(8000+p, fmt.Sprintf("algorithm: %q",
					fmt.Sprintf("nacc:application,priority=%d", p))))
			}
			return []stage.Stage{
				play(s, "nacc", edge("nacc:application", perFlow, rules...)),
				play(s, "cubic", edge("cubic", perFlow)),
			}
		},
		Judge: func(o Outcome) (all []Finding) {
			ours, cubic := o.of("nacc"), o.of("cubic")
			got := func(r Run, p int) float64 { return r.rate(actor(p), r.Stage.Warmup, r.Stage.Duration) }
			total := func(r Run) (all float64) {
				for _, p := range priorities {
					all += got(r, p)
				}
				return all
			}
			for _, pair := range [][2]int{{4, 2}, {2, 1}} {
				if pair[1] == 1 && len(priorities) < 3 {
					continue
				}
				what := fmt.Sprintf("throughput at priority %d over that at %d", pair[0], pair[1])
				if ratio := got(ours, pair[0]) / got(ours, pair[1]); len(priorities) == 2 {
					all = append(all, within(what, "more", ratio, 1.2, 2.5, ""))
				} else {
					all = append(all, above(what, "more", ratio, 1, ""))
				}
				all = append(all, beside(what+", cubic", "equal",
					figures.Number(got(cubic, pair[0])/got(cubic, pair[1]))))
			}
			return append(all, atLeast("all of them over all of cubic's", "about 2", total(ours)/total(cubic), 1, ""))
		},
	}
}
