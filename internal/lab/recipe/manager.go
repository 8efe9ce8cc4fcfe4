package recipe

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// What several flows of one host make of sharing a window.
func manager() []Recipe {
	return []Recipe{joinLeave(), hosts(), tunnel(), liveSwitch(), reloadStorm()}
}

// joinLeave: the thesis has no figures for its plot; ours are RFC 3124's idea of
// an ensemble taken at its word.
func joinLeave() Recipe {
	const flows = 5
	rtt := 40 * time.Millisecond
	every := func(s Scale) time.Duration { return pick(s, 10*time.Second, 3*time.Second) }
	play := func(s Scale, name, algorithm, group string) stage.Stage {
		st := stage.Stage{Name: name, Edge: edge(algorithm, group), Duration: 2 * flows * every(s)}
		st.Down, st.Up = hop(24, rtt, 80)
		for i := range flows {
			st.Actors = append(st.Actors, stage.Actor{
				Name: fmt.Sprint("flow ", i+1), Kind: stage.Bulk,
				Start: time.Duration(i) * every(s), Stop: time.Duration(flows+i) * every(s),
			})
		}
		st.Duration -= every(s)
		return st
	}
	// least is the worst Jain index of the seconds after each change, from the
	// second round trip on.
	least := func(r Run, every time.Duration) float64 {
		worst := 1.0
		for from := time.Duration(0); from < r.Stage.Duration; from += every {
			var here []string
			for _, a := range r.Stage.Actors {
				if a.Start <= from && from < a.Stop {
					here = append(here, a.Name)
				}
			}
			settled := from + (2*rtt + stage.Step - 1).Truncate(stage.Step) // a whole step
			for t := settled; t+time.Second <= from+every; t += time.Second {
				worst = min(worst, jain(r.rates(t, t+time.Second, here...)...))
			}
		}
		return worst
	}
	return Recipe{
		Name: "join-leave", Source: "Narayan, CCP thesis 2019, §2.3.3, Fig. 2-7",
		About: "five flows of a host join one by one, then leave: shares are equal at once",
		Stages: func(s Scale) (all []stage.Stage) {
			for _, algorithm := range []string{"reno", cc.Default} {
				all = append(all,
					play(s, "one window, "+algorithm, algorithm, perHost),
					play(s, "five windows, "+algorithm, algorithm, perFlow))
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			for _, algorithm := range []string{"reno", cc.Default} {
				one, five := o.of("one window, "+algorithm), o.of("five windows, "+algorithm)
				all = append(all,
					above("least Jain index of any second, one window, "+algorithm, "fair at once",
						least(one, every(o.Scale)), 0.99, ""),
					beside("the same, five windows, "+algorithm, "Reno has to probe",
						figures.Number(least(five, every(o.Scale)))),
					atLeast("utilisation, one window, "+algorithm, "", one.Record.Utilisation, 0.9, ""))
			}
			return all
		},
	}
}

func hosts() Recipe {
	const many = 8
	// The default algorithm takes some ten seconds to learn what queue there is.
	learnt := func(s Scale) time.Duration { return pick(s, 20*time.Second, 15*time.Second) }
	play := func(s Scale, name, algorithm, group string, first, second int) stage.Stage {
		st := stage.Stage{
			Name: name + ", " + algorithm, Edge: edge(algorithm, group),
			Duration: pick(s, 60*time.Second, 30*time.Second), Warmup: learnt(s),
		}
		st.Down, st.Up = hop(24, 40*time.Millisecond, 160)
		for host, n := range []int{first, second} {
			for i := range n {
				st.Actors = append(st.Actors, stage.Actor{
					Name: fmt.Sprintf("host %d flow %d", host+1, i+1),
					Kind: stage.Bulk, Host: host,
				})
			}
		}
		return st
	}
	ratio := func(r Run) float64 {
		var host [2]float64
		for i, a := range r.Stage.Actors {
			host[a.Host] += r.Record.Actors[i].Rate(r.Stage.Warmup, r.Stage.Duration).Mbps()
		}
		return host[0] / host[1]
	}
	return Recipe{
		Name: "hosts", Source: "RFC 3124, §1; ALCC, §5.9",
		About: "a host with eight flows against a host with one: each has half, and no longer a queue",
		Stages: func(s Scale) (all []stage.Stage) {
			for _, algorithm := range []string{"copa:paper", cc.Default} {
				all = append(all,
					play(s, "a window per host", algorithm, perHost, many, 1),
					play(s, "a window per flow", algorithm, perFlow, many, 1),
					play(s, "a flow per host", algorithm, perHost, 1, 1),
					play(s, "eight flows alone", algorithm, perHost, many, 0),
					play(s, "one flow alone", algorithm, perHost, 1, 0))
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			for _, algorithm := range []string{"copa:paper", cc.Default} {
				of := func(name string) Run { return o.of(name + ", " + algorithm) }
				ours, each := of("a window per host"), of("a window per flow")
				alone, pair := of("one flow alone"), of("a flow per host")
				all = append(all,
					within("throughput of the host with eight flows over that of the other, "+algorithm, "",
						ratio(ours), 0.9, 1.1, ""),
					beside("the same, a window per flow", "", figures.Number(ratio(each))),
					atMost("p95 queueing over that of a flow per host, "+algorithm, "", ours.p95()/pair.p95(), 1.15,
						""),
					beside("the same, a window per flow", "", figures.Number(each.p95()/pair.p95())),
					atMost("p95 queueing of eight flows alone over that of one, "+algorithm, "",
						of("eight flows alone").p95()/alone.p95(), 1.15, ""),
					beside("p95 queueing of both hosts, a window for each, over that of one flow alone", "",
						figures.Number(ours.p95()/alone.p95())),
					atLeast("utilisation, "+algorithm, "", ours.Record.Utilisation, 0.9, ""))
			}
			return all
		},
	}
}

func tunnel() Recipe {
	const mbit = 40.0
	rtt := 40 * time.Millisecond
	play := func(s Scale, name, algorithm string, cross stage.Actor) stage.Stage {
		st := stage.Stage{
			Name: name, Edge: edge(algorithm, perHost), Duration: pick(s, 120*time.Second,
				40*time.Second), Warmup: 2 * time.Second, Seed: 7,
		}
		st.Down, st.Up = hop(mbit, rtt, int(rate(mbit).BytesIn(rtt)/1500)) // a BDP
		cross.Name, cross.Start = "cross", 5*time.Second
		cross.On, cross.Off, cross.Random = 10*time.Second, 10*time.Second, true
		st.Actors = []stage.Actor{{Name: "ours", Kind: stage.Bulk}, cross}
		return st
	}
	udp := func(mbit float64) string { return fmt.Sprintf("UDP of %g Mbit/s", mbit) }
	cbr := []float64{10, 20, 30}
	// together is the fairness of the two in the time in which both run, from a
	// second after the other's start on.
	together := func(r Run) float64 {
		var ours, cross float64
		for _, turn := range r.Stage.Turns(1) {
			from, to := turn.From.Truncate(stage.Step)+time.Second, turn.To.Truncate(stage.Step)
			if to > from {
				ours += r.rate("ours", from, to) * (to - from).Seconds()
				cross += r.rate("cross", from, to) * (to - from).Seconds()
			}
		}
		return jain(ours, cross)
	}
	got := func(r Run) float64 {
		a := r.actor("cross")
		var read float64
		for _, n := range a.Bytes {
			read += float64(n)
		}
		return read / float64(a.Sent)
	}
	return Recipe{
		Name: "tunnel", Source: "ALCC, §5.9 (A9)",
		About: "a tunnel of 40 Mbit/s with a cross flow that comes and goes: TCP past us, TCP with us, UDP",
		Stages: func(s Scale) []stage.Stage {
			all := []stage.Stage{
				play(s, "TCP past the edge", "copa:alcc", stage.Actor{Kind: stage.Bulk, Direct: true}),
				play(s, "TCP past the edge, "+cc.Default, cc.Default, stage.Actor{Kind: stage.Bulk, Direct: true}),
				play(s, "TCP through the edge", "copa:alcc", stage.Actor{Kind: stage.Bulk}),
			}
			for _, m := range cbr {
				all = append(all, play(s, udp(m), "copa:alcc", stage.Actor{Kind: stage.UDP, Rate: rate(m)}))
			}
			return all
		},
		Judge: func(o Outcome) []Finding {
			all := []Finding{
				atLeast("Jain index with TCP past the edge, while both run", "shares fairly",
					together(o.of("TCP past the edge")), 0.9, ""),
				beside("the same, "+cc.Default, "", figures.Number(together(o.of("TCP past the edge, "+cc.Default)))),
				atLeast("Jain index with TCP through the edge, while both run", "needs a congestion manager",
					together(o.of("TCP through the edge")), 0.99, ""),
			}
			for _, m := range cbr {
				all = append(all, atLeast("part of its rate that "+udp(m)+" has", "UDP dominates", got(o.of(udp(m))),
					0.9, ""))
			}
			return all
		},
	}
}

func liveSwitch() Recipe {
	const flows = 4
	// A round trip is one of the record's steps: whoever stalls for two leaves one
	// empty, whenever it begins.
	rtt := stage.Step
	at := func(s Scale) time.Duration { return pick(s, 15*time.Second, 10*time.Second) }
	return Recipe{
		Name: "live-switch", Source: "no paper; ours",
		About: "four flows under load change from cubic to copa: nothing is lost, nothing stalls",
		Stages: func(s Scale) []stage.Stage {
			st := stage.Stage{
				Name: "cubic, then copa", Edge: edge("cubic", perHost), Duration: 2 * at(s), Warmup: time.Second,
				Changes: []stage.Change{{At: at(s), Edge: edge("copa", perHost)}},
			}
			st.Down, st.Up = hop(24, rtt, 200)
			for i := range flows {
				st.Actors = append(st.Actors, stage.Actor{Name: fmt.Sprint("flow ", i+1), Kind: stage.Bulk})
			}
			return []stage.Stage{st}
		},
		Judge: func(o Outcome) []Finding {
			r := o.Runs[0]
			at, step := r.Stage.Changes[0].At, int(r.Stage.Changes[0].At/stage.Step)
			longest, broken := 0, ""
			var before, after float64
			for _, a := range r.Record.Actors {
				empty := 0
				for _, n := range a.Bytes[step:] {
					if empty++; n > 0 {
						empty = 0
					}
					longest = max(longest, empty)
				}
				broken += a.Corrupt
				before += a.Rate(at-3*time.Second, at).Mbps()
				after += a.Rate(at, at+3*time.Second).Mbps()
			}
			return []Finding{
				holds("bytes that arrived", "", "all of them, and none other", orElse(broken, "all of them"),
					broken == ""),
				holds("the new configuration", "", "is in force", orElse(refusals(r), "is in force"),
					len(r.Record.Reloads) == 1 && refusals(r) == ""),
				atMost("whole round trips in a row in which a flow moved nothing", "", float64(longest), 0, ""),
				atLeast("throughput in the three seconds after the switch, over that in the three before", "",
					after/before, 0.9, ""),
			}
		},
	}
}

func reloadStorm() Recipe {
	const every = 300 * time.Millisecond
	configs := []string{
		edge("copa", perHost),
		"defaults: {algorithm: nonesuch}\n",
		edge("cubic", perHost),
		"defaults: {algorithm: copa\n",
		edge("penstock", perFlow),
		edge("copa", perHost, rule(80, "weight: -1")),
	}
	valid := func(i int) bool { return i%2 == 0 }
	return Recipe{
		Name: "reload-storm", Source: "no paper; ours",
		About: "200 new configurations in a minute, every other one broken, while 500 flows run",
		Stages: func(s Scale) []stage.Stage {
			flows, reloads := pick(s, 500, 50), pick(s, 200, 20)
			st := stage.Stage{
				Name: fmt.Sprintf("%d flows, %d reloads", flows, reloads), Edge: edge("cubic", perHost),
				Duration: time.Duration(reloads+1) * every, Warmup: time.Second,
			}
			st.Down, st.Up = hop(100, 20*time.Millisecond, 2000)
			for i := range flows {
				st.Actors = append(st.Actors, stage.Actor{
					Name: fmt.Sprint("flow ", i+1), Kind: stage.Bulk,
					Host: i % 50,
				})
			}
			for i := range reloads {
				st.Changes = append(st.Changes, stage.Change{
					At:   time.Duration(i+1) * every,
					Edge: configs[i%len(configs)],
				})
			}
			return []stage.Stage{st}
		},
		Judge: func(o Outcome) []Finding {
			r := o.Runs[0]
			broken, stopped, wrong := "", 0, 0
			tail := r.Stage.Duration - 5*time.Second
			for _, a := range r.Record.Actors {
				broken += a.Corrupt + a.Error
				if a.Rate(max(0, tail), r.Stage.Duration) == 0 {
					stopped++
				}
			}
			for i, c := range r.Record.Reloads {
				if (c.Error == "") != valid(i) {
					wrong++
				}
			}
			all := []Finding{
				holds("bytes that arrived", "", "all of them, and none other", orElse(broken, "all of them"),
					broken == ""),
				atMost("flows that moved nothing in the last five seconds", "", float64(stopped), 0, ""),
				within("configurations answered", "", float64(len(r.Record.Reloads)), float64(len(r.Stage.Changes)),
					float64(len(r.Stage.Changes)), ""),
				atMost("of those, valid ones refused or broken ones taken", "", float64(wrong), 0, ""),
				atLeast("utilisation", "", r.Record.Utilisation, 0.9, ""),
			}
			if m := r.Record.Memory; len(m) > 10 {
				// The first seconds are the flows' own start.
				early, late := slices.Max(m[5:10]), slices.Max(m[len(m)-5:])
				all = append(all, atMost("memory in the last five seconds, over that in seconds 5 to 10", "",
					float64(late)/float64(early), 1.1, ""))
			}
			return all
		},
	}
}

func refusals(r Run) (all string) {
	for _, c := range r.Record.Reloads {
		all += c.Error
	}
	return all
}

func orElse(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
