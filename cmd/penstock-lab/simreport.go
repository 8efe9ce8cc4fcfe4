package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/telemetry"
)

// run makes the runs and prints what they came to, one after the other with
// --json, and as a table at the end otherwise.
func (f *simFlags) run(out io.Writer, trials []trial) (err error) {
	traces, closeTraces, err := f.openTraces()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeTraces()) }()
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if !f.json {
		fmt.Fprintln(t, "ALGORITHM\tLINK\tMBIT/S\tUTILISATION %\tQUEUEING MS P50\tP95\tP99\tDROPS\tRETRANSMITS\tJAIN")
	}
	var unmet []error
	for _, trial := range trials {
		result, err := trial.who.Run(trial.Scenario)
		if err != nil {
			return fmt.Errorf("%s: %w", trial.name, err)
		}
		if f.json {
			err = json.NewEncoder(out).Encode(newSimRecord(trial, result))
		} else {
			writeSimRows(t, trial, result)
		}
		if err := errors.Join(err, f.writeSamples(traces, trial, result)); err != nil {
			return err
		}
		unmet = append(unmet, trial.unmet(result)...)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	return errors.Join(unmet...)
}

// openTraces opens the file of --trace-out, if there is to be one.
func (f *simFlags) openTraces() (w io.Writer, done func() error, err error) {
	if f.traceOut == "" {
		return io.Discard, func() error { return nil }, nil
	}
	file, err := os.Create(f.traceOut)
	if err != nil {
		return nil, nil, cli.BadInput(fmt.Errorf("--trace-out: %w", err))
	}
	buffered := bufio.NewWriter(file)
	return buffered, func() error { return errors.Join(buffered.Flush(), file.Close()) }, nil
}

// writeSimRows prints one row for a run; for a file with several flows, also
// one for each of them.
func writeSimRows(w io.Writer, t trial, r sim.Result) {
	total := cc.Rate(0)
	for _, f := range r.Flows {
		total += f.Throughput
	}
	fairness := "-"
	if len(r.Flows) > 1 {
		fairness = strconv.FormatFloat(r.Jain, 'f', 3, 64)
	}
	fmt.Fprintf(w, "%s\t%s\t%.2f\t%.1f\t%s\t%d\t%d\t%s\n", t.name, cmp.Or(t.link, "-"), total.Mbps(), 100*r.Utilisation,
		delayCells(r.Queueing), r.Drops, r.Retransmits, fairness)
	if t.link != "" || len(r.Flows) == 1 {
		return
	}
	for _, f := range r.Flows {
		fmt.Fprintf(w, "  %s %s\t\t%.2f\t%.1f\t%s\t%d\t%d\t\n", f.Name, f.Algorithm, f.Throughput.Mbps(),
			100*f.Utilisation,
			delayCells(f.Queueing), f.Drops, f.Retransmits)
	}
}

func delayCells(d sim.Delays) string {
	return fmt.Sprintf("%.1f\t%.1f\t%.1f", inMillis(d.P50), inMillis(d.P95), inMillis(d.P99))
}

func inMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// simRecord is one run as JSON.
type simRecord struct {
	Algorithm   string          `json:"algorithm,omitempty"`
	Scenario    string          `json:"scenario,omitempty"`
	Link        string          `json:"link,omitempty"`
	Seed        uint64          `json:"seed"`
	Duration    float64         `json:"duration_seconds"`
	Warmup      float64         `json:"warmup_seconds"`
	Throughput  cc.Rate         `json:"throughput_bits_per_second"`
	Offered     cc.Bytes        `json:"offered_bytes"`
	Carried     cc.Bytes        `json:"carried_bytes"`
	Utilisation float64         `json:"utilisation"`
	Queueing    simDelays       `json:"queueing_seconds"`
	OneWay      simDelays       `json:"one_way_seconds"`
	Queue       float64         `json:"queue_mean_packets"`
	Drops       int             `json:"drops"`
	Losses      int             `json:"losses"`
	Retransmits int             `json:"retransmits"`
	Jain        float64         `json:"jain"`
	Flows       []simFlowRecord `json:"flows"`
}

