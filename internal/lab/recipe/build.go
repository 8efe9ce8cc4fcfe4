package recipe

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/proxy/config"
)

// Link is one direction of the last hop.
type Link struct {
	Carries    string         `yaml:"carries"`
	Rate       cc.Rate        `yaml:"rate"`
	Payload    cc.Rate        `yaml:"payload"`
	Trace      string         `yaml:"trace"`
	TraceSeed  *int           `yaml:"trace_seed" min:"0"`
	DelayTrace string         `yaml:"delay_trace"`
	RTT        time.Duration  `yaml:"rtt"`
	Delay      *time.Duration `yaml:"delay"`
	Queue      Word[Queue]    `yaml:"queue"`
	Loss       Word[float64]  `yaml:"loss"`
	Reorder    Word[float64]  `yaml:"reorder"`
	ReorderBy  time.Duration  `yaml:"reorder_by"`
	Mark       Word[float64]  `yaml:"mark"`
	AQM        Word[sim.AQM]  `yaml:"aqm"`
	Steps      []step         `yaml:"steps"`
	Outages    []outage       `yaml:"outages"`
}

type step struct {
	At   time.Duration `yaml:"at"`
	Rate cc.Rate       `yaml:"rate"`
}

type outage struct {
	From time.Duration `yaml:"from"`
	To   time.Duration `yaml:"to"`
}

// Queue is the limit of a queue; both 0: none.
type Queue struct {
	Bytes   cc.Bytes
	Packets int
}

type cell struct {
	RTT    time.Duration `yaml:"rtt"`
	Blocks int           `yaml:"blocks" min:"1"`
	Hosts  []cellHost    `yaml:"hosts"`
}

type cellHost struct {
	Bits  int           `yaml:"bits" min:"1"`
	Queue Word[Queue]   `yaml:"queue"`
	Loss  Word[float64] `yaml:"loss"`
	Delay time.Duration `yaml:"delay"`
}

// builder makes a stage of a form.
type builder struct {
	text  []byte
	load  loader
	seed  uint64
	rules []string // of the edge, for flows with terms of their own
}

// decode reads a node; key is where it stands.
func (b *builder) decode(key string, n ast.Node, v any) error {
	if err := config.Decode(b.text, key, n, v); err != nil {
		return err
	}
	return nil
}

func (b *builder) stage(f Experiment) (s stage.Stage, err error) {
	s = stage.Stage{
		Name: f.Name, Hold: f.Hold, Tunnel: stage.Tunnel(f.Tunnel), Kernel: f.Kernel, Hints: f.Hints,
		Duration: f.Duration, Warmup: f.Warmup, Seed: uint64(f.Seed) + b.seed - 1,
		AckEvery: f.Acks.Every, Native: f.Native, Over: f.Over, Virtual: f.Virtual, Algorithm: string(f.Algorithm),
		Envelope: string(f.Envelope), Sample: cmp.Or(f.Sample, stage.Step),
	}
	switch name, _, err := cc.Parse(f.Kernel); {
	case f.Kernel != "" && err != nil:
		return s, mistake("kernel", "%v", err)
	case name == "none":
		return s, mistake("kernel", "a kernel always decides: name what it has, such as reno")
	}
	if d := f.Acks.Delayed; d != nil {
		s.AckDelay = cmp.Or(*d, sim.AckAtOnce)
	}
	if s.AckEvery > 0 && s.AckDelay > 0 {
		return s, mistake("acks", "they come in batches (every) or delayed: take one out")
	}
	if s.Duration <= 0 || s.Duration > maxLength {
		return s, mistake("duration", "it is missing or above %v: write such as duration: 30s", maxLength)
	}
	if len(f.Cell.Hosts) > 0 {
		s.Cell = f.Cell.config()
	} else if s.Down, err = b.link("link", f.Link, s.Duration); err != nil {
		return s, err
	} else if s.Down.Rate == 0 && s.Down.Trace == nil {
		return s, mistake("link", "it needs a rate or a trace, such as {rate: 12mbit, rtt: 40ms}: nothing else bounds "+
			"what is sent")
	}
	if s.Up, err = b.link("up", f.Up, s.Duration); err != nil {
		return s, err
	}
	if f.Up.Delay == nil && f.Up.RTT == 0 && f.Up.DelayTrace == "" {
		s.Up.Delay, s.Up.Delays = s.Down.Delay, s.Down.Delays
		if s.Cell != nil {
			s.Up.Delay = s.Cell.Delay
		}
	}
	for _, a := range f.Agents {
		if err := ccp.CheckName(a.Name); err != nil {
			return s, mistake("agents", "%v", err)
		}
		if a.Program != "" && a.Command != "" {
			return s, mistake("agents", "%s has a program and a command: take one out", a.Name)
		}
	}
	s.Agents = b.load.Agents.Over(f.Agents)
	if err := b.actors(f.Flows, &s); err != nil {
		return s, err
	}
	b.shiftStarts(&s)
	if s.Edge, err = b.edge(f); err != nil {
		return s, err
	}
	if err := b.changes(f, &s); err != nil {
		return s, err
	}
	return s, s.Check()
}

