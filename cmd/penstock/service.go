package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/doctor"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/fleet"
	"github.com/penstock-net/penstock/proxy/linkstat"
	"github.com/penstock-net/penstock/proxy/takeover"
	"github.com/penstock-net/penstock/telemetry"
	"github.com/penstock-net/penstock/telemetry/otlp"
	"github.com/penstock-net/penstock/telemetry/page"
)

// service is the proxy with all that stands around it. runService goes through its states:
//
//	opening ─▶ serving ─▶ ending (after a signal, for shutdown.delay) ─▶ draining (proxy.Ready is false) ─▶ closed
type service struct {
	cfg    config.Config  // at the start
	flags  runFlags       // at the start
	given  *pflag.FlagSet // tells which flags were given
	log    *slog.Logger
	level  slog.LevelVar // of log
	events page.Events   // of log, for the page

	flows          flow.Manager
	trace          *telemetry.Trace           // of --trace; nil: there is none
	pagesListener  *telemetry.BoundedListener // for telemetry's pages; nil: they are off
	healthListener *telemetry.BoundedListener // for the pages for probes alone; nil: there is none
	hintsListener  *telemetry.BoundedListener // the Unix socket for hints; nil: there is none
	hints          telemetry.HintReceiver
	changes        telemetry.Changer
	exporter       otlp.Exporter // without an endpoint it does not run
	proxy          *proxy.Kernel

	sources []*linkstat.Source // interfaces that give hints
	fleet   *fleet.Fleet       // nil: there is none
	drained chan struct{}      // closed when connections have to go to the other edges of the fleet

	reloads reloader
	state   *stateKeeper
	leaving atomic.Bool // a signal has come, or another process has taken over

	startingSuccessor atomic.Bool // a process that is to take over is starting

	predecessor *takeover.Predecessor // the process that this one takes over from; nil: there is none
	successor   chan int              // receives the number of a process that has taken over
	handedOver  bool                  // successor has received one
	unitSockets []proxy.GivenSocket   // of a socket unit of systemd
	stored      takeover.Sockets      // sockets in systemd's store that no listener has taken
	wasStored   bool                  // the store had sockets at the start
}

// runService opens everything, serves until a signal comes, and closes everything. The order matters: it takes ports
// before it writes anything, does what needs privileges before it drops them, and checks after that what has to work
// without them. An error closes what was opened so far.
func (h *service) runService(ctx context.Context, rereads, upgrades <-chan os.Signal) (err error) {
	defer runtime.KeepAlive(newBallast())
	h.log.Info("penstock starts", "version", cli.ReadBuild().Version, "pid", os.Getpid())
	if h.flags.broken != nil {
		h.log.Error("the configuration has a mistake; the last good one is in force until it is mended and reloaded",
			"config", h.flags.config, "last_good", h.flags.lastGood, "err", h.flags.broken)
	}
	for _, w := range h.cfg.Warnings() {
		h.log.Warn(w)
	}
	if err := checkMark(uint32(h.cfg.Mark)); err != nil {
		return err
	}
	if h.flags.trace != "" {
		closeTrace, err := h.openTrace()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, closeTrace()) }()
	}
	if err := h.receiveSockets(); err != nil {
		return err
	}
	if err := h.askPredecessor(); err != nil {
		return err
	}
	defer h.predecessor.Close()
	if err := h.openTelemetry(); err != nil {
		return err
	}
	// From here on a failure has to close what is open.
	h.flows.Seed, h.flows.HintNews = uint64(started.UnixNano()), h.hintNews
	if err := h.openFleet(); err != nil {
		return errors.Join(err, h.closeTelemetry())
	}
	sockets := h.takeListeners(h.unitSockets)
	signals := make(chan os.Signal, 2) // from now on: interfaces and rules are to be taken down
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	if h.proxy, err = proxy.Open(ctx, h.cfg, sockets, &h.flows, monotonicTime, h.log); err != nil {
		return errors.Join(h.explainListen(err), h.closeTelemetry())
	}
	h.proxy.SetServicePorts(h.telemetryTCPPorts())
	h.hints.Pass, h.hints.Clock, h.hints.Log = h.proxy.Hint, monotonicTime, h.log
	h.setSecrets(&h.cfg)
	h.changes.Rules, h.changes.Change = h.reloads.currentRules, h.reloads.changeAlgorithm
	if err := h.openSources(); err != nil {
		return errors.Join(err, h.proxy.Close(), h.closeTelemetry())
	}
	h.reloads.recordStart()
	h.state = newStateKeeper(h.flags, h.cfg, h.log)
	h.state.makeDirectory()
	h.state.resumePeers(h.proxy.Resume)
	h.logStart()
	// All listeners are open, so the configuration works on this machine.
	if h.flags.broken == nil {
		h.reloads.saveLastGood(h.flags.loaded)
	}
	h.dropPrivileges()
	h.state.checkDirectory()
	err = errors.Join(h.serveUntilSignal(ctx, rereads, upgrades, signals), h.proxy.Close())
	if h.handedOver && err == nil && os.Getpid() == 1 {
		h.log.Info("all has moved or ended; process 1 stays until a signal, since a container that ends is started again " +
			"and would take back what has moved")
		select {
		case <-signals:
		case <-ctx.Done():
		}
	}
	return err
}

