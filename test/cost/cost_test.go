//go:build linux

// Package cost measures what proxying costs in processor time, between network
// namespaces:
//
//	client ──── veth ──── edge ──── veth ──── server
//	reads               the proxy             writes
//
//	go test -run '^$' -bench . -benchtime 1x ./test/cost
//
// Ratios are to the first row of each table, which for Cost is the plainest proxy
// there is (accept, dial, two io.Copy, which package net turns into splice). The
// processor time is the proxy's own, but all share the machine.
package cost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/traffic"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

const (
	proxyPort     = 8080 // of the edge
	serverPort    = 80
	telemetryAddr = "127.0.0.1:9464"

	warmUp  = 3 * time.Second // slow start, and the first round of every flow
	measure = 10 * time.Second
)

// ownProxyEnv makes this test binary one of ownProxies: "name, listen address, backend".
const ownProxyEnv = "PENSTOCK_COST_PROXY"

func TestMain(m *testing.M) {
	if args := strings.Fields(os.Getenv(ownProxyEnv)); len(args) == 3 {
		fmt.Fprintln(os.Stderr, ownProxies[args[0]](args[1], args[2]))
		os.Exit(1)
	}
	if with := os.Getenv(libraryEnv); with != "" {
		fmt.Fprintln(os.Stderr, serveLibrary(with))
		os.Exit(1)
	}
	if keys := os.Getenv(forwardEnv); keys != "" {
		fmt.Fprintln(os.Stderr, runForward(keys))
		os.Exit(1)
	}
	code, ran, err := netlab.Enter()
	switch {
	case ran:
		os.Exit(code)
	case err != nil:
		os.Exit(need.NoNamespaces(err))
	}
	raiseDescriptors()
	os.Exit(m.Run())
}

// load is what the clients download, or upload.
type load struct {
	name  string
	up    bool
	flows int
	rate  float64 // bits per second over all flows; 0: as fast as it goes
	paced bool    // by the proxy, each flow at its part of the rate; else the server is
	queue int     // bytes that wait for a link of that rate in front of the clients; 0: there is no such link
	wall  time.Duration
}

// carrier is a proxy under test.
type carrier struct {
	name      string
	peer      peer // another program; nil: Penstock
	envelope  string
	algorithm string
	terms     string    // of the defaults, beside the algorithm
	captured  bool      // by TPROXY, on the way to the server
	greeting  *greeting // that clients begin with; nil: none
	more      string    // of the configuration
}

// Terms of a default.
const (
	eachAlone = "group: flow, up: {algorithm: none}"
	downAlone = "up: {algorithm: none}" // each client host is a group
)

func BenchmarkCost(b *testing.B) {
	executable := build(b)
	for _, l := range []load{
		{name: "1flow-1gbit", flows: 1, rate: 1e9, wall: measure},
		{name: "1flow", flows: 1, wall: measure},
		{name: "16flows", flows: 16, wall: measure},
	} {
		compare(b, executable, l, []carrier{
			{name: "iocopy", peer: ownProxy("iocopy")},
			{name: "none", envelope: "bbr", algorithm: "none", terms: eachAlone},
			{name: "static-bbr", envelope: "bbr", algorithm: "static:cwnd_packets=100000", terms: eachAlone},
			{name: "static-ebpf", envelope: "ebpf", algorithm: "static:cwnd_packets=100000", terms: eachAlone},
			{name: "copa-bbr", envelope: "bbr", algorithm: "copa", terms: eachAlone},
			{name: "copa-ebpf", envelope: "ebpf", algorithm: "copa", terms: eachAlone},
		})
	}
}

// BenchmarkUpload has clients' windows held, or not; a path of less than a millisecond.
func BenchmarkUpload(b *testing.B) {
	executable := build(b)
	for _, l := range []load{
		{name: "1flow-1gbit", up: true, flows: 1, rate: 1e9, wall: measure},
		{name: "1flow", up: true, flows: 1, wall: measure},
		{name: "16flows", up: true, flows: 16, wall: measure},
	} {
		compare(b, executable, l, []carrier{
			{name: "none", envelope: "auto", algorithm: "none", terms: "receive: none"},
			{name: "held", envelope: "auto", algorithm: "none", terms: "up: {receive: penstock}"},
		})
	}
}

