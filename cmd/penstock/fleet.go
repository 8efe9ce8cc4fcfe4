package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/fleet"
)

// fleetCommand shows the fleet of a running edge: what /v1/fleet has, as tables or as JSON. An edge that owns a shared
// rate knows what all edges use of it, and any other edge only what it uses itself.
func fleetCommand() *cobra.Command {
	var from proxyAddress
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "fleet",
		Short: "Show the edges that share maximum rates with a running one",
		Long: `Fleet shows the members of the fleet that a running proxy is an edge of, the maximum rates that
they share, which edge owns each, and what each edge may use of it now.`,
		Example: `  penstock fleet
  penstock fleet --json`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var body json.RawMessage
			if err := from.askJSON(cmd.Context(), cmd, http.MethodGet, "/v1/fleet", &body); err != nil {
				return err
			}
			if asJSON {
				_, err := fmt.Fprintln(cmd.OutOrStdout(), string(body))
				return err
			}
			var s fleet.Status
			if err := json.Unmarshal(body, &s); err != nil {
				return fmt.Errorf("read what the proxy answers: %w", err)
			}
			return printFleet(cmd, s)
		},
	}
	from.registerFlags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// printFleet prints tables of members and of shared rates. A rate that this edge owns has a line for each edge that
// uses it, since only the owner knows them all. Rates are in units as the configuration has them.
func printFleet(cmd *cobra.Command, s fleet.Status) error {
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "EDGE\tADDRESS\tSTATE")
	for _, m := range s.Members {
		state := "live"
		switch {
		case m.Own:
			state = "this one"
		case !m.Live:
			state = fmt.Sprintf("silent for %.1f s", m.Silent)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", m.Name, m.Address, state)
	}
	if !s.Decides {
		fmt.Fprintf(w, "\nToo few edges are heard: each has one part in %d of every shared rate.\n", len(s.Members))
	}
	if len(s.Limits) > 0 {
		fmt.Fprintln(w, "\nGROUP\tMAX_RATE\tOWNER\tEDGE\tMAY_SEND\tSENDS")
	}
	for _, l := range s.Limits {
		row := func(edge string, rate, sent cc.Rate) {
			fmt.Fprintf(w, "%s\t%v\t%s\t%s\t%v\t%v\n", l.Group, l.MaxRate, l.Owner, edge, rate, sent)
		}
		for _, c := range l.Claims {
			row(c.Member, c.Rate, c.Sent)
		}
		if len(l.Claims) == 0 {
			row(s.Name, l.Rate, l.Sent)
		}
	}
	return w.Flush()
}

// describeFleet returns a line on the edges of the fleet, and one on each shared rate in use here, at most eight.
func describeFleet(s fleet.Status) []string {
	edges := make([]string, 0, len(s.Members))
	for _, m := range s.Members {
		switch {
		case m.Own:
			edges = append(edges, m.Name+" (this one)")
		case m.Live:
			edges = append(edges, m.Name)
		default:
			edges = append(edges, fmt.Sprintf("%s (silent for %.0f s)", m.Name, m.Silent))
		}
	}
	lines := []string{"Fleet: " + strings.Join(edges, ", ")}
	if !s.Decides {
		lines[0] += fmt.Sprintf(". Too few are heard: each has one part in %d of every shared rate", len(s.Members))
	}
	const most = 8
	for i, l := range s.Limits {
		if i == most {
			return append(lines, fmt.Sprintf("%d shared rates more: penstock fleet", len(s.Limits)-most))
		}
		by := "one part in " + strconv.Itoa(len(s.Members)) + ", without a grant"
		if l.Granted {
			by = "granted by " + l.Owner
		}
		lines = append(lines, fmt.Sprintf("%s: %v of %v here, %s; sends %v", l.Group, l.Rate, l.MaxRate, by, l.Sent))
	}
	return lines
}
