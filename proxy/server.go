package proxy

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/destination"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Server accepts, splits and relays connections. New makes one, and Serve runs it once. The other methods may be
// called at any time, from any goroutine.
type Server struct {
	env       environment
	limitsMet limitLog
	flows     flowLog
	infos     sync.Pool // of *FlowInfo
	// closedWatcher is called with the last state of each relayed connection; nil: there is none.
	closedWatcher atomic.Pointer[func(*FlowInfo)]
	freeConns     sync.Pool // of *connection; newConnection says what they keep

	draining atomic.Bool
	drainEnd atomic.Int64 // a cc.Time; 0: it does not drain, or without end
	aborting sync.Once
	aborted  chan struct{} // closed: the drain is over
	handlers sync.WaitGroup

	reloading sync.Mutex     // guards changes of env.inForce, and beginAccepting
	retiring  sync.WaitGroup // listeners that a reload has left out
	// beginAccepting starts to accept from a listener. nil: Serve does not run.
	beginAccepting func(*openListener)

	mu      sync.Mutex // guards what follows
	nextID  uint64
	conns   connectionList
	retired map[*listenerState]struct{} // listeners that drain and are not in force
}

// New puts a Server together and opens its listeners. Connections are limited to what the process's
// descriptors allow, whatever the configuration says. A mistake in cfg is a *config.Error, and an address
// that cannot be listened at a *ListenError.
func New(cfg config.Config, parts Parts) (*Server, error) {
	if parts.Log == nil {
		parts.Log = slog.New(slog.DiscardHandler)
	}
	if parts.Local == nil {
		parts.Local = new(ingress.Routes).Local
	}
	if parts.Addresses == nil {
		parts.Addresses = readAddresses
	}
	s := &Server{
		env: environment{
			Parts: parts, loops: newLoopGuard(parts.Local, parts.Clock),
			buffers: datapath.NewBuffers(cfg.Limits.Memory),
			setups:  newSetupPool(),
		},
		flows:   flowLog{log: parts.Log, clock: parts.Clock},
		infos:   sync.Pool{New: func() any { return new(FlowInfo) }},
		retired: map[*listenerState]struct{}{}, aborted: make(chan struct{}),
	}
	s.env.inForce.Store(&settings{})
	if _, err := s.applyConfig(cfg); err != nil {
		return nil, err
	}
	return s, nil
}

// Serve accepts connections until ctx is done, then drains: connections may go
// on for shutdown.drain and are then reset. Then it closes the listeners and
// returns when everything it started has ended. It returns nil after a shutdown.
func (s *Server) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var accepting sync.WaitGroup
	s.reloading.Lock()
	s.beginAccepting = func(e *openListener) {
		e.accepting = make(chan struct{})
		accepting.Go(func() {
			defer close(e.accepting)
			if err := s.acceptFrom(e); err != nil {
				cancel(err)
			}
		})
	}
	for _, l := range s.env.currentSettings().listeners {
		s.beginAccepting(l.openListener)
	}
	s.reloading.Unlock()
	sweeping := make(chan struct{})
	var sweeps sync.WaitGroup
	sweeps.Go(func() { s.sweepConnections(sweeping) })
	sweeps.Go(func() { s.watchAddresses(sweeping) })

	<-ctx.Done()
	s.reloading.Lock() // no listener comes or goes from now on
	s.draining.Store(true)
	for _, l := range s.env.currentSettings().listeners {
		l.Drain()
	}
	s.reloading.Unlock()
	accepting.Wait()
	s.drainConnections()
	s.retiring.Wait()
	// Tunnels are closed last, because they carry their connections, and the resets of these.
	var closing sync.WaitGroup
	for _, l := range s.env.currentSettings().listeners {
		closing.Go(func() { _ = l.Close() })
	}
	closing.Wait()
	close(sweeping)
	sweeps.Wait()
	s.env.setups.waitForAll()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, ctx.Err()) {
		return err
	}
	return nil
}

