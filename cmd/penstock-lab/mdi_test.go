package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/need"
)

// runApart executes one command line in a process of its own: models that are
// added stay.
func runApart(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := clitest.Program(t.Context(), args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestMDITrainWritesAModelThatCommandsTake(t *testing.T) {
	need.OneGoroutine(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "model.csv")
	args := []string{
		"mdi", "train", "--algorithm", "copa:delta=0.5", "--runs", "3", "--duration", "10s", "--windows=-20,20,4",
		"generate:lte", "generate:walk",
	}
	code, stdout, stderr := run(t, append(args, "--output", file)...)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Empty(t, stdout)
	progress := strings.Split(strings.TrimSpace(stderr), "\n")
	require.Len(t, progress, 3)
	assert.Regexp(t, `^run 1 of 3: generate:lte with seed 1, [\d.]+ Mbit/s, 1[78]\d\d epochs$`, progress[0])
	assert.Regexp(t, `^run 2 of 3: generate:walk with seed 2, `, progress[1])
	assert.Regexp(t, `^run 3 of 3: generate:lte with seed 3, `, progress[2])

	text, err := os.ReadFile(file)
	require.NoError(t, err)
	lines := strings.Split(string(text), "\n")
	assert.Equal(t, "11,-20,20,4,3,-0.5,0.5,0.5,9,0,4,0.5", lines[1])
	require.True(t, strings.HasPrefix(lines[0], "# penstock-lab "), lines[0])

	again := filepath.Join(dir, "again.csv")
	command := strings.Fields(strings.TrimPrefix(lines[0], "# penstock-lab "))
	code, _, stderr = run(t, append(command, "--output", again)...)
	require.Equal(t, cli.ExitOK, code, stderr)
	same, err := os.ReadFile(again)
	require.NoError(t, err)
	assert.Equal(t, string(text), string(same), "the command line in a model makes it again")

	runs := filepath.Join(dir, "runs.jsonl")
	code, _, stderr = runApart(t, "sim", "--mdi-model", "trained="+file, "-a", "mdi:model=trained", "-a", "mdi",
		"--duration", "5s", "--json", runs)
	require.Equal(t, cli.ExitOK, code, stderr)
	records, err := record.Open(runs)
	require.NoError(t, err)
	require.Len(t, records, 2)
	assert.NotEqual(t, records[0].Throughput, records[1].Throughput, "another model, another walk")
}

func TestMDIRefuses(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.csv")
	require.NoError(t, os.WriteFile(bad, []byte("1,2,3\n"), 0o600))
	for args, complaint := range map[string]string{
		"mdi train":                     `required flag(s) "output" not set`,
		"mdi train -o x -a frob":        `--algorithm: no algorithm "frob"`,
		"mdi train -o x generate:frob":  `link generate:frob: "generate:frob": no model "frob"`,
		"mdi train -o x --runs 201":     "--runs is 201, but must be from 1 to 200",
		"mdi train -o x --duration 1s":  "--duration is 1s, but must be at least 2s",
		"mdi train -o x --buffer 1x":    `--buffer: "1x" needs a unit`,
		"mdi train -o x --delay -1s":    "the delay is -1s",
		"mdi train -o x --windows 1,2":  `--windows: "1,2" is not LEAST,LARGEST,STEP`,
		"mdi train -o x --delays a,2,3": `--delays: "a" is not a number`,
		"mdi train -o x --levels 0":     `--levels: "0" is not LEAST,LARGEST,STEP, such as -60,60,5`,
		"mdi train -o x --delays=-10,10,3": "--windows, --delays and --levels: the delay's changes do " +
			"not reach from -10 to 10",
		"algorithms --mdi-model x":       "write NAME=FILE",
		"algorithms --mdi-model x=/nope": "open /nope",
		"algorithms --mdi-model x=" + bad: bad + ": cc: mdi model: line 1: a grid has 8 " +
			"numbers, or 12 with levels, not 3",
		"algorithms --mdi-model verus=" + bad:                     "the mdi model verus is built in",
		"mdi train --runs 1 --duration 2s -o " + dir + "/no/file": "--output: open",
	} {
		code, stdout, stderr := run(t, strings.Fields(args)...)
		assert.NotEqual(t, cli.ExitOK, code, args)
		assert.Contains(t, stderr, complaint, args)
		assert.Empty(t, stdout, args)
	}
	code, _, _ := run(t, "mdi", "train", "--runs", "1", "--duration", "2s", "-o", dir+"/no/file")
	assert.Equal(t, cli.ExitFail, code, "a disk that does not take it is nobody's typing mistake")
}
