package bench

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/netlab"
)

// Result is one run: what was asked for, what came of it, and how far to trust
// it. It is one line of the JSON output.
type Result struct {
	Sender    string `json:"sender"`
	Kernel    string `json:"kernel_algorithm,omitempty"` // of a direct sender
	Algorithm string `json:"algorithm,omitempty"`        // of Penstock
	// as the proxy reports it, else as asked for; "sim": in virtual time
	Envelope  string  `json:"envelope,omitempty"`
	Ingress   Ingress `json:"ingress,omitempty"`
	Transport string  `json:"transport,omitempty"` // in virtual time: as sim.Transport has them

	Link   string  `json:"link"`
	Up     string  `json:"up"` // "same": as link
	Buffer string  `json:"buffer"`
	Delay  float64 `json:"delay_ms"`         // each way
	Delays string  `json:"delays,omitempty"` // the trace of delays in its place; empty: none
	Loss   float64 `json:"loss"`             // probability, towards the client
	AQM    string  `json:"aqm,omitempty"`    // of the queue towards the client; empty: drop-tail
	// probability, towards the client, that a packet takes ReorderBy longer
	Reorder   float64 `json:"reorder,omitempty"`
	ReorderBy float64 `json:"reorder_by_ms,omitempty"`
	Hints     float64 `json:"hints_ms,omitempty"` // how often the link told the sender of itself
	Duration  float64 `json:"duration_seconds"`
	Seed      uint64  `json:"seed"`
	Run       int     `json:"run"`
	Attempt   int     `json:"attempt"` // 2: repeated, as the first was noisy

	StartedAt time.Time `json:"started_at"`
	Version   string    `json:"version"`
	System    System    `json:"system"`

	Throughput  float64 `json:"throughput_mbit"` // IP bytes that left the queue
	Offered     float64 `json:"offered_mbit"`    // what the link could have carried
	Utilisation float64 `json:"utilisation"`     // of what was offered

	// Of the data packets; from a packet's arrival at the queue until its last
	// byte has left, and until it reaches the client.
	Queueing Percentiles `json:"queueing_ms"`
	OneWay   Percentiles `json:"one_way_ms"`
	// Of the acknowledgements, in the other direction's queue.
	UpQueueing Percentiles `json:"up_queueing_ms"`

	Packets       int     `json:"packets"` // that arrived at the queue
	QueueDrops    int     `json:"queue_drops"`
	RandomLosses  int     `json:"random_losses"`
	Retransmitted float64 `json:"retransmitted"` // share of the bytes sent by the transport that sends into the link

	// The proxy's processor time without its start-up: for each GB of IP bytes,
	// and as a share of one core. At a few Mbit/s the tick that watches the
	// transport is most of it, so that only the second says what it costs.
	CPUPerGB *float64 `json:"proxy_cpu_seconds_per_gb,omitempty"` // absent without a proxy
	CPUShare *float64 `json:"proxy_cpu_share,omitempty"`
	Window   *Window  `json:"window,omitempty"`        // absent without a proxy, a window of its or samples
	Missing  []string `json:"proxy_missing,omitempty"` // what the proxy asked of the kernel and did not get

	Answer     *Answer     `json:"answer_ms,omitempty"`  // absent where the proxy does not say
	Departures *Departures `json:"departures,omitempty"` // absent unless packets were recorded

	// How late the emulator handed packets over: the error of the measurement.
	// Absent in virtual time.
	Lateness  Percentiles `json:"lateness_ms,omitzero"`
	Noisy     bool        `json:"noisy"`               // lateness above the plan's limit at p99
	Discarded string      `json:"discarded,omitempty"` // why the run does not count, in words

	Series *Series `json:"series,omitempty"`
	// The queueing delay that 0, 1, … 100 % of the data packets do not exceed.
	Centiles []float64 `json:"queueing_centiles_ms,omitempty"`

	series []netlab.Point // for plots
}

