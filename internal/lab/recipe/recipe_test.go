package recipe_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

func TestRecipesSayWhatTheyAre(t *testing.T) {
	need.OneGoroutine(t)
	names := map[string]bool{}
	for _, r := range recipe.All(nil) {
		assert.False(t, names[r.Name], "%s: a name of its own", r.Name)
		names[r.Name] = true
		assert.NotEmpty(t, r.About, r.Name)
		assert.NotEmpty(t, r.Source, r.Name)
		for _, scale := range []recipe.Scale{recipe.Full, recipe.Short} {
			stages := map[string]bool{}
			all, err := r.Stages(scale, 1)
			require.NoError(t, err)
			for _, s := range all {
				require.NoError(t, s.Check(), "%s, %s", r.Name, scale)
				assert.False(t, stages[s.Name], "%s, %s: a stage's own name: %s", r.Name, scale, s.Name)
				stages[s.Name] = true
			}
			assert.NotEmpty(t, stages, "%s, %s", r.Name, scale)
		}
	}
}

func TestRecipesAreSelectedByName(t *testing.T) {
	need.OneGoroutine(t)
	all, err := recipe.Select([]string{"all"}, nil)
	require.NoError(t, err)
	assert.Len(t, all, len(recipe.All(nil)))
	some, err := recipe.Select([]string{"pbe-e1", "hosts"}, nil)
	require.NoError(t, err)
	require.Len(t, some, 2)
	assert.Equal(t, []string{"pbe-e1", "hosts"}, []string{some[0].Name, some[1].Name})
	_, err = recipe.Select([]string{"nonesuch"}, nil)
	require.ErrorContains(t, err, `no "nonesuch"; penstock-lab bench recipe list`)
	_, err = recipe.Select([]string{"all", "hosts"}, nil)
	require.Error(t, err)
	_, err = recipe.Select([]string{"hosts", "my/hosts.yaml"}, nil)
	require.ErrorContains(t, err, "two are called hosts")
}

// What only virtual time can play says so, and is not the run that the findings are kept with.
func TestEveryRecipePlaysOverRealSockets(t *testing.T) {
	for _, r := range recipe.All(nil) {
		stages, err := r.Stages(recipe.Full, 1)
		require.NoError(t, err, r.Name)
		for _, s := range stages {
			if err := s.Realisable(); err != nil && !s.Virtual {
				assert.ErrorContains(t, err, "this kernel has no congestion control", "%s: %s", r.Name, s.Name)
			}
		}
		assert.False(t, stages[len(stages)-1].Virtual, r.Name)
	}
}

func play(t *testing.T, name string, seed uint64) recipe.Result {
	t.Helper()
	r, err := recipe.Select([]string{name}, nil)
	require.NoError(t, err)
	var over []recipe.Progress
	result, err := r[0].Play(context.Background(), recipe.Short, seed, recipe.Virtual, func(p recipe.Progress) {
		if p.Over {
			over = append(over, p)
		}
	})
	require.NoError(t, err)
	assert.Len(t, over, len(result.Runs), "each stage's end is told")
	return result
}

func TestOneSeedGivesOneResult(t *testing.T) {
	need.OneGoroutine(t)
	first, again, other := play(t, "nacc-d3", 1), play(t, "nacc-d3", 1), play(t, "nacc-d3", 2)
	assert.Equal(t, first.Runs, again.Runs)
	assert.NotEqual(t, first.Runs, other.Runs, "losses fall elsewhere")
}

