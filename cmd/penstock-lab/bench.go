package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// benchFlags are the flags of bench, sim, fidelity and demo as written.
type benchFlags struct {
	bench.Matrix
	session
	senders, envelopes []string
	agents             []string
	firstSeeds         []uint
	runs               int // with each of firstSeeds and the next ones
	retryNoisy         bool
}

func benchCommand() *cobra.Command {
	f := benchFlags{Matrix: bench.Matrix{Name: "bench"}, senders: []string{"cubic", "bbr", cc.Default}}
	cmd := &cobra.Command{
		Use:   "bench [FILE]",
		Short: "Measure senders over emulated links",
		Long: `Bench downloads in bulk over an emulated link, once for each sender, link,
buffer, loss, seed and run, and prints medians side by side.

A sender is the kernel's cubic, bbr or reno at the server, with the edge only
routing; or any algorithm of Penstock's ("penstock algorithms" lists them)
through a real proxy process at the edge, client and server untouched. Write
ALGORITHM@ENVELOPE to choose what holds the window in the kernel, as in
copa@ebpf or copa@cubic: ebpf is Penstock's own congestion control, which needs
Linux 6.10, CAP_BPF and CAP_PERFMON, and so root; the others are the kernel's.
Penstock's own cubic and reno need an envelope to be told from the kernel's.
ALGORITHM@wireguard has the client come through a WireGuard tunnel, and TCP in
user space send to it.

ccp:NAME is what an agent decides, a process that --agent names and that listens by
then.

ALGORITHM@sim is the same algorithm over the same link, buffer, delay and loss in
virtual time, as the command sim plays it. The transport is that of the same
algorithm's real senders: the kernel's, which enforces the window, with
acknowledgements that Linux delays; the relay's where all of those are over bbr,
cubic, reno or wireguard. "penstock-lab bench fidelity" compares the two over several
links.

` + linkHelp + `

Throughput and delays are those of the link's own record, from the first data
packet on; queueing is from a packet's arrival at the queue until its last byte
has left it.

A FILE describes an experiment in place of the flags, in the form that recipes have.

The network is made of namespaces: run it as root, or as a user
where user namespaces are allowed.`,
		Example: `  penstock-lab bench --sender cubic,bbr,copa --link generate:lte --buffer 2MB
  penstock-lab bench --sender cubic,copa:delta=0.5,copa:alcc --link Verizon-LTE-short.down \
    --runs 5 --json runs.jsonl --plot out.png
  penstock-lab bench --sender cubic,static:cwnd_packets=22 --link 12mbit --delay 10ms --buffer 250pkt
  penstock-lab bench --sender cubic,copa --envelope ebpf,bbr,cubic --link 12mbit --loss 0,0.01,0.03
  penstock-lab bench --sender copa,copa@sim --link generate:lte
  penstock-lab bench --sender penstock@wireguard,penstock@sim --link generate:lte --duration 20s
  penstock-lab bench --sender pbe,nacc:wired,copa --link generate:lte --hints 20ms
  penstock-lab bench --sender ccp:mine,ccp:mine@sim --agent mine=/tmp/mine.sock --link generate:lte`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, files []string) error {
			experiments, err := f.readExperiments(cmd, files, func() (err error) {
				f.Senders, err = bench.ParseSenders(f.senders, f.envelopes)
				return err
			})
			if err != nil {
				return cli.BadInput(err)
			}
			return f.playAndShow(cmd, experiments)
		},
	}
	f.register(cmd)
	f.registerSeeds(cmd)
	flags := cmd.Flags()
	flags.Var(&names{list: &f.senders}, "sender", "who sends: `SENDERS`, separated by commas")
	flags.StringSliceVar(&f.envelopes, "envelope", nil,
		"what is below the algorithm: ebpf, bbr, cubic, reno or wireguard at the proxy, "+
			"native (nothing: the server sends with it over UDP), or sim; several for each in turn (default: the proxy's)")
	flags.BoolVar(&f.retryNoisy, "retry-noisy", false, "repeat a run once when the machine disturbed it")
	cmd.AddCommand(fidelityCommand(), recipeCommand())
	return cmd
}

// linkHelp says how links are written.
const linkHelp = `A link is a rate (12mbit), a trace file in Mahimahi's format or a .csv of times in
seconds and rates in Mbit/s, a generated trace (generate:lte, generate:lte:7 with a
seed) or a recorded one (recorded:campus-walk, city-drive, highway-3g or rapid-5s, a
minute each). A file that is called like one of the others is named with its folder:
./12mbit. A link carries the same in both directions unless --up says otherwise.
Several values of --loss share one table, each sender beside what it has without.`

// managements are those of a queue.
const managements = "droptail, codel (RFC 8289), fq_codel (RFC 8290), pie (RFC 8033) or dualpi2 (RFC 9332), all but " +
	"the first with ECN marks"