// Series is what came of each step of a run.
type Series struct {
	Step       float64   `json:"step_seconds"`
	Throughput []float64 `json:"throughput_mbit"` // IP bytes that left the queue
	Offered    []float64 `json:"offered_mbit"`    // what the link could have carried
	// mean of the packets that left, weighted by their bytes; 0: none left
	Queueing []float64 `json:"queueing_ms"`
}

// seriesStep is the length of a record's steps.
const seriesStep = time.Second

// record keeps the course of the run and the distribution of its delay.
func (r *Result) record(points []netlab.Point, queueing netlab.Quantiles) {
	r.series = points
	s := Series{Step: seriesStep.Seconds()}
	for _, p := range merge(points, int(seriesStep/netlab.DefaultStep)) {
		s.Throughput = append(s.Throughput, rounded(p.Throughput.Mbps()))
		s.Offered = append(s.Offered, rounded(p.Offered.Mbps()))
		s.Queueing = append(s.Queueing, rounded(millis(p.Queueing)))
	}
	if len(s.Throughput) > 0 {
		r.Series = &s
	}
	if queueing.Count > 0 {
		for _, d := range queueing.Centiles {
			r.Centiles = append(r.Centiles, rounded(millis(d)))
		}
	}
}

// rounded leaves out digits that say nothing.
func rounded(v float64) float64 { return math.Round(v*1e3) / 1e3 }

// Percentiles summarise one kind of delay, in milliseconds.
type Percentiles struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

func percentiles(q netlab.Quantiles) Percentiles {
	return Percentiles{
		Mean: millis(q.Mean), P50: millis(q.P50), P95: millis(q.P95), P99: millis(q.P99),
		Max: millis(q.Max),
	}
}

// Path says in words what the run's packets went through, and how long it took. Runs
// of one path can be compared.
func (r Result) Path() string { return r.path(true) }

// Virtual tells whether the run was in virtual time.
func (r Result) Virtual() bool { return r.Envelope == EnvelopeSim }

// path says in words what the run's packets went through. Runs with the same
// path stand in one table, where random loss may differ.
func (r Result) path(withLoss bool) string {
	var b strings.Builder
	b.WriteString(r.Link)
	if r.Up == upSame {
		b.WriteString(" both ways")
	} else {
		b.WriteString(" down, " + r.Up + " up")
	}
	if r.Delays != "" {
		b.WriteString(", delays of " + r.Delays + " each way")
	} else {
		fmt.Fprintf(&b, ", %s ms each way", figures.Number(r.Delay))
	}
	if r.Buffer == bufferNone {
		b.WriteString(", no buffer limit")
	} else {
		b.WriteString(", buffer " + r.Buffer)
	}
	if r.AQM != "" {
		b.WriteString(", " + r.AQM)
	}
	if withLoss && r.Loss > 0 {
		fmt.Fprintf(&b, ", %s %% random loss", figures.Number(r.Loss*100))
	}
	if r.Reorder > 0 {
		fmt.Fprintf(&b, ", %s %% reordered by %s ms", figures.Number(r.Reorder*100), figures.Number(r.ReorderBy))
	}
	fmt.Fprintf(&b, ", %s s", figures.Number(r.Duration))
	return b.String()
}

// upSame is a Result's Up when the link carries the same in both directions.
const upSame = "same"

// millis rounds to the microsecond: what is beyond it is noise.
func millis(d time.Duration) float64 { return float64(d.Round(time.Microsecond)) / 1e6 }

// WriteJSON writes one result as one line.
func WriteJSON(w io.Writer, r Result) error {
	if err := json.NewEncoder(w).Encode(r); err != nil {
		return fmt.Errorf("bench: write result: %w", err)
	}
	return nil
}

// ReadJSON reads what WriteJSON wrote, one result a line.
func ReadJSON(r io.Reader) ([]Result, error) {
	var results []Result
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		var res Result
		if err := json.Unmarshal(lines.Bytes(), &res); err != nil {
			return results, fmt.Errorf("bench: line %d: %w", n, err)
		}
		results = append(results, res)
	}
	return results, lines.Err()
}
