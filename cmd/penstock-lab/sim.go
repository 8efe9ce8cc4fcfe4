package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// simFlags are the flags of sim as written.
type simFlags struct {
	algorithms, sweeps        []string
	rates, traces, models     []string
	upRate, upTrace           string
	delayTrace                string
	buffer                    string
	delay, ackEvery, hints    time.Duration
	transport, aqm, ecn       string
	duration, warmup, sampled time.Duration
	loss, upLoss              float64
	seed                      uint64
	flows                     int
	all, markdown             bool
	json                      bool
	traceOut                  string
	agents                    []string
	deciders                  agents.Agents // those that agents name
}

func simCommand() *cobra.Command {
	var f simFlags
	cmd := &cobra.Command{
		Use:   "sim [FILE...]",
		Short: "Run algorithms over links in virtual time",
		Long: `Sim runs each algorithm over each link in virtual time, a minute in a fraction
of a second, and prints what came of it: throughput, the share of the link that
was used, and how long packets waited in the queue, each packet counted. Between
the algorithm and the link stands a transport that works packet by packet, with
selective acknowledgements: the kernel's, which enforces the window as Penstock's
own congestion control does in Linux, or with --transport relay one without a
window, as under a tunnel. One seed gives one result.

A link is a rate, a trace in Mahimahi's format (each line the millisecond at
which 1500 bytes may leave; the file repeats), or a trace drawn from a built-in
model:

` + modelList() + `
Queueing is from a packet's arrival at the queue until its last byte has left
it. Utilisation counts all that the link carried, headers and retransmissions
too, against all it offered; Mbit/s is payload that arrived.

A FILE describes an experiment in YAML, as bench recipe plays it over real sockets,
too; it takes the place of the flags, and what must hold and does not is a failure.

` + fileFormat() + `
With --all every algorithm, or each that --algorithm names, is put through the
standard cases:

` + standardList() + `
ccp:NAME is what an agent decides, a process that --agent names; time stands while it
thinks, so that one that goes by its reports alone gives one result as well.

Where two flows share the link, Jain's index says how fairly they do (1: equally,
0.5: one has everything), and the share is that of the algorithm in question.`,
		Example: `  penstock-lab sim --algorithm copa --algorithm cubic --rate 12mbit --delay 20ms --buffer 100pkt
  penstock-lab sim --algorithm copa --sweep delta=0.5,0.1,0.02 --generate lte --generate highway
  penstock-lab sim --algorithm copa:alcc --trace Verizon-LTE-short.down --up-trace Verizon-LTE-short.up --json
  penstock-lab sim --algorithm copa --rate 12mbit --flows 4 --ack-every 10ms --trace-out windows.jsonl
  penstock-lab sim --algorithm ccp:mine --agent mine=/tmp/mine.sock --generate lte
  penstock-lab sim test/scenarios/testdata/outage.yaml
  penstock-lab sim --all
  penstock-lab sim --all --transport relay --markdown`,
		RunE: func(cmd *cobra.Command, files []string) (err error) {
			if f.deciders, err = agents.Parse(f.agents); err != nil {
				return cli.BadInput(err)
			}
			if f.all || f.markdown {
				return f.runAll(cmd, files)
			}
			trials, err := f.trials(cmd.Flags(), files)
			if err != nil {
				return cli.BadInput(err)
			}
			return f.run(cmd.OutOrStdout(), trials)
		},
	}
	f.register(cmd.Flags())
	return cmd
}