// acceptFrom takes the connections of a listener until it is drained.
func (s *Server) acceptFrom(e *openListener) error {
	err := e.Serve(func(conn datapath.Conn) {
		l := e.now.Load()
		l.taken.Add(1)
		if reason, ok := s.admitConn(l, conn); !ok {
			l.refused.countRejection(reason)
			s.countMetLimit(l.cfg.Name, reason)
			if s.env.currentSettings().cfg.Log.Flows {
				s.env.Log.Debug("flow refused", "listener", l.cfg.Name, "client", datapath.RemoteOf(conn), "reason", reason)
			}
			_ = conn.Reset()
		}
	})
	if s.draining.Load() || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) {
		return nil
	}
	return fmt.Errorf("proxy: %w", err)
}

// admitConn starts a connection unless it exceeds a limit, which it then returns. It does not wait.
func (s *Server) admitConn(l *listenerState, conn datapath.Conn) (Reason, bool) {
	if reason, ok := s.env.limits.admitConnection(&l.share); !ok {
		return reason, false
	}
	var counted *client
	if !l.trustsPeer(datapath.RemoteOf(conn).Addr()) {
		if counted = s.env.limits.enterSource(l.sourceOf(conn)); counted == nil {
			s.env.limits.releaseConnection(&l.share)
			return RejectedSourceLimit, false
		}
	}
	c := s.newConnection()
	c.env, c.listener, c.started, c.client.conn, c.counted = &s.env, l, s.env.Clock(), conn, counted
	c.active.Store(int64(c.started))
	s.mu.Lock()
	s.nextID++
	c.id = s.nextID
	s.conns.addConnection(c)
	s.mu.Unlock()
	l.handlers.Add(1)
	s.handlers.Add(1)
	c.startGreeting()
	return "", true
}

// newConnection returns a connection. It uses memory that a connection has given back, if there is any.
func (s *Server) newConnection() *connection {
	if c, ok := s.freeConns.Get().(*connection); ok {
		return c
	}
	c := &connection{}
	c.funcs = &connectionFuncs{
		onEnd: func(r *rejection) { s.onConnectionEnd(c, r) },
		giveBack: func() {
			kernel.Recycle(c.client.conn, c.server.conn)
			*c = connection{funcs: c.funcs}
			s.freeConns.Put(c)
		},
		onLegEvent: c.onLegEvent, onTimeout: c.onTimeout, onDialed: c.onOutsideDialled, permit: c.permitOutside,
	}
	return c
}

// onConnectionEnd counts and forgets a connection that is over. r is why it was not relayed; nil: it was.
func (s *Server) onConnectionEnd(c *connection, r *rejection) {
	if r == nil {
		s.countClosed(c)
	} else {
		s.countRejected(c, r)
	}
	s.mu.Lock()
	s.conns.removeConnection(c)
	seen := c.seen
	s.mu.Unlock()
	c.releaseCounts()
	c.listener.handlers.Done()
	s.handlers.Done()
	// If no walk, flow, receive bound or goroutine refers to the connection, only the loop of its legs does. The legs have
	// ended, so the event that is posted here is the last one. It gives the memory back.
	if r == nil && !seen && c.onLoop && !c.endsOutside && c.down.isUnmanaged() && c.up.isUnmanaged() {
		c.recyclable.Store(true)
		c.driver.Post()
	}
}

// countClosed closes a connection that was relayed, and moves its counts into the totals.
func (s *Server) countClosed(c *connection) {
	cause, err := c.finalCause()
	c.closeLegs()
	c.setPhase(closed)
	last := s.infos.Get().(*FlowInfo)
	defer s.infos.Put(last)
	c.fillInfo(last, s.env.Clock()) // the last report of a leg comes when it is closed
	s.mu.Lock()
	s.conns.removeConnection(c) // in one step with the totals: no byte is counted twice or not at all
	s.env.totals.countClosed(c.route, c.peer, last, cause, s.env.Clock().Sub(c.opened))
	s.mu.Unlock()
	if watch := s.closedWatcher.Load(); watch != nil {
		(*watch)(last)
	}
	if s.env.currentSettings().cfg.Log.Flows {
		s.flows.logClosed(last, cause, err)
	}
}

// countRejected counts a connection that was not relayed.
func (s *Server) countRejected(c *connection, r *rejection) {
	c.explainRejection(r)
	c.listener.refused.countRejection(r.reason)
	s.countMetLimit(c.listener.cfg.Name, r.reason)
	if s.env.currentSettings().cfg.Log.Flows {
		last := s.infos.Get().(*FlowInfo)
		defer s.infos.Put(last)
		c.fillInfo(last, s.env.Clock())
		s.flows.logRejected(last, r)
	}
}

