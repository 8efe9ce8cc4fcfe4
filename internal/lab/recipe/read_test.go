package recipe

import (
	"context"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/need"
)

func playText(t *testing.T, text string) Result {
	t.Helper()
	r, err := readText("my", "my", []byte(text), loader{})
	require.NoError(t, err)
	result, err := r.Play(context.Background(), Full, 1, Virtual, func(Progress) {})
	require.NoError(t, err)
	return result
}

func TestEveryKeyOfTheFormatIsRead(t *testing.T) {
	need.OneGoroutine(t)
	result := playText(t, Format)
	assert.Equal(t, "one line on what is played, and what for", result.About)
	var names []string
	for _, r := range result.Runs {
		names = append(names, r.Stage.Name)
	}
	assert.Equal(t, []string{"small", "large, copa", "large, cubic"}, names)
}

func TestOtherEditorsWriteExperimentsToo(t *testing.T) {
	const text = "link: {rate: 12mbit, rtt: 40ms}\nalgorithm: copa\nflows: {a: {}}\nduration: 2s\n"
	want := playText(t, text)
	got := playText(t, "\ufeff"+strings.ReplaceAll(text, "\n", "\r\n"))
	assert.Equal(t, want.Runs, got.Runs)
}

func TestAMistakeTellsItsPlaceAndCure(t *testing.T) {
	const fine = "link: {rate: 12mbit, rtt: 40ms}\nalgorithm: copa\nflows: {a: {}}\nduration: 2s\n"
	cell := func(keys string) string {
		return strings.Replace(fine, "link: {rate: 12mbit, rtt: 40ms}", "cell: "+keys, 1)
	}
	for text, says := range map[string]string{
		fine + "durration: 3s":                                "my:5:1: durration: unknown key; did you mean duration?",
		fine + "must: ['max(\"a\") > 1']":                     "my:5:8: must[0].is: invalid argument for max (type",
		fine + "must: [{is: duration, when: 1, at_least: 9}]": "my:5:8: must[0].when: expected bool, but got int",
		fine + "must: [{is: duration, at_least: ''}]":         "my:5:33: must[0].at_least: expected an expression",

		fine + "warmup: soon":         `my:5:9: warmup: "soon" is not a time with a unit`,
		fine + "link: {rate: 12mbit}": "my:5:1",

		strings.Replace(fine, "a: {}", "", 1): "flows: there is none: write such as flows: {download: {}}",

		strings.Replace(fine, "{}", "{app: x}", 1):    `its app is "x", but must be one of bulk`,
		strings.Replace(fine, "{}", "{sise: 1MB}", 1): "my:3:13: flows.a.sise: unknown key; did you mean size?",
		strings.Replace(fine, "{}", "{bogus: 1}", 1): "my:3:13: flows.a.bogus: unknown key; there are algorithm, " +
			"app,",
		strings.Replace(fine, "copa", "kopa", 1):                `my:2:12: algorithm: no algorithm "kopa"`,
		strings.Replace(fine, "{}", "{sizes: many}", 1):         `flows.a.sizes: there are no sizes "many"`,
		strings.Replace(fine, "duration", "warmup", 1):          "duration: it is missing or above 1h0m0s",
		strings.Replace(fine, "12mbit", "$(mbit)", 1):           "my:1:14: $(mbit) has no value",
		strings.Replace(fine, "rate: 12mbit, ", "", 1):          "link: it needs a rate or a trace",
		strings.Replace(fine, "rate: 12mbit", "trace: nope", 1): `my:1:8: link.trace: no model "nope"`,
		strings.Replace(fine, "{}", "{send_buffer: 1MB}", 1):    "its send_buffer is 1000000 bytes, but must be 0 or",
		fine + "edge: {rules: []}":                              "my:5:7: edge: it takes the place of algorithm",
		fine + "changes: [{at: 0s, every: 1us, rtt: 9ms}]":      "more than 10000 changes",
		fine + "changes: [{at: 1h, rtt: 5ms}]":                  "changes[0].at: 1h0m0s is not in the run, which ends at",
		fine + "changes: [{at: 1s}]":                            "changes[0]: it changes nothing: give it rtt",
		fine + "runs: [{link: {rate: 1mbit}}]":                  "my:5:9: runs: a run needs a name",
		fine + "runs:\n  - name: a\n  - warmup: 1s\n":           "my:7:5: runs: a run needs a name",
		fine + "flow: {b: {}}":                                  "my:5:1: flow: unknown key; did you mean flows?",
		fine + "musts: []":                                      "musts: unknown key; did you mean must?",
		fine + "run: []":                                        "run: unknown key; did you mean runs?",
		fine + "whatever: []":                                   "whatever: unknown key; there are about, acks, agents,",
		fine + "runs: [{name: a}, {name: a}]\nmust: [1 > 0]":    `two runs are called "a"`,

		strings.Replace(fine, "rate: 12mbit", `carries: "recorded:x"`, 1): "no recorded trace \"x\"; there are campus-walk",

		strings.Replace(fine, "algorithm: copa", "edge: {listeners: []}", 1): "my:2:8: edge.listeners: the laboratory has",
		strings.Replace(fine, "algorithm: copa", "edge: {agents: []}", 1):    "edge.agents: write agents beside edge",

		fine + "vary: []":                     "my:5:7: vary: expected names with lists of values",
		fine + "must: [{for: [], is: drops}]": "my:5:14: must[0].for: expected names with lists of values",
		fine + "vary: {x: 1}":                 "my:5:8: vary: expected a list of values, such as x: [copa",

		fine + "control: {run: a, algorithm: cubic}":                    "my:5:1: control: it changes no run",
		fine + "control: {algorithm: copa}":                             "my:5:1: control: it changes no run",
		fine + "must: [drops == 0]\nmissed: {drop*ed: why}":             `missed: no bound is called "drop*ed"`,
		fine + "must: [utilisation]":                                    "my:5:8: must[0]: expected a comparison",
		fine + "must: [utilization >= 0.9]":                             "my:5:8: must[0].is: unknown name utilization",
		fine + "must:\n  - {run: b, is: drops}":                         `my:6:5: must[0].run: there is no run "b"`,
		fine + "runs: [{name: a}, {name: b}]\nmust: [drops == 0]":       "of which run? give it run: NAME",
		fine + "must: ['run(\"b\").drops == 0']":                        `my:5:8: must[0].is: there is no run "b"`,
		fine + "must: ['rate(\"b\") > 0']":                              `my:5:8: must[0].is: there is no flow "b"`,
		fine + "must: ['run(\"my\").rate_beside(\"a\", \"b\") > 0']":    `my:5:8: must[0].is: there is no flow "b"`,
		fine + "must:\n  - {is: count(flows, # > 1)}":                   "a # behind a space begins a comment",
		fine + "must:\n  - is: count(flows, # > 1)":                     "a # behind a space begins a comment",
		fine + "warmup: 3s":                                             "my:5:1: warmup: its warm-up is 3s",
		fine + "kernel: nosuch":                                         `my:5:1: kernel: no algorithm "nosuch"`,
		fine + "kernel: none":                                           `my:5:1: kernel: a kernel always decides`,
		fine + "acks: {every: 10ms, delayed: 40ms}":                     "my:5:1: acks: they come in batches",
		cell("{rtt: 4s, hosts: [{bits: 9}]}"):                           "my:1:1: cell: its round trip takes 4s",
		cell("{rtt: 2s, hosts: [{delay: 1s}]}"):                         "my:1:1: cell: its round trip takes 3s",
		fine + "runs:\n  - {name: a}\n  - {name: b, warmup: 3s}":        "my:7:15: warmup: its warm-up is 3s",
		strings.Replace(fine, "rate: 12mbit", "queue: 0pkt", 1):         `my:1:15: link.queue: "0pkt" has no room`,
		strings.Replace(fine, "{a: {}}", "{a: {count: 2}, a 2: {}}", 1): `my:3:24: flows.a 2: two flows are called`,
		strings.Replace(fine, "{}", "{count: 2, start: 5s}", 1):         "my:3:9: flows.a 1: its start is 5s",
		strings.Replace(fine, "rate: 12mbit", "loss: .nan", 1):          `my:1:14: link.loss: ".nan" is not a part`,
		strings.Replace(fine, "{rate: 12mbit, rtt: 40ms}", "\n\tx", 1):  "a tab begins the line; YAML wants spaces",
		"- a":  "an experiment is one document of keys with values",
		"a: [": "my:1:",
	} {
		_, err := readText("my", "my", []byte(text), loader{})
		assert.ErrorContains(t, err, says, text)
	}
}

