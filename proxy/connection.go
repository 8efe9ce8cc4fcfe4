package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// phase is how far a connection has come. connection.mu guards it.
//
//	greeting ─▶ dialling ─▶ deciding ─▶ relaying ─▶ halfClosed ─▶ draining ─▶ closed
//	    │            ├────────────────────▲  └──────────────────────▲
//	    └────────────┴─▶ refusing
//
//	phase       on the loop of the client leg;     ends with
//	            without one (onLoop):
//	greeting    a goroutine of the setup pool       the client's destination, or a rejection
//	dialling    a goroutine of the setup pool       a server leg, or a rejection
//	deciding    a goroutine of the setup pool       a server name, the server's first byte, or a timeout
//	refusing    a goroutine of the setup pool       the client has taken the answer, or a timeout
//	relaying    a goroutine for each direction      the end or failure of one leg
//	halfClosed  as relaying                         the end or failure of the other leg, or a timeout
//	draining    as relaying, and a goroutine that   acknowledgement of all that was sent, or a timeout
//	            waits for acknowledgements
//	closed      nothing                             -
//
// The phase deciding is skipped if the rules ask for no server name, and draining if both legs end in good order and
// the kernel delivers their last bytes. tearDown ends every phase, from any goroutine. A connection that is rejected
// ends in one of the first four. Dials through tunnels and lookups of names have goroutines, and no other step of a
// connection on a loop.
type phase uint8

const (
	greeting   phase = iota // the client is asked for its destination
	dialling                // the server leg is being made
	deciding                // a rule waits for the server name in the client's first bytes
	refusing                // the client takes the answer that there is no server
	relaying                // both directions move
	halfClosed              // one side has finished sending
	draining                // both have finished, or a leg has failed: what they sent is being delivered
	closed                  // the legs are closed, and the totals have the connection
)

// publicState returns the phase as users see it.
func (p phase) publicState() State {
	return [...]State{
		StateGreeting, StateDialing, StateDialing, StateDialing, StateOpen, StateHalfClosed, StateClosing, StateClosing,
	}[p]
}

// connection is one accepted client on its way through the proxy. All its state is here, in its legs and in its
// directions: between two events on a loop no goroutine's stack has a part of it.
//
// Each phase hands the fields to the next one, so most of them need no lock. mu guards those that other goroutines read
// as well: phase to decidedBy, the legs but for their conn, and what the table of direction says.
type connection struct {
	relay

	// What the Server sets.
	id         uint64
	listener   *listenerState
	started    cc.Time // when it was accepted
	counted    *client // the source that it counts against; nil: not known yet
	funcs      *connectionFuncs
	seen       bool        // a walk over all connections may still look at it; guarded by Server.mu
	isOver     bool        // it was rejected; the loop's goroutine alone
	parked     bool        // its legs are detached; the loop's goroutine alone
	keptBack   bool        // it came back from a takeover that failed; the Mover's goroutine alone
	recyclable atomic.Bool // it is over, and only its loop knows it; the loop gives it back

	// What the greeting finds out.
	chosen   ingress.Client // before that, its Again goes on with the greeting
	client   leg
	captured bool // the loop guard has its client leg

	// What dialling and deciding find out.
	rejected      *rejection // in phase refusing
	dialStarted   cc.Time    // when the dial began
	server        leg
	dialled       bool              // the loop guard has its server leg
	decidedOn     policy.Facts      // what the verdict was given on
	prospects     []policy.Verdict  // while dialling and deciding: the verdicts that are still possible
	singleVerdict [1]policy.Verdict // the memory of prospects if they are one

	// What relays.
	down, up  direction
	opened    cc.Time       // when it began to relay
	route     *route        // its counters by rule
	peer      *PeerCounters // its counters by peer; nil: none
	moving    atomic.Int32  // directions that are not over
	keptAlive bool          // keepAlive was called
	// endsOutside is set by the loop when another goroutine ends a direction. That goroutine may use the connection after
	// the loop does, so the memory is not given back.
	endsOutside bool
	lastSweep   sweepState

	phase     phase
	cancel    func() // ends the greeting or the dial; nil: there is none, or it needs no end
	cause     Cause
	causeErr  error
	verdict   *policy.Verdict // each direction's terms are part of it
	decidedBy *settings       // that gave the verdict
}

// connectionFuncs are the callbacks of a connection. They stay with its memory, because each new closure would cost an
// allocation.
type connectionFuncs struct {
	onEnd      func(*rejection) // called once, when the connection is over; nil: it was relayed
	giveBack   func()           // gives the connection's memory to a later one
	onLegEvent func()           // the method of this name, as is the next one
	onTimeout  func()
	onDialed   func(datapath.Conn, error)
	permit     func(netip.AddrPort) error
}

// currentPhase returns the phase.
func (c *connection) currentPhase() phase {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.phase
}

// clientLeg returns the client leg; nil: the greeting is not over.
func (c *connection) clientLeg() datapath.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.client.conn
}

// setPhase sets the phase.
func (c *connection) setPhase(p phase) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.phase = p
}

// sideOf returns the side that a leg leads to.
func (c *connection) sideOf(l *leg) Side {
	if l == &c.server {
		return ServerSide
	}
	return ClientSide
}

// clientAddress returns the client's address, as far as it is known.
func (c *connection) clientAddress() netip.AddrPort {
	if c.chosen.Source.IsValid() {
		return c.chosen.Source
	}
	return datapath.RemoteOf(c.client.conn)
}

// startGreeting begins the greeting: on the loop that has accepted the client, or in the setup pool. It does not wait.
func (c *connection) startGreeting() {
	if c.onLoop = c.driver.Start(c.client.conn, c.funcs.onLegEvent); c.onLoop {
		c.greetClient(context.Background())
		return
	}
	c.env.setups.runSetup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		c.setCancel(cancel)
		c.greetClient(ctx)
	})
}

