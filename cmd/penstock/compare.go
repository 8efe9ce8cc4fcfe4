package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/signal"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
	"github.com/penstock-net/penstock/telemetry/compare"
)

// compareCommand says what one rule gains over another.
func compareCommand() *cobra.Command {
	var from proxyAddress
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "compare RULE [RULE]",
		Short: "Say what one rule gains over another on live traffic",
		Long: `Compare says what the hosts of one rule gain over those of another: queueing delay,
rate, and times of downloads, each with the 95 % interval of its ratio. The proxy records
rules that have a match.sample, and the rules that the other hosts have, for a day:

  rules:
    - {name: canary, match: {sample: 5%}, algorithm: copa}

A host is in the sample or out of it. Intervals are those of a bootstrap that draws whole
hosts, so that what one host does does not count as many. A sample that costs its hosts
more than a fifth of their rate is stopped until the next reload, and the log says so.

The second rule is the defaults where none is named.`,
		Example: `  penstock compare canary
  penstock compare canary pages --json`,
		Args: cobra.RangeArgs(1, 2),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return from.ruleNames(cmd), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			query := url.Values{"first": {args[0]}, "second": {append(args, "defaults")[1]}}
			var result compare.Result
			if err := from.askJSON(cmd.Context(), cmd, http.MethodGet, "/v1/compare?"+query.Encode(),
				&result); err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(result)
			}
			return writeResult(cmd.OutOrStdout(), &result)
		},
	}
	from.registerFlags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

// proveCommand alternates managed and unmanaged connections of one host.
func proveCommand() *cobra.Command {
	var from proxyAddress
	var host string
	var last time.Duration
	var asJSON, stop bool
	cmd := &cobra.Command{
		Use:   "prove --host ADDRESS",
		Short: "Measure what one host gains, by turns with and without control",
		Long: `Prove has the new connections of one host take turns: managed as the rules say, or left
to the kernel. It compares their queueing delay and rate, and says what the host gains. Nothing
needs to be configured. While it runs, use the host as usual, with downloads that begin anew
every few seconds: a connection keeps what it began with, and seconds in which connections of
both kinds were busy do not count.

Within each pair of turns chance decides which comes first. There are 24 turns. Ctrl-C ends
the proof, and new connections are managed again. It is begun on the machine of the proxy.`,
		Example: `  penstock prove --host 192.168.1.50
  penstock prove --host phone --for 5m   # the peer of a tunnel
  penstock prove --stop`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var p telemetry.Proof
			if stop {
				return from.askJSON(cmd.Context(), cmd, http.MethodDelete, "/v1/proof", &p)
			}
			if host == "" {
				return cli.BadInput(errors.New("--host names the client host to measure, such as --host 192.168.1.50"))
			}
			query := url.Values{"host": {host}, "for": {last.String()}}
			if err := from.askJSON(cmd.Context(), cmd, http.MethodPost, "/v1/proof?"+query.Encode(), &p); err != nil {
				return err
			}
			ctx, cancel := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer cancel()
			if err := from.followProof(ctx, cmd, &p); err != nil {
				return err
			}
			if p.Result.First.Seconds+p.Result.Second.Seconds == 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "note: no new connection of %s was busy; penstock top shows the clients that "+
					"there are\n", config.Printable(host)) //nolint:errcheck // the result counts
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(p)
			}
			return writeResult(cmd.OutOrStdout(), &p.Result)
		},
	}
	from.registerFlags(cmd)
	cmd.Flags().StringVar(&host, "host", "", "client `ADDRESS`, or the name of a tunnel's peer")
	cmd.Flags().DurationVar(&last, "for", 2*time.Minute, "`TIME` that the proof lasts, 30s to 1h")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&stop, "stop", false, "end the proof that runs")
	return cmd
}

// followProof waits for the end of a proof, and says how it goes every few seconds. When ctx ends it ends the proof.
func (a *proxyAddress) followProof(ctx context.Context, cmd *cobra.Command, p *telemetry.Proof) error {
	const every = 5 * time.Second
	tick := time.NewTicker(every)
	defer tick.Stop()
	for !p.Ended {
		fmt.Fprintf(cmd.ErrOrStderr(), "%3.0f of %.0f s: new connections of %s are %s; %.0f and %.0f busy seconds so far\n",
			p.Seconds, p.Of, config.Printable(p.Host), p.Turn, p.Result.First.Seconds, p.Result.Second.Seconds)
		left := time.Duration((p.Of-p.Seconds)*float64(time.Second)) + time.Second/2
		select {
		case <-ctx.Done():
			ending := context.WithoutCancel(ctx)
			return a.askJSON(ending, cmd, http.MethodDelete, "/v1/proof", p)
		case <-tick.C:
		case <-time.After(left):
		}
		if err := a.askJSON(ctx, cmd, http.MethodGet, "/v1/proof", p); err != nil {
			return err
		}
	}
	return nil
}

// writeResult writes a table of the figures, and the verdict.
func writeResult(w io.Writer, r *compare.Result) error {
	name := func(side compare.Side) string { return config.Printable(telemetry.RuleName(side.Rule)) }
	table := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	if len(r.Figures) > 0 {
		fmt.Fprintf(table, "\t%s\t%s\tratio (95 %% interval)\n", name(r.First), name(r.Second))
	}
	for _, f := range r.Figures {
		fmt.Fprintf(table, "%s\t%s\t%s\t%.2f (%.2f to %.2f)\n", f.Name, formatFigure(f.First, f.Unit),
			formatFigure(f.Second, f.Unit), f.Ratio.Value, f.Ratio.Low, f.Ratio.High)
	}
	fmt.Fprintf(table, "%s\t%d\t%d\t\n", r.Unit, r.First.Hosts, r.Second.Hosts)
	fmt.Fprintf(table, "busy seconds\t%.0f\t%.0f\t\n", r.First.Seconds, r.Second.Seconds)
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s\n", r.Verdict)
	return err
}

// formatFigure writes a value of a figure for people.
func formatFigure(v float64, unit string) string {
	if unit == "bit/s" {
		return cc.Rate(v).String()
	}
	d := time.Duration(v * float64(time.Second))
	if d < 10*time.Millisecond {
		return d.Round(10 * time.Microsecond).String()
	}
	return d.Round(time.Millisecond).String()
}
