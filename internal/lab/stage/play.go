package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/traffic"
	"github.com/penstock-net/penstock/internal/netlab"
)

const (
	firstData     = 15 * time.Second // for the first data packet to show up
	progressEvery = 500 * time.Millisecond
)

// What links' losses are drawn from beside the stage's seed: as in virtual time.
const downSeed, upSeed = 0x646f776e, 0x7570

// Env is what a stage is played with.
type Env struct {
	Executable string   // the program that is the proxy: penstock
	Args       []string // beside its configuration, such as --mdi-model
	// Laboratory is the program penstock-lab, which has native senders and receivers; empty: this program.
	Laboratory string
	Blind      bool // do not look at the proxy as it runs, which costs it a little time
}

// run is a stage at play:
//
//	client ════ last hop ════ edge ──── veth ──── server
//	 an address              routes, or is         .2  towards the proxy
//	 for each host           the proxy             .3  past it
type run struct {
	stage   Stage
	env     Env
	lab     *netlab.Cellular
	direct  netip.Addr // of the server, for who is not captured
	servers []*traffic.Server
	proxy   *edge.Proxy  // nil: there is none
	tunnel  *edge.Tunnel // nil: there is none
	agents  agents.Agents
	actors  []*actor
	began   chan struct{}  // closed when the first data packet has come
	others  sync.WaitGroup // all goroutines of the run but the actors' own
	failed  chan error     // what ends the run; the first stands
	record  Record
	below   []windowSample // of windows and what is below them; the watch appends, until others have ended

	counting sync.Mutex // held while what was sent is counted, and while a connection ends
}

// Play plays the stage between network namespaces, in real time, with a proxy
// process at the edge where the stage has one. progress is called with how far it is
// about twice a second; nil: it is not. When ctx ends there is no record.
func Play(ctx context.Context, env Env, s Stage, progress func(elapsed time.Duration)) (Record, error) {
	if err := errors.Join(s.Check(), s.Realisable()); err != nil {
		return Record{}, err
	}
	r := newRun(env, s)
	err := r.play(ctx, func(ctx context.Context) error {
		err := r.set(ctx)
		if err == nil {
			err = r.act(ctx, progress)
		}
		return err
	})
	if err != nil {
		return Record{}, err
	}
	return r.record, nil
}

func newRun(env Env, s Stage) *run {
	return &run{stage: s, env: env, began: make(chan struct{}), failed: make(chan error, 1)}
}

// play builds the last hop, starts the agents that the proxy is to name, calls act, and takes the figures.
func (r *run) play(ctx context.Context, act func(context.Context) error) (err error) {
	defer func() {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			err = fmt.Errorf("stage: %s: %w", r.stage.Name, err)
		}
	}()
	defer netlab.QuietCollector()()
	runtime.GC() // now, not in the middle of the run
	if r.lab, err = r.stage.network(); err != nil {
		return err
	}
	// The servers' side outlives the actors, so that no actor sees an error that the
	// end of the run itself made.
	edgeCtx, cancel := context.WithCancel(ctx)
	var ended func()
	if r.agents, ended, err = r.stage.deciding().Start(); err == nil {
		defer ended()
		err = act(edgeCtx)
	}
	cancel()
	for _, s := range r.servers {
		err = errors.Join(err, s.Close())
	}
	r.others.Wait()
	if r.proxy != nil {
		if err != nil {
			err = r.proxy.Explain(err)
		}
		err = errors.Join(err, r.proxy.Stop())
	}
	if r.tunnel != nil {
		r.tunnel.Close()
	}
	if err == nil {
		err = r.account()
	}
	return errors.Join(err, r.lab.Close())
}

// network builds the last hop, hosts, edge and server.
func (s Stage) network() (*netlab.Cellular, error) {
	cfg := netlab.CellularConfig{Down: s.Down, Up: s.Up, Cell: s.Cell}
	cfg.Up.Seed = s.Seed ^ upSeed
	if c := s.Cell; c == nil {
		cfg.Down.Seed = s.Seed ^ downSeed
	} else {
		drawn := *c
		cfg.Cell, drawn.Seed = &drawn, s.Seed^downSeed
	}
	for _, a := range s.Actors {
		cfg.Hosts = max(cfg.Hosts, a.Host+1)
	}
	lab, err := netlab.NewCellular(cfg)
	if err != nil {
		return nil, err
	}
	err = traffic.Loosen(lab.Client, lab.Edge, lab.Server)
	if err == nil && s.marks() {
		err = lab.Client.Sysctl("net.ipv4.tcp_ecn", "1")
	}
	if err != nil {
		return nil, errors.Join(err, lab.Close())
	}
	return lab, nil
}

