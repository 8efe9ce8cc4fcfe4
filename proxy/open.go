package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// Kernel is a Server over kernel TCP, with what it stands on.
type Kernel struct {
	*Server
	Datapath *kernel.Datapath
	agents   agents
	routes   *ingress.Routes
}

// Open starts the kernel datapath, opens the listeners and puts the Server
// together. flows may have its Trace and Seed set; Open sets Arm, Shards and Lookup.
// sockets listen at some of the configured addresses already; those at others are closed.
// End it with Close once Serve has returned, or without Serve.
func Open(
	ctx context.Context, cfg config.Config, sockets []*net.TCPListener,
	flows *flow.Manager, clock func() cc.Time, log *slog.Logger,
) (*Kernel, error) {
	links, err := startAgents(cfg.Agents, clock, log)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	before, onTick := links.tick(flows.Tick)
	dp, err := kernel.New(kernel.Config{
		Clock: clock, BeforeTick: before, OnTick: onTick, Envelope: cfg.Envelope.Kernel(), Cells: cfg.Limits.HeldLegs,
		Pipes: DescriptorBudget(cfg.Listeners).Pipes, ReceiveBuffer: cfg.Limits.ReceiveBuffer, Log: log,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("proxy: %w", err), links.close())
	}
	flows.Shards = dp.Shards()
	flows.Arm = func(shard int, _ cc.Time) { dp.Wake(shard) }
	routes, err := ingress.OpenRoutes()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("proxy: %w", err), links.close(), dp.Close())
	}
	accept := func(ln *net.TCPListener) (ingress.Acceptor, error) { return dp.Listener(ln) }
	flows.Lookup = links.lookup
	own, others := assign(cfg, sockets)
	for _, ln := range others {
		log.Warn("a socket was handed over that no listener has; it is closed", "address", ln.Addr().String())
		_ = ln.Close()
	}
	dial := func(d kernel.DialConfig, done func(datapath.Conn, error)) (cancel func()) {
		return dp.Connect(d, func(conn *kernel.Conn, err error) {
			if err != nil {
				done(nil, err) // not a nil *kernel.Conn in an interface
				return
			}
			done(conn, nil)
		})
	}
	open := func(l WayConfig) (Way, error) {
		socket := own[l.Name]
		delete(own, l.Name)
		return openWay(ctx, l, socket, clock, accept, dp, log)
	}
	s, err := New(cfg, Parts{Clock: clock, Flows: flows, Dial: dial, Open: open, Local: routes.Local, Log: log})
	if err != nil {
		routes.Close()
		return nil, errors.Join(err, links.close(), dp.Close())
	}
	return &Kernel{Server: s, Datapath: dp, agents: links, routes: routes}, nil
}

// Reload is the Server's, and has the next connections to agents on other machines be by
// the certificates of cfg.
func (k *Kernel) Reload(cfg config.Config) (Reloaded, error) {
	done, err := k.Server.Reload(cfg)
	if err == nil {
		k.agents.secure(cfg.Agents)
	}
	return done, err
}

// Close ends what Open started; the listeners are closed already if Serve ran.
func (k *Kernel) Close() error {
	for _, l := range k.settings().listeners {
		_ = l.Close()
	}
	k.routes.Close()
	return errors.Join(k.agents.close(), k.Datapath.Close())
}

// assign finds the listener of each socket, by its address.
func assign(c config.Config, sockets []*net.TCPListener) (own map[string]*net.TCPListener, others []*net.TCPListener) {
	own = map[string]*net.TCPListener{}
	for _, ln := range sockets {
		i := slices.IndexFunc(c.Listeners, func(l config.Listener) bool {
			return own[l.Name] == nil && !l.Mode.Tunnels() && sameAddress(l.Address, ln.Addr())
		})
		if i < 0 {
			others = append(others, ln)
			continue
		}
		own[c.Listeners[i].Name] = ln
	}
	return own, others
}

// sameAddress tells whether a listener of an address would be at that socket's.
func sameAddress(address string, is net.Addr) bool {
	want, err := net.ResolveTCPAddr("tcp", address)
	has, ok := is.(*net.TCPAddr)
	if err != nil || !ok || want.Port != has.Port || want.Zone != has.Zone {
		return false
	}
	return want.IP.Equal(has.IP) || want.IP == nil && has.IP.IsUnspecified()
}
