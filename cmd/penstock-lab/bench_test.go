package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/need"
)

func TestBenchNamesTheWrongFlag(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		says []string
	}{
		"an unknown sender": {[]string{"bench", "--sender", "kopa"}, []string{`--sender "kopa"`, "copa"}},
		"a setting out of range": {
			[]string{"bench", "--sender", "copa:delta=-1"},
			[]string{`--sender "copa:delta=-1"`, "delta"},
		},
		"an unknown envelope": {
			[]string{"bench", "--envelope", "hybla"},
			[]string{"--envelope", "cubic, bbr, reno"},
		},
		"nobody in virtual time": {[]string{"bench", "--sender", "none@sim"}, []string{`--sender "none@sim"`}},
		"a link that is nothing": {
			[]string{"bench", "--link", "none.down"},
			[]string{"--link", "12mbit", "generate:"},
		},
		"a model that is not there": {
			[]string{"bench", "--link", "generate:moon"},
			[]string{"--link", "moon", "lte"},
		},
		"a way back that is nothing": {[]string{"bench", "--link", "12mbit", "--up", "x"}, []string{"--up"}},
		"a buffer without a unit": {
			[]string{"bench", "--buffer", "2"}, []string{"--buffer", "64KiB", "100pkt or none"},
		},
		"loss in per cent": {[]string{"bench", "--loss", "1"}, []string{"--loss", "0.01"}},
		"no time at all":   {[]string{"bench", "--duration", "0s"}, []string{"--duration"}},
		"no runs":          {[]string{"bench", "--runs", "0"}, []string{"--runs"}},
		"a file beside flags that describe one": {
			[]string{"bench", "--loss", "0.1", "x.yaml"}, []string{"--loss does not go"},
		},
		"to go on with no file":        {[]string{"bench", "--resume", "--json", "/dev/null"}, []string{"is no file"}},
		"to go on without a file":      {[]string{"bench", "--resume"}, []string{"--resume needs --json"}},
		"a link without a name":        {[]string{"bench", "--link", ""}, []string{"--link is empty"}},
		"a width that is no number":    {[]string{"report", "--width", "NaN", "x.jsonl"}, []string{"--width NaN"}},
		"a picture of another kind":    {[]string{"bench", "--plot", "out.gif"}, []string{"--plot"}},
		"the demo's trace is no trace": {[]string{"demo", "--trace", "none.down"}, []string{"--trace", "none.down"}},
		"the demo's algorithm":         {[]string{"demo", "--algorithm", "kopa"}, []string{`--algorithm "kopa"`}},
		"the demo's time":              {[]string{"demo", "--duration", "0s"}, []string{"--duration"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			code, stdout, stderr := run(t, c.args...)
			assert.Equal(t, cli.ExitInput, code)
			assert.Empty(t, stdout)
			for _, s := range c.says {
				assert.Contains(t, stderr, s)
			}
			left, err := filepath.Glob("*")
			assert.NoError(t, err)
			assert.Empty(t, left, "a refused command leaves no files")
		})
	}
}

func TestBenchInVirtualTimeNeedsNoNetwork(t *testing.T) {
	file := filepath.Join(t.TempDir(), "runs.jsonl")
	code, stdout, stderr := run(t, "bench", "--sender", "copa@sim", "--sender", "vegas", "--envelope", "sim",
		"--link", "12mbit", "--duration", "2s", "--json", file)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Regexp(t, `(?m)^copa@sim +1 `, stdout)
	assert.Regexp(t, `(?m)^vegas@sim +1 `, stdout)
	results, err := record.Open(file)
	require.NoError(t, err)
	require.Len(t, results, 2)
	assert.True(t, results[1].Virtual)
	assert.InDelta(t, 12, results[1].Offered, 1e-9)
}