// setSecrets puts the tokens and headers of cfg into force.
func (h *service) setSecrets(cfg *config.Config) {
	h.hints.SetToken(string(cfg.Telemetry.Hints.Token))
	h.changes.SetToken(string(cfg.Telemetry.ChangeToken))
	h.exporter.SetHeaders(cfg.Telemetry.OTLP.Headers.Fields())
}

// newBallast returns bytes that are never written to, so that they occupy no memory. The garbage collector counts them
// as live, and collects when the heap has grown to twice what is live. Without them that is after a few MB, every few
// hundred connections. They are 16 MB, or a 64th of the machine's memory if that is less.
func newBallast() []byte {
	var machine unix.Sysinfo_t
	if unix.Sysinfo(&machine) != nil {
		return nil
	}
	ram := uint64(machine.Totalram) * uint64(machine.Unit) //nolint:unconvert // 32 bits on some processors
	return make([]byte, min(16<<20, ram/64))
}

// receiveSockets takes the descriptors that systemd passes (sd_listen_fds(3)): sockets of a socket unit, and sockets
// that an earlier process has stored.
func (h *service) receiveSockets() error {
	for _, file := range activation.Files(true) {
		ln, err := net.FileListener(file)
		if err = errors.Join(err, file.Close()); err != nil {
			return fmt.Errorf("take the sockets of LISTEN_FDS: %w", err)
		}
		tcp, ok := ln.(*net.TCPListener)
		if !ok {
			return fmt.Errorf("socket %s of LISTEN_FDS does not listen for TCP; "+
				"the socket unit needs ListenStream= and an address", file.Name())
		}
		role, stored := strings.CutPrefix(file.Name(), storedName)
		if !stored {
			role = proxy.TakeoverRole
		}
		s, err := takeover.Duplicate(role, tcp)
		if err = errors.Join(err, tcp.Close()); err != nil {
			return err
		}
		if stored {
			h.stored, h.wasStored = append(h.stored, s), true
		} else {
			h.unitSockets = append(h.unitSockets, proxy.GivenSocket{Socket: s, Kept: true})
		}
	}
	return nil
}