// onLegEvent continues the present phase after an event of a leg. It runs on the loop of the legs, and does not wait.
func (c *connection) onLegEvent() {
	if c.isOver {
		return
	}
	switch c.currentPhase() {
	case greeting:
		c.greetClient(c.greetingContext())
	case dialling:
	case deciding:
		c.decideOnLoop(false)
	case refusing:
		c.rejectClient(c.rejected)
	default:
		if c.onLoop {
			c.moveDirections()
		}
	}
}

// onTimeout ends the wait of the present phase. It runs on the loop, once the time that was set there is over.
func (c *connection) onTimeout() {
	switch c.currentPhase() {
	case greeting:
		c.greetClient(expiredContext)
	case deciding:
		c.decideOnLoop(true)
	case refusing:
		_ = c.client.conn.Close()
		c.rejectClient(c.rejected)
	}
}

// expiredContext makes a greeting that is retried end with a timeout.
var expiredContext, _ = context.WithDeadline(context.Background(), datapath.Expired) //nolint:govet // it has ended

// greetingContext returns a context that has ended once the connection is torn down.
func (c *connection) greetingContext() context.Context {
	if c.stopped.Load() {
		return expiredContext
	}
	return context.Background()
}

// scheduleRetry reports whether err says that a call of package ingress must be made again. onLegEvent then does so, or
// onTimeout after the time that err allows.
func (c *connection) scheduleRetry(err error) bool {
	if err == nil || !errors.Is(err, datapath.ErrWait) {
		return false
	}
	var p ingress.Pause
	if errors.As(err, &p) {
		c.driver.SetTimeout(time.Duration(p), c.funcs.onTimeout)
	}
	return true
}

// cancelTimeout cancels the call of onTimeout.
func (c *connection) cancelTimeout() {
	if c.onLoop {
		c.driver.SetTimeout(-1, nil)
	}
}

// rejectClient ends a connection that is not relayed. The client is first sent an answer, if it has none yet.
func (c *connection) rejectClient(r *rejection) {
	if r.unanswered && c.scheduleRetry(c.chosen.Answer(netip.AddrPort{}, r.err)) {
		c.rejected = r
		c.setPhase(refusing)
		return
	}
	c.cancelTimeout()
	c.isOver = true
	c.funcs.onEnd(r)
}

// greetClient finds out where the client wants to go, and dials the server. It leaves what the client sent beyond its
// request in up.early.
func (c *connection) greetClient(ctx context.Context) {
	var chosen ingress.Client
	var err error
	if again := c.chosen.Again; again != nil {
		chosen, err = again(ctx)
	} else {
		chosen, err = c.listener.Greet(ctx, c.client.conn)
	}
	switch {
	case c.scheduleRetry(err):
		c.chosen.Again = chosen.Again
		return
	case errors.Is(err, ingress.ErrUnauthorized):
		c.rejectClient(&rejection{reason: RejectedAuth, err: err})
		return
	case err != nil:
		c.rejectClient(&rejection{reason: RejectedHandshake, err: err})
		return
	}
	c.cancelTimeout()
	early, conn := chosen.Detach()
	c.mu.Lock()
	c.chosen = chosen
	c.client = leg{conn: conn}
	c.up.early = early
	c.phase = dialling
	c.mu.Unlock()
	if r := c.countGreeted(); r != nil {
		c.rejectClient(r)
		return
	}
	c.decidedBy = c.env.currentSettings()
	c.dialStarted = c.env.Clock()
	c.dialServer()
}

// countGreeted counts the client in the limits and the loop guard.
func (c *connection) countGreeted() *rejection {
	if c.counted == nil { // the client was behind a proxy, and its address is known only now
		c.counted = c.env.limits.enterSource(source{host: datapath.Host(c.chosen.Source.Addr())})
		if c.counted == nil {
			return refuseClient(&refusal{
				RejectedSourceLimit,
				fmt.Errorf("too many connections from %v", c.chosen.Source.Addr()),
			})
		}
	}
	if c.listener.cfg.Mode.Captures() {
		if err := c.env.loops.addCaptured(c.clientWire()); err != nil {
			return refuseClient(&refusal{RejectedLoop, err})
		}
		c.captured = true
	}
	return nil
}

// clientWire returns a captured client leg: from the client to its destination.
func (c *connection) clientWire() wire {
	return wireOf(datapath.RemoteOf(c.client.conn), c.chosen.Target)
}