// drainReport is the time between two log lines about the connections that are left.
const drainReport = 5 * time.Second

// drainDeadline returns a channel that receives once connections have drained for limit, shutdown.drain. 0: never.
func drainDeadline(limit time.Duration) (expired <-chan time.Time, stop func() bool) {
	if limit == 0 {
		return nil, func() bool { return false }
	}
	t := time.NewTimer(limit)
	return t.C, t.Stop
}

// closedAfter returns a channel that is closed once all of a group have ended.
func closedAfter(group *sync.WaitGroup) <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		group.Wait()
		close(ended)
	}()
	return ended
}

// drainWords says how much of a drain of limit is left after elapsed.
func drainWords(limit, elapsed time.Duration) string {
	if limit == 0 {
		return "as long as they last"
	}
	return (limit - elapsed).String()
}

// DrainLeft returns how long connections may still go on while the Server drains; 0: as long as they last.
func (s *Server) DrainLeft() time.Duration {
	end := cc.Time(s.drainEnd.Load())
	if end == 0 {
		return 0
	}
	return max(time.Millisecond, end.Sub(s.env.Clock()))
}

// drainConnections waits for the connections to end, and resets those that do not in time.
func (s *Server) drainConnections() {
	done := closedAfter(&s.handlers)
	limit := s.env.currentSettings().cfg.Shutdown.Drain
	began := s.env.Clock()
	expired, stop := drainDeadline(limit)
	defer stop()
	progress := time.NewTicker(drainReport)
	defer progress.Stop()
	if limit > 0 {
		s.drainEnd.Store(int64(began.Add(limit)))
	}
	if n := len(s.liveConnections()); n > 0 {
		s.env.Log.Info("draining: no new connections", "open", n, "for_at_most", drainWords(limit, 0))
	}
	for {
		select {
		case <-done:
			return
		case <-progress.C:
			s.env.Log.Info("draining", "open", len(s.liveConnections()), "remaining",
				drainWords(limit, s.env.Clock().Sub(began)))
		case <-expired:
			s.env.Log.Info("drain is over: resetting what is left", "open", len(s.liveConnections()))
			s.Abort()
		case <-s.aborted:
			// A reset shows both ends that the transfer is not complete.
			for _, c := range s.liveConnections() {
				c.tearDown(Cause{ProxySide, ClosedShutdown}, nil)
			}
			<-done
			return
		}
	}
}

// Abort ends the drain of Serve, now or when it begins.
func (s *Server) Abort() { s.aborting.Do(func() { close(s.aborted) }) }

// Reload puts cfg into force for new connections, and decides again about the
// running ones, by what was known when they were let in: their flows move to
// their new terms. Listeners come, go and change.
//
// A configuration is refused as a whole, and nothing changes, if it has a mistake or changes what cannot change while
// running, with a *config.Error that names the key, and if a listener cannot be opened.
func (s *Server) Reload(cfg config.Config) (Reloaded, error) {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	if s.draining.Load() {
		return Reloaded{}, errEnding
	}
	if err := cfg.Validate(); err != nil {
		return Reloaded{}, err
	}
	if err := s.env.currentSettings().cfg.CheckReload(cfg); err != nil {
		return Reloaded{}, err
	}
	return s.applyConfig(cfg)
}

var errEnding = errors.New("proxy: it is ending")

