package main

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/output"
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
	algorithm       string
	models          []string
	runs            int
	seed            uint64
	duration, delay time.Duration
	buffer          string
	windows, delays string
	output          string
}

func mdiTrainCommand() *cobra.Command {
	var f mdiTrainFlags
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Learn a model of an algorithm from simulated runs",
		Long: `Train runs an algorithm in virtual time over links drawn from built-in models,
each run with a seed of its own, and learns from every 5 ms of it how its window
follows its delay. The same flags give the same model, and are written into it.

Changes are in percent, times the decimal logarithm of what changed: packets, or
milliseconds. A run begins to count after a second.

` + modelList(),
		Example: `  penstock-lab mdi train --algorithm verus --generate lte --generate walk --runs 20 --output verus.csv
  penstock-lab mdi train --algorithm copa:delta=0.5 --generate highway --windows=-60,60,5 --delays=-25,15,5 \
    --output copa.csv
  penstock-lab --mdi-model mine=copa.csv sim --algorithm mdi:model=mine --generate highway`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := f.plan()
			if err != nil {
				return cli.BadInput(err)
			}
			return f.train(cmd, plan)
		},
	}
	f.register(cmd.Flags())
	_ = cmd.MarkFlagRequired("output") // which exists
	return cmd
}

func (f *mdiTrainFlags) register(flags *pflag.FlagSet) {
	flags.StringVarP(&f.algorithm, "algorithm", "a", "verus",
		"`ALGORITHM` to imitate, with settings as in copa:delta=0.1")
	flags.StringArrayVar(&f.models, "generate", []string{"lte"},
		"link that plays a trace drawn from `MODEL`; repeat for several, which take turns")
	flags.IntVar(&f.runs, "runs", 20, "how many runs, over as many traces")
	flags.Uint64Var(&f.seed, "seed", 1, "seed of the first run's trace; the next ones count up")
	flags.DurationVar(&f.duration, "duration", 5*time.Minute, "length of a run")
	flags.DurationVar(&f.delay, "delay", 20*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.buffer, "buffer", "2MB", "drop-tail queue: bytes (2MB), packets (100pkt) or none")
	flags.StringVar(&f.windows, "windows", axisText(cc.DefaultMDIGrid.Window),
		"changes of the window to tell apart: `LEAST,LARGEST,STEP`")
	flags.StringVar(&f.delays, "delays", axisText(cc.DefaultMDIGrid.Delay),
		"changes of the delay to tell apart: `LEAST,LARGEST,STEP`")
	flags.StringVarP(&f.output, "output", "o", "", "`FILE` to write the model to")
}

func axisText(a cc.MDIAxis) string { return fmt.Sprintf("%v,%v,%v", a.Min, a.Max, a.Step) }

// mdiPlan is what mdi train does, once its flags are checked.
type mdiPlan struct {
	grid   cc.MDIGrid
	runs   []sim.Scenario
	links  []string // of each run
	window int      // which of the algorithm's Internals is its window; −1: none, Control.Cwnd is
}

// mdiEpoch is how often mdi decides.
const mdiEpoch = 5 * time.Millisecond