// dialServer makes the server leg. The guards and rules check every address right before it is tried, be it resolved or
// given. Names are resolved inside the dial, so that its time counts as part of it.
func (c *connection) dialServer() {
	timeout := c.decidedBy.cfg.Limits.DialTimeout
	// An address inside a tunnel is dialled through it, in user space, which may wait.
	if to := c.chosen.Target; to.IsValid() {
		if via, err := c.tunnelTo(to.Addr()); via != nil && err == nil {
			if err := c.permitTarget(to); err != nil {
				c.onDialled(nil, err)
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			c.setCancel(cancel)
			c.env.setups.runSetup(func() {
				defer cancel()
				server, err := kernel.UntilReset(ctx, c.client.conn, func(ctx context.Context) (datapath.Conn, error) {
					return via.Dial(ctx, c.chosen.Source.Addr(), to)
				})
				c.runStep(func() { c.onDialled(server, err) })
			})
			return
		}
	}
	cfg := kernel.DialConfig{
		Target:  c.chosen.Target,
		Host:    c.chosen.Host,
		Mark:    uint32(c.decidedBy.cfg.Mark),
		Hops:    c.chosen.Hops,
		Near:    c.client.conn, // the loop of the client leg serves the server leg, too
		Guard:   c.funcs.permit,
		Timeout: timeout,
	}
	if c.listener.cfg.KeepClient { // the kernel chooses the port
		cfg.Source = netip.AddrPortFrom(c.chosen.Source.Addr(), 0)
	}
	if c.decidedBy.policy.KeepsDSCP() {
		cfg.DSCP = c.dscpTowards
	}
	c.setCancel(c.env.Dial(cfg, c.funcs.onDialed))
}

// onOutsideDialled continues after a dial from this machine: on the loop, or for a name on a goroutine.
func (c *connection) onOutsideDialled(server datapath.Conn, err error) {
	if err == nil && !c.listener.cfg.KeepClient { // else it may look like another connection of that client
		if err = c.registerServerLeg(server); err != nil {
			server = nil
		}
	}
	if c.onLoop && c.chosen.Target.IsValid() {
		c.onDialled(server, err)
		return
	}
	c.runStep(func() { c.onDialled(server, err) })
}

// runStep runs a step: on the loop, or in the setup pool.
func (c *connection) runStep(f func()) {
	if c.onLoop {
		c.driver.Do(f)
		return
	}
	c.env.setups.runSetup(f)
}

// onDialled continues after the dial: with the relay, or with the wait for a server name if several verdicts are
// still possible.
func (c *connection) onDialled(server datapath.Conn, err error) {
	if err == nil {
		c.listener.dial.Observe(c.env.Clock().Sub(c.dialStarted))
	}
	if r := c.attachServer(server, err); r != nil {
		c.rejectClient(r)
		return
	}
	// An exchange may read several times for one byte.
	if c.onLoop && (c.chosen.Exchange != nil || !c.driver.Join(server)) {
		c.driver.Leave(c.client.conn)
		c.onLoop = false
	}
	if len(c.prospects) == 1 {
		c.startRelaying()
		return
	}
	c.setPhase(deciding)
	if c.onLoop {
		c.driver.SetTimeout(c.decidedBy.cfg.Limits.ServerNameWait, c.funcs.onTimeout)
		c.decideOnLoop(false)
		return
	}
	c.env.setups.runSetup(func() { c.decideByName(c.awaitServerName()) })
}

// setCancel sets what tearDown calls to end the greeting or the dial. After a tearDown it calls cancel itself.
func (c *connection) setCancel(cancel func()) {
	c.mu.Lock()
	if c.phase < relaying {
		c.cancel = cancel
	}
	c.mu.Unlock()
	if c.stopped.Load() {
		cancel()
	}
}

// registerServerLeg gives the server leg to the loop guard, which refuses one that has come back to us.
func (c *connection) registerServerLeg(conn datapath.Conn) error {
	if err := c.env.loops.addDialled(wireOfLeg(conn)); err != nil {
		_ = conn.Reset()
		return &refusal{RejectedLoop, err}
	}
	c.dialled = true
	return nil
}

// tunnelTo returns the tunnel that leads to an address. nil: none does.
func (c *connection) tunnelTo(target netip.Addr) (tunnel.Listener, error) {
	return c.env.currentSettings().tunnelTo(c.listener, target, c.chosen.Fixed)
}

// permitOutside checks an address before it is tried from this machine.
func (c *connection) permitOutside(target netip.AddrPort) error {
	if via, err := c.tunnelTo(target.Addr()); via != nil && err == nil {
		return fmt.Errorf("destination %v of a name is inside the tunnel, where names do not lead: %w", target,
			syscall.EHOSTUNREACH)
	}
	return c.permitTarget(target)
}

// permitTarget refuses an address by guards and rules. A rule that asks for a server name refuses only once the
// name is known, so an address is permitted if any verdict that is possible permits it.
func (c *connection) permitTarget(target netip.AddrPort) error {
	if err := c.env.currentSettings().guardTarget(c.listener, target, c.chosen.Fixed); err != nil {
		return err
	}
	var prospects []policy.Verdict
	if c.chosen.Target.IsValid() {
		prospects = c.askRules(target)
	} else { // several addresses of a name may be tried at a time
		prospects = c.decidedBy.policy.Prospects(nil, c.policyFacts(target))
	}
	if slices.ContainsFunc(prospects, func(v policy.Verdict) bool { return v.Refuse == "" }) {
		return nil
	}
	return refusedBy(prospects[len(prospects)-1])
}

// askRules sets prospects to the verdicts that are possible for target.
func (c *connection) askRules(target netip.AddrPort) []policy.Verdict {
	c.decidedOn = c.policyFacts(target)
	c.prospects = c.decidedBy.policy.Prospects(c.singleVerdict[:0], c.decidedOn)
	return c.prospects
}

// policyFacts returns what policy decides on, if the server leg goes to target.
func (c *connection) policyFacts(target netip.AddrPort) policy.Facts {
	host := c.chosen.Host
	if host != "" {
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
	}
	f := policy.Facts{Listener: c.listener.cfg.Name, Source: c.chosen.Source, Target: target, Host: host}
	if c.chosen.Peer != "" {
		f.Peer, f.Inside = c.chosen.Peer, true
	} else if from := datapath.RemoteOf(c.client.conn).Addr(); from != f.Source.Addr() {
		// A PROXY header named another client.
		f.Peer = from.String()
	}
	if via, err := c.tunnelTo(target.Addr()); via != nil && err == nil {
		f.TargetPeer, f.TargetListener = via.Peer(target.Addr()), via.Name()
	}
	return f
}

// attachServer takes the server leg, or the error of the dial, and answers the client. It sets verdict to the last of
// the prospects, which is the only one unless a server name is still to decide.
func (c *connection) attachServer(server datapath.Conn, err error) *rejection {
	if err != nil {
		return refuseClient(err)
	}
	c.mu.Lock()
	c.server = leg{conn: server}
	stopped := c.stopped.Load()
	c.mu.Unlock()
	if stopped {
		_ = server.Reset()
		return refuseClient(&refusal{RejectedShutdown, errors.New("the proxy is shutting down")})
	}
	// The rules are asked again, because only now it is known which of a name's addresses answered.
	if target := datapath.RemoteOf(server); c.decidedOn.Target != target {
		c.askRules(target)
	}
	c.verdict = &c.prospects[len(c.prospects)-1]
	// A server that waits for a header before it speaks is not kept waiting for
	// the client's first bytes, unless they decide about the header.
	if c.isHeaderCertain() {
		if err := c.sendProxyHeader(); err != nil {
			_ = server.Reset()
			return refuseClient(err)
		}
	}
	// After this answer the client cannot be sent an error in its protocol.
	if err := c.chosen.Answer(datapath.LocalOf(server), nil); err != nil {
		return c.resetBoth(RejectedClientGone, err)
	}
	c.chosen.Answer = nil
	return nil
}

// isHeaderCertain reports whether all verdicts that are possible send the same PROXY header.
func (c *connection) isHeaderCertain() bool {
	return !slices.ContainsFunc(c.prospects, func(v policy.Verdict) bool { return v.SendProxy != c.verdict.SendProxy })
}

// sendProxyHeader sends the server a PROXY header with the client's address, if the verdict asks for one.
func (c *connection) sendProxyHeader() error {
	version := c.verdict.SendProxy
	if version == 0 {
		return nil
	}
	target := c.chosen.Target
	if !target.IsValid() {
		target = datapath.RemoteOf(c.server.conn)
	}
	// A fresh connection has room for it, so this does not wait.
	if err := ingress.WriteProxyHeader(c.server.conn, version, c.chosen.Source, target, c.chosen.CameTo()); err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}

// refuseClient is for clients that were not answered yet. They are sent an error in their protocol, which closes the
// connection.
func refuseClient(err error) *rejection {
	return &rejection{reason: dialReason(err), err: err, unanswered: true}
}

// resetBoth ends a connection after its client was answered, when no error can be sent any more.
func (c *connection) resetBoth(reason Reason, err error) *rejection {
	_ = c.server.conn.Reset()
	_ = c.client.conn.Reset()
	return &rejection{reason: reason, err: err}
}

// decideByName chooses one of the prospects by the server name, and begins to relay.
func (c *connection) decideByName(name string) {
	c.decidedOn.ServerName = name
	isHeaderSent := c.isHeaderCertain() // by attachServer
	if r := c.applyNameVerdict(); r != nil {
		c.rejectClient(r)
		return
	}
	if !isHeaderSent {
		if err := c.sendProxyHeader(); err != nil {
			c.rejectClient(c.resetBoth(RejectedDialError, err))
			return
		}
	}
	c.startRelaying()
}

// applyNameVerdict sets the verdict for the server name, or for its absence. No byte has moved yet.
func (c *connection) applyNameVerdict() *rejection {
	verdict := c.decidedBy.policy.Decide(c.decidedOn)
	c.verdict = &verdict
	c.env.Log.Debug("looked for a server name", "id", c.id, "listener", c.listener.cfg.Name, "client", c.clientAddress(),
		"target", c.decidedOn.Target, "server_name", c.decidedOn.ServerName, "rule", verdict.Rule)
	if verdict.Refuse == "" {
		return nil
	}
	return c.resetBoth(RejectedRule, refusedBy(verdict))
}

// readServerName reads the client's first bytes until they show a server name, or that there is none. It keeps them for
// the relay. After an error there is no name, and the relay meets the error. more: it would have to wait.
func (c *connection) readServerName() (name string, more bool) {
	if c.chosen.Exchange != nil {
		return policy.HostName(c.decidedOn.Host), false // of the URL, in whatever form the request has
	}
	for {
		if name, more = policy.ServerName(c.up.early); !more {
			return name, false
		}
		if err := c.up.readEarly(c.client.conn, c.env.buffers); err != nil {
			return "", errors.Is(err, datapath.ErrWait)
		}
	}
}

// decideOnLoop decides by the server name once the client's first bytes show whether they have one. It decides without
// a name if timedOut is set, or once the server has sent bytes: then the client does not speak first.
func (c *connection) decideOnLoop(timedOut bool) {
	name, more := c.readServerName()
	if more && !timedOut && errors.Is(c.down.readEarly(c.server.conn, c.env.buffers), datapath.ErrWait) {
		return
	}
	c.cancelTimeout()
	c.decideByName(name)
}

// awaitServerName waits for the server name where no loop calls decideOnLoop. Reads of the client fail once the server
// speaks or ends, or the time is over.
func (c *connection) awaitServerName() string {
	client, server := c.client.conn, c.server.conn
	until := time.Now().Add(c.decidedBy.cfg.Limits.ServerNameWait) //nolint:forbidigo // a deadline is of the real clock
	// The client has a deadline from the start, because a QUIC stream only then reads so that it can be ended.
	_ = client.SetReadDeadline(until)
	_ = server.SetReadDeadline(until)
	heard := make(chan struct{}) // closed: the goroutine has left the server leg alone
	go func() {
		defer close(heard)
		_ = c.down.readEarly(server, c.env.buffers)
		_ = client.SetReadDeadline(datapath.Expired)
	}()
	name, _ := c.readServerName()
	_ = server.SetReadDeadline(datapath.Expired)
	<-heard
	_ = server.SetReadDeadline(time.Time{})
	_ = client.SetReadDeadline(time.Time{})
	return name
}

// dscpTowards returns the client's DSCP for packets to an address. keep reports whether all verdicts that are possible
// for the address keep it, so that the SYN may have it already.
func (c *connection) dscpTowards(target netip.AddrPort) (dscp uint8, keep bool) {
	for _, v := range c.decidedBy.policy.Prospects(nil, c.policyFacts(target)) {
		if v.Refuse == "" && !v.KeepDSCP {
			return 0, false
		}
	}
	return receivedDSCP(c.client.conn), true
}

// carryDSCP gives the packets of each leg the DSCP that came over the other one. If the server sets none, the client
// gets its own back.
func (c *connection) carryDSCP() {
	there := receivedDSCP(c.client.conn)
	back := receivedDSCP(c.server.conn)
	if back == 0 {
		back = there
	}
	c.setDSCP(&c.server, there)
	c.setDSCP(&c.client, back)
}

// setDSCP marks the packets of a leg, if its transport can.
func (c *connection) setDSCP(l *leg, dscp uint8) {
	m, ok := l.conn.(datapath.Marker)
	if !ok {
		return
	}
	if err := m.SetDSCP(dscp); err != nil {
		c.env.Log.Debug("a DSCP was not carried on", "id", c.id, "side", c.sideOf(l), "err", err)
	}
}

// receivedDSCP returns the mark of a leg's handshake packets. 0: none, or the transport does not show it.
func receivedDSCP(conn datapath.Conn) uint8 {
	if m, ok := conn.(datapath.Marker); ok {
		return m.ReceivedDSCP()
	}
	return 0
}

// startRelaying puts the verdict into force, and runs both directions.
func (c *connection) startRelaying() {
	if t := c.env.trial.Load(); t != nil && t.leavesToKernel(c.decidedOn.Source.Addr(), c.chosen.Peer) {
		v := *c.verdict
		v.LeaveToKernel()
		c.verdict = &v
	}
	c.prospects = nil // their memory is not needed while the connection lives
	if c.verdict.KeepDSCP {
		c.carryDSCP()
	}
	if err := c.openDirections(nil, nil); err != nil { // only a bug in the policy check can cause it
		c.tearDown(Cause{ProxySide, ClosedError}, err)
		c.closeLegs()
		c.rejectClient(&rejection{reason: RejectedDialError, err: err})
		return
	}
	c.opened = c.env.Clock()
	c.listener.setup.Observe(c.opened.Sub(c.started))
	c.route, c.peer = c.env.totals.countOpened(routeKey{c.listener.cfg.Name, c.verdict.Rule}, c.chosen.Peer,
		c.verdict.Down.Algorithm, c.verdict.Up.Algorithm)
	c.mu.Lock()
	if c.phase < relaying {
		c.phase = relaying
	}
	c.cancel = nil
	c.mu.Unlock()
	c.applyCurrentRules(&Reloaded{}) // a reload since the decision has passed this connection over
	if c.isPeerRevoked() {
		c.tearDown(Cause{ProxySide, ClosedRevoked}, nil)
	}
	c.runDirections()
}

// openDirections joins the legs by a carrier for each direction, and opens flows where the verdict's terms need them at
// once. beforeDown and beforeUp describe the directions in another process; nil: they begin here.
func (c *connection) openDirections(beforeDown, beforeUp *directionRecord) error {
	c.markActive()
	v, limits := c.verdict, &c.env.currentSettings().cfg.Limits
	c.down.relay, c.down.src, c.down.dst = &c.relay, &c.server, &c.client
	c.up.relay, c.up.src, c.up.dst, c.up.up = &c.relay, &c.client, &c.server, true
	if exchange := c.chosen.Exchange; exchange == nil {
		c.down.carrier = datapath.NewCarrier(c.client.conn, c.server.conn, c.env.buffers)
		c.up.carrier = datapath.NewCarrier(c.server.conn, c.client.conn, c.env.buffers)
	} else {
		c.down.carrier = datapath.NewCopy(c.client.conn, exchange.AnswerFrom(c.server.conn), c.env.buffers)
		c.up.carrier = datapath.NewCopy(c.server.conn, exchange.RequestFrom(c.client.conn), c.env.buffers)
	}
	if err := c.down.setFirstTerms(&v.Down, &v.FromServer, limits, beforeDown); err != nil {
		return err
	}
	return c.up.setFirstTerms(&v.Up, &v.FromClient, limits, beforeUp)
}

// runDirections starts both directions, and returns at once. They run on the loop of both legs, or each on a goroutine
// if the legs share no loop. Those goroutines are new, because the one that has greeted and dialled has a stack several
// times as large as an idle direction needs.
func (c *connection) runDirections() {
	for _, d := range []*direction{&c.down, &c.up} {
		if !d.finished.Load() {
			c.moving.Add(1)
		}
	}
	if c.onLoop {
		c.driver.Post()
		return
	}
	for _, d := range []*direction{&c.down, &c.up} {
		d.wake = make(chan struct{}, 1)
		// A goroutine waits inside a write, where moveBytes could not set the bound any more.
		if d.unbounded {
			d.boundInflow()
		}
		go func() {
			if l := c.finishDirection(d, d.runUntilEnd()); l != nil {
				c.abortLeg(l)
			}
			c.onDirectionEnd()
		}()
	}
}

// moveDirections moves what both directions can move now. It runs on a loop, and does not wait.
func (c *connection) moveDirections() {
	if c.recyclable.Load() {
		c.funcs.giveBack()
		return
	}
	if c.parked {
		return
	}
	for _, d := range [...]*direction{&c.down, &c.up} {
		if d.finished.Load() {
			continue
		}
		switch p, e := d.moveBytes(); p {
		case mustWait:
		case hasMore:
			c.driver.Post()
		case hasEnded:
			d.carrier.Release()
			if l := c.finishDirection(d, e); l != nil {
				c.endsOutside = true
				go func() { // a loop must not wait for acknowledgements
					c.abortLeg(l)
					c.onDirectionEnd()
				}()
				continue
			}
			c.onDirectionEnd()
		}
	}
}

// onDirectionEnd ends the connection when both directions are over.
func (c *connection) onDirectionEnd() {
	if c.moving.Add(-1) == 0 {
		c.awaitDelivery()
		c.funcs.onEnd(nil)
	}
}

// parkForTakeover detaches the legs of a relayed connection, and describes it for another process. ok is false, and the
// connection goes on, if it is about to end or no loop relays it. It runs on that loop, where nothing is half done
// between two events. Afterwards the caller must call onEnd.
func (c *connection) parkForTakeover() (r connectionRecord, ok bool) {
	if !c.onLoop || c.parked || !c.isMovable() || !c.down.unloadCarrier() || !c.up.unloadCarrier() {
		return r, false
	}
	now := c.env.Clock()
	r = connectionRecord{
		Listener: c.listener.cfg.Name, Source: c.clientAddress(), Target: c.chosen.Target, Host: c.chosen.Host,
		Fixed: c.chosen.Fixed, Age: now.Sub(c.started), Setup: c.opened.Sub(c.started),
		Idle: max(0, now.Sub(cc.Time(c.active.Load()))),
	}
	c.down.receive.liftBound(now)
	c.up.receive.liftBound(now)
	client, server := c.client.conn.(*kernel.Conn), c.server.conn.(*kernel.Conn)
	var err error
	if r.Client, r.Server, err = kernel.Detach(client, server); err != nil {
		return r, false
	}
	sent, sentUp := client.Info(), server.Info()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parked, c.phase = true, draining
	c.replaceOrderlyEnd()
	c.setCause(Cause{ProxySide, ClosedMoved}, nil)
	r.Facts, r.Verdict = c.decidedOn, *c.verdict
	r.Verdict.Down, r.Verdict.Up = *c.down.terms, *c.up.terms
	r.Verdict.FromServer, r.Verdict.FromClient = *c.down.receives, *c.up.receives
	r.Down, r.Up = c.down.makeRecord(now), c.up.makeRecord(now)
	r.Down.Retransmitted, r.Up.Retransmitted = int64(sent.Retransmitted), int64(sentUp.Retransmitted)
	return r, true
}

// isMovable reports whether another process could go on with the connection: both directions move or have ended in good
// order.
func (c *connection) isMovable() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range []*direction{&c.down, &c.up} {
		if d.ending != nil && !errors.Is(d.ending, io.EOF) {
			return false
		}
	}
	return (c.phase == relaying || c.phase == halfClosed) && !c.stopped.Load() && c.moving.Load() > 0
}