func (f *simFlags) register(flags *pflag.FlagSet) {
	flags.StringArrayVarP(&f.algorithms, "algorithm", "a", []string{cc.Default},
		"`ALGORITHM` to run, with settings as in copa:delta=0.1; repeat for several")
	flags.StringArrayVar(&f.sweeps, "sweep", nil, "run each algorithm once for each value of a parameter: "+
		"`NAME=VALUE,VALUE...`")
	flags.StringArrayVar(&f.rates, "rate", nil, "link of a fixed `RATE` (default 12mbit when there is no other); "+
		"repeat for several")
	flags.StringArrayVar(&f.traces, "trace", nil, "link that plays the trace in `FILE`; repeat for several")
	flags.StringArrayVar(&f.models, "generate", nil, "link that plays a trace drawn from `MODEL` with --seed; "+
		"repeat for several")
	flags.StringVar(&f.upRate, "up-rate", "", "`RATE` of the link that carries acknowledgements (default: "+
		"infinitely fast)")
	flags.StringVar(&f.upTrace, "up-trace", "", "trace `FILE` of the link that carries acknowledgements")
	flags.DurationVar(&f.delay, "delay", 20*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.delayTrace, "delay-trace", "",
		"propagation that moves, in place of --delay: a `FILE` with one delay in ms, one way, for each 10 ms")
	flags.StringVar(&f.buffer, "buffer", "2MB", "limit of the queue: bytes (2MB), packets (100pkt) or none")
	flags.StringVar(&f.aqm, "aqm", sim.DropTail.String(),
		"how that queue is managed: droptail, codel (RFC 8289), fq_codel (RFC 8290), pie (RFC 8033) or dualpi2 "+
			"(RFC 9332), "+
			"all but the first with ECN marks")
	flags.StringVar(&f.ecn, "ecn", sim.ECNDefault.String(),
		"what packets say of ECN: classic (ECT(0)), l4s (ECT(1)), off, or default: l4s with prague, classic with "+
			"others")
	flags.Float64Var(&f.loss, "loss", 0, "probability that a data packet is lost at random")
	flags.Float64Var(&f.upLoss, "up-loss", 0, "probability that an acknowledgement is lost at random")
	flags.StringVar(&f.transport, "transport", sim.Kernel.String(),
		"what is below the algorithm: kernel enforces the window, and acknowledgements are delayed as by Linux; "+
			"relay has the proxy keep it, and each packet is acknowledged; native is nothing but the algorithm")
	flags.DurationVar(&f.ackEvery, "ack-every", 0,
		"acknowledge in batches, at multiples of this; 0: as --transport has it")
	flags.DurationVar(&f.hints, "hints", 0, "how often the link tells the senders of its capacity, as a base "+
		"station would; 0: never")
	flags.DurationVar(&f.duration, "duration", 30*time.Second, "length of a run")
	flags.DurationVar(&f.warmup, "warmup", 0, "leave this much of the beginning out of the figures")
	flags.IntVar(&f.flows, "flows", 1, "flows of the algorithm that share the link, each with its own window")
	flags.Uint64Var(&f.seed, "seed", 1, "seed of generated traces, losses and algorithms")
	flags.BoolVar(&f.json, "json", false, "print one JSON object for each run instead of the table")
	flags.BoolVar(&f.all, "all", false, "put every algorithm, or those of --algorithm, through every standard case")
	flags.BoolVar(&f.markdown, "markdown", false, "with --all: print the table as Markdown")
	flags.StringVar(&f.traceOut, "trace-out", "", "write window, bytes in flight and round trips over time to "+
		"`FILE`, as JSON lines")
	flags.StringArrayVar(&f.agents, agents.Flag, nil, agents.Usage)
	flags.DurationVar(&f.sampled, "trace-every", 10*time.Millisecond, "how often --trace-out records")
}

func modelList() string {
	var b strings.Builder
	for _, m := range sim.Models() {
		fmt.Fprintf(&b, "  %-8s %s\n", m.Name, m.About)
	}
	return b.String()
}

// fileFormat is every key that a FILE may have, indented.
func fileFormat() string {
	return strings.ReplaceAll("\n"+strings.TrimSpace(recipe.Format), "\n", "\n  ")[1:] + "\n"
}

// trial is one run to be made.
type trial struct {
	name string // of the algorithm with its settings, or of the file
	link string // empty for a file
	sim.Scenario
	who agents.Agents // that decide
	of  *experiment   // that it is a run of; nil: of none
	recipe.Run
	record func(sim.Result) stage.Record
}

// shared are the flags that go with files, too.
var shared = map[string]bool{"json": true, "trace-out": true, "trace-every": true, agents.Flag: true, "help": true}

// trials reads the flags or the files.
func (f *simFlags) trials(flags *pflag.FlagSet, files []string) (trials []trial, err error) {
	if f.sampled <= 0 {
		return nil, errors.New("--trace-every must be above 0, such as 10ms")
	}
	if len(files) > 0 {
		flags.Visit(func(flag *pflag.Flag) {
			if !shared[flag.Name] && err == nil {
				err = fmt.Errorf("--%s does not go with a file: write it there", flag.Name)
			}
		})
		for _, name := range files {
			if err == nil {
				var more []trial
				more, err = f.fromFile(name)
				trials = append(trials, more...)
			}
		}
		return trials, err
	}
	links, err := f.links()
	if err != nil {
		return nil, err
	}
	refs, err := f.swept()
	if err != nil {
		return nil, err
	}
	base, err := f.base()
	if err != nil {
		return nil, err
	}
	ecn, err := sim.ParseECN(f.ecn)
	if err != nil {
		return nil, fmt.Errorf("--ecn: %w", err)
	}
	for _, l := range links {
		for _, ref := range refs {
			t := trial{name: ref, link: l.name, Scenario: base, who: f.deciders}
			t.Down.Rate, t.Down.Trace = l.rate, l.trace
			algorithm, params, err := cc.Parse(ref)
			if err != nil {
				if len(f.sweeps) > 0 {
					return nil, fmt.Errorf("--algorithm with --sweep: %w", err)
				}
				return nil, fmt.Errorf("--algorithm: %w", err)
			}
			if err := f.deciders.Check(algorithm); err != nil {
				return nil, fmt.Errorf("--algorithm: %w", err)
			}
			for range f.flows {
				t.Flows = append(t.Flows, sim.FlowConfig{Algorithm: algorithm, Params: params, ECN: ecn})
			}
			if err := t.Scenario.Check(); err != nil {
				return nil, err
			}
			trials = append(trials, t)
		}
	}
	return trials, nil
}