// openTrace starts writing events to the file of --trace, which it empties. done writes the events that wait and
// closes the file. If that is a pipe without a reader, it gives up after readWithin.
func (h *service) openTrace() (done func() error, err error) {
	file, err := os.OpenFile(h.flags.trace, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	h.trace = telemetry.NewTrace(file)
	h.flows.Trace = h.trace.Event
	return func() error {
		_ = file.SetWriteDeadline(time.Now().Add(readWithin)) // only a pipe or a terminal has a deadline
		err := errors.Join(h.trace.Close(), file.Close())
		if n := h.trace.Dropped(); n > 0 {
			h.log.Warn("events are missing from the trace: the disk was slow or full", "dropped", n)
		}
		return err
	}, nil
}

// logStart logs what is in use, and what is missing. Operators and tests find addresses, algorithms and reasons there,
// so messages and keys stay as they are.
func (h *service) logStart() {
	d := h.proxy.Datapath
	attrs := []any{"tier", kernel.Tier, "envelope", d.Envelope(), "windows_held_by", "relay"}
	if control := d.Control(); control != "" {
		attrs = []any{
			"tier", kernel.Tier, "envelope", d.Envelope(), "windows_held_by", "kernel", "control", control,
			"otherwise", d.RelayEnvelope(),
		}
	}
	if why := d.WhyUnenforced(); why != "" {
		attrs = append(attrs, "why", why)
	}
	h.log.Info("datapath", attrs...)
	for _, words := range h.proxy.Datapath.Missing() {
		h.log.Warn("datapath: " + words)
	}
	addrs := h.proxy.Addrs()
	for _, l := range h.cfg.Listeners {
		h.log.Info("listening", "listener", l.Name, "mode", l.Mode, "address", addrs[l.Name].String())
	}
	routes, err := h.cfg.Routes()
	if err != nil { // the configuration has been checked
		h.log.Error("cannot describe the rules", "err", err)
	}
	for _, r := range routes {
		name := r.Rule
		if name == "" {
			name = "(otherwise)"
		}
		if r.Refuse != "" {
			h.log.Info("rule", "rule", name, "refuse", r.Refuse)
			continue
		}
		h.log.Info("rule", "rule", name, "down", describeTerms(r.Down), "up", describeTerms(r.Up),
			"client_windows", describeTerms(r.FromClient), "server_windows", describeTerms(r.FromServer))
	}
	if h.healthListener != nil {
		h.log.Info("health", "address", h.healthListener.Addr().String())
	}
	if h.hintsListener != nil {
		h.log.Info("taking hints", "socket", h.cfg.Telemetry.Hints.Socket)
	}
	if h.pagesListener == nil {
		h.log.Info("telemetry is off")
		return
	}
	h.log.Info("telemetry", "page", "http://"+h.pagesListener.Addr().String()+"/", "metrics",
		"http://"+h.pagesListener.Addr().String()+"/metrics", "flows", "http://"+h.pagesListener.Addr().String()+"/flows")
}

// errStoppedAtOnce says that connections were reset, because a second signal came while they drained.
var errStoppedAtOnce = errors.New("stopped at once by a second signal; open connections were reset")

// serveUntilSignal runs until a signal or a failure ends it. A second signal does not
// wait for connections that drain.
//
//	event                           what follows
//	first SIGTERM or SIGINT         /readyz fails; after shutdown.delay ctx ends
//	ctx ends                        the proxy takes no connections and drains for shutdown.drain
//	second signal                   open connections are reset
//	the proxy or telemetry fails    ctx ends, and the error is returned once the proxy has ended
//	another process takes over      the same at once, without telemetry
//	SIGHUP                          the configuration is read again
//	SIGUSR2                         the program file is started to take over
func (h *service) serveUntilSignal(ctx context.Context, rereads, upgrades, signals <-chan os.Signal) error {
	callerDone := ctx.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Telemetry goes on while connections drain, so that an operator can watch them.
	lastCtx, endLast := context.WithCancel(context.WithoutCancel(ctx))
	pagesCtx, endPages := context.WithCancel(lastCtx)
	var others sync.WaitGroup
	defer others.Wait()
	defer endPages()
	defer endLast()

	ended := make(chan error, 1)
	go func() { ended <- h.proxy.Serve(ctx) }()
	pagesEnded := h.startTelemetry(pagesCtx, &others)
	others.Go(func() { h.watchHealth(pagesCtx) })
	others.Go(func() { h.state.keepEndpoints(pagesCtx, h.proxy.Endpoints) })
	others.Go(func() { h.reloads.watchFiles(pagesCtx) })
	others.Go(func() { h.readSources(lastCtx) }) // algorithms need the hints as long as connections drain
	fleetCtx, endFleet := context.WithCancel(lastCtx)
	defer endFleet()
	if h.fleet != nil {
		others.Go(func() { h.fleet.RunEdge(fleetCtx, h.drained) })
	}
	ready := daemon.SdNotifyReady + "\n" + h.statusLine()
	if h.predecessor != nil {
		awaitOrphaned() // the main process that MAINPID= names must not be a child of the predecessor
		if err := h.beginTakeover(); err != nil {
			cancel()
			return errors.Join(err, <-ended)
		}
	}
	// A process may be started to take over as soon as this one says that it is ready.
	if ln := h.listenTakeover(); ln != nil {
		others.Go(func() { h.offerTakeover(lastCtx, ln) })
	}
	h.notifySystemd(ready)
	h.forgetStored()
	reportServing()

	var delayed <-chan time.Time
	var failed error // of telemetry
	for stopping := false; ; {
		select {
		case <-delayed:
			h.log.Info("no new connections from now on")
			h.storeSockets()
			cancel()
		case err := <-ended:
			if err = errors.Join(failed, err); err == nil {
				h.log.Info("penstock ends")
			}
			return err
		case err := <-pagesEnded:
			failed = errors.Join(failed, err)
			cancel()
		case <-callerDone: // ctx, which the proxy has, has ended as well
			callerDone, stopping = nil, true
			h.state.saveEndpoints(h.proxy.Endpoints)
		case <-rereads:
			h.reloads.reloadOnSignal()
		case <-upgrades:
			h.startSuccessorOnSignal()
		case pid := <-h.successor:
			stopping = true
			h.handedOver = true
			h.leaving.Store(true)
			h.log.Info("another process has taken over; open connections may end here", "pid", pid)
			endPages() // the other process serves them
			endFleet() // the other process is this edge of the fleet
			cancel()
		case s := <-signals:
			if stopping {
				open := h.proxy.Counters().Active
				cancel()
				h.proxy.Abort()
				err := errors.Join(failed, <-ended)
				if open > 0 {
					return errors.Join(errStoppedAtOnce, err)
				}
				h.log.Info("penstock ends") // timeout(1) sends two signals: to the process and to its group
				return err
			}
			stopping = true
			if delay := h.beginEnding(s); delay > 0 {
				delayed = time.After(delay)
			} else {
				h.storeSockets()
				cancel()
			}
		}
	}
}

// startTelemetry serves the pages, the probes and the hints, and exports metrics, until ctx ends. The channel receives
// the error of each server.
func (h *service) startTelemetry(ctx context.Context, others *sync.WaitGroup) <-chan error {
	ended := make(chan error, 3)
	pages := h.telemetryPages()
	if h.pagesListener != nil {
		others.Go(func() { ended <- pages.Serve(ctx, h.pagesListener) })
	}
	if h.healthListener != nil {
		others.Go(func() { ended <- pages.ServeHealth(ctx, h.healthListener) })
	}
	if h.hintsListener != nil {
		others.Go(func() { ended <- h.hints.Serve(ctx, h.hintsListener) })
	}
	if h.cfg.Telemetry.OTLP.Endpoint != "" {
		others.Go(func() { h.exporter.ExportMetrics(ctx) })
	}
	return ended
}

// beginEnding lets /readyz fail and the fleet take over the hosts. It returns for how long connections are still
// taken.
func (h *service) beginEnding(s os.Signal) time.Duration {
	h.leaving.Store(true)
	close(h.drained)
	h.state.saveEndpoints(h.proxy.Endpoints)
	delay := h.proxy.Config().Shutdown.Delay // a reload may have changed it
	h.log.Info("ending", "signal", s.String(), "connections_taken_for", delay)
	h.notifySystemd(daemon.SdNotifyStopping + "\n" + h.statusLine())
	return delay
}

// isEnding reports whether the proxy is to end: it drains, or will after shutdown.delay.
func (h *service) isEnding() bool { return h.leaving.Load() || !h.proxy.Ready() }

// datapathLoad returns the load of the datapath for telemetry.
func (h *service) datapathLoad() telemetry.Load {
	s := h.proxy.Datapath.Status()
	l := telemetry.Load{Busy: s.Busy, Interval: s.Interval.Seconds()}
	if k := s.Enforced; k != nil {
		l.Enforced = &telemetry.Enforced{
			Legs: k.Legs, Limit: k.Limit, Full: k.Full, Failed: k.Failed, Fallbacks: k.Fallbacks, Answers: k.Answers,
		}
	}
	return l
}

// fallbackCount returns how often the kernel ran Reno on a leg.
func (h *service) fallbackCount() uint64 {
	if k := h.proxy.Datapath.Status().Enforced; k != nil {
		return k.Fallbacks
	}
	return 0
}

// checkMark returns an error unless this process may set the firewall mark. It tries that now, because the first
// connection may come long after the start.
func checkMark(mark uint32) error {
	if mark == 0 {
		return nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("mark: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was sent
	switch err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("mark %#x needs CAP_NET_ADMIN: run as root, or setcap cap_net_admin+ep on the binary, "+
			"or AmbientCapabilities=CAP_NET_ADMIN in the systemd unit; mark: 0 does without: %w", mark, err)
	case err != nil:
		return fmt.Errorf("mark %#x: %w", mark, err)
	}
	return nil
}

// openTelemetry opens what telemetry listens on: pages, health and the socket for hints. It comes before the proxy's
// own listeners, because a port that is taken is most often an earlier proxy that still runs.
func (h *service) openTelemetry() error {
	if at := h.cfg.Telemetry.Address; at != "off" {
		ln, err := h.listenTCP("telemetry.address", at, "--telemetry or telemetry.address changes it, off does without")
		if err != nil {
			return err
		}
		h.pagesListener = h.boundListener(ln, "telemetry")
	}
	if at := h.cfg.Telemetry.Health; at != "off" {
		ln, err := h.listenTCP("telemetry.health", at, "write another, or off to do without")
		if err != nil {
			return errors.Join(err, h.closeTelemetry())
		}
		h.healthListener = h.boundListener(ln, "telemetry.health")
	}
	if path := h.cfg.Telemetry.Hints.Socket; path != "" {
		ln, err := h.listenHints(path)
		if err != nil {
			return errors.Join(fmt.Errorf("telemetry.hints.socket: %w", err), h.closeTelemetry())
		}
		h.hintsListener = h.boundListener(ln, "telemetry.hints")
	}
	return nil
}

// boundListener bounds the connections of a telemetry port, because each takes a descriptor that connections of
// clients need. The first connection that is refused is logged under name.
func (h *service) boundListener(ln net.Listener, name string) *telemetry.BoundedListener {
	dialled := func(from, to netip.AddrPort) bool { return h.proxy.IsDialled(from, to) }
	onRefused := func(reason proxy.Reason) {
		h.proxy.LimitMet(name, reason, "nothing beyond 64 connections, 8 of a host: keep others out by a firewall; "+
			"below that LimitNOFILE (ulimit -n)")
	}
	return telemetry.Bound(ln, proxy.DescriptorBudget(&h.cfg).Port, dialled, onRefused)
}

// telemetryPorts returns the open listeners of telemetry, by the names that metrics have for them.
func (h *service) telemetryPorts() map[string]*telemetry.BoundedListener {
	ports := map[string]*telemetry.BoundedListener{
		"pages": h.pagesListener, "health": h.healthListener, "hints": h.hintsListener,
	}
	maps.DeleteFunc(ports, func(_ string, ln *telemetry.BoundedListener) bool { return ln == nil })
	return ports
}

// telemetryTCPPorts returns the TCP ports of telemetry that are open.
func (h *service) telemetryTCPPorts() (ports []uint16) {
	for _, ln := range h.telemetryPorts() {
		if at := datapath.AddrPortOf(ln.Addr()); at.IsValid() {
			ports = append(ports, at.Port())
		}
	}
	return ports
}

// closeTelemetry closes what openTelemetry has opened, before anything is served.
func (h *service) closeTelemetry() (err error) {
	for _, ln := range h.telemetryPorts() {
		err = errors.Join(err, ln.Close())
	}
	return err
}

// metricsOptions returns what metrics show. Its functions may be called at any time, also while the proxy ends.
func (h *service) metricsOptions(b cli.Build) telemetry.Options {
	o := telemetry.Options{
		Facts: telemetry.Facts{
			Version: b.Version, Revision: b.Revision, GoVersion: runtime.Version(),
			Start: float64(started.UnixNano()) / 1e9,
			Tier:  kernel.Tier, Envelope: h.proxy.Datapath.Envelope(), Missing: h.proxy.Datapath.Missing(),
		},
		Clock:   monotonicTime,
		Wall:    time.Now,
		Load:    h.datapathLoad,
		Config:  h.reloads.configStatus,
		Hints:   h.hints.Outcomes,
		Changes: h.changes.Outcomes,
		Ports:   h.telemetryPorts(),

		HintSources: h.sourceStats,
		Agents:      h.proxy.Agents,
		Downloads:   telemetry.NewDownloads(),
	}
	if h.predecessor != nil {
		o.Predecessor, o.PredecessorLeft, o.TakenOver = h.predecessor.Open, h.predecessor.Left, h.proxy.Adopted
	}
	if h.fleet != nil {
		o.Fleet = h.fleetCounts
	}
	if h.trace != nil {
		o.Dropped = h.trace.Dropped
	}
	if h.cfg.Telemetry.OTLP.Endpoint != "" {
		o.Exports = h.exporter.Counts
	}
	return o
}

// telemetryPages returns the HTTP pages, and sets the exporter up. Functions of the pages may be called at any time,
// also while the proxy ends.
func (h *service) telemetryPages() telemetry.Pages {
	b := cli.ReadBuild()
	o := h.metricsOptions(b)
	ready := func() error {
		if h.isEnding() {
			return errors.New("draining: connect elsewhere")
		}
		return h.proxy.Health()
	}
	observer := &telemetry.Observer{
		Flows: h.proxy.Flows, Samples: h.sampledRules, StopSample: h.reloads.stopSample, Try: h.proxy.SetTrial,
		Wall: time.Now, Log: h.log, Downloads: o.Downloads,
	}
	h.proxy.WatchClosed(observer.ObserveClosed)
	metrics := telemetry.NewRegistry(h.proxy, o)
	h.exporter.Endpoint, h.exporter.Interval = h.cfg.Telemetry.OTLP.URL(), h.cfg.Telemetry.OTLP.Interval
	h.exporter.Metrics, h.exporter.Version, h.exporter.Start = metrics, b.Version, started
	h.exporter.Wall, h.exporter.Log = time.Now, h.log
	var fleetStatus func() any
	var fleetLines func() []string
	if h.fleet != nil {
		fleetStatus = func() any { return h.fleet.Status() }
		fleetLines = func() []string { return describeFleet(h.fleet.Status()) }
	}
	return telemetry.Pages{
		Fleet:    fleetStatus,
		Observer: observer,
		Links:    func() (telemetry.LinkReader, error) { return linkstat.OpenLinks() },
		Wall:     time.Now,

		Source:  h.proxy,
		Metrics: metrics,
		Page: page.New(page.Options{
			Source: h.proxy, Version: b.Version, Start: o.Facts.Start, Clock: monotonicTime, Wall: time.Now,
			Ready: ready, Fallbacks: h.fallbackCount, Events: &h.events,
			Gains:   observer.Gains,
			Fleet:   fleetLines,
			Drain:   h.predecessor.DescribeDrain,
			Changes: func() (bool, []string) { return h.changes.TakesChanges(), h.reloads.configStatus().Changed },
		}),
		Ready:   ready,
		Profile: h.flags.pprof,
		Hints:   &h.hints,
		Changes: &h.changes,
		Reload:  func() (string, error) { return h.reloads.reloadConfig("http") },
		Dialled: h.proxy.IsDialled,
		Log:     h.log,
	}
}

// sampledRules returns the sampled rules in force, with the rules that they are compared with.
func (h *service) sampledRules() (out []telemetry.SampledRule) {
	cfg := h.proxy.Config()
	for _, pair := range cfg.SampledRules() {
		out = append(out, telemetry.SampledRule{Rule: pair[0], Against: pair[1]})
	}
	return out
}

// listenTCP listens at an address of the configuration, or takes the predecessor's socket there. An error names the
// key, who has the port, and the cure.
func (h *service) listenTCP(key, address, cure string) (net.Listener, error) {
	ln, err := h.takeSocket(key, address)
	if ln == nil && err == nil {
		ln, err = net.Listen("tcp", address)
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE), errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, nameOwner(&proxy.ListenError{Key: key, Network: "tcp", Address: address, Cure: cure, Err: err})
	case err != nil:
		return nil, fmt.Errorf("%s: %w (%s)", key, err, cure)
	}
	return ln, nil
}

// explainListen adds the process that has the port to an error about a listener. Without a configuration file it names
// the flag to change.
func (h *service) explainListen(err error) error {
	var failed *proxy.ListenError
	if !errors.As(err, &failed) {
		return err
	}
	if h.flags.config == "" {
		failed.Key, failed.Cure = "--listen", "name another by --listen, such as --listen 127.0.0.1:3128"
	}
	return nameOwner(failed)
}

// nameOwner adds the process that has the port.
func nameOwner(failed *proxy.ListenError) error {
	if failed.InUse() {
		failed.Owner = doctor.SocketOwner(failed.Network, failed.Address)
	}
	return failed
}

// statusPeriod is how often systemd gets a new status.
const statusPeriod = 5 * time.Second

// readWithin bounds how long a notification waits for systemd to read it, and how long the end of a trace waits for
// its reader.
const readWithin = time.Second

// watchHealth sends systemd a status and, if the unit has a watchdog, WATCHDOG=1. It takes the locks of all groups
// before each, so that the watchdog runs out if one of them is never released.
func (h *service) watchHealth(ctx context.Context) {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	period, alive := statusPeriod, ""
	if every, err := daemon.SdWatchdogEnabled(false); err == nil && every > 0 {
		period, alive = min(period, every/2), daemon.SdNotifyWatchdog+"\n"
	}
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.proxy.Groups() // takes their locks
			h.notifySystemd(alive + h.statusLine())
		}
	}
}