func TestAFileOfAnExperimentIsNamedByItself(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.yaml")
	const fine = "link: {rate: 12mbit, rtt: 40ms}\nalgorithm: copa\nflows: {a: {}}\nduration: 2s\n"
	write := func(more string) { require.NoError(t, os.WriteFile(file, []byte(fine+more), 0o600)) }
	write("must: [{run: x, is: utilisation, at_least: 2}]")
	r, err := Open(file, nil)
	require.NoError(t, err)
	result, err := r.Play(context.Background(), Full, 1, Virtual, func(Progress) {})
	require.NoError(t, err)
	require.Len(t, result.Findings, 1)
	assert.Equal(t, "x", result.Runs[0].Stage.Name)
	write("must: [{run: " + file + ", is: utilisation, at_least: 2}]")
	_, err = Open(file, nil)
	assert.ErrorContains(t, err, file+":5:8: must[0].run: there is no run")
}

func TestWhatIsAskedIsJudged(t *testing.T) {
	result := playText(t, `
vary: {mbit: [6, 12]}
name: $(mbit) Mbit/s
link: {payload: $(mbit)mbit, rtt: 40ms, queue: 100pkt}
algorithm: cubic
group: flow
flows:
  flow: {count: 2, stagger: 2s, stop: 8s}
duration: 12s
must:
  - for: {mbit: [6, 12]}
    run: $(mbit) Mbit/s
    what: use at $(mbit)
    is: rate("flow 1", 1, 2)
    unit: Mbit/s
    at_least: 0.9 * capacity
  - run("6 Mbit/s").utilisation > 2
  - {run: 6 Mbit/s, when: drops < 0, is: drops}
  - {run: 6 Mbit/s, is: "first_at('flow 1', 100, 1, 0)", at_most: 12}
  - {run: 6 Mbit/s, is: "median([0/0])", below: 1}
`)
	var got []string
	for _, f := range result.Findings {
		got = append(got, strings.TrimSpace(f.What+": "+f.Bound))
	}
	require.Len(t, got, 5, got)
	assert.Equal(t, "use at 6: at least 5.4 Mbit/s", got[0])
	assert.True(t, result.Findings[0].OK, result.Findings[0].Got)
	assert.True(t, result.Findings[1].OK, result.Findings[1].Got)
	assert.False(t, result.Findings[2].OK)
	assert.Equal(t, "never", result.Findings[3].Got)
	assert.False(t, result.Findings[3].OK)
	assert.False(t, result.Findings[4].OK, "what cannot be measured holds nothing")
	assert.Equal(t, 8*time.Second, result.Runs[0].Stage.Actors[0].Stop)
	assert.Equal(t, 10*time.Second, result.Runs[0].Stage.Actors[1].Stop)
}

