// Package record is what commands of the laboratory write of runs and read again: one form,
// one JSON object a line, with units in the names, whoever played the run and wherever.
package record

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/netlab"
)

// Run is one run: what was played, what came of it, and how far to trust it. It is one line
// of a file of records. Figures are of the time after the warm-up, series of the whole run.
type Run struct {
	// What was played.
	Experiment string `json:"experiment"`
	// Who published it.
	Source string `json:"source,omitempty"`
	// `short`: less than all of it.
	Scale string `json:"scale,omitempty"`
	// The run's name, such as `copa@ebpf`.
	Name string `json:"run"`
	// The run's seed.
	Seed uint64 `json:"seed"`
	// 2: repeated, as the first was noisy.
	Attempt int `json:"attempt"`

	// The run was in virtual time.
	Virtual bool `json:"virtual"`
	// What was below the algorithm in virtual time.
	Transport string `json:"transport,omitempty"`
	// Of the servers' own, where no edge has a part in it.
	Kernel string `json:"kernel_algorithm,omitempty"`
	// That the edge has by default.
	Algorithm string `json:"algorithm,omitempty"`
	// The algorithm sent by itself, without an edge.
	Native bool `json:"native,omitempty"`
	// What carried its data; absent: UDP.
	Over string `json:"over,omitempty"`
	// Below it, as the proxy reports it, else as asked for.
	Envelope string `json:"envelope,omitempty"`
	// Around all that passes the link.
	Tunnel string `json:"tunnel,omitempty"`

	// What the link carries towards the hosts.
	Link string `json:"link"`
	// What it carries towards the servers; `same`: as link.
	Up string `json:"up"`
	// The limit of the queue.
	Buffer string `json:"buffer"`
	// The limit towards the servers; absent: as buffer, or nothing waits.
	UpBuffer string `json:"up_buffer,omitempty"`
	// Probability of a loss towards the servers.
	UpLoss float64 `json:"up_loss,omitempty"`
	// Propagation each way.
	Delay float64 `json:"delay_ms"`
	// The trace of more delay; absent: none.
	Delays string `json:"delays,omitempty"`
	// Probability of a loss towards the hosts.
	Loss float64 `json:"loss"`
	// Of the queue towards the hosts; absent: drop-tail.
	AQM string `json:"aqm,omitempty"`
	// Probability that a packet towards the hosts takes longer.
	Reorder float64 `json:"reorder,omitempty"`
	// How much longer.
	ReorderBy float64 `json:"reorder_by_ms,omitempty"`
	// How often the link told the edge of itself.
	Hints float64 `json:"hints_ms,omitempty"`
	// Name of the program that ran behind the link.
	Program string `json:"program,omitempty"`
	// Of the run.
	Duration float64 `json:"duration_seconds"`
	// Of its beginning that does not count.
	Warmup float64 `json:"warmup_seconds,omitempty"`

	// A digest of all that was to be played, what traces carry included: equal ones are the same run.
	Setup string `json:"setup,omitempty"`

	// When the run began.
	StartedAt time.Time `json:"started_at"`
	// The build.
	Version string `json:"version"`
	// The command line as a shell reads it; a program's is left out.
	Command string `json:"command,omitempty"`
	// The machine.
	System System `json:"system"`

	// IP bytes that left the queue.
	Throughput float64 `json:"throughput_mbit"`
	// What the link could have carried; 0: no bound.
	Offered float64 `json:"offered_mbit"`
	// Throughput as a part of what was offered.
	Utilisation float64 `json:"utilisation"`
	// Of all flows.
	Payload float64 `json:"payload_mbit"`

	// From a data packet's arrival at the queue until its last byte has left: `mean`, `p50`, `p95`, `p99`, `max`.
	Queueing Percentiles `json:"queueing_ms"`
	// Until it reaches the host.
	OneWay Percentiles `json:"one_way_ms"`
	// Of the acknowledgements, in the other direction's queue.
	UpQueueing Percentiles `json:"up_queueing_ms"`

	// Packets that arrived at the queue.
	Packets int `json:"packets"`
	// Packets that found it full.
	QueueDrops int `json:"queue_drops"`
	// Packets that the link lost.
	RandomLosses int `json:"random_losses"`
	// Share of the bytes that the transport before the link sent again.
	Retransmitted float64 `json:"retransmitted"`

	// The proxy's processor time without its start-up, for each GB of IP bytes; absent without a proxy.
	CPUPerGB *float64 `json:"proxy_cpu_seconds_per_gb,omitempty"`
	// The same as a share of one core. At a few Mbit/s only this says what the proxy costs.
	CPUShare *float64 `json:"proxy_cpu_share,omitempty"`
	// At the start and at each second.
	Memory []cc.Bytes `json:"proxy_memory_bytes,omitempty"`
	// What the proxy asked of the kernel and did not get.
	Missing []string `json:"proxy_missing,omitempty"`

	// The windows of one managed download that has the link; absent otherwise.
	Window *stage.Window `json:"window,omitempty"`

	// How late the emulator handed packets over: the error of the measurement. Absent in virtual time.
	Lateness Percentiles `json:"lateness_ms,omitzero"`
	// So late that the run says more of the machine.
	Noisy bool `json:"noisy"`
	// Why the run does not count, in words.
	Discarded string `json:"discarded,omitempty"`

	// What came of each step.
	Series *Series `json:"series,omitempty"`
	// The queueing delay that 0, 1, … 100 % of the data packets do not exceed.
	Centiles []float64 `json:"queueing_centiles_ms,omitempty"`
	// Jain's index of the flows' throughputs, of several that are no UDP.
	Jain float64 `json:"jain,omitempty"`
	// The applications.
	Flows []Flow `json:"flows"`
	// What must hold of the experiment, with its last run.
	Findings []Finding `json:"findings,omitempty"`
	// A digest of what must hold by the experiment's file, with its last run.
	Must string `json:"must,omitempty"`

	Points []netlab.Point `json:"-"` // for plots
}

