package bench

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/netlab"
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
func result(sender, kernel string, run int, mbit, p95 float64) Result {
	return Result{
		Sender: sender, Kernel: kernel, Link: "generate:lte:1", Up: upSame, Buffer: "2MB", Delay: 10, Duration: 30,
		Seed: 1, Run: run, Attempt: 1, StartedAt: time.Date(2026, 11, 21, 3, 0, 0, 0, time.UTC),
		Version: "penstock devel", System: System{Kernel: "6.18.0", Arch: "amd64", CPUs: 2},
		Throughput: mbit, Offered: 10, Utilisation: mbit / 10,
		Queueing: Percentiles{Mean: p95 / 2, P50: p95 / 2, P95: p95, P99: p95 * 1.5, Max: p95 * 2},
		OneWay:   Percentiles{Mean: p95/2 + 10, P50: p95/2 + 10, P95: p95 + 10, P99: p95*1.5 + 10, Max: p95*2 + 10},
		Packets:  25000, QueueDrops: 250, Retransmitted: 0.0123,
		Lateness: Percentiles{P50: 0.01, P95: 0.05, P99: 0.1, Max: 3},
	}
}

func proxied(sender string, run int, mbit, p95, cpu float64) Result {
	r := result(sender, "", run, mbit, p95)
	r.Algorithm, r.Envelope, r.Ingress, r.QueueDrops, r.Retransmitted = sender, "bbr", IngressTPROXY, 0, 0
	share := cpu / 100
	r.CPUPerGB, r.CPUShare = &cpu, &share
	r.Window = &Window{
		Samples: 600, KernelCovers: 0.9951,
		KernelCwnd: Spread{Median: 44, Min: 20, Max: 60}, Cwnd: Spread{
			Median: 22, Min: 10,
			Max: 40,
		}, Pipe: Spread{Median: 21.5, Min: 3, Max: 41},
		PipeExcess: 0.75,
	}
	return r
}

func someResults() []Result {
	noisy := result("bbr", "bbr", 2, 9.2, 250)
	noisy.Noisy, noisy.Lateness.P99 = true, 4.2
	discarded := proxied("copa", 2, 1, 1, 1)
	discarded.Discarded = "the emulator lost 3 packets and could not deliver 0"
	other := result("cubic", "cubic", 1, 0.5, 0.4)
	other.Reorder, other.ReorderBy = 0.02, 5
	other.Up, other.Buffer, other.Loss = "2mbit", bufferNone, 0.01
	return []Result{
		result("cubic", "cubic", 1, 9.9, 3000), result("bbr", "bbr", 1, 9.5, 230), proxied("copa", 1, 9.4, 87.123,
			1.25),
		result("cubic", "cubic", 2, 9.8, 3200), noisy, discarded,
		result("cubic", "cubic", 3, 9.7, 2900), proxied("copa", 3, 9.6, 91, 1.5), other,
	}
}

// faded makes up runs of the same senders with and without random loss.
func faded() []Result {
	at := func(r Result, loss float64) Result {
		r.Loss = loss
		return r
	}
	ours := proxied("copa", 1, 9.4, 87, 1.25)
	ours.Answer = &Answer{Count: 9000, P50: 0.0812, P99: 1.25}
	ours.Departures = &Departures{
		Packets: 25000, Again: 3, Inflight: Occupancy{P50: 21, P95: 22, Max: 22}, Pipe: Occupancy{
			P50: 21, P95: 22,
			Max: 23,
		},
		Gaps: Tails{P5: 1.5, P50: 1001.2, P95: 2010}, IdealGap: 1448, Ratio: &Tails{P5: 0.001, P50: 0.692, P95: 1.39},
	}
	poor := ours
	poor.Throughput, poor.Answer = 4.7, nil
	gone := result("bbr", "bbr", 1, 9, 200)
	gone.Discarded = mistaken("ebpf", "bbr")
	direct := result("cubic", "cubic", 1, 9.9, 3000)
	direct.Departures = &Departures{
		Packets: 26000, Missed: 5, Inflight: Occupancy{P50: 200, P95: 280, Max: 290},
		Gaps: Tails{P50: 990},
	}
	return []Result{
		direct, result("bbr", "bbr", 1, 9.5, 230), ours,
		at(result("cubic", "cubic", 1, 5.5, 20), 0.01), at(gone, 0.01), at(poor, 0.01),
		at(result("reno", "reno", 1, 3, 20), 0.001),
	}
}

// virtual makes up a run in virtual time.
func virtual(sender string, mbit, p95 float64) Result {
	r := result(sender+"@sim", "", 1, mbit, p95)
	r.Algorithm, r.Envelope, r.Transport, r.Lateness, r.QueueDrops, r.Retransmitted = sender, EnvelopeSim, "kernel", Percentiles{}, 0, 0
	return r
}