func TestFunctionsOfNumbers(t *testing.T) {
	distance, err := judging.KS([]float64{1, 2, 3, 4}, []any{3, 4, 5.0, 6})
	require.NoError(t, err)
	assert.InDelta(t, 0.5, distance, 1e-9, "half of the first is at most 2, and nothing of the second")
	same, err := judging.KS([]float64{1, 2}, []float64{1, 2})
	require.NoError(t, err)
	assert.Zero(t, same)
	v, err := judging.Variation([]any{1, 3})
	require.NoError(t, err)
	assert.InDelta(t, 0.5, v, 1e-9)
	p, err := judging.Percentile([]float64{4, 1, 3, 2}, 75)
	require.NoError(t, err)
	assert.InDelta(t, 3, p, 1e-9)
	_, err = judging.Jain("x")
	require.ErrorContains(t, err, "expected a list of numbers")
}

func TestResponsivenessLeavesOutTheSlowest(t *testing.T) {
	a := stage.ActorRecord{Name: "probe"}
	for i := range 20 {
		a.Requests = append(a.Requests, sim.Object{At: time.Duration(i) * time.Second, Took: 50 * time.Millisecond})
	}
	a.Requests[7].Took = 5 * time.Second
	run := Run{Stage: stage.Stage{Duration: time.Minute}, Record: stage.Record{Actors: []stage.ActorRecord{a}}}
	rpm, err := run.rpm("probe")
	require.NoError(t, err)
	assert.InDelta(t, 1200, rpm, 1e-9)
}

