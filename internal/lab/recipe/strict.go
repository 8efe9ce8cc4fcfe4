package recipe

import (
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// What would be passed over is refused: who writes it expects that it counts.

// appsOf are the applications that a flow's key says something of; of other keys all are.
var appsOf = map[string][]stage.Kind{
	"control": {stage.Upload, stage.QUIC},
	"chunk":   {stage.Video},
	"buffer":  {stage.Video},
	"size":    {stage.Bulk, stage.Requests, stage.Web},
	"sizes":   {stage.Bulk, stage.Requests, stage.Web},
	"every":   {stage.Requests, stage.Web},
	"rate":    {stage.Bulk, stage.Video, stage.UDP},
	"ecn":     {stage.Bulk, stage.Requests, stage.Web, stage.Video},
}

// unused tells which key of a flow says nothing of it.
func (f Flow) unused(key string, n ast.Node) error {
	s, ok := sectionOf(n)
	if !ok {
		return nil
	}
	for _, p := range s.Values {
		name := keyOf(p)
		wrong := func(format string, args ...any) error { return at(p.Key, key+"."+name, format, args...) }
		switch apps := appsOf[name]; {
		case p.Value.Type() == ast.NullType:
		case apps != nil && !slices.Contains(apps, f.Kind):
			return wrong("it is for app: %s, and this is %s: take it out", either(apps), f.Kind)
		case (name == "stagger" || name == "hosts") && f.Count == 0:
			return wrong("it is for several flows: give it count, such as count: 8")
		case name == "size" && f.Sizes != "":
			return wrong("beside it there is sizes: take one out, in a run with size: null")
		case name == "receive":
			return wrong("it is the edge's: write edge: {defaults: {algorithm: copa, up: {receive: none}}}")
		case !slices.Contains(termKeys, name):
		case f.Direct:
			return wrong("nothing decides about a flow that goes past the edge: take it or direct out")
		case f.Kind == stage.UDP || f.Kind == stage.Upload || f.Kind == stage.QUIC:
			return wrong("nothing decides about %s so: take it out", f.Kind)
		}
	}
	return nil
}

// either is a list in words.
func either(apps []stage.Kind) string {
	var words []string
	for _, a := range apps {
		words = append(words, string(a))
	}
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// unused tells which key of a link another one takes the place of.
func (l Link) unused(key string) error {
	type value struct {
		name  string
		there bool
	}
	for _, values := range [][]value{
		{{"rate", l.Rate > 0}, {"payload", l.Payload > 0}, {"carries", l.Carries != ""}, {"trace", l.Trace != ""}},
		{{"rtt", l.RTT > 0}, {"delay", l.Delay != nil}},
	} {
		values = slices.DeleteFunc(values, func(v value) bool { return !v.there })
		if len(values) > 1 {
			return mistake(key+"."+values[0].name, "beside it there is %s: take one out, in a run with %s: null",
				values[1].name, values[0].name)
		}
	}
	return nil
}

// unused tells which of link and cell says nothing.
func (s section) unused(f Experiment) error {
	link, cell := s.index("link"), s.index("cell")
	switch {
	case cell >= 0 && len(f.Cell.Hosts) == 0:
		return at(s.Values[cell].Key, "cell", "it has no hosts: write such as hosts: [{queue: 1MB}]")
	case cell >= 0 && link >= 0:
		return at(s.Values[link].Key, "link", "beside it there is cell: take one out, in a run with link: null")
	}
	return nil
}

// ofTheWhole are the keys that an experiment has once, outside its parts.
var ofTheWhole = []string{"about", "source", "short", "control", "missed", "must"}

// without returns an error if a part of an experiment has a key that belongs to the whole experiment, or one of more.
func (s section) without(part string, more ...string) error {
	for _, p := range s.Values {
		if key := keyOf(p); slices.Contains(ofTheWhole, key) || slices.Contains(more, key) {
			return at(p.Key, part+"."+key, "it is of the whole experiment: write it beside %s", part)
		}
	}
	return nil
}

// distinct tells which runs have one name: any two, where something is asserted of them, else those over
// one path, which tables would take for one.
func (r *Recipe) distinct(scale Scale, stages []stage.Stage, asserts bool) error {
	names, ways := map[string]bool{}, map[[2]string]bool{}
	for _, s := range stages {
		way := [2]string{s.Name, record.PathOf(s)}
		if asserts && names[s.Name] {
			return r.ofRuns(scale, "two runs are called %q; give each a name of its own", s.Name)
		}
		if ways[way] {
			return r.ofRuns(scale, "two runs are called %q and go the same way (%s), so that nobody could tell "+
				"them apart: give each a name of its own", s.Name, way[1])
		}
		names[s.Name], ways[way] = true, true
	}
	return nil
}

// ofRuns is a mistake in what makes several runs: runs, or else vary.
func (r *Recipe) ofRuns(scale Scale, format string, args ...any) error {
	if r.runs != nil {
		return fmt.Errorf(format, args...)
	}
	root, err := r.scaled(r.text, scale)
	if err != nil {
		return err
	}
	key := "runs"
	if root.index(key) < 0 {
		key = "vary"
	}
	return at(root.find(key), key, format, args...)
}
