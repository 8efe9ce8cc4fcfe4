package report

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// virtual are runs of those senders in virtual time.
func virtual(t *testing.T, seeds int, senders ...string) (all []record.Run) {
	t.Helper()
	link := sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: 250}
	s := stage.Stage{
		Down: link, Up: link, Actors: []stage.Actor{{Name: "download", Kind: stage.Bulk}}, Duration: 4 * time.Second,
	}
	s.Down.Loss = 0.001
	for seed := range seeds {
		for _, sender := range senders {
			s.Name, s.Seed, s.Edge = sender, uint64(seed)+1, "defaults: {algorithm: "+sender+"}\n"
			rec, err := stage.PlayVirtual(t.Context(), s, nil)
			require.NoError(t, err)
			r := record.Of(s, rec)
			r.Experiment, r.Version = "test", "test"
			all = append(all, r)
		}
	}
	return all
}

func TestTheReportShowsEachPath(t *testing.T) {
	results := virtual(t, 2, "copa", "cubic")
	discarded := results[0]
	discarded.Discarded = `the emulator lost 3 packets & <more>`
	var b strings.Builder
	require.NoError(t, Write(&b, []File{{"runs.jsonl", append(results, discarded)}}, ""))
	page := b.String()
	assert.Contains(t, page, "5 runs, 5 of them in virtual time")
	assert.Contains(t, page, "12mbit both ways, 10 ms each way, buffer 250pkt, 0.1 % random loss, 4 s")
	assert.Contains(t, page, "2, 1 not counted")
	assert.Contains(t, page, "3 packets &amp; &lt;more&gt;")
	assert.NotContains(t, page, "<more>")
	assert.Equal(t, 3, strings.Count(page, "<svg "))
	assert.NotContains(t, page, "http://www.w3.org/1999/xlink")
	assert.NotContains(t, page, "<script")
	assert.NotContains(t, page, "NaN")
}

func TestSeveralFilesStandSideBySide(t *testing.T) {
	results := virtual(t, 1, "copa")
	var b strings.Builder
	require.NoError(t, Write(&b, []File{{"before.jsonl", results}, {"after.jsonl", results}}, ""))
	assert.Contains(t, b.String(), "</span>copa, before.jsonl</td>")
	assert.Contains(t, b.String(), "</span>copa, after.jsonl</td>")
	assert.Equal(t, 1, strings.Count(b.String(), "<h2>"), "one path")
}

func TestRecordsOfOlderBuildsHaveATableAlone(t *testing.T) {
	results := virtual(t, 1, "copa")
	results[0].Series, results[0].Points, results[0].Centiles = nil, nil, nil
	var b strings.Builder
	require.NoError(t, Write(&b, []File{{"old.jsonl", results}}, ""))
	assert.Contains(t, b.String(), "made by an older build")
	assert.NotContains(t, b.String(), "<svg ")
}

// Each figure has a legend, and is as wide as asked in every format.
func TestFiguresAreFilesToo(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "figures")
	runs := virtual(t, 3, "copa", "cubic")
	names, err := WriteFigures(folder, []File{{"runs.jsonl", runs}}, 85)
	require.NoError(t, err)
	plots, err := WritePlots(filepath.Join(folder, "plot.png"), runs)
	require.NoError(t, err)
	var bases []string
	for _, name := range append(names, plots...) {
		bases = append(bases, filepath.Base(name))
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		switch filepath.Ext(name) {
		case ".svg":
			assert.Contains(t, string(text), `width="240.94`, "points, 85 mm")
			for _, entry := range []string{">copa</text>", ">cubic</text>"} {
				assert.Contains(t, string(text), entry, "%s: the legend", name)
			}
		case ".pdf":
			assert.Regexp(t, `(?s)^%PDF.*/MediaBox \[0 0 240\.9`, string(text), name)
		default:
			assert.Equal(t, "\x89PNG", string(text[:4]))
		}
	}
	assert.Equal(t, []string{
		"cdf-1.pdf", "cdf-1.png", "cdf-1.svg", "course-1.pdf", "course-1.png", "course-1.svg",
		"tradeoff-1.pdf", "tradeoff-1.png", "tradeoff-1.svg", "plot.png",
	}, bases)
}