func (f *mdiTrainFlags) plan() (p mdiPlan, err error) {
	name, params, err := cc.Parse(f.algorithm)
	if err != nil {
		return p, fmt.Errorf("--algorithm: %w", err)
	}
	spec, err := cc.Lookup(name)
	if err != nil {
		return p, fmt.Errorf("--algorithm: %w", err)
	}
	// An algorithm that sends by credits has a window behind them: that counts.
	p.window = slices.IndexFunc(spec.Internals, func(i cc.Internal) bool { return i.Name == "window_packets" })
	if p.grid.Window, err = parseAxis(f.windows); err != nil {
		return p, fmt.Errorf("--windows: %w", err)
	}
	if p.grid.Delay, err = parseAxis(f.delays); err != nil {
		return p, fmt.Errorf("--delays: %w", err)
	}
	if err := p.grid.Check(); err != nil {
		return p, fmt.Errorf("--windows and --delays: %w", err)
	}
	if f.runs < 1 || f.runs > maxTrainRuns {
		return p, fmt.Errorf("--runs is %d, but must be from 1 to %d", f.runs, maxTrainRuns)
	}
	if f.duration < 2*trainWarmup {
		return p, fmt.Errorf("--duration is %v, but must be at least %v", f.duration, 2*trainWarmup)
	}
	down := sim.LinkConfig{Delay: f.delay}
	if f.buffer != "none" {
		if down.QueueBytes, down.QueuePackets, err = sim.ParseQueue(f.buffer); err != nil {
			return p, fmt.Errorf("--buffer: %w or none", err)
		}
	}
	for i := range f.runs {
		model := f.models[i%len(f.models)]
		s := sim.Scenario{
			Down: down, Up: sim.LinkConfig{Delay: f.delay}, Duration: f.duration, Sample: mdiEpoch,
			Flows: []sim.FlowConfig{{Algorithm: name, Params: params}}, Seed: f.seed + uint64(i),
		}
		if s.Down.Trace, err = sim.Generate(model, s.Seed,
			max(sim.GeneratedLength, f.duration.Truncate(time.Millisecond))); err != nil {
			return p, fmt.Errorf("--generate: %w", err)
		}
		if err := s.Check(); err != nil {
			return p, err
		}
		p.runs = append(p.runs, s)
		p.links = append(p.links, fmt.Sprintf("%s with seed %d", model, s.Seed))
	}
	return p, nil
}

const (
	maxTrainRuns = 200
	trainWarmup  = time.Second // of a run, which is not learned from
)

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

// train makes the runs, learns from them and writes what was learned.
func (f *mdiTrainFlags) train(cmd *cobra.Command, p mdiPlan) error {
	if err := output.CheckPath(f.output); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	var runs [][]cc.MDIEpoch
	for i, s := range p.runs {
		r, err := sim.Run(s)
		if err != nil {
			return err
		}
		epochs := epochsOf(r.Flows[0].Samples, p.window)
		fmt.Fprintf(cmd.ErrOrStderr(), "run %d of %d: %s, %.3g Mbit/s, %d epochs\n", i+1, len(p.runs), p.links[i],
			r.Flows[0].Throughput.Mbps(), len(epochs))
		runs = append(runs, epochs)
	}
	model, err := cc.TrainMDI(p.grid, runs...)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	if err := model.Write(&text, f.commandLine()); err != nil {
		return err
	}
	if err := output.Write(f.output, func(w io.Writer) error { _, err := text.WriteTo(w); return err }); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s: beyond the table the window goes to %.3g of itself when the delay rises, "+
		"%.3g when it falls\n", f.output, model.Down, model.Up)
	return nil
}

// commandLine is what makes the same model again.
func (f *mdiTrainFlags) commandLine() string {
	return fmt.Sprintf("penstock-lab mdi train --algorithm %s --generate %s --runs %d --seed %d --duration %v "+
		"--delay %v --buffer %s --windows=%s --delays=%s",
		f.algorithm, strings.Join(f.models, " --generate "), f.runs, f.seed, f.duration, f.delay, f.buffer, f.windows,
		f.delays)
}

// epochsOf turns a flow's samples into epochs. window is the index of its window
// among its internals; −1: it is the one in force.
func epochsOf(samples []sim.Sample, window int) []cc.MDIEpoch {
	var epochs []cc.MDIEpoch
	var delivered cc.Bytes
	var heard time.Duration
	last := 0.0 // ms
	for _, s := range samples {
		delay := float64(s.LatestRTT) / float64(time.Millisecond)
		if s.Delivered == delivered { // nothing was heard
			delay = max(last, float64(s.At-heard)/float64(time.Millisecond))
		} else {
			delivered, heard = s.Delivered, s.At
		}
		e := cc.MDIEpoch{Delay: delay, Window: float64(s.Cwnd) / float64(cc.DefaultMSS)}
		if window >= 0 {
			e.Window = s.Internals[window]
		}
		last = delay
		if s.At >= trainWarmup {
			epochs = append(epochs, e)
		}
	}
	return epochs
}
