package recipe

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// Janus's testbed: a dumbbell of 60 ms whose bottleneck queues 200 packets. Its
// targets are of payload, so ours has room for that much of it.
const (
	janusRTT   = 60 * time.Millisecond
	janusQueue = 200
)

const janusSource = "Janus, IEEE TMC, "

func janus() []Recipe {
	return []Recipe{
		janusBurst(), janusSatisfaction(), janusMaxMin(), janusVideo(), janusWeb(), janusPage(),
		janusYield(), janusSpread(), janusDelay(), janusMinimum(), janusPair(),
	}
}

// janusHop has room for mbit of payload.
func janusHop(mbit float64) (down, up sim.LinkConfig) {
	return hop(mbit*float64(cc.DefaultMSS+sim.HeaderBytes)/float64(cc.DefaultMSS), janusRTT, janusQueue)
}

// janusActor is number i of those with rules of their own.
func janusActor(i int, name string, start, stop time.Duration) stage.Actor {
	return stage.Actor{Name: name, Kind: stage.Bulk, Port: janusPort(i), Start: start, Stop: stop}
}

func janusPort(i int) int { return 8001 + i }

// guarantees are rules that give the first ports their targets.
func guarantees(targets ...float64) (rules []string) {
	for i, t := range targets {
		rules = append(rules, rule(janusPort(i), fmt.Sprintf("class: guarantee, target: %gmbit", t)))
	}
	return rules
}

// asking names a flow by its target.
func asking(target float64) string { return fmt.Sprintf("R=%g", target) }

func janusBurst() Recipe {
	const target = 8.0
	from, to := 6*time.Second, 8*time.Second
	return Recipe{
		Name: "janus-c0", Source: janusSource + "§4, Fig. 6",
		About: "one flow that asks for 8 of 10 Mbit/s, and a burst of cross traffic",
		Stages: func(Scale) []stage.Stage {
			st := stage.Stage{
				Name: "janus", Edge: edge("janus", perFlow, guarantees(target)...),
				Duration: 15 * time.Second,
			}
			st.Down, st.Up = janusHop(10)
			st.Actors = []stage.Actor{
				janusActor(0, asking(target), 0, 0),
				{Name: "burst", Kind: stage.UDP, Host: 1, Rate: rate(8), Start: from, Stop: to},
			}
			return []stage.Stage{st}
		},
		Judge: func(o Outcome) []Finding {
			r := o.Runs[0]
			reach := func(what, paper string, since time.Duration, bound float64) Finding {
				at, ok := r.firstAt(asking(target), target, 3*stage.Step, since, r.Stage.Duration)
				if !ok {
					return holds(what, paper, fmt.Sprintf("at most %g s", bound), "never", false)
				}
				return atMost(what, paper, (at - since).Seconds(), bound, "s")
			}
			return []Finding{
				reach("time until it has its target", "0.7 s", 0, 1.5),
				reach("the same after the burst", "at 10 s, 2 s after it", to, 3),
			}
		},
	}
}

// janusEntering are the flows of §8.1, one after the other.
var (
	janusTargets  = []float64{10, 8, 6, 4}
	janusEntering = []time.Duration{0, 10 * time.Second, 20 * time.Second, 32 * time.Second}
)

const janusTogether = 32 * time.Second

func janusFour(name string, mbit float64, config string) stage.Stage {
	st := stage.Stage{Name: name, Edge: config, Duration: 62 * time.Second, Warmup: janusTogether}
	st.Down, st.Up = janusHop(mbit)
	for i, target := range janusTargets {
		st.Actors = append(st.Actors, janusActor(i, asking(target), janusEntering[i], 0))
	}
	return st
}

// Who divides: each flow for itself, by Janus's rule, or the manager, which sees all.
func janusEach(targets ...float64) string { return edge("janus", perFlow, guarantees(targets...)...) }

func janusAll(targets ...float64) string {
	return edge("copa:paper", perHost, guarantees(targets...)...)
}

