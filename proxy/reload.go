package proxy

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// settings are the configuration in force and what is made of it. They are
// replaced as a whole and never changed.
type settings struct {
	cfg    config.Config
	policy *policy.Policy

	listeners []*listenerState // in the order of cfg
}

// Reloaded is what a Reload did to listeners and running connections.
type Reloaded struct {
	// listeners; those that close take nobody further, and their connections may go on for shutdown.drain
	Opened, Closing int

	Moved   int // directions that send, or whose sender is held, under other terms now
	Kept    int // directions that keep theirs: ours cannot take over from the kernel's own control, or give up to it
	Refused int // connections that go on although new ones like them are refused
	Revoked int // connections that are reset, since their peer has gone from its tunnel
}

// Reload puts cfg into force for new connections, and decides again about the
// running ones, by what was known when they were let in: their flows move to
// their new terms. Listeners come, go and change. What cannot change while running is
// refused, as is a configuration with a mistake, with a *config.Error, and so is one of
// which a listener cannot be opened; then nothing has changed.
func (s *Server) Reload(cfg config.Config) (Reloaded, error) {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	if s.draining.Load() {
		return Reloaded{}, errEnding
	}
	if err := cfg.Validate(); err != nil {
		return Reloaded{}, err
	}
	if err := s.currentSettings().cfg.CheckReload(cfg); err != nil {
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
	change, err := s.planReload(s.currentSettings(), &cfg)
	if err != nil {
		return Reloaded{}, err
	}
	s.limits.applyLimits(cfg, change.listeners)
	s.loops.setListeners(change.listenAddresses())
	// In this order: a connection that is not open yet looks itself, once it is.
	s.inForce.Store(&settings{cfg: cfg, policy: rules, listeners: change.listeners})
	s.commitPlan(change)
	s.totals.dropStale(s.currentSettings())
	done := Reloaded{Opened: len(change.opened), Closing: len(change.gone)}
	for _, c := range s.liveConnections() {
		if c.peerIsRevoked() {
			done.Revoked++
			c.tearDown(Cause{ProxySide, ClosedRevoked}, nil)
			continue
		}
		c.applyCurrentRules(&done)
	}
	return done, nil
}

// Config is the configuration in force, with its secrets.
func (s *Server) Config() config.Config { return s.currentSettings().cfg }

// currentSettings are those in force.
func (s *Server) currentSettings() *settings { return s.inForce.Load() }

// applyCurrentRules puts the terms into force that the present rules give c, unless it
// has them already or is not open yet.
func (c *connection) applyCurrentRules(done *Reloaded) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.srv.currentSettings()
	if c.state == StateGreeting || c.state == StateDialing || c.decidedBy == now {
		return
	}
	c.decidedBy = now
	v := now.policy.Decide(c.decidedOn)
	if v.Refuse != "" {
		done.Refused++
		return
	}
	c.verdict = &v
	for _, each := range []struct {
		d           *direction
		sends, held *flow.Terms
	}{{&c.down, &v.Down, &v.FromServer}, {&c.up, &v.Up, &v.FromClient}} {
		counted := done.Moved + done.Kept
		each.d.applyTerms(each.sends, done)
		moved, err := each.d.reconsiderHold(each.held)
		if err != nil {
			c.srv.log.Error("receive window keeps its terms", "direction", each.d.directionName(), "err", err)
		}
		if moved && done.Moved+done.Kept == counted {
			done.Moved++
		}
	}
}

// applyTerms has d send under other terms. The connection's mu is held.
func (d *direction) applyTerms(t *flow.Terms, done *Reloaded) {
	if reflect.DeepEqual(t, d.terms) || d.finished.Load() {
		return
	}
	if d.free.Load() >= 0 {
		d.terms = t
		d.free.Store(unmanagedAllowance(t))
		done.Moved++
		return
	}
	if t.Algorithm != d.terms.Algorithm && (t.Algorithm == policy.Unmanaged ||
		d.terms.Algorithm == policy.Unmanaged) || d.flow == nil {
		// The kernel's own control has a window of its own by now, or would have none.
		if isManaged(t) || isManaged(d.terms) {
			done.Kept++
		}
		return
	}
	before := d.flow.Snapshot()
	if err := d.flow.Move(d.conn.srv.clock(), *t); err != nil { // the check has found it
		d.conn.srv.log.Error("direction keeps its terms", "direction", d.directionName(),
			"algorithm", t.Algorithm, "err", err)
		done.Kept++
		return
	}
	if t.Algorithm != d.terms.Algorithm {
		d.noteAlgorithmEnd(d.terms.Algorithm, &before)
	}
	d.terms = t
	done.Moved++
}
