package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
)

// rejection is why a connection was not relayed.
type rejection struct {
	reason Reason
	err    error
}

// greetClient finds out where the client wants to go.
func (c *connection) greetClient() *rejection {
	ctx := context.Background()
	if !c.prompt {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		c.endsBy(cancel)
	}
	chosen, err := c.listener.Greet(ctx, c.accepted)
	switch {
	case errors.Is(err, ingress.ErrUnauthorized):
		return &rejection{RejectedAuth, err}
	case err != nil:
		return &rejection{RejectedHandshake, err}
	}
	early, conn := chosen.Detach()
	c.mu.Lock()
	c.chosen = chosen
	c.client = leg{conn: conn}
	c.up.early = early
	c.state = StateDialing
	c.mu.Unlock()
	if c.counted == nil {
		c.counted = c.srv.limits.enterSource(source{host: datapath.Host(chosen.Source.Addr())})
		if c.counted == nil {
			return c.refuseClient(&refusal{
				RejectedSourceLimit,
				fmt.Errorf("too many connections from %v", chosen.Source.Addr()),
			})
		}
	}
	if c.listener.cfg.Mode.Captures() {
		if err := c.srv.loops.noteCaptured(c.clientWire()); err != nil {
			return c.refuseClient(&refusal{RejectedLoop, err})
		}
		c.captured = true
	}
	return nil
}

// attachServer takes the server leg, and tells the client how the dial went.
func (c *connection) attachServer(server datapath.Conn, err error) *rejection {
	if err != nil {
		return c.refuseClient(err)
	}
	if !c.setServer(server) {
		_ = server.Reset()
		return c.refuseClient(&refusal{RejectedShutdown, errors.New("the proxy is shutting down")})
	}
	// Once more, for now it is known which of a name's addresses answered.
	if target := addrPort(server.RemoteAddr()); c.decidedOn.Target != target {
		c.askRules(target)
	}
	c.verdict = &c.prospects[len(c.prospects)-1]
	// A server that waits for a header before it speaks is not kept waiting for
	// the client's first bytes, unless they decide about the header.
	if c.headerSettled() {
		if err := c.sendProxyHeader(); err != nil {
			_ = server.Reset()
			return c.refuseClient(err)
		}
	}
	if err := c.chosen.Answer(addrPort(server.LocalAddr()), nil); err != nil {
		return c.giveUp(RejectedClientGone, err)
	}
	c.chosen.Answer = nil
	return nil
}

// headerSettled tells whether all that the rules may say is the same as to the PROXY header.
func (c *connection) headerSettled() bool {
	return !slices.ContainsFunc(c.prospects, func(v policy.Verdict) bool { return v.SendProxy != c.verdict.SendProxy })
}

// decideByName decides between the prospects by the server name, for which it waits.
func (c *connection) decideByName() *rejection {
	c.decidedOn.ServerName = c.awaitServerName()
	settled := c.headerSettled()
	if r := c.applyNameVerdict(); r != nil {
		return r
	}
	if !settled {
		if err := c.sendProxyHeader(); err != nil {
			return c.giveUp(RejectedDialError, err)
		}
	}
	return nil
}

// giveUp ends a connection to whose client nothing more can be said.
func (c *connection) giveUp(reason Reason, err error) *rejection {
	_ = c.server.conn.Reset()
	_ = c.client.conn.Reset()
	return &rejection{reason, err}
}

// refuseClient tells the client in its protocol, which closes the connection.
func (c *connection) refuseClient(err error) *rejection {
	_ = c.chosen.Answer(netip.AddrPort{}, err)
	return &rejection{dialReason(err), err}
}

// policyFacts are what policy decides on, if target is where it goes.
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
	} else if from := addrPort(c.accepted.RemoteAddr()).Addr(); from != f.Source.Addr() { // a PROXY header told of another
		f.Peer = from.String()
	}
	if via, err := c.tunnelFor(target.Addr()); via != nil && err == nil {
		f.TargetPeer, f.TargetListener = via.Peer(target.Addr()), via.Name()
	}
	return f
}

