package recipe

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/proxy/config"
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
	app := stage.Kind(f.App)
	for _, p := range s.Values {
		name := keyOf(p)
		wrong := func(format string, args ...any) error { return at(p.Key, key+"."+name, format, args...) }
		switch apps := appsOf[name]; {
		case p.Value.Type() == ast.NullType:
		case apps != nil && !slices.Contains(apps, app):
			return wrong("it is for app: %s, and this is %s: take it out", either(apps), app)
		case (name == "stagger" || name == "hosts") && f.Count == 0:
			return wrong("it is for several flows: give it count, such as count: 8")
		case name == "size" && f.Sizes != "":
			return wrong("beside it there is sizes: take one out, in a run with size: null")
		case name == "receive":
			return wrong("it is the edge's: write edge: {defaults: {algorithm: copa, up: {receive: none}}}")
		case !slices.Contains(termKeys, name):
		case f.Direct:
			return wrong("nothing decides about a flow that goes past the edge: take it or direct out")
		case app == stage.UDP || app == stage.Upload || app == stage.QUIC:
			return wrong("nothing decides about %s so: take it out", app)
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
	var carry []string
	for _, k := range []struct {
		name  string
		there bool
	}{{"rate", l.Rate > 0}, {"payload", l.Payload > 0}, {"carries", l.Carries != ""}, {"trace", l.Trace != ""}} {
		if k.there {
			carry = append(carry, k.name)
		}
	}
	pair := carry
	if len(carry) < 2 && l.RTT > 0 && l.Delay != nil {
		pair = []string{"rtt", "delay"}
	}
	if len(pair) < 2 {
		return nil
	}
	return &config.Error{
		Key:     key + "." + pair[0],
		Message: fmt.Sprintf("beside it there is %s: take one out, in a run with %s: null", pair[1], pair[0]),
	}
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

// idlers are keys that may say nothing of one run and something of another that has them too, with the cure.
var idlers = map[string]string{
	"group":           forProxy,
	"envelope":        forProxy,
	"hints":           forProxy,
	"link.trace_seed": forModel,
	"up.trace_seed":   forModel,
	"link.reorder_by": forReorder,
	"up.reorder_by":   forReorder,
	"up.queue":        forQueue,
}

const (
	forProxy   = "there is no proxy that it is for: give it algorithm, or take it out"
	forModel   = "it is for a built-in model, such as trace: lte: take it out; carries has both in one, generate:lte:7"
	forReorder = "nothing is reordered: give it reorder, such as reorder: 0.01, or take it out"
	forQueue   = "nothing queues where nothing bounds the rate: give it rate or trace, or take it out"
)

// idle reports whether one of them says nothing of a run.
func (f Experiment) idle(key string, s stage.Stage) bool {
	part, key, _ := strings.Cut(key, ".")
	l := f.Link
	if part == "up" {
		l = f.Up
	}
	switch key {
	case "trace_seed":
		_, err := sim.Model(l.Trace)
		return err != nil
	case "reorder_by":
		return l.Reorder.Value == 0
	case "queue":
		return s.Up.Rate == 0 && s.Up.Trace == nil
	}
	return s.Edge == ""
}

// place is a key in a line of the file.
type place struct {
	line int
	key  string
}

// noteIdle notes which of idlers say nothing of a run, for the places where no run yet has them say something.
func (r *Recipe) noteIdle(root section, f Experiment, s stage.Stage) {
	for key, cure := range idlers {
		n := root.key(key)
		if n == nil {
			continue
		}
		mistake := at(n, key, "%s", cure)
		if here := (place{mistake.Line, key}); !f.idle(key, s) {
			r.idle[here] = nil
		} else if _, known := r.idle[here]; !known {
			r.idle[here] = mistake
		}
	}
}

// unused is the first key that says nothing of any run in either form.
func (r *Recipe) unused() error {
	var first *config.Error
	for _, e := range r.idle {
		if e == nil {
			continue
		}
		if first == nil || cmp.Or(cmp.Compare(e.Line, first.Line), cmp.Compare(e.Column, first.Column)) < 0 {
			first = e
		}
	}
	if first == nil {
		return nil
	}
	return first
}

// without refuses keys of the whole experiment in one of its parts.
func (s section) without(part string, keys ...string) error {
	for _, p := range s.Values {
		if key := keyOf(p); slices.Contains(keys, key) {
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