func TestRecipesAreListedAndNamed(t *testing.T) {
	need.OneGoroutine(t)
	code, stdout, stderr := run(t, "bench", "recipe", "list")
	require.Equal(t, cli.ExitOK, code, stderr)
	for _, name := range []string{"join-leave", "live-switch", "janus-c10", "nacc-d1", "pbe-e5"} {
		assert.Regexp(t, `(?m)^`+name+` +(\d+m)?\d+s `, stdout)
	}
	assertRefused(t, "bench recipe", map[string]string{
		"nonesuch --virtual":             `no "nonesuch"; penstock-lab bench recipe list`,
		"all hosts --virtual":            "all goes without other names",
		"hosts --virtual --runs 0":       "--runs",
		"hosts --virtual --plot out.gif": ".pdf, .png, .svg",
	})
}

func TestARecipeIsRunInVirtualTime(t *testing.T) {
	need.OneGoroutine(t)
	file := filepath.Join(t.TempDir(), "runs.jsonl")
	code, stdout, stderr := run(t, "bench", "recipe", "pbe-e1", "--virtual", "--short", "--runs", "2",
		"--json", file)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stdout, "short form, 2 runs")
	assert.Regexp(t, `(?m)^ok +p95 queueing`, stdout)
	assert.Contains(t, stderr, "pbe-e1 1/2: pbe")
	lines, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, 4, bytes.Count(lines, []byte("\n")), "two runs, twice")

	code, _, stderr = run(t, "bench", "recipe", "pbe-e1", "--virtual", "--short", "--runs", "3", "--resume",
		"--json", file)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Equal(t, 1, strings.Count(stderr, "pbe-e1 1/2: pbe: "), "two of the three are there")
	code, stdout, stderr = run(t, "bench", "recipe", "table", file)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Regexp(t, `in virtual time 3 of 3 \(build \S+\); over real sockets 0 of 0;`, stdout)
	page := filepath.Join(t.TempDir(), "page.md")
	earlier := regexp.MustCompile("\\| `rpm` \\|.*").ReplaceAllString(stdout, "| `rpm` | ok 4/4 | ok 3/3 | v1 |")
	require.NoError(t, os.WriteFile(page, []byte(earlier), 0o600))
	code, stdout, stderr = run(t, "bench", "recipe", "table", file, "--earlier", page)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stdout, "| `rpm` | not measured | ok 3/3 | v1 |")
	code, _, stderr = run(t, "bench", "recipe", "table", file, "--earlier", page+".not")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "--earlier: open ")
	code, _, stderr = run(t, "bench", "recipe", "table", file, "--earlier", file)
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "runs.jsonl: there is no table of recipe, virtual,")
	code, stdout, stderr = run(t, "bench", "recipe", "table", file, "--figures")
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stdout, "| throughput over cubic's | 57/58 | at least 0.9 |")
	code, _, stderr = run(t, "bench", "recipe", "pbe-e1", "--virtual", "--resume")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "--resume needs --json")
}

