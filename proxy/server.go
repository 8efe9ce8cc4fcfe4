// Package proxy splits TCP connections in two and moves the bytes of each
// direction as fast as its congestion controller grants. It decides nothing
// about rates: policy names the terms, package flow holds them.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Parts are what a Server is put together from.
type Parts struct {
	Clock func() cc.Time
	Flows *flow.Manager
	// Dial calls done once the leg is there, or cannot be had; see kernel.Datapath.Connect.
	Dial func(cfg kernel.DialConfig, done func(datapath.Conn, error)) (cancel func())
	Open func(WayConfig) (Way, error) // opens a listener; the Server closes it
	// Local reports whether an address is this machine's. nil: as the kernel's routes say.
	Local func(netip.Addr) (bool, error)
	// UnenforcedLegs counts the legs for which there was no room among those whose windows the kernel enforces; nil:
	// nobody does.
	UnenforcedLegs func() uint64
	// Addresses returns those of this machine's interfaces. nil: as the kernel says.
	Addresses func() ([]netip.Addr, error)
	Log       *slog.Logger // nil: silent
}

// Server accepts, splits and relays connections.
type Server struct {
	parts     Parts
	log       *slog.Logger
	clock     func() cc.Time
	limits    limiter
	limitsMet limitLog
	loops     *loopGuard
	buffers   *datapath.Buffers
	totals    totals
	lines     lines
	infos     sync.Pool // of *FlowInfo

	inForce   atomic.Pointer[settings]
	reloading sync.Mutex

	draining atomic.Bool
	aborting sync.Once
	aborted  chan struct{} // closed: the drain is over
	handlers sync.WaitGroup
	setters  setupPool

	begin    func(*entrance) // has a way in accept; nil: Serve does not run. reloading guards it
	retiring sync.WaitGroup  // ways in that a reload has left out

	mu      sync.Mutex
	nextID  uint64
	conns   connectionList
	retired map[*listenerState]struct{} // listeners whose connections go on, and that are not in force
}

// trustsPeer reports whether a peer opens with a PROXY header, so that whom it
// counts against is not known before.
func (l *listenerState) trustsPeer(peer netip.Addr) bool {
	return policy.Contains(l.cfg.ProxyProtocol.From, peer)
}

// New puts a Server together. Connections are limited to what the process's
// descriptors allow, whatever the configuration says.
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
		parts: parts, log: parts.Log, clock: parts.Clock, loops: newLoopGuard(parts.Local),
		buffers: datapath.NewBuffers(cfg.Limits.Memory),
		infos:   sync.Pool{New: func() any { return new(FlowInfo) }},
		retired: map[*listenerState]struct{}{}, aborted: make(chan struct{}), setters: newSetters(),
	}
	s.inForce.Store(&settings{})
	if _, err := s.applyConfig(cfg); err != nil {
		return nil, err
	}
	return s, nil
}

// Serve accepts connections until ctx is done, then drains: connections may go
// on for the configured time and are then reset. Then it closes the listeners and
// returns when everything it started has ended; nil after a shutdown.
func (s *Server) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var accepting sync.WaitGroup
	s.reloading.Lock()
	s.begin = func(e *entrance) {
		e.accepting = make(chan struct{})
		accepting.Go(func() {
			defer close(e.accepting)
			if err := s.acceptFrom(e); err != nil {
				cancel(err)
			}
		})
	}
	for _, l := range s.currentSettings().listeners {
		s.begin(l.entrance)
	}
	s.reloading.Unlock()
	sweeping := make(chan struct{})
	var sweeps sync.WaitGroup
	sweeps.Go(func() { s.sweepConnections(sweeping) })
	sweeps.Go(func() { s.watchAddresses(sweeping) })

	<-ctx.Done()
	s.reloading.Lock() // no listener comes or goes from now on
	s.draining.Store(true)
	for _, l := range s.currentSettings().listeners {
		l.Drain()
	}
	s.reloading.Unlock()
	accepting.Wait()
	s.drainConnections()
	s.retiring.Wait()
	// Only now: what ends a tunnel carries its connections, and their resets.
	var closing sync.WaitGroup
	for _, l := range s.currentSettings().listeners {
		closing.Go(func() { _ = l.Close() })
	}
	closing.Wait()
	close(sweeping)
	sweeps.Wait()
	s.setters.waitForAll()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, ctx.Err()) {
		return err
	}
	return nil
}

