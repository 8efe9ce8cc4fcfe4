package recipe

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Format shows every key that the file of an experiment may have.
const Format = `about: one line on what is played, and what for
source: who published it, and where
link: {rate: 12mbit, rtt: 40ms, queue: 100pkt, loss: 0.01}  # delay: one way; queue: 2MB, 100pkt or none
# link: carries: 12mbit, generate:lte, generate:lte:7, recorded:campus-walk or a FILE, in one word
# link: trace: lte (a built-in model), recorded:campus-walk or a FILE, trace_seed, delay_trace: FILE,
# aqm: codel|fq_codel|pie|dualpi2, mark, reorder, reorder_by, payload: 10mbit (the rate that carries so much of it),
# steps: [{at: 10s, rate: 6mbit}], outages: [{from: 10s, to: 20s}]
up: {rate: 2mbit, queue: 64KiB}      # the way back; without it: no limit, and the link's delay
# cell: {rtt: 40ms, blocks: 100, hosts: [{bits: 500, queue: 1MB, loss: 0.01, delay: 5ms}]}   in place of link
algorithm: penstock                  # of the proxy at the edge; without it, and edge, there is no proxy
group: peer                          # which flows share a window, as in the proxy's configuration
envelope: ebpf                       # or bbr, cubic, reno: the kernel's below
agents: [{name: reno, program: reno, algorithm: 10ms}]  # that decide for ccp:reno: penstock-agent-PROGRAM is started
# agents: [{name: mine, command: "./mine $SOCKET"}]   or what a shell starts: where /tmp/ccp is its own
# edge: {defaults: {...}, rules: [...]}   the proxy's configuration, in place of these three
# native: true                       what they decide without an edge, in a process at each end, over UDP
# over: own-acks                     with native: over the library with acknowledgements of its own, or tcp: the kernel's
# virtual: true                      this run in virtual time, also beside others over real sockets
# kernel: bbr                        of servers towards hosts that no proxy serves; without it: cubic
# tunnel: wireguard                  around all that passes the link
# hold: true                         the edge holds UDP until its host's window has room
hints: 10ms                          # how often the link tells the proxy of itself; without it: never
acks: {delayed: 40ms}                # or every: 10ms; in virtual time alone
flows:
  download: {}                       # app: bulk, one connection that downloads without end; size: 1MB, rate: 2mbit
  second: {start: 5s, stop: 20s, on: 2s, off: 1s, random: true, host: 2, weight: 2, class: guarantee, target: 2mbit}
  web: {app: web, size: 100KB, every: 2s, algorithm: "copa:delta=0.1"}   # requests: on one connection
  video: {app: video, rate: 4mbit, chunk: 4s, buffer: 30s}
  noise: {app: udp, rate: 3mbit}
  # download: {send_buffer: 1MB}       of the server's socket, where no proxy serves the flow
  # download: {port: 8001}             of the server, for the rules of edge; without it: 80
  # quic: {app: quic, control: bbr}    downloads without end; reno, the default, is quic-go, others are ours over UDP
  # upload: {app: upload, control: cubic}; many: {count: 8, stagger: 1s, within: 2s}; other: {direct: true};
  # {app: web, every: 1h, count: 500, within: 20s, sizes: caida}: a Poisson process, sizes as in CCP's figure 3-3;
  # {ecn: l4s} and every key that terms have in the proxy's configuration, down
changes:
  - {at: 15s, rtt: 80ms}             # or algorithm, or edge; every: 2s repeats it, refused: true expects no effect
duration: 30s
warmup: 5s
seed: 1
sample: 1s                           # how much of its course a golden file keeps
runs:                                # what differs, by run; null takes a key away; without it there is one
  - {name: small}
  - vary: {algorithm: [copa, cubic]} # a run for each; of several names each combination, or a list of {name: value}
    name: large, $(algorithm)
    algorithm: $(algorithm)
    link: {queue: 1000pkt}
short: {duration: 20s}               # what differs in the short form
control: {run: large, algorithm: reno} # what differs in the short form's runs of such names for a bound to fail
missed: {"rate of s*": why}          # bounds that are known to be missed, by name or its beginning, with the reason
must:                                # see docs/recipes.md for what can be asked
  - {run: small, what: use of the link, paper: 95 %, is: utilisation, at_least: 0.5}
  - {for: {flow: [download, second]}, run: small, what: "rate of $(flow)", is: rate("$(flow)"), unit: Mbit/s}
  - run("small").queueing.p95 <= run("large, cubic").queueing.p95
`