// Series is what came of each step of a run.
type Series struct {
	// The length of a step.
	Step float64 `json:"step_seconds"`
	// IP bytes that left the queue.
	Throughput []float64 `json:"throughput_mbit"`
	// What the link could have carried.
	Offered []float64 `json:"offered_mbit"`
	// Mean of the packets that left, weighted by their bytes; 0: none left.
	Queueing []float64 `json:"queueing_ms"`
}

// Flow is one application, or all of them where there are many.
type Flow struct {
	// The application's name.
	Name string `json:"name"`
	// Payload while it was there: a download of a size, until it ended.
	Throughput float64 `json:"throughput_mbit"`
	// The same in each second of the run.
	PerSecond []float64 `json:"throughput_mbit_per_second"`
	// Of its own packets, where that is known.
	Queueing *Percentiles `json:"queueing_ms,omitempty"`
	// Of requests that began after the warm-up and ended.
	Took []float64 `json:"request_seconds,omitempty"`
	// How a video played.
	Video *Video `json:"video,omitempty"`
	// How long each cause of GET /flows held it back; over real sockets, under a window of ours.
	Limited map[string]float64 `json:"limited_seconds,omitempty"`
	// Packets that it sent; this and the next three in virtual time alone.
	Sent int `json:"packets,omitempty"`
	// Packets that found the queue full.
	Drops int `json:"queue_drops,omitempty"`
	// Packets that were sent again.
	Resent int `json:"retransmits,omitempty"`
	// Retransmission timeouts.
	Timeouts int `json:"timeouts,omitempty"`
	// What was wrong with it.
	Error string `json:"error,omitempty"`
}

// Video is how a video played.
type Video struct {
	// Until it began; 0: it has not.
	StartUp float64 `json:"startup_seconds" expr:"startup"`
	// How often it stood.
	Rebuffers float64 `json:"rebuffers" expr:"rebuffers"`
	// How long it stood in all.
	Rebuffer float64 `json:"rebuffer_seconds" expr:"rebuffer"`
	// How much of it was played.
	Played float64 `json:"played_seconds" expr:"played"`
}

// VideoOf converts a playback to seconds.
func VideoOf(p sim.Playback) Video {
	return Video{p.StartUp.Seconds(), float64(p.Rebuffers), p.Rebuffer.Seconds(), p.Played.Seconds()}
}

// Finding is one assertion and how it came out.
type Finding struct {
	// What is asserted, such as "satisfaction of the flow that asks for 6 Mbit/s".
	What string `json:"what"`
	// What the paper reports of it, as printed there; absent: nothing.
	Paper string `json:"paper,omitempty"`
	// The bound that we assert.
	Bound string `json:"bound"`
	// What we measured.
	Got string `json:"got"`
	// The bound holds.
	OK bool `json:"ok"`
	// Why it is known not to hold.
	Why string `json:"why,omitempty"`
}

