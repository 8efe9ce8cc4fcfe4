package alcc

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// engine is what all connections of the process share: their windows, and the datapath that reads and limits sockets.
// It is started once and lives as long as the process.
type engine struct {
	start    time.Time
	flows    flow.Manager
	datapath *kernel.Datapath

	mu     sync.Mutex
	agents map[string]*agent.Link // by the algorithm that asks for one
}

// sharedEngine returns the engine, and starts it at the first call. The error says why this machine can have none.
var sharedEngine = sync.OnceValues(func() (*engine, error) { return newEngine("") })

// newEngine starts an engine over an envelope of the kernel datapath; empty: the best that the process may use.
func newEngine(envelope string) (*engine, error) {
	e := &engine{start: time.Now(), agents: map[string]*agent.Link{}} //nolint:forbidigo // the program's clock
	dp, err := kernel.New(kernel.Config{Clock: e.now, Envelope: envelope, OnTick: e.flows.Tick})
	if err != nil {
		return nil, err
	}
	e.datapath = dp
	e.flows.Shards = dp.Shards()
	e.flows.Arm = func(shard int, _ cc.Time) { dp.Wake(shard) }
	e.flows.Lookup = e.lookupAlgorithm
	return e, nil
}

// now returns the time since the engine started; it is above zero.
func (e *engine) now() cc.Time { return 1 + cc.Time(time.Since(e.start)) } //nolint:forbidigo // as above

// lookupAlgorithm finds the algorithms of agents, and all others.
func (e *engine) lookupAlgorithm(name string) (cc.Spec, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.agents[name]; l != nil {
		return l.Spec(), nil
	}
	return cc.Lookup(name)
}

// reachAgent starts to look for the agent that decides for s, unless it was done before.
func (e *engine) reachAgent(s *settings) error {
	agentName, isAgent := strings.CutPrefix(s.terms.Algorithm, ccp.Family+":")
	if !isAgent {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.agents[s.terms.Algorithm] != nil {
		return nil
	}
	l, err := agent.Start(agent.Config{Name: agentName, Socket: s.agentSocket, Clock: e.now})
	if err != nil {
		return fmt.Errorf("alcc: agent %s: %w", agentName, err)
	}
	e.agents[s.terms.Algorithm] = l
	return nil
}

// manage takes over a TCP connection and puts it under the algorithm of s.
func (e *engine) manage(conn *net.TCPConn, s *settings) (*Conn, error) {
	l, err := e.datapath.Adopt(conn)
	if err != nil {
		return nil, err
	}
	c := newConn(l)
	c.engine = e
	terms := s.termsFor(l.LocalAddr(), l.RemoteAddr())
	c.asks = l.Enforce(datapath.HoldAll, e.flows.Shard(terms))&datapath.HoldWindow == 0
	c.flow, err = e.flows.Open(e.now(), terms, flow.Leg{Enforces: !c.asks, Apply: l.Apply, Wake: c.noteRoom})
	if err != nil { // the terms were checked
		return nil, fmt.Errorf("alcc: %w", err)
	}
	l.Observe(c.flow.Report)
	return c, nil
}
