package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/record"
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
	assert.Equal(t, 3, f.runs, "of each sender")
}

// Runs over real sockets and in virtual time with one seed are a pair, unless one of them does not count.
func TestFidelityIsJudgedLinkByLink(t *testing.T) {
	var runs []record.Run
	add := func(seed uint64, mbit, reference float64) {
		of := func(envelope string, mbit float64) record.Run {
			return record.Run{
				Experiment: "fidelity", Name: "copa@" + envelope, Algorithm: "copa", Envelope: envelope,
				Virtual: envelope == "sim", Link: "generate:lte", Seed: seed, Throughput: mbit,
				Queueing: record.Percentiles{P95: 2 * mbit},
			}
		}
		runs = append(runs, of("ebpf", mbit), of("sim", reference))
	}
	add(1, 11, 10)
	add(2, 22, 20)
	add(3, 1, 10)
	runs[len(runs)-2].Discarded = "the emulator lost 3 packets and could not deliver 0"
	f := fidelityFlags{against: "sim"}
	f.envelopes = []string{"ebpf"}
	var b strings.Builder
	require.NoError(t, f.compare(&b, runs))
	assert.Regexp(t, `(?m)ebpf / sim$`, b.String())
	assert.Regexp(t, `(?m)^copa +2 +1\.10.* +1\.10`, b.String())
}

func TestFidelityRefuses(t *testing.T) {
	assertRefused(t, "bench fidelity", map[string]string{
		"-a kopa":           `--algorithm "kopa": no algorithm "kopa"`,
		"-a copa:delta=-1":  `--algorithm "copa:delta=-1"`,
		"-a none":           `--algorithm "none": none leaves the window to the kernel`,
		"--envelope sim":    `--envelope "sim": must be one of cubic, bbr, reno, ebpf, wireguard, for the real runs`,
		"--envelope hybla":  `--envelope "hybla"`,
		"--envelope native": `--envelope "native": must be one of`,
		"--envelope=":       "--envelope is empty",
		"--against bbr":     `--against "bbr": must be sim or native`,
		"--link none.down":  "--link: ",
		"--links 0":         "--links is 0, but must be from 1 to 1000",
		"--link generate:x": `no model "x"`,
		"--buffer 2":        "--buffer: ",
		"--duration 0s":     "--duration: it is missing",
		"--hints 1us":       "--hints: its hints come every 1µs",
		"runs.jsonl":        `takes no arguments, but there is "runs.jsonl"`,
	})
}