// restoreFrom makes a relayed connection of what parkForTakeover has described, between attached legs. The directions
// do not run yet. After an error the caller calls abandonRestored.
func (c *connection) restoreFrom(r *connectionRecord, client, server *kernel.Conn) error {
	now := c.env.Clock()
	c.started, c.opened = now.Add(-r.Age), now.Add(r.Setup-r.Age)
	c.chosen = ingress.Client{
		Conn: client, Source: r.Source, Target: r.Target, Host: r.Host, Fixed: r.Fixed,
	}
	c.decidedOn, c.verdict = r.Facts, &r.Verdict
	c.client, c.server = leg{conn: client}, leg{conn: server}
	c.phase = dialling // events of legs do nothing before runRestored
	c.onLoop = c.driver.Start(client, c.funcs.onLegEvent) && c.driver.Join(server)
	c.down.early, c.up.early = r.Down.Stored, r.Up.Stored
	if err := c.openDirections(&r.Down, &r.Up); err != nil {
		return err
	}
	c.active.Store(int64(now.Add(-r.Idle)))
	for _, d := range []*direction{&c.down, &c.up} {
		if d.finished.Load() {
			c.cause = Cause{c.sideOf(d.src), ClosedEOF}
		}
	}
	return nil
}

// abandonRestored ends a restored connection that has not run, and leaves its sockets to the other process that has
// them.
func (c *connection) abandonRestored() {
	_ = c.client.conn.(*kernel.Conn).Abandon()
	_ = c.server.conn.(*kernel.Conn).Abandon()
	now := c.env.Clock()
	c.down.closeFlows(now)
	c.up.closeFlows(now)
}

