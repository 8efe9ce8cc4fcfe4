package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/report"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// fidelityFlags are the flags of bench fidelity as written.
type fidelityFlags struct {
	benchFlags
	against string
	links   int
}

// maxFidelityLinks bounds --links.
const maxFidelityLinks = 1000

func fidelityCommand() *cobra.Command {
	f := fidelityFlags{benchFlags: benchFlags{
		Matrix: bench.Matrix{Name: "fidelity"}, senders: []string{cc.Default}, firstSeeds: []uint{1}, runs: 1,
		session: session{env: stage.Env{Blind: true}},
	}}
	cmd := &cobra.Command{
		Use:   "fidelity",
		Short: "Compare real runs with virtual time, or with native senders",
		Long: `Fidelity runs each algorithm through a real proxy over several generated links,
and in virtual time over the same links with the same seeds and the transport that
the real runs have: the kernel's with ebpf, else the relay's. Behind the table of
bench it prints the real runs' figures as ratios to those in virtual time: geometric
means over the links, and the 95 % interval of a bootstrap. An interval that has 1 in
it is no difference that these links can show.

With --against native the reference is the same algorithm with nothing below it: it
sends over UDP, from the server, with an acknowledgement for each packet. That is what
the papers call native, and what layering over TCP costs is the difference.

The network is made of namespaces: run it as root, or as a user where user
namespaces are allowed.`,
		Example: `  sudo penstock-lab bench fidelity -a penstock,copa,cubic
  sudo penstock-lab bench fidelity -a static:cwnd_packets=50,pacing_mbit=8 --links 20 --duration 60s --json runs.jsonl
  sudo penstock-lab bench fidelity -a penstock,copa --envelope wireguard
  sudo penstock-lab bench fidelity -a copa,verus,sprout,bbr --against native --envelope cubic,reno,bbr,ebpf \
      --link Verizon-LTE-short.down --duration 60s`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			experiments, err := f.readExperiments(cmd, nil, f.readSenders)
			if err != nil {
				return cli.BadInput(err)
			}
			err = f.playSeeds(cmd, experiments)
			if len(f.all) == 0 {
				return err
			}
			return errors.Join(err, f.tables(), f.compare(cmd.OutOrStdout(), f.all))
		},
	}
	f.register(cmd)
	flags := cmd.Flags()
	flags.Lookup("duration").DefValue, f.Duration = "20s", 20*time.Second
	flags.VarP(&names{list: &f.senders}, "algorithm", "a",
		"`ALGORITHMS` to compare, separated by commas, with settings as in copa:delta=0.1")
	flags.StringSliceVar(&f.envelopes, "envelope", []string{"ebpf"},
		"what keeps the window of the real runs: ebpf, bbr, cubic, reno or wireguard; or several, separated by commas")
	flags.StringVar(&f.against, "against", bench.EnvelopeSim, "the reference: sim, virtual time; or native")
	flags.IntVar(&f.links, "links", 5, "how many links are drawn, with the seeds from 1 on; or runs over each "+
		"trace, which begin at different moments of it")
	flags.BoolVar(&f.retryNoisy, "retry-noisy", false, "repeat a run once when the machine disturbed it")
	return cmd
}

// readSenders reads every algorithm, over real sockets and beside what it is held against.
func (f *fidelityFlags) readSenders() error {
	if f.links < 1 || f.links > maxFidelityLinks {
		return fmt.Errorf("--links is %d, but must be from 1 to %d", f.links, maxFidelityLinks)
	}
	f.runs = f.links
	if f.against != bench.EnvelopeSim && f.against != bench.EnvelopeNative {
		return fmt.Errorf("--against %q: must be %s or %s", f.against, bench.EnvelopeSim, bench.EnvelopeNative)
	}
	if len(f.envelopes) == 0 {
		return errors.New("--envelope is empty, and there is nothing to compare: name one, such as ebpf")
	}
	for _, e := range f.envelopes {
		if !slices.Contains(bench.ProxyEnvelopes, e) {
			return fmt.Errorf("--envelope %q: must be one of %s, for the real runs", e,
				strings.Join(bench.ProxyEnvelopes, ", "))
		}
	}
	f.Senders = nil
	for _, a := range f.senders {
		for _, envelope := range append(slices.Clone(f.envelopes), f.against) {
			senders, err := bench.ParseSender(a+"@"+envelope, nil)
			if err != nil {
				return fmt.Errorf("--algorithm %q: %w", a, err)
			}
			f.Senders = append(f.Senders, senders...)
		}
	}
	return nil
}

// compare writes the figures of each envelope as ratios to the reference's, over the pairs of runs with one link.
func (f *fidelityFlags) compare(w io.Writer, runs []record.Run) error {
	// What tells the two apart is taken out: they are rows of one sender then.
	pick := func(envelope string) (all []record.Run) {
		for _, r := range runs {
			if r.Name == r.Algorithm+"@"+envelope {
				r.Name, r.Virtual, r.Transport, r.Envelope = r.Algorithm, false, "", ""
				all = append(all, r)
			}
		}
		return all
	}
	reference := report.File{Name: f.against, Runs: pick(f.against)}
	for _, envelope := range f.envelopes {
		found := report.File{Name: envelope, Runs: pick(envelope)}
		fmt.Fprintln(w)
		if err := report.WriteComparison(w, []report.File{reference, found}); err != nil {
			return err
		}
	}
	return nil
}