func janusSatisfaction() Recipe {
	return Recipe{
		Name: "janus-c1", Source: janusSource + "§8.1.1",
		About: "flows that ask for 10, 8, 6 and 4 Mbit/s enter a link of 25: who asks for less than a share has it",
		Stages: func(Scale) []stage.Stage {
			return []stage.Stage{
				janusFour("janus, each for itself", 25, janusEach(janusTargets...)),
				janusFour("one window", 25, janusAll(janusTargets...)),
				janusFour("cubic", 25, ""),
			}
		},
		Judge: func(o Outcome) (all []Finding) {
			from, to := janusTogether+3*time.Second, o.Runs[0].Stage.Duration
			satisfaction := func(r Run, target float64) float64 { return r.rate(asking(target), from, to) / target }
			for _, name := range []string{"janus, each for itself", "one window"} {
				for _, target := range janusTargets[2:] {
					all = append(all, within(fmt.Sprintf("satisfaction of %s, %s", asking(target), name), "satisfied",
						satisfaction(o.of(name), target), 0.9, 1.15, ""))
				}
			}
			for _, target := range janusTargets[2:] {
				all = append(all, beside(fmt.Sprintf("satisfaction of %s, cubic", asking(target)),
					"about 20 s to converge", figures.Number(satisfaction(o.of("cubic"), target))))
			}
			return all
		},
	}
}