func TestAResultIsWritten(t *testing.T) {
	need.OneGoroutine(t)
	result := play(t, "live-switch", 1)
	last := record.Of(result.Runs[0].Stage, result.Runs[0].Record)
	last.Experiment, last.Findings = result.Name, result.Findings
	var text bytes.Buffer
	require.NoError(t, recipe.WriteHead(&text, result.Recipe, []record.Run{last}))
	require.NoError(t, recipe.WriteFindings(&text, []record.Run{last}))
	for _, want := range []string{"live-switch: four flows", "finding", "all bytes arrived", "\nok "} {
		assert.Contains(t, text.String(), want)
	}

	require.Len(t, last.Flows, 4)
	assert.Len(t, last.Flows[0].PerSecond, 20)
	other := last
	other.Virtual, other.Findings = false, slices.Clone(last.Findings)
	other.Findings[2].Got = "0.2 s"
	figures := tableOf(t, recipe.WriteFigures, last, record.Run{Experiment: result.Name}, other)
	assert.Contains(t, figures, "| `live-switch` | all bytes arrived, and none other | - | at least 1 | 1 | ok | 1 | ok |")
	assert.Contains(t, figures, "| 0.1 s | **no**: Cubic's full queue drains for a round trip | 0.2 s | **no**: Cubic's")
	page := tableOf(t, writeTable, last, record.Run{Experiment: result.Name}, other)
	for _, want := range []string{
		"| `live-switch` | **no** 3/4 | **no** 3/4 | - |",
		"| `janus-c10` | not measured | not measured | - |",
		"over real sockets, how many of a recipe, the first of them, and why:\n\n" +
			"- `live-switch`, 1: longest time in which a flow moved nothing is 0.2 s (at most 0 s): Cubic's full",
	} {
		assert.Contains(t, page, want)
	}
	first := other
	first.Findings, first.Noisy = nil, true // another run of the same experiment
	assert.Contains(t, tableOf(t, writeTable, last, first, other), "| **no** 3/4 | not measured, disturbed |")
	other.Findings = other.Findings[:2]
	assert.Contains(t, tableOf(t, writeTable, last, other), "| **no** 3/4 | ok 2/2 |",
		"of an earlier form")
	short := last
	short.Scale, short.Findings = "short", last.Findings[:1]
	for _, runs := range [][]record.Run{{last, short}, {short, last}} {
		assert.Contains(t, tableOf(t, writeTable, runs...), "| `live-switch` | **no** 3/4 | not measured |",
			"a short form takes no full one's place")
	}
	assert.Contains(t, tableOf(t, writeTable, short), "| ok 1/1, short form | not measured |")
}

// writeTable writes the table of runs alone.
func writeTable(w io.Writer, runs []record.Run) error {
	return recipe.WriteMarkdown(w, runs, recipe.Sockets{})
}

// The reason of a bound that is missed is the library's, which may have learnt it after the run.
func TestATableHasTheReasonThatTheLibraryHas(t *testing.T) {
	found := record.Finding{What: "janus over cubic, R_min 9", Bound: "at least 0.8", Got: "0.64"}
	run := record.Run{Experiment: "janus-f19", Version: "penstock v1 go1.26", Findings: []record.Finding{found}}
	assert.Contains(t, tableOf(t, writeTable, run), "0.64 (at least 0.8): the aggressive stage begins")
	run.Experiment = "a file of its own"
	assert.Contains(t, tableOf(t, writeTable, run), "0.64 (at least 0.8): **the reason is not known**")
}

// A page keeps what it says of a recipe over real sockets until that is played again, since that takes hours.
func TestATableKeepsWhatWasNotPlayedAgain(t *testing.T) {
	run := func(experiment, version string, virtual, ok bool) record.Run {
		return record.Run{
			Experiment: experiment, Version: "penstock " + version + " go1.26", Virtual: virtual,
			Findings: []record.Finding{{What: "ratio", Bound: "at most 1", Got: version, OK: ok, Why: "of a reason"}},
		}
	}
	earlier := tableOf(t, writeTable, run("hosts", "v1", true, false), run("hosts", "r1", false, false),
		run("rpm", "r1", false, true))
	again := func(runs ...record.Run) string {
		var page bytes.Buffer
		there, err := recipe.ReadSockets("before\n\n" + earlier)
		require.NoError(t, err)
		require.NoError(t, recipe.WriteMarkdown(&page, runs, there))
		return page.String()
	}
	assert.Equal(t, earlier, again(run("hosts", "v1", true, false)), "what is in the page is read as it was written")
	page := again(run("hosts", "v2", true, true), run("hosts", "r2", false, true))
	assert.Contains(t, page, "| `hosts` | ok 1/1 | ok 1/1 | r2 |")
	assert.Contains(t, page, "| `rpm` | not measured | ok 1/1 | r1 |")
	assert.Contains(t, page, "in virtual time 1 of 1 (build v2); over real sockets 2 of 2;")
	assert.NotContains(t, page, "ratio is", "all bounds hold now")
	assert.Contains(t, again(run("rpm", "r2", false, false)), "| `hosts` | not measured | **no** 0/1 | r1 |")
	assert.Contains(t, again(run("rpm", "r2", false, false)), "- `hosts`, 1: ratio is r1 (at most 1): of a reason.\n"+
		"- `rpm`, 1: ratio is r2 (at most 1): of a reason.\n")
	disturbed := run("rpm", "r3", false, true)
	disturbed.Noisy = true
	earlier = tableOf(t, writeTable, run("hosts", "r1", false, false), disturbed)
	assert.Contains(t, again(run("hosts", "v2", true, true)), "| `rpm` | not measured | not measured, disturbed | r3 |")
	earlier = strings.ReplaceAll(strings.ReplaceAll(earlier, " |", "   |"), "\n", "\r\n") // by an editor
	assert.Contains(t, again(run("hosts", "v2", true, true)), "| `hosts` | ok 1/1 | **no** 0/1 | r1 |")
}

