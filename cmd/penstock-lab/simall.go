package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
)

func standardList() string {
	var b strings.Builder
	for _, s := range recipe.Standard() {
		fmt.Fprintf(&b, "  %-13s %s\n", s.Name, s.About)
	}
	return b.String()
}

// withAll are the flags that go with --all.
var withAll = []string{
	"all", "algorithm", "sweep", "transport", agents.Flag, "json", "report", "resume", "trace-out", "trace-every",
	"mdi-model",
}

// runAll puts the algorithms through the standard cases and prints the table.
func (f *simFlags) runAll(cmd *cobra.Command, files []string) (err error) {
	if len(files) > 0 {
		return cli.BadInput(errors.New("--all does not go with a file: its cases are the standard ones"))
	}
	if err := only(cmd.Flags(), withAll, "--all: its cases are the standard ones"); err != nil {
		return cli.BadInput(err)
	}
	transport, err := sim.ParseTransport(f.transport)
	if err != nil {
		return cli.BadInput(fmt.Errorf("--transport: %w", err))
	}
	cases, err := f.standardCases(cmd.Flags().Changed("algorithm"))
	if err != nil {
		return cli.BadInput(err)
	}
	sampling := f.change
	f.quiet, f.firstSeeds, f.runs = false, []uint{1}, 1
	f.change = func(scenario *sim.Scenario) {
		scenario.Transport = transport
		if sampling != nil {
			sampling(scenario)
		}
	}
	err = f.playSeeds(cmd, cases)
	traced := f.writeTraces()
	if len(f.all) == len(cases) {
		_, written := io.WriteString(cmd.OutOrStdout(), describeStandard(f.all))
		err = errors.Join(written, standardFailures(f.all))
	}
	return errors.Join(err, traced)
}

// standardCases lists the cases, by algorithm: those that are named, or all.
func (f *simFlags) standardCases(named bool) (all []recipe.Recipe, err error) {
	if f.Agents, err = agents.Parse(f.agents); err == nil {
		err = f.outputs.check()
	}
	if err != nil {
		return nil, err
	}
	if !named {
		f.senders = nil
		for _, s := range sim.Algorithms() {
			f.senders = append(f.senders, s.Name)
		}
	}
	refs, err := f.swept()
	if err != nil {
		return nil, err
	}
	for _, ref := range refs {
		for _, s := range recipe.Standard() {
			r, err := s.Recipe(ref, f.Agents)
			if err != nil {
				return nil, fmt.Errorf("--algorithm: %w", err)
			}
			all = append(all, r)
		}
	}
	return all, nil
}

// standardFailures names what must hold of an algorithm in a case and does not.
func standardFailures(runs []record.Run) error {
	var errs []error
	for _, r := range runs {
		for _, f := range r.Findings {
			if !f.OK {
				errs = append(errs, fmt.Errorf("%s in %s: %s is %s, but must be %s", r.Name, r.Experiment, f.What,
					f.Got, f.Bound))
			}
		}
	}
	return errors.Join(errs...)
}

// describeCase is the cell of one run.
func describeCase(r record.Run) string {
	cell := fmt.Sprintf("%.0f, %s/%s", 100*r.Utilisation, brief(r.Queueing.P50), brief(r.Queueing.P95))
	if len(r.Flows) == 1 {
		return cell
	}
	total, tested := 0.0, 0.0
	var rates []float64
	for _, f := range r.Flows {
		rates = append(rates, f.Throughput)
		if total += f.Throughput; f.Name == recipe.Tested {
			tested = f.Throughput
		}
	}
	return cell + fmt.Sprintf(", %.2f, %.0f", sim.Jain(rates...), 100*tested/max(total, 1e-6))
}

// brief writes a figure with a decimal where that tells something.
func brief(v float64) string {
	if v >= 10 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// describeStandard returns a Markdown table with a line for each algorithm.
func describeStandard(runs []record.Run) string {
	var b strings.Builder
	cases := recipe.Standard()
	b.WriteString("| algorithm |")
	for _, c := range cases {
		b.WriteString(" " + c.Name + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(cases)) + "\n")
	for line := range slices.Chunk(runs, len(cases)) {
		fmt.Fprintf(&b, "| `%s` |", line[0].Name)
		for _, r := range line {
			b.WriteString(" " + describeCase(r) + " |")
		}
		b.WriteByte('\n')
	}
	b.WriteString("\nIn each cell: utilisation, %; packets' time in the queue, ms, median/95th percentile; where two " +
		"flows\nshare the link also Jain's index; the algorithm's share of the throughput, %.\n\n")
	for _, c := range cases {
		fmt.Fprintf(&b, "- **%s**: %s\n", c.Name, c.About)
	}
	return b.String()
}