// BenchmarkManyPacedFlows has every flow paced at its part of 500 Mbit/s, by the
// server where the proxy does not pace; with a window for each flow, and with one
// for all.
func BenchmarkManyPacedFlows(b *testing.B) {
	const packets = 40 // of window for each flow
	executable := build(b)
	for _, flows := range []int{1000, 8000} {
		l := load{name: fmt.Sprintf("%dflows", flows), flows: flows, rate: 500e6, paced: true, wall: 20 * time.Second}
		paced := func(windows int) string {
			return fmt.Sprintf("static:cwnd_packets=%d,pacing_mbit=%g", packets*flows/windows,
				l.rate/1e6/float64(windows))
		}
		compare(b, executable, l, []carrier{
			{name: "none", envelope: "bbr", algorithm: "none"},
			{name: "static-bbr", envelope: "bbr", algorithm: paced(flows), terms: eachAlone},
			{name: "static-ebpf", envelope: "ebpf", algorithm: paced(flows), terms: eachAlone},
			{name: "static-bbr-1group", envelope: "bbr", algorithm: paced(1), terms: downAlone},
			{name: "static-ebpf-1group", envelope: "ebpf", algorithm: paced(1), terms: downAlone},
		})
	}
}

func compare(b *testing.B, executable string, l load, carriers []carrier) {
	var first usage
	for i, c := range carriers {
		b.Run(l.name+"/"+c.name, func(b *testing.B) {
			room(b, l.flows)
			var u usage
			for range b.N {
				u.add(run(b, executable, l, c))
			}
			if i == 0 {
				first = u
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(u.mbps(), "Mbit/s")
			b.ReportMetric(u.perGB(), "CPU-s/GB")
			b.ReportMetric(100*u.foreign.Seconds()/u.wall.Seconds(), "foreign-CPU-%")
			if first.bytes > 0 {
				b.ReportMetric(u.mbps()/first.mbps(), "x-rate")
				b.ReportMetric(u.perGB()/first.perGB(), "x-CPU")
			}
			b.ReportMetric(float64(l.flows), "flows")
			for unit, v := range u.seen {
				b.ReportMetric(v, unit)
			}
		})
	}
}

// A crowd's servers have send buffers of so many bytes, and the proxy's sockets receive buffers of
// crowdReceive at first: all three machines are this one, whose memory for TCP (net.ipv4.tcp_mem) would
// not do, and then the kernel has every connection advertise four segments.
const (
	crowd        = 1000
	crowdBuffer  = 8 << 10
	crowdReceive = "4096 16384 33554432" // net.ipv4.tcp_rmem
)

// usage is what moving bytes took.
type usage struct {
	bytes int64
	wall  time.Duration
	cpu   time.Duration
	// foreign is processor time of other programs and of the kernel's own threads:
	// where it is much, the machine was not ours.
	foreign time.Duration
	seen    map[string]float64 // what the proxy says of itself, by unit; of the last run
}

func (u *usage) add(v usage) {
	u.bytes += v.bytes
	u.wall += v.wall
	u.cpu += v.cpu
	u.foreign += v.foreign
	u.seen = v.seen
}

func (u usage) mbps() float64  { return float64(u.bytes) * 8 / u.wall.Seconds() / 1e6 }
func (u usage) perGB() float64 { return u.cpu.Seconds() / (float64(u.bytes) / 1e9) }

// run carries the load once.
func run(b *testing.B, executable string, l load, c carrier) usage {
	lab := newLab(b)
	defer func() { require.NoError(b, lab.Close()) }()
	perFlow := 0.0
	if l.rate > 0 && l.queue == 0 && (!l.paced || c.peer != nil || c.algorithm == "none") {
		perFlow = l.rate / float64(l.flows)
	}
	var got atomic.Int64
	serve := func(conn *net.TCPConn) {
		if l.flows >= crowd { // the kernel's memory for TCP is one for both ends
			_ = conn.SetWriteBuffer(crowdBuffer)
		}
		send(conn, perFlow)
	}
	use := func(conn *net.TCPConn) { receive(conn, pieceOf(l.flows), &got) }
	if l.up {
		serve, use = use, serve
	}
	source := startServer(b, lab, serve)
	defer source.Close()
	if l.flows >= crowd {
		require.NoError(b, lab.Edge.Sysctl("net.ipv4.tcp_rmem", crowdReceive))
	}
	edge := startProxy(b, lab, executable, c)
	defer edge.stop(b)
	sink := startClients(b, lab, l.flows, netip.AddrPortFrom(lab.EdgeNear.V4, proxyPort), use)
	defer sink.close()
	if l.queue > 0 { // which connections would wait in as they open
		narrow(b, lab.Client, l.rate, l.queue)
	}

	time.Sleep(warmUp)
	foreign := edge.foreignTime(b)
	before, cpuBefore, at := got.Load(), cpuTime(b, edge.pid()), time.Now()
	time.Sleep(l.wall)
	u := usage{bytes: got.Load() - before, cpu: cpuTime(b, edge.pid()) - cpuBefore, wall: time.Since(at)}
	u.foreign = edge.foreignTime(b) - foreign
	if c.peer == nil {
		var err error
		if u.seen, err = edge.telemetry(); err != nil {
			b.Log("without what the proxy says of itself:", err)
		}
	}
	if used, bound, err := kernel.TCPMemory(); l.flows >= crowd && err == nil {
		if u.seen == nil {
			u.seen = map[string]float64{}
		}
		u.seen["TCP-memory-%"] = 100 * float64(used) / float64(bound)
	}
	return u
}

// newLab is a network with room for thousands of connections.
func newLab(b *testing.B) *netlab.Routed {
	lab, err := netlab.NewRouted()
	require.NoError(b, err)
	for _, n := range []*netlab.Node{lab.Client, lab.Edge, lab.Server} {
		require.NoError(b, n.Sysctl("net.ipv4.ip_local_port_range", "1024 65000"))
		require.NoError(b, n.Sysctl("net.core.somaxconn", "16384"))
	}
	return lab
}

func build(b *testing.B) string {
	executable := filepath.Join(b.TempDir(), "penstock")
	cmd := exec.Command("go", "build", "-o", executable, "github.com/penstock-net/penstock/cmd/penstock")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(b, err, string(out))
	return executable
}

// congestion is every source's.
const congestion = "cubic"

// startServer serves each connection until serve returns.
func startServer(b *testing.B, lab *netlab.Routed, serve func(*net.TCPConn)) *traffic.Server {
	s, err := traffic.Serve(lab.Server, fmt.Sprintf(":%d", serverPort), congestion,
		func(conn net.Conn) { serve(conn.(*net.TCPConn)) })
	require.NoError(b, err)
	return s
}

// startSource starts a server that writes to everybody, each at a rate in bits per
// second if that is not 0.
func startSource(b *testing.B, lab *netlab.Routed, rate float64) *traffic.Server {
	return startServer(b, lab, func(conn *net.TCPConn) { send(conn, rate) })
}

// send writes until the other end has gone.
func send(conn *net.TCPConn, rate float64) {
	if prepare(conn, rate) != nil {
		return // it has gone already
	}
	piece := make([]byte, 64<<10)
	if rate > 0 && rate < 50e6 {
		piece = piece[:16<<10] // ten thousand of them wait here
	}
	for {
		if _, err := conn.Write(piece); err != nil {
			return
		}
	}
}

// receive reads until the other end has gone, and counts.
func receive(conn net.Conn, size int, got *atomic.Int64) {
	buf := make([]byte, size)
	for {
		n, err := conn.Read(buf)
		got.Add(int64(n))
		if err != nil {
			return
		}
	}
}

// prepare gives every source the same congestion control, and its rate.
func prepare(conn *net.TCPConn, rate float64) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) {
		inner = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestion)
		if rate > 0 {
			inner = errors.Join(inner, unix.SetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE,
				uint64(rate/8)))
		}
	})
	return errors.Join(err, inner)
}