// closeDetached closes descriptors of legs. Connections that no other process holds are reset.
func closeDetached(legs ...kernel.DetachedLeg) {
	for _, l := range legs {
		_ = unix.Close(l.FD)
	}
}

// runRestored runs a restored connection under the present rules. It is called on the loop.
func (c *connection) runRestored() {
	c.route, c.peer = c.env.totals.countOpened(routeKey{c.listener.cfg.Name, c.verdict.Rule}, c.chosen.Peer,
		c.verdict.Down.Algorithm, c.verdict.Up.Algorithm)
	c.mu.Lock()
	c.phase = relaying
	if c.cause.How == ClosedEOF {
		c.phase = halfClosed
	}
	c.mu.Unlock()
	c.applyCurrentRules(&Reloaded{})
	c.runDirections()
}

// applyCurrentRules puts the terms into force that the present rules give c, unless it
// has them already or is not relayed yet. It counts in done what it changes.
func (c *connection) applyCurrentRules(done *Reloaded) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.env.currentSettings()
	// decidedOn is complete only once c is relayed; startRelaying then calls this.
	if c.phase < relaying || c.decidedBy == now {
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
		d               *direction
		sends, receives *flow.Terms
	}{{&c.down, &v.Down, &v.FromServer}, {&c.up, &v.Up, &v.FromClient}} {
		counted := done.Moved + done.Kept // a direction counts once, for sending or receiving
		each.d.applyTerms(each.sends, done)
		moved, err := each.d.applyReceiveTerms(each.receives)
		if err != nil {
			c.env.Log.Error("receive window keeps its terms", "direction", directionName(each.d.up), "err", err)
		}
		if moved && done.Moved+done.Kept == counted {
			done.Moved++
		}
	}
}

