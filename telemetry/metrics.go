// Package telemetry shows what the proxy does: Prometheus metrics, a list of
// flows and health over HTTP, and traces of what the algorithms see. It pulls
// snapshots when asked and changes nothing; no address is ever a label.
package telemetry

import (
	"time"

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

// Metrics that had another name before.
var (
	enforced = formerly("datapath_held_legs",
		gauge("datapath_enforced_legs", "Legs whose window the kernel enforces."))
	enforcedLimit = formerly("datapath_held_legs_limit",
		gauge("datapath_enforced_legs_limit", "Legs whose window the kernel can enforce at once."))
	unenforced = formerly("datapath_unheld_legs_total",
		counter("datapath_unenforced_legs_total",
			"Legs whose window the kernel was to enforce and does not, by why.", "reason"))
	fallbacks = formerly("datapath_falls_total",
		counter("datapath_fallbacks_total",
			"Times a leg fell back to Reno in the kernel, since the process did not answer it."))
	groupBorrowed = formerly("group_lent_bytes",
		gauge("group_borrowed_bytes",
			"Bytes in flight beyond members' shares by weight, of what others leave, summed "+
				"over groups.", "algorithm"))
	groupsHinted = formerly("groups_informed",
		gauge("groups_hinted", "Groups that have a hint not older than a second.", "algorithm"))
)

// All others of the proxy, but for those of tunnels and agents, and the sampled ones.
var (
	buildInfo  = gauge("build_info", "The running program; always 1.", "version", "revision", "goversion")
	startTime  = gauge("start_time_seconds", "When the process started, in Unix time.")
	configInfo = gauge("config_info",
		"SHA-256 of the configuration in use, empty for the built-in one; always 1.", "hash")
	reloads = counter("config_reloads_total",
		"Times the configuration was reread, by whether it was put into force.", "result")
	reloadOK = gauge("config_last_reload_successful",
		"1 unless the last attempt to reread the configuration failed; the one before is in force then.")
	reloadTime = gauge("config_last_reload_success_timestamp_seconds",
		"When the configuration in force was put there, in Unix time.")
	configChanged = gauge("config_changed_rules",
		"Rules, and the defaults, whose algorithms have been changed since the configuration was reread.")
	changesTotal = counter("algorithm_changes_total",
		"Changes of a rule's algorithm that were asked for while running, by what became of them.", "result")
	datapathInfo = gauge("datapath_info",
		"The datapath's tier and the kernel's congestion control under our window; always 1.", "tier", "envelope")
	missing = gauge("datapath_missing",
		"What was asked for or is useful and cannot be had, in words; always 1.", "reason")
	busyLegs     = gauge("datapath_busy_legs", "Legs with bytes unsent or unacknowledged.")
	pollInterval = gauge("datapath_poll_interval_seconds",
		"Time between two polls of a busy leg whose window the relay keeps, at most.")
	answers = histogram("datapath_answer_seconds",
		"From an acknowledgement until the kernel had the window computed from it.")
	traceDropped = counter("trace_dropped_total", "Trace events lost because the disk was slow or full.")

	draining    = gauge("draining", "1 while no new connections are accepted and open ones may end.")
	hostsActive = gauge("hosts_active", "Client hosts with connections.")
	limit       = gauge("connections_limit", "Connections accepted at most, by configuration and by descriptors.")
	conns       = gauge("connections_active",
		"Connections in whatever state, those not yet relayed included.", "listener")
	accepted   = counter("connections_accepted_total", "Connections accepted.", "listener")
	rejections = counter("flow_rejections_total",
		"Connections that were accepted and never relayed, by why.", "listener", "reason")
	setup = histogram("flow_setup_seconds", "From accepting a connection to relaying it.", "listener")
	dial  = histogram("flow_dial_seconds", "Resolving and reaching the server, where it worked.", "listener")

	flowsActive = gauge("flows_active", "Connections being relayed.", "listener", "rule")
	flowsTotal  = counter("flows_total", "Connections relayed since the start.", "listener", "rule")
	closes      = counter("flow_closes_total",
		"Relayed connections that ended, by why and by whom.", "listener", "rule", "reason", "by")
	duration   = histogram("flow_duration_seconds", "How long relayed connections lived.", "listener", "rule")
	bytesTotal = counter("bytes_total",
		"Bytes read from the leg they come from and written to the leg they go "+
			"to.", "listener", "rule", "direction", "leg")
	spliced = counter("splice_bytes_total",
		"Of the bytes written, those moved inside the kernel.", "listener", "rule", "direction")
	buffered = gauge("buffered_bytes", "Bytes read from one leg and not yet written to the other.", "direction")

	retransmitted = counter("tcp_retransmitted_bytes_total", "Bytes that TCP sent again.", "listener", "rule", "leg")
	signalErrors  = counter("tcp_signal_errors_total", "Failed reads of a leg's state.", "listener", "rule", "leg")
	tcpCwnd       = gauge("tcp_cwnd_bytes", "TCP's own congestion windows, summed over legs.", "leg")
	tcpUnsent     = gauge("tcp_unsent_bytes",
		"Bytes in TCP's send queues and not on the wire, summed over legs.", "leg")

	ccFlows  = gauge("cc_flows", "Directions whose congestion control is ours.", "algorithm", "direction")
	ccWindow = gauge("cc_window_bytes",
		"Windows of our congestion control, summed over groups; those without a bound "+
			"are left out.", "algorithm", "direction")
	ccInflight = gauge("cc_inflight_bytes",
		"Bytes in flight under our congestion control.", "algorithm", "direction")
	ccPacing = gauge("cc_pacing_rate_bytes_per_second",
		"Pacing rates of our congestion control, summed over groups; those without one "+
			"are left out.", "algorithm", "direction")
	groupsOpen = gauge("groups",
		"Groups of flows that share a window: with members (used), or kept for the next "+
			"one (lingering).", "algorithm", "state")
	groupMembers = gauge("group_members",
		"Flows in groups: active ones have something in flight or to send.", "algorithm", "state")
	groupUnused = gauge("group_unused_bytes",
		"Parts of windows that no member wants, summed over groups; those of windows "+
			"without a bound are left out.", "algorithm")
	groupsCapped = gauge("groups_capped",
		"Groups whose window or rate hint_cap keeps below what the algorithm asks for.", "algorithm")
	groupsDoubting = gauge("groups_doubting_hints",
		"Groups whose hints say more (high) or less (low) than is delivered.", "algorithm", "doubt")
	hintsTotal = counter("hints_total",
		"Hints posted, by what became of them; a request that is refused before it is read counts as one.", "result")
	portRefusals = counter("telemetry_rejections_total",
		"Connections to a port of telemetry that were closed at once, by the bound that they met.", "listener", "reason")
	hintReadings = counter("hint_source_readings_total", "Times an interface was read for hints.", "interface")
	hintErrors   = counter("hint_source_errors_total",
		"Times an interface could not be read for hints; it is tried again each second.", "interface")
	hintSourceUp = gauge("hint_source_up", "1 while the last reading of an interface for hints worked.", "interface")

	ccLosses = counter("cc_loss_events_total",
		"Times our congestion control was told of loss.", "listener", "rule", "algorithm", "direction")
	ccLimited = counter("cc_limited_seconds_total",
		"Time that directions under our congestion control were held back, by "+
			"what.", "listener", "rule", "algorithm", "direction", "by")
)

// Exporter turns snapshots into metrics.
type Exporter struct {
	src    Source
	o      Options
	sample *sampler
}

// NewExporter returns one for all metrics of src and of the process.
func NewExporter(src Source, o Options) *Exporter {
	return &Exporter{src: src, o: o, sample: newSampler()}
}

// Append appends all metrics in Prometheus's text format.
func (e *Exporter) Append(text []byte) []byte {
	live, loads, sample := newLive(), peerLoads{}, e.sample.begin(e.o.Clock())
	counters := e.src.Snapshot(func(f *proxy.FlowInfo) {
		live.flow(f)
		loads.flow(f)
		sample.flow(f)
	})
	sample.end()
	loads.count(counters.Peers)
	out := sink{}
	e.facts(out)
	out.put(draining, oneIf(counters.Draining))
	out.put(hostsActive, float64(counters.Sources))
	out.put(limit, float64(counters.Limit))
	for _, l := range counters.Listeners {
		out.listener(l)
	}
	for _, r := range counters.Routes {
		out.route(r)
	}
	for _, t := range e.src.Tunnels() {
		out.tunnel(t, e.o.Wall())
		out.peers(t, loads)
	}
	live.write(out)
	sumGroups(e.src.Groups()).write(out)
	e.sample.write(out)
	out.process(e.o.Facts)
	return out.append(text)
}

func (e *Exporter) facts(out sink) {
	f := e.o.Facts
	out.put(buildInfo, 1, f.Version, f.Revision, f.GoVersion)
	out.put(startTime, f.Start)
	if e.o.Config != nil {
		out.config(e.o.Config())
	}
	out.put(datapathInfo, 1, f.Tier, f.Envelope)
	for _, words := range f.Missing {
		out.put(missing, 1, words)
	}
	if e.o.Load != nil {
		out.load(e.o.Load())
	}
	if e.o.HintSources != nil {
		for _, source := range e.o.HintSources() {
			out.hintSource(source)
		}
	}
	if e.o.Agents != nil {
		for _, a := range e.o.Agents() {
			out.agent(a)
		}
	}
	if e.o.Hints != nil {
		for outcome, n := range e.o.Hints() {
			out.put(hintsTotal, float64(n), string(outcome))
		}
	}
	if e.o.Changes != nil {
		for outcome, n := range e.o.Changes() {
			out.put(changesTotal, float64(n), string(outcome))
		}
	}
	for name, port := range e.o.Ports {
		for reason, n := range port.Refused() {
			out.put(portRefusals, float64(n), name, string(reason))
		}
	}
	if e.o.Dropped != nil {
		out.put(traceDropped, float64(e.o.Dropped()))
	}
}

func (s sink) config(c Config) {
	s.put(configInfo, 1, c.Hash)
	s.put(reloads, float64(c.Succeeded), "success")
	s.put(reloads, float64(c.Failed), "failure")
	s.put(reloadOK, oneIf(c.OK))
	s.put(reloadTime, c.Since)
	s.put(configChanged, float64(len(c.Changed)))
}

func (s sink) load(l Load) {
	s.put(busyLegs, float64(l.Busy))
	s.put(pollInterval, l.Interval)
	if e := l.Enforced; e != nil {
		s.put(enforced, float64(e.Legs))
		s.put(enforcedLimit, float64(e.Limit))
		s.put(unenforced, float64(e.Full), "full")
		s.put(unenforced, float64(e.Failed), "failed")
		s.put(fallbacks, float64(e.Fallbacks))
		s.histogram(answers, e.Answers)
	}
}

func (s sink) listener(l proxy.ListenerCounters) {
	s.put(conns, float64(l.Active), l.Listener)
	s.put(accepted, float64(l.Accepted), l.Listener)
	for reason, n := range l.Rejected {
		s.put(rejections, float64(n), l.Listener, string(reason))
	}
	s.histogram(setup, l.Setup, l.Listener)
	s.histogram(dial, l.Dial, l.Listener)
}

func (s sink) route(r proxy.RouteCounters) {
	s.put(flowsActive, float64(r.Active), r.Listener, r.Rule)
	s.put(flowsTotal, float64(r.Opened), r.Listener, r.Rule)
	for cause, n := range r.Closed {
		s.put(closes, float64(n), r.Listener, r.Rule, string(cause.How), string(cause.Who))
	}
	s.histogram(duration, r.Duration, r.Listener, r.Rule)
	s.direction(r, r.Down, "down", "server", "client")
	s.direction(r, r.Up, "up", "client", "server")
}

func (s sink) direction(r proxy.RouteCounters, d proxy.DirectionCounters, name, from, to string) {
	s.put(bytesTotal, float64(d.Read), r.Listener, r.Rule, name, from)
	s.put(bytesTotal, float64(d.Written), r.Listener, r.Rule, name, to)
	s.put(spliced, float64(d.Spliced), r.Listener, r.Rule, name)
	s.put(retransmitted, float64(d.Retransmitted), r.Listener, r.Rule, to)
	s.put(signalErrors, float64(d.SignalErrors), r.Listener, r.Rule, to)
	for algorithm, c := range d.Control {
		s.put(ccLosses, float64(c.LossEvents), r.Listener, r.Rule, algorithm, name)
		for by, t := range c.Limited {
			if t > 0 {
				s.put(ccLimited, t.Seconds(), r.Listener, r.Rule, algorithm, name, flow.LimitedBy(by).String())
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
