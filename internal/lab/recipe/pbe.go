package recipe

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

const pbeSource = "PBE-CC, SIGCOMM 2020, "

func pbe() []Recipe {
	return []Recipe{pbeCross(), pbeTwo(), pbePhones(), pbeRTTs(), pbeOthers()}
}

// pbeCell is a carrier of 20 MHz: a hundred blocks of 500 bits in a millisecond,
// and for each phone a queue that a second of them fills.
func pbeCell(name, config string, d time.Duration, rtts ...time.Duration) stage.Stage {
	least := slices.Min(rtts)
	cell := &sim.CellConfig{Delay: least / 2}
	for _, rtt := range rtts {
		cell.Hosts = append(cell.Hosts, sim.CellHost{Delay: rtt - least, QueueBytes: 6_000_000})
	}
	return stage.Stage{
		Name: name, Edge: config, Cell: cell, Up: sim.LinkConfig{Delay: least / 2},
		Hints: 5 * time.Millisecond, Duration: d, Warmup: 2 * time.Second, Seed: 1,
	}
}

const pbeRTT = 40 * time.Millisecond

func pbeCross() Recipe {
	algorithms := []string{"pbe", "bbr", "cubic", "verus", "copa", "vivace", "sprout", "penstock"}
	paper := map[string]string{
		"pbe": "57 Mbit/s, 61/71 ms", "bbr": "62 Mbit/s, 147/227 ms", "cubic": "58 Mbit/s, 252/416 " +
			"ms", "verus": "56 Mbit/s, 263/403 ms",
		"copa": "less throughput", "vivace": "less throughput", "sprout": "less throughput",
	}
	got := func(r Run) float64 { return r.rate("phone", r.Stage.Warmup, r.Stage.Duration) }
	p95 := func(r Run) float64 { return millis(r.actor("phone").Queueing.P95) }
	return Recipe{
		Name: "pbe-e1", Source: pbeSource + "§6.3.3",
		About: "a phone beside another whose traffic comes and goes in the same cell: throughput and delay",
		Stages: func(s Scale) (all []stage.Stage) {
			for _, algorithm := range algorithms {
				if s == Short && algorithm != "pbe" && algorithm != "cubic" {
					continue
				}
				st := pbeCell(algorithm, edge(algorithm, perHost), pick(s, 40*time.Second, 14*time.Second), pbeRTT)
				st.Actors = []stage.Actor{
					{Name: "phone", Kind: stage.Bulk},
					{
						Name: "other", Kind: stage.UDP, Host: 1, Rate: rate(20), Start: 4 * time.Second,
						On: 4 * time.Second, Off: 4 * time.Second,
					},
				}
				all = append(all, st)
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			ours, cubic := o.of("pbe"), o.of("cubic")
			all = append(all,
				atLeast("throughput over cubic's", "57/58", got(ours)/got(cubic), 0.9, ""),
				atMost("p95 queueing", "71 ms one-way at p95, 61 on average", p95(ours), 20, "ms"),
				atMost("p95 queueing over cubic's", "71/416, all of the one-way delay", p95(ours)/p95(cubic), 1.0/3,
					""))
			for _, r := range o.Runs {
				q := r.actor("phone").Queueing
				all = append(all, beside("throughput, mean and p95 queueing, "+r.Stage.Name, paper[r.Stage.Name],
					fmt.Sprintf("%s Mbit/s, %s/%s ms", figures.Number(got(r)), figures.Number(millis(q.Mean)),
						figures.Number(millis(q.P95)))))
			}
			return all
		},
	}
}

func pbeTwo() Recipe {
	names := []string{"first", "second"}
	paper := []string{"26 Mbit/s", "28 Mbit/s"}
	return Recipe{
		Name: "pbe-e2", Source: pbeSource + "§6.3.4",
		About: "one phone with two downloads from two servers: half for each, and little delay",
		Stages: func(s Scale) (all []stage.Stage) {
			for _, by := range []struct{ name, group string }{{"a window per flow", perFlow}, {"one window", perHost}} {
				st := pbeCell(by.name, edge("pbe", by.group), pick(s, 40*time.Second, 12*time.Second), pbeRTT)
				for _, n := range names {
					st.Actors = append(st.Actors, stage.Actor{Name: n, Kind: stage.Bulk})
				}
				all = append(all, st)
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			for _, r := range o.Runs {
				rates := r.rates(r.Stage.Warmup, r.Stage.Duration, names...)
				for i, n := range names {
					all = append(all, within(fmt.Sprintf("%s over half of both, %s", n, r.Stage.Name), paper[i],
						2*rates[i]/sum(rates), 0.85, 1.15, ""))
				}
				all = append(all, beside("both, "+r.Stage.Name, "54 Mbit/s", figure(sum(rates), "Mbit/s")))
			}
			one, each := o.of("one window"), o.of("a window per flow")
			return append(all,
				atMost("p95 queueing, one window", "low", one.p95(), 20, "ms"),
				beside("the same, a window per flow", "low", figure(each.p95(), "ms")))
		},
	}
}

// pbeShare is several phones that begin one after the other; the last of them
// may be somebody else's.
func pbeShare(s Scale, name string, rtts []time.Duration, other string) stage.Stage {
	every := pick(s, 10*time.Second, 4*time.Second)
	st := pbeCell(name, edge("pbe", perHost), 3*every, rtts...)
	for i := range 3 {
		st.Actors = append(st.Actors, stage.Actor{
			Name: fmt.Sprint("phone ", i+1), Kind: stage.Bulk, Host: i,
			Start: time.Duration(i) * every,
		})
	}
	if other != "" {
		st.Kernel, st.Actors[2].Direct = other, true
	}
	return st
}

// pbeFair is Jain's index while n of the phones run, from a second after the last began.
func pbeFair(r Run, n int) float64 {
	every := r.Stage.Duration / 3
	from := time.Duration(n-1)*every + time.Second
	var rates []float64
	for i := range n {
		rates = append(rates, r.rate(fmt.Sprint("phone ", i+1), from, time.Duration(n)*every))
	}
	return jain(rates...)
}

func pbePhones() Recipe {
	return Recipe{
		Name: "pbe-e3", Source: pbeSource + "§6.4.1",
		About: "two and three phones in a cell",
		Stages: func(s Scale) []stage.Stage {
			return []stage.Stage{pbeShare(s, "pbe", []time.Duration{pbeRTT}, "")}
		},
		Judge: func(o Outcome) []Finding {
			return []Finding{
				atLeast("Jain index of two", "99.97 %", pbeFair(o.Runs[0], 2), 0.98, ""),
				atLeast("Jain index of three", "98.73 %", pbeFair(o.Runs[0], 3), 0.98, ""),
			}
		},
	}
}

func pbeRTTs() Recipe {
	rtts := []time.Duration{297 * time.Millisecond, 52 * time.Millisecond, 64 * time.Millisecond}
	return Recipe{
		Name: "pbe-e4", Source: pbeSource + "§6.4.2",
		About: "phones in a cell whose round trips are 297, 52 and 64 ms",
		Stages: func(s Scale) []stage.Stage {
			return []stage.Stage{pbeShare(s, "pbe", rtts, "")}
		},
		Judge: func(o Outcome) []Finding {
			return []Finding{
				atLeast("Jain index of two", "99.74 %", pbeFair(o.Runs[0], 2), 0.98, ""),
				atLeast("Jain index of three", "99.45 %", pbeFair(o.Runs[0], 3), 0.98, ""),
			}
		},
	}
}

func pbeOthers() Recipe {
	others := []string{"bbr", "cubic"}
	paper := map[string]string{"bbr": "98.52 %", "cubic": "98.34 %"}
	return Recipe{
		Name: "pbe-e5", Source: pbeSource + "§6.4.3",
		About: "two phones beside one that bbr or cubic serves: the cell divides",
		Stages: func(s Scale) (all []stage.Stage) {
			for _, other := range others {
				all = append(all, pbeShare(s, "pbe and "+other, []time.Duration{pbeRTT}, other))
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			for _, other := range others {
				all = append(all, atLeast("Jain index of three, one of them "+other, paper[other],
					pbeFair(o.of("pbe and "+other), 3), 0.97, ""))
			}
			return all
		},
	}
}