// isPeerRevoked reports whether the peer that it comes from, or the one that it leads to, has gone
// from its tunnel. Another peer may have the address next.
func (c *connection) isPeerRevoked() bool {
	at := c.currentPhase()
	switch {
	case at == greeting:
		return false // the peer is not known yet
	case c.chosen.Current != nil && !c.chosen.Current():
		return true
	case at < relaying:
		return false // decidedOn may still change
	}
	to := c.decidedOn
	if to.TargetPeer == "" {
		return false
	}
	// The address may have no peer any more, or another one.
	via, err := c.tunnelTo(to.Target.Addr())
	return err != nil || via == nil || via.Peer(to.Target.Addr()) != to.TargetPeer
}

// finishDirection passes the end of one direction on, and returns the leg that must be aborted. nil: none.
//
// A FIN is passed on as a FIN, once all that came before it is written. If a leg fails, what it had sent is still
// delivered. Then the other leg is reset, because a FIN would make a cut transfer look complete.
func (c *connection) finishDirection(d *direction, e end) (abort *leg) {
	defer d.finished.Store(true)
	switch {
	case e.stopped:
		return nil
	case e.writeErr != nil:
		return c.onWriteFailed(d.dst, d.src, e.writeErr)
	case e.readErr != nil:
		return c.onReadFailed(d.src, d.dst, e.readErr)
	default:
		return c.onSourceEnd(d)
	}
}

