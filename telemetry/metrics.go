// Package telemetry shows what the proxy does: Prometheus metrics, a list of
// flows and health over HTTP, and traces of what the algorithms see. It pulls
// snapshots when asked and changes nothing; no address is ever a label.
package telemetry

import (
	runtimemetrics "runtime/metrics"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/telemetry/page"
)

// Source is what a proxy.Server tells of itself.
type Source interface {
	page.Source
	// Snapshot returns the totals, and has visit see each flow that is counted in them first.
	Snapshot(visit func(*proxy.FlowInfo)) proxy.Counters
}

// Facts do not change while the process lives.
type Facts struct {
	Version, Revision, GoVersion string
	Start                        float64 // Unix time in seconds
	Tier, Envelope               string  // of the datapath
	Missing                      []string
}

// Options are what a collector shows besides the source.
type Options struct {
	Facts Facts
	Clock func() cc.Time
	Wall  func() time.Time // what the date is
	Load  func() Load      // of the datapath; nil: not shown
	// Config returns how it stands with the configuration; nil: not shown.
	Config func() Config
	// Hints returns how many hints were posted, by what became of them; nil: not shown.
	Hints func() map[HintOutcome]uint64
	// Changes returns how many changes of algorithms were asked for, by what became of them; nil: not shown.
	Changes func() map[ChangeOutcome]uint64
	// Ports are those of telemetry, by name.
	Ports map[string]*BoundedListener
	// HintSources returns the interfaces that tell hints; nil: not shown.
	HintSources func() []HintSource
	// Agents returns the congestion control agents; nil: not shown.
	Agents func() []agent.Info
	// Dropped returns the trace events lost so far; nil: not shown.
	Dropped func() uint64
}

// Load is how busy the datapath is.
type Load struct {
	Busy     int       // legs with bytes unsent or unacknowledged
	Interval float64   // seconds between two polls of one whose window the relay keeps
	Enforced *Enforced // nil: the kernel enforces no windows
}

// Enforced is how it goes with the windows that the kernel enforces.
type Enforced struct {
	Legs, Limit  int
	Full, Failed uint64 // legs whose windows it was to enforce and does not, for lack of room or for another reason
	Fallbacks    uint64 // times a socket ran Reno, since the process did not answer it
	Answers      datapath.Histogram
}

