package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/takeover"
)

// Kernel is a Server over kernel TCP, with the datapath, links to agents and sockets that it needs.
type Kernel struct {
	*Server
	Datapath *kernel.Datapath
	agents   agents
	routes   *ingress.Routes // tells which addresses are this machine's
	sockets  []GivenSocket
	adopted  atomic.Int64 // connections that came from the process before this one
}

// Open starts the kernel datapath, opens the listeners and puts the Server
// together. flows may have its Trace and Seed set; Open sets Arm, Shards and Lookup. It takes over sockets that listen
// already: at addresses of cfg or, if they are Kept, of a later configuration. Close ends the Kernel once Serve has
// returned, or without Serve.
func Open(
	ctx context.Context, cfg config.Config, sockets []GivenSocket,
	flows *flow.Manager, clock func() cc.Time, log *slog.Logger,
) (*Kernel, error) {
	// The ticks of the datapath call the agents, so these are started first.
	links, err := startAgents(cfg.Agents, clock, log)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	before, onTick := links.wrapTick(flows.Tick)
	budget := DescriptorBudget(&cfg)
	dp, err := kernel.New(kernel.Config{
		Clock: clock, BeforeTick: before, OnTick: onTick, Envelope: cfg.Envelope.Kernel(), Cells: cfg.Limits.HeldLegs,
		Pipes: budget.Pipes, Attempts: budget.Attempts, Lookups: budget.Lookups,
		ReceiveBuffer: cfg.Limits.ReceiveBuffer, Log: log,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("proxy: %w", err), links.closeLinks())
	}
	// Each tick of the datapath serves one shard of the flows.
	flows.Shards = dp.Shards()
	flows.Arm = func(shard int, _ cc.Time) { dp.Wake(shard) }
	routes, err := ingress.OpenRoutes()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("proxy: %w", err), links.closeLinks(), dp.Close())
	}
	accept := func(ln *net.TCPListener) (ingress.Acceptor, error) { return dp.Listener(ln) }
	flows.Lookup = links.lookupAlgorithm
	for _, s := range sockets {
		if s.Kept && !slices.ContainsFunc(cfg.Listeners, s.isOf) {
			log.Warn("a socket was handed over that no listener has", "address", s.Address)
		}
	}
	open := func(l ListenerConfig) (Listener, error) {
		socket, err := socketOf(sockets, l.Listener)
		if err != nil {
			return nil, err
		}
		return openByMode(ctx, l, socket, clock, accept, dp, log)
	}
	s, err := New(cfg, Parts{
		Clock: clock, Flows: flows, Dial: dialOver(dp), Open: open, Local: routes.Local, Log: log,
		UnenforcedLegs: func() uint64 {
			if e := dp.Status().Enforced; e != nil {
				return e.Full
			}
			return 0
		},
	})
	if err != nil {
		routes.Close()
		return nil, errors.Join(err, closeAll(sockets), links.closeLinks(), dp.Close())
	}
	sockets = closePassing(sockets) // a reload finds only those that are kept
	return &Kernel{Server: s, Datapath: dp, agents: links, routes: routes, sockets: sockets}, nil
}

// dialOver returns Parts.Dial over kernel TCP. It hands legs over as interfaces, so that tests can replace the kernel.
func dialOver(dp *kernel.Datapath) func(kernel.DialConfig, func(datapath.Conn, error)) (cancel func()) {
	return func(d kernel.DialConfig, done func(datapath.Conn, error)) (cancel func()) {
		return dp.Connect(d, func(conn *kernel.Conn, err error) {
			if err != nil {
				done(nil, err) // not a nil *kernel.Conn in an interface
				return
			}
			done(conn, nil)
		})
	}
}

// TakeoverRole is the role of client listeners among the sockets of a takeover.
const TakeoverRole = "listener"

// TakeoverSockets returns descriptors of the sockets that clients connect to, for the process that takes over. stays
// names the listeners that cannot be taken over.
func (k *Kernel) TakeoverSockets() (sockets takeover.Sockets, stays []string, err error) {
	k.reloading.Lock()
	defer k.reloading.Unlock()
	if k.draining.Load() {
		return nil, nil, errEnding
	}
	for _, l := range k.env.currentSettings().listeners {
		w, ok := l.Listener.(*socketListener)
		switch {
		case !ok:
			stays = append(stays, fmt.Sprintf("listener %q, which ends a tunnel", l.cfg.Name))
			continue
		case len(w.held) > 0:
			stays = append(stays, fmt.Sprintf("listener %q, which holds UDP", l.cfg.Name))
			continue
		}
		fd, err := w.Duplicate()
		if err != nil {
			return sockets, nil, fmt.Errorf("listener %q: %w", l.cfg.Name, err)
		}
		sockets = append(sockets, takeover.Socket{Role: TakeoverRole, Address: w.Addr().String(), FD: fd})
	}
	return sockets, stays, nil
}

// Reload is Server.Reload. The next connections to agents on other machines then use
// the certificates of cfg.
func (k *Kernel) Reload(cfg config.Config) (Reloaded, error) {
	done, err := k.Server.Reload(cfg)
	if err == nil {
		k.agents.updateCertificates(cfg.Agents)
	}
	return done, err
}

// Close ends what Open started; the listeners are closed already if Serve ran.
func (k *Kernel) Close() error {
	for _, l := range k.env.currentSettings().listeners {
		_ = l.Close()
	}
	k.routes.Close()
	return errors.Join(closeAll(k.sockets), k.agents.closeLinks(), k.Datapath.Close())
}

