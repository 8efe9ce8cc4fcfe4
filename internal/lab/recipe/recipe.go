// Package recipe replays published experiments: the paper's setup as stages, our
// assertions, and the figures that the paper printed beside ours.
//
// A recipe is one value: what is played, and what is asserted of it. To add one,
// write a function that returns it into the file of its family and name it in All.
package recipe

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// Recipe is one published experiment.
type Recipe struct {
	Name   string // on the command line: "janus-c2"
	About  string // one line: what is played, and what for
	Source string // paper and section

	// Stages are what is played, the baselines included. Their names are unique.
	Stages func(Scale) []stage.Stage
	// Judge compares what came of them with what is asserted.
	Judge func(Outcome) []Finding
}

// Scale is how much of an experiment is played.
type Scale string

// The scales.
const (
	Full  Scale = "full"  // what the paper did, as far as it says
	Short Scale = "short" // less of it, for tests
)

// pick returns what belongs to the scale.
func pick[T any](s Scale, full, short T) T {
	if s == Short {
		return short
	}
	return full
}

// Outcome is all that came of a recipe's stages.
type Outcome struct {
	Scale Scale
	Runs  []Run // in the order of the stages
}

// Run is a stage and what came of it.
type Run struct {
	Stage  stage.Stage
	Record stage.Record
}

// Finding is one assertion and how it came out.
type Finding struct {
	What  string `json:"what"`            // "satisfaction of the flow that asks for 6 Mbit/s"
	Paper string `json:"paper,omitempty"` // what the paper reports of it, as printed there; empty: nothing
	Bound string `json:"bound"`           // what we assert
	Got   string `json:"got"`             // what we measured
	OK    bool   `json:"ok"`
}

// All returns every recipe, by family.
func All() []Recipe {
	return slices.Concat(ccpShapes(), manager(), gateway(), uploads(), janus(), nacc(), pbe())
}

// Select returns the named recipes in the order in which they are named; "all" is
// every one.
func Select(names []string) ([]Recipe, error) {
	all := All()
	if slices.Contains(names, "all") {
		if len(names) > 1 {
			return nil, fmt.Errorf("recipe: all goes without other names")
		}
		return all, nil
	}
	var out []Recipe
	for _, name := range names {
		i := slices.IndexFunc(all, func(r Recipe) bool { return r.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("recipe: there is no %q; penstock-lab bench recipe list has them all", name)
		}
		out = append(out, all[i])
	}
	return out, nil
}

// hop is a last hop that carries the same in both directions, with a queue
// towards the hosts alone: what the papers shape.
func hop(mbit float64, rtt time.Duration, packets int) (down, up sim.LinkConfig) {
	return sim.LinkConfig{Rate: rate(mbit), Delay: rtt / 2, QueuePackets: packets}, sim.LinkConfig{Delay: rtt / 2}
}

// edge is a proxy's configuration: one algorithm for all, the flows of a group
// under one window, and rules before that.
func edge(algorithm, group string, rules ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "defaults: {algorithm: %q, group: %s}\n", algorithm, group)
	if len(rules) > 0 {
		b.WriteString("rules:\n")
	}
	for _, r := range rules {
		b.WriteString("  - " + r + "\n")
	}
	return b.String()
}

// rule gives terms, as YAML, to the connections to a port.
func rule(port int, terms string) string {
	return fmt.Sprintf("{name: port-%d, match: {ports: [%d]}, %s}", port, port, terms)
}

// The groups.
const (
	perHost = "peer" // one window for all flows of a host
	perFlow = "flow" // each flow its own
)
