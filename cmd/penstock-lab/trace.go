package main

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/linktrace"
	"github.com/penstock-net/penstock/internal/lab/output"
)

func traceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Describe, convert, generate and record traces of links",
		Long: `A trace is what a link carried: each line the millisecond at which 1500 bytes may
leave (Mahimahi's format), which sim, bench and experiments play. They read a .csv
of times in seconds and rates in Mbit/s as well.`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	cmd.AddCommand(traceInfoCommand(), traceConvertCommand(), traceGenerateCommand(),
		traceRecordCommand(), traceServeCommand())
	return cmd
}

func traceInfoCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "info FILE...",
		Short:   "Say what traces carry",
		Example: "  penstock-lab trace info Verizon-LTE-short.down",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, files []string) error {
			t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(t, "TRACE\tSECONDS\tMBIT/S MEAN\tP5\tP50\tP95\tLONGEST GAP MS\tOPPORTUNITIES")
			for _, name := range files {
				trace, err := linktrace.OpenTrace(name, linktrace.Read)
				if err != nil {
					return cli.BadInput(err)
				}
				s := linktrace.Summarise(trace)
				fmt.Fprintf(t, "%s\t%.3f\t%.2f\t%.2f\t%.2f\t%.2f\t%d\t%d\n", filepath.Base(name), s.Length.Seconds(),
					s.Mean.Mbps(), s.P5.Mbps(), s.P50.Mbps(), s.P95.Mbps(), s.Gap.Milliseconds(), s.Opportunities)
			}
			return t.Flush()
		},
	}
}

func traceConvertCommand() *cobra.Command {
	var to string
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "convert FROM TO",
		Short: "Convert rates over time to a trace, and back",
		Long: `Convert reads lines of a time in seconds and a rate in Mbit/s, as data sets of
measurements have them, and writes a trace; or with --to rates reads a trace and
writes such lines: their last span may carry less, as the trace ends within it.`,
		Example: `  penstock-lab trace convert 5g-throughput.csv 5g.trace
  penstock-lab trace convert --to rates --every 100ms Verizon-LTE-short.down verizon.csv`,
		Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, names []string) error {
			if every < time.Millisecond || every%time.Millisecond != 0 {
				return cli.BadInput(fmt.Errorf("--every is %v, but must be whole milliseconds, such as 1s", every))
			}
			if err := output.Apart(names[1:], names[0]); err != nil {
				return cli.BadInput(err)
			}
			switch to {
			case "rates":
				trace, err := linktrace.OpenTrace(names[0], linktrace.Read)
				if err == nil && every >= trace.Duration() {
					err = fmt.Errorf("--every is %v, but must be shorter than the trace of %v: rates are two at least",
						every, trace.Duration())
				}
				if err != nil {
					return cli.BadInput(err)
				}
				return written(names[1], func(w io.Writer) error { return linktrace.WriteRates(w, trace, every) })
			case "trace":
				trace, err := linktrace.OpenTrace(names[0], linktrace.ReadRates)
				if err != nil {
					return cli.BadInput(err)
				}
				return writeTraceTo(names[1], trace)
			}
			return cli.BadInput(fmt.Errorf("--to is %q, but must be trace or rates", to))
		},
	}
	cmd.Flags().StringVar(&to, "to", "trace", "what is written: trace or rates")
	cmd.Flags().DurationVar(&every, "every", time.Second, "with --to rates, over which span each rate is")
	return cmd
}

func traceGenerateCommand() *cobra.Command {
	var seed uint64
	var d time.Duration
	cmd := &cobra.Command{
		Use:     "generate MODEL TO",
		Short:   "Draw a trace from a built-in model",
		Long:    "Generate writes a trace drawn from a model, the same for the same seed:\n\n" + modelList(),
		Example: "  penstock-lab trace generate lte lte.trace --seed 7 --duration 2m",
		Args:    cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, names []string) error {
			trace, err := sim.Generate(names[0], seed, d)
			if err != nil {
				return cli.BadInput(err)
			}
			return writeTraceTo(names[1], trace)
		},
	}
	cmd.Flags().Uint64Var(&seed, "seed", 1, "of the draw")
	cmd.Flags().DurationVar(&d, "duration", sim.GeneratedLength, "length of the trace")
	return cmd
}

func traceRecordCommand() *cobra.Command {
	var rate string
	var d time.Duration
	cmd := &cobra.Command{
		Use:   "record SERVER:PORT TO",
		Short: "Record the way from a server that runs trace serve",
		Long: `Record has a server send datagrams at a rate that is more than the link carries,
and writes when they arrive, as a trace of the way from the server to here. The
other way is recorded with the two programs the other way round. It uses as much
of a volume of data as the rate and the time come to.`,
		Example: `  penstock-lab trace serve --listen :9000                                  # at the server
  penstock-lab trace record server.example:9000 lte.trace --rate 60mbit --duration 2m`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, names []string) error {
			r, err := parseLinkRate(rate)
			if err != nil {
				return cli.BadInput(fmt.Errorf("--rate: %w", err))
			}
			if _, _, err := net.SplitHostPort(names[0]); err != nil {
				return cli.BadInput(fmt.Errorf("%q is not SERVER:PORT, such as server.example:9000", names[0]))
			}
			if d < time.Second {
				return cli.BadInput(fmt.Errorf("--duration is %v, but must be 1s at least", d))
			}
			if err := output.CheckPath(names[1]); err != nil { // before the time that it takes
				return cli.BadInput(err)
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			trace, err := linktrace.Record(ctx, names[0], r, d)
			if err != nil {
				return err
			}
			if 10*trace.MeanRate() > 9*r {
				fmt.Fprintf(cmd.ErrOrStderr(), "note: %.1f of %.1f Mbit/s came: the link may carry more; ask for a higher "+
					"--rate\n", trace.MeanRate().Mbps(), r.Mbps())
			}
			return writeTraceTo(names[1], trace)
		},
	}
	cmd.Flags().StringVar(&rate, "rate", "100mbit", "what the server sends, above what the link carries")
	cmd.Flags().DurationVar(&d, "duration", time.Minute, "how long")
	return cmd
}

func traceServeCommand() *cobra.Command {
	var listen, most string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Send the datagrams that trace record asks for",
		Args:  cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := parseLinkRate(most)
			if err != nil {
				return cli.BadInput(fmt.Errorf("--most: %w", err))
			}
			ctx, stop := interruptible(cmd)
			defer stop()
			if err := linktrace.Serve(ctx, listen, r); err != nil {
				return cli.BadInput(fmt.Errorf("--listen: %w", err))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:9000", "TCP and UDP `ADDRESS`")
	cmd.Flags().StringVar(&most, "most", "1gbit", "rate that nobody gets more than")
	return cmd
}

func writeTraceTo(name string, t *sim.Trace) error {
	return written(name, t.WriteLines)
}

// written makes a file; a place where there can be none is the user's to mend.
func written(name string, write func(io.Writer) error) error {
	if err := output.CheckPath(name); err != nil {
		return cli.BadInput(err)
	}
	return output.Write(name, write)
}

func parseLinkRate(text string) (cc.Rate, error) {
	rate, err := cc.ParseRate(text)
	if err == nil && rate == 0 {
		err = fmt.Errorf("%q carries nothing", text)
	}
	return rate, err
}