// Percentiles summarise one kind of delay, in milliseconds.
type Percentiles struct {
	Mean float64 `json:"mean" expr:"mean"`
	P50  float64 `json:"p50" expr:"p50"`
	P95  float64 `json:"p95" expr:"p95"`
	P99  float64 `json:"p99" expr:"p99"`
	Max  float64 `json:"max" expr:"max"`
}

// PercentilesOf converts delays to milliseconds.
func PercentilesOf(q sim.Delays) Percentiles {
	return Percentiles{Millis(q.Mean), Millis(q.P50), Millis(q.P95), Millis(q.P99), Millis(q.Max)}
}

// System is the machine a run was made on.
type System struct {
	// The kernel's release.
	Kernel string `json:"kernel"`
	// The architecture by Go's name.
	Arch string `json:"arch"`
	// Processors.
	CPUs int `json:"cpus"`
	// Mean number of tasks that ran or waited in the last minute of the run, those of the run among them.
	Load float64 `json:"load,omitempty"`
}

func readSystem() System {
	s := System{Arch: runtime.GOARCH, CPUs: runtime.NumCPU()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		s.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(text), &s.Load) // 0 where the kernel does not say
	}
	return s
}

func (s System) String() string {
	return fmt.Sprintf("Linux %s on %d × %s", s.Kernel, s.CPUs, s.Arch)
}

// mostFlows is how many a record tells apart.
const mostFlows = 100

// Of is the record of what came of a stage; who played it for what is left open.
func Of(s stage.Stage, rec stage.Record) Run {
	r := Run{
		Name: s.Name, Seed: s.Seed, Attempt: max(1, rec.Attempt), Virtual: rec.Virtual != nil,
		Native: s.Native, Over: s.Over,
		Algorithm: s.Algorithm, Envelope: rec.Envelope, Tunnel: string(s.Tunnel), Hints: Millis(s.Hints),
		Setup: digestStage(s), Duration: s.Duration.Seconds(), Warmup: s.Warmup.Seconds(),
		StartedAt:     time.Now().UTC().Truncate(time.Second),
		System:        readSystem(),
		Retransmitted: rec.Resent, Missing: rec.Missing, Window: rec.Window,
		Discarded: rec.Discarded, Points: rec.Points, Memory: rec.Memory,
	}
	r.describePath(s)
	if r.Envelope == "" && s.Edge != "" && !s.Native {
		r.Envelope = s.Envelope
	}
	if s.Edge == "" {
		r.Kernel = cmp.Or(s.Kernel, "cubic")
	}
	if r.Virtual {
		r.Transport = rec.Transport.String()
	}
	over := s.Duration - s.Warmup
	down, up := rec.Path.Down, rec.Path.Up
	if s.UploadsAlone() {
		down, up = up, down
	}
	r.Throughput, r.Utilisation = down.Throughput.Mbps(), down.Utilisation
	r.Offered = cc.RateOf(down.Offered, over).Mbps()
	r.Queueing = PercentilesOf(down.DataQueueing.Delays)
	r.OneWay = PercentilesOf(down.DataOneWay.Delays)
	r.UpQueueing = PercentilesOf(up.Queueing.Delays)
	r.Packets, r.QueueDrops, r.RandomLosses = down.Sent, down.Drops.Queue, down.Drops.Loss
	r.Series = seriesOf(rec.Points, time.Second)
	if down.DataQueueing.Count > 0 {
		for _, d := range down.DataQueueing.Centiles {
			r.Centiles = append(r.Centiles, roundToThousandth(Millis(d)))
		}
	}
	if !r.Virtual {
		late := down.Lateness
		if up.Lateness.P99 > late.P99 {
			late = up.Lateness
		}
		r.Lateness, r.Noisy = PercentilesOf(late.Delays), rec.Disturbed()
	}
	if rec.CPU > 0 && !s.Native { // the fields are of the proxy
		r.CPUShare = new(rec.CPU.Seconds() / s.Duration.Seconds())
		moved := cc.Bytes(0) // in the whole run, as the time is
		for _, p := range rec.Points {
			moved += p.Throughput.BytesIn(stage.Step)
		}
		if gb := float64(moved) / 1e9; gb > 0 {
			r.CPUPerGB = new(rec.CPU.Seconds() / gb)
		}
	}
	r.addFlows(s, rec)
	return r
}