// A file of results holds what one build has measured, and takes as many calls as it needs.
func TestRecipesArePlayedInPieces(t *testing.T) {
	need.OneGoroutine(t)
	file := filepath.Join(t.TempDir(), "runs.jsonl")
	old := record.Run{Experiment: "pbe-e1", Scale: "short", Virtual: true, Version: "penstock of yesterday"}
	other, sockets := old, old
	other.Experiment, sockets.Virtual = "pbe-e2", false
	var text bytes.Buffer
	for _, r := range []record.Run{old, other, sockets} {
		require.NoError(t, record.Write(&text, r))
	}
	require.NoError(t, os.WriteFile(file, text.Bytes(), 0o600))
	command := []string{
		"bench", "recipe", "pbe-e1", "--virtual", "--short", "--resume", "--replace", "--json", file, "--within",
	}
	code, stdout, stderr := run(t, append(command, "1ns")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Equal(t, "pbe-e1: left out: it would not be over within 1ns\n", stdout)
	left, err := record.Open(file)
	require.NoError(t, err)
	assert.Equal(t, []record.Run{old, other, sockets}, left)

	code, stdout, stderr = run(t, append(command, "1h")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stdout, "p95 queueing over cubic's")
	played := stdout
	left, err = record.Open(file)
	require.NoError(t, err)
	require.Len(t, left, 4, "those of two builds that this one has not played, and two runs of its own")
	assert.Equal(t, []record.Run{other, sockets}, left[:2])
	assert.NotEqual(t, old.Version, left[2].Version)
	code, stdout, stderr = run(t, append(command, "1ns")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Equal(t, played, stdout, "what is there is told from the file")

	stopped := left[2]
	text.Reset()
	for range 2 {
		require.NoError(t, record.Write(&text, stopped))
	}
	require.NoError(t, os.WriteFile(file, text.Bytes(), 0o600))
	code, _, stderr = run(t, "bench", "recipe", "pbe-e1", "--virtual", "--short", "--resume", "--json", file)
	require.Equal(t, cli.ExitOK, code, stderr)
	left, err = record.Open(file)
	require.NoError(t, err)
	require.Len(t, left, 2, "what was stopped twice is played anew, and counts once")
	assert.True(t, left[0].Same(stopped))
	assert.NotEmpty(t, left[1].Findings)

	code, _, stderr = run(t, "bench", "recipe", "pbe-e1", "--virtual", "--replace")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "--replace needs --json")
}

// What was stopped leaves the file once it is over, whether what must hold does or not.
func TestWhatWasStoppedCountsOnceThoughAFindingFails(t *testing.T) {
	t.Chdir(t.TempDir())
	const text = `link: {rate: 12mbit, rtt: 20ms}
vary: {algorithm: [copa, vegas]}
name: $(algorithm)
algorithm: $(algorithm)
flows: {a: {}}
virtual: true
duration: 2s
must: [run("copa").utilisation >= 2]
`
	require.NoError(t, os.WriteFile("my.yaml", []byte(text), 0o600))
	for _, command := range [][]string{{"bench", "my.yaml"}, {"bench", "recipe", "my.yaml"}, {"sim", "my.yaml"}} {
		command = append(command, "--json", "runs.jsonl", "--resume")
		require.NoError(t, os.RemoveAll("runs.jsonl"))
		code, _, stderr := run(t, command...)
		require.Equal(t, cli.ExitFail, code, stderr)
		left, err := record.Open("runs.jsonl")
		require.NoError(t, err)
		require.Len(t, left, 2)
		var stopped bytes.Buffer
		require.NoError(t, record.Write(&stopped, left[0]))
		require.NoError(t, os.WriteFile("runs.jsonl", stopped.Bytes(), 0o600))
		code, _, stderr = run(t, command...)
		require.Equal(t, cli.ExitFail, code, stderr)
		left, err = record.Open("runs.jsonl")
		require.NoError(t, err)
		assert.Len(t, left, 2, command)
	}
}

// What a file of records has of this build is not made again, and stands in the tables.
func TestBenchGoesOn(t *testing.T) {
	t.Chdir(t.TempDir())
	command := []string{
		"bench", "--sender", "copa@sim", "--link", "12mbit", "--duration", "2s", "--json", "runs.jsonl",
		"--resume",
	}
	code, one, stderr := run(t, command...)
	require.Equal(t, cli.ExitOK, code, stderr)
	code, two, stderr := run(t, append(command, "--sender", "vegas@sim")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.NotContains(t, stderr, "copa@sim")
	assert.Contains(t, stderr, "vegas@sim")
	row := regexp.MustCompile(`(?m)^copa@sim .*$`)
	assert.Equal(t, strings.Fields(row.FindString(one)), strings.Fields(row.FindString(two)))
	text, err := os.ReadFile("runs.jsonl")
	require.NoError(t, err)
	assert.Equal(t, 2, bytes.Count(text, []byte("\n")))
}

// Runs cost time: their records stand behind earlier ones, and a place where
// nothing can be written is told before the first.
func TestNoRunIsLostToItsOutputs(t *testing.T) {
	t.Chdir(t.TempDir())
	command := []string{"bench", "--sender", "copa@sim", "--link", "12mbit", "--duration", "2s"}
	for range 2 {
		code, _, stderr := run(t, append(command, "--json", "runs.jsonl")...)
		require.Equal(t, cli.ExitOK, code, stderr)
	}
	text, err := os.ReadFile("runs.jsonl")
	require.NoError(t, err)
	assert.Equal(t, 2, bytes.Count(text, []byte("\n")))
	for flag, path := range map[string]string{"--plot": "none/x.png", "--json": "none/x.jsonl"} {
		code, stdout, stderr := run(t, append(command, flag, path)...)
		assert.Equal(t, cli.ExitInput, code)
		assert.Empty(t, stdout)
		assert.Contains(t, stderr, "penstock-lab: "+flag+": ")
		assert.NotContains(t, stderr, "copa@sim", "before anything has run")
		code, _, stderr = run(t, "bench", "recipe", "hosts", "--virtual", "--short", flag, path)
		assert.Equal(t, cli.ExitInput, code)
		assert.Contains(t, stderr, "penstock-lab: "+flag+": ")
	}
	code, _, stderr := run(t, append(command, "--report", "none/x.html")...)
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "penstock-lab: --report: ")
	code, _, stderr = run(t, "mdi", "train", "--output", "none/x.mdi")
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, stderr, "penstock-lab: --output: ")
	assert.NotContains(t, stderr, "run 1 of")
}

