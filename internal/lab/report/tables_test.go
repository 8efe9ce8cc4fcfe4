package report

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, string(want), got)
}

// result makes up a run whose figures follow from throughput and delay.
func result(sender, kernel string, run int, mbit, p95 float64) record.Run {
	return record.Run{
		Name: sender, Kernel: kernel, Link: "generate:lte:1", Up: record.Same, Experiment: "bench",
		Buffer: "2MB", Delay: 10, Duration: 30,
		Seed: uint64(run), Attempt: 1, StartedAt: time.Date(2026, 11, 21, 3, 0, 0, 0, time.UTC),
		Version: "penstock devel", System: record.System{Kernel: "6.18.0", Arch: "amd64", CPUs: 2},
		Throughput: mbit, Offered: 10, Utilisation: mbit / 10,
		Queueing: record.Percentiles{Mean: p95 / 2, P50: p95 / 2, P95: p95, P99: p95 * 1.5, Max: p95 * 2},
		OneWay:   record.Percentiles{Mean: p95/2 + 10, P50: p95/2 + 10, P95: p95 + 10, P99: p95*1.5 + 10, Max: p95*2 + 10},
		Packets:  25000, QueueDrops: 250, Retransmitted: 0.0123,
		Lateness: record.Percentiles{P50: 0.01, P95: 0.05, P99: 0.1, Max: 3},
	}
}

func proxied(sender string, run int, mbit, p95, cpu float64) record.Run {
	r := result(sender, "", run, mbit, p95)
	r.Algorithm, r.Envelope, r.QueueDrops, r.Retransmitted = sender, "bbr", 0, 0
	share := cpu / 100
	r.CPUPerGB, r.CPUShare = &cpu, &share
	return r
}

func someResults() []record.Run {
	noisy := result("bbr", "bbr", 2, 9.2, 250)
	noisy.Noisy, noisy.Lateness.P99 = true, 4.2
	discarded := proxied("copa", 2, 1, 1, 1)
	discarded.Discarded = "the emulator lost 3 packets and could not deliver 0"
	other := result("cubic", "cubic", 1, 0.5, 0.4)
	other.Reorder, other.ReorderBy = 0.02, 5
	other.Up, other.Buffer, other.Loss = "2mbit", record.None, 0.01
	return []record.Run{
		result("cubic", "cubic", 1, 9.9, 3000), result("bbr", "bbr", 1, 9.5, 230), proxied("copa", 1, 9.4, 87.123,
			1.25),
		result("cubic", "cubic", 2, 9.8, 3200), noisy, discarded,
		result("cubic", "cubic", 3, 9.7, 2900), proxied("copa", 3, 9.6, 91, 1.5), other,
	}
}

// faded makes up runs of the same senders with and without random loss.
func faded() []record.Run {
	at := func(r record.Run, loss float64) record.Run {
		r.Loss = loss
		return r
	}
	ours := proxied("copa", 1, 9.4, 87, 1.25)
	poor := ours
	poor.Throughput = 4.7
	gone := result("bbr", "bbr", 1, 9, 200)
	gone.Discarded = "it went over bbr and not over ebpf"
	direct := result("cubic", "cubic", 1, 9.9, 3000)
	return []record.Run{
		direct, result("bbr", "bbr", 1, 9.5, 230), ours,
		at(result("cubic", "cubic", 1, 5.5, 20), 0.01), at(gone, 0.01), at(poor, 0.01),
		at(result("reno", "reno", 1, 3, 20), 0.001),
	}
}

// inVirtualTime makes up a run in virtual time.
func inVirtualTime(sender string, mbit, p95 float64) record.Run {
	r := result(sender+"@sim", "", 1, mbit, p95)
	r.Algorithm, r.Virtual, r.Transport = sender, true, "kernel"
	r.Lateness, r.QueueDrops, r.Retransmitted = record.Percentiles{}, 0, 0
	return r
}

func relayed(r record.Run) record.Run {
	r.Transport = "relay"
	return r
}

func TestTables(t *testing.T) {
	for name, results := range map[string][]record.Run{
		"several runs, two paths": someResults(),
		"three losses":            faded(),
		"real beside virtual": {
			result("cubic", "cubic", 1, 9.9, 3000), proxied("copa", 1, 9.4, 87, 1.25), inVirtualTime("copa", 9.5, 85),
		},
		"virtual alone":            {inVirtualTime("copa", 9.5, 85), relayed(inVirtualTime("cubic", 9.9, 3000))},
		"one run of each":          someResults()[:3],
		"nobody to compare with":   {proxied("copa", 1, 9.4, 87, 1.25)},
		"nothing that counts":      {someResults()[5]},
		"nothing was finished yet": nil,
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			require.NoError(t, WriteTables(&b, results))
			golden(t, strings.NewReplacer(" ", "-", ",", "").Replace(name)+".golden", b.String())
		})
	}
}

func TestNumbers(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 3: "3", 0.126: "0.13", 9.5: "9.5", 12.34: "12.3", 100.6: "101",
		3416.2: "3416", -0.251: "-0.25",
	} {
		assert.Equal(t, want, figures.Number(v))
	}
	for _, c := range []struct {
		a, b float64
		want string
	}{{5, 5, "1.00×"}, {4.75, 5, "0.95×"}, {12, 5, "2.40×"}, {1, 10, "1/10"}, {2, 67, "1/33.5"}, {0, 5, "0"}, {
		1, 0,
		"-",
	}} {
		assert.Equal(t, c.want, figures.Ratio(c.a, c.b))
	}
}
