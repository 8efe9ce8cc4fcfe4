//go:build linux

package cost

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/lab/traffic"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
)

// message is the size in bytes of what a client sends, and of the answer. Its
// first byte says what the client asks for.
const message = 1 << 10

const (
	askEcho    = 'e' // the message
	askTrickle = 't' // the message, and then trickleSize each trickleEvery
	askStream  = 's' // bytes without end
	askOnce    = 'o' // the message, and then the end
)

const (
	trickleSize  = 1400 // bytes
	trickleEvery = 200 * time.Millisecond
	trickleSlots = 100 // of equal length in trickleEvery
)

const (
	patience    = time.Minute // what any single answer may take
	maxOpeners  = 8           // connections being opened at once
	descriptors = 1 << 16     // what a run may use: 10,000 connections are 20,000 in the proxy and 20,000 here
)

// crowdNet has the addresses of as many client hosts as are wanted.
var crowdNet = netip.MustParsePrefix("10.80.0.0/16")

// raiseDescriptors sets RLIMIT_NOFILE for this process and for the proxies that it
// starts. Where that is refused, enough and need go by what there is.
func raiseDescriptors() {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil && lim.Max < descriptors {
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: descriptors, Max: descriptors})
	}
}

// enough returns as many connections as the descriptor limit has room for, at most
// n: two descriptors for each in the proxy, and two here.
func enough(n int) int {
	const others = 16 // connections beside those
	return min(n, proxy.DescriptorBudget(&config.Config{}).Connections-others)
}

// room skips what has more connections than that.
func room(b *testing.B, connections int) {
	if fit := enough(connections); fit < connections {
		const cure = "raise its hard limit (ulimit -Hn)"
		fmt.Printf("SKIPPED: %s: RLIMIT_NOFILE (%d) has room for %d connections, not for %d: "+cure+"\n",
			b.Name(), proxy.DescriptorBudget(&config.Config{}).Total, fit, connections)
		b.SkipNow()
	}
}

// figures are what a run measured, by unit.
type figures map[string]float64

// row is one line of a table.
type row struct {
	name        string
	connections int
	run         func(*testing.B) figures
}

// tabulate runs the rows and relates some of their figures to those of the first.
func tabulate(b *testing.B, rows []row, related ...string) {
	var first figures
	for i, r := range rows {
		b.Run(r.name, func(b *testing.B) {
			room(b, r.connections)
			var got figures
			for range b.N {
				got = r.run(b)
			}
			if i == 0 {
				first = got
			}
			b.ReportMetric(0, "ns/op")
			for unit, v := range got {
				b.ReportMetric(v, unit)
			}
			for _, unit := range related {
				if first[unit] > 0 {
					b.ReportMetric(got[unit]/first[unit], "x-"+unit)
				}
			}
		})
	}
}

// site is a server that serves what clients ask for, reached directly or through
// a proxy at the edge.
type site struct {
	lab     *netlab.Routed
	at      netip.AddrPort // what clients connect to
	edge    *program       // nil: they reach the server directly
	greets  *greeting      // nil: clients send their message at once
	far     *traffic.Server
	serving atomic.Int64 // connections of the server
	trickle trickle
	got     atomic.Int64 // bytes that tricklers received

	conns []*net.TCPConn
	reads sync.WaitGroup
}

// newSite starts the proxy, unless c is none.
func newSite(b *testing.B, executable string, c carrier) *site {
	s := &site{lab: newLab(b), greets: c.greeting}
	s.at = netip.AddrPortFrom(s.lab.ServerAddr.V4, serverPort)
	require.NoError(b, s.lab.Client.Do(routeCrowdHome))
	require.NoError(b, s.lab.Edge.Route(crowdNet, s.lab.ClientAddr.V4))
	s.far = startServer(b, s.lab, s.serve)
	s.trickle.start()
	if c.peer != nil || c.algorithm != "" {
		s.edge = startProxy(b, s.lab, executable, c)
		if !c.captured {
			s.at = netip.AddrPortFrom(s.lab.EdgeNear.V4, proxyPort)
		}
	}
	return s
}

// routeCrowdHome makes all addresses of the crowd the node's own.
func routeCrowdHome() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Dst: &net.IPNet{IP: crowdNet.Addr().AsSlice(), Mask: net.CIDRMask(crowdNet.Bits(), 32)},
	})
}

func (s *site) close(b *testing.B) {
	s.hangUp()
	_ = s.far.Close()
	s.trickle.stop()
	if s.edge != nil {
		s.edge.stop(b)
	}
	require.NoError(b, s.lab.Close())
}

