package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/telemetry"
)

// simFlags are the flags of sim as written.
type simFlags struct {
	benchFlags
	sweeps    []string
	transport string
	standard  bool          // the cases of --all
	every     time.Duration // how often --trace-out records
}

func simCommand() *cobra.Command {
	f := simFlags{benchFlags: benchFlags{
		Matrix: bench.Matrix{Name: "sim"}, senders: []string{cc.Default},
		session: session{virtual: true, quiet: true},
	}}
	cmd := &cobra.Command{
		Use:   "sim [FILE...]",
		Short: "Run algorithms over links in virtual time",
		Long: `Sim runs each algorithm over each link in virtual time, a minute in a fraction
of a second, and prints what came of it, each packet counted. It takes the flags of
bench, and comes to what bench comes to for ALGORITHM@sim. Nothing is late, and there
is no proxy whose time or packets could be looked at. Between the algorithm and the
link stands a transport that works packet by packet, with selective acknowledgements:
the kernel's, which enforces the window as Penstock's own congestion control does in
Linux, or with --transport relay one without a window, as under a tunnel. One seed
gives one result.

` + linkHelp + ` Generated are:

` + modelList() + `
Queueing is from a packet's arrival at the queue until its last byte has left
it. What is used counts all that the link carried, headers and retransmissions
too, against all it offered.

A FILE describes an experiment in YAML, as bench recipe plays it over real sockets,
too; it takes the place of the flags, and what must hold and does not is a failure.

` + fileFormat() + `
With --all every algorithm, or each that --algorithm names, is put through the
standard cases, and the table is one in Markdown:

` + standardList() + `
ccp:NAME is what an agent decides, a process that --agent names; time stands while it
thinks, so that one that goes by its reports alone gives one result as well.

Where two flows share the link, Jain's index says how fairly they do (1: equally,
0.5: one has everything), and the share is that of the algorithm in question.`,
		Example: `  penstock-lab sim --algorithm copa --algorithm cubic --link 12mbit --delay 20ms --buffer 100pkt
  penstock-lab sim --algorithm copa --sweep delta=0.5,0.1,0.02 --link generate:lte --link generate:highway
  penstock-lab sim --algorithm copa:alcc --link mine.down --up mine.up --json runs.jsonl
  penstock-lab sim --algorithm penstock --algorithm cubic --link mine.down --report report.html
  penstock-lab sim --algorithm copa --link 12mbit --flows 4 --ack-every 10ms --trace-out windows.jsonl
  penstock-lab sim --algorithm ccp:mine --agent mine=/tmp/mine.sock
  penstock-lab sim test/scenarios/testdata/outage.yaml
  penstock-lab sim --all`,
		RunE: func(cmd *cobra.Command, files []string) (err error) {
			if f.every <= 0 || f.every%time.Millisecond != 0 {
				return cli.BadInput(fmt.Errorf("--trace-every is %v, but must be whole milliseconds, such as 10ms",
					f.every))
			}
			if f.traceOut != "" {
				f.change = func(s *sim.Scenario) { s.Sample = commonStep(f.every, stage.Step) }
			}
			if f.standard {
				return f.runAll(cmd, files)
			}
			experiments, err := f.readExperiments(cmd, files, f.readSenders)
			if err != nil {
				return cli.BadInput(err)
			}
			return errors.Join(f.playSeeds(cmd, experiments), f.writeTraces(), f.tables())
		},
	}
	f.register(cmd)
	f.registerSeeds(cmd)
	flags := cmd.Flags()
	flags.VarP(&names{list: &f.senders}, "algorithm", "a",
		"`ALGORITHMS` to run, separated by commas, with settings as in copa:delta=0.1")
	flags.StringArrayVar(&f.sweeps, "sweep", nil, "run each algorithm once for each value of a parameter: "+
		"`NAME=VALUE,VALUE...`")
	flags.StringVar(&f.ECN, "ecn", sim.ECNDefault.String(),
		"what packets say of ECN: classic (ECT(0)), l4s (ECT(1)), off, or default: l4s with prague, classic with "+
			"others")
	flags.StringVar(&f.transport, "transport", sim.Kernel.String(),
		"what is below the algorithm: kernel enforces the window, and acknowledgements are delayed as by Linux; "+
			"relay has the proxy keep it, and each packet is acknowledged; native is nothing but the algorithm")
	flags.DurationVar(&f.AckEvery, "ack-every", 0,
		"acknowledge in batches, at multiples of this; 0: as --transport has it")
	flags.BoolVar(&f.standard, "all", false, "put every algorithm, or those of --algorithm, through every standard case")
	flags.StringVar(&f.traceOut, "trace-out", "", "write window, bytes in flight and round trips over time to "+
		"`FILE`, as JSON lines")
	flags.DurationVar(&f.every, "trace-every", 10*time.Millisecond, "how often --trace-out records")
	return cmd
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

// readSenders reads the algorithms, with every combination of the swept values.
func (f *simFlags) readSenders() error {
	if _, err := sim.ParseTransport(f.transport); err != nil {
		return fmt.Errorf("--transport: %w", err)
	}
	refs, err := f.swept()
	if err != nil {
		return err
	}
	f.Senders = nil
	for _, ref := range refs {
		senders, err := bench.ParseSender(ref+"@"+bench.EnvelopeSim, nil)
		if err != nil {
			return fmt.Errorf("--algorithm: %w", err)
		}
		senders[0].Name, senders[0].Transport = ref, f.transport
		f.Senders = append(f.Senders, senders[0])
	}
	return nil
}

// swept returns the algorithms with every combination of the swept values.
func (f *simFlags) swept() ([]string, error) {
	refs := f.senders
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

// commonStep returns the greatest common divisor: samples at its multiples are among those of both.
func commonStep(a, b time.Duration) time.Duration {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// course is a run with its samples, for --trace-out.
type course struct {
	record.Run
	flows []sim.FlowResult
}

// writeTraces makes the file of --trace-out, if there is to be one.
func (f *simFlags) writeTraces() error {
	if len(f.traced) == 0 {
		return nil
	}
	err := output.Write(f.traceOut, func(w io.Writer) error {
		buffered := bufio.NewWriter(w)
		for _, r := range f.traced {
			if err := f.writeSamples(buffered, r); err != nil {
				return err
			}
		}
		return buffered.Flush()
	})
	if err != nil {
		return fmt.Errorf("--trace-out: %w", err)
	}
	return nil
}

// simSample is one line of --trace-out.
type simSample struct {
	Experiment string  `json:"experiment"`
	Run        string  `json:"run"`
	Path       string  `json:"path"`
	Flow       string  `json:"flow"`
	At         float64 `json:"time_seconds"`

	Cwnd      cc.Bytes `json:"cwnd_bytes"`
	Share     cc.Bytes `json:"share_bytes"`
	Inflight  cc.Bytes `json:"inflight_bytes"`
	Pacing    cc.Rate  `json:"pacing_bits_per_second"`
	SRTT      float64  `json:"srtt_seconds"`
	RTT       float64  `json:"rtt_seconds"`
	MinRTT    float64  `json:"min_rtt_seconds"`
	Reverse   float64  `json:"reverse_queue_seconds"`
	Delivered cc.Bytes `json:"delivered_bytes"`
	Backlog   cc.Bytes `json:"queue_bytes"`
	Phase     string   `json:"phase"`

	Internals telemetry.Internals `json:"internals,omitempty"`
}

func (f *simFlags) writeSamples(w io.Writer, run course) error {
	enc, path := json.NewEncoder(w), run.Path()
	for _, one := range run.flows {
		for _, s := range one.Samples {
			if s.At%f.every != 0 {
				continue
			}
			if err := enc.Encode(simSample{
				Experiment: run.Experiment, Run: run.Name, Path: path, Flow: one.Name, At: s.At.Seconds(),
				Cwnd: s.Cwnd, Share: s.Share, Inflight: s.Inflight, Pacing: s.PacingRate,
				SRTT: s.SRTT.Seconds(), RTT: s.LatestRTT.Seconds(), MinRTT: s.MinRTT.Seconds(),
				Reverse:   s.ReverseQueue.Seconds(),
				Delivered: s.Delivered, Backlog: s.Backlog, Phase: s.Phase,
				Internals: telemetry.InternalsOf(s.Algorithm, s.Internals),
			}); err != nil {
				return err
			}
		}
	}
	return nil
}
