package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/linkstat"
	"github.com/penstock-net/penstock/telemetry"
	"github.com/penstock-net/penstock/telemetry/page"
)

func runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the proxy",
		Long: `Run starts the proxy. Without a configuration file it offers SOCKS5 and HTTP
CONNECT on 127.0.0.1:1080, controls both directions with its own algorithm, and needs no
privilege. Flags override the file.

SIGTERM and SIGINT end it: no new connections are taken, open ones may go on for
the time of --drain, and a second signal ends it at once. SIGHUP rereads the
configuration file: running connections go on under the new rules, and what cannot
change while running is refused.`,
		Example: `  penstock run
  penstock run --config /etc/penstock/penstock.yaml
  penstock run --algorithm copa:delta=0.1 --listen 127.0.0.1:3128`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			signal.Ignore(syscall.SIGPIPE)         // who reads the log may go
			rereads := make(chan os.Signal, 1)     // one that waits stands for all that follow
			signal.Notify(rereads, syscall.SIGHUP) // from now on: it would end a proxy that is still starting
			defer signal.Stop(rereads)
			f.locateState(os.Getenv("STATE_DIRECTORY"))
			cfg, err := f.loadConfig(cmd.Flags())
			var mistake *config.Error
			if errors.As(err, &mistake) {
				cfg, err = f.loadLastGood(cmd.Flags(), err)
			}
			if err != nil {
				return badConfig(cmd.ErrOrStderr(), err)
			}
			h := &service{cfg: cfg, flags: f, written: cmd.Flags()}
			h.level.Set(cfg.Log.Level.Level())
			h.log = slog.New(h.events.Handler(newLogger(cmd.ErrOrStderr(), cfg.Log.Format, &h.level).Handler()))
			takeStandardLog(h.log)
			return h.runService(cmd.Context(), rereads)
		},
	}
	f.registerFlags(cmd.Flags())
	return cmd
}

// service is the proxy with all that stands around it.
type service struct {
	cfg     config.Config  // at the start
	flags   runFlags       // likewise
	written *pflag.FlagSet // which of them were given
	log     *slog.Logger
	level   slog.LevelVar // of log
	events  page.Events   // of log, for the page

	flows      flow.Manager
	trace      *telemetry.Trace
	pages      *telemetry.BoundedListener // where telemetry is; nil: nowhere
	probe      *telemetry.BoundedListener // where probes ask for the health alone; nil: nowhere
	hintSocket *telemetry.BoundedListener // the Unix socket for hints; nil: there is none
	hints      telemetry.HintReceiver
	changes    telemetry.Changer
	proxy      *proxy.Kernel

	sources []*linkstat.Source

	reloads   reloads
	endpoints endpointKeeper
	leaving   atomic.Bool // a signal has come
}