// hangUp closes all connections from the clients' side.
func (s *site) hangUp() {
	for _, c := range s.conns {
		_ = c.Close()
	}
	s.reads.Wait()
	s.conns = nil
}

// serve gives a client what it asks for until it has gone.
func (s *site) serve(conn *net.TCPConn) {
	s.serving.Add(1)
	defer s.serving.Add(-1)
	buf := make([]byte, message)
	for {
		if _, err := io.ReadFull(conn, buf); err != nil {
			return
		}
		if buf[0] == askStream {
			send(conn, 0)
			return
		}
		if _, err := conn.Write(buf); err != nil || buf[0] == askOnce {
			return
		}
		if buf[0] == askTrickle {
			s.trickle.add(conn)
		}
	}
}

// open has n connections opened, one host after the other, and one answer on each.
func (s *site) open(b *testing.B, hosts []netip.Addr, n int, ask byte) []*net.TCPConn {
	conns := make([]*net.TCPConn, n)
	errs := make([]error, maxOpeners)
	var openers sync.WaitGroup
	for worker := range maxOpeners {
		openers.Go(func() {
			errs[worker] = s.lab.Client.Do(func() (err error) {
				for i := worker; i < n && err == nil; i += maxOpeners {
					conns[i], err = s.dial(hosts[i%len(hosts)], ask)
				}
				return err
			})
		})
	}
	openers.Wait()
	require.NoError(b, errors.Join(errs...))
	s.conns = append(s.conns, conns...)
	if ask == askTrickle {
		for _, conn := range conns {
			s.reads.Go(func() { receive(conn, 2*trickleSize, &s.got) })
		}
	}
	return conns
}

// dial runs in the client's namespace.
func (s *site) dial(from netip.Addr, ask byte) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	d.SetMultipathTCP(false)
	conn, err := d.Dial("tcp4", s.at.String())
	if err != nil {
		return nil, err
	}
	if s.greets != nil {
		err = s.greets.say(conn, netip.AddrPortFrom(s.lab.ServerAddr.V4, serverPort))
	}
	return conn.(*net.TCPConn), errors.Join(err, exchange(conn, ask, make([]byte, message)))
}

// exchange sends a message and reads the answer to it.
func exchange(conn net.Conn, ask byte, buf []byte) error {
	buf[0] = ask
	err := conn.SetReadDeadline(time.Now().Add(patience))
	if err == nil {
		_, err = conn.Write(buf)
	}
	if err == nil {
		_, err = io.ReadFull(conn, buf)
	}
	return errors.Join(err, conn.SetReadDeadline(time.Time{}))
}

// hosts are n addresses of client hosts, from number first on.
func hosts(first, n int) []netip.Addr {
	base := crowdNet.Addr().As4()
	all := make([]netip.Addr, n)
	for i := range all {
		number := first + i + 1 // the first address names the network
		all[i] = netip.AddrFrom4([4]byte{base[0], base[1], byte(number >> 8), byte(number)})
	}
	return all
}

// trickle writes a little to each of its connections, evenly spread over time.
type trickle struct {
	mu    sync.Mutex
	slots [trickleSlots][]*net.TCPConn
	size  int

	done chan struct{}
	ends sync.WaitGroup
}

func (t *trickle) add(conn *net.TCPConn) {
	_ = conn.SetWriteBuffer(256 << 10) // so that one slow connection does not hold up the others
	t.mu.Lock()
	defer t.mu.Unlock()
	slot := t.size % trickleSlots
	t.slots[slot] = append(t.slots[slot], conn)
	t.size++
}

func (t *trickle) start() {
	t.done = make(chan struct{})
	t.ends.Go(func() {
		const length = trickleEvery / trickleSlots
		ticker := time.NewTicker(length)
		defer ticker.Stop()
		piece := make([]byte, trickleSize)
		start := time.Now()
		for written := 0; ; {
			select {
			case <-t.done:
				return
			case <-ticker.C:
			}
			for ; written < int(time.Since(start)/length); written++ {
				t.mu.Lock()
				conns := t.slots[written%trickleSlots]
				t.mu.Unlock()
				for _, conn := range conns {
					_, _ = conn.Write(piece) // it may have gone
				}
			}
		}
	})
}

func (t *trickle) stop() {
	close(t.done)
	t.ends.Wait()
}

// pings are requests on connections of their own.
type pings struct {
	stop chan struct{}
	all  sync.WaitGroup
	mu   sync.Mutex
	took []time.Duration
	err  error
}