// startSpread is how far apart seeds other than the first shift the starts of applications.
const startSpread = 100 * time.Millisecond

// phase is what a seed draws its phases from. The first seed has none, so that one run is the experiment as written.
func (b *builder) phase() *rand.Rand { return rand.New(rand.NewPCG(b.seed, 0x7068617365)) } //nolint:gosec // no secret

// shiftStarts draws the starts of several applications from the seed, by up to startSpread later than they are
// written. Otherwise all runs of an experiment without random loss are one in virtual time.
func (b *builder) shiftStarts(s *stage.Stage) {
	if b.seed == 1 || len(s.Actors) < 2 {
		return
	}
	random, shifts := b.phase(), make([]time.Duration, len(s.Actors))
	for i := range shifts {
		shifts[i] = time.Duration(random.Int64N(int64(startSpread))).Truncate(time.Millisecond)
	}
	least := slices.Min(shifts) // the run begins with the first
	for i := range s.Actors {
		a := &s.Actors[i]
		a.Start = min(a.Start+shifts[i]-least, s.Duration-1)
		if a.Stop > 0 {
			a.Stop += shifts[i] - least
		}
	}
}

// shiftTrace has a trace that does not come from the seed begin where the seed draws.
func (b *builder) shiftTrace(t *sim.Trace) *sim.Trace {
	model, drawn := strings.CutPrefix(t.Name, generate)
	if b.seed == 1 || drawn && !strings.Contains(model, ":") {
		return t
	}
	return t.From(time.Duration(b.phase().Int64N(int64(t.Duration()))))
}

func (b *builder) link(key string, l Link, d time.Duration) (c sim.LinkConfig, err error) {
	c = sim.LinkConfig{
		Rate: l.Rate, Delay: l.RTT / 2, QueueBytes: l.Queue.Value.Bytes,
		QueuePackets: l.Queue.Value.Packets, Loss: l.Loss.Value, Reorder: l.Reorder.Value, ReorderBy: l.ReorderBy,
		Mark: l.Mark.Value, AQM: l.AQM.Value,
	}
	wrong := func(part string, err error) error {
		return mistake(key+part, "%s", strings.TrimPrefix(err.Error(), "sim: "))
	}
	if err := l.unused(key); err != nil {
		return c, err
	}
	if l.Delay != nil {
		c.Delay = *l.Delay
	}
	if l.Payload > 0 {
		c.Rate = cc.Rate(float64(l.Payload) * float64(cc.DefaultMSS+sim.HeaderBytes) / float64(cc.DefaultMSS))
	}
	if l.Carries != "" {
		if c.Rate, c.Trace, err = b.load.carries(l.Carries, b.seed); err != nil {
			return c, wrong(".carries", err)
		}
	}
	if l.Trace != "" {
		if c.Trace, err = b.trace(l); err != nil {
			return c, wrong(".trace", err)
		}
	}
	if c.Trace != nil {
		c.Trace = b.shiftTrace(c.Trace)
	}
	if l.DelayTrace != "" {
		if b.load.Delays == nil {
			return c, mistake(key+".delay_trace", "no file can be named here: delay_trace %s", l.DelayTrace)
		}
		if c.Delays, err = b.load.Delays(l.DelayTrace); err != nil {
			return c, wrong(".delay_trace", err)
		}
	}
	if len(l.Steps) > 0 {
		if c.Trace != nil || c.Rate == 0 {
			return c, mistake(key+".steps", "steps need a rate from which they begin, and no trace")
		}
		steps := []sim.Step{{Rate: c.Rate}}
		for _, s := range l.Steps {
			switch {
			case s.At >= d:
				return c, notInRun(key+".steps", s.At, d)
			case s.Rate == 0:
				return c, mistake(key+".steps", "the one at %s has no rate: write {at: %[1]s, rate: 6mbit}, or for none "+
					"outages: [{from: 10s, to: 20s}]", s.At)
			}
			steps = append(steps, sim.Step{At: s.At, Rate: s.Rate})
		}
		if c.Trace, err = sim.Steps("steps", d, steps...); err != nil {
			return c, wrong(".steps", err)
		}
	}
	for _, o := range l.Outages {
		if o.To <= o.From {
			return c, mistake(key+".outages", "an outage ends after it begins: write {from: 10s, to: 20s}")
		}
		if o.From >= d {
			return c, notInRun(key+".outages", o.From, d)
		}
		if c.Trace == nil {
			if c.Trace, err = sim.Steps("outage", d, sim.Step{Rate: c.Rate}); err != nil {
				return c, wrong(".outages", err)
			}
		}
		if c.Trace, err = c.Trace.Without(o.From, o.To, d); err != nil {
			return c, wrong(".outages", err)
		}
	}
	if err := c.Check(); err != nil {
		return c, wrong("", err)
	}
	return c, nil
}

