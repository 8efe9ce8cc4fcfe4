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

// sockets is the kernel datapath, which reads and limits sockets of TCP.
type sockets struct{ *kernel.Datapath }

// openSockets starts the kernel datapath of an engine. The error says why it cannot be had.
func openSockets(e *engine, envelope string) (*sockets, error) {
	if runtime.GOOS == "android" { // Android kills a program that calls bpf(2)
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
	if err != nil { // unlikely: resolve has checked the terms
		return nil, fmt.Errorf("alcc: %w", err)
	}
	l.Observe(c.flow.Report)
	return c, nil
}

// openWindow takes a connection over and sets its window in the kernel to unboundWindow, so that only the window above
// limits it. It returns nil unless the kernel runs our eBPF congestion control; conn keeps the system's then. The
// kernel's BBR is no substitute, because it stops for 200 ms in every 10 s, which an algorithm above takes for an
// outage.
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

// unboundWindow is larger than any window of a framed connection, in bytes.
const unboundWindow = 64 << 20

// agents has the links to the agents that options have named.
type agents struct {
	mu    sync.Mutex
	links map[string]*agent.Link // by algorithm, such as ccp:NAME
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

// reachAgent starts a link to the agent that decides for s, unless there is one.
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

// limitUnsent bounds the unsent bytes in the kernel of the TCP connection below conn, if there is one. Otherwise their
// wait would count as the path's delay, and acknowledgements would wait behind them.
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
			_ = raw.Control(func(fd uintptr) { // sockets that are not of TCP refuse it
				_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, bound)
			})
		}
	}
}

// readOutOfOrder returns how many bytes a TCP connection has received behind a hole since it began. Bytes that came
// twice count twice. 0: the system does not say.
func readOutOfOrder(conn net.Conn) (n cc.Bytes) {
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
