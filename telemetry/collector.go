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

// Source is the part of proxy.Server that telemetry reads. All methods return copies, or call back for each part, so
// that the proxy waits for no reader.
type Source interface {
	page.Source
	// Snapshot calls visit for each open flow, and then returns the totals, which count these flows.
	Snapshot(visit func(*proxy.FlowInfo)) proxy.Counters
	// Held returns the state of held UDP, by listener.
	Held() []proxy.HeldInfo
}

// Facts describe the process. They do not change while it lives.
type Facts struct {
	Version   string
	Revision  string // of the sources; empty: unknown
	GoVersion string
	Start     float64  // Unix time in seconds
	Tier      string   // of the datapath
	Envelope  string   // the kernel's congestion control under our window
	Missing   []string // what the datapath lacks, in words
}

// Options has what a collector shows besides its Source. Functions are called once in each scrape, on any goroutine.
type Options struct {
	Facts Facts
	Clock func() cc.Time   // the flows' clock
	Wall  func() time.Time // the date, for handshakes
	Load  func() Load      // of the datapath; nil: not shown
	// Config returns which configuration is in force, and how reloads went; nil: not shown.
	Config func() Config
	// Hints returns how many hints were posted, by what became of them; nil: not shown.
	Hints func() map[HintOutcome]uint64
	// Changes returns how many changes of algorithms were asked for, by what became of them; nil: not shown.
	Changes func() map[ChangeOutcome]uint64
	// Ports are those of telemetry, by name.
	Ports map[string]*BoundedListener
	// HintSources returns the interfaces that give hints; nil: not shown.
	HintSources func() []HintSource
	// Agents returns the congestion control agents; nil: not shown.
	Agents func() []agent.Info
	// Predecessor returns how many connections the process that this one has taken over from still has; nil: not shown.
	Predecessor func() int
	// PredecessorLeft returns the time until that process resets them; set with Predecessor.
	PredecessorLeft func() time.Duration
	// TakenOver returns how many connections have come from that process; set with Predecessor.
	TakenOver func() int
	Fleet     func() FleetCounts // nil: there is no fleet
	// Downloads has the histograms of downloads that are over; nil: not shown.
	Downloads *Downloads
	// Exports returns how many exports by OTLP were sent, refused and dropped; nil: not shown.
	Exports func() (sent, refused, dropped uint64)
	// Dropped returns the trace events lost so far; nil: not shown.
	Dropped func() uint64
}

// Load is how busy the datapath is.
type Load struct {
	Busy     int       // legs with bytes unsent or unacknowledged
	Interval float64   // seconds between two polls of a leg that the relay enforces, at most
	Enforced *Enforced // nil: the kernel enforces no windows
}

// Enforced counts the windows that the kernel enforces.
type Enforced struct {
	Legs      int                // enforced now
	Limit     int                // that the kernel can enforce at once
	Full      uint64             // legs that it does not enforce for lack of room
	Failed    uint64             // legs that it does not enforce for another reason
	Fallbacks uint64             // times a socket ran Reno, since the process did not answer it
	Answers   datapath.Histogram // seconds from an acknowledgement to the window computed from it
}

// Config tells which configuration is in force, and how reloads went.
type Config struct {
	Hash              string  // SHA-256 of the file; empty: built-in
	Succeeded, Failed uint64  // reloads; the start is not counted
	OK                bool    // the last reload, or the start, succeeded
	Since             float64 // when this configuration was put into force, in Unix time

	Changed []string // rules that differ from the file since, in words
}

// HintSource is an interface of this machine that gives hints.
type HintSource struct {
	Interface string
	Readings  uint64
	Errors    uint64 // readings that failed
	Up        bool   // the last reading worked
}

// collector implements prometheus.Collector. Each scrape takes new snapshots of the proxy, because values kept between
// scrapes would have to be updated for each packet. Collect may run on several goroutines at once. Only the sampler
// has state, and a lock.
type collector struct {
	src    Source
	o      Options
	sample *sampler
}

// NewRegistry returns a registry of all metrics of src, of the process and of Go's runtime. The library's collectors
// name the latter; go_gc_cycles_total is ours, and is kept for dashboards that have it.
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

// Describe implements prometheus.Collector. It sends all families, also those without samples at present.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, f := range families {
		out <- f.desc
	}
}