// clients are the near ends of all connections.
type clients struct {
	conns []net.Conn
	all   sync.WaitGroup
}

func startClients(b *testing.B, lab *netlab.Routed, flows int, addr netip.AddrPort, use func(*net.TCPConn)) *clients {
	c := &clients{}
	for range flows {
		conn, err := lab.Client.Dial("tcp4", addr.String())
		require.NoError(b, err)
		c.conns = append(c.conns, conn)
	}
	for _, conn := range c.conns { // none is in the way of those that open later
		c.all.Go(func() { use(conn.(*net.TCPConn)) })
	}
	return c
}

// startSink starts clients that read, and count.
func startSink(b *testing.B, lab *netlab.Routed, flows int, addr netip.AddrPort, got *atomic.Int64) *clients {
	return startClients(b, lab, flows, addr, func(conn *net.TCPConn) { receive(conn, pieceOf(flows), got) })
}

// pieceOf is how much is read at once from each of so many connections.
func pieceOf(flows int) int { return max(8<<10, (1<<20)/flows) }

func (c *clients) close() {
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	c.all.Wait()
}

// program is what runs at the edge.
type program struct {
	cmd  *netlab.Cmd
	end  *program // of its tunnel; nil: itself
	edge *netlab.Node
	said bytes.Buffer
}

