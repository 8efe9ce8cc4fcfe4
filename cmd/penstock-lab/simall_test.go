package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// standardRunsOf are those of a command line.
func standardRunsOf(t *testing.T, args ...string) []standardRun {
	t.Helper()
	var f simFlags
	flags := pflag.NewFlagSet("sim", pflag.ContinueOnError)
	f.register(flags)
	require.NoError(t, flags.Parse(args))
	runs, err := f.standardRuns(flags, nil)
	require.NoError(t, err)
	return runs
}

func TestSimAllIsOfEveryAlgorithmInEveryStandardCase(t *testing.T) {
	runs, standard := standardRunsOf(t, "--all"), recipe.Standard()
	require.Len(t, runs, len(sim.Algorithms())*len(standard))
	for i, spec := range sim.Algorithms() {
		for k, s := range standard {
			run := runs[i*len(standard)+k]
			assert.Equal(t, spec.Name, run.name)
			assert.Equal(t, s.Name, run.standard.Name)
		}
	}
}

func TestSimAllMakesOneTable(t *testing.T) {
	play := func() ([]standardRun, string) {
		runs := standardRunsOf(t, "--all", "-a", "static:cwnd_packets=10", "-a", "copa:delta=0.5")
		for i := range runs { // short, but long enough for the flow that comes later
			runs[i].Stage.Duration, runs[i].Stage.Warmup = 6*time.Second, 0
		}
		var progress strings.Builder
		playAll(t.Context(), runs, &progress, nil)
		return runs, progress.String()
	}
	runs, progress := play()
	for _, r := range runs {
		recorded := record.Of(r.Stage, r.Record)
		assert.Equal(t, []string{
			fmt.Sprintf("%.1f", 100*recorded.Utilisation), brief(recorded.Queueing.P50), brief(recorded.Queueing.P95),
		}, r.figures()[:3], "%s in %s, as --json has it", r.name, r.standard.Name)
	}
	assert.Equal(t, 12, strings.Count(progress, "\n"), "a line for each run that is over:\n%s", progress)
	assert.Contains(t, progress, "[12/12] ")

	table := writeStandardTable(runs)
	lines := strings.Split(strings.TrimRight(table, "\n"), "\n")
	require.Len(t, lines, 6)
	assert.Equal(t, []string{"fixed", "lte", "steps", "loss", "beside-cubic", "two"}, strings.Fields(lines[0]))
	assert.Equal(t, "ALGORITHM | USED P50 P95 | USED P50 P95 | USED P50 P95 | USED P50 P95 | USED P50 P95 JAIN "+
		"SHARE | USED P50 P95 JAIN SHARE",
		strings.Join(strings.Fields(lines[1]), " "))
	for i, name := range []string{"static:cwnd_packets=10", "copa:delta=0.5"} {
		cells := strings.Fields(lines[i+2])
		require.Len(t, cells, 1+6+6*3+2*2, "the name, a bar for each case, and its figures")
		assert.Equal(t, name, cells[0])
		assert.Len(t, lines[i+2], len(lines[1]), "columns are aligned")
	}

	page := writeStandardMarkdown(runs)
	rows := strings.Split(page, "\n")
	assert.Equal(t, "| algorithm | fixed | lte | steps | loss | beside-cubic | two |", rows[0])
	for _, row := range rows[:4] {
		assert.Equal(t, 8, strings.Count(row, "|"), row)
	}
	assert.True(t, strings.HasPrefix(rows[3], "| `copa:delta=0.5` | "), rows[3])
	for _, s := range recipe.Standard() {
		assert.Contains(t, page, s.About)
	}

	again, _ := play()
	assert.Equal(t, table, writeStandardTable(again), "whichever run is over first")
}

func TestSimAllPrintsJSON(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "samples.jsonl")
	file := filepath.Join(t.TempDir(), "runs.jsonl")
	code, _, stderr := run(t, "sim", "--all", "-a", "static:cwnd_packets=4", "--json", file, "--trace-out", trace,
		"--trace-every", "10s")
	require.Equal(t, cli.ExitOK, code, stderr)
	runs, err := record.Open(file)
	require.NoError(t, err)
	require.Len(t, runs, len(recipe.Standard()))
	for i, s := range recipe.Standard() {
		assert.Equal(t, "static:cwnd_packets=4", runs[i].Name)
		assert.Equal(t, s.Name, runs[i].Experiment)
		assert.Positive(t, runs[i].Utilisation)
	}
	samples, err := os.ReadFile(trace)
	require.NoError(t, err)
	assert.Equal(t, 4*3+(6+6)+(6+6)-2, strings.Count(string(samples), "\n"),
		"every ten seconds of each flow; two of them come later")
}

func TestSimAllFailsWhenAnExpectationDoesNotHold(t *testing.T) {
	code, stdout, stderr := run(t, "sim", "--all", "-a", "static:cwnd_packets=1")
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, stderr, "static:cwnd_packets=1 in fixed: rate(\"tested\") is 0.19, but must be at least 1")
	assert.Contains(t, stdout, "static:cwnd_packets=1 |", "the table is there all the same")
	assert.Contains(t, stderr, "[6/6] static:cwnd_packets=1 in ")
}

func TestSimAllRefuses(t *testing.T) {
	for args, complaint := range map[string]string{
		"--all --rate 12mbit":                      "--rate does not go with --all",
		"--all case.yaml":                          "--all does not go with a file",
		"--markdown":                               "--markdown goes with --all",
		"--markdown --rate 1mbit":                  "--markdown goes with --all",
		"--all -a kopa":                            `no algorithm "kopa"`,
		"--all -a none":                            "none leaves the window to the transport below",
		"--all --json x --resume":                  "--resume and --plot do not go with --all",
		"--all --plot x.png":                       "--resume and --plot do not go with --all",
		"--all --trace-every 0s":                   "--trace-every is 0s, but must be whole milliseconds",
		"--all --transport quic":                   `--transport: no transport "quic"; use kernel, relay or native`,
		"--all -a copa --trace-out /no/x":          "--trace-out: open /no/x",
		"--all --sweep delta":                      `--sweep "delta" must be a parameter`,
		"--all --sweep cwnd=1,2,3":                 "has no parameter",
		"--all -a copa -a vegas --sweep delta=0.5": "vegas has no parameter",
	} {
		code, stdout, stderr := run(t, append([]string{"sim"}, strings.Fields(args)...)...)
		assert.Equal(t, cli.ExitInput, code, args)
		assert.Contains(t, stderr, complaint, args)
		assert.Empty(t, stdout, args)
		assert.Equal(t, 1, strings.Count(stderr, "\n"), "%s: one line", args)
	}
}