func TestAPlotForEachPath(t *testing.T) {
	one := virtual(t, 1, "copa")[0]
	wide, lossy, old := one, one, one
	wide.Buffer, lossy.Loss = "none", 0.01
	old.Series, old.Points = nil, nil
	for name, row := range map[string]struct {
		runs  []record.Run
		names []string
	}{
		"one path":         {[]record.Run{one}, []string{"x.svg"}},
		"two buffers":      {[]record.Run{one, wide}, []string{"x-1.svg", "x-2.svg"}},
		"two losses":       {[]record.Run{one, lossy}, []string{"x-1.svg", "x-2.svg"}},
		"without a course": {[]record.Run{old}, nil},
	} {
		dir := t.TempDir()
		names, err := WritePlots(filepath.Join(dir, "x.svg"), row.runs)
		require.NoError(t, err)
		for i := range names {
			assert.FileExists(t, names[i])
			names[i] = filepath.Base(names[i])
		}
		assert.Equal(t, row.names, names, name)
	}
}

// Runs with one seed are over one link, so that ratios are of pairs.
func TestRatiosAreOfPairs(t *testing.T) {
	run := func(name string, seed uint64, throughput, delay float64) record.Run {
		return record.Run{
			Experiment: "x", Name: name, Seed: seed, Throughput: throughput,
			Command:  "penstock-lab sim 'a b'",
			Queueing: record.Percentiles{P95: delay}, Offered: 10 * float64(seed),
		}
	}
	runs := []record.Run{
		run("cubic", 1, 10, 400), run("cubic", 2, 20, 800), run("cubic", 3, 30, 1200), run("cubic", 4, 99, 99),
		run("copa", 1, 9, 100), run("copa", 2, 18, 200), run("copa", 3, 27, 300),
	}
	var page, table strings.Builder
	require.NoError(t, Write(&page, []File{{"runs.jsonl", runs}}, ""))
	assert.Contains(t, page.String(), "<th>p95 of cubic</th>")
	assert.Contains(t, page.String(), "<td>0.90</td><td>0.25</td>")
	assert.Contains(t, page.String(), "Command: penstock-lab sim &#39;a b&#39;")
	assert.Contains(t, page.String(), "Seeds: 1, 2, 3, 4. Date: ")
	assert.True(t, pathsOf([]File{{"", runs}})[0].isUnlike(), "10 to 40 Mbit/s")

	after := slices.Clone(runs)
	for i := range after {
		after[i].Version, after[i].Queueing.P95 = "new", after[i].Queueing.P95*[]float64{0.8, 0.9, 1}[i%3]
	}
	require.NoError(t, WriteComparison(&table, []File{{"a", runs}, {"b", after}}))
	assert.Regexp(t, `(?m)^copa +3 +1\.00 +0\.90 \[0\.80, 1\.00\]$`, table.String())
	table.Reset()
	require.NoError(t, WriteComparison(&table, []File{{"a", runs[:1]}, {"b", after[6:]}}))
	assert.Contains(t, table.String(), "no sender on one path in common")
}

// The interval of the median holds the true one in 95 of 100 samples at least.
func TestTheIntervalCoversTheMedian(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{6, 7, 10, 25, 100} {
		lo, hi := medianRanks(n)
		assert.Equal(t, n-1, lo+hi, "as far from both ends")
		covered := 0
		const samples = 4000
		for range samples {
			below := 0
			for range n {
				if r.Float64() < 0.5 {
					below++
				}
			}
			if below > lo && below <= hi {
				covered++
			}
		}
		assert.GreaterOrEqual(t, float64(covered)/samples, 0.94, "%d values", n)
	}
	for n := 1; n < 6; n++ {
		lo, hi := medianRanks(n)
		assert.Equal(t, [2]int{0, n - 1}, [2]int{lo, hi}, "the range")
	}
}