// applyConfig puts a configuration into force. The caller holds reloading.
func (s *Server) applyConfig(cfg config.Config) (Reloaded, error) {
	rules, err := cfg.Policy()
	if err != nil {
		return Reloaded{}, fmt.Errorf("proxy: %w", err)
	}
	counts := map[string]*listenerTotals{}
	for _, l := range s.allListeners() {
		if counts[l.cfg.Name] == nil {
			counts[l.cfg.Name] = l.listenerTotals
		}
	}
	s.mu.Lock()
	draining := slices.Collect(maps.Keys(s.retired))
	s.mu.Unlock()
	plan, err := newReloadPlan(&s.env, s.env.currentSettings(), &cfg, draining, counts)
	if err != nil {
		return Reloaded{}, err
	}
	most, addresses := map[*share]int{}, []netip.AddrPort(nil)
	for _, l := range plan.listeners {
		most[&l.share] = l.cfg.Connections
		addresses = append(addresses, datapath.AddrPortOf(l.Addr()))
	}
	s.env.limits.applyLimits(cfg, most)
	s.env.loops.setListeners(addresses)
	// The settings are stored before the walk over the connections. One that is not relayed yet is skipped there, and
	// calls applyCurrentRules itself once it is.
	s.env.inForce.Store(&settings{
		cfg: cfg, policy: rules, listeners: plan.listeners, loops: s.env.loops, local: s.env.Local,
	})
	s.commitPlan(plan)
	s.env.totals.dropStale(&cfg)
	done := Reloaded{Opened: len(plan.opened), Closing: len(plan.gone)}
	for _, c := range s.liveConnections() {
		if c.isPeerRevoked() {
			done.Revoked++
			c.tearDown(Cause{ProxySide, ClosedRevoked}, nil)
			continue
		}
		c.applyCurrentRules(&done)
	}
	return done, nil
}

// commitPlan puts the changes of listeners into force, accepts from new ones and drains those that go.
func (s *Server) commitPlan(p *reloadPlan) {
	for _, l := range p.listeners {
		l.now.Store(l)
	}
	for _, commit := range p.commits {
		commit()
	}
	for _, l := range p.listeners {
		for _, h := range servedUDP(l) { // rules have changed
			h.holder.Reconsider()
		}
	}
	for _, l := range p.gone {
		s.drainListener(l)
	}
	for _, l := range p.opened {
		if s.beginAccepting == nil {
			continue // Serve will
		}
		s.env.Log.Info("listening", "listener", l.cfg.Name, "mode", l.cfg.Mode, "address", l.Addr().String())
		s.beginAccepting(l.openListener)
	}
}

// servedUDP returns the directions of UDP that are held for a listener.
func servedUDP(l *listenerState) []*heldUDP {
	if w, ok := l.Listener.(*socketListener); ok && len(w.held) > 0 && w.held[0].holder != nil {
		return w.held
	}
	return nil
}

// drainListener drains a listener that a reload has left out: its connections may go on for
// shutdown.drain, and are then reset. Then it is closed.
func (s *Server) drainListener(l *listenerState) {
	l.Drain()
	if l.accepting == nil {
		_ = l.Close()
		return
	}
	s.mu.Lock()
	s.retired[l] = struct{}{}
	s.mu.Unlock()
	limit := s.env.currentSettings().cfg.Shutdown.Drain
	s.env.Log.Info("listener drains: it takes no new connections", "listener", l.cfg.Name, "address", l.Addr().String(),
		"for_at_most", drainWords(limit, 0))
	s.retiring.Go(func() {
		<-l.accepting
		ended := closedAfter(&l.handlers)
		expired, stop := drainDeadline(limit)
		defer stop()
		select {
		case <-ended:
		case <-s.aborted: // all connections are being reset
		case <-expired:
			for _, c := range s.liveConnections() {
				if c.listener.openListener == l.openListener {
					c.tearDown(Cause{ProxySide, ClosedShutdown}, nil)
				}
			}
		}
		<-ended
		_ = l.Close()
		s.env.Log.Info("listener is closed", "listener", l.cfg.Name)
		s.mu.Lock()
		delete(s.retired, l)
		s.mu.Unlock()
	})
}

// allListeners returns those in force, and then those that have been left out or renamed and that have connections.
func (s *Server) allListeners() []*listenerState {
	all := slices.Clone(s.env.currentSettings().listeners)
	for _, c := range s.liveConnections() {
		if !slices.ContainsFunc(all, func(l *listenerState) bool { return l.cfg.Name == c.listener.cfg.Name }) {
			all = append(all, c.listener)
		}
	}
	return all
}

// sweepMin and sweepMax bound the time between two sweeps over all connections.
const (
	sweepMin = 50 * time.Millisecond
	sweepMax = 5 * time.Second
)

// sweepConnections looks for timeouts of connections, and for limits that are met, until done is closed.
func (s *Server) sweepConnections(done <-chan struct{}) {
	period := s.currentTimeouts().period
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
		}
		t := s.currentTimeouts()
		if t.period != period {
			period = t.period
			ticker.Reset(period)
		}
		s.warnOfLimits()
		now := s.env.Clock()
		for _, c := range s.liveConnections() {
			c.checkTimeouts(now, t)
		}
	}
}