// Metrics of the proxy, but for those of tunnels and agents, and the sampled ones.
var (
	buildInfo  = newGauge("build_info", "The running program; always 1.", "version", "revision", "goversion")
	startTime  = newGauge("start_time_seconds", "When the process started, in Unix time.")
	configInfo = newGauge("config_info",
		"SHA-256 of the configuration in use, empty for the built-in one; always 1.", "hash")
	reloads = newCounter("config_reloads_total",
		"Times the configuration was reread, by whether it was put into force.", "result")
	reloadOK = newGauge("config_last_reload_successful",
		"1 unless the last attempt to reread the configuration failed; the one before is in force then.")
	reloadTime = newGauge("config_last_reload_success_timestamp_seconds",
		"When the configuration in force was put there, in Unix time.")
	configChanged = newGauge("config_changed_rules",
		"Rules, and the defaults, whose algorithms have been changed since the configuration was reread.")
	changesTotal = newCounter("algorithm_changes_total",
		"Changes of a rule's algorithm that were asked for while running, by what became of them.", "result")
	datapathInfo = newGauge("datapath_info",
		"The datapath's tier and the kernel's congestion control under our window; always 1.", "tier", "envelope")
	missing = newGauge("datapath_missing",
		"What was asked for or is useful and cannot be had, in words; always 1.", "reason")
	busyLegs     = newGauge("datapath_busy_legs", "Legs with bytes unsent or unacknowledged.")
	pollInterval = newGauge("datapath_poll_interval_seconds",
		"Time between two polls of a busy leg whose window the relay keeps, at most.")
	answers = newHistogram("datapath_answer_seconds",
		"From an acknowledgement until the kernel had the window computed from it.")
	enforced      = newGauge("datapath_enforced_legs", "Legs whose window the kernel enforces.")
	enforcedLimit = newGauge("datapath_enforced_legs_limit", "Legs whose window the kernel can enforce at once.")
	unenforced    = newCounter("datapath_unenforced_legs_total",
		"Legs whose window the kernel was to enforce and does not, by why.", "reason")
	fallbacks = newCounter("datapath_fallbacks_total",
		"Times a leg fell back to Reno in the kernel, since the process did not answer it.")
	traceDropped = newCounter("trace_dropped_total", "Trace events lost because the disk was slow or full.")

	draining    = newGauge("draining", "1 while no new connections are accepted and open ones may end.")
	hostsActive = newGauge("hosts_active", "Client hosts with connections.")
	limit       = newGauge("connections_limit", "Connections accepted at most, by configuration and by descriptors.")
	conns       = newGauge("connections_active",
		"Connections in whatever state, those not yet relayed included.", "listener")
	accepted   = newCounter("connections_accepted_total", "Connections accepted.", "listener")
	rejections = newCounter("flow_rejections_total",
		"Connections that were accepted and never relayed, by why.", "listener", "reason")
	setup = newHistogram("flow_setup_seconds", "From accepting a connection to relaying it.", "listener")
	dial  = newHistogram("flow_dial_seconds", "Resolving and reaching the server, where it worked.", "listener")

	flowsActive = newGauge("flows_active", "Connections being relayed.", "listener", "rule")
	flowsTotal  = newCounter("flows_total", "Connections relayed since the start.", "listener", "rule")
	closes      = newCounter("flow_closes_total",
		"Relayed connections that ended, by why and by whom.", "listener", "rule", "reason", "by")
	duration   = newHistogram("flow_duration_seconds", "How long relayed connections lived.", "listener", "rule")
	bytesTotal = newCounter("bytes_total",
		"Bytes read from the leg they come from and written to the leg they go "+
			"to.", "listener", "rule", "direction", "leg")
	spliced = newCounter("splice_bytes_total",
		"Of the bytes written, those moved inside the kernel.", "listener", "rule", "direction")
	buffered = newGauge("buffered_bytes", "Bytes read from one leg and not yet written to the other.", "direction")

	retransmitted = newCounter("tcp_retransmitted_bytes_total", "Bytes that TCP sent again.", "listener", "rule", "leg")
	signalErrors  = newCounter("tcp_signal_errors_total", "Failed reads of a leg's state.", "listener", "rule", "leg")
	tcpCwnd       = newGauge("tcp_cwnd_bytes", "TCP's own congestion windows, summed over legs.", "leg")
	tcpUnsent     = newGauge("tcp_unsent_bytes",
		"Bytes in TCP's send queues and not on the wire, summed over legs.", "leg")

	ccFlows  = newGauge("cc_flows", "Directions whose congestion control is ours.", "algorithm", "direction")
	ccWindow = newGauge("cc_window_bytes",
		"Windows of our congestion control, summed over groups; those without a bound "+
			"are left out.", "algorithm", "direction")
	ccInflight = newGauge("cc_inflight_bytes",
		"Bytes in flight under our congestion control.", "algorithm", "direction")
	ccPacing = newGauge("cc_pacing_rate_bytes_per_second",
		"Pacing rates of our congestion control, summed over groups; those without one "+
			"are left out.", "algorithm", "direction")
	groupsOpen = newGauge("groups",
		"Groups of flows that share a window: with members (used), or kept for the next "+
			"one (lingering).", "algorithm", "state")
	groupMembers = newGauge("group_members",
		"Flows in groups: active ones have something in flight or to send.", "algorithm", "state")
	groupBorrowed = newGauge("group_borrowed_bytes",
		"Bytes in flight beyond members' shares by weight, of what others leave, summed "+
			"over groups.", "algorithm")
	groupsHinted = newGauge("groups_hinted", "Groups that have a hint not older than a second.", "algorithm")
	groupUnused  = newGauge("group_unused_bytes",
		"Parts of windows that no member wants, summed over groups; those of windows "+
			"without a bound are left out.", "algorithm")
	groupsCapped = newGauge("groups_capped",
		"Groups whose window or rate hint_cap keeps below what the algorithm asks for.", "algorithm")
	groupsDoubting = newGauge("groups_doubting_hints",
		"Groups whose hints say more (high) or less (low) than is delivered.", "algorithm", "doubt")
	hintsTotal = newCounter("hints_total",
		"Hints posted, by what became of them; a request that is refused before it is read counts as one.", "result")
	portRefusals = newCounter("telemetry_rejections_total",
		"Connections to a port of telemetry that were closed at once, by the bound that they met.", "listener", "reason")
	hintReadings = newCounter("hint_source_readings_total", "Times an interface was read for hints.", "interface")
	hintErrors   = newCounter("hint_source_errors_total",
		"Times an interface could not be read for hints; it is tried again each second.", "interface")
	hintSourceUp = newGauge("hint_source_up", "1 while the last reading of an interface for hints worked.", "interface")

	ccLosses = newCounter("cc_loss_events_total",
		"Times our congestion control was told of loss.", "listener", "rule", "algorithm", "direction")
	ccLimited = newCounter("cc_limited_seconds_total",
		"Time that directions under our congestion control were held back, by "+
			"what.", "listener", "rule", "algorithm", "direction", "by")
)

