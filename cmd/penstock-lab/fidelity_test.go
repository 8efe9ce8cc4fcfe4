package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
)

func TestFidelityComparesEachAlgorithmWithItself(t *testing.T) {
	f := fidelityFlags{against: "sim", links: 3}
	f.senders = []string{"penstock", "static:cwnd_packets=50,pacing_mbit=8", "cubic", "copa:paper,delta=0.25"}
	f.envelopes = []string{"ebpf"}
	require.NoError(t, f.readSenders())
	var names []string
	for i, s := range f.Senders {
		names = append(names, s.Name)
		assert.Equal(t, i%2 == 1, s.Virtual())
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
		"--link none.down":  "--link: ",
		"--links 0":         "--links is 0, but must be from 1 to 1000",
		"--link generate:x": `no model "x"`,
		"--buffer 2":        "--buffer: ",
		"--duration 0s":     "--duration: it is missing",
		"--hints 1us":       "--hints: its hints come every 1µs",
		"runs.jsonl":        `takes no arguments, but there is "runs.jsonl"`,
	} {
		code, stdout, stderr := run(t, append([]string{"bench", "fidelity"}, strings.Fields(args)...)...)
		assert.Equal(t, cli.ExitInput, code, args)
		assert.Contains(t, stderr, complaint, args)
		assert.Empty(t, stdout, args)
	}
}