// currentTimeouts returns the timeouts in force, and the time between two sweeps: an eighth of the shortest timeout.
func (s *Server) currentTimeouts() timeouts {
	limits := s.env.currentSettings().cfg.Limits
	t := timeouts{idle: limits.IdleTimeout, halfClosed: limits.HalfClosedTimeout, period: sweepMax}
	for _, d := range []time.Duration{t.idle, t.halfClosed} {
		if d > 0 {
			t.period = min(t.period, d/8)
		}
	}
	t.period = max(t.period, sweepMin)
	return t
}

const (
	// addressGrace is how long an address may be gone before its connections are reset. A link that flaps, or a
	// lease that is renewed, brings it back in less.
	addressGrace  = 30 * time.Second
	addressPeriod = 2 * time.Second // how often the machine's addresses are read
)

// readAddresses returns the addresses of this machine's interfaces.
func readAddresses() ([]netip.Addr, error) {
	nets, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	addrs := make([]netip.Addr, 0, len(nets))
	for _, n := range nets {
		if ip, ok := n.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(ip.IP); ok {
				addrs = append(addrs, addr.Unmap())
			}
		}
	}
	return addrs, nil
}

// addressWatch finds addresses that leave the machine. Addresses that it never had, such as the foreign ones
// of transparent sockets, do not leave it. The zero value is ready.
type addressWatch struct {
	present map[netip.Addr]bool
	left    map[netip.Addr]cc.Time
}

// updateAddresses takes the addresses that the machine has now, and returns those that have been gone for
// addressGrace.
func (w *addressWatch) updateAddresses(now cc.Time, addrs []netip.Addr) (gone map[netip.Addr]bool) {
	before := w.present
	w.present = make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		w.present[a] = true
		delete(w.left, a)
	}
	for a := range before {
		if !w.present[a] {
			if w.left == nil {
				w.left = map[netip.Addr]cc.Time{}
			}
			w.left[a] = now
		}
	}
	for a, since := range w.left {
		if now.Sub(since) >= addressGrace {
			if gone == nil {
				gone = map[netip.Addr]bool{}
			}
			gone[a] = true
			delete(w.left, a)
		}
	}
	return gone
}

// watchAddresses resets connections when the own address of a leg has left the machine, until done is closed. Nothing
// arrives there any more, and the kernel would try for a quarter of an hour.
func (s *Server) watchAddresses(done <-chan struct{}) {
	tick := time.NewTicker(addressPeriod)
	defer tick.Stop()
	var watch addressWatch
	for {
		addrs, err := s.env.Addresses()
		if err != nil {
			s.env.Log.Debug("this machine's addresses cannot be read", "err", err)
		} else if gone := watch.updateAddresses(s.env.Clock(), addrs); gone != nil {
			s.resetAddresses(gone)
		}
		select {
		case <-done:
			return
		case <-tick.C:
		}
	}
}

// resetAddresses resets the relayed connections of legs at addresses that are gone. Others have timeouts of their own.
func (s *Server) resetAddresses(gone map[netip.Addr]bool) {
	reset := 0
	for _, c := range s.liveConnections() {
		if at := c.currentPhase(); at != relaying && at != halfClosed {
			continue
		}
		if slices.ContainsFunc(c.ownAddresses(), func(a netip.Addr) bool { return gone[a] }) {
			c.tearDown(Cause{ProxySide, ClosedAddressGone}, nil)
			reset++
		}
	}
	if reset > 0 {
		s.env.Log.Warn("connections are reset: their address on this machine has been gone", "connections", reset,
			"for", addressGrace)
	}
}

// LimitMet counts that a limit of a listener, or a port of telemetry, was met, and warns of it. raise is what raises
// it.
func (s *Server) LimitMet(listener string, reason Reason, raise string) {
	s.limitsMet.addTimes(s.env.Log, s.env.Clock(), metLimit{listener, reason}, 1, raise)
}

// countMetLimit calls LimitMet for a connection that was refused, if reason is a limit.
func (s *Server) countMetLimit(listener string, reason Reason) {
	raise, ok := raises[reason]
	if reason == RejectedGlobalLimit {
		raise, ok = raises[RejectedDescriptors], true
		if s.env.limits.isConfigured() {
			raise = "limits.connections"
		}
	}
	if ok {
		s.LimitMet(listener, reason, raise)
	}
}