// maxReason bounds what a status shows of an error, in bytes.
const maxReason = 200

// statusLine returns what systemctl status shows: the connections, and why a changed configuration is not in force.
func (h *service) statusLine() string {
	open := h.proxy.Counters().Active
	words := fmt.Sprintf("serving %d connections", open)
	if h.isEnding() {
		words = fmt.Sprintf("draining, %d connections open", open)
	}
	if err := h.reloads.pendingError(); err != nil {
		why := config.Printable(strings.Join(strings.Fields(err.Error()), " "))
		if len(why) > maxReason {
			why = strings.ToValidUTF8(why[:maxReason], "") + "…"
		}
		words += "; the configuration file is not in force: " + why
	}
	return "STATUS=" + words
}

// notifySystemd sends a state (sd_notify(3)) and descriptors to the supervisor, if there is one.
func (h *service) notifySystemd(state string, fds ...int) {
	at := os.Getenv("NOTIFY_SOCKET")
	if at == "" {
		return
	}
	if err := sendNotification(at, state, fds...); err != nil {
		h.log.Warn("cannot notify systemd", "state", strings.TrimSpace(state), "err", err)
	}
}

// sendNotification writes to the socket at. It waits for its reader for readWithin at most, where daemon.SdNotify
// waits without end, because a supervisor that reads nothing must not stop the proxy.
func sendNotification(at, state string, fds ...int) error {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: at, Net: "unixgram"})
	if err != nil {
		return err
	}
	_ = conn.SetWriteDeadline(time.Now().Add(readWithin))
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	raw, err := conn.SyscallConn()
	if err == nil { // WriteMsgUnix refuses a socket of this type that is connected
		writeErr := raw.Write(func(fd uintptr) bool {
			err = unix.Sendmsg(int(fd), []byte(state), rights, nil, 0)
			return !errors.Is(err, unix.EAGAIN)
		})
		err = errors.Join(err, writeErr)
	}
	return errors.Join(err, conn.Close())
}