func TestARequestWithoutAnEndTakesUntilTheEnd(t *testing.T) {
	a := stage.ActorRecord{Name: "page 1", Requests: []sim.Object{
		{At: 0, Took: time.Second},
		{At: 20 * time.Second},
	}}
	run := Run{
		Stage:  stage.Stage{Duration: time.Minute, Actors: []stage.Actor{{Every: 20 * time.Second}}},
		Record: stage.Record{Actors: []stage.ActorRecord{a}},
	}
	want := []float64{1_000, 40_000}
	all, err := run.requests("page")
	require.NoError(t, err)
	assert.Equal(t, want, all)
	all, err = run.pages("page")
	require.NoError(t, err)
	assert.Equal(t, want, all)
}

func TestAnExpressionThatFailsIsAFindingThatFails(t *testing.T) {
	for what, says := range map[string]string{
		"rate(lower('B')) > 1":                       `run "my" has no flow "b"`,
		"stall('a', -100) > 1":                       "-100 is no time of a run",
		"rate('a', -1, 1) > 1":                       "-1 is no time of a run",
		"first_at('a', 1, 1, 1e30) > 1":              "is no time of a run",
		"requests('a')[5] < 1000":                    "index out of range: 5",
		"1 > requests('a')[5]":                       "index out of range: 5",
		"{is: 1, when: \"requests('a')[5] > 1\"}":    "index out of range: 5",
		"{is: 1, above: \"requests('a')[5]\"}":       "index out of range: 5",
		"{is: \"requests('a')[5]\", what: is alone}": "index out of range: 5",
	} {
		if what[0] != '{' {
			what = `"` + what + `"`
		}
		result := playText(t, "link: {rate: 1mbit, rtt: 4ms}\nflows: {a: {}}\nduration: 1s\nmust: ["+what+", 1 > 0]")
		require.Len(t, result.Findings, 2)
		assert.Contains(t, result.Findings[0].Got, says)
		assert.False(t, result.Findings[0].OK, what)
		assert.True(t, result.Findings[1].OK, "it is judged as well")
	}
}

func TestAnExpressionThatCanSayNothingFails(t *testing.T) {
	for what, says := range map[string]string{
		"arrived('a')":           `flow "a" is no app: udp`,
		"rate('a', 0, 3)":        "3 is no time of a run: write seconds from 0 to 2.1",
		"rate('a', 0.5, 0.55)":   "from 0.5 to 0.55 are less than 0.1 seconds",
		"rate('a', 1, 1)":        "from 1 to 1 are less than 0.1 seconds",
		"window('a', 2, 1)[0]":   "from 2 to 1 are less than 0.1 seconds",
		"least_jain(0, 10)":      "10 is no time of a run",
		"least_jain(1, 1.5)":     "from 1 to 1.5 are less than 1 seconds",
		"stall('a', 2.1)":        "from 2.1 to 2.05 are less than 0.1 seconds",
		"first_at('a', 1, 0, 0)": "from 0 to 0 are less than 0.1 seconds",
		"first_at('a', 1, 1, 2)": "from 2 to 2.05 are less than 1 seconds",
		"len(each(3))":           "3 is no time of a run",
		"len(window('early'))":   "", // it is not there after the warm-up
		"rate('early')":          "",
		"arrived('noise')":       "",
		"rate('a', 0, 2.1)":      "", // the last step of the record
		"least_jain(0, 2)":       "",
		"first_at('a', 9, 1, 1)": "",
		"window('a', 1, 1.1)[0]": "",
	} {
		result := playText(t, `
link: {rate: 12mbit, rtt: 40ms, queue: 100pkt}
algorithm: copa
flows: {a: {}, early: {stop: 500ms}, noise: {app: udp, rate: 1mbit}}
duration: 2050ms
warmup: 1s
must: [{is: "`+what+`"}]`)
		if says != "" {
			assert.Contains(t, result.Findings[0].Got, says, what)
		} else {
			assert.True(t, result.Findings[0].OK, "%s: %s", what, result.Findings[0].Got)
		}
	}
}