// warnOfLimits warns of limits that were met inside tunnels, buffers and the kernel, which only count that.
func (s *Server) warnOfLimits() {
	now := s.env.Clock()
	addGrowth := func(listener string, reason Reason, count uint64) {
		s.limitsMet.addGrowth(s.env.Log, now, metLimit{listener, reason}, count)
	}
	for l, t := range s.tunnels {
		status, _ := t.Status() // its counters are good even with an error
		addGrowth(l.cfg.Name, limitHandshakes, status.Handshakes)
		addGrowth(l.cfg.Name, limitSessions, status.Datagrams.Crowded)
	}
	addGrowth("", limitMemory, s.env.buffers.Short())
	if s.env.UnenforcedLegs != nil {
		addGrowth("", limitWindows, s.env.UnenforcedLegs())
	}
	s.limitsMet.warnOfAll(s.env.Log, now)
}

// Config returns the configuration in force, with its secrets.
func (s *Server) Config() config.Config { return s.env.currentSettings().cfg }

// Ready reports whether the server accepts connections.
func (s *Server) Ready() bool { return !s.draining.Load() }

// Health names the listeners that clients do not reach at present, and why. nil: they reach all.
func (s *Server) Health() error {
	var failed []error
	for _, l := range s.env.currentSettings().listeners {
		if err := l.Health(); err != nil {
			failed = append(failed, fmt.Errorf("listener %q: %w", l.cfg.Name, err))
		}
	}
	return errors.Join(failed...)
}

// Addrs returns the addresses of the listeners, by name.
func (s *Server) Addrs() map[string]net.Addr {
	out := map[string]net.Addr{}
	for _, l := range s.env.currentSettings().listeners {
		out[l.cfg.Name] = l.Addr()
	}
	return out
}

// SetServicePorts sets the ports of this process's own services, which call IsDialled. Call it before Serve.
func (s *Server) SetServicePorts(ports []uint16) { s.env.loops.services = ports }

// IsDialled reports whether a connection that has arrived at a port of SetServicePorts was opened by the proxy for a
// client. It still does so for keepEnded or more after the end of the connection, because a service may read late.
func (s *Server) IsDialled(from, to netip.AddrPort) bool {
	return s.env.loops.isDialled(wireOf(from, to))
}

// tunnels yields the listeners in force that end a tunnel, in the order of the configuration.
func (s *Server) tunnels(yield func(*listenerState, tunnel.Listener) bool) {
	for _, l := range s.env.currentSettings().listeners {
		if t := l.Tunnel(); t != nil && !yield(l, t) {
			return
		}
	}
}

// Tunnels returns the state of the tunnels, in the order of the configuration.
func (s *Server) Tunnels() []TunnelInfo {
	var out []TunnelInfo
	for l, t := range s.tunnels {
		status, err := t.Status()
		if err != nil { // its counters are good
			s.env.Log.Warn("peers of a tunnel cannot be listed", "listener", l.cfg.Name, "err", err)
		}
		out = append(out, TunnelInfo{l.cfg.Name, string(l.cfg.Mode), t.Health() == nil, status})
	}
	return out
}

// Endpoints are the last known addresses of the peers of tunnels, by listener and by
// public key as wg writes it.
type Endpoints map[string]map[string]netip.AddrPort

// Equal reports whether both have the same peers at the same addresses.
func (e Endpoints) Equal(other Endpoints) bool { return maps.EqualFunc(e, other, maps.Equal) }

// Endpoints returns the addresses of peers, including those that Resume was given. The peers of a tunnel that cannot
// list them at present are taken from before.
func (s *Server) Endpoints(before Endpoints) Endpoints {
	all := Endpoints{}
	for l, t := range s.tunnels {
		at := map[string]netip.AddrPort{}
		status, err := t.Status()
		if err != nil || t.Health() != nil {
			maps.Copy(at, before[l.cfg.Name])
		}
		for key, where := range tunnel.Endpoints(status.Peers) {
			at[key.String()] = where
		}
		if len(at) > 0 {
			all[l.cfg.Name] = at
		}
	}
	return all
}