// runService builds everything, serves until a signal comes, and takes it down again.
func (h *service) runService(ctx context.Context, rereads <-chan os.Signal) (err error) {
	defer runtime.KeepAlive(newBallast())
	h.log.Info("penstock starts", "version", cli.ReadBuild().Version, "pid", os.Getpid())
	if h.flags.broken != nil {
		h.log.Error("the configuration has a mistake; the last good one is in force until it is mended and reloaded",
			"config", h.flags.config, "last_good", h.flags.lastGood, "err", h.flags.broken)
	}
	for _, w := range h.cfg.Warnings() {
		h.log.Warn(w)
	}
	if err := mayMark(uint32(h.cfg.Mark)); err != nil {
		return err
	}
	if h.flags.trace != "" {
		closeTrace, err := h.openTrace()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, closeTrace()) }()
	}
	if err := h.openTelemetry(); err != nil {
		return err
	}
	h.flows.Seed, h.flows.HintNews = uint64(started.UnixNano()), h.hintNews
	sockets, err := handedOver()
	if err != nil {
		return errors.Join(err, h.closeTelemetry())
	}
	signals := make(chan os.Signal, 2) // from now on: interfaces and rules are to be taken down
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	if h.proxy, err = proxy.Open(ctx, h.cfg, sockets, &h.flows, monotonicTime, h.log); err != nil {
		return errors.Join(h.explainListen(err), h.closeTelemetry())
	}
	roomForTicks(h.proxy.Datapath.Shards())
	h.hints.Pass, h.hints.Clock, h.hints.Log = h.proxy.Hint, monotonicTime, h.log
	h.hints.SetToken(h.cfg.Telemetry.Hints.Token)
	h.changes.SetToken(h.cfg.Telemetry.ChangeToken)
	h.changes.Rules, h.changes.Change = h.currentRules, h.changeAlgorithm
	if err := h.openSources(); err != nil {
		return errors.Join(err, h.proxy.Close(), h.closeTelemetry())
	}
	h.reloads.noteStart(h.flags.loaded.Hash, h.flags.broken)
	h.reloads.noteTaken(h.cfg, h.flags.loaded)
	if h.flags.broken != nil {
		h.reloads.noteRefused(h.flags.wanted)
	}
	h.makeStateDirectory()
	h.resumePeers()
	h.logStart()
	if h.flags.broken == nil {
		h.saveLastGood(h.flags.loaded)
	}
	h.dropPrivileges()
	h.checkStateDirectory()
	return errors.Join(h.serveUntilSignal(ctx, rereads, signals), h.proxy.Close())
}

// newBallast is never written to, so that it occupies no memory, but the garbage collector counts
// it as live. It collects when the heap has grown to twice what is live: without this after a few
// MB, which is every few hundred connections.
func newBallast() []byte {
	var machine unix.Sysinfo_t
	if unix.Sysinfo(&machine) != nil {
		return nil
	}
	ram := uint64(machine.Totalram) * uint64(machine.Unit) //nolint:unconvert // 32 bits on some processors
	return make([]byte, min(16<<20, ram/64))
}

// handedOver are the sockets that systemd listens at for us (sd_listen_fds(3)). What
// connects during a restart waits in them.
func handedOver() (sockets []*net.TCPListener, err error) {
	all, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("take the sockets of LISTEN_FDS: %w", err)
	}
	for i, ln := range all {
		tcp, ok := ln.(*net.TCPListener)
		if !ok {
			return nil, fmt.Errorf("socket %d of LISTEN_FDS does not listen for TCP; "+
				"the socket unit needs ListenStream= and an address", i)
		}
		sockets = append(sockets, tcp)
	}
	return sockets, nil
}