// base is what all runs have in common.
func (f *simFlags) base() (sim.Scenario, error) {
	s := sim.Scenario{
		Down:     sim.LinkConfig{Delay: f.delay, Loss: f.loss},
		Up:       sim.LinkConfig{Delay: f.delay, Loss: f.upLoss},
		AckEvery: f.ackEvery, Hints: f.hints, Duration: f.duration, Warmup: f.warmup, Seed: f.seed,
	}
	if f.traceOut != "" {
		s.Sample = f.sampled
	}
	if f.flows < 1 || f.flows > maxSimFlows {
		return s, fmt.Errorf("--flows is %d, but must be from 1 to %d", f.flows, maxSimFlows)
	}
	if f.duration <= 0 {
		return s, fmt.Errorf("--duration is %v; write a time such as 30s", f.duration)
	}
	if f.delay < 0 || f.ackEvery < 0 || f.hints < 0 || f.warmup < 0 {
		return s, errors.New("--delay, --ack-every, --hints and --warmup must not be negative; write a time such " +
			"as 20ms")
	}
	if f.warmup >= f.duration {
		return s, fmt.Errorf("--warmup %v leaves nothing of --duration %v", f.warmup, f.duration)
	}
	if !isFraction(f.loss) || !isFraction(f.upLoss) {
		return s, errors.New("--loss and --up-loss must be fractions such as 0.01, below 1")
	}
	var err error
	if s.Transport, err = sim.ParseTransport(f.transport); err != nil {
		return s, fmt.Errorf("--transport: %w", err)
	}
	if s.Down.AQM, err = sim.ParseAQM(f.aqm); err != nil {
		return s, fmt.Errorf("--aqm: %w", err)
	}
	if f.buffer != "none" {
		if s.Down.QueueBytes, s.Down.QueuePackets, err = sim.ParseQueue(f.buffer); err != nil {
			return s, fmt.Errorf("--buffer: %w or none", err)
		}
	}
	if f.upRate != "" {
		if s.Up.Rate, err = parseLinkRate(f.upRate); err != nil {
			return s, fmt.Errorf("--up-rate: %w", err)
		}
	}
	if f.upTrace != "" {
		if s.Up.Trace, err = openTrace(f.upTrace); err != nil {
			return s, fmt.Errorf("--up-trace: %w", err)
		}
	}
	if f.delayTrace != "" {
		delays, err := bench.ReadDelayTrace(f.delayTrace)
		if err != nil {
			return s, fmt.Errorf("--delay-trace: %w", err)
		}
		for _, c := range []*sim.LinkConfig{&s.Down, &s.Up} {
			c.Delay, c.Delays = 0, delays
		}
	}
	if f.upRate != "" && f.upTrace != "" {
		return s, errors.New("--up-rate and --up-trace exclude each other")
	}
	return s, nil
}

func isFraction(p float64) bool { return p >= 0 && p < 1 }

// maxSimFlows bounds --flows.
const maxSimFlows = 1000

// simLink is one link to run over.
type simLink struct {
	name  string
	rate  cc.Rate
	trace *sim.Trace
}

func (f *simFlags) links() (links []simLink, err error) {
	rates := f.rates
	if len(f.rates)+len(f.traces)+len(f.models) == 0 {
		rates = []string{"12mbit"}
	}
	for _, text := range rates {
		l := simLink{name: text}
		if l.rate, err = parseLinkRate(text); err != nil {
			return nil, fmt.Errorf("--rate: %w", err)
		}
		links = append(links, l)
	}
	for _, name := range f.traces {
		l := simLink{name: filepath.Base(name)}
		if l.trace, err = openTrace(name); err != nil {
			return nil, fmt.Errorf("--trace: %w", err)
		}
		links = append(links, l)
	}
	for _, name := range f.models {
		l := simLink{name: name}
		if l.trace, err = sim.Generate(name, f.seed, sim.GeneratedLength); err != nil {
			return nil, fmt.Errorf("--generate: %w", err)
		}
		links = append(links, l)
	}
	return links, nil
}

// swept returns the algorithms with every combination of the swept values.
func (f *simFlags) swept() ([]string, error) {
	refs := f.algorithms
	for _, sweep := range f.sweeps {
		name, values, ok := strings.Cut(sweep, "=")
		if !ok || name == "" || values == "" {
			return nil, fmt.Errorf("--sweep %q must be a parameter and its values, such as delta=0.5,0.1", sweep)
		}
		var more []string
		for _, ref := range refs {
			separator := ":"
			if strings.Contains(ref, ":") {
				separator = ","
			}
			for value := range strings.SplitSeq(values, ",") {
				more = append(more, ref+separator+name+"="+value)
			}
		}
		refs = more
	}
	return refs, nil
}

func parseLinkRate(text string) (cc.Rate, error) {
	rate, err := cc.ParseRate(text)
	if err == nil && rate == 0 {
		err = fmt.Errorf("%q carries nothing", text)
	}
	return rate, err
}

func openTrace(name string) (*sim.Trace, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return sim.ReadTrace(filepath.Base(name), f)
}