func relayed(r Result) Result {
	r.Transport = "relay"
	return r
}

func TestTables(t *testing.T) {
	for name, c := range map[string]struct {
		results []Result
		windows bool
	}{
		"several runs, two paths": {someResults(), true},
		"three losses":            {faded(), true},
		"real beside virtual": {[]Result{
			result("cubic", "cubic", 1, 9.9, 3000),
			proxied("copa", 1, 9.4, 87, 1.25), virtual("copa", 9.5, 85),
		}, true},
		"virtual alone":            {[]Result{virtual("copa", 9.5, 85), relayed(virtual("cubic", 9.9, 3000))}, true},
		"one run of each":          {someResults()[:3], false},
		"nobody to compare with":   {[]Result{proxied("copa", 1, 9.4, 87, 1.25)}, true},
		"nothing that counts":      {[]Result{someResults()[5]}, true},
		"nothing was finished yet": {nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			require.NoError(t, WriteTables(&b, c.results, c.windows))
			golden(t, strings.NewReplacer(" ", "-", ",", "").Replace(name)+".golden", b.String())
		})
	}
}

func TestJSONKeepsEverything(t *testing.T) {
	want := append(append(someResults(), faded()...), virtual("copa", 9.5, 85))
	var b bytes.Buffer
	for _, r := range want {
		require.NoError(t, WriteJSON(&b, r))
	}
	assert.Equal(t, len(want), strings.Count(b.String(), "\n"), "one line for each run")
	got, err := ReadJSON(&b)
	require.NoError(t, err)
	assert.Equal(t, want, got)

	b.Reset()
	require.NoError(t, WriteJSON(&b, virtual("copa", 9.5, 85)))
	for _, absent := range []string{"lateness", "proxy_cpu", "window", "departures", "ingress"} {
		assert.NotContains(t, b.String(), absent, "there is none in virtual time")
	}

	_, err = ReadJSON(strings.NewReader("{}\n{\"run\": \"x\"}\n"))
	assert.ErrorContains(t, err, "line 2")
}

func TestConclusion(t *testing.T) {
	assert.Equal(t, "Copa through Penstock has 97 % of Cubic's throughput, and 19 of 20 packets spend less than "+
		"89.1 ms in the queue instead of 3000 ms (1/33.7).",
		Conclusion(someResults()))
	assert.Regexp(t, "^Penstock has 94 %", Conclusion([]Result{
		someResults()[0],
		proxied("penstock", 1, 9.3, 70, 1.25),
	}))
	assert.Empty(t, Conclusion(nil))
	assert.Empty(t, Conclusion(someResults()[:2]), "there is nothing of ours")
	assert.Empty(t, Conclusion(someResults()[2:3]), "there is nothing to compare with")
	assert.Empty(t, Conclusion([]Result{someResults()[0], virtual("copa", 9.5, 85)}), "nothing went through Penstock")
}

func TestARunOverAnotherEnvelopeIsNotCounted(t *testing.T) {
	assert.Equal(t, "it went over bbr and not over ebpf", mistaken("ebpf", "bbr"))
	assert.Empty(t, mistaken("ebpf", "ebpf"))
	assert.Empty(t, mistaken("", "bbr"), "the proxy chose")
	assert.Empty(t, mistaken("bbr", ""), "the proxy did not say")
}

func TestWindow(t *testing.T) {
	at := func(packets, kernel, pipe float64) windowSample {
		return windowSample{ours: cc.Bytes(packets * 1448), kernel: socket{cwnd: kernel, pipe: pipe, mss: 1448}}
	}
	assert.Nil(t, window(nil))
	assert.Nil(t, window([]windowSample{{}}), "the connection was not up yet")

	w := window([]windowSample{at(22, 44, 20), at(22, 22, 22), at(22, 21, 23), at(22.5, 22, 10)})
	require.NotNil(t, w)
	assert.Equal(t, 4, w.Samples)
	assert.InDelta(t, 0.75, w.KernelCovers, 0, "half a packet is never sent, so 22 covers 22.5")
	assert.InDelta(t, 1, w.PipeExcess, 1e-3)
	assert.InDelta(t, 22, w.KernelCwnd.Median, 0)

	w = window([]windowSample{at(22, 44, 20)})
	require.NotNil(t, w)
	assert.InDelta(t, -2, w.PipeExcess, 1e-3, "it never reached the window")
}

