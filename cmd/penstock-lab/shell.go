package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/netlab"
)

// noEdge is the edge that only routes.
const noEdge = "none"

// shellFlags are the flags of shell as written.
type shellFlags struct {
	bench.Matrix
	session       // its command is without the program's own words, which may be secrets
	edges, agents []string
	link, buffer  string
	loss          float64
	seed          uint64
	hold          bool
	pcap          string

	experiment recipe.Recipe
}

func shellCommand() *cobra.Command {
	var f shellFlags
	cmd := &cobra.Command{
		Use:   "shell [flags] [--] [COMMAND [ARGUMENT...]]",
		Short: "Run any program behind an emulated link",
		Long: `Shell runs a program, such as curl, iperf3 or a browser, on a host of its own
behind an emulated link. Without a COMMAND it runs your shell. While the program
runs, the terminal shows what passes the link; at its end there is a summary. Both
are on standard error: the program's output, signals and exit code are its own.

The program reaches what this machine reaches, by the same names and addresses.
Servers on this machine's loopback have the address ` + shellHost + `, which is in
$` + stage.HostVariable + ` as well. A connection ends behind the link and goes on from this
machine, so that a server that refuses one shows as a reset.

--edge says what stands in front of the link: none, which only routes, so that the
kernel's cubic sends; cubic, bbr or reno of the kernel by name; penstock, or any
algorithm of Penstock's, through a real proxy process that captures all TCP. Of
several edges each gets a run of the program, in order, and the summary compares
them. With --hold the proxy holds UDP as well, such as HTTP/3.

A link is what bench has: a rate, a trace file, a generated or a recorded trace. It
begins with the program, and a trace repeats. The network is made of namespaces: run
it as root, or as a user where user namespaces are allowed; the program runs as you.`,
		Example: `  penstock-lab shell --link 12mbit
  penstock-lab shell --link generate:lte --edge none,penstock -- curl -o /dev/null http://10.77.2.2:8000/file
  penstock-lab shell --link recorded:city-drive --edge penstock --pcap run.pcap -- iperf3 -c 10.77.2.2 -R
  penstock-lab shell --link 20mbit --buffer 1MB --edge bbr --record runs.jsonl -- chromium --incognito
  penstock-lab shell --link 50mbit --up 5mbit --delay 30ms --edge penstock --hold --plot out.png -- mpv URL`,
		RunE: func(cmd *cobra.Command, command []string) error {
			f.cmd, f.command = cmd, commandLine(os.Args[:len(os.Args)-len(command)])
			if len(command) == 0 {
				command = []string{cmp.Or(os.Getenv("SHELL"), "/bin/sh")}
			}
			return f.runAtEdges(command)
		},
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows the program is the program's
	f.Name, f.Duration, f.ReorderBy = "shell", time.Hour, 5*time.Millisecond
	f.edges = []string{noEdge}
	flags.Var(&names{list: &f.edges}, "edge", "what sends into the link: none, penstock or another of bench's "+
		"`SENDERS`, separated by commas")
	flags.StringVar(&f.link, "link", "generate:lte", "rate, trace file, generate:NAME[:SEED] or recorded:NAME")
	flags.StringVar(&f.Up, "up", record.Same, "what the link carries towards the server")
	flags.StringVar(&f.buffer, "buffer", "2MB", "limit of the queue, each way: bytes (2MB), packets (250pkt) or none")
	flags.DurationVar(&f.Delay, "delay", 10*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.DelayTrace, "delay-trace", "", "propagation that moves, in place of --delay, as bench has it")
	flags.Float64Var(&f.loss, "loss", 0, "probability that a packet towards the program is lost at random")
	flags.StringVar(&f.AQM, "aqm", sim.DropTail.String(), "how the queue towards the program is managed: "+managements)
	flags.Uint64Var(&f.seed, "seed", 1, "seed of random loss, and of generated traces that name none")
	flags.StringArrayVar(&f.agents, agents.Flag, nil, agents.Usage)
	flags.BoolVar(&f.hold, "hold", false, "have the proxy hold UDP towards the program until its window has room")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "show nothing while the program runs")
	flags.StringVar(&f.pcap, "pcap", "", "write the packets' headers, as the program's host sees them, to this file; "+
		"of several edges, to one file each")
	flags.StringVar(&f.json, "record", "", "append one JSON line for each run to this file, as bench "+
		"--json does")
	flags.StringVar(&f.report, "report", "", "make a page of the runs, as the command report does")
	flags.StringVar(&f.plot, "plot", "", "draw the course of the runs into this .png, .pdf or .svg file")
	return cmd
}

// shellHost is the address of the machine's own servers, seen from behind the link.
const shellHost = "10.77.2.2"

// readStages returns the runs that the flags describe.
func (f *shellFlags) readStages(command []string) (all []stage.Stage, err error) {
	if err := f.outputs.check(f.link, f.Up, f.DelayTrace); err != nil {
		return nil, err
	}
	if err := output.Apart([]string{f.pcap, f.json, f.report, f.plot}); err != nil {
		return nil, err
	}
	f.Links, f.Buffers, f.Losses = []string{f.link}, []string{f.buffer}, []float64{f.loss}
	if f.Agents, err = agents.Parse(f.agents); err != nil {
		return nil, err
	}
	senders := slices.Clone(f.edges)
	for i, name := range senders {
		if name == noEdge {
			senders[i] = bench.KernelAlgorithms[0]
		}
	}
	if f.Senders, err = bench.ParseSenders(senders, nil); err != nil {
		return nil, fmt.Errorf("--edge: %w", err)
	}
	for _, s := range f.Senders {
		if s.Virtual() || s.Native() || s.Tunnelled() {
			return nil, fmt.Errorf("--edge %s: a program needs an edge over the kernel's TCP: leave out %s", s.Name,
				"@"+s.Envelope)
		}
		if s.Kernel != "" && f.hold {
			return nil, fmt.Errorf("--hold: %s has no proxy that could hold UDP: name another --edge", s.Name)
		}
	}
	f.experiment, err = f.Experiment()
	if err == nil {
		all, err = f.experiment.Stages(recipe.Full, f.seed)
	}
	for i := range all {
		all[i].Hold = f.hold
		all[i].Actors[0].Name = filepath.Base(command[0])
	}
	return all, err
}

