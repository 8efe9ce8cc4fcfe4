package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// reloadPlan is what a new configuration changes of the listeners. Once it is made, all listeners are open and
// nothing of it is in force:
//
//	listener            made by                   undone by          put into force by
//	kept                findKept, changeListener  Listener.Apply     its commit
//	opened              addListener               Listener.Close     serving it
//	gone                -                         -                  draining it
type reloadPlan struct {
	env     *environment
	present *settings                  // in force until the plan is committed
	next    *config.Config             // checked
	counts  map[string]*listenerTotals // of listeners that are present or drain, by name

	listeners []*listenerState // of next, in its order
	opened    []*listenerState
	gone      []*listenerState
	commits   []func() // each lets a listener that stays take clients by next
	undoing   []func() // each undoes one step
}

// newReloadPlan opens the listeners of next that are not open, and applies the changes of the others.
// draining are listeners that are open and not in present. After an error all is as before.
func newReloadPlan(
	env *environment, present *settings, next *config.Config, draining []*listenerState, counts map[string]*listenerTotals,
) (*reloadPlan, error) {
	p := &reloadPlan{
		env: env, present: present, next: next, counts: counts, listeners: make([]*listenerState, len(next.Listeners)),
	}
	if err := p.makeChanges(append(draining, present.listeners...)); err != nil {
		p.undoSteps()
		return nil, err
	}
	return p, nil
}

