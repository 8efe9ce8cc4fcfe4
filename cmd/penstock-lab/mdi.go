package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/lab/recipe"
)

func mdiCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mdi",
		Short: "Learn models of other algorithms for the algorithm mdi",
		Long: `Mdi imitates another algorithm with a table of what that one did. This makes
such tables; --mdi-model, which every command takes, adds one to the choices of
mdi's parameter "model".`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	cmd.AddCommand(mdiTrainCommand())
	return cmd
}

// mdiTrainFlags are the flags of mdi train as written.
type mdiTrainFlags struct {
	algorithm               string
	links                   []string // arguments
	runs                    int
	seed                    uint64
	duration, delay         time.Duration
	buffer                  string
	windows, delays, levels string
	output                  string
}

func mdiTrainCommand() *cobra.Command {
	var f mdiTrainFlags
	cmd := &cobra.Command{
		Use:   "train [LINK...]",
		Short: "Learn a model of an algorithm from simulated runs",
		Long: `Train runs an algorithm in virtual time over links, each run with a seed of its
own, and learns from every 5 ms of it how its window follows its delay. The same
arguments give the same model, and are written into it. The second example sets the
imitation beside what it imitates, over a link that it has not learned from.

A LINK is a trace file, recorded:NAME, or generate:MODEL, by default generate:lte.
Changes are in percent, times the decimal logarithm of what changed: packets, or
milliseconds. Levels are binary logarithms of the delay over the least round trip.
A run begins to count after a second.

` + modelList(),
		Example: `  penstock-lab mdi train --output verus.csv channels/*.gz
  penstock-lab --mdi-model mine=verus.csv sim --algorithm verus,mdi:model=mine --link recorded:city-drive
  penstock-lab mdi train --algorithm copa:delta=0.5 --runs 20 --levels none --output copa.csv \
    generate:lte generate:highway`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.links = args; len(args) == 0 {
				f.links = []string{"generate:lte"}
			}
			plan, err := f.makePlan()
			if err != nil {
				return cli.BadInput(err)
			}
			return f.trainModel(cmd, plan)
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&f.algorithm, "algorithm", "a", "verus",
		"`ALGORITHM` to imitate, with settings as in copa:delta=0.1")
	flags.IntVar(&f.runs, "runs", 0, "how many runs, the links taking turns; 0: one over each")
	flags.Uint64Var(&f.seed, "seed", 1, "seed of the first run's trace; the next ones count up")
	flags.DurationVar(&f.duration, "duration", 5*time.Minute, "length of a run")
	flags.DurationVar(&f.delay, "delay", 20*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.buffer, "buffer", "2MB", "drop-tail queue: bytes (2MB), packets (100pkt) or none")
	flags.StringVar(&f.windows, "windows", axisText(cc.DefaultMDIGrid.Window),
		"changes of the window to tell apart: `LEAST,LARGEST,STEP`")
	flags.StringVar(&f.delays, "delays", axisText(cc.DefaultMDIGrid.Delay),
		"changes of the delay to tell apart: `LEAST,LARGEST,STEP`")
	flags.StringVar(&f.levels, "levels", axisText(cc.DefaultMDIGrid.Level),
		"levels of the delay to tell apart: `LEAST,LARGEST,STEP`, or none: its change before, as published")
	flags.StringVarP(&f.output, "output", "o", "", "`FILE` to write the model to")
	_ = cmd.MarkFlagRequired("output") // which exists
	return cmd
}

func axisText(a cc.MDIAxis) string { return fmt.Sprintf("%v,%v,%v", a.Min, a.Max, a.Step) }

// mdiPlan is what mdi train does, once its flags are checked.
type mdiPlan struct {
	grid      cc.MDIGrid
	algorithm cc.Spec
	window    int // index of the algorithm's Internals that is its window; −1: none, Control.Cwnd is
	scenario  sim.Scenario
	runs      int
}

const (
	maxTrainRuns = 200
	trainWarmup  = time.Second // of a run, which is not learned from
	warmupEpochs = int(trainWarmup / (5 * time.Millisecond))
)