// set puts hosts, servers and proxy in place.
func (r *run) set(ctx context.Context) error {
	r.direct = r.lab.ServerAddr.V4.Next()
	if err := r.lab.Server.Address(netlab.FarDevice, netip.PrefixFrom(r.direct, 24)); err != nil {
		return err
	}
	for i := range r.stage.Actors {
		r.actors = append(r.actors, r.newActor(i))
	}
	ports, err := r.serve(ctx)
	if err != nil {
		return err
	}
	opts := edge.Options{
		Executable: r.env.Executable, Args: r.env.Args, Config: r.agents.YAML() + r.stage.Edge,
		Server: r.lab.ServerAddr.V4, Ports: ports, Hold: r.stage.Hold,
	}
	if r.stage.Tunnel != "" {
		if r.tunnel, err = edge.NewTunnel(); err != nil {
			return err
		}
		opts.Listener = r.tunnel.Listener()
	}
	if r.stage.Edge != "" && !r.stage.Native {
		r.proxy, err = edge.Start(ctx, r.lab.Edge, opts)
	} else if r.tunnel != nil {
		err = r.tunnel.Route(r.lab.Edge)
	}
	if err == nil && r.tunnel != nil {
		err = r.tunnel.Join(r.lab)
	}
	return err
}

// serve starts the servers, and returns the ports of connections that the proxy serves.
func (r *run) serve(ctx context.Context) (captured []uint16, err error) {
	seen := map[netip.AddrPort]bool{}
	for _, a := range r.actors {
		if a.isDatagrams() || r.stage.Native || seen[a.server] {
			continue
		}
		seen[a.server] = true
		algorithm := cmp.Or(r.stage.Kernel, kernelDefault)
		if a.proxied {
			algorithm = kernelDefault // which does not matter: that leg has no bottleneck
			captured = append(captured, a.server.Port())
		}
		s, err := traffic.Serve(r.lab.Server, a.server.String(), algorithm, r.answer(ctx))
		if err != nil {
			return nil, err
		}
		r.servers = append(r.servers, s)
	}
	return captured, nil
}

// now is the time since the first data packet; 0 before it.
func (r *run) now() time.Duration { return r.lab.Path.Elapsed() }

// wait waits for a moment of the run.
func (r *run) wait(ctx context.Context, until time.Duration) error {
	if until > 0 {
		select {
		case <-r.began:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	left := until - r.now()
	if left <= 0 {
		return ctx.Err()
	}
	select {
	case <-time.After(left):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fail ends the run with err, unless something else has.
func (r *run) fail(err error) {
	select {
	case r.failed <- err:
	default:
	}
}

// act lets the actors play, and everything around them, until the run is over.
func (r *run) act(ctx context.Context, progress func(time.Duration)) (err error) {
	actors, stop := context.WithCancel(ctx)
	var playing sync.WaitGroup
	defer func() {
		stop()
		playing.Wait()
	}()
	if slices.ContainsFunc(r.stage.Actors, func(a Actor) bool { return a.Start == 0 }) {
		r.lab.Path.StartOnData()
	} else {
		r.lab.Path.Start() // none sends data at the start
	}
	for _, a := range r.actors {
		playing.Go(func() { a.play(actors) })
	}
	if err := r.awaitData(ctx); err != nil {
		return err
	}
	close(r.began)
	watch, err := r.accompany(actors)
	if err != nil {
		return err
	}
	end, tell := time.After(r.stage.Duration-r.now()), time.Tick(progressEvery)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-r.failed:
			return err
		case <-r.ended():
			return fmt.Errorf("the proxy ended after %s", r.now().Round(time.Millisecond))
		case <-tell:
			if progress != nil {
				progress(r.now())
			}
		case <-end:
			return watch.finish()
		}
	}
}

func (r *run) awaitData(ctx context.Context) error {
	poll, late := time.Tick(5*time.Millisecond), time.After(firstData)
	for r.now() == 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.ended():
			return errors.New("the proxy ended before any data came")
		case err := <-r.failed:
			return err
		case <-late:
			return fmt.Errorf("no data came within %s", firstData)
		case <-poll:
		}
	}
	return nil
}

// ended is closed when the proxy has ended by itself.
func (r *run) ended() <-chan struct{} {
	if r.proxy == nil {
		return nil
	}
	return r.proxy.Ended()
}