// A file that is read, or has records of earlier runs, is not what another output replaces.
func TestNoOutputTakesThePlaceOfAnother(t *testing.T) {
	t.Chdir(t.TempDir())
	const there = "1\n2\n"
	require.NoError(t, os.WriteFile("x.png", []byte(there), 0o600))
	for _, args := range []string{
		"report x.png -o ./x.png",
		"sim --json x.png --report x.png", "sim --json x.png --plot x.png",
		"sim --json x.png --trace-out x.png", "sim --link x.png --json x.png", "sim --up x.png --trace-out x.png",
		"sim --delay-trace x.png --json x.png", "sim x.png --json x.png", "bench --link x.png --json x.png",
		"bench x.png --json x.png", "bench --up x.png --json x.png", "demo --trace x.png --json x.png",
		"bench fidelity --link x.png --report x.png",
	} {
		code, stdout, stderr := run(t, strings.Fields(args)...)
		assert.Equal(t, cli.ExitInput, code, args)
		assert.Empty(t, stdout, args)
		assert.Contains(t, stderr, "x.png would be overwritten", args)
	}
	text, err := os.ReadFile("x.png")
	require.NoError(t, err)
	assert.Equal(t, there, string(text))

	code, _, stderr := run(t, "sim", "--json", "x.jsonl", "--resume", "--trace-out", "windows.jsonl")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "--resume does not go with --trace-out")
}

