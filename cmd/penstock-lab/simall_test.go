package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
)

func TestSimAllIsOfEveryAlgorithmInEveryStandardCase(t *testing.T) {
	var f simFlags
	cases, err := f.standardCases(false)
	require.NoError(t, err)
	standard := recipe.Standard()
	require.Len(t, cases, len(sim.Algorithms())*len(standard))
	for i, r := range cases {
		stages, err := r.Stages(recipe.Full, 1)
		require.NoError(t, err)
		assert.Equal(t, sim.Algorithms()[i/len(standard)].Name, stages[0].Name)
		assert.Equal(t, standard[i%len(standard)].Name, r.Name)
	}
}

func TestSimAllMakesOneTable(t *testing.T) {
	play := func() (table, progress string) {
		code, stdout, stderr := run(t, "sim", "--all", "-a", "static:cwnd_packets=10", "-a", "copa:delta=0.5")
		require.Equal(t, cli.ExitOK, code, stderr)
		return stdout, stderr
	}
	table, progress := play()
	assert.Equal(t, 12, strings.Count(progress, "\n"), "a line for each run that is over:\n%s", progress)
	rows := strings.Split(table, "\n")
	assert.Equal(t, "| algorithm | fixed | lte | steps | loss | beside-cubic | two |", rows[0])
	for _, row := range rows[:4] {
		assert.Equal(t, 8, strings.Count(row, "|"), row)
	}
	assert.Regexp(t, "^\\| `copa:delta=0.5` \\|( \\d+, [0-9.]+/[0-9.]+ \\|){4}"+
		"( \\d+, [0-9.]+/[0-9.]+, [01]\\.\\d\\d, \\d+ \\|){2}$", rows[3])
	for _, s := range recipe.Standard() {
		assert.Contains(t, table, s.About)
	}
	again, _ := play()
	assert.Equal(t, table, again, "whichever run is over first")
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
	assert.Contains(t, stdout, "| `static:cwnd_packets=1` |", "the table is there all the same")
	assert.Contains(t, stderr, "two 1/1: static:cwnd_packets=1: ")
}

func TestSimAllRefuses(t *testing.T) {
	assertRefused(t, "sim", map[string]string{
		"--all --link 12mbit":                      "--link does not go with --all",
		"--all case.yaml":                          "--all does not go with a file",
		"--all -a kopa":                            `no algorithm "kopa"`,
		"--all -a none":                            "none leaves the window to the transport below",
		"--all --plot x.png":                       "--plot does not go with --all",
		"--all --trace-every 0s":                   "--trace-every is 0s, but must be whole milliseconds",
		"--all --transport quic":                   `--transport: no transport "quic"; use kernel, relay or native`,
		"--all -a copa --trace-out /no/x":          "--trace-out: open /no/x",
		"--all --sweep delta":                      `--sweep "delta" must be a parameter`,
		"--all --sweep cwnd=1,2,3":                 "has no parameter",
		"--all -a copa -a vegas --sweep delta=0.5": "vegas has no parameter",
	})
}