// The bounds of an experiment.
const (
	maxText    = 1 << 18
	maxRuns    = 1000
	maxLength  = time.Hour
	maxChanges = 10_000
	maxFlows   = 5000
)

// loader finds what a file names; nil: nothing of that kind. Agents are those that are there already.
type loader struct {
	Trace  func(name string) (*sim.Trace, error)
	Delays func(name string) (*sim.DelayTrace, error)
	Agents agents.Agents
}

// readText reads the text of an experiment in a file; a mistake tells line, column and cure.
func readText(name, file string, text []byte, load loader) (Recipe, error) {
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // which some editors begin with
	r := Recipe{Name: name, file: file, text: text, load: load}
	err := r.read()
	var mistake *config.Error
	if errors.As(err, &mistake) && mistake.File == "" {
		mistake.File = file
	} else if err != nil {
		err = fmt.Errorf("%s: %w", file, err)
	}
	return r, err
}

func (r *Recipe) read() error {
	if len(r.text) > maxText {
		return fmt.Errorf("more than %d bytes are no experiment", maxText)
	}
	root, err := parse(r.text)
	if err != nil {
		return err
	}
	for key, to := range map[string]*string{"about": &r.About, "source": &r.Source} {
		n := root.value(key)
		if n == nil || n.Type() == ast.NullType {
			continue
		}
		text, ok := scalar(n)
		if !ok {
			return at(n, key, "expected one line; one with a colon or a comma in the wrong place stands in quotes")
		}
		*to = text
	}
	r.all, r.flows = map[string]bool{}, map[string]bool{}
	control, missed, musts := root.find("control"), root.value("missed"), root.value("must")
	if r.missed, err = readMissed(missed); err != nil {
		return err
	}
	var before []stage.Stage // of the scale before
	scales := []Scale{Control, Short, Full}
	if control == nil {
		scales = scales[1:]
	}
	for _, scale := range scales {
		stages, err := r.Stages(scale, 1)
		if err != nil {
			return err
		}
		if scale == Short && reflect.DeepEqual(stages, before) {
			return at(control, "control", "it changes no run of the short form, so that no bound can fail: its "+
				"run is how the name of one begins, and the rest is another algorithm, such as {run: copa, algorithm: cubic}")
		}
		before = stages
		if err := r.distinct(scale, stages, musts != nil); err != nil {
			return err
		}
		for _, s := range stages {
			if scale == Full {
				r.all[s.Name] = true
			}
			for _, a := range s.Actors {
				r.flows[a.Name] = true
			}
		}
	}
	if r.musts, err = r.readMusts(musts); err != nil {
		return err
	}
	for _, m := range r.missed {
		if !slices.ContainsFunc(r.musts, func(bound must) bool { return m.matches(bound.name()) }) {
			return at(missed, "missed", "no bound is called %q; a final * stands for the rest of a name", m.what)
		}
	}
	return nil
}

// variant is one run of an experiment: the values of variables, and what differs.
type variant struct {
	variables
	run int // of runs; -1: there are none
}

// variants are the runs in their order, and the number of musts.
func (r *Recipe) variants(scale Scale) (all []variant, err error) {
	root, err := r.scaled(r.text, scale)
	if err != nil {
		return nil, err
	}
	varied, err := rows(root.take("vary"), "vary")
	if err != nil {
		return nil, err
	}
	runs, err := runsOf(root)
	if err != nil {
		return nil, err
	}
	for _, row := range varied {
		if runs == nil {
			all = append(all, variant{row, -1})
		}
		for i, run := range runs {
			own, err := rows(run.value("vary"), "vary")
			if err != nil {
				return nil, err
			}
			for _, more := range own {
				all = append(all, variant{row.with(more), i})
			}
		}
		if len(all) > maxRuns {
			return nil, r.ofRuns(scale, "these are more than the %d runs that an experiment may have", maxRuns)
		}
	}
	return all, nil
}

func runsOf(root section) (all []section, err error) {
	value := root.value("runs")
	if value == nil {
		return nil, nil
	}
	list, ok := value.(*ast.SequenceNode)
	if !ok || len(list.Values) == 0 {
		return nil, at(value, "runs", "expected a list of runs, each with its name and what differs")
	}
	for _, n := range list.Values {
		s, ok := sectionOf(n)
		if !ok {
			return nil, at(n, "runs", "expected a name and what differs, such as {name: cubic, algorithm: cubic}")
		}
		if err := s.without("runs", "runs"); err != nil {
			return nil, err
		}
		all = append(all, section{ast.Mapping(s.GetToken(), false, slices.Clone(s.Values)...)})
	}
	return all, nil
}