func (f *mdiTrainFlags) makePlan() (p mdiPlan, err error) {
	name, params, err := cc.Parse(f.algorithm)
	if err == nil {
		p.algorithm, err = cc.Lookup(name)
	}
	if err != nil {
		return p, fmt.Errorf("--algorithm: %w", err)
	}
	// An algorithm that sends by credits has a window behind them: that counts.
	p.window = slices.IndexFunc(p.algorithm.Internals, func(i cc.Internal) bool { return i.Name == "window_packets" })
	if p.grid.Window, err = parseAxis(f.windows); err != nil {
		return p, fmt.Errorf("--windows: %w", err)
	}
	if p.grid.Delay, err = parseAxis(f.delays); err != nil {
		return p, fmt.Errorf("--delays: %w", err)
	}
	if f.levels != "none" {
		if p.grid.Level, err = parseAxis(f.levels); err != nil {
			return p, fmt.Errorf("--levels: %w", err)
		}
	}
	if err := p.grid.Check(); err != nil {
		return p, fmt.Errorf("--windows, --delays and --levels: %w", err)
	}
	if p.runs = cmp.Or(f.runs, len(f.links)); p.runs < 1 || p.runs > maxTrainRuns {
		return p, fmt.Errorf("--runs is %d, but must be from 1 to %d", p.runs, maxTrainRuns)
	}
	if f.duration < 2*trainWarmup {
		return p, fmt.Errorf("--duration is %v, but must be at least %v", f.duration, 2*trainWarmup)
	}
	p.scenario = sim.Scenario{
		Down: sim.LinkConfig{Delay: f.delay}, Up: sim.LinkConfig{Delay: f.delay}, Transport: sim.Kernel,
		Duration: f.duration, Flows: []sim.FlowConfig{{Algorithm: name, Params: params}},
	}
	if f.buffer != "none" {
		down := &p.scenario.Down
		if down.QueueBytes, down.QueuePackets, err = sim.ParseQueue(f.buffer); err != nil {
			return p, fmt.Errorf("--buffer: %w or none", err)
		}
	}
	for _, link := range f.links {
		s := p.scenario
		if s.Down.Rate, s.Down.Trace, err = recipe.Carries(link, f.seed); err == nil {
			err = s.Check()
		}
		if err != nil {
			return p, fmt.Errorf("link %s: %w", link, err)
		}
	}
	return p, nil
}

func parseAxis(text string) (a cc.MDIAxis, err error) {
	fields := strings.Split(text, ",")
	if len(fields) != 3 {
		return a, fmt.Errorf("%q is not LEAST,LARGEST,STEP, such as -60,60,5", text)
	}
	for i, into := range []*float64{&a.Min, &a.Max, &a.Step} {
		if *into, err = strconv.ParseFloat(fields[i], 64); err != nil {
			return a, fmt.Errorf("%q is not a number", fields[i])
		}
	}
	return a, nil
}

// recordFlow returns the plan's algorithm under a recorder, which is set once a flow begins.
func (p mdiPlan) recordFlow(recorder *cc.MDIRecorder) cc.Spec {
	s := p.algorithm
	s.New = func(cfg cc.Config) cc.Algorithm {
		recorder.Algorithm = p.algorithm.New(cfg)
		if i, ok := recorder.Algorithm.(cc.Inspector); ok && p.window >= 0 {
			recorder.Window = func() float64 { return i.Inspect()[p.window] }
		}
		return recorder
	}
	return s
}

// trainModel makes the runs, learns from them and writes what was learned.
func (f *mdiTrainFlags) trainModel(cmd *cobra.Command, p mdiPlan) error {
	if err := output.CheckPath(f.output); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	s := p.scenario
	var runs [][]cc.MDIEpoch
	for i := range p.runs {
		link, seed := f.links[i%len(f.links)], f.seed+uint64(i)
		var recorder cc.MDIRecorder
		var err error
		if s.Down.Rate, s.Down.Trace, err = recipe.Carries(link, seed); err != nil {
			return err
		}
		s.Seed, s.Lookup = seed, func(string) (cc.Spec, error) { return p.recordFlow(&recorder), nil }
		r, err := sim.Run(s)
		if err != nil {
			return err
		}
		epochs := recorder.Epochs[min(len(recorder.Epochs), warmupEpochs):]
		fmt.Fprintf(cmd.ErrOrStderr(), "run %d of %d: %s with seed %d, %.3g Mbit/s, %d epochs\n", i+1, p.runs, link,
			seed, r.Flows[0].Throughput.Mbps(), len(epochs))
		runs = append(runs, epochs)
	}
	model, err := cc.TrainMDI(p.grid, runs...)
	if err != nil {
		return err
	}
	err = output.Write(f.output, func(w io.Writer) error { return model.Write(w, f.commandLine()) })
	if err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}

// commandLine is what makes the same model again.
func (f *mdiTrainFlags) commandLine() string {
	return fmt.Sprintf("penstock-lab mdi train --algorithm %s --runs %d --seed %d --duration %v --delay %v "+
		"--buffer %s --windows=%s --delays=%s --levels=%s %s",
		f.algorithm, f.runs, f.seed, f.duration, f.delay, f.buffer, f.windows, f.delays, f.levels,
		strings.Join(f.links, " "))
}