func TestRecordsBecomeAPage(t *testing.T) {
	t.Chdir(t.TempDir())
	code, _, stderr := run(t, "bench", "--sender", "copa@sim", "--link", "12mbit", "--duration", "2s", "--json",
		"runs.jsonl")
	require.Equal(t, cli.ExitOK, code, stderr)
	code, _, stderr = run(t, "report", "runs.jsonl", "--figures", "figures")
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stderr, "written: report.html")
	assert.FileExists(t, "report.html")
	assert.FileExists(t, "figures/tradeoff-1.svg")
	code, _, stderr = run(t, "bench", "--sender", "copa@sim", "--link", "12mbit", "--duration", "2s", "--report",
		"mine.html")
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.FileExists(t, "mine.html")

	require.NoError(t, os.Mkdir("old", 0o700))
	require.NoError(t, os.Symlink("runs.jsonl", "link.jsonl"))
	records, err := os.ReadFile("runs.jsonl")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile("old/runs.jsonl", records, 0o600))
	code, table, stderr := run(t, "report", "runs.jsonl", "old/runs.jsonl")
	require.Equal(t, cli.ExitOK, code, stderr)
	page, err := os.ReadFile("report.html")
	require.NoError(t, err)
	assert.Contains(t, string(page), "<h1>runs.jsonl beside old/runs.jsonl</h1>")
	assert.Regexp(t, `(?m)^copa@sim +1 +1\.00 +1\.00$`, table)
	for _, row := range []string{"copa@sim, runs.jsonl<", "copa@sim, old/runs.jsonl<"} {
		assert.Equal(t, 1, strings.Count(string(page), "</span>"+row), row)
	}
	for _, again := range []string{"runs.jsonl", "./runs.jsonl", "link.jsonl"} {
		code, _, stderr = run(t, "report", "runs.jsonl", again)
		assert.Equal(t, cli.ExitInput, code)
		assert.Contains(t, stderr, "runs.jsonl and "+again+" are one file: name it once")
	}

	require.NoError(t, os.WriteFile("none.jsonl", nil, 0o600))
	require.NoError(t, os.WriteFile("bad.jsonl", []byte("{\"experiment\":\"a\"}\nno\n"), 0o600))
	for name, says := range map[string]string{
		"none.jsonl": "none.jsonl has no runs", "bad.jsonl": "bad.jsonl: line 2", "nowhere": "no such file",
	} {
		code, _, stderr := run(t, "report", name, "--output", "other.html")
		assert.Equal(t, cli.ExitInput, code)
		assert.Contains(t, stderr, says)
	}
	assert.NoFileExists(t, "other.html")
}

// A bound fails a command where the machine left its runs alone.
func TestWhatTheMachineDisturbedIsNoFailure(t *testing.T) {
	broken := record.Run{Experiment: "a", Findings: []record.Finding{{What: "ratio"}}}
	noisy := record.Run{Experiment: "a", Noisy: true}
	require.ErrorContains(t, failures([]record.Run{broken}), "1 of 1 findings do not hold")
	require.NoError(t, failures([]record.Run{noisy, broken}))
	noisy.Experiment = "before"
	require.ErrorContains(t, failures([]record.Run{noisy, broken}), "1 of 1 findings do not hold")
}

// Under its control a bound of an experiment must fail, or it could not.
func TestABoundFailsUnderTheControl(t *testing.T) {
	need.OneGoroutine(t)
	t.Chdir(t.TempDir())
	const text = "link: {rate: 12mbit, rtt: 20ms}\nalgorithm: copa\nflows: {a: {}}\nduration: 2s\n" +
		"control: {algorithm: cubic}\nmust: [queueing.p95 <= $(most)]\n"
	for most, ends := range map[string]int{"100": cli.ExitOK, "10000": cli.ExitFail} {
		require.NoError(t, os.WriteFile("my.yaml", []byte(strings.Replace(text, "$(most)", most, 1)), 0o600))
		code, _, stderr := run(t, "bench", "recipe", "my.yaml", "--virtual")
		require.Equal(t, cli.ExitOK, code, stderr)
		code, stdout, stderr := run(t, "bench", "recipe", "my.yaml", "--virtual", "--control")
		assert.Equal(t, ends, code, stderr)
		assert.Equal(t, ends == cli.ExitOK, strings.Contains(stdout, "\nFAIL"), stdout)
		assert.Equal(t, ends == cli.ExitFail, strings.Contains(stderr, "my: no finding fails under its control"), stderr)
	}
	held := record.Run{Experiment: "a", Scale: "control", Noisy: true, Findings: []record.Finding{{OK: true}}}
	require.NoError(t, failures([]record.Run{held}), "what the machine disturbed says nothing")
}
