package proxy

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/hold"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/destination"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Parts are what a Server is put together from. Clock, Flows, Dial and Open are required.
type Parts struct {
	Clock func() cc.Time
	Flows *flow.Manager
	// Dial calls done once the leg is there, or cannot be had; see kernel.Datapath.Connect.
	Dial func(cfg kernel.DialConfig, done func(datapath.Conn, error)) (cancel func())
	Open func(ListenerConfig) (Listener, error) // opens a listener; the Server closes it
	// Local reports whether an address is this machine's. nil: as the kernel's routes say.
	Local func(netip.Addr) (bool, error)
	// UnenforcedLegs counts the legs that found no room among those that the kernel enforces windows of. nil: the
	// kernel enforces none.
	UnenforcedLegs func() uint64
	// Addresses returns those of this machine's interfaces. nil: as the kernel says.
	Addresses func() ([]netip.Addr, error)
	Log       *slog.Logger // nil: silent
}

// environment is what the connections of a Server share. Each part has its own lock.
type environment struct {
	Parts
	limits  limiter
	loops   *loopGuard
	buffers *datapath.Buffers // for bytes that are copied, within limits.memory
	totals  totals
	setups  setupPool
	passing atomic.Pointer[passCounter] // the one that counts for all listeners; nil: none does
	inForce atomic.Pointer[settings]    // replaced by reloads; a step of a connection loads it once
	trial   atomic.Pointer[Trial]       // nil: there is none
}

// currentSettings returns the settings in force.
func (e *environment) currentSettings() *settings { return e.inForce.Load() }

// forwardDatagrams forwards the UDP and ICMP of a tunnel by the rules that hold for its connections.
func (e *environment) forwardDatagrams(in *openListener, lc ListenerConfig, mark config.Mark) {
	t := in.Tunnel()
	if t == nil {
		return
	}
	bounds := lc.Listener.Tunnel.Datagrams()
	bounds.MaxSessions = lc.Datagrams
	t.Forward(bounds, tunnel.Forwarding{
		Flows: e.Flows, Clock: e.Clock, Mark: uint32(mark), Log: e.Log,
		Verdict: func(sent tunnel.Sent) (down, up flow.Terms, err error) {
			l := in.now.Load()
			if l == nil { // peers send already, and the rules for them are not in force
				return down, up, fmt.Errorf("proxy: the tunnel is being opened: %w", syscall.EHOSTUNREACH)
			}
			f := policy.Facts{
				Listener: l.cfg.Name, Protocol: policy.UDP, Source: sent.Source, Target: sent.Target, Host: sent.Host,
				Peer: sent.Peer, Inside: true,
			}
			if sent.Target.Port() == 0 {
				f.Protocol = policy.ICMP
			}
			return e.currentSettings().decideDatagram(l, f)
		},
	})
}

// holdDatagrams holds the UDP of a listener's clients by the rules that hold for their connections.
func (e *environment) holdDatagrams(in *openListener, lc ListenerConfig) {
	s, ok := in.Listener.(*socketListener)
	if !ok {
		return
	}
	for _, held := range s.held {
		cfg := hold.Config{
			Flows: e.Flows, Clock: e.Clock,
			Log:            e.Log.With("listener", lc.Name, "direction", directionName(held.uplink)),
			CongestionMark: capture.CongestionMark, Uplink: held.uplink, ReadName: policy.HelloServerName,
			KeepServed: func(lasts time.Duration) (isInstalled bool, err error) {
				return capture.KeepServed(held.uplink, lasts)
			},
			Decide: func(f hold.FlowKey, serverName string) hold.Decision {
				l := in.now.Load()
				if l == nil { // its rules are not in force yet
					return hold.Decision{}
				}
				return e.currentSettings().decideHeld(heldFacts(l, f, serverName, held.uplink), held.uplink)
			},
			NeedsName: func(f hold.FlowKey) bool {
				l := in.now.Load()
				return l != nil && len(e.currentSettings().policy.Prospects(nil, heldFacts(l, f, "", held.uplink))) > 1
			},
		}
		if held.uplink {
			cfg.EchoTo = func(server netip.Addr) netip.Addr { return e.uplinkEcho(lc.UDP.UplinkEcho, server) }
		}
		held.serveQueue(cfg, &e.passing)
	}
}

