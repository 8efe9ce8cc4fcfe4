package main

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// The same words describe the same link in sim and in bench, and come to the same figures.
func TestSimAndBenchAgree(t *testing.T) {
	t.Chdir(t.TempDir())
	words := []string{
		"--link", "12mbit", "--link", "generate:lte", "--up", "3mbit", "--buffer", "100pkt", "--delay", "15ms",
		"--loss", "0.01",
		"--duration", "5s", "--warmup", "1s", "--flows", "2", "--seeds", "3",
	}
	rows := func(args ...string) (tables string) {
		t.Helper()
		code, stdout, stderr := run(t, append(args, words...)...)
		require.Equal(t, cli.ExitOK, code, stderr)
		return strings.ReplaceAll(strings.ReplaceAll(stdout, "@sim", ""), " ", "")
	}
	virtual := rows("sim", "-a", "copa:delta=0.5", "-a", "cubic")
	assert.Regexp(t, `(?m)^copa:delta=0.51\d`, virtual)
	assert.Equal(t, virtual, rows("bench", "--sender", "copa:delta=0.5@sim,cubic@sim"))
	assert.Equal(t, virtual, rows("sim", "-a", "copa:delta=0.5", "-a", "cubic"), "one seed, one result")
}

func TestSimPrintsJSON(t *testing.T) {
	trace, file := filepath.Join(t.TempDir(), "samples.jsonl"), filepath.Join(t.TempDir(), "runs.jsonl")
	code, _, stderr := run(t, "sim", "-a", "copa", "--sweep", "delta=0.5,0.1", "--sweep", "mode=constant",
		"--flows", "2",
		"--link", "12mbit", "--delay", "20ms", "--duration", "5s", "--warmup", "2s", "--json", file, "--trace-out",
		trace, "--trace-every", "100ms")
	require.Equal(t, cli.ExitOK, code, stderr)
	runs, err := record.Open(file)
	require.NoError(t, err)
	require.Len(t, runs, 2)
	for i, name := range []string{"copa:delta=0.5,mode=constant", "copa:delta=0.1,mode=constant"} {
		r := runs[i]
		assert.Equal(t, name, r.Name)
		assert.Equal(t, "12mbit", r.Link)
		assert.InDelta(t, 12, r.Offered, 1e-9)
		assert.Greater(t, r.Utilisation, 0.9)
		assert.Less(t, r.Queueing.P50, r.OneWay.P50)
		require.Len(t, r.Flows, 2)
		assert.Len(t, r.Flows[0].PerSecond, 5)
	}

	samples := samplesOf(t, trace)
	for _, line := range samples {
		assert.NotEmpty(t, line.Phase)
		assert.Positive(t, line.Cwnd)
		require.Len(t, line.Internals, 5)
		assert.Equal(t, "velocity", line.Internals[1].Name)
		assert.GreaterOrEqual(t, line.Internals[1].Value, 1.0)
	}
	assert.Len(t, samples, 2*2*50)
}

func TestSimReadsFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	write("constant", "1\n")
	good := write("good.yaml", "link: {trace: constant, rtt: 40ms}\nflows: {a: {algorithm: \"static:cwnd_packets=45\"}}\n"+
		"duration: 5s\nwarmup: 1s\nmust: [utilisation >= 0.99]\n")
	bad := write("bad.yaml", "link: {rate: 12mbit, rtt: 40ms}\nalgorithm: static\ngroup: flow\n"+
		"flows: {static: {count: 2}}\nduration: 5s\nmust: [utilisation >= 2]\n")

	code, stdout, stderr := run(t, "sim", good)
	assert.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stdout, "good ")
	assert.Regexp(t, `(?m)^ok +utilisation`, stdout)

	code, stdout, stderr = run(t, "sim", good, bad)
	assert.Equal(t, cli.ExitFail, code, "an expectation that does not hold is a failure, not a mistake")
	assert.Contains(t, stderr, "1 of 2 findings do not hold")
	assert.Regexp(t, `(?m)^bad$\n.*\n^FAIL +utilisation +- +at least 2 +1$`, stdout)

	const link = "link: {rate: 12mbit, rtt: 40ms}\nduration: 1s\n"
	beside := write("beside.yaml", link+"flows: {a: {}, b: {app: udp, rate: 1mbit}}\n")
	many := write("many.yaml", link+"flows: {a: {count: 101}}\n")
	code, stdout, stderr = run(t, "sim", beside, many)
	assert.Equal(t, cli.ExitOK, code, stderr)
	assert.Regexp(t, `beside .* -\n`, stdout, "one flow has nobody to share with")
	assert.Regexp(t, `many .* 0\.\d+\n`, stdout, "flows that are told as one have Jain's index")

	for says, text := range map[string]string{
		"case.yaml:3:29: flows.b.params.delta: copa": "flows: {a: {}, b: {params: {delta: 9}, algorithm: copa}}\n",
		"case.yaml:3:9: flows.a: in virtual time a ": "flows: {a: {app: web, size: 1MB}}\n",
	} {
		code, _, stderr := run(t, "sim", write("case.yaml", link+text))
		assert.Equal(t, cli.ExitInput, code, says)
		assert.Contains(t, stderr, says)
	}
	const fails = "flows: {a: {}}\nmust: [\"seconds('a')[7] > 2\", drops < 0]\n"
	code, stdout, _ = run(t, "sim", write("case.yaml", link+fails))
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, stdout, "not measured: index out of range")
	assert.Regexp(t, `FAIL +drops +- +below 0 +0`, stdout)
}

func TestSimRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "case.yaml")
	require.NoError(t, os.WriteFile(file, []byte("duration: 1s\nfrob: 1\n"), 0o600))
	mistyped := filepath.Join(t.TempDir(), "mistyped.yaml")
	require.NoError(t, os.WriteFile(mistyped, []byte("link: {trace: lte5}\nflows: {a: {}}\nduration: 1s\n"), 0o600))
	assertRefused(t, "sim", map[string]string{
		"--link 12":            `--link: "12" is neither a rate`,
		"--link 0mbit":         `--link: "0mbit" carries nothing`,
		"--link /nope":         "--link: \"/nope\" is neither",
		"--link " + file:       "sim: trace case.yaml: line 1",
		"--link generate:x":    `no model "x"`,
		"--up /nope":           `--up: "/nope" is neither`,
		"--sweep delta":        `--sweep "delta" must be a parameter`,
		"--sweep gamma=1":      `--algorithm: penstock has no`,
		"-a foo":               `--algorithm: no algorithm "foo"; there are`,
		"-a none":              "none leaves the window to the kernel",
		"--up-loss 2":          "--loss and --up-loss must be probabilities",
		"--buffer 1x":          `--buffer: "1x" needs a unit, such as 64KiB or`,
		"--aqm red":            `--aqm: no management "red" of a queue; use`,
		"--ecn yes":            `--ecn: no ECN "yes"; use classic, l4s or off`,
		"--flows -1":           "--flows is -1, but must be at least 1",
		"--flows 0":            "--flows is 0, but must be at least 1",
		"--warmup 30s":         "--warmup: its warm-up is 30s, but must be shorter",
		"--duration -1s":       "--duration: it is missing or above 1h0m0s",
		"--duration 2h":        "it is missing or above 1h0m0s: write such as",
		"--delay -1s":          "--delay, --warmup, --hints and --ack-every",
		"--trace-every 0s":     "--trace-every is 0s, but must be whole millis",
		"--trace-every 3333us": "--trace-every is 3.333ms, but must be",
		"--trace-out /nope/x":  "--trace-out: open /nope/x",
		file:                   "case.yaml:2:1: frob: unknown key",
		mistyped:               `no such file or directory; no model "lte5"`,
		"--loss 0.1 " + file:   "--loss does not go with a file: write it there",
		"/nope":                "open /nope: no such file",
	})
}

func TestTraceEveryIsKept(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, every := range []time.Duration{
		7 * time.Millisecond, 15 * time.Millisecond, 100 * time.Millisecond, 150 * time.Millisecond,
	} {
		code, _, stderr := run(t, "sim", "-a", "copa", "--duration", "1s", "--trace-out", "x.jsonl",
			"--trace-every", every.String())
		require.Equal(t, cli.ExitOK, code, stderr)
		samples := samplesOf(t, "x.jsonl")
		for i, s := range samples {
			require.InDelta(t, float64(i)*every.Seconds(), s.At, 1e-9, every)
		}
		assert.Len(t, samples, int((time.Second+every-1)/every), every)
	}
}

func TestSamplesTellTheirRun(t *testing.T) {
	t.Chdir(t.TempDir())
	for args, want := range map[string]int{
		"-a copa --link 12mbit --link generate:lte --duration 1s": 2,
		"--all -a static:cwnd_packets=4,static:cwnd_packets=8":    2 * (4*1 + 2*2),
	} {
		code, _, stderr := run(t, strings.Fields("sim --trace-out x.jsonl --trace-every 500ms "+args)...)
		require.Equal(t, cli.ExitOK, code, stderr)
		times := map[[4]string]float64{}
		for _, s := range samplesOf(t, "x.jsonl") {
			flow := [4]string{s.Experiment, s.Run, s.Path, s.Flow}
			last, there := times[flow]
			require.True(t, !there || s.At > last, "%v has %v twice", flow, s.At)
			times[flow] = s.At
		}
		assert.Len(t, times, want, args)
	}
}

// samplesOf reads a file of --trace-out.
func samplesOf(t *testing.T, file string) (all []simSample) {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var one simSample
		require.NoError(t, json.Unmarshal(s.Bytes(), &one))
		all = append(all, one)
	}
	return all
}

// Samples of an earlier run stay until there are others.
func TestSamplesStayWhereNothingIsPlayed(t *testing.T) {
	t.Chdir(t.TempDir())
	const unfit = "link: {rate: 12mbit, rtt: 40ms}\nduration: 1s\nflows: {a: {app: web, size: 1MB}}\n"
	require.NoError(t, os.WriteFile("unfit.yaml", []byte(unfit), 0o600))
	for _, args := range []string{"sim unfit.yaml", "sim --json nope/x", "sim --all --json nope/x"} {
		require.NoError(t, os.WriteFile("windows.jsonl", []byte("{}\n"), 0o600))
		code, _, stderr := run(t, append(strings.Fields(args), "--trace-out", "windows.jsonl")...)
		require.Equal(t, cli.ExitInput, code, stderr)
		text, err := os.ReadFile("windows.jsonl")
		require.NoError(t, err)
		assert.Equal(t, "{}\n", string(text), args)
	}
}