// A page that does not say what was measured is told, not taken for one that says nothing.
func TestAnEarlierPageThatCannotBeReadIsTold(t *testing.T) {
	const head = "| recipe | virtual | real | build of real |\n|---|---|---|---|\n"
	for page, says := range map[string]string{
		"": "there is no table", "| recipe | real |\n|---|---|\n| `hosts` | ok 3/3 |\n": "there is no table",

		head + "| `hosts` | ok 3/3 | ok 9/8 | b |\n":        `line 3: hosts is "ok 9/8", which contradicts itself: mend`,
		head + "| `hosts` | ok 3/3 | ok 7/8 | b |\n":        "contradicts itself",
		head + "| `hosts` | ok 3/3 | **no** 8/8 | b |\n":    "contradicts itself",
		head + "| `hosts` | ok 3/3 | ok 0/0 | b |\n":        "contradicts itself",
		head + "| `hosts` | ok 3/3 | fine 8/8 | b |\n":      `is "fine 8/8", which is no verdict`,
		head + "| `hosts` | ok 3/3 | ok 9999999999/1 | b |": "no verdict",

		head + strings.Repeat("| `hosts` | ok 3/3 | ok 8/8, short form | b |\n", 2): "line 4: hosts has two rows",
	} {
		_, err := recipe.ReadSockets(page)
		require.ErrorContains(t, err, says, page)
	}
}

// tableOf is what a table says of runs.
func tableOf(t *testing.T, write func(io.Writer, []record.Run) error, runs ...record.Run) string {
	t.Helper()
	var page bytes.Buffer
	require.NoError(t, write(&page, runs))
	return page.String()
}

// A table says of each figure whether it was measured, and if so whether its bound holds.
func TestVerdictsOfTheTable(t *testing.T) {
	const bound, none = "at most 1", "for comparison"
	found := func(virtual bool, bound string, ok bool) *record.Run {
		f := record.Finding{What: "ratio", Bound: bound, Got: "2", OK: ok}
		return &record.Run{Experiment: "made-up", Virtual: virtual, Findings: []record.Finding{f}}
	}
	disturbed := func(r *record.Run) *record.Run { r.Noisy = true; return r }
	discarded := func(r *record.Run) *record.Run { r.Discarded = "packets were lost"; return r }
	for name, c := range map[string]struct {
		virtual, real           *record.Run
		row                     string
		virtualCount, realCount string
	}{
		"both hold": {
			found(true, bound, true), found(false, bound, true),
			"| 2 | ok | 2 | ok |", "in virtual time 1 of 1", "over real sockets 1 of 1",
		},
		"the real one is broken": {
			found(true, bound, true), found(false, bound, false),
			"| 2 | ok | 2 | **no** |", "in virtual time 1 of 1", "over real sockets 0 of 1",
		},
		"broken while the machine disturbed the run": {
			found(true, bound, true), disturbed(found(false, bound, false)),
			"| 2 | ok | 2 | not measured |", "in virtual time 1 of 1", "over real sockets 0 of 0",
		},
		"held while the machine disturbed the run": {
			found(true, bound, false), disturbed(found(false, bound, true)),
			"| 2 | **no** | 2 | not measured |", "in virtual time 0 of 1", "over real sockets 0 of 0",
		},
		"broken in a run that does not count": {
			found(true, bound, true), discarded(found(false, bound, false)),
			"| 2 | ok | 2 | not measured |", "in virtual time 1 of 1", "over real sockets 0 of 0",
		},
		"only in virtual time": {
			found(true, bound, false), nil,
			"| 2 | **no** | - | not measured |", "in virtual time 0 of 1", "over real sockets 0 of 0",
		},
		"only over real sockets": {
			nil, found(false, bound, false),
			"| - | not measured | 2 | **no** |", "in virtual time 0 of 0", "over real sockets 0 of 1",
		},
		"without a bound": {
			found(true, none, true), found(false, none, true),
			"| 2 |  | 2 |  |", "in virtual time 0 of 0", "over real sockets 0 of 0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var runs []record.Run
			for _, r := range []*record.Run{c.virtual, c.real} {
				if r != nil {
					runs = append(runs, *r)
				}
			}
			assert.Contains(t, tableOf(t, recipe.WriteFigures, runs...), c.row)
			page := tableOf(t, writeTable, runs...)
			assert.Contains(t, page, c.virtualCount)
			assert.Contains(t, page, c.realCount)
		})
	}
}

