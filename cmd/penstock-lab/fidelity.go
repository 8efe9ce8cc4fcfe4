package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// fidelityFlags are the flags of bench fidelity as written.
type fidelityFlags struct {
	benchFlags
	algorithms     []string
	against, model string
	traces         []string
	links          int
	buffer         string
}

// maxFidelityLinks bounds --links.
const maxFidelityLinks = 1000

func fidelityCommand() *cobra.Command {
	var f fidelityFlags
	cmd := &cobra.Command{
		Use:   "fidelity",
		Short: "Compare real runs with virtual time, or with native senders",
		Long: `Fidelity runs each algorithm through a real proxy over several generated links,
and in virtual time over the same links with the same seeds and the transport that
the real runs have: the kernel's with ebpf, else the relay's. It prints by how
much the real runs differ from those in virtual time, link by link: the mean in
per cent, the median, the standard deviation over the links, and the standard error
of the mean. A mean of less than two standard errors is no difference that these
links can show.

With --against native the reference is the same algorithm with nothing below it: it
sends over UDP, from the server, with an acknowledgement for each packet. That is what
the papers call native, and what layering over TCP costs is the difference.

The network is made of namespaces: run it as root, or as a user where user
namespaces are allowed.`,
		Example: `  sudo penstock-lab bench fidelity -a penstock,copa,cubic
  sudo penstock-lab bench fidelity -a static:cwnd_packets=50,pacing_mbit=8 --links 20 --duration 60s --json runs.jsonl
  sudo penstock-lab bench fidelity -a penstock,copa --envelope wireguard
  sudo penstock-lab bench fidelity -a copa,verus,sprout,bbr --against native --envelope cubic,reno,bbr,ebpf \
      --trace Verizon-LTE-short.down --duration 60s`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			experiment, err := f.experiment()
			if err != nil {
				return cli.BadInput(err)
			}
			runs, err := f.play(cmd, experiment)
			if len(runs) == 0 {
				return err
			}
			return errors.Join(err, bench.WriteFidelities(cmd.OutOrStdout(), runs, f.against))
		},
	}
	flags := cmd.Flags()
	f.algorithms = []string{cc.Default}
	flags.VarP(&names{list: &f.algorithms}, "algorithm", "a",
		"`ALGORITHMS` to compare, separated by commas, with settings as in copa:delta=0.1")
	flags.StringSliceVar(&f.envelopes, "envelope", []string{"ebpf"},
		"what keeps the window of the real runs: ebpf, bbr, cubic, reno or wireguard; or several, separated by commas")
	flags.StringVar(&f.against, "against", bench.EnvelopeSim, "the reference: sim, virtual time; or native")
	flags.StringArrayVar(&f.traces, "trace", nil,
		"play this recorded trace, in Mahimahi's format, in place of generated links; repeat for several")
	flags.IntVar(&f.links, "links", 5, "how many links are drawn, with the seeds from 1 on; or runs over each trace")
	flags.StringVar(&f.model, "generate", "lte", "`MODEL` that links are drawn from")
	flags.DurationVar(&f.Delay, "delay", 10*time.Millisecond, "propagation, each way")
	flags.StringVar(&f.buffer, "buffer", "2MB", "drop-tail queue, each way: bytes (2MB), packets (250pkt) or none")
	flags.DurationVar(&f.Duration, "duration", 20*time.Second, "length of a run, from the first data packet")
	flags.DurationVar(&f.Hints, "hints", 0,
		"how often the link tells the proxy of its capacity, as a base station would, half a round trip late; 0: never")
	flags.BoolVar(&f.retry, "retry-noisy", false, "repeat a run once when the machine disturbed it")
	f.outputs.register(cmd)
	return cmd
}

// experiment is every algorithm on every link, for real and beside what it is held against.
func (f *fidelityFlags) experiment() (r recipe.Recipe, err error) {
	if f.links < 1 || f.links > maxFidelityLinks {
		return r, fmt.Errorf("--links is %d, but must be from 1 to %d", f.links, maxFidelityLinks)
	}
	f.runs, f.seeds = 1, nil
	for seed := range f.links {
		f.seeds = append(f.seeds, uint(seed)+1)
	}
	if f.against != bench.EnvelopeSim && f.against != bench.EnvelopeNative {
		return r, fmt.Errorf("--against %q: must be %s or %s", f.against, bench.EnvelopeSim, bench.EnvelopeNative)
	}
	for _, e := range f.envelopes {
		if !slices.Contains(bench.ProxyEnvelopes, e) {
			return r, fmt.Errorf("--envelope %q: must be one of %s, for the real runs", e,
				strings.Join(bench.ProxyEnvelopes, ", "))
		}
	}
	for _, a := range f.algorithms {
		for _, envelope := range append(slices.Clone(f.envelopes), f.against) {
			senders, err := bench.ParseSender(a+"@"+envelope, nil)
			if err != nil {
				return r, fmt.Errorf("--algorithm %q: %w", a, err)
			}
			f.Senders = append(f.Senders, senders...)
		}
	}
	f.Name, f.Up, f.Losses, f.AQM, f.blind = "fidelity", record.Same, []float64{0}, sim.DropTail.String(), true
	f.Links, f.Buffers = f.traces, []string{f.buffer}
	if len(f.Links) == 0 {
		if _, err := sim.Model(f.model); err != nil { // a link would take a seed behind it
			return r, fmt.Errorf("--generate: %w", err)
		}
		f.Links = []string{"generate:" + f.model}
	}
	if f.Duration < shortest {
		return r, fmt.Errorf("--duration %s: must be at least %s", f.Duration, shortest)
	}
	if err := f.outputs.check(f.traces...); err != nil {
		return r, err
	}
	r, err = f.Experiment()
	if err != nil {
		err = errors.New(strings.Replace(err.Error(), "--link:", "--trace:", 1))
	}
	return r, err
}