// neededCapabilities returns which of the capabilities in has a proxy needs once all its sockets are open. envelope is
// the congestion control that it sets on each socket. allowed are the congestion controls that every user may set.
// held is true if all threads need CAP_NET_ADMIN for held UDP.
func neededCapabilities(cfg config.Config, envelope string, allowed []string, held bool, has caps.Set) caps.Set {
	foreign := cfg.Mark != 0 // CAP_NET_ADMIN and CAP_NET_RAW both permit marks and foreign addresses
	for _, l := range cfg.Listeners {
		foreign = foreign || l.KeepClient
	}
	device := slices.ContainsFunc(cfg.Listeners, func(l access.Listener) bool {
		// The proxy makes a device again if it goes, and changes the peers of the kernel's WireGuard.
		return l.Mode == access.TUN || l.EndsInKernel()
	})
	var keep caps.Set
	switch {
	case foreign && !has.Has(caps.NetAdmin):
		keep = caps.NetRaw
	case foreign, device, held, !slices.Contains(allowed, envelope):
		keep = caps.NetAdmin
	}
	// The right to ports below 1024 is a small risk, and a listener of a later reload may need it.
	return (keep | caps.NetBindService) & has
}

// dropPrivileges drops the capabilities that the proxy needed only to open its sockets. It logs a failure with its
// cure, and the proxy runs on.
func (h *service) dropPrivileges() {
	if h.flags.keepPrivileges {
		return
	}
	_, has, err := caps.Held()
	if err != nil {
		h.log.Warn("privileges stay", "err", err)
		return
	}
	_, allowed, err := kernel.Envelopes()
	if err != nil { // then nothing counts as allowed
		h.log.Debug("which congestion controls are for everybody is unknown", "err", err)
	}
	why := h.proxy.HeldPrivilege()
	if why != nil {
		h.log.Info("CAP_NET_ADMIN is kept by all threads, since those that hold UDP cannot keep it alone", "why", why)
	}
	keep := neededCapabilities(h.cfg, h.proxy.Datapath.RelayEnvelope(), allowed, why != nil, has) | h.neededToReread(has)
	dropped, err := caps.Drop(keep)
	switch {
	case err == nil:
		h.log.Info("privileges", "kept", keep.Words(), "dropped", dropped.Words())
	case has&^keep == 0:
		h.log.Debug("no_new_privs is not set", "err", err)
	default:
		h.log.Warn("privileges stay: "+explainKept(err), "kept", has.Words(), "err", err)
	}
}