// acceptFrom takes the connections of a way in until it is drained.
func (s *Server) acceptFrom(e *entrance) error {
	err := e.Serve(func(conn datapath.Conn) {
		l := e.now.Load()
		l.taken.Add(1)
		if reason, ok := s.admitConn(l, conn); !ok {
			l.refused.countRejection(reason)
			s.noteRefusal(l.cfg.Name, reason)
			s.logLimited(l, addrPort(conn.RemoteAddr()), reason)
			_ = conn.Reset()
		}
	})
	if s.draining.Load() || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) {
		return nil
	}
	return fmt.Errorf("proxy: %w", err)
}

// admitConn sets a connection up unless a limit is in the way. It does not wait.
func (s *Server) admitConn(l *listenerState, conn datapath.Conn) (Reason, bool) {
	if reason, ok := s.limits.admitConnection(&l.share); !ok {
		return reason, false
	}
	var counted *client
	if !l.trustsPeer(addrPort(conn.RemoteAddr()).Addr()) {
		if counted = s.limits.enterSource(l.sourceOf(conn)); counted == nil {
			s.limits.releaseConnection(&l.share)
			return RejectedSourceLimit, false
		}
	}
	c := &connection{
		srv: s, listener: l, started: s.clock(),
		accepted: conn, state: StateGreeting, counted: counted,
	}
	c.active.Store(int64(c.started))
	s.mu.Lock()
	s.nextID++
	c.id = s.nextID
	s.conns.addConnection(c)
	s.mu.Unlock()
	l.handlers.Add(1)
	s.handlers.Add(1)
	c.prompt = l.Prompt(conn)
	c.mayWait(func() { s.greetAndDial(c) })
	return "", true
}

// greetAndDial greets the client and dials the server; connected goes on.
func (s *Server) greetAndDial(c *connection) {
	if r := c.greetClient(); r != nil {
		s.onRejected(c, r)
		return
	}
	c.decidedBy = s.currentSettings()
	began := s.clock()
	c.dialServer(func(server datapath.Conn, err error) {
		if err == nil {
			c.listener.dial.Observe(s.clock().Sub(began))
		}
		c.mayWait(func() { s.onDialled(c, server, err) })
	})
}

// mayWait runs f where it may wait for the client, unless the client is not asked.
func (c *connection) mayWait(f func()) {
	if c.prompt {
		f()
		return
	}
	c.srv.setters.runSetup(f)
}

// onDialled brings a connection whose dial is over to where it is relayed.
func (s *Server) onDialled(c *connection, server datapath.Conn, err error) {
	r := c.attachServer(server, err)
	switch {
	case r != nil:
		s.onRejected(c, r)
	case len(c.prospects) == 1:
		s.startRelaying(c)
	default:
		s.setters.runSetup(func() {
			if r := c.decideByName(); r != nil {
				s.onRejected(c, r)
				return
			}
			s.startRelaying(c)
		})
	}
}

// startRelaying has the connection be relayed.
func (s *Server) startRelaying(c *connection) {
	c.prospects = nil
	if c.verdict.KeepDSCP {
		c.carryDSCP()
	}
	if err := c.openDirections(); err != nil { // only a bug in the policy check can cause it
		c.tearDown(Cause{ProxySide, ClosedError}, err)
		c.closeLegs()
		s.onRejected(c, &rejection{RejectedDialError, err})
		return
	}
	c.opened = s.clock()
	c.listener.setup.Observe(c.opened.Sub(c.started))
	s.totals.countOpened(c)
	c.mu.Lock()
	if c.state == StateDialing {
		c.state = StateOpen
	}
	c.cancel = nil
	c.mu.Unlock()
	c.applyCurrentRules(&Reloaded{}) // a reload since it was decided about has passed it over
	if c.peerIsRevoked() {
		c.tearDown(Cause{ProxySide, ClosedRevoked}, nil)
	}
	c.startRelay(func() {
		s.onClosed(c)
		s.releaseConnection(c)
	})
}