// runAtEdges runs the program at each edge, and writes what came of it.
func (f *shellFlags) runAtEdges(command []string) (err error) {
	stages, err := f.readStages(command)
	if err != nil {
		return cli.BadInput(err)
	}
	code, ran, err := netlab.Enter()
	if err != nil {
		return err
	}
	if ran {
		return statusError(code)
	}
	done, err := f.open()
	if err != nil {
		return cli.BadInput(err)
	}
	defer func() { err = errors.Join(err, done()) }()
	if slices.ContainsFunc(stages, func(s stage.Stage) bool { return s.Edge != "" }) {
		if err := f.findProxy(); err != nil {
			return err
		}
	}
	// The summary is not the program's output.
	stdout := f.cmd.OutOrStdout()
	f.cmd.SetOut(f.cmd.ErrOrStderr())
	defer f.cmd.SetOut(stdout)
	for i, s := range stages {
		run, exit, err := f.runAtEdge(s, i, command)
		if err == nil {
			f.all = append(f.all, run)
			err = record.Write(f.file, run)
		}
		if err != nil {
			return err
		}
		if code = exit; code != 0 { // one that is stopped by hand is not begun again
			break
		}
	}
	if err := errors.Join(f.writePage(), f.tables()); err != nil {
		return err
	}
	return statusError(code)
}

// runAtEdge runs the program at edge i, which is a stage's, and records its packets.
func (f *shellFlags) runAtEdge(s stage.Stage, i int, command []string) (run record.Run, code int, err error) {
	name := s.Name
	if f.edges[i] == noEdge {
		name, s.Name = noEdge, noEdge
	}
	screen := &screen{w: f.cmd.ErrOrStderr(), edge: name, quiet: f.quiet, titled: isInteractive(command)}
	p := stage.Program{Args: command, Tell: screen.show, Ready: func(host netlab.Addrs) {
		if !f.quiet {
			link := strings.TrimSuffix(record.PathOf(s), ", 3600 s")
			fmt.Fprintf(screen.w, "link: %s; edge: %s; this machine's own servers: %s, [%s]\n", link, name, host.V4,
				host.V6)
		}
	}}
	if f.pcap == "" {
		return f.recordRun(s, p, screen)
	}
	path := f.pcap
	if len(f.edges) > 1 {
		end := filepath.Ext(path)
		path = fmt.Sprintf("%s-%s%s", path[:len(path)-len(end)], name, end)
	}
	err = output.Write(path, func(w io.Writer) error {
		p.Pcap = w
		run, code, err = f.recordRun(s, p, screen)
		return err
	})
	return run, code, err
}

// recordRun returns the record of one run, and the program's exit code.
func (f *shellFlags) recordRun(s stage.Stage, p stage.Program, screen *screen) (run record.Run, code int, err error) {
	code, s, rec, err := stage.RunProgram(f.cmd.Context(), f.env, s, p)
	screen.clear()
	if err != nil {
		return run, code, err
	}
	run = f.record(f.experiment, s, rec, f.seed)
	run.Program = filepath.Base(p.Args[0])
	return run, code, nil
}

// statusError is the error of a program's exit code; nil: it succeeded.
func statusError(code int) error {
	if code == 0 {
		return nil
	}
	return cli.Status(code)
}

// isInteractive reports whether the program has the screen to itself.
func isInteractive(command []string) bool {
	return len(command) == 1 && slices.Contains([]string{"sh", "bash", "zsh", "fish", "dash", "ksh"},
		filepath.Base(command[0]))
}

// screen shows what passes the link while a program runs: on a line of the terminal, or in its title where the
// program has the screen. It shows nothing where standard error is no terminal.
type screen struct {
	w             io.Writer
	edge          string
	quiet, titled bool
	shown         bool
}

// show takes the place of the figures before.
func (s *screen) show(elapsed time.Duration, second netlab.Report) {
	f, ok := s.w.(*os.File)
	if s.quiet || !ok || !term.IsTerminal(int(f.Fd())) {
		return
	}
	s.shown = true
	text := fmt.Sprintf("%s %.0f s: down %s, up %s", s.edge, elapsed.Seconds(), formatDirection(second.Down),
		formatDirection(second.Up))
	if s.titled {
		fmt.Fprintf(s.w, "\x1b]0;%s\a", text)
	} else {
		fmt.Fprintf(s.w, "\r\x1b[K%s", text)
	}
}

// clear takes the figures away.
func (s *screen) clear() {
	switch {
	case !s.shown:
	case s.titled:
		fmt.Fprint(s.w, "\x1b]0;\a")
	default:
		fmt.Fprint(s.w, "\r\x1b[K")
	}
}

// formatDirection writes the figures of one direction: rate, and queueing delay of its data packets at p50 and p95.
func formatDirection(r netlab.DirectionReport) string {
	q := r.DataQueueing
	if q.Count == 0 {
		q = r.Queueing
	}
	return fmt.Sprintf("%.2f Mbit/s, queueing %.0f/%.0f ms", r.Throughput.Mbps(), record.Millis(q.P50),
		record.Millis(q.P95))
}