// onSourceEnd passes the source's FIN on, if it was one.
func (c *connection) onSourceEnd(d *direction) (abort *leg) {
	c.mu.Lock()
	// A write to src may have met a RST and taken the socket's error. The read then saw a plain end.
	if d.src.failed || !d.src.closed && d.src.conn.Aborted() {
		c.mu.Unlock()
		return c.onReadFailed(d.src, d.dst, nil)
	}
	d.src.ended = true
	c.setCause(Cause{c.sideOf(d.src), ClosedEOF}, nil)
	if c.phase == relaying {
		c.phase = halfClosed
	}
	d.dst.closed = true
	var err error
	// Where this is the connection's last end, closing the legs ends them as well as CloseWrite would.
	if !c.onLoop || c.moving.Load() != 1 || !d.dst.ended {
		err = d.dst.conn.CloseWrite()
	}
	c.mu.Unlock()
	if err != nil {
		return c.onWriteFailed(d.dst, d.src, err)
	}
	return nil
}

// onWriteFailed handles a leg that takes no more bytes. What it has sent may still be on its way in the other
// direction, which then ends the connection. If that direction is over, the other leg is to be aborted now.
func (c *connection) onWriteFailed(failed, other *leg, err error) (abort *leg) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setFailed(failed, err)
	if failed.ended {
		return other
	}
	return nil
}

// onReadFailed handles a leg that ended without a FIN.
func (c *connection) onReadFailed(failed, other *leg, err error) (abort *leg) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setFailed(failed, err)
	return other
}

// setFailed marks a leg as failed. The failure replaces an earlier orderly end as the cause, because that end has not
// ended the connection. c.mu is held.
func (c *connection) setFailed(l *leg, err error) {
	l.failed = true
	c.phase = draining
	reason := ClosedReset
	if err != nil {
		reason = legReason(err)
	}
	c.replaceOrderlyEnd()
	c.setCause(Cause{c.sideOf(l), reason}, err)
}

// replaceOrderlyEnd lets another cause take the place of an orderly end. c.mu is held.
func (c *connection) replaceOrderlyEnd() {
	if c.cause.How == ClosedEOF {
		c.cause = Cause{}
	}
}

// setCause sets the cause unless there is one. c.mu is held.
func (c *connection) setCause(cause Cause, err error) {
	if c.cause == (Cause{}) {
		c.cause, c.causeErr = cause, err
	}
}

// abortLeg waits until l has acknowledged all bytes, and then resets both legs.
func (c *connection) abortLeg(l *leg) {
	c.waitUntilDelivered(l.conn)
	c.tearDown(Cause{}, nil)
}

// awaitDelivery waits until transports in this process have delivered their bytes, because the process may end before
// that. The kernel's transports go on by themselves.
func (c *connection) awaitDelivery() {
	for _, l := range []*leg{&c.client, &c.server} {
		if l.conn.InProcess() {
			c.setPhase(draining)
			c.waitUntilDelivered(l.conn)
		}
	}
}

// The first and the longest wait between two looks at what is undelivered.
const (
	deliverFirst = time.Millisecond
	deliverLast  = 100 * time.Millisecond
)

// waitUntilDelivered waits for acknowledgements of all bytes. The half-closed timeout ends the wait, through stop,
// once none has come for so long.
func (c *connection) waitUntilDelivered(conn datapath.Conn) {
	stopping := c.stopChannel()
	wait := deliverFirst
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for last := cc.Bytes(-1); ; {
		n, err := conn.Undelivered()
		if n == 0 || err != nil {
			return
		}
		if n != last { // acknowledgements count as activity for the timeout
			last = n
			c.markActive()
		}
		select {
		case <-timer.C:
		case <-stopping:
			return
		}
		wait = min(2*wait, deliverLast)
		timer.Reset(wait)
	}
}

// tearDown resets the legs and makes every step of the connection
// return. The first call counts.
func (c *connection) tearDown(cause Cause, err error) {
	c.mu.Lock()
	if !c.markStopped() {
		c.mu.Unlock()
		return
	}
	if cause.How != "" {
		c.replaceOrderlyEnd()
		c.setCause(cause, err)
	}
	client, server, cancel := c.client.conn, c.server.conn, c.cancel
	c.mu.Unlock()
	// Without mu, because cancel may call back into a step that takes it.
	if cancel != nil {
		cancel()
	}
	_ = client.Reset()
	if server != nil {
		_ = server.Reset()
	}
}

// closeLegs ends both legs, and the flows after them: the last report of a leg needs its flow.
func (c *connection) closeLegs() {
	end := datapath.Conn.Close
	if c.stopped.Load() { // tearDown may be halfway, and must not find a leg that has ended in good order
		end = datapath.Conn.Reset
	}
	_ = end(c.client.conn)
	_ = end(c.server.conn)
	now := c.env.Clock()
	c.down.closeFlows(now)
	c.up.closeFlows(now)
}

// releaseCounts takes the connection out of the limits and the loop guard.
func (c *connection) releaseCounts() {
	if c.captured {
		c.env.loops.removeCaptured(c.clientWire())
	}
	if c.dialled {
		c.env.loops.removeDialled(wireOfLeg(c.server.conn))
	}
	if c.counted != nil {
		c.env.limits.leaveSource(c.counted)
	}
	c.env.limits.releaseConnection(&c.listener.share)
}

// finalCause returns why the connection has ended.
func (c *connection) finalCause() (Cause, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause, c.causeErr
}

// explainRejection replaces the reason of a rejection that tearDown has caused.
func (c *connection) explainRejection(r *rejection) {
	if !c.stopped.Load() {
		return
	}
	switch cause, _ := c.finalCause(); cause.How {
	case ClosedShutdown:
		r.reason = RejectedShutdown
	case ClosedRevoked:
		r.reason = RejectedRevoked
	}
}

// timeouts are those that checkTimeouts looks for; 0: none.
type timeouts struct {
	idle, halfClosed time.Duration
	period           time.Duration // between two looks
}

