package main

import (
	"cmp"
	"encoding/json"
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
)

// standardRun is one algorithm in one standard case.
type standardRun struct {
	trial
	standard recipe.StandardCase
	result   sim.Result
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
var withAll = map[string]bool{"all": true, "markdown": true, "algorithm": true, "sweep": true, "transport": true}

// runAll puts the algorithms through the standard cases and prints the table.
func (f *simFlags) runAll(cmd *cobra.Command, files []string) (err error) {
	runs, err := f.standardRuns(cmd.Flags(), files)
	if err != nil {
		return cli.BadInput(err)
	}
	traces, closeTraces, err := f.openTraces()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeTraces()) }()

	playAll(runs, cmd.ErrOrStderr())
	var failures []error
	for _, r := range runs {
		if r.err != nil {
			return fmt.Errorf("%s in %s: %w", r.name, r.standard.Name, r.err)
		}
		failures = append(failures, r.unmet(r.result)...)
		if err := f.writeSamples(traces, r.trial, r.result); err != nil {
			return err
		}
	}
	return errors.Join(f.writeAll(cmd.OutOrStdout(), runs), errors.Join(failures...))
}

// standardRuns lists the runs to be made, by algorithm.
func (f *simFlags) standardRuns(flags *pflag.FlagSet, files []string) (runs []standardRun, err error) {
	if !f.all {
		return nil, errors.New("--markdown goes with --all")
	}
	if len(files) > 0 {
		return nil, errors.New("--all does not go with a file: its cases are the standard ones")
	}
	flags.Visit(func(flag *pflag.Flag) {
		if !shared[flag.Name] && !withAll[flag.Name] && err == nil {
			err = fmt.Errorf("--%s does not go with --all: its cases are the standard ones", flag.Name)
		}
	})
	if err != nil {
		return nil, err
	}
	if f.json && f.markdown {
		return nil, errors.New("--json and --markdown exclude each other")
	}
	if f.sampled <= 0 {
		return nil, errors.New("--trace-every must be above 0, such as 10ms")
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
	transport, err := sim.ParseTransport(f.transport)
	if err != nil {
		return nil, fmt.Errorf("--transport: %w", err)
	}
	for _, ref := range refs {
		for _, s := range recipe.Standard() {
			r, err := s.Recipe(ref, f.deciders)
			if err != nil {
				return nil, fmt.Errorf("--algorithm: %w", err)
			}
			trials, err := f.experimentTrials(r)
			if err != nil {
				return nil, fmt.Errorf("--algorithm: %w", err)
			}
			t := trials[0]
			t.name, t.link, t.Transport = ref, s.Name, transport
			runs = append(runs, standardRun{trial: t, standard: s})
		}
	}
	return runs, nil
}

// playAll makes the runs, as many at once as there are processors.
func playAll(runs []standardRun, progress io.Writer) {
	printer := bench.NewPrinter(progress)
	defer printer.Break()
	next := make(chan *standardRun)
	var wg sync.WaitGroup
	var mu sync.Mutex
	over := 0
	for range min(runtime.GOMAXPROCS(0), len(runs)) {
		wg.Go(func() {
			for r := range next {
				r.result, r.err = r.who.Run(r.Scenario)
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

func (f *simFlags) writeAll(w io.Writer, runs []standardRun) error {
	if f.json {
		enc := json.NewEncoder(w)
		for _, r := range runs {
			rec := newSimRecord(r.trial, r.result)
			rec.Scenario, rec.Link = rec.Link, ""
			if err := enc.Encode(rec); err != nil {
				return err
			}
		}
		return nil
	}
	write := writeStandardTable
	if f.markdown {
		write = writeStandardMarkdown
	}
	_, err := io.WriteString(w, write(runs))
	return err
}

// figures are the cells of one run: utilisation and share in per cent, queueing
// in milliseconds; the last two only where flows share the link.
func (r standardRun) figures() []string {
	cells := []string{
		fmt.Sprintf("%.1f", 100*r.result.Utilisation),
		brief(inMillis(r.result.Queueing.P50)),
		brief(inMillis(r.result.Queueing.P95)),
	}
	if len(r.result.Flows) == 1 {
		return cells
	}
	total := 0.0
	for _, f := range r.result.Flows {
		total += float64(f.Throughput)
	}
	share := float64(r.standard.Tested(r.result).Throughput) / max(total, 1)
	return append(cells, fmt.Sprintf("%.2f", r.result.Jain), fmt.Sprintf("%.0f", 100*share))
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
		widest := slices.MaxFunc(table, func(a, b [][]string) int { return cmp.Compare(len(a[group][cell]), len(b[group][cell])) })
		return len(widest[group][cell])
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
