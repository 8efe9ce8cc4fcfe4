package recipe

import (
	"fmt"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// What clients that stay as they are keep in the queue of their own uplink, with windows
// that the edge holds and without.
func uploads() []Recipe { return []Recipe{uploadsAlone(), uploadsBeside()} }

// The configurations of the edge.
const (
	unheld = "unheld"
	held   = "held"
)

// upEdge has the edge hold the windows of uploads, or not.
func upEdge(which string) string {
	receive := "none"
	if which == held {
		receive = cc.Default
	}
	return fmt.Sprintf("defaults: {algorithm: %s, receive: none, up: {receive: %s}}\n", cc.Default, receive)
}

// upHop is a last hop of 12 Mbit/s each way and 20 ms, with 2 MB of queue each way.
func upHop(name, which string, d time.Duration) stage.Stage {
	return upOver(sim.LinkConfig{Rate: rate(12)}, name, which, d)
}

// upOver is one over a link that is the same both ways.
func upOver(link sim.LinkConfig, name, which string, d time.Duration) stage.Stage {
	link.Delay, link.QueueBytes = 10*time.Millisecond, 2_000_000
	return stage.Stage{
		Name: name + ", " + which, Edge: upEdge(which), Down: link, Up: link,
		Duration: d, Warmup: 2 * time.Second, Seed: 1,
	}
}

// The applications of Beside and of the recipe, by name.
const (
	Uploading   = "upload"
	Downloading = "download"
	PingPong    = "ping-pong"
)

var besideActors = []stage.Actor{
	{Name: Uploading, Kind: stage.Upload},
	{Name: Downloading, Kind: stage.Bulk},
	{Name: PingPong, Kind: stage.Requests, Size: 100, Every: 100 * time.Millisecond},
}

// Beside is an upload under the client's own Cubic beside a download and a ping-pong,
// over a link that is the same both ways: first with its window unheld, then held.
func Beside(link sim.LinkConfig, d time.Duration) (all []stage.Stage) {
	for _, which := range []string{unheld, held} {
		st := upOver(link, "both", which, d)
		st.Actors = besideActors
		all = append(all, st)
	}
	return all
}

func uploadsAlone() Recipe {
	const fixed, lte, eight = "12 Mbit/s", "LTE", "eight of cubic, 12 Mbit/s"
	controls := func(s Scale) []string { return pick(s, []string{"cubic", "bbr", "reno"}, []string{"cubic", "bbr"}) }
	length := func(s Scale) time.Duration { return pick(s, time.Minute, 30*time.Second) }
	return Recipe{
		Name: "uploads", Source: "no paper; ours",
		About: "uploads under the clients' own control over 12 Mbit/s and generated LTE, their windows held and not",
		Stages: func(s Scale) (all []stage.Stage) {
			trace, err := sim.Generate("lte", 1, sim.GeneratedLength)
			if err != nil {
				panic(fmt.Sprintf("recipe: %v", err)) // the model is built in
			}
			for _, link := range []string{fixed, lte} {
				for _, control := range controls(s) {
					for _, which := range []string{unheld, held} {
						st := upHop(control+", "+link, which, length(s))
						if link == lte {
							st.Up.Rate, st.Up.Trace = 0, trace
						}
						st.Actors = []stage.Actor{{Name: control, Kind: stage.Upload, Control: control}}
						all = append(all, st)
					}
				}
			}
			st := upHop(eight, held, length(s))
			for i := range 8 {
				st.Actors = append(st.Actors, stage.Actor{Name: fmt.Sprint("upload ", i+1), Kind: stage.Upload})
			}
			return append(all, st)
		},
		Judge: func(o Outcome) (all []Finding) {
			for _, link := range []string{fixed, lte} {
				least := 0.97
				if link == lte {
					least = 0.9
				}
				for _, control := range controls(o.Scale) {
					name := control + ", " + link
					without, with := o.of(name+", "+unheld), o.of(name+", "+held)
					most := 0.1
					if control == "bbr" { // it fills no queue by itself
						most = 1
					}
					all = append(all,
						beside("p95 of the uplink's queue, "+name+", "+unheld, "", figure(without.p95(), "ms")),
						atMost(name+", "+held+": the same over that", "", with.p95()/without.p95(), most, ""),
						atLeast(name+", "+held+": throughput over that of unheld", "",
							with.Record.Throughput.Mbps()/without.Record.Throughput.Mbps(), least, ""))
				}
			}
			one, many := o.of("cubic, "+fixed+", "+held), o.of(eight+", "+held)
			return append(all, atMost("p95 of the uplink's queue, eight uploads of a host over one", "",
				many.p95()/one.p95(), 1.5, ""))
		},
	}
}

func uploadsBeside() Recipe {
	return Recipe{
		Name: "uploads-beside", Source: "no paper; ours",
		About: "an upload beside a download of the same host and a ping-pong, its window held and not",
		Stages: func(s Scale) (all []stage.Stage) {
			d := pick(s, time.Minute, 30*time.Second)
			for _, a := range besideActors[:2] {
				st := upHop(a.Name, held, d)
				st.Actors = []stage.Actor{a}
				all = append(all, st)
			}
			return append(all, Beside(sim.LinkConfig{Rate: rate(12)}, d)...)
		},
		Judge: func(o Outcome) (all []Finding) {
			got := func(r Run, who string) float64 { return r.rate(who, r.Stage.Warmup, r.Stage.Duration) }
			unheldBoth, both := o.of("both, "+unheld), o.of("both, "+held)
			for _, who := range []string{Uploading, Downloading} {
				alone := got(o.of(who+", "+held), who)
				all = append(all,
					atLeast("throughput of the "+who+" over what it has alone, "+held, "", got(both, who)/alone, 0.9,
						""),
					beside("the same of the "+who+", "+unheld, "", figure(got(unheldBoth, who)/alone, "")))
			}
			return append(all,
				atMost("p95 of the ping-pong, "+held, "", both.RequestsP95(PingPong), 60, "ms"),
				beside("p95 of the ping-pong, "+unheld, "", figure(unheldBoth.RequestsP95(PingPong), "ms")))
		},
	}
}
