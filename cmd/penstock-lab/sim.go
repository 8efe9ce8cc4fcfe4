package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/linktrace"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// simFlags are the flags of sim as written.
type simFlags struct {
	bench.Matrix
	algorithms, sweeps    []string
	rates, traces, models []string
	upRate, upTrace       string
	buffer, transport     string
	loss                  float64
	seed                  uint64
	all, markdown         bool
	sampled               time.Duration
	agents                []string
	outputs               outputs
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
which 1500 bytes may leave; the file repeats), a .csv of times in seconds and
rates in Mbit/s, or a trace drawn from a built-in model:

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
  penstock-lab sim --algorithm copa:alcc --trace mine.down --up-trace mine.up --json runs.jsonl
  penstock-lab sim --algorithm penstock --algorithm cubic --trace mine.down --report report.html
  penstock-lab sim --algorithm copa --rate 12mbit --flows 4 --ack-every 10ms --trace-out windows.jsonl
  penstock-lab sim --algorithm ccp:mine --agent mine=/tmp/mine.sock --generate lte
  penstock-lab sim test/scenarios/testdata/outage.yaml
  penstock-lab sim --all
  penstock-lab sim --all --transport relay --markdown`,
		RunE: func(cmd *cobra.Command, files []string) (err error) {
			if f.Agents, err = agents.Parse(f.agents); err != nil {
				return cli.BadInput(err)
			}
			if f.sampled <= 0 || f.sampled%time.Millisecond != 0 {
				return cli.BadInput(fmt.Errorf("--trace-every is %v, but must be whole milliseconds, such as 10ms",
					f.sampled))
			}
			read := slices.Concat(files, f.traces, []string{f.upTrace, f.DelayTrace})
			if err := f.outputs.check(read...); err != nil {
				return cli.BadInput(err)
			}
			if f.all || f.markdown {
				return f.runAll(cmd, files)
			}
			experiments, err := f.experiments(cmd.Flags(), files)
			if err != nil {
				return cli.BadInput(err)
			}
			return f.run(cmd, experiments)
		},
	}
	f.outputs.register(cmd)
	f.register(cmd.Flags())
	return cmd
}

func (f *simFlags) register(flags *pflag.FlagSet) {
	f.algorithms = []string{cc.Default}
	flags.VarP(&names{list: &f.algorithms}, "algorithm", "a",
		"`ALGORITHMS` to run, separated by commas, with settings as in copa:delta=0.1")
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
	flags.DurationVar(&f.Delay, "delay", 20*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.DelayTrace, "delay-trace", "",
		"propagation that moves, in place of --delay: a `FILE` with one delay in ms, one way, for each 10 ms")
	flags.StringVar(&f.buffer, "buffer", "2MB", "limit of the queue: bytes (2MB), packets (100pkt) or none")
	flags.StringVar(&f.AQM, "aqm", sim.DropTail.String(),
		"how that queue is managed: "+managements)
	flags.StringVar(&f.ECN, "ecn", sim.ECNDefault.String(),
		"what packets say of ECN: classic (ECT(0)), l4s (ECT(1)), off, or default: l4s with prague, classic with "+
			"others")
	flags.Float64Var(&f.loss, "loss", 0, "probability that a data packet is lost at random")
	flags.Float64Var(&f.UpLoss, "up-loss", 0, "probability that an acknowledgement is lost at random")
	flags.StringVar(&f.transport, "transport", sim.Kernel.String(),
		"what is below the algorithm: kernel enforces the window, and acknowledgements are delayed as by Linux; "+
			"relay has the proxy keep it, and each packet is acknowledged; native is nothing but the algorithm")
	flags.DurationVar(&f.AckEvery, "ack-every", 0,
		"acknowledge in batches, at multiples of this; 0: as --transport has it")
	flags.DurationVar(&f.Hints, "hints", 0, "how often the link tells the senders of its capacity, as a base "+
		"station would; 0: never")
	flags.DurationVar(&f.Duration, "duration", 30*time.Second, "length of a run")
	flags.DurationVar(&f.Warmup, "warmup", 0, "leave this much of the beginning out of the figures")
	flags.IntVar(&f.Flows, "flows", 1, "flows of the algorithm that share the link, each with its own window")
	flags.Uint64Var(&f.seed, "seed", 1, "seed of generated traces, losses and algorithms")
	flags.BoolVar(&f.all, "all", false, "put every algorithm, or those of --algorithm, through every standard case")
	flags.BoolVar(&f.markdown, "markdown", false, "with --all: print the table as Markdown")
	flags.StringVar(&f.outputs.traceOut, "trace-out", "", "write window, bytes in flight and round trips over time to "+
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

// experiments reads the flags or the files.
func (f *simFlags) experiments(flags *pflag.FlagSet, files []string) (all []recipe.Recipe, err error) {
	if len(files) == 0 {
		r, err := f.experiment()
		return []recipe.Recipe{r}, err
	}
	if err := only(flags, ofRuns, withFile); err != nil {
		return nil, err
	}
	for _, name := range files {
		r, err := recipe.Open(name, f.Agents)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// experiment is what the flags describe.
func (f *simFlags) experiment() (r recipe.Recipe, err error) {
	f.Name, f.Losses, f.Buffers, f.Up = "sim", []float64{f.loss}, []string{f.buffer}, record.Free
	if f.Flows < 1 || f.Flows > maxSimFlows {
		return r, fmt.Errorf("--flows is %d, but must be from 1 to %d", f.Flows, maxSimFlows)
	}
	if f.Links, err = f.links(); err != nil {
		return r, err
	}
	switch {
	case f.upRate != "" && f.upTrace != "":
		return r, errors.New("--up-rate and --up-trace exclude each other")
	case f.upRate != "":
		if _, err := parseLinkRate(f.upRate); err != nil {
			return r, fmt.Errorf("--up-rate: %w", err)
		}
		f.Up = f.upRate
	case f.upTrace != "":
		if f.Up, err = traceFile(f.upTrace); err != nil {
			return r, fmt.Errorf("--up-trace: %w", err)
		}
	}
	if _, err := sim.ParseTransport(f.transport); err != nil {
		return r, fmt.Errorf("--transport: %w", err)
	}
	refs, err := f.swept()
	if err != nil {
		return r, err
	}
	for _, ref := range refs {
		senders, err := bench.ParseSender(ref+"@"+bench.EnvelopeSim, nil)
		if err != nil {
			if len(f.sweeps) > 0 {
				return r, fmt.Errorf("--algorithm with --sweep: %w", err)
			}
			return r, fmt.Errorf("--algorithm: %w", err)
		}
		senders[0].Name, senders[0].Transport = ref, f.transport
		f.Senders = append(f.Senders, senders[0])
	}
	return f.Experiment()
}

// maxSimFlows bounds --flows.
const maxSimFlows = 1000

// links are what recipe.Carries reads.
func (f *simFlags) links() (links []string, err error) {
	rates := f.rates
	if len(f.rates)+len(f.traces)+len(f.models) == 0 {
		rates = []string{"12mbit"}
	}
	for _, text := range rates {
		if _, err := parseLinkRate(text); err != nil {
			return nil, fmt.Errorf("--rate: %w", err)
		}
		links = append(links, text)
	}
	for _, name := range f.traces {
		file, err := traceFile(name)
		if err != nil {
			return nil, fmt.Errorf("--trace: %w", err)
		}
		links = append(links, file)
	}
	for _, name := range f.models {
		if _, err := sim.Model(name); err != nil {
			return nil, fmt.Errorf("--generate: %w", err)
		}
		links = append(links, "generate:"+name)
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

// traceFile is the name of a trace in a form that is no rate or model, whatever the file is called.
func traceFile(name string) (string, error) {
	if _, err := openTrace(name); err != nil {
		return "", err
	}
	return filepath.Abs(name)
}

func openTrace(name string) (*sim.Trace, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return linktrace.Read(filepath.Base(name), f)
}