// Collect implements prometheus.Collector. Flows are visited once, for all that is summed, sampled and counted of
// them, because the visit takes most of the time of a scrape.
func (c *collector) Collect(samples chan<- prometheus.Metric) {
	out := sink(samples)
	live, loads, sample := newLive(), peerLoads{}, c.sample.beginSample(c.o.Clock())
	counters := c.src.Snapshot(func(f *proxy.FlowInfo) {
		live.countFlow(f)
		loads.addFlow(f)
		sample.addFlow(f)
	})
	sample.endSample()
	loads.addCounters(counters.Peers)
	c.writeOptions(out)
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
	if c.o.Downloads != nil {
		c.o.Downloads.dropOldRules(counters.Routes)
		c.o.Downloads.writeMetrics(out)
	}
	for _, t := range c.src.Tunnels() {
		out.writeTunnel(t, c.o.Wall())
		out.writePeers(t, loads)
		if t.Unauthorized > 0 {
			rejected[rejection{t.Listener, proxy.RejectedAuth}] += t.Unauthorized
		}
	}
	for _, h := range c.src.Held() {
		out.writeHeld(&h)
	}
	for r, n := range rejected {
		out.putSample(rejections, float64(n), r.listener, string(r.reason))
	}
	live.writeMetrics(out)
	sumGroups(c.src.Groups()).writeMetrics(out)
	c.sample.writeMetrics(out)
}

// rejection is the key of one series. The proxy counts some rejections, and a tunnel counts requests that it refuses
// before there is a connection. Collect adds both up, because a series must have one sample.
type rejection struct {
	listener string
	reason   proxy.Reason
}

// writeOptions writes the metrics of Options. A part that is nil there has no samples.
func (c *collector) writeOptions(out sink) {
	f := c.o.Facts
	out.putSample(buildInfo, 1, f.Version, f.Revision, f.GoVersion)
	out.putSample(startTime, f.Start)
	if c.o.Config != nil {
		out.writeConfig(c.o.Config())
	}
	out.putSample(datapathInfo, 1, f.Tier, f.Envelope)
	for _, words := range slices.Compact(slices.Sorted(slices.Values(f.Missing))) {
		out.putSample(missing, 1, words)
	}
	if c.o.Load != nil {
		out.writeLoad(c.o.Load())
	}
	if c.o.HintSources != nil {
		for _, source := range c.o.HintSources() {
			out.writeHintSource(source)
		}
	}
	if c.o.Agents != nil {
		for _, a := range c.o.Agents() {
			out.writeAgent(a)
		}
	}
	if c.o.Hints != nil {
		for outcome, n := range c.o.Hints() {
			out.putSample(hintsTotal, float64(n), string(outcome))
		}
	}
	if c.o.Changes != nil {
		for outcome, n := range c.o.Changes() {
			out.putSample(changesTotal, float64(n), string(outcome))
		}
	}
	for name, port := range c.o.Ports {
		for reason, n := range port.Refused() {
			out.putSample(portRefusals, float64(n), name, string(reason))
		}
	}
	if c.o.Predecessor != nil {
		out.putSample(predecessor, float64(c.o.Predecessor()))
		out.putSample(predecessorLeft, c.o.PredecessorLeft().Seconds())
		out.putSample(takenOver, float64(c.o.TakenOver()))
	}
	if c.o.Fleet != nil {
		out.writeFleet(c.o.Fleet())
	}
	if c.o.Exports != nil {
		sent, refused, dropped := c.o.Exports()
		out.putSample(exports, float64(sent), "sent")
		out.putSample(exports, float64(refused), "refused")
		out.putSample(exports, float64(dropped), "dropped")
	}
	if c.o.Dropped != nil {
		out.putSample(traceDropped, float64(c.o.Dropped()))
	}
}

// writeConfig writes which configuration is in force, and how reloads went.
func (s sink) writeConfig(c Config) {
	s.putSample(configInfo, 1, c.Hash)
	s.putSample(reloads, float64(c.Succeeded), "success")
	s.putSample(reloads, float64(c.Failed), "failure")
	s.putSample(reloadOK, oneIf(c.OK))
	s.putSample(reloadTime, c.Since)
	s.putSample(configChanged, float64(len(c.Changed)))
}

// writeLoad writes how busy the datapath is.
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

// writeListener writes what is counted of a listener's connections before they are relayed. Collect writes their
// rejections, because tunnels count some of them.
func (s sink) writeListener(l proxy.ListenerCounters) {
	s.putSample(conns, float64(l.Active), l.Listener)
	s.putSample(accepted, float64(l.Accepted), l.Listener)
	s.putHistogram(setup, l.Setup, l.Listener)
	s.putHistogram(dial, l.Dial, l.Listener)
}