// neededToReread returns the capability that a reload needs to read the configuration's files again. It logs the files
// that no reload will be able to read.
func (h *service) neededToReread(has caps.Set) caps.Set {
	closed, err := caps.ReadOnlyBy(caps.DACOverride|caps.DACReadSearch, h.flags.loaded.Files)
	switch {
	case err != nil:
		h.log.Warn("whether a reload can read the configuration again is unknown", "err", err)
	case len(closed) == 0:
	case has.Has(caps.DACReadSearch):
		h.log.Info("CAP_DAC_READ_SEARCH is kept, since a reload reads these files only with it; where this user "+
			"may read them, such as in /etc/penstock, it is dropped",
			"uid", os.Getuid(), "files", closed)
		return caps.DACReadSearch
	default:
		h.log.Warn("a reload will not be able to read these files again: the privilege that read them is dropped; "+
			"let this user read them and search their directories",
			"uid", os.Getuid(), "files", closed)
	}
	return 0
}

// explainKept says in words why privileges could not be dropped, and the cure.
func explainKept(err error) string {
	if errors.Is(err, caps.ErrForeignProc) {
		return "/proc belongs to another PID namespace; mount one for this namespace, or build with CGO_ENABLED=0"
	}
	if errors.Is(err, syscall.EPERM) {
		return "a system call filter forbids it; allow capset (under systemd: SystemCallFilter=capset, after the " +
			"other filters)"
	}
	return "the kernel refused"
}

