package record_test

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/netlab"
)

// A window of 22 packets on a path that has 20 in flight.
func played(t *testing.T, change func(*stage.Stage)) record.Run {
	t.Helper()
	link := sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: 250}
	s := stage.Stage{
		Name: "static", Down: link, Up: link, Edge: "defaults: {algorithm: \"static:cwnd_packets=22\"}\n",
		Algorithm: "static:cwnd_packets=22", Duration: 3 * time.Second,
		Actors: []stage.Actor{{Name: "download", Kind: stage.Bulk}},
		Seed:   1,
	}
	if change != nil {
		change(&s)
	}
	rec, err := stage.PlayVirtual(t.Context(), s, nil)
	require.NoError(t, err)
	r := record.Of(s, rec)
	r.Experiment, r.Version = "test", "v0"
	return r
}

func TestARecordOfVirtualTime(t *testing.T) {
	r := played(t, nil)
	assert.True(t, r.Virtual)
	assert.Equal(t, "kernel", r.Transport)
	assert.Empty(t, r.Kernel)
	assert.Equal(t, "12mbit both ways, 10 ms each way, buffer 250pkt, 3 s", r.Path())
	assert.InDelta(t, 12, r.Offered, 1e-9)
	assert.InDelta(t, 1, r.Utilisation, 0.005)
	assert.InDelta(t, 12, r.Throughput, 0.05)
	assert.InDelta(t, 2, r.Queueing.P50, 0.1, "two of the window's packets wait: one, and the one that is sent")
	assert.InDelta(t, r.Queueing.P95+10, r.OneWay.P95, 1e-9)
	assert.Less(t, r.UpQueueing.Max, 0.1, "acknowledgements do not wait")
	assert.InDelta(t, 3000, r.Packets, 30)
	assert.Zero(t, r.QueueDrops+r.RandomLosses)
	assert.Zero(t, r.Retransmitted)
	assert.Len(t, r.Points, 30)
	assert.Len(t, r.Series.Throughput, 3)
	assert.Len(t, r.Centiles, 101)
	require.Len(t, r.Flows, 1)
	assert.Len(t, r.Flows[0].PerSecond, 3)
	assert.Nil(t, r.CPUPerGB)
	assert.Zero(t, r.Lateness)

	lossy := played(t, func(s *stage.Stage) { s.Down.Loss = 0.02 })
	assert.InDelta(t, 0.02, float64(lossy.RandomLosses)/float64(lossy.Packets), 0.01)
	assert.InDelta(t, 0.02, lossy.Retransmitted, 0.01)
	assert.Equal(t, "12mbit both ways, 10 ms each way, buffer 250pkt, 2 % random loss, 3 s", lossy.Path())
	assert.Equal(t, r.Way(false), lossy.Way(false))

	two := played(t, func(s *stage.Stage) {
		s.Edge, s.Up = "", sim.LinkConfig{Delay: s.Up.Delay}
		s.Actors = append(s.Actors, stage.Actor{Name: "video", Kind: stage.Video, Rate: 1e6, Every: time.Second})
	})
	assert.Equal(t, "cubic", two.Kernel)
	assert.Equal(t, "12mbit down, unlimited up, 10 ms each way, buffer 250pkt, 3 s", two.Path())
	assert.Positive(t, two.Jain)
	assert.Positive(t, two.Flows[1].Video.StartUp)
	many := played(t, func(s *stage.Stage) {
		for range 120 {
			s.Actors = append(s.Actors, stage.Actor{Name: "bulk", Kind: stage.Bulk})
		}
	})
	require.Len(t, many.Flows, 1, "all of them as one")
	assert.Equal(t, "all 121", many.Flows[0].Name)
}

