package recipe

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// WriteList writes what there is to play.
func WriteList(w io.Writer, recipes []Recipe) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range recipes {
		fmt.Fprintf(t, "%s\t%s\t%s\n", r.Name, r.About, r.Source)
	}
	return t.Flush()
}

// WriteResults writes the runs of one recipe: a table of the stages' figures,
// medians where there are several runs, then the findings of each run.
func WriteResults(w io.Writer, results []Result) error {
	first := results[0]
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n%s; %s form", first.Name, first.About, first.Source, first.Scale)
	if len(results) > 1 {
		fmt.Fprintf(&b, ", %d runs", len(results))
	}
	b.WriteString("\n\n")
	stageTable(results).Write(&b)
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tfinding\tpaper\tbound\tours")
	for i, f := range first.Findings {
		var got []string
		held := 0
		for _, r := range results {
			got = append(got, r.Findings[i].Got)
			if r.Findings[i].OK {
				held++
			}
		}
		verdict := "ok"
		if held < len(results) {
			verdict = "FAIL"
		}
		if len(results) > 1 && held > 0 && held < len(results) {
			verdict += fmt.Sprintf(" %d of %d", len(results)-held, len(results))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", verdict, f.What, orElse(f.Paper, "-"), f.Bound, strings.Join(got, " · "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		for _, run := range r.Runs {
			if run.Record.Discarded != "" {
				fmt.Fprintf(&b, "Discarded: %s, seed %d: %s.\n", run.Stage.Name, r.Seed, run.Record.Discarded)
			}
			if disturbed(run.Record) {
				fmt.Fprintf(&b, "Disturbed by the machine: %s, seed %d: packets were up to %s late (p99).\n",
					run.Stage.Name, r.Seed, run.Record.Lateness.Round(100*time.Microsecond))
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// stageTable has a line for each stage.
func stageTable(results []Result) figures.Table {
	t := figures.Table{
		{"", "Mbit/s", "used", "queueing, ms", figures.Spans, "each, Mbit/s of payload"},
		{"stage", "", "%", "p50", "p95", ""},
	}
	for i, run := range results[0].Runs {
		of := func(figure func(stage.Record) float64) float64 {
			var all []float64
			for _, r := range results {
				all = append(all, figure(r.Runs[i].Record))
			}
			return median(all)
		}
		t = append(t, []string{
			run.Stage.Name,
			figures.Number(of(func(r stage.Record) float64 { return r.Throughput.Mbps() })),
			figures.Percent(of(func(r stage.Record) float64 { return r.Utilisation }), 1),
			figures.Number(of(func(r stage.Record) float64 { return millis(r.Queueing.P50) })),
			figures.Number(of(func(r stage.Record) float64 { return millis(r.Queueing.P95) })),
			each(run),
		})
	}
	return t
}

// each is the throughput of each actor after the warm-up, while it ran.
func each(r Run) string {
	const most = 5
	var all []string
	least, largest := -1.0, 0.0
	for i, a := range r.Record.Actors {
		v := a.Rate(there(r.Stage, i)).Mbps()
		all = append(all, figures.Number(v))
		if least < 0 || v < least {
			least = v
		}
		largest = max(largest, v)
	}
	if len(all) > most {
		return fmt.Sprintf("%d: %s to %s", len(all), figures.Number(least), figures.Number(largest))
	}
	return strings.Join(all, " ")
}

// there is the time after the warm-up in which an actor is there.
func there(s stage.Stage, i int) (from, to time.Duration) {
	a := s.Actors[i]
	from, to = max(s.Warmup, a.Start), s.Duration
	if a.Stop > 0 {
		to = min(to, a.Stop)
	}
	return from.Truncate(stage.Step), to.Truncate(stage.Step)
}

// Line is a line of --json: a run of a recipe.
type Line struct {
	Recipe   string      `json:"recipe"`
	Source   string      `json:"source"`
	Scale    Scale       `json:"scale"`
	Virtual  bool        `json:"virtual"`
	Seed     uint64      `json:"seed"`
	Version  string      `json:"version"`
	Stages   []lineStage `json:"stages"`
	Findings []Finding   `json:"findings"`
}

type lineStage struct {
	Name        string      `json:"name"`
	Throughput  float64     `json:"throughput_mbit"`
	Utilisation float64     `json:"utilisation"`
	Queueing    lineDelays  `json:"queueing_ms"`
	Lateness    float64     `json:"lateness_ms"`
	Discarded   string      `json:"discarded,omitempty"`
	CPU         float64     `json:"cpu_seconds,omitempty"`
	Memory      []int64     `json:"memory_bytes,omitempty"`
	Actors      []lineActor `json:"actors"`
}

type lineDelays struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	Max  float64 `json:"max"`
}

type lineActor struct {
	Name      string     `json:"name"`
	PerSecond []float64  `json:"throughput_mbit_per_second"`
	Queueing  lineDelays `json:"queueing_ms"`
	Took      []float64  `json:"request_seconds,omitempty"`
	Error     string     `json:"error,omitempty"`
}

// WriteJSON writes one run as one line.
func WriteJSON(w io.Writer, r Result, virtual bool, version string) error {
	out := Line{
		Recipe: r.Name, Source: r.Source, Scale: r.Scale, Virtual: virtual, Seed: r.Seed, Version: version, Findings: r.Findings,
	}
	for _, run := range r.Runs {
		rec := run.Record
		s := lineStage{
			Name: run.Stage.Name, Throughput: rec.Throughput.Mbps(), Utilisation: rec.Utilisation,
			Queueing: delays(rec.Queueing), Lateness: millis(rec.Lateness), Discarded: rec.Discarded, CPU: rec.CPU.Seconds(),
		}
		for _, m := range rec.Memory {
			s.Memory = append(s.Memory, int64(m))
		}
		for _, a := range shown(rec.Actors) {
			s.Actors = append(s.Actors, lineActor{
				Name: a.Name, PerSecond: perSecond(a, run.Stage.Duration), Queueing: delays(a.Queueing),
				Took: took(a), Error: a.Corrupt + a.Error,
			})
		}
		out.Stages = append(out.Stages, s)
	}
	if err := json.NewEncoder(w).Encode(out); err != nil {
		return fmt.Errorf("recipe: write JSON: %w", err)
	}
	return nil
}

func delays(q stage.Quantiles) lineDelays {
	return lineDelays{Mean: millis(q.Mean), P50: millis(q.P50), P95: millis(q.P95), Max: millis(q.Max)}
}

// shown are the actors, or where they are many, all of them as one.
func shown(actors []stage.ActorRecord) []stage.ActorRecord {
	const most = 100
	if len(actors) <= most {
		return actors
	}
	all := stage.ActorRecord{Name: fmt.Sprintf("all %d", len(actors)), Bytes: make([]cc.Bytes, len(actors[0].Bytes))}
	for _, a := range actors {
		for k, n := range a.Bytes {
			all.Bytes[k] += n
		}
		all.Requests = append(all.Requests, a.Requests...)
		all.Error = orElse(all.Error, a.Corrupt+a.Error)
	}
	return []stage.ActorRecord{all}
}

// perSecond is an actor's throughput in each whole second, in Mbit/s.
func perSecond(a stage.ActorRecord, d time.Duration) (all []float64) {
	for t := time.Duration(0); t+time.Second <= d; t += time.Second {
		all = append(all, math.Round(1e3*a.Rate(t, t+time.Second).Mbps())/1e3)
	}
	return all
}

// took is how long each request took, in seconds.
func took(a stage.ActorRecord) (all []float64) {
	for _, q := range a.Requests {
		if q.Took > 0 {
			all = append(all, q.Took.Seconds())
		}
	}
	return all
}
