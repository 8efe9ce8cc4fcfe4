package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/telemetry"
)

// run makes the runs and prints what they came to, and tells what must hold and does not.
func (f *simFlags) run(cmd *cobra.Command, experiments []recipe.Recipe) (err error) {
	s := session{
		outputs: f.outputs, cmd: cmd, scale: recipe.Full, virtual: true, quiet: true, seeds: []uint64{f.seed}, runs: 1,
		sampled: f.sampling(),
	}
	t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	head := "ALGORITHM\tLINK\tMBIT/S\tUTILISATION %\tQUEUEING MS P50\tP95\tP99\tDROPS\tRETRANSMITS\tJAIN\n"
	var unmet []error
	var played []course
	err = s.play(experiments, func(r recipe.Recipe, runs []record.Run, results []recipe.Result) error {
		fmt.Fprint(t, head)
		head = ""
		for _, one := range runs {
			writeSimRows(t, one, len(runs))
			unmet = append(unmet, unheld(r.Name, one.Findings)...)
		}
		for _, result := range results { // of the one seed
			for i, one := range result.Runs {
				played = append(played, course{runs[i], one})
			}
		}
		return nil
	})
	err = errors.Join(err, t.Flush(), f.writeTraces(played))
	return errors.Join(err, f.outputs.draw(cmd, s.all), errors.Join(unmet...))
}

// unheld are the findings that do not hold.
func unheld(name string, findings []record.Finding) (all []error) {
	for _, f := range findings {
		if !f.OK {
			all = append(all, fmt.Errorf("%s: %s is %s, but must be %s", name, f.What, f.Got, f.Bound))
		}
	}
	return all
}

// sampling is how often the course of flows is sampled, so that what --trace-every asks for and
// the record needs are among it; 0: as the record needs.
func (f *simFlags) sampling() time.Duration {
	if f.outputs.traceOut == "" {
		return 0
	}
	every, rest := f.sampled, stage.Step // their greatest common divisor
	for rest > 0 {
		every, rest = rest, every%rest
	}
	return every
}

// course is a run; --trace-out may have its samples.
type course struct {
	record.Run
	played recipe.Run
}

// writeTraces makes the file of --trace-out, if there is to be one.
func (f *simFlags) writeTraces(runs []course) error {
	if f.outputs.traceOut == "" || len(runs) == 0 {
		return nil
	}
	err := output.Write(f.outputs.traceOut, func(w io.Writer) error {
		buffered := bufio.NewWriter(w)
		for _, r := range runs {
			if err := f.writeSamples(buffered, r); err != nil {
				return err
			}
		}
		return buffered.Flush()
	})
	if err != nil {
		return fmt.Errorf("--trace-out: %w", err)
	}
	return nil
}

// writeSimRows prints one row for a run of a file or of flags, and one for each of several flows.
func writeSimRows(w io.Writer, r record.Run, runs int) {
	name := r.Name
	if r.Experiment != "sim" {
		if name = r.Experiment; runs > 1 {
			name += ": " + r.Name
		}
	}
	resent := 0
	for _, f := range r.Flows {
		resent += f.Resent
	}
	fairness := "-"
	if r.Jain > 0 { // there are several that are no UDP
		fairness = strconv.FormatFloat(r.Jain, 'f', 3, 64)
	}
	fmt.Fprintf(w, "%s\t%s\t%.2f\t%.1f\t%s\t%d\t%d\t%s\n", name, strings.TrimPrefix(r.Link, "generate:"), r.Payload,
		100*r.Utilisation, delayCells(&r.Queueing), r.QueueDrops, resent, fairness)
	if r.Experiment == "sim" || len(r.Flows) == 1 {
		return
	}
	for _, f := range r.Flows {
		fmt.Fprintf(w, "  %s\t\t%.2f\t\t%s\t%d\t%d\t\n", f.Name, f.Throughput, delayCells(f.Queueing), f.Drops, f.Resent)
	}
}

func delayCells(d *record.Percentiles) string {
	if d == nil {
		return "-\t-\t-"
	}
	return fmt.Sprintf("%.1f\t%.1f\t%.1f", d.P50, d.P95, d.P99)
}

// simSample is one line of --trace-out.
type simSample struct {
	Experiment string  `json:"experiment"`
	Run        string  `json:"run"`
	Path       string  `json:"path"`
	Flow       string  `json:"flow"`
	At         float64 `json:"time_seconds"`

	Cwnd      cc.Bytes `json:"cwnd_bytes"`
	Share     cc.Bytes `json:"share_bytes"`
	Inflight  cc.Bytes `json:"inflight_bytes"`
	Pacing    cc.Rate  `json:"pacing_bits_per_second"`
	SRTT      float64  `json:"srtt_seconds"`
	RTT       float64  `json:"rtt_seconds"`
	MinRTT    float64  `json:"min_rtt_seconds"`
	Reverse   float64  `json:"reverse_queue_seconds"`
	Delivered cc.Bytes `json:"delivered_bytes"`
	Backlog   cc.Bytes `json:"queue_bytes"`
	Phase     string   `json:"phase"`

	Internals telemetry.Internals `json:"internals,omitempty"`
}

func (f *simFlags) writeSamples(w io.Writer, run course) error {
	enc, path := json.NewEncoder(w), run.Path()
	for _, one := range run.played.Record.Virtual.Flows {
		for _, s := range one.Samples {
			if s.At%f.sampled != 0 {
				continue
			}
			if err := enc.Encode(simSample{
				Experiment: run.Experiment, Run: run.Name, Path: path, Flow: one.Name, At: s.At.Seconds(),
				Cwnd: s.Cwnd, Share: s.Share, Inflight: s.Inflight, Pacing: s.PacingRate,
				SRTT: s.SRTT.Seconds(), RTT: s.LatestRTT.Seconds(), MinRTT: s.MinRTT.Seconds(), Reverse: s.ReverseQueue.Seconds(),
				Delivered: s.Delivered, Backlog: s.Backlog, Phase: s.Phase,
				Internals: telemetry.InternalsOf(s.Algorithm, s.Internals),
			}); err != nil {
				return err
			}
		}
	}
	return nil
}