func TestRecordsAreReadAsTheyWereWritten(t *testing.T) {
	want := []record.Run{played(t, nil), played(t, func(s *stage.Stage) { s.Name = "again" })}
	want[1].Findings = []record.Finding{{What: "what", Bound: "at least 2", Got: "3", OK: true}}
	var b bytes.Buffer
	for i := range want {
		require.NoError(t, record.Write(&b, want[i]))
		want[i].Points = nil // for plots alone
	}
	assert.Equal(t, 2, strings.Count(b.String(), "\n"), "one line for each run")
	for _, absent := range []string{"lateness", "proxy_cpu", "window", "departures"} {
		assert.NotContains(t, b.String(), absent, "there is none in virtual time")
	}
	got, err := record.Read("runs", &b)
	require.NoError(t, err)
	assert.Equal(t, want, got)
	assert.Equal(t, 1, want[1].Find(got))
	other := want[1]
	other.Version = "v1"
	assert.Equal(t, -1, other.Find(got), "another build's run is made again")
	plays := func(text string) func(*stage.Stage) {
		trace, err := sim.ReadTrace("x", strings.NewReader(text))
		require.NoError(t, err)
		return func(s *stage.Stage) { s.Down.Trace = trace }
	}
	for what, change := range map[string]func(*stage.Stage){
		"flows": func(s *stage.Stage) { s.Actors = append(s.Actors, s.Actors[0]) },
		"acks":  func(s *stage.Stage) { s.AckEvery = 10 * time.Millisecond },
		"trace": plays("5\n"), "what it carries": plays("6\n"),
	} {
		changed := played(t, change)
		assert.Equal(t, -1, changed.Find(got), what)
		assert.Zero(t, changed.Find([]record.Run{played(t, change)}), what)
		got = append(got, changed)
	}

	_, err = record.Read("runs", strings.NewReader("{\"experiment\":\"a\"}\n{\"recipe\":\"b\"}\n"))
	require.ErrorContains(t, err, "runs: line 2: it is no record of a run")
	_, err = record.Read("runs", strings.NewReader("{\"experiment\": 3}\n"))
	require.ErrorContains(t, err, "runs: line 1")
	got, err = record.Read("runs", strings.NewReader("{\"experiment\":\"a\"}\r\n\n{\"experiment\":\"b\"}\n \n"))
	require.NoError(t, err)
	assert.Len(t, got, 2, "lines without anything say nothing")
	_, err = record.Read("runs", strings.NewReader("{\"experiment\":\"a\"}\n{\"experiment\":\"b"))
	require.ErrorContains(t, err, "runs: line 2: it is cut off: take the line out")
	const uneven = `{"experiment":"a","series":{"throughput_mbit":[1,2],"offered_mbit":[1]}}`
	_, err = record.Read("runs", strings.NewReader(uneven))
	require.ErrorContains(t, err, "runs: line 1: the lists of its series are not of one length")
}

func TestTheProxysTimeIsThatOfAllThatItMoved(t *testing.T) {
	perGB := func(warmup time.Duration) float64 {
		link := sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: 250}
		s := stage.Stage{
			Name: "cubic", Down: link, Up: link, Duration: 4 * time.Second, Warmup: warmup,
			Actors: []stage.Actor{{Name: "download", Kind: stage.Bulk}},
		}
		rec, err := stage.PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		rec.CPU = 100 * time.Millisecond // in the whole run, as a real one has it
		return *record.Of(s, rec).CPUPerGB
	}
	assert.InEpsilon(t, 0.1/(4*12e6/8/1e9), perGB(0), 0.05)
	assert.InEpsilon(t, perGB(0), perGB(3*time.Second), 1e-9, "a warm-up takes away neither")
}

func TestAWebApplicationIsAllOfItsConnections(t *testing.T) {
	web := func(warmup time.Duration) record.Run {
		return played(t, func(s *stage.Stage) {
			s.Warmup, s.Edge = warmup, ""
			s.Actors[0] = stage.Actor{Name: "web", Kind: stage.Web, Size: 30e3, Every: 500 * time.Millisecond}
		})
	}
	whole, rest := web(0), web(time.Second)
	assert.InDelta(t, 6*21, whole.Flows[0].Sent, 1, "six objects of 21 segments")
	assert.Len(t, whole.Flows[0].Took, 6)
	require.NotNil(t, whole.Flows[0].Queueing, "of the packets of all of them")
	assert.InDelta(t, 4*21, rest.Flows[0].Sent, 1)
	assert.Len(t, rest.Flows[0].Took, 4, "those that began after the warm-up")
}

func TestADownloadOfASizeHasTheThroughputOfItsTime(t *testing.T) {
	s := stage.Stage{
		Duration: 10 * time.Second, Warmup: 100 * time.Millisecond,
		Actors: []stage.Actor{
			{Name: "a", Kind: stage.Bulk, Size: 500_000}, {Name: "b", Kind: stage.Bulk, Size: 500_000},
		},
	}
	bytes := func(each cc.Bytes, steps int) []cc.Bytes {
		all := make([]cc.Bytes, 100)
		for i := range steps {
			all[i] = each
		}
		return all
	}
	r := record.Of(s, stage.Record{Actors: []stage.ActorRecord{
		{Name: "a", Bytes: bytes(100_000, 5)}, {Name: "b", Bytes: bytes(4_999, 100)},
	}})
	assert.InDelta(t, 8, r.Flows[0].Throughput, 1e-9, "over 0.4 s, as in virtual time")
	assert.InDelta(t, 0.4, r.Flows[1].Throughput, 1e-4, "it did not end")
}