// digestStage returns a digest of all that a stage says, with the contents of its traces.
func digestStage(s stage.Stage) string {
	digest := fnv.New64a()
	err := json.NewEncoder(digest).Encode(s) // of traces the names
	fmt.Fprint(digest, err, s.Down.Trace, s.Down.Delays, s.Up.Trace, s.Up.Delays)
	return strconv.FormatUint(digest.Sum64(), 16)
}

// courseStep is how finely Course shows a run that was made now, and so has points.
const courseStep = 500 * time.Millisecond

// Course is what came of each step of the run, finer than Series where the run was made now; nil: it is not known.
func (r Run) Course() *Series {
	if len(r.Points) > 0 {
		return seriesOf(r.Points, courseStep)
	}
	return r.Series
}

// seriesOf joins points of stage.Step into steps; nil: there are none.
func seriesOf(points []netlab.Point, step time.Duration) *Series {
	s := Series{Step: step.Seconds()}
	for _, p := range Merge(points, int(step/stage.Step)) {
		s.Throughput = append(s.Throughput, roundToThousandth(p.Throughput.Mbps()))
		s.Offered = append(s.Offered, roundToThousandth(p.Offered.Mbps()))
		s.Queueing = append(s.Queueing, roundToThousandth(Millis(p.Queueing)))
	}
	if len(s.Throughput) == 0 {
		return nil
	}
	return &s
}

func (r *Run) addFlows(s stage.Stage, rec stage.Record) {
	for i, a := range rec.Actors {
		f := Flow{
			Name: a.Name, Throughput: roundToThousandth(rec.RateOf(s, i).Mbps()), Limited: a.Limited,
			Error: a.Corrupt + a.Error,
		}
		if v := a.Video; v != nil {
			f.Video = new(VideoOf(*v))
		}
		for t := time.Duration(0); t+time.Second <= s.Duration; t += time.Second {
			f.PerSecond = append(f.PerSecond, roundToThousandth(a.Rate(t, t+time.Second).Mbps()))
		}
		for _, q := range a.Requests {
			if q.Took > 0 && q.At >= s.Warmup {
				f.Took = append(f.Took, roundToThousandth(q.Took.Seconds()))
			}
		}
		if a.Queueing != (sim.Delays{}) {
			f.Queueing = new(PercentilesOf(a.Queueing))
		}
		if v := rec.Virtual; v != nil {
			if s.Actors[i].Kind != stage.Web { // which has a flow for each request
				f.Queueing = new(PercentilesOf(v.Flows[i].Queueing))
			}
			for _, n := range a.Flows {
				one := v.Flows[n]
				f.Sent, f.Drops = f.Sent+one.Packets, f.Drops+one.Drops
				f.Resent, f.Timeouts = f.Resent+one.Retransmits, f.Timeouts+one.Timeouts
				r.Payload += one.Throughput.Mbps() * float64(one.To-one.From) / float64(s.Duration-s.Warmup)
			}
		} else {
			r.Payload += a.Rate(s.Warmup, s.Duration).Mbps()
		}
		r.Flows = append(r.Flows, f)
	}
	r.Payload = roundToThousandth(r.Payload)
	if rates := rec.Rates(s); len(rates) > 1 {
		r.Jain = roundToThousandth(sim.Jain(rates...))
	}
	if len(r.Flows) > mostFlows {
		r.Flows = []Flow{joinFlows(r.Flows)}
	}
}

// joinFlows returns one flow in place of many.
func joinFlows(flows []Flow) Flow {
	all := Flow{Name: fmt.Sprintf("all %d", len(flows)), PerSecond: make([]float64, len(flows[0].PerSecond))}
	for _, f := range flows {
		all.Throughput = roundToThousandth(all.Throughput + f.Throughput)
		for k, v := range f.PerSecond {
			all.PerSecond[k] = roundToThousandth(all.PerSecond[k] + v)
		}
		all.Took = append(all.Took, f.Took...)
		all.Sent, all.Drops = all.Sent+f.Sent, all.Drops+f.Drops
		all.Resent, all.Timeouts = all.Resent+f.Resent, all.Timeouts+f.Timeouts
		all.Error = cmp.Or(all.Error, f.Error)
	}
	return all
}