type simFlowRecord struct {
	Name        string    `json:"name"`
	Algorithm   string    `json:"algorithm"`
	Throughput  cc.Rate   `json:"throughput_bits_per_second"`
	Utilisation float64   `json:"utilisation"`
	Queueing    simDelays `json:"queueing_seconds"`
	OneWay      simDelays `json:"one_way_seconds"`
	Packets     int       `json:"packets"`
	Arrived     int       `json:"arrived"`
	Drops       int       `json:"drops"`
	Losses      int       `json:"losses"`
	Retransmits int       `json:"retransmits"`
	Timeouts    int       `json:"timeouts"`
	Completed   float64   `json:"completed_seconds,omitempty"`
	PerSecond   []cc.Rate `json:"throughput_series_bits_per_second"`

	Objects []simObject `json:"objects,omitempty"`
	Video   *simVideo   `json:"video,omitempty"`
}

type simObject struct {
	At   float64 `json:"at_seconds"`
	Took float64 `json:"took_seconds"` // 0: it has not come
}

type simVideo struct {
	StartUp   float64 `json:"startup_seconds"` // 0: it has not begun
	Rebuffers int     `json:"rebuffers"`
	Rebuffer  float64 `json:"rebuffer_seconds"`
	Played    float64 `json:"played_seconds"`
}

type simDelays struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

func newSimDelays(d sim.Delays) simDelays {
	return simDelays{d.Mean.Seconds(), d.P50.Seconds(), d.P95.Seconds(), d.P99.Seconds(), d.Max.Seconds()}
}

func newSimRecord(t trial, r sim.Result) simRecord {
	rec := simRecord{
		Algorithm: t.name, Link: t.link, Seed: t.Seed,
		Duration: t.Duration.Seconds(), Warmup: t.Warmup.Seconds(),
		Offered: r.Offered, Carried: r.Carried, Utilisation: r.Utilisation,
		Queueing: newSimDelays(r.Queueing), OneWay: newSimDelays(r.OneWay), Queue: r.QueuePackets,
		Drops: r.Drops, Losses: r.Losses, Retransmits: r.Retransmits, Jain: r.Jain,
	}
	if t.link == "" {
		rec.Algorithm, rec.Scenario = "", t.name
	}
	for i, f := range r.Flows {
		rec.Throughput += f.Throughput
		flow := newSimFlowRecord(f)
		if t.Flows[i].Video.Rate > 0 {
			v := f.Video
			flow.Video = &simVideo{v.StartUp.Seconds(), v.Rebuffers, v.Rebuffer.Seconds(), v.Played.Seconds()}
		}
		rec.Flows = append(rec.Flows, flow)
	}
	return rec
}

func newSimFlowRecord(f sim.FlowResult) simFlowRecord {
	rec := simFlowRecord{
		Name: f.Name, Algorithm: f.Algorithm, Throughput: f.Throughput, Utilisation: f.Utilisation,
		Queueing: newSimDelays(f.Queueing), OneWay: newSimDelays(f.OneWay),
		Packets: f.Packets, Arrived: f.Arrived, Drops: f.Drops, Losses: f.Losses, Retransmits: f.Retransmits, Timeouts: f.Timeouts,
		Completed: f.Completed.Seconds(), PerSecond: f.PerSecond,
	}
	for _, o := range f.Objects {
		rec.Objects = append(rec.Objects, simObject{o.At.Seconds(), o.Took.Seconds()})
	}
	return rec
}

// simSample is one line of --trace-out.
type simSample struct {
	Run       string   `json:"run"`
	Link      string   `json:"link,omitempty"`
	Flow      string   `json:"flow"`
	At        float64  `json:"time_seconds"`
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

func (f *simFlags) writeSamples(w io.Writer, t trial, r sim.Result) error {
	enc := json.NewEncoder(w)
	for _, one := range r.Flows {
		for _, s := range one.Samples {
			if s.At%f.sampled != 0 {
				continue
			}
			if err := enc.Encode(simSample{
				Run: t.name, Link: t.link, Flow: one.Name, At: s.At.Seconds(),
				Cwnd: s.Cwnd, Share: s.Share, Inflight: s.Inflight, Pacing: s.PacingRate,
				SRTT: s.SRTT.Seconds(), RTT: s.LatestRTT.Seconds(), MinRTT: s.MinRTT.Seconds(), Reverse: s.ReverseQueue.Seconds(),
				Delivered: s.Delivered, Backlog: s.Backlog, Phase: s.Phase,
				Internals: telemetry.InternalsOf(s.Algorithm, s.Internals),
			}); err != nil {
				return fmt.Errorf("--trace-out: %w", err)
			}
		}
	}
	return nil
}