func TestTheFirstMomentOfARateIsTheEndOfItsTime(t *testing.T) {
	bytes := make([]cc.Bytes, 20)
	for i := 10; i < 20; i++ {
		bytes[i] = 12_500 // 1 Mbit/s
	}
	r := Run{
		Stage:  stage.Stage{Duration: 2 * time.Second},
		Record: stage.Record{Actors: []stage.ActorRecord{{Name: "a", Bytes: bytes}}},
	}
	at, err := r.firstAt("a", 1, 0.3, 0)
	require.NoError(t, err)
	assert.InDelta(t, 1.3, at, 1e-9)
	at, err = r.firstAt("a", 1.1, 0.3, 0)
	require.NoError(t, err)
	assert.True(t, math.IsInf(at, 1))
	stall, err := r.stall("a", 0.2)
	require.NoError(t, err)
	assert.InDelta(t, 0.8, stall, 1e-9)
}

func TestSizesAreThePapers(t *testing.T) {
	const n = 200_000
	random := rand.New(rand.NewPCG(1, 2))
	var all, small, large cc.Bytes
	counts := [2]int{}
	for range n {
		size := caida(random)
		all += size
		switch {
		case size <= 10_000:
			small, counts[0] = small+size, counts[0]+1
		case size > 1_000_000:
			large, counts[1] = large+size, counts[1]+1
		}
	}
	assert.InDelta(t, 97_606, float64(counts[0])/n*100_000, 200)
	assert.InDelta(t, 95, float64(counts[1])/n*100_000, 30)
	assert.InDelta(t, 487e6, float64(small)/n*100_000, 10e6)
	assert.InDelta(t, 1.7e9, float64(all)/n*100_000, 0.3e9)
	assert.Positive(t, large)
}

func TestFairnessIsThatOfTheWorstSecond(t *testing.T) {
	mbit := func(v ...float64) (all []cc.Rate) {
		for _, x := range v {
			all = append(all, cc.Rate(x*1e6))
		}
		return all
	}
	r := Run{
		Stage: stage.Stage{
			Duration: 3 * time.Second,
			Actors:   []stage.Actor{{Name: "a"}, {Name: "b"}, {Name: "late", Start: 2500 * time.Millisecond}},
		},
		Record: stage.Record{
			Actors: []stage.ActorRecord{{Name: "a"}, {Name: "b"}, {Name: "late"}},
			Virtual: &sim.Result{Flows: []sim.FlowResult{
				{PerSecond: mbit(4, 6, 5)}, {PerSecond: mbit(4, 2, 5)}, {PerSecond: mbit(0, 0, 1)},
			}},
		},
	}
	least, err := r.leastJain(0, 3)
	require.NoError(t, err)
	assert.InDelta(t, 0.8, least, 1e-9)
	least, err = r.leastJain(2, 3)
	require.NoError(t, err)
	assert.InDelta(t, 1, least, 1e-9, "who comes in the second does not count")
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(Format))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 4096 {
			t.Skip("the YAML library's time grows with the square of it")
		}
		r, err := readText("fuzz", "fuzz", text, loader{})
		if err != nil {
			return
		}
		stages, err := r.Stages(Full, 1)
		require.NoError(t, err)
		for _, s := range stages {
			require.NoError(t, s.Check())
		}
	})
}
