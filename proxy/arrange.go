package proxy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// reloadPlan is what becomes of the listeners: all is open, and nothing of it in force.
type reloadPlan struct {
	listeners  []*listenerState // of the next configuration
	opened     []*listenerState
	gone       []*listenerState
	yielded    []*listenerState // of those that are gone: others have their places
	committing []func()         // each has a listener that stays take clients by its next configuration
	resuming   []func()         // each seeks the peers of a tunnel that has taken another's place
	undoing    []func()         // each takes one step back
}

func (a *reloadPlan) undoPlan() {
	for _, back := range slices.Backward(a.undoing) {
		back()
	}
}

// listenAddresses are where the listeners are.
func (a *reloadPlan) listenAddresses() []netip.AddrPort {
	var at []netip.AddrPort
	for _, l := range a.listeners {
		at = append(at, addrPort(l.Addr()))
	}
	return at
}

// planReload opens the listeners of next that are not there, and tells the others what
// changes. After an error all is as before.
func (s *Server) planReload(present *settings, next *config.Config) (_ *reloadPlan, err error) {
	a := &reloadPlan{listeners: make([]*listenerState, len(next.Listeners))}
	defer func() {
		if err != nil {
			a.undoPlan()
		}
	}()
	stay := findKept(present.listeners, next.Listeners)
	before, after := DescriptorBudget(&present.cfg), DescriptorBudget(next)
	for _, l := range present.listeners {
		if !slices.Contains(stay, l) {
			a.gone = append(a.gone, l)
		}
	}
	open := func(i int, cfg config.Listener) error {
		at := s.evictConflicting(cfg)
		for _, old := range a.conflicting(cfg) {
			maps.Copy(at, peerEndpoints(old))
			a.yieldTunnel(old)
		}
		in, err := s.parts.Open(wayConfig(next, cfg, after))
		if err != nil {
			return cannotOpen(i, cfg, present.listeners, err)
		}
		e := &entrance{Way: in, evicted: make(chan struct{}), closed: make(chan struct{})}
		a.undoing = append(a.undoing, func() { _ = e.Close() })
		a.listeners[i] = s.newListenerState(e, s.totalsOf(cfg.Name), cfg)
		a.opened = append(a.opened, a.listeners[i])
		s.forwardDatagrams(e, wayConfig(next, cfg, after), next.Mark)
		if len(at) > 0 { // once it is sure to stay: peers go on with whom they shook hands last
			a.resuming = append(a.resuming, func() { e.Tunnel().Resume(at) })
		}
		return nil
	}
	for i, cfg := range next.Listeners {
		if old := stay[i]; old != nil {
			if err := old.cfg.CheckReload(i, cfg); err != nil {
				return nil, err
			}
		}
	}
	for i, cfg := range next.Listeners {
		if stay[i] == nil && len(a.conflicting(cfg)) == 0 && len(s.drainingFor(cfg)) == 0 {
			if err := open(i, cfg); err != nil {
				return nil, err
			}
		}
	}
	for i, cfg := range next.Listeners {
		old := stay[i]
		if old == nil {
			continue
		}
		at := peerEndpoints(old)
		commit, err := old.Apply(wayConfig(next, cfg, after))
		if err != nil {
			return nil, fmt.Errorf("listeners[%d]: %w", i, err)
		}
		a.committing = append(a.committing, commit)
		a.undoing = append(a.undoing, func() {
			_, _ = old.Apply(wayConfig(&present.cfg, old.cfg, before)) // commit has not been called
			if len(at) > 0 {                                           // peers come back without their sessions
				old.Tunnel().Resume(at)
			}
		})
		a.listeners[i] = s.newListenerState(old.entrance, s.totalsOf(cfg.Name), cfg)
	}
	// At last those that others have to make room for, so that nothing else can fail meanwhile.
	for i, cfg := range next.Listeners {
		if a.listeners[i] == nil {
			if err := open(i, cfg); err != nil {
				return nil, err
			}
		}
	}
	return a, nil
}

// conflicting are those that go and have the port or the device that a tunnel needs.
func (a *reloadPlan) conflicting(next config.Listener) []*listenerState {
	var all []*listenerState
	for _, l := range a.gone {
		if l.cfg.Excludes(next) {
			all = append(all, l)
		}
	}
	return all
}

// yieldTunnel has a tunnel make room for another, until that cannot be opened.
func (a *reloadPlan) yieldTunnel(l *listenerState) {
	retake, err := l.Tunnel().Yield()
	if err != nil {
		return // what is opened then fails, and says why
	}
	a.undoing = append(a.undoing, retake)
	a.yielded = append(a.yielded, l)
}