func startProxy(b *testing.B, lab *netlab.Routed, executable string, c carrier) *program {
	listen := netip.AddrPortFrom(lab.EdgeNear.V4, proxyPort).String()
	backend := netip.AddrPortFrom(lab.ServerAddr.V4, serverPort).String()
	p := &program{edge: lab.Edge}
	if c.captured {
		rules := capture.Rules{
			Mode: capture.TPROXY, Port: proxyPort, Interfaces: []string{netlab.NearDevice},
			Connected: capture.ConnectedCapture,
		}
		require.NoError(b, lab.Edge.Do(func() error { return rules.Apply(b.Context()) }))
	}
	if c.peer != nil {
		p.cmd = c.peer(b, lab.Edge, listen, backend)
	} else {
		listener := fmt.Sprintf("mode: forward, address: %q, target: %q", listen, backend)
		if c.greeting != nil {
			listener = fmt.Sprintf("mode: %s, address: %q, allow: [0.0.0.0/0]", c.greeting.mode, listen)
		}
		if c.captured {
			listener = fmt.Sprintf("mode: tproxy, address: \"[::]:%d\"", proxyPort)
		}
		config := filepath.Join(b.TempDir(), "penstock.yaml")
		require.NoError(b, os.WriteFile(config, fmt.Appendf(nil, `envelope: %s
listeners: [{name: bench, %s}]
defaults: {algorithm: %q, %s}
limits: {held_legs: 32768, per_source: 0}
telemetry: {address: %q}
log: {level: warn, flows: false}
shutdown: {drain: 1ms}
%s`, c.envelope, listener, c.algorithm, c.terms, telemetryAddr, c.more), 0o600))
		p.cmd = lab.Edge.Command(context.Background(), executable, "run", "--config", config)
	}
	p.cmd.Stderr = &p.said
	require.NoError(b, p.cmd.Start())
	require.Eventually(b, func() bool { return listens(lab.Edge) }, 20*time.Second, 50*time.Millisecond,
		"the proxy does not listen")
	return p
}

