package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/need"
)

// A run with a model that has changed is another run.
func TestResumeMakesRunsAgainWhoseModelHasChanged(t *testing.T) {
	need.OneGoroutine(t)
	t.Chdir(t.TempDir())
	for i, teacher := range []string{"copa:delta=0.5", "cubic", "cubic"} {
		code, _, stderr := run(t, "mdi", "train", "--algorithm", teacher, "--runs", "1", "--duration", "10s",
			"--windows=-20,20,4", "--output", "model.csv")
		require.Equal(t, cli.ExitOK, code, stderr)
		code, _, stderr = runApart(t, "sim", "--mdi-model", "mine=model.csv", "-a", "mdi:model=mine",
			"--duration", "2s", "--json", "runs.jsonl", "--resume")
		require.Equal(t, cli.ExitOK, code, stderr)
		records, err := record.Open("runs.jsonl")
		require.NoError(t, err)
		assert.Len(t, records, []int{1, 2, 2}[i])
	}
}

// A record names the build of the proxy that it is of.
func TestRunsThroughAnotherBuildOfTheProxyAreItsOwn(t *testing.T) {
	if testing.Short() {
		t.Skip("runs in real time, left out with -short")
	}
	need.OverLink(t)
	need.TUN(t)
	proxy, err := labtest.Build(t.TempDir())
	require.NoError(t, err)
	t.Chdir(t.TempDir())
	for i, build := range []string{"penstock v0", "penstock v1", "penstock v1"} {
		script := fmt.Sprintf("#!/bin/sh\nif [ \"$1\" = version ]; then echo %s; exit; fi\nexec %s \"$@\"\n",
			build, proxy)
		require.NoError(t, os.WriteFile("other", []byte(script), 0o700)) //nolint:gosec // a program
		there, err := filepath.Abs("other")
		require.NoError(t, err)
		code, _, stderr := run(t, "bench", "--penstock", there, "--sender", "cubic", "--sender", "copa",
			"--sender", "copa@sim", "--link", "12mbit", "--duration", "1s", "--json", "runs.jsonl", "--resume")
		if strings.Contains(stderr, "a user namespace is needed") {
			need.Namespaces(t, errors.New(stderr)) //nolint:err113 // the program's words
		}
		require.Equal(t, cli.ExitOK, code, stderr)
		records, err := record.Open("runs.jsonl")
		require.NoError(t, err)
		require.Len(t, records, []int{3, 4, 4}[i], "what needs no proxy is there")
		versions := map[string]string{}
		for _, r := range records {
			versions[r.Name] = r.Version
		}
		own := cli.ReadBuild().String()
		assert.Equal(t, map[string]string{"cubic": own, "copa@sim": own, "copa": own + ", proxy " + build}, versions)
	}
}

// What is there of an experiment stands in its table with its figures, whether anything must hold of it or not.
func TestAResumedRecipeTellsWhatIsThere(t *testing.T) {
	t.Chdir(t.TempDir())
	const text = `link: {rate: 12mbit, rtt: 20ms}
vary: {algorithm: [copa, vegas]}
name: $(algorithm)
algorithm: $(algorithm)
flows: {a: {}, b: {}}
virtual: true
duration: 2s
`
	for must, ends := range map[string]int{"": cli.ExitOK, "must: [run(\"copa\").utilisation >= 2]\n": cli.ExitFail} {
		require.NoError(t, os.WriteFile("my.yaml", []byte(text+must), 0o600))
		require.NoError(t, os.RemoveAll("runs.jsonl"))
		var want string
		var lines []string
		for _, there := range []int{0, 1, 2, 4} {
			if there > 0 {
				require.NoError(t, os.WriteFile("runs.jsonl", []byte(strings.Join(lines[:there], "")), 0o600))
			}
			code, stdout, stderr := run(t, "bench", "recipe", "my.yaml", "--runs", "2", "--json", "runs.jsonl",
				"--resume")
			require.Equal(t, ends, code, stderr)
			if there == 0 {
				written, err := os.ReadFile("runs.jsonl")
				require.NoError(t, err)
				want, lines = stdout, strings.SplitAfter(string(written), "\n")
			}
			assert.Equal(t, want, stdout, "%d of four runs are there", there)
			doubtful := there > 0 && !cli.Exact(cli.ReadBuild().String())
			assert.Equal(t, doubtful, strings.Contains(stderr, "does not tell its source"), stderr)
		}
	}
}