// openTrace starts writing events to the file of --trace.
func (h *service) openTrace() (done func() error, err error) {
	file, err := os.OpenFile(h.flags.trace, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	h.trace = telemetry.NewTrace(file)
	h.flows.Trace = h.trace.Event
	return func() error {
		_ = file.SetWriteDeadline(time.Now().Add(readWithin)) // only a pipe or a terminal has one
		err := errors.Join(h.trace.Close(), file.Close())
		if n := h.trace.Dropped(); n > 0 {
			h.log.Warn("events are missing from the trace: the disk was slow or full", "dropped", n)
		}
		return err
	}, nil
}

// logStart logs what is in use, and what is missing.
func (h *service) logStart() {
	d := h.proxy.Datapath
	attrs := []any{"tier", kernel.Tier, "envelope", d.Envelope(), "windows_held_by", "relay"}
	if control := d.Control(); control != "" {
		attrs = []any{
			"tier", kernel.Tier, "envelope", d.Envelope(), "windows_held_by", "kernel", "control", control,
			"otherwise", d.Beneath(),
		}
	}
	if why := d.Why(); why != "" {
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
	if h.probe != nil {
		h.log.Info("health", "address", h.probe.Addr().String())
	}
	if h.hintSocket != nil {
		h.log.Info("taking hints", "socket", h.cfg.Telemetry.Hints.Socket)
	}
	if h.pages == nil {
		h.log.Info("telemetry is off")
		return
	}
	h.log.Info("telemetry", "page", "http://"+h.pages.Addr().String()+"/", "metrics",
		"http://"+h.pages.Addr().String()+"/metrics", "flows", "http://"+h.pages.Addr().String()+"/flows")
}

// errStoppedAtOnce says that connections were reset because somebody was in a hurry.
var errStoppedAtOnce = errors.New("stopped at once by a second signal; open connections were reset")

// serveUntilSignal runs until a signal or a failure ends it. A second signal does not
// wait for connections that drain.
func (h *service) serveUntilSignal(ctx context.Context, rereads, signals <-chan os.Signal) error {
	asked := ctx.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pagesCtx, endPages := context.WithCancel(context.WithoutCancel(ctx)) // telemetry watches the drain
	var others sync.WaitGroup
	defer others.Wait()
	defer endPages()

	ended := make(chan error, 1)
	go func() { ended <- h.proxy.Serve(ctx) }()
	pagesEnded := make(chan error, 3)
	pages := h.telemetryPages()
	if h.pages != nil {
		others.Go(func() { pagesEnded <- pages.Serve(pagesCtx, h.pages) })
	}
	if h.probe != nil {
		others.Go(func() { pagesEnded <- pages.ServeHealth(pagesCtx, h.probe) })
	}
	if h.hintSocket != nil {
		others.Go(func() { pagesEnded <- h.hints.Serve(pagesCtx, h.hintSocket) })
	}
	others.Go(func() { h.watchHealth(pagesCtx) })
	others.Go(func() { h.keepEndpoints(pagesCtx) })
	others.Go(func() { h.watchFiles(pagesCtx) })
	others.Go(func() { h.runSources(pagesCtx) }) // what drains is still sent by their word
	h.notifySystemd(daemon.SdNotifyReady + "\n" + h.statusLine())

	var delayed <-chan time.Time
	var failed error // of telemetry
	for stopping := false; ; {
		select {
		case <-delayed:
			h.log.Info("no new connections from now on")
			cancel()
		case err := <-ended:
			if err = errors.Join(failed, err); err == nil {
				h.log.Info("penstock ends")
			}
			return err
		case err := <-pagesEnded:
			failed = errors.Join(failed, err)
			cancel()
		case <-asked:
			asked, stopping = nil, true
			h.saveEndpoints()
		case <-rereads:
			h.reloadOnSignal()
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
			h.leaving.Store(true)
			h.saveEndpoints()
			delay := h.proxy.Config().Shutdown.Delay // a reload may have changed it
			h.log.Info("ending", "signal", s.String(), "connections_taken_for", delay)
			h.notifySystemd(daemon.SdNotifyStopping + "\n" + h.statusLine())
			if delay > 0 {
				delayed = time.After(delay)
			} else {
				cancel()
			}
		}
	}
}

// isEnding reports whether the proxy is to end: it drains, or will after shutdown.delay.
func (h *service) isEnding() bool { return h.leaving.Load() || !h.proxy.Ready() }

// datapathLoad is the datapath's, in telemetry's terms.
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

// fallbackCount counts how often the kernel ran Reno on a leg.
func (h *service) fallbackCount() uint64 {
	if k := h.proxy.Datapath.Status().Enforced; k != nil {
		return k.Fallbacks
	}
	return 0
}

// mayMark tries whether our connections can carry the firewall mark, since
// finding out with the first connection would be late.
func mayMark(mark uint32) error {
	if mark == 0 {
		return nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("mark: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is in it
	switch err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("mark %#x needs CAP_NET_ADMIN: run as root, or setcap cap_net_admin+ep on the binary, "+
			"or AmbientCapabilities=CAP_NET_ADMIN in the systemd unit; mark: 0 does without: %w", mark, err)
	case err != nil:
		return fmt.Errorf("mark %#x: %w", mark, err)
	}
	return nil
}

// roomForTicks has Go use a processor more for each tick of the kernel datapath. Its thread keeps one of Go's
// while it waits in the kernel, and where no other is free, Go's monitor looks every 20 µs whether to take it
// away: of a proxy with a thousand paced connections that was a third of the processor time.
func roomForTicks(ticks int) { runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + ticks) }
