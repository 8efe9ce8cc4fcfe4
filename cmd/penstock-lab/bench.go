package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/lab/report"
	"github.com/penstock-net/penstock/internal/netlab"
)

// benchFlags are the flags of bench as written.
type benchFlags struct {
	senders, envelopes, links, buffers []string
	delays                             string
	up, aqm                            string
	delay, duration, sample, reorderBy time.Duration
	losses                             []float64
	reorder                            float64
	seeds                              []uint
	runs                               int
	ingress                            string
	retry, packets                     bool
	hints                              time.Duration
	agents                             []string
	outputs                            benchOutputs
}

// benchOutputs is where results go beside the table.
type benchOutputs struct {
	json, plot, report string
	windows            bool // with what the kernel made of our window
}

func benchCommand() *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:   "bench",
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
virtual time, for as long and counted alike: what it comes to by itself, on any
machine. Nothing is late there, and there is no proxy whose time or packets could
be looked at. The transport is that of the same algorithm's real senders: the
kernel's, which enforces the window, with acknowledgements that Linux delays; the
relay's where all of those are over bbr, cubic, reno or wireguard. "penstock-lab bench
fidelity" compares the two over several links.

A link is a rate (12mbit), a trace file in Mahimahi's format, or a generated
trace (generate:lte, generate:lte:7 with a seed). It carries the same in both
directions unless --up says otherwise. Several values of --loss share one table,
each sender beside what it has without.

Throughput and delays are those of the link's own record, from the first data
packet on; queueing is from a packet's arrival at the queue until its last byte
has left it. With --packets what leaves towards the client is recorded too. In
flight is what was sent and not acknowledged, selectively or not; the pipe leaves
out what is lost (RFC 6675). Of a sender with a fixed pacing rate, as in
static:cwnd_packets=50,pacing_mbit=8, gaps are also given as multiples of the
one that rate asks for.

