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
	committing []func() // each has a listener that stays take clients by its next configuration
	undoing    []func() // each takes one step back
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
	for _, l := range present.listeners {
		if !slices.Contains(stay, l) {
			a.gone = append(a.gone, l)
		}
	}
	for i, cfg := range next.Listeners {
		if old := stay[i]; old != nil {
			err = old.cfg.CheckReload(i, cfg)
		} else {
			err = s.checkRoom(i, cfg)
		}
		if err != nil {
			return nil, err
		}
	}
	for i := range next.Listeners {
		if stay[i] == nil {
			if err := s.planOpening(a, present, next, i); err != nil {
				return nil, err
			}
		}
	}
	for i := range next.Listeners {
		if stay[i] != nil {
			if err := s.planChange(a, present, next, i, stay[i]); err != nil {
				return nil, err
			}
		}
	}
	return a, nil
}

// checkRoom refuses listener i of a configuration while a tunnel has its port or device, be it in force or draining.
func (s *Server) checkRoom(i int, next config.Listener) error {
	s.mu.Lock()
	open := slices.Collect(maps.Keys(s.retired))
	s.mu.Unlock()
	for _, l := range append(open, s.currentSettings().listeners...) {
		if err := l.cfg.CheckRoom(i, next); err != nil {
			return err
		}
	}
	return nil
}

// planOpening opens listener i of next.
func (s *Server) planOpening(a *reloadPlan, present *settings, next *config.Config, i int) error {
	cfg := next.Listeners[i]
	way := wayConfig(next, cfg, DescriptorBudget(next))
	in, err := s.parts.Open(way)
	if err != nil {
		return cannotOpen(i, cfg, present.listeners, err)
	}
	e := &entrance{Way: in}
	a.undoing = append(a.undoing, func() { _ = e.Close() })
	a.listeners[i] = s.newListenerState(e, s.totalsOf(cfg.Name), cfg)
	a.opened = append(a.opened, a.listeners[i])
	s.forwardDatagrams(e, way, next.Mark)
	return nil
}

// planChange tells old what listener i of next changes of it.
func (s *Server) planChange(a *reloadPlan, present *settings, next *config.Config, i int, old *listenerState) error {
	cfg, at := next.Listeners[i], peerEndpoints(old)
	commit, err := old.Apply(wayConfig(next, cfg, DescriptorBudget(next)))
	if err != nil {
		return fmt.Errorf("listeners[%d]: %w", i, err)
	}
	a.committing = append(a.committing, commit)
	a.undoing = append(a.undoing, func() {
		_, _ = old.Apply(wayConfig(&present.cfg, old.cfg, DescriptorBudget(&present.cfg))) // commit has not been called
		if len(at) > 0 {                                                                   // peers come back without their sessions
			old.Tunnel().Resume(at)
		}
	})
	a.listeners[i] = s.newListenerState(old.entrance, s.totalsOf(cfg.Name), cfg)
	return nil
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
// its name, or else a socket that is there.
func findKept(present []*listenerState, next []config.Listener) []*listenerState {
	stay := make([]*listenerState, len(next))
	for _, named := range []bool{true, false} {
		for i := range next {
			for _, l := range present {
				if stay[i] == nil && !slices.Contains(stay, l) && l.cfg.IsSame(next[i]) && (!named || l.cfg.Name == next[i].Name) {
					stay[i] = l
				}
			}
		}
	}
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
		case <-deadline.C:
			s.resetConnections(l)
		}
		<-ended
		_ = l.Close()
		s.log.Info("listener is closed", "listener", l.cfg.Name)
		s.mu.Lock()
		delete(s.retired, l)
		s.mu.Unlock()
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