// What only a real proxy has, such as processor time, is in the table though virtual time has no figure of it.
func TestTheTableHasFindingsOfRealSocketsAlone(t *testing.T) {
	runs := []record.Run{
		{Experiment: "made-up", Virtual: true, Findings: []record.Finding{{What: "both", Bound: "at least 1", OK: true}}},
		{Experiment: "made-up", Findings: []record.Finding{
			{What: "both", Bound: "at least 1", OK: true}, {What: "real alone", Bound: "at most 1 ms", Got: "3 ms"},
		}},
	}
	assert.Contains(t, tableOf(t, recipe.WriteFigures, runs...),
		"| real alone | - | at most 1 ms | - | not measured | 3 ms | **no** |")
	page := tableOf(t, writeTable, runs...)
	assert.Contains(t, page, "| `made-up` | ok 1/1 | **no** 1/2 |")
	assert.Contains(t, page, "- `made-up`, 1: real alone is 3 ms (at most 1 ms): **the reason is not known**.")
}

// A bound of the table holds only if it held with each seed, and each bound has the verdict that is its own.
func TestATableHasEachBoundOfEachSeed(t *testing.T) {
	found := func(seed uint64, version string, oks ...bool) record.Run {
		r := record.Run{Experiment: "made-up", Seed: seed, Version: version}
		for _, ok := range oks {
			r.Findings = append(r.Findings, record.Finding{What: "ratio", Bound: "at most 1", Got: fmt.Sprint(ok), OK: ok})
		}
		return r
	}
	noisy := found(1, "v1", false)
	noisy.Noisy = true
	none := found(2, "v1", true)
	none.Findings[0].Bound = "for comparison"
	for _, c := range []struct {
		runs []record.Run
		row  string
	}{
		{[]record.Run{found(1, "v1", true, false)}, "**no** 1/2"},
		{[]record.Run{found(1, "v1", false), found(2, "v1", true)}, "**no** 0/1"},
		{[]record.Run{found(2, "v1", true), found(1, "v1", false)}, "**no** 0/1"},
		{[]record.Run{found(1, "v1", false), found(2, "v1", true), found(1, "v1", true)}, "ok 1/1"},
		{[]record.Run{found(1, "v1", false), found(2, "v2", true)}, "ok 1/1"},
		{[]record.Run{noisy, found(2, "v1", true)}, "ok 1/1"},
		{[]record.Run{found(2, "v1", true), noisy}, "ok 1/1"},
		{[]record.Run{found(1, "v1", true), noisy}, "not measured, disturbed"},
	} {
		assert.Contains(t, tableOf(t, writeTable, c.runs...), "| `made-up` | not measured | "+c.row+" |")
	}
	assert.Contains(t, tableOf(t, recipe.WriteFigures, found(1, "v1", true), found(2, "v1", false)),
		"| true · false | **no** |")
	virtual := none
	virtual.Virtual = true
	assert.Contains(t, tableOf(t, writeTable, virtual, found(1, "v1", false)), "| `made-up` | not measured | **no** 0/1 |",
		"what is for comparison in virtual time alone")
}