// startPings has each connection ask for an echo at a fixed interval.
func startPings(conns []*net.TCPConn, every time.Duration) *pings {
	p := &pings{stop: make(chan struct{})}
	start := time.Now()
	for i, conn := range conns {
		p.all.Go(func() {
			took, err := p.run(conn, start.Add(every*time.Duration(i)/time.Duration(len(conns))), every)
			p.mu.Lock()
			defer p.mu.Unlock()
			p.took, p.err = append(p.took, took...), errors.Join(p.err, err)
		})
	}
	return p
}

// run times each answer from its request on, or from when that was due if it had
// to wait for the answer before.
func (p *pings) run(conn net.Conn, due time.Time, every time.Duration) (took []time.Duration, err error) {
	buf := make([]byte, message)
	for {
		select {
		case <-p.stop:
			return took, nil
		default:
		}
		asked := due
		if wait := time.Until(due); wait > 0 {
			time.Sleep(wait)
			asked = time.Now()
		}
		if err := exchange(conn, askEcho, buf); err != nil {
			return took, fmt.Errorf("ping: %w", err)
		}
		took = append(took, time.Since(asked))
		due = due.Add(every)
	}
}

// end returns how long the answers took, in order.
func (p *pings) end(b *testing.B) latencies {
	close(p.stop)
	p.all.Wait()
	require.NoError(b, p.err)
	slices.Sort(p.took)
	require.NotEmpty(b, p.took)
	return p.took
}

// latencies are in order.
type latencies []time.Duration

// ms is a quantile in milliseconds; 1 is the longest.
func (l latencies) ms(quantile float64) float64 {
	return float64(l[min(len(l)-1, int(quantile*float64(len(l))))]) / float64(time.Millisecond)
}

// account is what has been used up to a moment.
type account struct {
	at       time.Time
	cpu      time.Duration // of the proxy
	foreign  time.Duration // as in usage
	switches int64         // of all the proxy's threads, voluntary or not
}

func (s *site) account(b *testing.B) account {
	return account{
		at: time.Now(), cpu: cpuTime(b, s.edge.pid()), foreign: s.edge.foreignTime(b), switches: s.edge.switches(b),
	}
}

// switches counts the context switches of all the program's threads, voluntary or not.
func (p *program) switches(b *testing.B) (n int64) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.pid()))
	require.NoError(b, err)
	require.NotEmpty(b, threads)
	for _, status := range threads {
		n += procField(b, status, "voluntary_ctxt_switches") + procField(b, status, "nonvoluntary_ctxt_switches")
	}
	return n
}

// since are the figures of the time from then on. CPU is in percent of one core.
func (a account) since(then account) figures {
	wall := a.at.Sub(then.at).Seconds()
	return figures{
		"CPU-%":         100 * (a.cpu - then.cpu).Seconds() / wall,
		"foreign-CPU-%": 100 * (a.foreign - then.foreign).Seconds() / wall,
		"switches/s":    float64(a.switches-then.switches) / wall,
	}
}

// foreignTime is what others than the program and this process have used so far.
func (p *program) foreignTime(b *testing.B) time.Duration {
	return machineTime(b) - p.cpuTime(b) - cpuTime(b, os.Getpid())
}

// machineTime is the time that all processors together have not been idle.
func machineTime(b *testing.B) (busy time.Duration) {
	const tick = 10 * time.Millisecond // USER_HZ
	text, err := os.ReadFile("/proc/stat")
	require.NoError(b, err)
	line, _, _ := bytes.Cut(text, []byte("\n"))
	fields := bytes.Fields(line) // cpu user nice system idle iowait irq softirq steal, and guests once more
	require.Greater(b, len(fields), 8)
	for i, field := range fields[1:9] {
		n, err := strconv.ParseInt(string(field), 10, 64)
		require.NoError(b, err)
		if idle := i == 3 || i == 4; !idle {
			busy += time.Duration(n) * tick
		}
	}
	return busy
}

// procField reads the number after "name:" in a file of /proc.
func procField(b *testing.B, path, name string) int64 {
	text, err := os.ReadFile(path)
	require.NoError(b, err)
	for line := range bytes.Lines(text) {
		key, value, _ := bytes.Cut(line, []byte(":"))
		if fields := bytes.Fields(value); string(key) == name && len(fields) > 0 {
			n, err := strconv.ParseInt(string(fields[0]), 10, 64)
			require.NoError(b, err)
			return n
		}
	}
	require.Failf(b, "no such field", "%s in %s", name, path)
	return 0
}