// writeRoute writes what is counted of the connections of a listener under a rule.
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

// writeDirection writes one direction of a route, by the name down or up. Its bytes are read from the leg named from
// and written to the leg named to.
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

// oneIf returns a truth value as Prometheus writes it.
func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// writeHintSource writes how readings of an interface went.
func (s sink) writeHintSource(h HintSource) {
	s.putSample(hintReadings, float64(h.Readings), h.Interface)
	s.putSample(hintErrors, float64(h.Errors), h.Interface)
	s.putSample(hintSourceUp, oneIf(h.Up), h.Interface)
}

// writeAgent writes what is counted of an agent since the start. The fallback algorithm steers the flows that the
// agent does not.
func (s sink) writeAgent(a agent.Info) {
	s.putSample(agentUp, oneIf(a.Up), a.Name)
	s.putSample(agentFlows, float64(a.Steered), a.Name, "agent")
	s.putSample(agentFlows, float64(max(0, a.Flows-a.Steered)), a.Name, "fallback")
	s.putSample(agentConnects, float64(a.Connects), a.Name)
	s.putSample(agentReports, float64(a.Reports), a.Name)
	s.putSample(agentDropped, float64(a.Dropped), a.Name)
	s.putSample(agentDecisions, float64(a.Decisions), a.Name)
	s.putSample(agentAborts, float64(a.Aborted), a.Name)
	s.putHistogram(agentTook, a.Took, a.Name)
	for reason, n := range a.Refused {
		s.putSample(agentRefused, float64(n), a.Name, reason)
	}
	for reason, n := range a.Fallbacks {
		s.putSample(agentFallbacks, float64(n), a.Name, reason)
	}
}

// unixSeconds returns t in Unix time, to the millisecond.
func unixSeconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1e3 }

// sessionLife is how long after its handshake a WireGuard session ends at the latest (REJECT_AFTER_TIME of the
// protocol, 180 s).
const sessionLife = 3 * time.Minute

// writeTunnel writes the metrics of a tunnel. now is the date.
func (s sink) writeTunnel(t proxy.TunnelInfo, now time.Time) {
	active := len(t.Sessions)
	for _, p := range t.Peers {
		if !p.Handshake.IsZero() && now.Sub(p.Handshake) < sessionLife {
			active++
		}
	}
	s.putSample(tunnelUp, oneIf(t.Up), t.Listener)
	s.putSample(tunnelPeers, float64(len(t.Peers)), t.Listener)
	s.putSample(tunnelActive, float64(active), t.Listener)
	s.putSample(tunnelBytes, float64(t.Received), t.Listener, "received")
	s.putSample(tunnelBytes, float64(t.Sent), t.Listener, "sent")
	s.putSample(tunnelRefused, float64(t.Refused), t.Listener)
	s.putSample(tunnelLost, float64(t.Lost), t.Listener)
	for reason, n := range map[string]uint64{
		"too_large": t.SendErrors.TooLarge, "unreachable": t.SendErrors.Unreachable, "forbidden": t.SendErrors.Forbidden,
		"no_buffer": t.SendErrors.NoBuffer, "other": t.SendErrors.Other,
	} {
		s.putSample(tunnelSendErrors, float64(n), t.Listener, reason)
	}
	s.putSample(tunnelHandshakes, float64(t.Handshakes), t.Listener)
	s.putSample(tunnelStalls, float64(t.Stalls), t.Listener)
	s.putSample(tunnelInvalid, float64(t.Malformed), t.Listener, "malformed")
	s.putSample(tunnelInvalid, float64(t.Damaged), t.Listener, "checksum")
	s.putSample(tunnelInvalid, float64(t.Senseless), t.Listener, "flags")
	s.putSample(tunnelExpired, float64(t.Expired), t.Listener)
	d := t.Datagrams
	s.putSample(tunnelDatagrams, float64(d.SentPackets), t.Listener, "received")
	s.putSample(tunnelDatagrams, float64(d.ReceivedPackets), t.Listener, "sent")
	for reason, n := range map[string]uint64{
		"refused": d.Refused, "crowded": d.Crowded, "late": d.Late,
		"overflow": d.Overflow, "unsolicited": d.Unsolicited, "failed": d.Failed,
	} {
		s.putSample(tunnelDropped, float64(n), t.Listener, reason)
	}
	s.putSample(tunnelSessions, float64(d.Sessions), t.Listener)
	s.putSample(tunnelEvicted, float64(d.Evicted), t.Listener)
	s.putSample(tunnelNotices, float64(d.Notices), t.Listener)
}