// GivenSocket is a listening socket that another process opened. The runtime does not wait for it.
type GivenSocket struct {
	takeover.Socket
	// Kept says that its giver keeps it open, such as systemd. Another socket cannot listen at its address then, so it
	// is kept even where no listener has it: a reload may leave its address and come back.
	Kept bool
}

// closePassing closes the descriptors of sockets that are not kept, and returns the others.
func closePassing(sockets []GivenSocket) (kept []GivenSocket) {
	for _, s := range sockets {
		if s.Kept {
			kept = append(kept, s)
		} else {
			_ = unix.Close(s.FD) // its listener has a descriptor of its own
		}
	}
	return kept
}

// closeAll closes the descriptors of sockets.
func closeAll(sockets []GivenSocket) (err error) {
	for _, s := range sockets {
		err = errors.Join(err, unix.Close(s.FD))
	}
	return err
}

// isOf reports whether a listener has the address of the socket.
func (s GivenSocket) isOf(l access.Listener) bool {
	return !l.Mode.Tunnels() && takeover.SameAddress(l.Address, s.Address)
}

// socketOf returns the socket that was handed over for a listener. nil: there is none.
func socketOf(given []GivenSocket, l access.Listener) (*net.TCPListener, error) {
	i := slices.IndexFunc(given, func(s GivenSocket) bool { return s.isOf(l) })
	if i < 0 {
		return nil, nil
	}
	// The listener closes its descriptor when a reload drops it. The original stays for a reload that brings it back.
	s := given[i].Socket
	var err error
	if s.FD, err = unix.FcntlInt(uintptr(s.FD), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("take the socket at %s: %w", s.Address, err)
	}
	ln, err := s.Listener()
	if err != nil {
		return nil, err
	}
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("takeover: the socket at %s is none of TCP", s.Address), ln.Close())
	}
	return tcp, nil
}

// openByMode opens a listener of any mode. socket already listens at its address; nil: none does.
func openByMode(
	ctx context.Context, l ListenerConfig, socket *net.TCPListener, clock func() cc.Time, open ingress.Open,
	dp *kernel.Datapath, log *slog.Logger,
) (Listener, error) {
	if l.Mode.Tunnels() && l.WireGuard.DatapathOrDefault() != access.DatapathNetstack {
		in, err := openKernelListener(ctx, l, open, dp, log)
		if err == nil || l.WireGuard.DatapathOrDefault() == access.DatapathKernel || !access.Netstack {
			return in, err // there is nothing else
		}
		// With datapath auto the tunnel works in user space, too.
		log.Info("tunnel: netstack ends it", "listener", l.Name, "why", err)
	}
	if l.Mode.Tunnels() {
		return openTunnelListener(l, clock, log)
	}
	cfg := l.ingressConfig(log)
	cfg.Socket = socket
	socketIn, err := ingress.Listen(ctx, cfg, open)
	if err != nil {
		return nil, err
	}
	in := &socketListener{Socket: socketIn, log: log}
	if in.held, err = openHeldUDPs(l.UDP); err != nil {
		return nil, errors.Join(err, socketIn.Close())
	}
	return in, nil
}

// agents are the links to the agents of a configuration, in its order.
type agents []*agent.Link

// startAgents starts the links of a configuration.
func startAgents(list []agent.Settings, clock func() cc.Time, log *slog.Logger) (agents, error) {
	var links agents
	for _, a := range list {
		secure, err := a.TLSConfig()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("agent %q: tls: %w", a.Name, err), links.closeLinks())
		}
		l, err := agent.Start(agent.Config{
			Name: a.Name, Address: a.Address, TLS: secure, Socket: a.SocketPath(), Reply: a.ReplyPath(), Algorithm: a.Algorithm,
			Clock: clock, Log: log,
		})
		if err != nil {
			return nil, errors.Join(err, links.closeLinks())
		}
		links = append(links, l)
	}
	return links, nil
}

// lookupAlgorithm finds the algorithms of agents, and all others.
func (a agents) lookupAlgorithm(name string) (cc.Spec, error) {
	for _, l := range a {
		if s := l.Spec(); s.Name == name {
			return s, nil
		}
	}
	return cc.Lookup(name)
}

// updateCertificates sets the certificates for the next connections. The configuration was checked.
func (a agents) updateCertificates(list []agent.Settings) {
	for i, c := range list {
		if by, err := c.TLSConfig(); err == nil {
			a[i].SetTLS(by)
		}
	}
}

// wrapTick wraps a tick of the kernel datapath, so that the messages of its flows to agents leave together at its end.
func (a agents) wrapTick(tick func(shard int, now cc.Time) cc.Time) (before func(), on func(int, cc.Time) cc.Time) {
	if len(a) == 0 { // nothing is sent
		return nil, tick
	}
	return func() {
			for _, l := range a {
				l.Hold()
			}
		}, func(shard int, now cc.Time) cc.Time {
			next := tick(shard, now)
			for _, l := range a {
				l.Release()
			}
			return next
		}
}

// closeLinks ends all links.
func (a agents) closeLinks() (err error) {
	for _, l := range a {
		err = errors.Join(err, l.Close())
	}
	return err
}

// Agents returns the state of the agents, in the order of the configuration.
func (k *Kernel) Agents() []agent.Info {
	var out []agent.Info
	for _, l := range k.agents {
		out = append(out, l.Info())
	}
	return out
}