// DropShare is the share of packets that the link lost on the way to the
// hosts, random losses included.
func (r Run) DropShare() float64 {
	if r.Packets == 0 {
		return 0
	}
	return float64(r.QueueDrops+r.RandomLosses) / float64(r.Packets)
}

// Same reports whether the other is the same run of the same build: one needs not be made again.
func (r Run) Same(o Run) bool {
	return r.Experiment == o.Experiment && r.Scale == o.Scale && r.Name == o.Name && r.Virtual == o.Virtual &&
		r.Seed == o.Seed && r.Version == o.Version && r.Setup == o.Setup
}

// Supersedes reports whether the other is of the same experiment, played in the same way by another build.
func (r Run) Supersedes(o Run) bool {
	return r.Experiment == o.Experiment && r.Scale == o.Scale && r.Virtual == o.Virtual && r.Version != o.Version
}

// Merge joins n neighbouring steps into one; a rest at the end is left out.
func Merge(points []netlab.Point, n int) []netlab.Point {
	var merged []netlab.Point
	for ; len(points) >= n; points = points[n:] {
		m := netlab.Point{At: points[0].At}
		var weighted float64 // a busy step says more about the delay
		for _, p := range points[:n] {
			m.Throughput += p.Throughput / cc.Rate(n)
			m.Offered += p.Offered / cc.Rate(n)
			weighted += float64(p.Queueing) * float64(p.Throughput)
		}
		if m.Throughput > 0 {
			m.Queueing = time.Duration(weighted / float64(m.Throughput) / float64(n))
		}
		merged = append(merged, m)
	}
	return merged
}

// roundToThousandth leaves out digits that no measurement has.
func roundToThousandth(v float64) float64 { return math.Round(v*1e3) / 1e3 }

// Millis rounds to the microsecond: what is beyond it is noise.
func Millis(d time.Duration) float64 { return float64(d.Round(time.Microsecond)) / 1e6 }

// Write writes one run as one line.
func Write(w io.Writer, r Run) error {
	if err := json.NewEncoder(w).Encode(r); err != nil {
		return fmt.Errorf("record: write run: %w", err)
	}
	return nil
}

// Read reads what Write wrote, one run a line; an error names file and line.
func Read(name string, r io.Reader) (runs []Run, err error) {
	lines := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			var run Run
			err := json.Unmarshal(line, &run)
			if err != nil && line[len(line)-1] != '\n' {
				err = fmt.Errorf("it is cut off: take the line out, or go on with --resume (%w)", err)
			}
			if err == nil && run.Experiment == "" {
				err = errors.New("it is no record of a run; older builds wrote another form: make it again")
			}
			if s := run.Series; err == nil && s != nil &&
				(len(s.Offered) != len(s.Throughput) || len(s.Queueing) != len(s.Throughput)) {
				err = errors.New("the lists of its series are not of one length: make it again")
			}
			if err != nil {
				return runs, fmt.Errorf("%s: line %d: %w", name, n, err)
			}
			runs = append(runs, run)
		}
		if errors.Is(err, io.EOF) {
			return runs, nil
		}
		if err != nil {
			return runs, fmt.Errorf("%s: %w", name, err)
		}
	}
}

// Open reads a file of records; one that is not there has none.
func Open(name string) ([]Run, error) {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	runs, err := Read(name, f)
	return runs, errors.Join(err, f.Close())
}

// Find is the index of that run among others; -1: it is not there.
func (r Run) Find(runs []Run) int { return slices.IndexFunc(runs, r.Same) }

// Judged returns the runs with findings. Noisy says of each that the machine disturbed a run which its findings are
// about, or that one of them does not count: the findings say nothing then. They are about the runs of one experiment,
// form and command since the findings before; those of other experiments may stand between them.
func Judged(runs []Run) (judged []Run) {
	type play struct{ experiment, scale, command string }
	disturbed := map[play]bool{}
	for _, r := range runs {
		of := play{r.Experiment, r.Scale, r.Command}
		r.Noisy = r.Noisy || r.Discarded != "" || disturbed[of]
		disturbed[of] = r.Noisy && r.Findings == nil && r.Must == "" // no finding of it applied
		if len(r.Findings) > 0 {
			judged = append(judged, r)
		}
	}
	return judged
}