func TestSpread(t *testing.T) {
	assert.Equal(t, Spread{Median: 2, Min: 2, Max: 2}, spread([]float64{2}))
	assert.Equal(t, Spread{Median: 2, Min: 1, Max: 9}, spread([]float64{9, 1, 2}))
	assert.Equal(t, Spread{Median: 2.5, Min: 1, Max: 9}, spread([]float64{3, 9, 1, 2}))
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

func TestMergeSteps(t *testing.T) {
	step := func(at int, mbit cc.Rate, queueing time.Duration) netlab.Point {
		return netlab.Point{
			At: time.Duration(at) * 100 * time.Millisecond, Throughput: mbit * 1e6, Offered: 12e6,
			Queueing: queueing, MaxQueue: 2 * queueing, Drops: 1,
		}
	}
	got := merge([]netlab.Point{
		step(0, 10, 30*time.Millisecond), step(1, 5, 90*time.Millisecond), step(2, 0, 0),
		step(3, 3, 0), step(4, 1, 0),
	}, 2)
	require.Len(t, got, 2, "the rest is left out")
	assert.Equal(t, netlab.Point{
		At: 0, Throughput: 7.5e6, Offered: 12e6, Queueing: 50 * time.Millisecond, MaxQueue: 180 * time.Millisecond, Drops: 2,
	}, got[0], "delays are weighted by what left")
	assert.Zero(t, got[1].Queueing)
}

func TestPlots(t *testing.T) {
	r := result("cubic", "cubic", 1, 9.9, 3000)
	for i := range 30 {
		r.series = append(r.series, netlab.Point{
			At: time.Duration(i) * netlab.DefaultStep, Throughput: 9e6,
			Offered: 10e6, Queueing: time.Duration(i*i) * time.Millisecond,
		})
	}
	other := r
	other.Buffer = "250pkt"
	dir := t.TempDir()

	names, err := WritePlots(filepath.Join(dir, "one.png"), []Result{r})
	require.NoError(t, err)
	assert.Equal(t, []string{filepath.Join(dir, "one.png")}, names)

	names, err = WritePlots(filepath.Join(dir, "two.png"), []Result{r, other})
	require.NoError(t, err)
	assert.Equal(t, []string{filepath.Join(dir, "two-1.png"), filepath.Join(dir, "two-2.png")}, names)
	for _, name := range names {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		assert.Equal(t, "\x89PNG", string(b[:4]))
	}

	other.Buffer, other.Loss = r.Buffer, 0.01
	names, err = WritePlots(filepath.Join(dir, "loss.png"), []Result{r, other})
	require.NoError(t, err)
	assert.Len(t, names, 2, "a picture for each probability of loss")

	names, err = WritePlots(filepath.Join(dir, "three.png"), []Result{result("cubic", "cubic", 1, 9.9, 3000)})
	require.NoError(t, err)
	assert.Empty(t, names, "read back from JSON, a result has no series")

	_, err = WritePlots("out.pdf", []Result{r})
	assert.ErrorContains(t, err, ".png")
}

func TestPrinter(t *testing.T) {
	trial := testPlan(t).Trials()[0]
	r := result("cubic", "cubic", 1, 11.9, 250)
	underway := Progress{
		Trial: trial, Number: 1, Total: 2, Attempt: 1, Elapsed: 1500 * time.Millisecond,
		Of: 3 * time.Second, Throughput: 11_900_000, Queueing: 170 * time.Millisecond,
	}
	over := underway
	over.Result, over.Attempt = &r, 2

	var plain, terminal bytes.Buffer
	p := NewPrinter(&plain)
	p.Show(underway)
	p.Show(over)
	p.Break()
	assert.Equal(t, "[1/2] cubic on 12mbit, buffer 250pkt (again, the first was noisy): 11.90 Mbit/s, queueing p50 "+
		"125 ms, p95 250 ms\n", plain.String())

	p = &Printer{w: &terminal, terminal: true}
	p.Show(underway)
	assert.Equal(t, "\r\x1b[K[1/2] cubic on 12mbit, buffer 250pkt:  2 of 3 s, 11.90 Mbit/s, queueing  170 ms",
		terminal.String())
	p.Break()
	assert.True(t, strings.HasSuffix(terminal.String(), "ms\n"), "what follows begins on a line of its own")
}

func TestLinesFitTheTerminal(t *testing.T) {
	line := "[1/9] static:cwnd_packets=22@cubic on Verizon-LTE-short.down, buffer 250pkt: 10 of 30 s, 10.00 " +
		"Mbit/s, queueing 1000 ms"
	assert.Equal(t, line, fit(line, 0), "the width is not known")
	assert.Equal(t, line, fit(line, 200))
	assert.Equal(t, "[1/9] static:cwnd_packets=22@cubic … 10 of 30 s, 10.00 Mbit/s, queueing 1000 ms", fit(line, 80))
	for columns := 1; columns < 130; columns++ {
		assert.Less(t, utf8.RuneCountInString(fit(line, columns)), max(columns, 2))
	}
}