// What is there was judged by the bounds of its time: others have it played again, and take its place.
func TestResumeJudgesByTheBoundsOfNow(t *testing.T) {
	t.Chdir(t.TempDir())
	const text = "link: {rate: 12mbit, rtt: 20ms}\nalgorithm: copa\nflows: {a: {}}\nduration: 2s\n"
	for _, c := range []struct {
		must, says string
		ends       int
		played     bool
	}{
		{"must: [utilisation >= 0.5]\n", "at least 0.5", cli.ExitOK, true},
		{"must: [utilisation >= 0.5] # as before\n", "at least 0.5", cli.ExitOK, false},
		{"must: [utilisation >= 2]\n", "at least 2", cli.ExitFail, true},
		{"must: [{is: utilisation, when: not virtual, at_least: 2}]\n", "", cli.ExitOK, true},
		{"must: [{is: utilisation, when: not virtual, at_least: 2}]\n", "", cli.ExitOK, false},
	} {
		require.NoError(t, os.WriteFile("my.yaml", []byte(text+c.must), 0o600))
		code, stdout, stderr := run(t, "bench", "recipe", "my.yaml", "--virtual", "--json", "runs.jsonl", "--resume")
		assert.Equal(t, c.ends, code, stderr)
		assert.Contains(t, stdout, c.says)
		assert.Equal(t, c.played, strings.Contains(stderr, "my 1/1"), c.must)
		records, err := record.Open("runs.jsonl")
		require.NoError(t, err)
		assert.Len(t, records, 1)
	}
}

// Records that are not replaced keep their bytes, and what cannot be read is told before anything is played.
func TestWhatIsNotReplacedStaysAsItIs(t *testing.T) {
	t.Chdir(t.TempDir())
	const text = `link: {rate: 12mbit, rtt: 20ms}
flows: {a: {}}
duration: 2s
must: [utilisation >= 0.5]
`
	require.NoError(t, os.WriteFile("my.yaml", []byte(text), 0o600))
	const others = "{\"experiment\": \"other\", \"of_later_builds\": 1.50}\n\n"
	const old = "{\"experiment\":\"my\",\"virtual\":true,\"version\":\"penstock of yesterday\"}\n"
	command := []string{"bench", "recipe", "my.yaml", "--virtual", "--json", "runs.jsonl"}

	require.NoError(t, os.WriteFile("runs.jsonl", []byte(others+old+others), 0o600))
	code, _, stderr := run(t, append(command, "--replace")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	left, err := os.ReadFile("runs.jsonl")
	require.NoError(t, err)
	assert.True(t, strings.HasPrefix(string(left), others+others+"{\"experiment\":\"my\""), string(left))
	assert.Equal(t, 5, strings.Count(string(left), "\n"))

	const unread = others + "{\"suite\":\"of an older form\"}\n"
	require.NoError(t, os.WriteFile("runs.jsonl", []byte(unread), 0o600))
	code, stdout, stderr := run(t, append(command, "--replace")...)
	assert.Equal(t, cli.ExitInput, code)
	assert.Empty(t, stdout)
	assert.Contains(t, stderr, "--json: runs.jsonl: line 3: it is no record of a run")
	assert.NotContains(t, stderr, "my 1/1")
	code, _, stderr = run(t, command...)
	assert.Equal(t, cli.ExitOK, code, stderr)
	left, err = os.ReadFile("runs.jsonl")
	require.NoError(t, err)
	assert.True(t, strings.HasPrefix(string(left), unread+"{\"experiment\":\"my\""))
}

// Runs with a proxy of another build and runs without one are of one session.
func TestASessionDoesNotReplaceItsOwnRuns(t *testing.T) {
	t.Chdir(t.TempDir())
	runs := []record.Run{
		{Experiment: "a", Name: "copa", Version: "penstock v0"},
		{Experiment: "a", Name: "cubic", Version: "penstock v1"},
		{Experiment: "a", Name: "copa", Version: "penstock v1, proxy v2"},
	}
	var text strings.Builder
	for _, r := range runs {
		require.NoError(t, record.Write(&text, r))
	}
	require.NoError(t, os.WriteFile("runs.jsonl", []byte(text.String()), 0o600))
	s := session{outputs: outputs{json: "runs.jsonl", replace: true}, there: runs[:2], all: runs[1:]}
	require.NoError(t, s.drop())
	left, err := record.Open("runs.jsonl")
	require.NoError(t, err)
	assert.Equal(t, runs[1:], left, "one is there, one was made now")
}