// uplinkEcho returns the host that is sent echo requests about packets to a server: the configured one, else the
// gateway. The server itself is sent none, because its owner did not agree to that load.
func (e *environment) uplinkEcho(configured, server netip.Addr) netip.Addr {
	if configured.IsValid() {
		return configured
	}
	gateway, err := capture.NextHop(server)
	if err != nil {
		e.Log.Debug("packets to a server are acknowledged by nothing", "server", server, "err", err)
	}
	return gateway
}

// settings are a configuration and what is made of it. They are
// replaced as a whole and never changed.
type settings struct {
	cfg       config.Config
	policy    *policy.Policy
	listeners []*listenerState // in the order of cfg
	loops     *loopGuard
	local     func(netip.Addr) (bool, error) // reports whether an address is this machine's
}

// tunnelTo returns the tunnel that leads to an address. nil: none does, and it is to be
// dialled from this machine. An address inside a tunnel is reached by the tunnel's own
// peers and by clients that the configuration allows, never through another network: an error
// refuses the others. fixed is set for a target that the configuration names.
func (in *settings) tunnelTo(l *listenerState, target netip.Addr, fixed bool) (tunnel.Listener, error) {
	target = target.Unmap().WithZone("")
	all := in.listeners
	isOwn := func(other *listenerState) bool { return other.openListener == l.openListener }
	if l.Tunnel() != nil && !slices.ContainsFunc(all, isOwn) { // it drains
		all = append(slices.Clip(all), l)
	}
	for _, other := range all {
		t := other.Tunnel()
		if t == nil {
			continue
		}
		place := t.Place(target)
		if place == tunnel.OfGateway || place == tunnel.Unused {
			local, err := in.local(target)
			if err != nil {
				return nil, fmt.Errorf("proxy: whether destination %v is this machine's: %w", target, err)
			}
			if local {
				continue // the guard decides
			}
		}
		switch {
		case place == tunnel.Elsewhere:
		case !isOwn(other) && !fixed && !destination.Contains(l.cfg.Allow, target):
			return nil, &refusal{RejectedDenied, fmt.Errorf("destination %v is inside the tunnel of listener %q; "+
				"its peers reach it, targets of mode forward, and what allow lists", target, other.cfg.Name)}
		case place == tunnel.OfPeer:
			return t, nil
		case place == tunnel.OfGateway:
			return nil, fmt.Errorf("destination %v is the gateway's inside the tunnel, where no service is: %w",
				target, syscall.ECONNREFUSED)
		default:
			return nil, fmt.Errorf("destination %v is inside the tunnel, and no peer's: %w", target,
				syscall.EHOSTUNREACH)
		}
	}
	return nil, nil
}

// guardTarget refuses the destinations that need no rule: those through which clients would reach the proxy
// itself, and those of this machine alone. fixed is set for a target that the configuration names, which is
// allowed. It ignores the mode of l, because a reload may have changed the Listener since it greeted the client.
func (in *settings) guardTarget(l *listenerState, target netip.AddrPort, fixed bool) error {
	via, err := in.tunnelTo(l, target.Addr(), fixed)
	if err != nil {
		return err
	}
	if via != nil && l.guard.Inner == nil {
		return nil // peers reach each other
	}
	if !fixed {
		if err := l.guard.Check(target.Addr()); err != nil {
			return &refusal{RejectedDenied, err}
		}
	}
	if err := in.loops.checkTarget(target); err != nil {
		return &refusal{RejectedLoop, err}
	}
	return nil
}