// checkTimeouts resets a connection on which nothing has moved for too long. One look at all connections now and then
// costs less than a timer that each byte sets anew.
func (c *connection) checkTimeouts(now cc.Time, t timeouts) {
	quiet := now.Sub(cc.Time(c.active.Load()))
	at := c.currentPhase()
	if at == relaying || at == halfClosed {
		c.keepAlive()
	}
	limit, how := t.halfClosed, ClosedHalfClosed
	switch at {
	case relaying:
		limit, how = t.idle, ClosedIdle
	case greeting, dialling, deciding, refusing: // these have timeouts of their own
		limit = 0
	}
	// Bytes that are still being delivered count as activity. Only quiet connections are
	// asked, because that is a system call.
	if limit > 0 && quiet >= limit/2 && c.hasDelivered(now) {
		quiet = 0
	}
	switch {
	case c.isPeerRevoked():
		c.tearDown(Cause{ProxySide, ClosedRevoked}, nil)
	case limit > 0 && quiet >= limit:
		c.tearDown(Cause{ProxySide, how}, nil)
	case at == relaying && t.halfClosed > 0 && quiet >= t.halfClosed && quiet%t.halfClosed < t.period:
		c.resetIfAborted() // once in a half-closed timeout, because it costs system calls for both legs
	case at == halfClosed:
		c.resetIfPeerGone()
	}
}

// keepAlive lets the server leg find out that its peer has vanished. Only checkTimeouts calls it.
func (c *connection) keepAlive() {
	if c.keptAlive {
		return
	}
	c.keptAlive = true
	if k, ok := c.server.conn.(datapath.KeepAliver); ok {
		if err := k.KeepAlive(); err != nil {
			c.env.Log.Debug("a peer that vanishes is found by the idle timeout alone", "id", c.id, "err", err)
		}
	}
}

// sweepState is what the legs had still to deliver at the last call of hasDelivered.
type sweepState struct {
	active int64    // connection.active at that time
	left   cc.Bytes // undelivered, of both legs
}

// hasDelivered reports whether the legs have delivered bytes since its last call, if no byte
// was relayed in between. That counts as activity. Only checkTimeouts calls it.
func (c *connection) hasDelivered(now cc.Time) bool {
	last := c.lastSweep
	c.lastSweep = sweepState{active: c.active.Load()}
	for _, l := range []*leg{&c.client, &c.server} {
		n, _ := l.conn.Undelivered() // of a leg that is closed: nothing
		c.lastSweep.left += n
	}
	if c.lastSweep.active != last.active || c.lastSweep.left == last.left {
		return false
	}
	c.lastSweep.active = int64(now)
	c.active.Store(int64(now))
	return true
}

// resetIfPeerGone ends a half-closed connection if the side that has sent its FIN was reset or has vanished since. No
// direction reads from that leg any more, so nothing else notices.
func (c *connection) resetIfPeerGone() {
	for _, l := range []struct{ gone, other *leg }{{&c.client, &c.server}, {&c.server, &c.client}} {
		c.mu.Lock()
		idle := l.gone.ended && !l.gone.closed && !l.gone.failed
		c.mu.Unlock()
		if !idle || !l.gone.conn.Aborted() {
			continue
		}
		// The bytes that came before the reset are delivered first.
		if n, err := l.other.conn.Undelivered(); err == nil && n > 0 {
			return // the next look, once it has arrived
		}
		c.tearDown(Cause{c.sideOf(l.gone), ClosedReset}, nil)
	}
}

// resetIfAborted ends a connection if one side has reset it or vanished. Reads do not find that out while the other
// side takes no bytes, because then nothing is read.
func (c *connection) resetIfAborted() {
	for _, l := range []*leg{&c.client, &c.server} {
		if l.conn.Aborted() {
			c.tearDown(Cause{c.sideOf(l), ClosedReset}, nil)
			return
		}
	}
}

// ownAddresses returns the addresses of the legs that this machine must have. Transparent legs, and those inside a
// tunnel, have the addresses of other machines: they work whether this machine has had the same address or not.
func (c *connection) ownAddresses() (own []netip.Addr) {
	if mode := c.listener.cfg.Mode; mode != access.TPROXY && !mode.Tunnels() {
		own = append(own, datapath.LocalOf(c.client.conn).Addr())
	}
	if c.dialled {
		own = append(own, datapath.LocalOf(c.server.conn).Addr())
	}
	return own
}

// destinationHosts returns the hosts that its bytes go to: the client and, once it is reached, the server.
func (c *connection) destinationHosts() [2]netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := [2]netip.Addr{c.clientAddress().Addr().Unmap().WithZone("")}
	if c.phase >= relaying {
		out[1] = datapath.RemoteOf(c.server.conn).Addr().Unmap().WithZone("")
	}
	return out
}

// fillInfo replaces the content of out by the state of the connection. It reuses the memory of out's lists.
func (c *connection) fillInfo(out *FlowInfo, now cc.Time) {
	down, up := out.Down.Control[:0], out.Up.Control[:0]
	c.mu.Lock()
	// The legs are asked for their state without mu, because that may be a system call.
	*out = FlowInfo{
		ID: c.id, Listener: c.listener.cfg.Name, State: c.phase.publicState(),
		Source: c.clientAddress(), Target: c.chosen.Target, Host: c.chosen.Host, Peer: c.chosen.Peer,
		Age: now.Sub(c.started), Idle: max(0, now.Sub(cc.Time(c.active.Load()))),
	}
	client, server := c.client.conn, c.server.conn
	if !out.Relayed() {
		c.mu.Unlock()
		return
	}
	out.Rule, out.ServerName = c.verdict.Rule, c.decidedOn.ServerName
	out.Down.Control, out.Up.Control = down, up
	c.down.fillInfo(&out.Down)
	c.up.fillInfo(&out.Up)
	c.mu.Unlock()
	out.Setup = c.opened.Sub(c.started)
	out.Target = datapath.RemoteOf(server)
	out.Client, out.Server = client.Info(), server.Info()
}

// fillMoved is the part of fillInfo that costs nothing: the state, and the bytes of each direction.
func (c *connection) fillMoved(out *FlowInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*out = FlowInfo{ID: c.id, State: c.phase.publicState()}
	if out.Relayed() {
		c.down.fillMoved(&out.Down)
		c.up.fillMoved(&out.Up)
	}
}
