package alcc

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// sockets read and limit the sockets of the kernel's TCP.
type sockets struct{ *kernel.Datapath }

// openSockets starts the datapath of an engine. The error says why this machine can have none.
func openSockets(e *engine, envelope string) (*sockets, error) {
	if runtime.GOOS == "android" { // which kills a program that asks for eBPF
		return nil, errors.New("windows over the kernel's TCP are not held on Android: set Options.OwnAcks")
	}
	dp, err := kernel.New(kernel.Config{Clock: e.now, Envelope: envelope, OnTick: e.flows.Tick})
	if err != nil {
		return nil, err
	}
	e.flows.Shards = dp.Shards()
	e.flows.Arm = func(shard int, _ cc.Time) { dp.Wake(shard) }
	return &sockets{dp}, nil
}

// manage takes over a TCP connection and puts it under the algorithm of s.
func (e *engine) manage(conn *net.TCPConn, s *settings) (*Conn, error) {
	l, err := e.sockets.Adopt(conn)
	if err != nil {
		return nil, err
	}
	c := newConn(l)
	c.engine = e
	terms := s.termsFor(l.LocalAddr(), l.RemoteAddr())
	c.asks = l.Enforce(datapath.HoldAll, e.flows.Shard(terms))&datapath.HoldWindow == 0
	c.flow, err = e.flows.Open(e.now(), terms, flow.Leg{
		Enforces: !c.asks, Apply: l.Apply, Wake: func() { notify(c.room) },
	})
	if err != nil { // the terms were checked
		return nil, fmt.Errorf("alcc: %w", err)
	}
	l.Observe(c.flow.Report)
	return c, nil
}

// openWindow takes a connection over and opens its window in the kernel so far that it does not bind, where the kernel
// runs our congestion control. nil: it does not, and conn keeps the system's. The kernel's BBR would not do: it stops
// for 200 ms in every 10 s, which an algorithm above takes for an outage.
func (e *engine) openWindow(conn *net.TCPConn, t flow.Terms) datapath.Conn {
	if e.sockets == nil || e.sockets.Envelope() != kernel.EBPF {
		return nil
	}
	l, err := e.sockets.Adopt(conn)
	if err != nil {
		return nil
	}
	l.Enforce(datapath.HoldAll, e.flows.Shard(t))
	l.Apply(flow.Limit{Cwnd: unboundWindow})
	return l
}

// unboundWindow is a window that no framing fills, in bytes.
const unboundWindow = 64 << 20

// agents are the links to agents that options have named.
type agents struct {
	mu    sync.Mutex
	links map[string]*agent.Link // by the algorithm that asks for one
}

// lookupAlgorithm finds the algorithms of agents, and all others.
func (a *agents) lookupAlgorithm(name string) (cc.Spec, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.links[name]; l != nil {
		return l.Spec(), nil
	}
	return cc.Lookup(name)
}

// reachAgent starts to look for the agent that decides for s, unless that was done before.
func (e *engine) reachAgent(s *settings) error {
	name, isAgent := strings.CutPrefix(s.terms.Algorithm, ccp.Family+":")
	if !isAgent {
		return nil
	}
	a := &e.agents
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.links[s.terms.Algorithm] != nil {
		return nil
	}
	l, err := agent.Start(agent.Config{Name: name, Socket: s.agentSocket, Clock: e.now})
	if err != nil {
		return fmt.Errorf("alcc: agent %s: %w", name, err)
	}
	if a.links == nil {
		a.links = map[string]*agent.Link{}
	}
	a.links[s.terms.Algorithm] = l
	return nil
}

// limitUnsent bounds what the kernel holds unsent of the TCP connection below conn, if there is one: what waits there
// would count as the path's delay, and acknowledgements would wait behind it.
func limitUnsent(conn net.Conn) {
	const bound = 2 * 1448 // two segments
	for {
		below, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		conn = below.NetConn()
	}
	if c, ok := conn.(syscall.Conn); ok {
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { // other sockets than TCP's refuse
				_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, bound)
			})
		}
	}
}

// readOvertaken returns how many bytes a TCP connection has received behind a hole, those that came twice included. It
// is a count since the connection began; 0: the system does not say.
func readOvertaken(conn net.Conn) (n cc.Bytes) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return 0
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = cc.Bytes(info.Rcv_ooopack) * cc.Bytes(info.Rcv_mss)
		}
	})
	return n
}