// scaled parses the text, with what differs in the short form.
func (r *Recipe) scaled(text []byte, scale Scale) (section, error) {
	root, err := parse(text)
	if err != nil {
		return root, err
	}
	if n := root.take("short"); n != nil && scale != Full {
		short, ok := sectionOf(n)
		if !ok {
			return root, at(n, "short", "expected what differs in the short form, such as {duration: 10s}")
		}
		if err := short.without("short"); err != nil {
			return root, err
		}
		root.merge(short)
	}
	return root, nil
}

// Stages are the runs of the experiment. The seed is that of generated traces and random
// starts that have none of their own; each run's, less one, is added to it for the rest.
func (r *Recipe) Stages(scale Scale, seed uint64) (all []stage.Stage, err error) {
	for _, e := range r.runs {
		b := builder{load: r.load, seed: seed}
		s, err := b.stage(e)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	if r.runs != nil {
		return all, nil
	}
	variants, err := r.variants(scale)
	if err != nil {
		return nil, err
	}
	for _, v := range variants {
		s, err := r.stage(scale, v, seed)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

func (r *Recipe) stage(scale Scale, v variant, seed uint64) (s stage.Stage, err error) {
	text := []byte(v.in(string(r.text)))
	root, err := r.scaled(text, scale)
	if err != nil {
		return s, err
	}
	var own section
	if v.run >= 0 {
		runs, err := runsOf(root)
		if err != nil {
			return s, err
		}
		own = runs[v.run]
		own.take("vary")
		root.merge(own)
	}
	if n := root.take("control"); scale == Control {
		if n == nil {
			return s, mistake("", "there is no control: write such as control: {algorithm: cubic}")
		}
		if err := root.mergeControl(n); err != nil {
			return s, err
		}
	}
	for _, key := range append([]string{"vary", "runs"}, ofTheWhole...) {
		root.take(key)
	}
	if err := root.unset(v.variables); err != nil {
		return s, err
	}
	b := builder{text: text, load: r.load, seed: seed}
	f := Experiment{Seed: 1}
	if err := b.decode("", root.MappingNode, &f); err != nil {
		return s, err
	}
	if err := root.unused(f); err != nil {
		return s, err
	}
	s, err = b.stage(f)
	defer func() { err = placedIn(err, v.run, text) }()
	if s.Name == "" && v.run >= 0 {
		return s, at(own.MappingNode, "runs", "a run needs a name: write name: NAME")
	}
	if s.Name == "" {
		s.Name = r.Name
	}
	return s, err
}

// mergeControl lays control over a run, if its key run is missing or the run's name begins so.
func (s section) mergeControl(n ast.Node) error {
	control, ok := sectionOf(n)
	if !ok {
		return at(n, "control", "expected what differs for a bound to fail, such as {algorithm: cubic}")
	}
	if err := control.without("control", "name", "vary", "runs"); err != nil {
		return err
	}
	of := control.take("run")
	run, ok := scalar(of)
	if of != nil && !ok {
		return at(of, "control.run", "expected how the names of its runs begin")
	}
	if name, _ := scalar(s.value("name")); strings.HasPrefix(name, run) {
		s.merge(control)
	}
	return nil
}

// readMissed reads the bounds that are known to be missed.
func readMissed(n ast.Node) (all []missedBound, err error) {
	if n == nil {
		return nil, nil
	}
	s, ok := sectionOf(n)
	if !ok {
		return nil, at(n, "missed", "expected findings with a reason each, such as {utilisation: loss is taken for "+
			"congestion}")
	}
	for _, p := range s.Values {
		why, ok := scalar(p.Value)
		if !ok || why == "" {
			return nil, at(p.Key, "missed", "expected the reason in one line")
		}
		all = append(all, missedBound{keyOf(p), why})
	}
	return all, nil
}

// Experiment describes one run. Files and flags both decode into it, and both players take what it builds.
type Experiment struct {
	Name      string           `yaml:"name"`
	Link      Link             `yaml:"link"`
	Up        Link             `yaml:"up"`
	Cell      cell             `yaml:"cell"`
	Algorithm policy.Algorithm `yaml:"algorithm"`
	Group     string           `yaml:"group"`
	Envelope  config.Envelope  `yaml:"envelope"`
	Native    bool             `yaml:"native"`
	Over      string           `yaml:"over"`
	Virtual   bool             `yaml:"virtual"`
	Edge      raw              `yaml:"edge"`
	Kernel    string           `yaml:"kernel"`
	Hold      bool             `yaml:"hold"`
	Tunnel    string           `yaml:"tunnel"`
	Agents    agents.Agents    `yaml:"agents"`
	Hints     time.Duration    `yaml:"hints"`
	Acks      Acks             `yaml:"acks"`
	Changes   []change         `yaml:"changes"`
	Duration  time.Duration    `yaml:"duration"`
	Warmup    time.Duration    `yaml:"warmup"`
	Seed      int              `yaml:"seed" min:"0"`
	Sample    time.Duration    `yaml:"sample"`

	// These are taken out before, and stand here so that the error about an unknown key names them.
	About   raw `yaml:"about"`
	Source  raw `yaml:"source"`
	Vary    raw `yaml:"vary"`
	Runs    raw `yaml:"runs"`
	Short   raw `yaml:"short"`
	Control raw `yaml:"control"`
	Missed  raw `yaml:"missed"`
	Must    raw `yaml:"must"`

	Flows Flows `yaml:"flows"`
}

// Flows are the flows of a run by name: a section of the file, or a list that flags made.
type Flows struct {
	raw
	List []Flow
}

// Acks says when hosts acknowledge, in virtual time alone.
type Acks struct {
	Every   time.Duration  `yaml:"every"`
	Delayed *time.Duration `yaml:"delayed"`
}

type change struct {
	At        time.Duration    `yaml:"at"`
	Every     time.Duration    `yaml:"every"`
	RTT       time.Duration    `yaml:"rtt"`
	Algorithm policy.Algorithm `yaml:"algorithm"`
	Edge      raw              `yaml:"edge"`
	Refused   bool             `yaml:"refused"`
}

// Flow is one application, or several that are alike.
type Flow struct {
	stage.Actor `yaml:",inline"`

	Hosts   int           `yaml:"hosts" min:"1" max:"100"` // over which Count is spread
	Within  time.Duration `yaml:"within"`
	Count   int           `yaml:"count" min:"1" max:"5000"`
	Stagger time.Duration `yaml:"stagger"`
	Sizes   string        `yaml:"sizes"`
	Chunk   time.Duration `yaml:"chunk"`
	ECN     Word[sim.ECN] `yaml:"ecn"`

	policy.DirectionSettings `yaml:",inline"`

	at    *ast.MappingValueNode // where the file has it
	terms string                // of its own, as the proxy's configuration has them; empty: none
}

// raw is a part of the file that other code reads.
type raw struct{ ast.Node }

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (r *raw) UnmarshalYAML(n ast.Node) error {
	r.Node = n
	return nil
}

// text is what the proxy reads: a section, or what is not one, on purpose, in quotes.
func (r raw) text() (string, error) {
	if s, ok := scalar(r.Node); ok {
		return s + "\n", nil
	}
	if s, ok := sectionOf(r.Node); ok {
		for _, p := range s.Values {
			switch key := keyOf(p); key {
			case "listeners", "telemetry", "log", "shutdown":
				return "", at(p.Key, "edge."+key, "the laboratory has its own: take it out")
			case "agents":
				return "", at(p.Key, "edge."+key, "write agents beside edge")
			}
		}
	}
	var v yaml.MapSlice
	if err := yaml.NodeToValue(r.Node, &v, yaml.UseOrderedMap()); err != nil {
		return "", at(r.Node, "edge", "expected a configuration of the proxy, such as {defaults: {algorithm: copa}}")
	}
	out, err := yaml.Marshal(v)
	return string(out), err
}

// Word is a value that a parser of its own reads.
type Word[T any] struct{ Value T }

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (w *Word[T]) UnmarshalYAML(n ast.Node) (err error) {
	text, ok := scalar(n)
	if !ok {
		return &yaml.SyntaxError{Message: "expected one value", Token: n.GetToken()}
	}
	switch v := any(&w.Value).(type) {
	case *sim.ECN:
		*v, err = sim.ParseECN(text)
	case *sim.AQM:
		*v, err = sim.ParseAQM(text)
	case *Queue:
		if text != record.None {
			v.Bytes, v.Packets, err = sim.ParseQueue(text)
			if err == nil && v.Bytes == 0 && v.Packets == 0 {
				err = fmt.Errorf("%q has no room for a packet; write none for a queue without a limit", text)
			}
		}
	case *float64:
		if *v, err = strconv.ParseFloat(text, 64); err != nil || !(*v >= 0 && *v <= 1) {
			err = fmt.Errorf("%q is not a part from 0 to 1, such as 0.01", text)
		}
	}
	if err != nil {
		return &yaml.SyntaxError{Message: err.Error(), Token: n.GetToken()}
	}
	return nil
}