func TestTheIntervalOfVeryManyRunsIsNarrow(t *testing.T) {
	for _, n := range []int{1000, 1100, 5000} { // half to the power of 1100 is less than any number
		lo, hi := medianRanks(n)
		half := 0.98 * math.Sqrt(float64(n)) // 1.96 standard deviations of the binomial distribution
		assert.InDelta(t, float64(n)/2-half, lo, 1.5, n)
		assert.Equal(t, n-1-lo, hi, n)
	}
}

func TestExperimentsOfOnePathStandApart(t *testing.T) {
	first, second := virtual(t, 1, "copa"), virtual(t, 1, "copa")
	second[0].Experiment = "beside-cubic"
	var b strings.Builder
	require.NoError(t, Write(&b, []File{{"runs.jsonl", append(first, second...)}}, ""))
	assert.Equal(t, 2, strings.Count(b.String(), "<h2>"))
	assert.Contains(t, b.String(), "<h2>test: 12mbit both ways")
	assert.Contains(t, b.String(), "<h2>beside-cubic: 12mbit both ways")
	assert.Equal(t, 2, strings.Count(b.String(), "<td>1</td>"), "one run each")
}

// Runs that differ in more than their seeds are rows of their own, and a row's name has what tells it from others.
func TestRunsThatAreNotAlikeStandApart(t *testing.T) {
	built := func(version string) record.Run { return record.Run{Name: "x", Version: version} }
	below := func(transport string) record.Run { return record.Run{Name: "x", Virtual: true, Transport: transport} }
	over := func(envelope string) record.Run { return record.Run{Name: "x", Envelope: envelope} }
	plays := func(seed uint64, setup string) record.Run { return record.Run{Name: "x", Seed: seed, Setup: setup} }
	in := func(name string, runs ...record.Run) File { return File{name, runs} }
	for want, files := range map[string][]File{
		"x":               {in("a", built("1"), built("1"))},
		"x; x, 2":         {in("a", built(""), built("2"))},
		"x, 1; x, 2":      {in("a", built("1"), built("2"), built("1"))},
		"x; y":            {in("a", built("1"), record.Run{Name: "y", Version: "2"})},
		"x, a; x, b; y":   {in("a", built("1")), in("b", built("2"), record.Run{Name: "y"})},
		"x, ebpf; x, bbr": {in("a", over("ebpf"), over("bbr"))},

		"x, a, 1; x, a, 2; x, b":                   {in("a", built("1"), built("2")), in("b", built("2"))},
		"x, kernel; x, relay":                      {in("a", below("kernel"), below("relay"))},
		"x, in virtual time; x, over real sockets": {in("a", below("kernel"), over("ebpf"))},
		"x, full form; x, short form":              {in("a", over(""), record.Run{Name: "x", Scale: "short"})},

		"x; x, hints each 10 ms": {in("a", built(""), record.Run{Name: "x", Hints: 10})},
		"x; x, warm-up 1.5 s":    {in("a", built(""), record.Run{Name: "x", Warmup: 1.5})},
		"x; x, setup 2":          {in("a", plays(1, "p"), plays(2, "q"), plays(1, "r"), plays(2, "s"))},
		"x; x, setup 2; y":       {in("a", plays(1, "p"), plays(1, "q"), plays(1, "p"), record.Run{Name: "y"})},
	} {
		assert.Equal(t, want, strings.Join(labels(files...), "; "))
	}
	assert.Equal(t, []string{"x"}, labels(in("a", over(""), over("ebpf"), over("auto"))), "not always told")
}

func TestAVirtualRunThatWasMadeTwiceCountsOnce(t *testing.T) {
	for virtual, want := range map[bool]int{true: 2, false: 4} { // repeats over real sockets differ
		one, other := record.Run{Seed: 1, Virtual: virtual}, record.Run{Seed: 2, Virtual: virtual}
		paths := pathsOf([]File{{"runs.jsonl", []record.Run{one, other, one, other}}})
		require.Len(t, paths, 1)
		require.Len(t, paths[0].rows, 1)
		assert.Len(t, paths[0].rows[0].runs, want)
	}
}

// labels are the names of the rows of all paths.
func labels(files ...File) (all []string) {
	for _, p := range pathsOf(files) {
		for _, w := range p.rows {
			all = append(all, p.rowLabel(w))
		}
	}
	return all
}