// Resume contacts the peers of tunnels at the addresses where an earlier process heard from
// them last. Peers that the configuration does not have are left out.
func (s *Server) Resume(all Endpoints) {
	for l, t := range s.tunnels {
		at := map[access.Key]netip.AddrPort{}
		for key, where := range all[l.cfg.Name] {
			if k, err := access.ParseKey(key); err == nil && where.IsValid() {
				at[k] = where
			}
		}
		t.Resume(at)
	}
}

// Held returns the state of held UDP, by listener.
func (s *Server) Held() (all []HeldInfo) {
	for _, l := range s.env.currentSettings().listeners {
		for _, h := range servedUDP(l) {
			all = append(all, HeldInfo{
				l.cfg.Name, directionName(h.uplink), h.passedBytes(), h.holder.Stats(), slices.Clone(h.holder.States()),
			})
		}
	}
	return all
}

// HeldPrivilege returns why verdicts about held UDP need CAP_NET_ADMIN of the whole process; nil: they do not.
func (s *Server) HeldPrivilege() (why error) {
	for _, l := range s.env.currentSettings().listeners {
		for _, h := range servedUDP(l) {
			why = errors.Join(why, h.privilege)
		}
	}
	return why
}

// Groups returns the groups of flows by their names, including groups that linger without members, and the
// time that they are as of.
func (s *Server) Groups() ([]flow.Group, cc.Time) {
	now := s.env.Clock()
	return s.env.Flows.Groups(now), now
}

// Hint passes on what the network says about the path to the hosts in p. It
// returns how many groups of flows took it. A group takes it if all its bytes go there:
// it has downloads of clients, or uploads to servers.
func (s *Server) Hint(p netip.Prefix, h cc.Hint) (groups int) { return s.env.Flows.Hint(p, h) }

// CountFlowsTo counts the connections that have moved a byte within lately and send to hosts in any of the prefixes,
// down or up. It counts these hosts, too.
func (s *Server) CountFlowsTo(prefixes []netip.Prefix, lately time.Duration) (flows, hosts int) {
	now := s.env.Clock()
	seen := map[netip.Addr]bool{}
	for _, c := range s.liveConnections() {
		if now.Sub(cc.Time(c.active.Load())) > lately {
			continue
		}
		found := false
		for _, host := range c.destinationHosts() {
			if host.IsValid() && destination.Contains(prefixes, host) {
				found, seen[host] = true, true
			}
		}
		if found {
			flows++
		}
	}
	return flows, len(seen)
}

// Flows returns how many connections live, and each of them, oldest first. The value that each
// yields is overwritten by the next.
func (s *Server) Flows() (n int, each iter.Seq[*FlowInfo]) {
	now, conns := s.env.Clock(), s.liveConnections()
	return len(conns), func(yield func(*FlowInfo) bool) {
		f := new(FlowInfo)
		for i, c := range conns {
			yieldProcessor(i)
			if c.fillInfo(f, now); !yield(f) {
				return
			}
		}
	}
}

// WatchClosed sets a function to call with the last state of each relayed connection that ends from now on. It runs on
// the goroutine that ends the connection, so it must not wait. The value is overwritten when it returns.
func (s *Server) WatchClosed(watch func(*FlowInfo)) { s.closedWatcher.Store(&watch) }

// SetTrial puts a trial into force for connections that begin from now on; nil ends it.
func (s *Server) SetTrial(t *Trial) { s.env.trial.Store(t) }

// Counters returns the totals, with the bytes of live connections. What the kernel or an
// algorithm counts is added when a connection is over; Snapshot adds it earlier.
func (s *Server) Counters() Counters {
	return s.countLive((*connection).fillMoved, func(*FlowInfo) {})
}

// Snapshot returns the totals, with all counts of live connections. It calls
// visit with each of these first, oldest first. The value is overwritten by the next.
func (s *Server) Snapshot(visit func(*FlowInfo)) Counters {
	now := s.env.Clock()
	return s.countLive(func(c *connection, out *FlowInfo) { c.fillInfo(out, now) }, visit)
}

