package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/recipe"
)

func TestFidelityComparesEachAlgorithmWithItself(t *testing.T) {
	f := fidelityFlags{
		algorithms: []string{"penstock", "static:cwnd_packets=50,pacing_mbit=8", "cubic", "copa:paper,delta=0.25"},
		against:    "sim", model: "lte", links: 3, buffer: "2MB",
	}
	f.envelopes, f.Delay, f.Duration = []string{"ebpf"}, 10*time.Millisecond, 20*time.Second
	r, err := f.experiment()
	require.NoError(t, err)
	stages, err := r.Stages(recipe.Full, 1)
	require.NoError(t, err)
	var names []string
	for i, s := range stages {
		names = append(names, s.Name)
		assert.Equal(t, i%2 == 1, s.Virtual)
	}
	assert.Equal(t, []string{
		"penstock@ebpf", "penstock@sim",
		"static:cwnd_packets=50,pacing_mbit=8@ebpf", "static:cwnd_packets=50,pacing_mbit=8@sim",
		"cubic@ebpf", "cubic@sim", "copa:paper,delta=0.25@ebpf", "copa:paper,delta=0.25@sim",
	}, names)
	assert.Equal(t, []uint{1, 2, 3}, f.seeds)
}

func TestFidelityRefuses(t *testing.T) {
	for args, complaint := range map[string]string{
		"-a kopa":           `--algorithm "kopa": no algorithm "kopa"`,
		"-a copa:delta=-1":  `--algorithm "copa:delta=-1"`,
		"-a none":           `--algorithm "none": none leaves the window to the kernel`,
		"--envelope sim":    `--envelope "sim": must be one of cubic, bbr, reno, ebpf, wireguard, for the real runs`,
		"--envelope hybla":  `--envelope "hybla"`,
		"--envelope native": `--envelope "native": must be one of`,
		"--against bbr":     `--against "bbr": must be sim or native`,
		"--trace none.down": "--trace: ",
		"--links 0":         "--links is 0, but must be from 1 to 1000",
		"--generate lte:7":  `--generate: no model "lte:7"`,
		"--buffer 2":        "--buffer: ",
		"--duration 0s":     "--duration 0s",
		"--hints 1us":       "--hints: its hints come every 1µs",
		"runs.jsonl":        `takes no arguments, but there is "runs.jsonl"`,
	} {
		code, stdout, stderr := run(t, append([]string{"bench", "fidelity"}, strings.Fields(args)...)...)
		assert.Equal(t, cli.ExitInput, code, args)
		assert.Contains(t, stderr, complaint, args)
		assert.Empty(t, stdout, args)
	}
}