The network is made of namespaces: run it as root, or as a user
where user namespaces are allowed.`,
		Example: `  penstock-lab bench --sender cubic --sender bbr --sender copa --link generate:lte --buffer 2MB
  penstock-lab bench --sender cubic --sender copa:delta=0.5 --sender copa:alcc --link Verizon-LTE-short.down --runs 5 --json runs.jsonl --plot out.png
  penstock-lab bench --sender cubic --sender static:cwnd_packets=22 --link 12mbit --delay 10ms --buffer 250pkt
  penstock-lab bench --sender cubic --sender bbr --sender copa --envelope ebpf,bbr,cubic --link 12mbit --loss 0,0.01,0.03
  penstock-lab bench --sender copa --sender copa@sim --link generate:lte
  penstock-lab bench --sender penstock@wireguard --sender penstock@sim --link generate:lte --duration 20s
  penstock-lab bench --sender pbe --sender nacc:wired --sender copa --link generate:lte --hints 20ms
  penstock-lab bench --sender ccp:mine --sender ccp:mine@sim --agent mine=/tmp/mine.sock --link generate:lte
  penstock-lab bench --sender static:cwnd_packets=50,pacing_mbit=8@ebpf --sender static:cwnd_packets=50,pacing_mbit=8@bbr --link 12mbit --packets`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := f.plan()
			if err != nil {
				return cli.BadInput(err)
			}
			results, err := runPlan(cmd, plan, f.outputs)
			return errors.Join(err, f.outputs.write(cmd, results))
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&f.senders, "sender", []string{"cubic", "bbr", cc.Default}, "who sends; repeat for several")
	flags.StringSliceVar(&f.envelopes, "envelope", nil,
		"what is below the algorithm: ebpf, bbr, cubic, reno or wireguard at the proxy, "+
			"native (nothing: the server sends with it over UDP), or sim; several for each in turn (default: the proxy's)")
	flags.StringArrayVar(&f.links, "link", []string{"generate:lte"},
		"rate, trace file or generate:NAME[:SEED]; repeat for several")
	flags.StringVar(&f.up, "up", "", "what the link carries towards the server (default: the same as towards the "+
		"client)")
	flags.StringSliceVar(&f.buffers, "buffer", []string{"2MB"},
		"limit of the queue, each way: bytes (2MB), packets (250pkt) or none; several for each in turn")
	flags.DurationVar(&f.delay, "delay", 10*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.delays, "delay-trace", "",
		"propagation that moves, in place of --delay: a `FILE` with one delay in ms, one way, for each 10 ms")
	flags.Float64SliceVar(&f.losses, "loss", []float64{0},
		"probability that a packet towards the client is lost at random; several for each in turn")
	flags.Lookup("loss").DefValue = "[0]" // not with the six decimals of the library
	flags.StringVar(&f.aqm, "aqm", sim.DropTail.String(),
		"how the queue towards the client is managed: droptail, codel (RFC 8289), fq_codel (RFC 8290), pie (RFC "+
			"8033) or dualpi2 (RFC 9332), "+
			"all but the first with ECN marks")
	flags.Float64Var(&f.reorder, "reorder", 0, "probability that a packet towards the client takes --reorder-by "+
		"longer, so that later ones overtake it")
	flags.DurationVar(&f.reorderBy, "reorder-by", 5*time.Millisecond, "how much longer those packets take")
	flags.DurationVar(&f.duration, "duration", 30*time.Second, "length of a run, from the first data packet")
	flags.IntVar(&f.runs, "runs", 1, "runs for each seed")
	flags.UintSliceVar(&f.seeds, "seeds", []uint{1}, "seeds of random loss, and of generated traces that name none")
	flags.StringVar(&f.ingress, "ingress", string(bench.IngressTPROXY),
		"how the download gets into the proxy: tproxy (captured) or forward")
	flags.DurationVar(&f.sample, "sample", 50*time.Millisecond,
		"how often to look at the proxy's window and the kernel's, which costs the proxy a little CPU; 0: never")
	flags.BoolVar(&f.packets, "packets", false, "record each packet at the edge's device towards the client: how "+
		"many are in flight, and the gaps between them")
	flags.DurationVar(&f.hints, "hints", 0, "how often the link tells the proxy of its capacity, as a base station "+
		"would, half a round trip late; 0: never")
	flags.StringArrayVar(&f.agents, agents.Flag, nil, agents.Usage)
	flags.BoolVar(&f.retry, "retry-noisy", false, "repeat a run once when the machine disturbed it")
	f.outputs.register(cmd)
	f.outputs.windows = true
	cmd.AddCommand(fidelityCommand(), recipeCommand())
	return cmd
}

func (o *benchOutputs) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.json, "json", "", "append one JSON line for each run to this file")
	cmd.Flags().StringVar(&o.report, "report", "", "make a page of the runs, with tables and figures, as the "+
		"command report does")
	cmd.Flags().StringVar(&o.plot, "plot", "", "draw throughput and queueing delay over time into this .png file")
}

// check finds mistakes that would otherwise show after a long run.
func (o *benchOutputs) check() error {
	if o.plot != "" && !strings.HasSuffix(o.plot, ".png") {
		return fmt.Errorf("--plot %s: the name must end in .png", o.plot)
	}
	return nil
}

// open opens the file of --json, and finds out whether the others can be made.
func (o *benchOutputs) open() (record io.Writer, done func() error, err error) {
	for flag, path := range map[string]string{"plot": o.plot, "report": o.report} {
		if path == "" {
			continue
		}
		if err := output.Check(path); err != nil {
			return nil, nil, fmt.Errorf("--%s: %w", flag, err)
		}
	}
	if o.json == "" {
		return io.Discard, func() error { return nil }, nil
	}
	f, err := output.Append(o.json)
	if err != nil {
		return nil, nil, fmt.Errorf("--json: %w", err)
	}
	return f, f.Close, nil
}

// plan reads the flags.
func (f *benchFlags) plan() (bench.Plan, error) {
	p := bench.Plan{
		Delay: f.delay, Losses: f.losses, Duration: f.duration, Runs: f.runs, Ingress: bench.Ingress(f.ingress),
		Sample: f.sample, Late: netlab.Late, Retry: f.retry, Packets: f.packets, Hints: f.hints,
	}
	if f.reorder != 0 {
		p.Reorder, p.ReorderBy = f.reorder, f.reorderBy
	}
	var err error
	if p.Agents, err = agents.Parse(f.agents); err != nil {
		return p, err
	}
	if p.AQM, err = sim.ParseAQM(f.aqm); err != nil {
		return p, fmt.Errorf("--aqm: %w", err)
	}
	if f.delays != "" {
		if p.Delays, err = bench.ReadDelayTrace(f.delays); err != nil {
			return p, fmt.Errorf("--delay-trace: %w", err)
		}
	}
	if p.Senders, err = bench.ParseSenders(f.senders, f.envelopes); err != nil {
		return p, err
	}
	for _, spec := range f.links {
		link, err := bench.ParseLink(spec)
		if err != nil {
			return p, fmt.Errorf("--link: %w", err)
		}
		p.Links = append(p.Links, link)
	}
	if f.up != "" {
		up, err := bench.ParseLink(f.up)
		if err != nil {
			return p, fmt.Errorf("--up: %w", err)
		}
		p.Up = &up
	}
	for _, spec := range f.buffers {
		buffer, err := bench.ParseBuffer(spec)
		if err != nil {
			return p, fmt.Errorf("--buffer: %w", err)
		}
		p.Buffers = append(p.Buffers, buffer)
	}
	for _, s := range f.seeds {
		p.Seeds = append(p.Seeds, uint64(s))
	}
	return p, errors.Join(p.Validate(), f.outputs.check())
}

// runPlan carries the plan out, with progress on standard error, and returns
// what was finished even when it was interrupted.
func runPlan(cmd *cobra.Command, plan bench.Plan, out benchOutputs) (results []bench.Result, err error) {
	var exe string
	if plan.Real() {
		// Without the rights this runs the whole program again inside a user
		// namespace; that run has printed everything by then.
		code, ran, err := netlab.Enter()
		if err != nil {
			return nil, err
		}
		if ran {
			os.Exit(code)
		}
		if exe, err = proxyOf(cmd); err != nil {
			return nil, err
		}
	}
	record, done, err := out.open()
	if err != nil {
		return nil, cli.BadInput(err)
	}
	defer func() { err = errors.Join(err, done()) }()
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	printer := bench.NewPrinter(cmd.ErrOrStderr())
	defer printer.Break()
	plan.Models = cli.Models(cmd)
	b := bench.Bench{Executable: exe, Version: cli.ReadBuild().String(), Progress: printer.Show}
	return b.Run(ctx, plan, func(r bench.Result) error { return bench.WriteJSON(record, r) })
}

// write prints the tables and draws the plots of what was finished.
func (o *benchOutputs) write(cmd *cobra.Command, results []bench.Result) error {
	if len(results) == 0 {
		return nil
	}
	if err := bench.WriteTables(cmd.OutOrStdout(), results, o.windows); err != nil {
		return err
	}
	if o.report != "" {
		name := filepath.Base(o.report)
		if err := writeReport(cmd, o.report, []report.File{{
			Name:    strings.TrimSuffix(name, filepath.Ext(name)),
			Results: results,
		}}); err != nil {
			return fmt.Errorf("--report: %w", err)
		}
	}
	if o.plot == "" {
		return nil
	}
	names, err := bench.WritePlots(o.plot, results)
	for _, name := range names {
		fmt.Fprintf(cmd.ErrOrStderr(), "drawn: %s\n", name)
	}
	return err
}