func janusMaxMin() Recipe {
	capacities := []float64{25, 20}
	paper := map[float64]string{25: "7.5, 7.5, 6 and 4 to 15 %", 20: "5.33, 5.33, 5.33 and 4 to 15 %"}
	name := func(who string, mbit float64) string { return fmt.Sprintf("%s, %g Mbit/s", who, mbit) }
	return Recipe{
		Name: "janus-c2", Source: janusSource + "§8.1.2",
		About: "the same four flows share 25 and 20 Mbit/s max-min fairly",
		Stages: func(Scale) (all []stage.Stage) {
			for _, c := range capacities {
				all = append(all,
					janusFour(name("janus, each for itself", c), c, janusEach(janusTargets...)),
					janusFour(name("one window", c), c, janusAll(janusTargets...)))
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			from, to := janusTogether+3*time.Second, o.Runs[0].Stage.Duration
			for _, c := range capacities {
				fair := maxMin(c, janusTargets)
				for _, who := range []string{"janus, each for itself", "one window"} {
					r := o.of(name(who, c))
					var got []float64
					for i, target := range janusTargets {
						got = append(got, r.rate(asking(target), from, to))
						all = append(all, within(name(asking(target)+" over its max-min share, "+who, c), paper[c],
							got[i]/fair[i], 0.9, 1.1, ""))
					}
					all = append(all, atLeast(name("all of them over what there is, "+who, c), "", sum(got)/c, 0.95,
						""))
				}
			}
			return all
		},
	}
}

func janusVideo() Recipe {
	rates := []float64{4, 10}
	play := func(s Scale, name, config string) stage.Stage {
		st := stage.Stage{Name: name, Edge: config, Duration: pick(s, 300*time.Second, 60*time.Second)}
		st.Down, st.Up = janusHop(15)
		for i, r := range rates {
			st.Actors = append(st.Actors, stage.Actor{
				Name: fmt.Sprintf("video of %g Mbit/s", r), Kind: stage.Video, Port: janusPort(i), Host: i,
				Rate: rate(r), Every: 2 * time.Second, Buffer: 10 * time.Second,
			})
		}
		return st
	}
	all := func(r Run) (v stage.VideoRecord) {
		for _, a := range r.Record.Actors {
			v.Rebuffers += a.Video.Rebuffers
			v.Rebuffer += a.Video.Rebuffer
			v.StartUp = max(v.StartUp, a.Video.StartUp)
		}
		return v
	}
	show := func(v stage.VideoRecord) string {
		return fmt.Sprintf("%d, %s s, %s s", v.Rebuffers, figures.Number(v.Rebuffer.Seconds()),
			figures.Number(v.StartUp.Seconds()))
	}
	return Recipe{
		Name: "janus-c3", Source: janusSource + "§8.1.3",
		About: "two videos, of 4 and of 10 Mbit/s, over 15: rebuffering",
		Stages: func(s Scale) []stage.Stage {
			return []stage.Stage{play(s, "janus", janusEach(rates...)), play(s, "cubic", "")}
		},
		Judge: func(o Outcome) []Finding {
			ours, theirs := all(o.of("janus")), all(o.of("cubic"))
			return []Finding{
				beside("rebuffers, time spent so, start-up, janus", "6, 4.2 s, 3.6 s", show(ours)),
				beside("rebuffers, time spent so, start-up, cubic", "21, 31.9 s, 3.5 s", show(theirs)),
				atMost("time spent rebuffering", "1/7.6 of cubic's", ours.Rebuffer.Seconds(),
					theirs.Rebuffer.Seconds()/2, "s"),
			}
		},
	}
}

func janusYield() Recipe {
	const target = 5.0
	enter := []time.Duration{20 * time.Second, 25 * time.Second, 30 * time.Second}
	leave := 40 * time.Second
	names := []string{"first", "second", "third"}
	play := func(name, config string) stage.Stage {
		st := stage.Stage{Name: name, Edge: config, Duration: 60 * time.Second, Warmup: 2 * time.Second}
		st.Down, st.Up = janusHop(20)
		for i, n := range names {
			st.Actors = append(st.Actors, janusActor(i, n, enter[i], leave))
		}
		st.Actors = append(st.Actors, janusActor(len(names), "bulk", 0, 0))
		return st
	}
	targets := []float64{target, target, target}
	return Recipe{
		Name: "janus-c6", Source: janusSource + "§8.3.1",
		About: "a long download yields to three flows that ask for 5 Mbit/s, and takes back what they leave",
		Stages: func(Scale) []stage.Stage {
			return []stage.Stage{
				play("janus, each for itself", janusEach(targets...)),
				play("one window", janusAll(targets...)),
			}
		},
		Judge: func(o Outcome) (all []Finding) {
			for _, r := range o.Runs {
				who := ", " + r.Stage.Name
				for i, n := range names {
					all = append(all, within("satisfaction of the "+n+who, "satisfied",
						r.rate(n, enter[i]+2*time.Second, leave)/target, 0.85, 1.15, ""))
				}
				all = append(all,
					atLeast("bulk alone over what there is, before"+who, "",
						r.rate("bulk", 5*time.Second, enter[0])/r.capacity(), 0.9, ""),
					atLeast("bulk alone over what there is, after"+who, "regains it",
						r.rate("bulk", leave+5*time.Second, r.Stage.Duration)/r.capacity(), 0.9, ""))
			}
			return all
		},
	}
}

func janusSpread() Recipe {
	const flows, seeds = 4, 5
	name := func(algorithm string, seed int) string { return fmt.Sprintf("%s, seed %d", algorithm, seed+1) }
	settled := 3 * time.Second
	play := func(algorithm string, seed int) stage.Stage {
		// Nothing but the starts is left to chance on a link without loss.
		random := rand.New(rand.NewPCG(uint64(seed), 7))
		st := stage.Stage{Name: name(algorithm, seed), Duration: 60*time.Second + settled, Warmup: settled}
		if algorithm != "cubic" {
			st.Edge = edge(algorithm, perFlow)
		}
		st.Down, st.Up = janusHop(20)
		for i := range flows {
			start := time.Duration(random.Int64N(int64(2 * time.Second)))
			st.Actors = append(st.Actors, janusActor(i, fmt.Sprint("flow ", i+1), start, 0))
		}
		return st
	}
	spread := func(o Outcome, algorithm string) (mean float64) {
		for seed := range seeds {
			r := o.of(name(algorithm, seed))
			rates := r.rates(settled, r.Stage.Duration, "flow 1", "flow 2", "flow 3", "flow 4")
			mean += (slices.Max(rates) - slices.Min(rates)) / seeds
		}
		return mean
	}
	return Recipe{
		Name: "janus-c7", Source: janusSource + "§8.3.2",
		About: "four long downloads for a minute over 20 Mbit/s: how far apart their throughputs are",
		Stages: func(Scale) (all []stage.Stage) {
			for seed := range seeds {
				all = append(all, play("janus", seed), play("cubic", seed))
			}
			return all
		},
		Judge: func(o Outcome) []Finding {
			ours, theirs := spread(o, "janus"), spread(o, "cubic")
			return []Finding{
				beside("largest less smallest throughput, mean over five seeds, cubic", "", figure(theirs, "Mbit/s")),
				atMost("the same, janus", "45 % less", ours, 0.8*theirs, "Mbit/s"),
			}
		},
	}
}

func janusDelay() Recipe {
	const target = 10.0
	step := 20 * time.Second
	play := func(name, config string) stage.Stage {
		st := stage.Stage{Name: name, Edge: config, Duration: 4 * step}
		st.Down, st.Up = janusHop(20)
		st.Down.Delay, st.Up.Delay = 20*time.Millisecond, 20*time.Millisecond
		st.Actors = []stage.Actor{janusActor(0, "first", 0, 0), janusActor(1, "second", 500*time.Millisecond, 0)}
		for i := 1; i < 4; i++ {
			st.Changes = append(st.Changes, stage.Change{
				At:    time.Duration(i) * step,
				Delay: time.Duration(20+10*i) * time.Millisecond,
			})
		}
		return st
	}
	return Recipe{
		Name: "janus-c8", Source: janusSource + "§8.4",
		About: "two flows that ask for 10 of 20 Mbit/s while the round trip grows from 40 to 100 ms",
		Stages: func(Scale) []stage.Stage {
			return []stage.Stage{play("janus", janusEach(target, target)), play("vegas", edge("vegas", perFlow))}
		},
		Judge: func(o Outcome) (all []Finding) {
			r, vegas := o.of("janus"), o.of("vegas")
			for i := range 4 {
				from, to := time.Duration(i)*step+step/2, time.Duration(i+1)*step
				rtt := 40 + 20*i
				all = append(all,
					atLeast(fmt.Sprintf("the lesser of the two at %d ms", rtt), "10 Mbit/s again",
						slices.Min(r.rates(from, to, "first", "second")), 9, "Mbit/s"),
					beside(fmt.Sprintf("the lesser of the two at %d ms, vegas", rtt), "starves",
						figure(slices.Min(vegas.rates(from, to, "first", "second")), "Mbit/s")))
			}
			return all
		},
	}
}

func janusMinimum() Recipe {
	const target = 10.0
	enter, leave := 20*time.Second, 50*time.Second
	terms := "class: guarantee, target: 10mbit, min_rate: 5mbit"
	play := func(each int) stage.Stage {
		st := stage.Stage{
			Name: fmt.Sprintf("%d and %d", each, each), Duration: 70 * time.Second,
			Edge: edge("janus", perFlow, rule(janusPort(0), terms), rule(janusPort(1), terms)),
		}
		st.Down, st.Up = janusHop(20)
		for i := range each {
			cross := janusActor(i, fmt.Sprint("cubic ", i+1), enter, leave)
			cross.Direct = true
			st.Actors = append(st.Actors, janusActor(i, fmt.Sprint("janus ", i+1), 0, 0), cross)
		}
		return st
	}
	return Recipe{
		Name: "janus-c9", Source: janusSource + "§8.5",
		About:  "flows that ask for 10 Mbit/s, and no less than 5, against as many of cubic's over 20",
		Stages: func(Scale) []stage.Stage { return []stage.Stage{play(1), play(2)} },
		Judge: func(o Outcome) (all []Finding) {
			for _, r := range o.Runs {
				for _, a := range r.Stage.Actors {
					if a.Direct {
						continue
					}
					all = append(all, within(a.Name+" beside cubic, "+r.Stage.Name, "about 5",
						r.rate(a.Name, enter+5*time.Second, leave), 4, 6.5, "Mbit/s"))
					what := a.Name + " after cubic is back at 0.95 of its target, " + r.Stage.Name
					if at, ok := r.firstAt(a.Name, 0.95*target, time.Second, leave, r.Stage.Duration); ok {
						all = append(all, atMost(what, "back to 10", (at-leave).Seconds(), 5, "s"))
					} else {
						all = append(all, holds(what, "back to 10", "at most 5 s", "never", false))
					}
				}
			}
			return all
		},
	}
}

func janusPair() Recipe {
	const target = 12.0
	leave := 20 * time.Second
	return Recipe{
		Name: "janus-c10", Source: janusSource + "§7.3",
		About: "two flows that ask for 12 Mbit/s over 20; one leaves",
		Stages: func(Scale) []stage.Stage {
			st := stage.Stage{
				Name: "janus", Edge: janusEach(target, target), Duration: 30 * time.Second,
				Warmup: 5 * time.Second,
			}
			st.Down, st.Up = janusHop(20)
			st.Actors = []stage.Actor{janusActor(0, "first", 0, leave), janusActor(1, "second", time.Second, 0)}
			return []stage.Stage{st}
		},
		Judge: func(o Outcome) []Finding {
			r := o.Runs[0]
			all := []Finding{}
			for _, n := range []string{"first", "second"} {
				all = append(all, within("share of the "+n, "within 0.8 and 1.2 of its share",
					r.rate(n, 5*time.Second, leave), 8, 12, "Mbit/s"))
			}
			const what, paper = "time until the second has its target, once it is alone", "2 s with H-TCP, longer " +
				"with Reno"
			at, ok := r.firstAt("second", target, 3*stage.Step, leave, r.Stage.Duration)
			if !ok {
				return append(all, holds(what, paper, "at most 2 s", "never", false))
			}
			return append(all, atMost(what, paper, (at-leave).Seconds(), 2, "s"))
		},
	}
}