func TestThePayloadIsThatOfTheWholeTime(t *testing.T) {
	turns := func(s *stage.Stage) {
		s.Actors = append(s.Actors, stage.Actor{Name: "late", Kind: stage.Bulk, Start: 1500 * time.Millisecond})
		s.Actors[0].Stop = 1500 * time.Millisecond
	}
	r := played(t, turns)
	assert.Greater(t, r.Flows[0].Throughput+r.Flows[1].Throughput, 20.0, "each has the link while it is there")
	assert.InDelta(t, 11.4, r.Payload, 0.3)
	whole := played(t, nil)
	assert.InDelta(t, whole.Flows[0].Throughput, whole.Payload, 1e-9)

	s := stage.Stage{Duration: time.Second, Actors: []stage.Actor{{Stop: 500 * time.Millisecond}}}
	bytes := make([]cc.Bytes, 10)
	bytes[1] = 125_000
	overSockets := record.Of(s, stage.Record{Actors: []stage.ActorRecord{{Bytes: bytes}}})
	assert.InDelta(t, 2, overSockets.Flows[0].Throughput, 1e-9)
	assert.InDelta(t, 1, overSockets.Payload, 1e-9)
}

func TestPathsThatDifferHaveWordsThatDiffer(t *testing.T) {
	path := func(change func(*stage.Stage)) string { return played(t, change).Path() }
	for what, changes := range map[string][2]func(*stage.Stage){
		"rates": {
			func(s *stage.Stage) { s.Down.Rate = 100_100_000 }, func(s *stage.Stage) { s.Down.Rate = 100_400_000 },
		},
		"losses": {
			func(s *stage.Stage) { s.Down.Loss = 0.00001 }, func(s *stage.Stage) { s.Down.Loss = 0.00004 },
		},
		"delays": {
			func(s *stage.Stage) { s.Down.Delay = 100200 * time.Microsecond },
			func(s *stage.Stage) { s.Down.Delay = 100400 * time.Microsecond },
		},
	} {
		assert.NotEqual(t, path(changes[0]), path(changes[1]), what)
	}
	plays := func(down, up string) string {
		return path(func(s *stage.Stage) {
			for link, text := range map[*sim.LinkConfig]string{&s.Down: down, &s.Up: up} {
				var err error
				link.Trace, err = sim.ReadTrace("x.tr", strings.NewReader(text))
				require.NoError(t, err)
			}
		})
	}
	assert.Contains(t, plays("1\n", "1\n"), "x.tr both ways")
	assert.Contains(t, plays("1\n", "2\n"), "x.tr down, x.tr up", "files of one name")
	assert.Contains(t, path(func(s *stage.Stage) { s.Down.Rate, s.Down.Loss = 100_100_000, 0.007 }),
		"100.1mbit down, 12mbit up, 10 ms each way, buffer 250pkt, 0.7 % random loss, 3 s")
	back := func(s *stage.Stage) { s.Down.Rate, s.Up.QueuePackets, s.Up.Loss = 50e6, 20, 0.01 }
	assert.Contains(t, path(back), "50mbit down, 12mbit up, 10 ms each way, buffer 250pkt down and 20pkt up, "+
		"1 % lost on the way back, 3 s", "which is where uploads wait")
	trace, err := sim.ReadDelayTrace("moves", strings.NewReader("5\n"))
	require.NoError(t, err)
	moves := played(t, func(s *stage.Stage) { s.Down.Delays, s.Up.Delays = trace, trace })
	assert.InDelta(t, 10, moves.Delay, 0)
	assert.Contains(t, moves.Path(), ", 10 ms and delays of moves each way, ")
}

func TestMergeSteps(t *testing.T) {
	step := func(at int, mbit cc.Rate, queueing time.Duration) netlab.Point {
		return netlab.Point{
			At: time.Duration(at) * 100 * time.Millisecond, Throughput: mbit * 1e6, Offered: 12e6,
			Queueing: queueing,
		}
	}
	got := record.Merge([]netlab.Point{
		step(0, 10, 30*time.Millisecond), step(1, 5, 90*time.Millisecond), step(2, 0, 0),
		step(3, 3, 0), step(4, 1, 0),
	}, 2)
	require.Len(t, got, 2, "the rest is left out")
	assert.Equal(t, netlab.Point{At: 0, Throughput: 7.5e6, Offered: 12e6, Queueing: 50 * time.Millisecond}, got[0],
		"delays are weighted by what left")
	assert.Zero(t, got[1].Queueing)
}