// countLive adds what fill writes about each live connection to the totals, oldest first, and calls visit with it.
func (s *Server) countLive(fill func(*connection, *FlowInfo), visit func(*FlowInfo)) Counters {
	active, sources, limit := s.env.limits.currentCounts()
	out := Counters{Active: active, Sources: sources, Limit: limit, Draining: s.draining.Load()}
	for _, l := range s.allListeners() {
		out.Listeners = append(out.Listeners, ListenerCounters{
			Listener: l.cfg.Name, Mode: string(l.cfg.Mode), Accepted: l.taken.Load(),
			Active: s.env.limits.activeIn(&l.share), Rejected: l.refused.copyCounts(),
			Dial: l.dial.Snapshot(), Setup: l.setup.Snapshot(),
		})
	}
	// A connection moves from the live ones to the totals under s.mu, and only
	// then: it is in exactly one of both here. What it counts after this copy
	// only makes the next one larger.
	conns := s.makeConnectionSlice()
	s.mu.Lock()
	conns = s.conns.appendConnections(conns)
	rows, peers := s.env.totals.copyTotals()
	s.mu.Unlock()
	slices.SortFunc(peers, PeerCounters.compareTo)

	f := new(FlowInfo)
	for i, c := range dropGone(conns) {
		yieldProcessor(i)
		fill(c, f)
		visit(f)
		if !f.Relayed() {
			continue
		}
		if row := rows[c.route.routeKey]; row != nil {
			row.Down.addDirection(&f.Down, &f.Client)
			row.Up.addDirection(&f.Up, &f.Server)
			addRetransmitted(peers, f)
		}
	}
	out.Peers = peers
	for _, k := range slices.SortedFunc(maps.Keys(rows), routeKey.compareTo) {
		out.Routes = append(out.Routes, *rows[k])
	}
	return out
}

// yieldProcessor lets goroutines that wait for a processor run, now and then in a walk over
// all connections. i is the number of the next one. The runtime itself would interrupt the walk
// only after 10 ms.
func yieldProcessor(i int) {
	const every = 64 // connections: a tenth of a millisecond
	if i%every == every-1 {
		runtime.Gosched()
	}
}

// liveConnections returns the connections, oldest first.
func (s *Server) liveConnections() []*connection {
	conns := s.makeConnectionSlice()
	s.mu.Lock()
	conns = s.conns.appendConnections(conns)
	s.mu.Unlock()
	return dropGone(conns)
}

// makeConnectionSlice returns an empty slice with room for all connections, so that no memory is allocated while s.mu
// is held.
func (s *Server) makeConnectionSlice() []*connection {
	s.mu.Lock()
	n := len(s.conns.conns)
	s.mu.Unlock()
	return make([]*connection, 0, n+n/8)
}

// connectionList keeps the live connections in the order of their numbers, so that copying them all
// takes microseconds of the lock that guards it. The zero value is empty.
type connectionList struct {
	ids   []uint64
	conns []*connection // by the same index; nil: gone
	gone  int
}

// minGone is the least number of gone connections at which the lists are compacted. With fewer nothing is gained.
const minGone = 64

// addConnection appends c, which has a greater number than all before.
func (r *connectionList) addConnection(c *connection) {
	r.ids, r.conns = append(r.ids, c.id), append(r.conns, c)
}

// removeConnection takes c out, if it is there.
func (r *connectionList) removeConnection(c *connection) {
	i, there := slices.BinarySearch(r.ids, c.id)
	if !there || r.conns[i] == nil {
		return
	}
	r.conns[i] = nil
	if r.gone++; r.gone >= minGone && 2*r.gone > len(r.conns) {
		r.compactLists()
	}
}

// appendConnections appends all to out, nil for those that are gone, and marks them as seen.
func (r *connectionList) appendConnections(out []*connection) []*connection {
	for _, c := range r.conns {
		if c != nil {
			c.seen = true
		}
	}
	return append(out, r.conns...)
}

// compactLists moves the rest into slices with room for twice as many.
func (r *connectionList) compactLists() {
	n := len(r.conns) - r.gone
	kept := connectionList{ids: make([]uint64, 0, 2*n), conns: make([]*connection, 0, 2*n)}
	for _, c := range r.conns {
		if c != nil {
			kept.addConnection(c)
		}
	}
	*r = kept
}

// dropGone removes the entries of connections that are gone.
func dropGone(conns []*connection) []*connection {
	return slices.DeleteFunc(conns, func(c *connection) bool { return c == nil })
}