// recentUse is the time since its last byte within which a flow counts as a user of a link.
const recentUse = time.Second

// fleetCounts returns the state of the fleet for telemetry.
func (h *service) fleetCounts() telemetry.FleetCounts {
	s := h.fleet.Status()
	c := telemetry.FleetCounts{
		Decides: s.Decides, Sent: s.Sent, Received: s.Received, Refused: s.Refused, Remembered: s.Remembered,
	}
	for _, m := range s.Members {
		if m.Live {
			c.Live++
		} else {
			c.Silent++
		}
	}
	for _, l := range s.Limits {
		if l.Granted {
			c.Granted++
		} else {
			c.Parts++
		}
	}
	return c
}

// openFleet makes this process an edge of the fleet, if the configuration has one. It does not listen if there is a
// predecessor, which has the port until it ends.
func (h *service) openFleet() (err error) {
	if !h.cfg.Fleet.IsOn() {
		return nil
	}
	h.fleet, err = fleet.NewFleet(fleet.Config{
		Settings: h.cfg.Fleet, Flows: &h.flows, Clock: monotonicTime, Start: started, Log: h.log,
	})
	if err == nil && h.predecessor == nil {
		err = h.fleet.Listen()
	}
	return err
}

// openSources opens the interfaces of the configuration that give hints.
func (h *service) openSources() error {
	for _, s := range h.cfg.Hints {
		source, err := linkstat.Open(linkstat.Config{
			Interface: s.Interface, Prefixes: s.Prefix, Capacity: s.Capacity, Interval: s.Every(),
			Clock: monotonicTime, Users: h.linkUsers, Hint: h.proxy.Hint, Log: h.log,
		})
		if err != nil {
			h.closeSources()
			return err
		}
		h.sources = append(h.sources, source)
	}
	return nil
}