// onClosed accounts for a relayed connection that is over.
func (s *Server) onClosed(c *connection) {
	c.mu.Lock()
	cause, err := c.cause, c.causeErr
	c.mu.Unlock()
	c.closeLegs()
	last := s.infos.Get().(*FlowInfo)
	defer s.infos.Put(last)
	c.fillInfo(last, s.clock()) // after close, since a leg's last report comes with it
	s.mu.Lock()
	s.conns.removeConnection(c) // in one step with the totals: no byte is counted twice or not at all
	s.totals.countClosed(c, last, cause, s.clock().Sub(c.opened))
	s.mu.Unlock()
	s.logClosed(last, cause, err)
}

func (s *Server) onRejected(c *connection, r *rejection) {
	if c.stopped.Load() {
		c.mu.Lock()
		switch c.cause.How {
		case ClosedShutdown:
			r.reason = RejectedShutdown
		case ClosedRevoked:
			r.reason = RejectedRevoked
		}
		c.mu.Unlock()
	}
	c.listener.refused.countRejection(r.reason)
	s.noteRefusal(c.listener.cfg.Name, r.reason)
	s.logRejected(c, r)
	s.releaseConnection(c)
}

// releaseConnection gives back what admit and dial took.
func (s *Server) releaseConnection(c *connection) {
	s.mu.Lock()
	s.conns.removeConnection(c)
	s.mu.Unlock()
	if c.captured {
		s.loops.forgetCaptured(c.clientWire())
	}
	if c.dialled {
		s.loops.forgetDialled(serverWire(c.server.conn))
	}
	if c.counted != nil {
		s.limits.leaveSource(c.counted)
	}
	s.limits.releaseConnection(&c.listener.share)
	c.listener.handlers.Done()
	s.handlers.Done()
}

// drainReport is how often a drain tells how many connections are left.
const drainReport = 5 * time.Second

// drainConnections waits for the connections to end, and resets those that do not in time.
func (s *Server) drainConnections() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.handlers.Wait()
	}()
	limit := s.currentSettings().cfg.Shutdown.Drain
	began := s.clock()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	progress := time.NewTicker(drainReport)
	defer progress.Stop()
	if n := len(s.liveConnections()); n > 0 {
		s.log.Info("draining: no new connections", "open", n, "for_at_most", limit)
	}
	for {
		select {
		case <-done:
			return
		case <-progress.C:
			s.log.Info("draining", "open", len(s.liveConnections()), "remaining", limit-s.clock().Sub(began))
		case <-deadline.C:
			s.log.Info("drain is over: resetting what is left", "open", len(s.liveConnections()))
			s.Abort()
		case <-s.aborted:
			// Reset, so that nobody takes a cut transfer for a whole one.
			for _, c := range s.liveConnections() {
				c.tearDown(Cause{ProxySide, ClosedShutdown}, nil)
			}
			<-done
			return
		}
	}
}

// Abort ends the drain of a Serve that was told to end, now or when it begins.
func (s *Server) Abort() { s.aborting.Do(func() { close(s.aborted) }) }

// Ready reports whether the server accepts connections.
func (s *Server) Ready() bool { return !s.draining.Load() }

// Health names the listeners that clients do not reach at present, and why; nil:
// they reach all.
func (s *Server) Health() error {
	var failed []error
	for _, l := range s.currentSettings().listeners {
		if err := l.Health(); err != nil {
			failed = append(failed, fmt.Errorf("listener %q: %w", l.cfg.Name, err))
		}
	}
	return errors.Join(failed...)
}

// Addrs returns where the listeners listen, by name.
func (s *Server) Addrs() map[string]net.Addr {
	out := map[string]net.Addr{}
	for _, l := range s.currentSettings().listeners {
		out[l.cfg.Name] = l.Addr()
	}
	return out
}
