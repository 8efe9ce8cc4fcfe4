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
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
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
var withAll = append([]string{"all", "markdown", "algorithm", "sweep", "transport"}, ofRuns...)

// runAll puts the algorithms through the standard cases and prints the table.
func (f *simFlags) runAll(cmd *cobra.Command, files []string) (err error) {
	runs, err := f.standardRuns(cmd.Flags(), files)
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
	s := session{sampled: f.sampling()}
	ctx, stop := interruptible(cmd)
	defer stop()
	playAll(ctx, runs, cmd.ErrOrStderr(), func(scenario *sim.Scenario) {
		scenario.Transport = transport
		s.sampling(scenario)
	})
	var failures []error
	var records []record.Run
	var played []course
	for _, r := range runs {
		if r.err != nil {
			failures = append(failures, fmt.Errorf("%s in %s: %w", r.name, r.standard.Name, r.err))
			continue
		}
		findings, err := r.recipe.Judge(recipe.Outcome{Scale: recipe.Full, Runs: []recipe.Run{r.Run}})
		if err != nil {
			return err
		}
		failures = append(failures, unheld(r.name+" in "+r.standard.Name, findings)...)
		one := record.Of(r.Stage, r.Record)
		one.Experiment, one.Name, one.Version, one.Findings = r.standard.Name, r.name, cli.ReadBuild().String(), findings
		records, played = append(records, one), append(played, course{one, r.Run})
		if err := record.Write(file, one); err != nil {
			return err
		}
	}
	write := writeStandardTable
	if f.markdown {
		write = writeStandardMarkdown
	}
	switch {
	case ctx.Err() != nil:
		failures = []error{context.Cause(ctx)}
	case len(records) == len(runs):
		_, err = io.WriteString(cmd.OutOrStdout(), write(runs))
	}
	return errors.Join(err, f.outputs.write(cmd, records), f.writeTraces(played), errors.Join(failures...))
}

// standardRuns lists the runs to be made, by algorithm.
func (f *simFlags) standardRuns(flags *pflag.FlagSet, files []string) (runs []standardRun, err error) {
	if !f.all {
		return nil, errors.New("--markdown goes with --all")
	}
	if len(files) > 0 {
		return nil, errors.New("--all does not go with a file: its cases are the standard ones")
	}
	if err := only(flags, withAll, "--all: its cases are the standard ones"); err != nil {
		return nil, err
	}
	if f.outputs.resume || f.outputs.plot != "" {
		return nil, errors.New("--resume and --plot do not go with --all")
	}
	if !flags.Changed("algorithm") {
		f.algorithms = nil
		for _, s := range sim.Algorithms() {
			f.algorithms = append(f.algorithms, s.Name)
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

// figures are the cells of one run: utilisation and share in per cent, queueing
// in milliseconds; the last two only where flows share the link.
func (r standardRun) figures() []string {
	result := r.Record.Virtual
	cells := []string{
		fmt.Sprintf("%.1f", 100*r.Record.Utilisation),
		brief(record.Millis(r.Record.Queueing.P50)),
		brief(record.Millis(r.Record.Queueing.P95)),
	}
	if len(result.Flows) == 1 {
		return cells
	}
	total := 0.0
	for _, f := range result.Flows {
		total += float64(f.Throughput)
	}
	share := float64(r.standard.Tested(*result).Throughput) / max(total, 1)
	return append(cells, fmt.Sprintf("%.2f", result.Jain), fmt.Sprintf("%.0f", 100*share))
}

// brief writes a figure with a decimal where that tells something.
func brief(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// rows cuts runs into one row for each algorithm.
func rows(runs []standardRun) [][]standardRun {
	var all [][]standardRun
	for row := range slices.Chunk(runs, len(recipe.Standard())) {
		all = append(all, row)
	}
	return all
}

// writeStandardTable writes algorithms below each other and cases side by side.
func writeStandardTable(runs []standardRun) string {
	titles := []string{"USED", "P50", "P95", "JAIN", "SHARE"}
	table := [][][]string{} // lines, each of the algorithm and a group of cells for each case
	head := [][]string{{"ALGORITHM"}}
	for _, r := range rows(runs)[0] {
		head = append(head, titles[:len(r.figures())])
	}
	table = append(table, head)
	for _, row := range rows(runs) {
		line := [][]string{{row[0].name}}
		for _, r := range row {
			line = append(line, r.figures())
		}
		table = append(table, line)
	}
	width := func(group, cell int) int {
		widest := 0
		for _, line := range table {
			widest = max(widest, len(line[group][cell]))
		}
		return widest
	}
	var b strings.Builder
	above := fmt.Sprintf("%-*s", width(0, 0), "")
	for i, r := range rows(runs)[0] {
		wide := 0
		for c := range r.figures() {
			wide += width(i+1, c) + 1
		}
		above += fmt.Sprintf("  %-*s", wide, r.standard.Name)
	}
	b.WriteString(strings.TrimRight(above, " ") + "\n")
	for _, line := range table {
		fmt.Fprintf(&b, "%-*s", width(0, 0), line[0][0])
		for g, group := range line[1:] {
			b.WriteString(" |")
			for c, cell := range group {
				fmt.Fprintf(&b, " %*s", width(g+1, c), cell)
			}
		}
		b.WriteByte('\n')
	}
	b.WriteString("\nUSED: % of what the link offered. P50, P95: packets' time in the queue, ms. JAIN: fairness. " +
		"SHARE: % of the throughput.\n")
	return b.String()
}

// writeStandardMarkdown writes the same for a page.
func writeStandardMarkdown(runs []standardRun) string {
	var b strings.Builder
	head, rule := "| algorithm |", "|---|"
	for _, r := range rows(runs)[0] {
		head += " " + r.standard.Name + " |"
		rule += "---|"
	}
	b.WriteString(head + "\n" + rule + "\n")
	for _, row := range rows(runs) {
		fmt.Fprintf(&b, "| `%s` |", row[0].name)
		for _, r := range row {
			f := r.figures()
			fmt.Fprintf(&b, " %s · %s / %s", f[0], f[1], f[2])
			if len(f) > 3 {
				fmt.Fprintf(&b, " · %s · %s", f[3], f[4])
			}
			b.WriteString(" |")
		}
		b.WriteByte('\n')
	}
	b.WriteString("\nIn each cell: utilisation, % · packets' time in the queue, ms, median / 95th percentile;\n" +
		"where two flows share the link also · Jain's index · the algorithm's share of the throughput, %.\n\n")
	for _, r := range rows(runs)[0] {
		fmt.Fprintf(&b, "- **%s**: %s\n", r.standard.Name, r.standard.About)
	}
	return b.String()
}