// readSources reads the interfaces that give hints at their intervals, until ctx is done. Then it closes them.
func (h *service) readSources(ctx context.Context) {
	var all sync.WaitGroup
	for _, s := range h.sources {
		all.Go(func() { s.Run(ctx) })
	}
	all.Wait()
	h.closeSources()
}

// closeSources closes the interfaces that give hints.
func (h *service) closeSources() {
	for _, s := range h.sources {
		s.Close()
	}
}

// linkUsers returns the number of flows and hosts in prefixes that have moved a byte within recentUse. They share the
// capacity of a link.
func (h *service) linkUsers(prefixes []netip.Prefix) linkstat.Users {
	flows, hosts := h.proxy.CountFlowsTo(prefixes, recentUse)
	return linkstat.Users{Flows: flows, Hosts: hosts}
}

// sourceStats returns how readings of the interfaces went, for telemetry.
func (h *service) sourceStats() []telemetry.HintSource {
	out := make([]telemetry.HintSource, len(h.sources))
	for i, s := range h.sources {
		out[i] = telemetry.HintSource(s.Stats())
	}
	return out
}

// hintNews logs that the hints about a group are no longer believed, or are again.
func (h *service) hintNews(n flow.HintNews) {
	log, words := h.log.Warn, "hints are doubted: they say more than is delivered"
	switch n.Doubt {
	case flow.HintTooLow:
		words = "hints are doubted: they say less than is delivered without a queue"
	case "":
		log, words = h.log.Info, "hints are believed again"
	}
	log(words, "group", n.Group, "algorithm", n.Algorithm, "told_bits_per_second", int64(n.Claimed),
		"delivered_bits_per_second", int64(n.Delivered), "believed_bits_per_second", int64(n.Believed))
}