// totalsOf are those of the listener of a name, or new ones.
func (s *Server) totalsOf(name string) *listenerTotals {
	for _, l := range s.allListeners() {
		if l.cfg.Name == name {
			return l.listenerTotals
		}
	}
	return newListenerTotals()
}

// findKept finds the listener that each of next is already; nil: none. It is the one of
// its name that is at the same place, or else a socket that is there.
func findKept(present []*listenerState, next []config.Listener) []*listenerState {
	stay := make([]*listenerState, len(next))
	claim := func(is func(*listenerState, *config.Listener) bool) {
		for i := range next {
			for _, l := range present {
				if stay[i] == nil && !slices.Contains(stay, l) && l.cfg.SamePlace(next[i]) && is(l, &next[i]) {
					stay[i] = l
				}
			}
		}
	}
	claim(func(l *listenerState, c *config.Listener) bool { return l.cfg.Name == c.Name })
	claim(func(_ *listenerState, c *config.Listener) bool { return !c.Mode.Tunnels() })
	return stay
}

// commitPlan has those that are new accept, and drains those that go.
func (s *Server) commitPlan(a *reloadPlan) {
	for _, l := range a.listeners {
		l.now.Store(l)
	}
	for _, commit := range a.committing {
		commit()
	}
	for _, l := range a.gone {
		s.drainListener(l)
	}
	for _, l := range a.yielded {
		l.endDrain()
	}
	for _, resume := range a.resuming {
		resume()
	}
	for _, l := range a.opened {
		if s.begin == nil {
			continue // Serve will
		}
		s.log.Info("listening", "listener", l.cfg.Name, "mode", l.cfg.Mode, "address", l.Addr().String())
		s.begin(l.entrance)
	}
}

// drainListener drains a listener that a reload has left out: its connections may go on for as
// long as at the end of the proxy, and are then reset. Then it is closed.
func (s *Server) drainListener(l *listenerState) {
	l.Drain()
	if l.accepting == nil {
		_ = l.Close()
		return
	}
	s.mu.Lock()
	s.retired[l] = struct{}{}
	s.mu.Unlock()
	limit := s.currentSettings().cfg.Shutdown.Drain
	s.log.Info("listener drains: it takes no new connections", "listener", l.cfg.Name, "address", l.Addr().String(),
		"for_at_most", limit)
	s.retiring.Go(func() {
		<-l.accepting
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			l.handlers.Wait()
		}()
		deadline := time.NewTimer(limit)
		defer deadline.Stop()
		select {
		case <-ended:
		case <-s.aborted: // all connections are being reset
		case <-l.evicted:
			s.resetConnections(l)
		case <-deadline.C:
			s.resetConnections(l)
		}
		<-ended
		_ = l.Close()
		s.log.Info("listener is closed", "listener", l.cfg.Name)
		s.mu.Lock()
		delete(s.retired, l)
		s.mu.Unlock()
		close(l.closed)
	})
}

// resetConnections resets the connections of a listener.
func (s *Server) resetConnections(l *listenerState) {
	for _, c := range s.liveConnections() {
		if c.listener.entrance == l.entrance {
			c.tearDown(Cause{ProxySide, ClosedShutdown}, nil)
		}
	}
}

// evictConflicting ends the drain of what has the port or the device of a tunnel that is to be opened:
// a peer has one session with a port, so that only one of the two can carry anything. It
// returns where their peers were.
func (s *Server) evictConflicting(by config.Listener) map[access.Key]netip.AddrPort {
	at := map[access.Key]netip.AddrPort{}
	for _, l := range s.drainingFor(by) {
		s.log.Info("listener drains no longer: another takes its place", "listener", l.cfg.Name, "by", by.Name)
		maps.Copy(at, peerEndpoints(l))
		l.endDrain()
		<-l.closed
	}
	return at
}

// drainingFor are the tunnels that drain at the port or device that another needs.
func (s *Server) drainingFor(next config.Listener) (all []*listenerState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.retired {
		if l.cfg.Excludes(next) {
			all = append(all, l)
		}
	}
	return all
}

// peerEndpoints are where the peers of a tunnel are; of those that are not known nobody is
// told, and they find out by themselves. Of a socket there are none.
func peerEndpoints(l *listenerState) map[access.Key]netip.AddrPort {
	if l.Tunnel() == nil {
		return nil
	}
	is, err := l.Tunnel().Status()
	if err != nil {
		return nil
	}
	return tunnel.Endpoints(is.Peers)
}

// allListeners are those in force, and then those that have been left out or renamed and whose connections go on.
func (s *Server) allListeners() []*listenerState {
	all := slices.Clone(s.currentSettings().listeners)
	for _, c := range s.liveConnections() {
		if !slices.ContainsFunc(all, func(l *listenerState) bool { return l.cfg.Name == c.listener.cfg.Name }) {
			all = append(all, c.listener)
		}
	}
	return all
}