// listens reports whether a socket listens at proxyPort. A connection to a proxy of captured ones would go on to
// itself.
func listens(at *netlab.Node) (found bool) {
	listener := fmt.Sprintf(":%04X 0+:0000 0A ", proxyPort)
	_ = at.Do(func() error {
		for _, family := range []string{"tcp", "tcp6"} {
			text, _ := os.ReadFile("/proc/thread-self/net/" + family) // without IPv6 there is no tcp6
			found = found || regexp.MustCompile(listener).Match(text)
		}
		return nil
	})
	return found
}

func (p *program) pid() int { return p.cmd.Process.Pid }

// cpuTime is what it has taken so far, with the end of its tunnel.
func (p *program) cpuTime(b *testing.B) time.Duration {
	t := cpuTime(b, p.pid())
	if p.end != nil {
		t += p.end.cpuTime(b)
	}
	return t
}

func (p *program) stop(b *testing.B) {
	if p.end != nil {
		defer p.end.stop(b)
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait() // the plain one ends by the signal
	if said := p.said.String(); b.Failed() || strings.Contains(said, "level=ERROR") {
		b.Log(said)
	}
}

// get fetches a page of the proxy's, all of which come within a minute or not at all.
func (p *program) get(path string) ([]byte, error) {
	client := http.Client{
		Transport: &http.Transport{DialContext: p.edge.DialContext, DisableKeepAlives: true},
		Timeout:   time.Minute,
	}
	resp, err := client.Get("http://" + telemetryAddr + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, page)
	}
	return page, err
}

// telemetry reads what the proxy says of itself.
func (p *program) telemetry() (map[string]float64, error) {
	page, err := p.get("/metrics")
	if err != nil {
		return nil, err
	}
	families, err := edge.ReadMetrics(page)
	if err != nil {
		return nil, err
	}
	seen := map[string]float64{}
	for name, unit := range map[string]string{
		"penstock_datapath_enforced_legs": "held", "penstock_datapath_fallbacks_total": "falls", "penstock_datapath_poll_interval_seconds": "poll-s",
	} {
		if f := families[name]; f != nil {
			m := f.GetMetric()[0]
			seen[unit] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	for name, what := range map[string]string{
		"penstock_datapath_answer_seconds": "answer", "penstock_agent_decision_seconds": "decision",
	} {
		f := families[name]
		if f == nil {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		for part, q := range map[string]float64{"p50": .5, "p95": .95, "p99": .99} {
			for _, bucket := range h.GetBucket() {
				if float64(bucket.GetCumulativeCount()) >= q*float64(h.GetSampleCount()) && h.GetSampleCount() > 0 {
					seen[what+"-"+part+"-ms"] = bucket.GetUpperBound() * 1e3
					break
				}
			}
		}
	}
	agent := func(name string) float64 { return float64(families.Count("penstock_agent_" + name)) }
	if sent, dropped := agent("reports_total"), agent("reports_dropped_total"); sent > 0 {
		seen["reports"], seen["reports-without-room-%"] = sent, 100*dropped/(sent+dropped)
		seen["decisions"], seen["fallbacks"] = agent("decisions_total"), agent("fallbacks_total")
	}
	return seen, nil
}

// cpuTime is the processor time that a process and its children have used so far.
func cpuTime(b *testing.B, pid int) (sum time.Duration) {
	for _, pid := range processes(b, pid) {
		t, err := edge.CPUTime(pid)
		require.NoError(b, err)
		sum += t
	}
	return sum
}

// processes are a process of another program and its children, such as the workers of nginx. Of this process it is
// that alone.
func processes(b *testing.B, pid int) []int {
	all := []int{pid}
	if pid == os.Getpid() {
		return all
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	require.NoError(b, err)
	for _, field := range strings.Fields(string(text)) {
		child, err := strconv.Atoi(field)
		require.NoError(b, err)
		all = append(all, child)
	}
	return all
}

// runCopy is the plain proxy; it ends with its process.
func runCopy(listen, backend string) error {
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	for {
		client, err := ln.Accept()
		if err != nil {
			return err
		}
		go need.Copy(backend)(client)
	}
}