func (c cell) config() *sim.CellConfig {
	out := &sim.CellConfig{Delay: c.RTT / 2, Blocks: c.Blocks}
	for _, h := range c.Hosts {
		out.Hosts = append(out.Hosts, sim.CellHost{
			BitsPerBlock: h.Bits, Delay: h.Delay, QueueBytes: h.Queue.Value.Bytes,
			QueuePackets: h.Queue.Value.Packets, Loss: h.Loss.Value,
		})
	}
	return out
}

// firstPort is that of the first flow that has terms of its own: rules tell flows apart by
// their ports.
const firstPort = 8001

// list reads the flows of a section.
func (b *builder) list(flows Flows) (all []Flow, err error) {
	if flows.Node == nil {
		return flows.List, nil
	}
	s, ok := sectionOf(flows.Node)
	if !ok {
		return nil, at(flows.Node, "flows", "expected names with what each does, such as {download: {}}")
	}
	for _, p := range s.Values {
		key := "flows." + keyOf(p)
		f := Flow{Actor: stage.Actor{Name: keyOf(p), Kind: stage.Bulk, Host: 1}, at: p}
		if err := b.decode(key, p.Value, &f); err != nil {
			return nil, err
		}
		if err := f.unused(key, p.Value); err != nil {
			return nil, err
		}
		if f.terms, err = b.terms(key, p.Value); err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

func (b *builder) actors(section Flows, s *stage.Stage) error {
	flows, err := b.list(section)
	if err != nil {
		return err
	}
	if len(flows) == 0 {
		return mistake("flows", "there is none: write such as flows: {download: {}}")
	}
	random, names := rand.New(rand.NewPCG(s.Seed, 7)), map[string]bool{}
	owners := map[int]int{} // who has terms, by port
	for i := range flows {
		f, key := &flows[i], "flows."+flows[i].Name
		if f.terms != "" {
			f.Port = cmp.Or(f.Port, firstPort+i)
			owners[f.Port] = i
			b.rules = append(b.rules, fmt.Sprintf("{name: port-%d, match: {ports: [%d]}, down: %s}", f.Port, f.Port,
				f.terms))
		}
		if f.Sizes != "" && f.Sizes != "caida" {
			return mistake(key+".sizes", "there are no sizes %q; write caida", f.Sizes)
		}
		if len(s.Actors)+f.Count > maxFlows {
			return mistake(key, "there are more than %d flows", maxFlows)
		}
		for k := range max(1, f.Count) {
			one := f.actor()
			if f.Count > 0 {
				one.Name = fmt.Sprint(f.Name, " ", k+1)
			}
			shift := time.Duration(k) * f.Stagger
			if f.Within > 0 {
				shift += time.Duration(random.Int64N(int64(f.Within)))
			}
			one.Start += shift
			if one.Stop > 0 {
				one.Stop += shift
			}
			if f.Sizes != "" {
				one.Size = caida(random)
			}
			if f.Hosts > 0 {
				one.Host += k % f.Hosts
			}
			if names[one.Name] {
				return at(f.at.Key, key, "two flows are called %q; give each a name of its own", one.Name)
			}
			names[one.Name] = true
			s.Actors = append(s.Actors, one)
		}
	}
	for i, f := range flows {
		port := cmp.Or(f.Port, 80)
		if owner, ok := owners[port]; ok && owner != i {
			return at(f.at.Key, "flows."+f.Name+".port", "it is %d, by which the edge knows flow %q and its terms: "+
				"write another port", port, flows[owner].Name)
		}
	}
	return nil
}

// caida draws the size of a flow as those of CCP's figure 3-3 are (MIT 2019): of 100,000 flows
// 97,606 of at most 10 KB with 487 MB together, 95 above 1 MB with 907, and 306 MB in the others.
// The shapes within the three are ours: even, and twice even in the logarithm.
func caida(random *rand.Rand) cc.Bytes {
	between := func(low, high float64) cc.Bytes { return cc.Bytes(low * math.Pow(high/low, random.Float64())) }
	switch part := random.Float64(); {
	case part < 0.97606:
		return 1 + cc.Bytes(random.Int64N(9980))
	case part < 0.99905:
		return between(10e3, 540e3)
	}
	return between(1e6, 34e6)
}

// actor is the flow's first application.
func (f Flow) actor() stage.Actor {
	a := f.Actor
	a.Host--
	a.ECN = f.ECN.Value
	if a.Kind == stage.Video {
		a.Every = f.Chunk
	}
	return a
}

// termKeys are those that the proxy's configuration has for a connection.
var termKeys = []string{
	"algorithm", "params", "max_rate", "connection_rate", "weight", "priority", "class", "target", "min_rate",
	"hint_cap", "group",
}

// terms are a flow's own, as text that the proxy reads; empty: it has none.
func (b *builder) terms(key string, n ast.Node) (string, error) {
	s, _ := sectionOf(n)
	own := ast.Mapping(n.GetToken(), true)
	if s.MappingNode != nil {
		for _, p := range s.Values {
			if slices.Contains(termKeys, keyOf(p)) {
				own.Values = append(own.Values, p)
			}
		}
	}
	if len(own.Values) == 0 {
		return "", nil
	}
	var v yaml.MapSlice
	if err := yaml.NodeToValue(own, &v, yaml.UseOrderedMap()); err != nil {
		return "", at(n, key, "%v", err)
	}
	text, err := yaml.MarshalWithOptions(v, yaml.Flow(true))
	return strings.TrimSpace(string(text)), err
}

// edge is the text of the proxy's configuration; empty: there is no proxy.
func (b *builder) edge(f Experiment) (string, error) {
	if f.Edge.Node != nil {
		if f.Algorithm != "" || f.Group != "" || f.Envelope != "" || len(b.rules) > 0 {
			return "", at(f.Edge, "edge", "it takes the place of algorithm, group and envelope, and of what flows have of "+
				"these; write all of it there, or none")
		}
		return f.Edge.text()
	}
	if f.Algorithm == "" && len(b.rules) == 0 {
		return "", nil
	}
	var out strings.Builder
	fmt.Fprintf(&out, "envelope: %s\ndefaults: {algorithm: %q, group: %s}\n", cmp.Or(string(f.Envelope), "auto"),
		cmp.Or(string(f.Algorithm), cc.Default), cmp.Or(f.Group, "peer"))
	if len(b.rules) > 0 {
		out.WriteString("rules:\n  - " + strings.Join(b.rules, "\n  - ") + "\n")
	}
	return out.String(), nil
}

func notInRun(key string, at, end time.Duration) error {
	return mistake(key, "%s is not in the run, which ends at %s", at, end)
}

func (b *builder) changes(f Experiment, s *stage.Stage) error {
	for i, c := range f.Changes {
		key := fmt.Sprintf("changes[%d]", i)
		one := stage.Change{At: c.At, Delay: c.RTT / 2, Refused: c.Refused}
		if c.Algorithm != "" || c.Edge.Node != nil {
			other := f
			other.Edge = c.Edge
			if c.Algorithm != "" {
				other.Algorithm = c.Algorithm
			} else {
				other.Algorithm, other.Group, other.Envelope = "", "", ""
			}
			var err error
			if one.Edge, err = b.edge(other); err != nil {
				return err
			}
		}
		if one.Edge == "" && one.Delay == 0 {
			return mistake(key, "it changes nothing: give it rtt, algorithm or edge")
		}
		if one.Edge == "" && c.Refused {
			return mistake(key+".refused", "nobody refuses an rtt: it is for algorithm or edge")
		}
		if c.At >= s.Duration {
			return notInRun(key+".at", c.At, s.Duration)
		}
		for ; one.At < s.Duration; one.At += c.Every {
			if len(s.Changes) == maxChanges {
				return mistake(key, "these are more than %d changes", maxChanges)
			}
			s.Changes = append(s.Changes, one)
			if c.Every <= 0 {
				break
			}
		}
	}
	slices.SortStableFunc(s.Changes, func(a, b stage.Change) int { return cmp.Compare(a.At, b.At) })
	return nil
}