func TestWhoLeftInTheWarmUpHasNoPartInFairness(t *testing.T) {
	bulk := func(name string) stage.Actor { return stage.Actor{Name: name, Kind: stage.Bulk} }
	for what, early := range map[string]func(*stage.Actor){
		"it stops": func(a *stage.Actor) { a.Stop = 900 * time.Millisecond },
		"it ends":  func(a *stage.Actor) { a.Size = 50_000 },
	} {
		change := func(s *stage.Stage) {
			s.Edge, s.Warmup = "", time.Second
			s.Actors = []stage.Actor{bulk("a"), bulk("b"), bulk("early")}
			early(&s.Actors[2])
		}
		three := played(t, change)
		assert.Greater(t, three.Jain, 0.9, what)
		alone := played(t, func(s *stage.Stage) {
			change(s)
			s.Actors = s.Actors[1:]
		})
		assert.Zero(t, alone.Jain, "%s: there are not several", what)
	}
}

// Findings are about the runs of their play, whatever stands between these in a file.
func TestFindingsOfADisturbedPlayAreKnown(t *testing.T) {
	type run = record.Run
	found := []record.Finding{{What: "ratio"}}
	for what, c := range map[string]struct {
		runs []run
		want []bool
	}{
		"its own": {[]run{{Findings: found}, {Findings: found, Noisy: true}}, []bool{false, true}},

		"one before": {[]run{{Noisy: true}, {}, {Findings: found}, {Findings: found}}, []bool{true, false}},

		"one that does not count": {[]run{{Discarded: "packets were lost"}, {Findings: found}}, []bool{true}},

		"of an experiment between others": {
			[]run{
				{Experiment: "a", Noisy: true},
				{Experiment: "b", Findings: found},
				{Experiment: "a", Findings: found},
				{Experiment: "b", Findings: found},
			},
			[]bool{false, true, false},
		},

		"of a play whose conditions all fail": {[]run{{Noisy: true, Must: "digest"}, {Findings: found}}, []bool{false}},

		"of another form":    {[]run{{Noisy: true, Scale: "short"}, {Findings: found}}, []bool{false}},
		"of another command": {[]run{{Noisy: true, Command: "penstock-lab bench"}, {Findings: found}}, []bool{false}},
	} {
		var got []bool
		for _, r := range record.Judged(c.runs) {
			got = append(got, r.Noisy)
		}
		assert.Equal(t, c.want, got, what)
	}
}

var update = flag.Bool("update", false, "rewrite the list of docs/records.md")

// TestThePageOfRecordsListsEachKey compares docs/records.md with the keys that a record may have.
func TestThePageOfRecordsListsEachKey(t *testing.T) {
	const path, generated = "../../../docs/records.md",
		"<!-- Generated from the types (make docs); a test compares it with them. -->\n"
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	written, list, found := strings.Cut(string(page), generated)
	require.True(t, found)
	want := "\n| key | what |\n|---|---|\n" + strings.Join(tabulateKeys(t, "Run", ""), "")
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(written+generated+want), 0o644)) //nolint:gosec // a page
		return
	}
	assert.Equal(t, want, list, "docs/records.md is not what the types say; run: make docs")
}

// tabulateKeys returns a row for each key of a type, and then for the keys of its types, behind the given prefix. What
// they are is the comment of the field.
func tabulateKeys(t *testing.T, name, prefix string) (rows []string) {
	t.Helper()
	source := "record.go"
	if name == "Window" {
		source = "../stage/window.go"
	}
	file, err := parser.ParseFile(token.NewFileSet(), source, nil, parser.ParseComments)
	require.NoError(t, err)
	types := []string{"System", "Window", "Series", "Flow", "Video", "Finding"}
	of := file.Scope.Lookup(name).Decl.(*ast.TypeSpec).Type.(*ast.StructType)
	for _, f := range of.Fields.List {
		key := prefix + regexp.MustCompile(`json:"([^",]+)`).FindStringSubmatch(f.Tag.Value)[1]
		if strings.HasSuffix(key, "-") {
			continue
		}
		about := strings.Join(strings.Fields(f.Doc.Text()), " ")
		assert.NotEmpty(t, about, key)
		rows = append(rows, fmt.Sprintf("| `%s` | %s |\n", key, about))
		ast.Inspect(f.Type, func(n ast.Node) bool {
			if of, ok := n.(*ast.Ident); ok && slices.Contains(types, of.Name) {
				rows = append(rows, tabulateKeys(t, of.Name, key+".")...)
			}
			return true
		})
	}
	return rows
}