// makeChanges carries the plan out as far as it can be undone. open are all listeners that are open.
func (p *reloadPlan) makeChanges(open []*listenerState) error {
	kept := findKept(p.present.listeners, p.next.Listeners)
	for _, l := range p.present.listeners {
		if !slices.Contains(kept, l) {
			p.gone = append(p.gone, l)
		}
	}
	for i, cfg := range p.next.Listeners {
		if kept[i] != nil {
			if err := config.CheckListenerReload(i, kept[i].cfg, cfg); err != nil {
				return err
			}
			continue
		}
		for _, l := range open {
			if err := config.CheckRoom(i, l.cfg, cfg); err != nil {
				return err
			}
		}
	}
	// Opening fails most often, so it comes before the changes, which are harder to undo.
	for i := range p.next.Listeners {
		if kept[i] == nil {
			if err := p.addListener(i); err != nil {
				return err
			}
		}
	}
	for i := range p.next.Listeners {
		if kept[i] != nil {
			if err := p.changeListener(i, kept[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// undoSteps undoes all steps, the last one first.
func (p *reloadPlan) undoSteps() {
	for _, back := range slices.Backward(p.undoing) {
		back()
	}
}

// findKept returns, for each listener of next, the present one that it takes over; nil: it must be opened. A present
// one of the same name takes precedence over one that only has the same address.
func findKept(present []*listenerState, next []access.Listener) []*listenerState {
	kept := make([]*listenerState, len(next))
	for _, byName := range []bool{true, false} {
		for i := range next {
			for _, l := range present {
				if kept[i] == nil && !slices.Contains(kept, l) && l.cfg.IsSame(next[i]) && (!byName || l.cfg.Name == next[i].Name) {
					kept[i] = l
				}
			}
		}
	}
	return kept
}

// addListener opens listener i of next.
func (p *reloadPlan) addListener(i int) error {
	cfg := p.next.Listeners[i]
	lc := newListenerConfig(p.next, cfg, DescriptorBudget(p.next))
	in, err := p.env.Open(lc)
	if err != nil {
		return explainOpenError(i, cfg, p.present.listeners, err)
	}
	e := &openListener{Listener: in}
	p.undoing = append(p.undoing, func() { _ = e.Close() })
	p.setListener(i, e)
	p.opened = append(p.opened, p.listeners[i])
	p.env.forwardDatagrams(e, lc, p.next.Mark)
	p.env.holdDatagrams(e, lc)
	return nil
}

// changeListener applies listener i of next to old.
func (p *reloadPlan) changeListener(i int, old *listenerState) error {
	cfg, at := p.next.Listeners[i], old.peerEndpoints()
	commit, err := old.Apply(newListenerConfig(p.next, cfg, DescriptorBudget(p.next)))
	if err != nil {
		return fmt.Errorf("listeners[%d]: %w", i, err)
	}
	p.commits = append(p.commits, commit)
	p.undoing = append(p.undoing, func() { // commit has not been called
		// An error could not be helped: this was in force before.
		_, _ = old.Apply(newListenerConfig(&p.present.cfg, old.cfg, DescriptorBudget(&p.present.cfg)))
		if len(at) > 0 { // peers that were removed come back without their sessions
			old.Tunnel().Resume(at)
		}
	})
	p.setListener(i, old.openListener)
	return nil
}

// setListener sets listener i of next, which counts on from the listener of its name.
func (p *reloadPlan) setListener(i int, e *openListener) {
	cfg := p.next.Listeners[i]
	counts := p.counts[cfg.Name]
	if counts == nil {
		counts = newListenerTotals()
	}
	p.listeners[i] = newListenerState(e, counts, cfg, p.env.Local)
}

// ListenError is why a listener cannot listen at its address, and how to cure that: another socket has the address,
// or this machine does not have it.
type ListenError struct {
	Key     string // of the configuration: listeners[0].address
	Network string // tcp or udp
	Address string
	Owner   string // in words, who has the address that is in use; empty: not known
	Cure    string
	Err     error
}

// InUse reports whether another socket has the address.
func (e *ListenError) InUse() bool { return errors.Is(e.Err, syscall.EADDRINUSE) }

// Error returns the key, what is wrong and the cure.
func (e *ListenError) Error() string {
	host, port, _ := net.SplitHostPort(e.Address) // the check of the configuration has split it before
	what := fmt.Sprintf("port %s (%s %s) is in use", port, e.Network, e.Address)
	switch {
	case !e.InUse():
		what = host + " is not an address of this machine"
	case e.Owner != "":
		what += " by " + e.Owner
	}
	return e.Key + ": " + what + "; " + e.Cure
}

// Unwrap returns the error of the system call.
func (e *ListenError) Unwrap() error { return e.Err }

// explainOpenError returns err as a ListenError, if it is one. i is the listener's number in the configuration, and
// present are the listeners in force.
func explainOpenError(i int, cfg access.Listener, present []*listenerState, err error) error {
	e := &ListenError{Key: fmt.Sprintf("listeners[%d].address", i), Network: cfg.Network(), Address: cfg.Address, Err: err}
	switch {
	case cfg.Address != "" && e.InUse():
		e.Cure = "choose another port, or end what has it"
		if isTunnelPort(cfg, present) {
			e.Cure = "a tunnel has it until its connections have ended; restart the proxy, or choose another port"
		}
	case cfg.Address != "" && errors.Is(err, syscall.EADDRNOTAVAIL):
		e.Cure = "write one that it has, or " + wildcardAddress(cfg.Address) + " for all of them"
	default:
		return fmt.Errorf("listeners[%d]: %w", i, err)
	}
	return e
}

// isTunnelPort reports whether a tunnel in force has the port of a listener.
func isTunnelPort(cfg access.Listener, present []*listenerState) bool {
	_, port, _ := net.SplitHostPort(cfg.Address)
	// The hosts are not compared: either may stand for every address of the machine.
	return slices.ContainsFunc(present, func(l *listenerState) bool {
		_, theirs, _ := net.SplitHostPort(l.cfg.Address)
		return l.cfg.Mode.Tunnels() && theirs == port && l.cfg.Network() == cfg.Network()
	})
}

// wildcardAddress returns the address that stands for all addresses of the machine, with the port of address.
func wildcardAddress(address string) string {
	host, port, _ := net.SplitHostPort(address)
	if addr, err := netip.ParseAddr(host); err == nil && addr.Is4() {
		return net.JoinHostPort("0.0.0.0", port)
	}
	return net.JoinHostPort("::", port)
}
