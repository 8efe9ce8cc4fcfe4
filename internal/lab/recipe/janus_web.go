package recipe

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// Short downloads beside a long one, of §8.2.
func janusBeside(s Scale, name, config string, background bool, short ...stage.Actor) stage.Stage {
	st := stage.Stage{
		Name: name, Edge: config, Duration: pick(s, 120*time.Second, 40*time.Second),
		Warmup: 10 * time.Second,
	}
	st.Down, st.Up = janusHop(15)
	if background {
		st.Actors = append(st.Actors, janusActor(0, "background", 0, 0))
	}
	for _, a := range short {
		a.Kind, a.Port, a.Start = stage.Web, janusPort(1), 5*time.Second
		st.Actors = append(st.Actors, a)
	}
	return st
}

var janusShort = rule(janusPort(1), "class: delay_sensitive")

func janusWeb() Recipe {
	web := stage.Actor{Name: "web", Size: 100_000, Every: 2 * time.Second}
	return Recipe{
		Name: "janus-c4", Source: janusSource + "§8.2.1",
		About: "web objects of 100 KB every 2 s beside a long download over 15 Mbit/s: queueing",
		Stages: func(s Scale) []stage.Stage {
			return []stage.Stage{
				janusBeside(s, "janus, bulk", edge("janus", perFlow, janusShort), true, web),
				janusBeside(s, "janus, R=12", edge("janus", perFlow, append(guarantees(12), janusShort)...), true, web),
				janusBeside(s, "one window", edge("copa:paper", perHost, janusShort), true, web),
				janusBeside(s, "vivace", edge("vivace", perFlow), true, web),
				janusBeside(s, "cubic", "", true, web),
			}
		},
		Judge: func(o Outcome) (all []Finding) {
			cubic := o.of("cubic")
			used := func(r Run) float64 { return r.rate("background", r.Stage.Warmup, r.Stage.Duration) / r.capacity() }
			for _, name := range []string{"janus, bulk", "janus, R=12", "one window"} {
				all = append(all, atMost("p95 queueing over cubic's, "+name, "about 1/10",
					o.of(name).p95()/cubic.p95(), 1.0/8, ""))
			}
			all = append(all,
				above("background over what the link has, janus, bulk", "above 90 %", used(o.of("janus, bulk")), 0.9,
					""),
				above("background over what the link has, one window", "", used(o.of("one window")), 0.9, ""),
				beside("p95 queueing over cubic's, vivace", "PCC: about 5 times Janus's",
					figures.Number(o.of("vivace").p95()/cubic.p95())),
				beside("background over what the link has, vivace", "PCC: 73 %", figures.Number(used(o.of("vivace")))))
			for _, r := range o.Runs {
				all = append(all, beside("median time of an object, "+r.Stage.Name, "",
					figure(median(took(r.actor("web"))), "s")))
			}
			return all
		},
	}
}

// took is how long each request took, in seconds.
func took(a stage.ActorRecord) (all []float64) {
	for _, q := range a.Requests {
		if q.Took > 0 {
			all = append(all, q.Took.Seconds())
		}
	}
	return all
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[len(values)/2]
}

func janusPage() Recipe {
	const objects = 6
	var page []stage.Actor
	for i := range objects {
		page = append(page, stage.Actor{Name: fmt.Sprint("object ", i+1), Size: 50_000, Every: 4 * time.Second})
	}
	// load is the median over pages of the time until their last object is there.
	load := func(r Run) float64 {
		var all []float64
		for n, q := range r.actor("object 1").Requests {
			last := q.Took
			for i := range objects {
				if a := r.actor(fmt.Sprint("object ", i+1)); n < len(a.Requests) {
					last = max(last, a.Requests[n].Took)
				}
			}
			if q.At+page[0].Every < r.Stage.Duration {
				all = append(all, last.Seconds())
			}
		}
		return median(all)
	}
	return Recipe{
		Name: "janus-c5", Source: janusSource + "§8.2.2",
		About: "a page of six objects of 50 KB beside a long download over 15 Mbit/s: how long it takes to load",
		Stages: func(s Scale) []stage.Stage {
			each, one := edge("janus", perFlow, janusShort), edge("copa:paper", perHost, janusShort)
			return []stage.Stage{
				janusBeside(s, "janus, idle", each, false, page...),
				janusBeside(s, "janus", each, true, page...),
				janusBeside(s, "one window, idle", one, false, page...),
				janusBeside(s, "one window", one, true, page...),
				janusBeside(s, "cubic, idle", "", false, page...),
				janusBeside(s, "cubic", "", true, page...),
			}
		},
		Judge: func(o Outcome) []Finding {
			over := func(name string) float64 { return load(o.of(name)) / load(o.of("cubic, idle")) }
			return []Finding{
				atMost("page load time over that of an idle link with cubic, one window", "as on an idle link",
					over("one window"), 1.3, ""),
				// By itself it is slower: a gentler start keeps the queue short that janus-c4 is about.
				beside("the same, janus each for itself", "as on an idle link", figures.Number(over("janus"))),
				beside("the same, cubic", "above 2", figures.Number(over("cubic"))),
				beside("the same, janus on an idle link", "", figures.Number(over("janus, idle"))),
				beside("the same, one window on an idle link", "", figures.Number(over("one window, idle"))),
				beside("page load time of an idle link with cubic", "", figure(load(o.of("cubic, idle")), "s")),
			}
		},
	}
}
