package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// standardRun is one algorithm in one standard case.
type standardRun struct {
	recipe.Run
	recipe   recipe.Recipe
	name     string // of the algorithm with its settings
	standard recipe.StandardCase
	err      error
}

func standardList() string {
	var b strings.Builder
	for _, s := range recipe.Standard() {
		fmt.Fprintf(&b, "  %-13s %s\n", s.Name, s.About)
	}
	return b.String()
}

// withAll are the flags that go with --all.
var withAll = []string{
	"all", "algorithm", "sweep", "transport", agents.Flag, "json", "report", "trace-out", "trace-every", "mdi-model",
}

// runAll puts the algorithms through the standard cases and prints the table.
func (f *simFlags) runAll(cmd *cobra.Command, files []string) (err error) {
	if len(files) > 0 {
		return cli.BadInput(errors.New("--all does not go with a file: its cases are the standard ones"))
	}
	if err := only(cmd.Flags(), withAll, "--all: its cases are the standard ones"); err != nil {
		return cli.BadInput(err)
	}
	runs, err := f.standardRuns(cmd.Flags().Changed("algorithm"))
	if err != nil {
		return cli.BadInput(err)
	}
	transport, err := sim.ParseTransport(f.transport)
	if err != nil {
		return cli.BadInput(fmt.Errorf("--transport: %w", err))
	}
	file, _, done, err := f.outputs.open()
	if err != nil {
		return cli.BadInput(err)
	}
	defer func() { err = errors.Join(err, done()) }()
	s := session{sampled: f.sampled}
	ctx, stop := interruptible(cmd)
	defer stop()
	playAll(ctx, runs, cmd.ErrOrStderr(), func(scenario *sim.Scenario) {
		scenario.Transport = transport
		s.sampling(scenario)
	})
	var errs []error
	var records []record.Run
	var played []course
	for _, r := range runs {
		if r.err != nil {
			errs = append(errs, fmt.Errorf("%s in %s: %w", r.name, r.standard.Name, r.err))
			continue
		}
		findings, err := r.recipe.Judge(recipe.Outcome{Scale: recipe.Full, Runs: []recipe.Run{r.Run}})
		if err != nil {
			return err
		}
		for _, f := range findings {
			if !f.OK {
				errs = append(errs, fmt.Errorf("%s in %s: %s is %s, but must be %s", r.name, r.standard.Name,
					f.What, f.Got, f.Bound))
			}
		}
		one := record.Of(r.Stage, r.Record)
		one.Experiment, one.Name, one.Version, one.Findings = r.standard.Name, r.name, cli.ReadBuild().String(), findings
		records, played = append(records, one), append(played, course{one, r.Run})
		if err := record.Write(file, one); err != nil {
			return err
		}
	}
	switch {
	case ctx.Err() != nil:
		errs = []error{context.Cause(ctx)}
	case len(records) == len(runs):
		_, err = io.WriteString(cmd.OutOrStdout(), describeStandard(runs))
	}
	return errors.Join(err, f.outputs.write(cmd, records), f.writeTraces(played), errors.Join(errs...))
}

// standardRuns lists the runs to be made, by algorithm: those that are named, or all.
func (f *simFlags) standardRuns(named bool) (runs []standardRun, err error) {
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
			stages, err := r.Stages(recipe.Full, 1)
			if err == nil {
				_, _, err = stage.Scenario(stages[0])
			}
			if err != nil {
				return nil, fmt.Errorf("--algorithm: %w", err)
			}
			runs = append(runs, standardRun{recipe: r, name: ref, standard: s, Run: recipe.Run{Stage: stages[0]}})
		}
	}
	return runs, nil
}

// playAll makes the runs, as many at once as there are processors.
func playAll(ctx context.Context, runs []standardRun, progress io.Writer, change func(*sim.Scenario)) {
	printer := bench.NewPrinter(progress)
	defer printer.Break()
	next := make(chan *standardRun)
	var wg sync.WaitGroup
	var mu sync.Mutex
	over := 0
	for range min(runtime.GOMAXPROCS(0), len(runs)) {
		wg.Go(func() {
			for r := range next {
				r.Record, r.err = stage.PlayVirtual(ctx, r.Stage, change)
				if r.err != nil {
					continue
				}
				mu.Lock()
				over++
				printer.Line(fmt.Sprintf("[%d/%d] %s in %s", over, len(runs), r.name, r.standard.Name), true)
				mu.Unlock()
			}
		})
	}
	for i := range runs {
		next <- &runs[i]
	}
	close(next)
	wg.Wait()
}

// describe is the cell of one run.
func (r standardRun) describe() string {
	result := r.Record.Virtual
	cell := fmt.Sprintf("%.1f · %s / %s", 100*r.Record.Utilisation, brief(record.Millis(r.Record.Queueing.P50)),
		brief(record.Millis(r.Record.Queueing.P95)))
	if len(result.Flows) == 1 {
		return cell
	}
	total := 0.0
	for _, f := range result.Flows {
		total += float64(f.Throughput)
	}
	share := float64(r.standard.Tested(*result).Throughput) / max(total, 1)
	return cell + fmt.Sprintf(" · %.2f · %.0f", result.Jain, 100*share)
}

// brief writes a figure with a decimal where that tells something.
func brief(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// describeStandard returns a Markdown table with a line for each algorithm.
func describeStandard(runs []standardRun) string {
	var b strings.Builder
	cases := recipe.Standard()
	b.WriteString("| algorithm |")
	for _, c := range cases {
		b.WriteString(" " + c.Name + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(cases)) + "\n")
	for line := range slices.Chunk(runs, len(cases)) {
		fmt.Fprintf(&b, "| `%s` |", line[0].name)
		for _, r := range line {
			b.WriteString(" " + r.describe() + " |")
		}
		b.WriteByte('\n')
	}
	b.WriteString("\nIn each cell: utilisation, % · packets' time in the queue, ms, median / 95th percentile;\n" +
		"where two flows share the link also · Jain's index · the algorithm's share of the throughput, %.\n\n")
	for _, c := range cases {
		fmt.Fprintf(&b, "- **%s**: %s\n", c.Name, c.About)
	}
	return b.String()
}