// decideDatagram returns the terms for a datagram of a tunnel's peer and its answers. An error refuses it.
func (in *settings) decideDatagram(l *listenerState, f policy.Facts) (down, up flow.Terms, err error) {
	if via, err := in.tunnelTo(l, f.Target.Addr(), false); via != nil && err == nil && via != l.Tunnel() {
		return down, up, &refusal{RejectedDenied, fmt.Errorf("destination %v is inside another tunnel, which "+
			"TCP alone reaches", f.Target)}
	}
	if err := in.guardTarget(l, f.Target, false); err != nil {
		return down, up, err
	}
	v := in.policy.Decide(f)
	if v.Refuse != "" {
		return down, up, refusedBy(v)
	}
	if v.Down.Algorithm != policy.Unmanaged || v.Down.MaxRate > 0 { // otherwise nothing bounds them
		down = v.Down
	}
	// On the way up there is no window, because nothing acknowledges datagrams.
	up = flow.Terms{
		Group: v.Up.Group, Host: v.Up.Host, Algorithm: policy.Unmanaged,
		MaxRate: v.Up.MaxRate, Shared: v.Up.Shared,
	}
	return down, up, nil
}

// heldFacts returns what is known of a flow of held packets.
func heldFacts(l *listenerState, f hold.FlowKey, serverName string, uplink bool) policy.Facts {
	facts := policy.Facts{
		Listener: l.cfg.Name, Protocol: policy.UDP, Source: f.Target, Target: f.Source, ServerName: serverName,
	}
	if uplink {
		facts.Source, facts.Target = f.Source, f.Target
	}
	return facts
}

// decideHeld decides about a flow of held packets.
func (in *settings) decideHeld(f policy.Facts, uplink bool) hold.Decision {
	v := in.policy.Decide(f)
	terms := v.Down
	if uplink {
		terms = v.Up
	}
	switch {
	case v.Refuse != "":
		return hold.Decision{Refuse: true}
	case terms.Algorithm != policy.Unmanaged:
		return hold.Decision{Manage: true, Terms: terms, Acknowledged: true}
	case terms.MaxRate > 0:
		return hold.Decision{Manage: true, Terms: terms}
	}
	return hold.Decision{}
}

// refusedBy returns the refusal of a rule.
func refusedBy(v policy.Verdict) *refusal {
	return &refusal{RejectedRule, fmt.Errorf("rule %s: %s", v.Rule, v.Refuse)}
}

// Reloaded is what a Reload did to listeners and running connections.
type Reloaded struct {
	// listeners; those that close take no more clients, and their connections may go on for shutdown.drain
	Opened, Closing int

	Moved   int // directions that have other terms now, for sending or for the receive window
	Kept    int // directions that keep their terms: control cannot move between our algorithms and the kernel's
	Refused int // connections that go on although new ones like them are refused
	Revoked int // connections that are reset, because their peer has gone from its tunnel
}

// idleSetups is how many goroutines of a setupPool wait for the next connection.
const idleSetups = 32

// setupPool runs the steps of connections that may wait, up to the relay. Such a step needs a stack of
// 16 KB, and growing one costs a tenth of a short connection. So goroutines are used again.
type setupPool struct {
	next chan func()    // to an idle goroutine
	done chan struct{}  // closed: idle goroutines end
	idle chan struct{}  // holds a token for each of them; has room for idleSetups
	all  sync.WaitGroup // of all goroutines
}

// newSetupPool returns a pool without goroutines.
func newSetupPool() setupPool {
	return setupPool{next: make(chan func()), done: make(chan struct{}), idle: make(chan struct{}, idleSetups)}
}

// runSetup runs f on an idle goroutine, or on a new one. It does not wait.
func (s *setupPool) runSetup(f func()) {
	select {
	case s.next <- f:
	default:
		s.all.Go(func() { s.setupLoop(f) })
	}
}

// setupLoop runs f, and then what runSetup hands over. It ends when idleSetups others wait already.
func (s *setupPool) setupLoop(f func()) {
	for {
		f()
		select {
		case s.idle <- struct{}{}:
		default:
			return
		}
		select {
		case f = <-s.next:
			<-s.idle
		case <-s.done:
			return
		}
	}
}

// waitForAll waits until all functions have returned. runSetup is not called after it.
func (s *setupPool) waitForAll() {
	close(s.done)
	s.all.Wait()
}