// dialServer makes the server leg and calls done, which may be on a loop. Every address, resolved
// or given, is shown to the guards right before it is tried.
func (c *connection) dialServer(done func(datapath.Conn, error)) {
	timeout := c.decidedBy.cfg.Limits.DialTimeout
	if to := c.chosen.Target; to.IsValid() {
		if via, err := c.tunnelFor(to.Addr()); via != nil && err == nil {
			if err := c.permitTarget(to); err != nil {
				done(nil, err)
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			c.endsBy(cancel)
			c.srv.setters.runSetup(func() {
				defer cancel()
				done(kernel.UntilReset(ctx, c.client.conn, func(ctx context.Context) (datapath.Conn, error) {
					return via.Dial(ctx, c.chosen.Source.Addr(), to)
				}))
			})
			return
		}
	}
	cfg := kernel.DialConfig{
		Target:  c.chosen.Target,
		Host:    c.chosen.Host,
		Mark:    uint32(c.decidedBy.cfg.Mark),
		Hops:    c.chosen.Hops,
		Near:    c.client.conn,
		Guard:   c.permitOutside,
		Timeout: timeout,
	}
	if c.listener.cfg.KeepClient {
		cfg.Source = netip.AddrPortFrom(c.chosen.Source.Addr(), 0)
	}
	if c.decidedBy.policy.KeepsDSCP() {
		cfg.DSCP = c.dscpTowards
	}
	c.endsBy(c.srv.parts.Dial(cfg, func(conn datapath.Conn, err error) {
		if err == nil && !c.listener.cfg.KeepClient { // else it may look like another connection of that client
			err = c.noteDialled(conn)
		}
		if err != nil {
			conn = nil
		}
		done(conn, err)
	}))
}

// noteDialled notes the server leg, unless it has come back to us.
func (c *connection) noteDialled(conn datapath.Conn) error {
	if err := c.srv.loops.noteDialled(serverWire(conn)); err != nil {
		_ = conn.Reset()
		return &refusal{RejectedLoop, err}
	}
	c.dialled = true
	return nil
}

// clientWire is a captured client leg: from the client to where it meant to go.
func (c *connection) clientWire() wire {
	return wireOf(addrPort(c.accepted.RemoteAddr()), c.chosen.Target)
}

// serverWire is a server leg that was dialled from this machine.
func serverWire(conn datapath.Conn) wire {
	return wireOf(addrPort(conn.LocalAddr()), addrPort(conn.RemoteAddr()))
}

// permitOutside is asked about each address before it is tried from this machine.
func (c *connection) permitOutside(target netip.AddrPort) error {
	if via, err := c.tunnelFor(target.Addr()); via != nil && err == nil {
		return fmt.Errorf("destination %v of a name is inside the tunnel, where names do not lead: %w", target,
			syscall.EHOSTUNREACH)
	}
	return c.permitTarget(target)
}

// permitTarget refuses an address by guards and rules.
func (c *connection) permitTarget(target netip.AddrPort) error {
	if err := c.srv.guardTarget(c.listener, target, c.chosen.Fixed); err != nil {
		return err
	}
	var prospects []policy.Verdict
	if c.chosen.Target.IsValid() {
		prospects = c.askRules(target)
	} else { // addresses of a name may be tried at the same time
		prospects = c.decidedBy.policy.Prospects(nil, c.policyFacts(target))
	}
	if slices.ContainsFunc(prospects, func(v policy.Verdict) bool { return v.Refuse == "" }) {
		return nil
	}
	return refusedBy(prospects[len(prospects)-1])
}

// askRules finds out what the rules may say of target.
func (c *connection) askRules(target netip.AddrPort) []policy.Verdict {
	c.decidedOn = c.policyFacts(target)
	c.prospects = c.decidedBy.policy.Prospects(c.mostly[:0], c.decidedOn)
	return c.prospects
}

func refusedBy(v policy.Verdict) *refusal {
	return &refusal{RejectedRule, fmt.Errorf("rule %s: %s", v.Rule, v.Refuse)}
}

// sendProxyHeader tells the server who the client is, where the verdict has it so.
func (c *connection) sendProxyHeader() error {
	version := c.verdict.SendProxy
	if version == 0 {
		return nil
	}
	target := c.chosen.Target
	if !target.IsValid() {
		target = addrPort(c.server.conn.RemoteAddr())
	}
	// A fresh connection has room for it, so this does not wait.
	if err := ingress.WriteProxyHeader(c.server.conn, version, c.chosen.Source, target, c.chosen.CameTo()); err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}

// openDirections joins the legs: a flow for each managed direction, a carrier for both.
func (c *connection) openDirections() error {
	c.active.Store(int64(c.srv.clock()))
	v := c.verdict
	if err := c.openDirection(&c.down, &c.server, &c.client, &v.Down, &v.FromServer); err != nil {
		return err
	}
	return c.openDirection(&c.up, &c.client, &c.server, &v.Up, &v.FromClient)
}

func (c *connection) openDirection(d *direction, src, dst *leg, terms, receives *flow.Terms) error {
	d.conn, d.src, d.dst, d.terms, d.receives = c, src, dst, terms, receives
	d.read.Store(int64(len(d.early)))
	d.maxPiece = int(c.decidedBy.cfg.Limits.Buffer)
	d.piece = d.maxPiece
	switch exchange := c.chosen.Exchange; {
	case exchange == nil:
		d.carrier = datapath.NewCarrier(dst.conn, src.conn, c.srv.buffers)
	case src == &c.client:
		d.carrier = datapath.NewCopy(dst.conn, exchange.RequestFrom(src.conn), c.srv.buffers)
	default:
		d.carrier = datapath.NewCopy(dst.conn, exchange.AnswerFrom(src.conn), c.srv.buffers)
	}
	_, d.unbound = src.conn.(datapath.Receiver)
	d.unbound = d.unbound && c.decidedBy.cfg.Limits.ReceiveBuffer > 0
	if isManaged(terms) {
		d.piece = min(minPiece, d.maxPiece)
	}
	free := unmanagedAllowance(terms)
	d.free.Store(free)
	if free != 0 {
		return nil
	}
	return c.openFlow(d)
}

// openFlow opens a flow for d, unless a reload says meanwhile that it needs none. The
// goroutine that writes calls it, or nobody writes yet.
func (c *connection) openFlow(d *direction) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d.free.Swap(unmanaged) < 0 {
		return nil
	}
	to, flows := d.dst.conn, c.srv.parts.Flows
	enforces := to.Enforce(wantedHold(d.terms), flows.Shard(*d.terms))&datapath.HoldWindow != 0
	leg := flow.Leg{Enforces: enforces, Apply: to.Apply, Wake: d.wakeUp}
	f, err := flows.Open(c.srv.clock(), *d.terms, leg)
	if err != nil {
		return fmt.Errorf("proxy: %s: %w", d.directionName(), err)
	}
	d.flow, d.enforces = f, enforces
	to.Observe(f.Report)
	return nil
}

// addrPort is the address without the disguise of IPv4 in IPv6, and without
// a zone.
func addrPort(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok || tcp == nil {
		return netip.AddrPort{}
	}
	ap := tcp.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}
