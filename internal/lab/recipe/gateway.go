package recipe

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// What a VPN gateway makes of the last hop in front of it.
func gateway() []Recipe { return []Recipe{tunnelGateway()} }

func tunnelGateway() Recipe {
	const plain = "packets forwarded"
	// Copa by itself holds a queue that is longer than is asked for here
	ours := []string{"copa:delta=0.05", cc.Default}
	play := func(name, edge string) stage.Stage {
		trace, err := sim.Generate("lte", 1, sim.GeneratedLength)
		if err != nil {
			panic(fmt.Sprintf("recipe: %v", err)) // the model is built in
		}
		st := stage.Stage{
			Name: name, Edge: edge, Tunnel: stage.WireGuard,
			Duration: 30 * time.Second, Warmup: 2 * time.Second, // Cubic takes ten to fill the queue
		}
		st.Down = sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueueBytes: 2_000_000}
		st.Up = sim.LinkConfig{Delay: 20 * time.Millisecond}
		st.Actors = []stage.Actor{
			{Name: "download", Kind: stage.Bulk},
			{Name: "requests", Kind: stage.Requests, Size: 1000, Every: 200 * time.Millisecond},
		}
		return st
	}
	return Recipe{
		Name: "tunnel-gateway", Source: "no paper; ours",
		About: "a download and small requests of a phone inside WireGuard, over LTE: packets forwarded, and " +
			"connections ended",
		Stages: func(Scale) []stage.Stage {
			all := []stage.Stage{play(plain, "")}
			for _, a := range ours {
				all = append(all, play(a, edge(a, "tunnel")))
			}
			return all
		},
		Judge: func(o Outcome) (all []Finding) {
			forwarded := o.of(plain)
			mbit := func(r Run) float64 { return r.rate("download", r.Stage.Warmup, r.Stage.Duration) }
			all = append(all,
				beside("p95 of the requests, "+plain, "", figure(forwarded.RequestsP95("requests"), "ms")),
				beside("throughput of the download, "+plain, "", figure(mbit(forwarded), "Mbit/s")))
			for _, a := range ours {
				r := o.of(a)
				all = append(all,
					atMost("p95 of the requests over that of forwarding, "+a, "",
						r.RequestsP95("requests")/forwarded.RequestsP95("requests"), 1.0/8, ""),
					beside("the same, in ms", "", figures.Number(r.RequestsP95("requests"))),
					atLeast("throughput of the download over that of forwarding, "+a, "", mbit(r)/mbit(forwarded),
						0.9, ""),
					beside("median queueing in the last hop, "+a, "", figure(millis(r.Record.Queueing.P50), "ms")))
			}
			return all
		},
	}
}

// RequestsP95 is the 95th percentile of what an actor's requests took, in ms,
// after the warm-up; those count that had not ended with the run.
func (r Run) RequestsP95(actor string) float64 {
	var took []time.Duration
	for _, q := range r.actor(actor).Requests {
		switch {
		case q.At < r.Stage.Warmup:
		case q.Took == 0:
			took = append(took, r.Stage.Duration-q.At)
		default:
			took = append(took, q.Took)
		}
	}
	if len(took) == 0 {
		return 0
	}
	slices.Sort(took)
	return millis(took[len(took)*95/100])
}