// register adds the flags that commands have in common. The same words describe the same link in each.
func (f *benchFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringArrayVar(&f.Links, "link", []string{"generate:lte"},
		"rate, trace file, generate:NAME[:SEED] or recorded:NAME; repeat for several")
	flags.StringVar(&f.Up, "up", record.Same, "what the link carries towards the server; unlimited: all at once")
	flags.StringSliceVar(&f.Buffers, "buffer", []string{"2MB"},
		"limit of the queue, each way: bytes (2MB), packets (250pkt) or none; several for each in turn")
	flags.DurationVar(&f.Delay, "delay", 10*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.DelayTrace, "delay-trace", "",
		"propagation that moves, in place of --delay: a `FILE` with one delay in ms, one way, for each 10 ms")
	flags.Float64SliceVar(&f.Losses, "loss", []float64{0},
		"probability that a packet towards the client is lost at random; several for each in turn")
	flags.Lookup("loss").DefValue = "[0]" // not with the six decimals of the library
	flags.Float64Var(&f.UpLoss, "up-loss", 0, "probability that an acknowledgement is lost at random")
	flags.StringVar(&f.AQM, "aqm", sim.DropTail.String(), "how the queue towards the client is managed: "+managements)
	flags.Float64Var(&f.Reorder, "reorder", 0, "probability that a packet towards the client takes --reorder-by "+
		"longer, so that later ones overtake it")
	flags.DurationVar(&f.ReorderBy, "reorder-by", 5*time.Millisecond, "how much longer those packets take")
	flags.DurationVar(&f.Duration, "duration", 30*time.Second, "length of a run, from the first data packet")
	flags.DurationVar(&f.Warmup, "warmup", 0, "leave this much of the beginning out of the figures")
	flags.IntVar(&f.Flows, "flows", 1, "downloads that share the link, each with its own window")
	flags.DurationVar(&f.Hints, "hints", 0, "how often the link tells the proxy of its capacity, as a base station "+
		"would, half a round trip late; 0: never")
	flags.StringArrayVar(&f.agents, agents.Flag, nil, agents.Usage)
	f.outputs.register(cmd)
}

// registerSeeds adds the flags that say how often each run is made.
func (f *benchFlags) registerSeeds(cmd *cobra.Command) {
	cmd.Flags().IntVar(&f.runs, "runs", 1, "runs of each sender for each of --seeds: with this seed and the next ones")
	cmd.Flags().UintSliceVar(&f.firstSeeds, "seeds", []uint{1}, "seeds of random loss and of generated traces that "+
		"name none; others than 1 also of when flows start and where other traces begin")
}

// readExperiments returns what the files describe, or what the flags do; senders reads Senders.
func (f *benchFlags) readExperiments(cmd *cobra.Command, files []string, senders func() error) (all []recipe.Recipe,
	err error,
) {
	if f.Agents, err = agents.Parse(f.agents); err != nil {
		return nil, err
	}
	if f.runs < 1 {
		return nil, fmt.Errorf("--runs %d: must be at least 1", f.runs)
	}
	if f.Flows < 1 && cmd.Flags().Changed("flows") {
		return nil, fmt.Errorf("--flows is %d, but must be at least 1", f.Flows)
	}
	if err := f.outputs.check(slices.Concat(files, f.Links, []string{f.Up, f.DelayTrace})...); err != nil {
		return nil, err
	}
	if len(files) == 0 {
		if err := senders(); err != nil {
			return nil, err
		}
		r, err := f.Experiment()
		return []recipe.Recipe{r}, err
	}
	if err := only(cmd.Flags(), ofRuns, "a file: write it there"); err != nil {
		return nil, err
	}
	for _, file := range files {
		r, err := recipe.Open(file, f.Agents)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// playSeeds plays the experiments with each seed.
func (f *benchFlags) playSeeds(cmd *cobra.Command, experiments []recipe.Recipe) error {
	f.cmd, f.scale = cmd, recipe.Full
	if f.retryNoisy {
		f.retry = 1
	}
	for _, first := range f.firstSeeds {
		for seed := range uint64(f.runs) {
			if seed += uint64(first); slices.Contains(f.seeds, seed) {
				return cli.BadInput(fmt.Errorf("--seeds has %d twice: a seed gives one result", seed))
			}
			f.seeds = append(f.seeds, seed)
		}
	}
	if len(f.seeds) == 0 {
		return cli.BadInput(errors.New("nothing to run: give at least one of --seeds"))
	}
	err := f.play(experiments, func(recipe.Recipe, []record.Run) error { return nil })
	return errors.Join(err, failures(f.all))
}

// playAndShow plays the experiments and prints their tables.
func (f *benchFlags) playAndShow(cmd *cobra.Command, experiments []recipe.Recipe) error {
	return errors.Join(f.playSeeds(cmd, experiments), f.tables())
}

// failures returns an error if a finding does not hold, or if no finding of an experiment fails under its control.
// Runs that the machine disturbed do not count.
func failures(runs []record.Run) (err error) {
	all, failed := 0, 0
	failsControl := map[string]bool{} // by experiment
	for _, r := range record.Judged(runs) {
		broken := slices.DeleteFunc(slices.Clone(r.Findings), func(f record.Finding) bool { return f.OK })
		if r.Scale == string(recipe.Control) {
			failsControl[r.Experiment] = failsControl[r.Experiment] || r.Noisy || len(broken) > 0
		} else if !r.Noisy {
			all += len(r.Findings)
			failed += len(broken)
		}
	}
	if failed > 0 {
		err = fmt.Errorf("%d of %d findings do not hold", failed, all)
	}
	for _, name := range slices.Sorted(maps.Keys(failsControl)) {
		if !failsControl[name] {
			err = errors.Join(err, fmt.Errorf("%s: no finding fails under its control: none can tell the two apart", name))
		}
	}
	return err
}