func TestAFindingMustHoldInEachRun(t *testing.T) {
	finding := func(seed uint64, ok bool, got string) record.Run {
		return record.Run{Name: "one", Seed: seed, Findings: []record.Finding{
			{What: "what", Bound: "at least 2", Got: got, OK: ok},
		}}
	}
	var b bytes.Buffer
	runs := []record.Run{finding(1, true, "3"), finding(2, false, "1")}
	require.NoError(t, recipe.WriteFindings(&b, runs))
	assert.Contains(t, b.String(), "FAIL 1 of 2")
	assert.Contains(t, b.String(), "3 · 1")

	// What the machine disturbed says nothing, in any run of that time.
	written := func(runs ...record.Run) string {
		var b bytes.Buffer
		require.NoError(t, recipe.WriteFindings(&b, runs))
		return b.String()
	}
	before := record.Run{Name: "before", Seed: 2, Noisy: true}
	assert.Contains(t, written(before, runs[0]), "\nnot measured  what")
	assert.Contains(t, written(runs[0], before, runs[1]), "\nok  what")
}

func TestAStageThatCannotBePlayedAgainKeepsItsRecord(t *testing.T) {
	disturbed := stage.Record{Lateness: netlab.Late + 1}
	broken := errors.New("no namespace")
	plays := func(results ...error) recipe.Player {
		return func(context.Context, stage.Stage, func(time.Duration)) (stage.Record, error) {
			err := results[0]
			results = results[1:]
			if err != nil {
				return stage.Record{}, err
			}
			return disturbed, nil
		}
	}
	got, err := recipe.Retry(plays(nil, broken), 2)(t.Context(), stage.Stage{}, nil)
	require.NoError(t, err)
	assert.Equal(t, disturbed, got)

	_, err = recipe.Retry(plays(broken), 2)(t.Context(), stage.Stage{}, nil)
	assert.ErrorIs(t, err, broken, "there is no record to keep")

	ended, end := context.WithCancelCause(t.Context())
	end(broken)
	_, err = recipe.Retry(plays(nil, context.Canceled), 2)(ended, stage.Stage{}, nil)
	assert.ErrorIs(t, err, broken, "it was told to end")
}

// Seeds move the starts of flows, and where a trace begins that does not come from the seed. The first moves nothing.
func TestSeedsMoveStartsAndPhases(t *testing.T) {
	const text = `
link: {carries: "%s", rtt: 40ms}
flows: {a: {}, b: {start: 2s, stop: 5s}}
algorithm: copa
duration: 10s
`
	for carries, moves := range map[string]bool{
		"12mbit": false, "recorded:city-drive": true, "generate:lte:7": true, "generate:lte": false,
	} {
		file := filepath.Join(t.TempDir(), "x.yaml")
		require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, text, carries), 0o600))
		r, err := recipe.Open(file, nil)
		require.NoError(t, err)
		stages := make([]stage.Stage, 4)
		for i := range stages {
			all, err := r.Stages(recipe.Full, uint64(i+1))
			require.NoError(t, err)
			stages[i] = all[0]
		}
		starts := func(s stage.Stage) [2]time.Duration { return [2]time.Duration{s.Actors[0].Start, s.Actors[1].Start} }
		assert.Equal(t, [2]time.Duration{0, 2 * time.Second}, starts(stages[0]))
		for i, s := range stages[1:] {
			assert.NotEqual(t, starts(stages[i]), starts(s), "seed %d", i+2)
			a, b := starts(s)[0], starts(s)[1]-2*time.Second
			assert.Zero(t, min(a, b), "the run begins with one of them")
			assert.Less(t, max(a, b), 100*time.Millisecond)
			assert.Equal(t, 3*time.Second, s.Actors[1].Stop-s.Actors[1].Start, "for as long")
			if first := stages[0].Down.Trace; moves {
				d := first.Duration()
				assert.NotEqual(t, first.Carries(0, d/2), s.Down.Trace.Carries(0, d/2), carries)
				assert.Equal(t, first.Carries(0, d), s.Down.Trace.Carries(0, d), "the same loop from elsewhere")
				assert.Equal(t, first.Name, s.Down.Trace.Name)
			}
		}
	}
}