// collector implements prometheus.Collector: each scrape takes the proxy's snapshots anew.
type collector struct {
	src    Source
	o      Options
	sample *sampler
}

// NewRegistry returns a registry of all metrics of src, of the process and of Go's runtime.
func NewRegistry(src Source, o Options) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		&collector{src: src, o: o, sample: newSampler()},
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewGoCollector(),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "go_gc_cycles_total", Help: "Collections of garbage.",
		}, countGCCycles),
	)
	return r
}

// countGCCycles returns the garbage collections since the start.
func countGCCycles() float64 {
	value := []runtimemetrics.Sample{{Name: "/gc/cycles/total:gc-cycles"}}
	runtimemetrics.Read(value)
	return float64(value[0].Value.Uint64())
}

// Describe implements prometheus.Collector.
func (e *collector) Describe(out chan<- *prometheus.Desc) {
	for _, f := range families {
		out <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (e *collector) Collect(samples chan<- prometheus.Metric) {
	out := sink(samples)
	live, loads, sample := newLive(), peerLoads{}, e.sample.beginSample(e.o.Clock())
	counters := e.src.Snapshot(func(f *proxy.FlowInfo) {
		live.countFlow(f)
		loads.addFlow(f)
		sample.addFlow(f)
	})
	sample.endSample()
	loads.addCounters(counters.Peers)
	e.writeFacts(out)
	out.putSample(draining, oneIf(counters.Draining))
	out.putSample(hostsActive, float64(counters.Sources))
	out.putSample(limit, float64(counters.Limit))
	rejected := map[rejection]uint64{}
	for _, l := range counters.Listeners {
		out.writeListener(l)
		for reason, n := range l.Rejected {
			rejected[rejection{l.Listener, reason}] += n
		}
	}
	for _, r := range counters.Routes {
		out.writeRoute(r)
	}
	for _, t := range e.src.Tunnels() {
		out.writeTunnel(t, e.o.Wall())
		out.writePeers(t, loads)
		if t.Unauthorized > 0 {
			rejected[rejection{t.Listener, proxy.RejectedAuth}] += t.Unauthorized
		}
	}
	for r, n := range rejected {
		out.putSample(rejections, float64(n), r.listener, string(r.reason))
	}
	live.writeMetrics(out)
	sumGroups(e.src.Groups()).writeMetrics(out)
	e.sample.writeMetrics(out)
}

// rejection is a listener and why it rejected connections. Some are counted by the proxy and some by a tunnel, which
// sees requests before there are connections; a series must have one sample.
type rejection struct {
	listener string
	reason   proxy.Reason
}

func (e *collector) writeFacts(out sink) {
	f := e.o.Facts
	out.putSample(buildInfo, 1, f.Version, f.Revision, f.GoVersion)
	out.putSample(startTime, f.Start)
	if e.o.Config != nil {
		out.writeConfig(e.o.Config())
	}
	out.putSample(datapathInfo, 1, f.Tier, f.Envelope)
	for _, words := range slices.Compact(slices.Sorted(slices.Values(f.Missing))) {
		out.putSample(missing, 1, words)
	}
	if e.o.Load != nil {
		out.writeLoad(e.o.Load())
	}
	if e.o.HintSources != nil {
		for _, source := range e.o.HintSources() {
			out.hintSource(source)
		}
	}
	if e.o.Agents != nil {
		for _, a := range e.o.Agents() {
			out.writeAgent(a)
		}
	}
	if e.o.Hints != nil {
		for outcome, n := range e.o.Hints() {
			out.putSample(hintsTotal, float64(n), string(outcome))
		}
	}
	if e.o.Changes != nil {
		for outcome, n := range e.o.Changes() {
			out.putSample(changesTotal, float64(n), string(outcome))
		}
	}
	for name, port := range e.o.Ports {
		for reason, n := range port.Refused() {
			out.putSample(portRefusals, float64(n), name, string(reason))
		}
	}
	if e.o.Dropped != nil {
		out.putSample(traceDropped, float64(e.o.Dropped()))
	}
}

func (s sink) writeConfig(c Config) {
	s.putSample(configInfo, 1, c.Hash)
	s.putSample(reloads, float64(c.Succeeded), "success")
	s.putSample(reloads, float64(c.Failed), "failure")
	s.putSample(reloadOK, oneIf(c.OK))
	s.putSample(reloadTime, c.Since)
	s.putSample(configChanged, float64(len(c.Changed)))
}

func (s sink) writeLoad(l Load) {
	s.putSample(busyLegs, float64(l.Busy))
	s.putSample(pollInterval, l.Interval)
	if e := l.Enforced; e != nil {
		s.putSample(enforced, float64(e.Legs))
		s.putSample(enforcedLimit, float64(e.Limit))
		s.putSample(unenforced, float64(e.Full), "full")
		s.putSample(unenforced, float64(e.Failed), "failed")
		s.putSample(fallbacks, float64(e.Fallbacks))
		s.putHistogram(answers, e.Answers)
	}
}

func (s sink) writeListener(l proxy.ListenerCounters) {
	s.putSample(conns, float64(l.Active), l.Listener)
	s.putSample(accepted, float64(l.Accepted), l.Listener)
	s.putHistogram(setup, l.Setup, l.Listener)
	s.putHistogram(dial, l.Dial, l.Listener)
}

func (s sink) writeRoute(r proxy.RouteCounters) {
	s.putSample(flowsActive, float64(r.Active), r.Listener, r.Rule)
	s.putSample(flowsTotal, float64(r.Opened), r.Listener, r.Rule)
	for cause, n := range r.Closed {
		s.putSample(closes, float64(n), r.Listener, r.Rule, string(cause.How), string(cause.Who))
	}
	s.putHistogram(duration, r.Duration, r.Listener, r.Rule)
	s.writeDirection(r, r.Down, "down", "server", "client")
	s.writeDirection(r, r.Up, "up", "client", "server")
}

func (s sink) writeDirection(r proxy.RouteCounters, d proxy.DirectionCounters, name, from, to string) {
	s.putSample(bytesTotal, float64(d.Read), r.Listener, r.Rule, name, from)
	s.putSample(bytesTotal, float64(d.Written), r.Listener, r.Rule, name, to)
	s.putSample(spliced, float64(d.Spliced), r.Listener, r.Rule, name)
	s.putSample(retransmitted, float64(d.Retransmitted), r.Listener, r.Rule, to)
	s.putSample(signalErrors, float64(d.SignalErrors), r.Listener, r.Rule, to)
	for algorithm, c := range d.Control {
		s.putSample(ccLosses, float64(c.LossEvents), r.Listener, r.Rule, algorithm, name)
		for by, t := range c.Limited {
			if t > 0 {
				s.putSample(ccLimited, t.Seconds(), r.Listener, r.Rule, algorithm, name, flow.LimitedBy(by).String())
			}
		}
	}
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
