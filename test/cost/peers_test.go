//go:build linux

package cost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/netlab"
)

// peer makes the command of another proxy between the two addresses.
type peer func(b *testing.B, at *netlab.Node, listen, backend string) *netlab.Cmd

// ownProxy is a proxy that this test binary is, by its name in ownProxies.
func ownProxy(name string) peer {
	return func(b *testing.B, at *netlab.Node, listen, backend string) *netlab.Cmd {
		self, err := os.Executable()
		require.NoError(b, err)
		cmd := at.Command(context.Background(), self)
		cmd.Env = append(os.Environ(), ownProxyEnv+"="+strings.Join([]string{name, listen, backend}, " "))
		return cmd
	}
}

// ownProxies run until their process ends.
var ownProxies = map[string]func(listen, backend string) error{"iocopy": runCopy, "epoll": runEpollProxy}

// configured is an installed program that reads a configuration, given after its arguments.
func configured(config string, name string, args ...string) peer {
	return func(b *testing.B, at *netlab.Node, listen, backend string) *netlab.Cmd {
		file := filepath.Join(b.TempDir(), name+".conf")
		text := strings.NewReplacer("LISTEN", listen, "BACKEND", backend, "DIR", filepath.Dir(file)).Replace(config)
		require.NoError(b, os.WriteFile(file, []byte(text), 0o600))
		return at.Command(context.Background(), name, append(args, file)...)
	}
}

// packages are Debian's, by program.
var packages = map[string]string{"haproxy": "haproxy", "nginx": "nginx libnginx-mod-stream", "strace": "strace"}

const streamModule = "/usr/lib/nginx/modules/ngx_stream_module.so"

// installed finds a program, or says what installs it.
func installed(b *testing.B, name string) (executable string, ok bool) {
	executable, err := exec.LookPath(name)
	if err == nil && name == "nginx" {
		_, err = os.Stat(streamModule)
	}
	if err != nil {
		fmt.Printf("SKIPPED: %s: %v; run: apt-get install %s\n", b.Name(), err, packages[name])
	}
	return executable, err == nil
}

const haproxyConfig = `
global
    maxconn 6000
    nbthread %d
    maxpipes 1000
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    option splice-request
    option splice-response
listen bench
    maxconn 6000
`

// What the section of HAProxy ends with: where it listens, and where its connections go.
const (
	haproxyForward = "    bind LISTEN backlog 8192\n    server s BACKEND\n"
	haproxyTPROXY  = "    bind 0.0.0.0:PORT transparent backlog 8192\n    source 0.0.0.0 usesrc clientip\n    server s *\n"
)

// haproxy is HAProxy with so many threads.
func haproxy(threads int, ways string) peer {
	ways = strings.ReplaceAll(ways, "PORT", strconv.Itoa(proxyPort))
	return configured(fmt.Sprintf(haproxyConfig, threads)+ways, "haproxy", "-db", "-f")
}

const nginxConfig = `
load_module ` + streamModule + `;
daemon off;
worker_processes 2;
pid DIR/nginx.pid;
error_log stderr error;
events { worker_connections 14000; }
stream {
    access_log off;
    server {
        listen LISTEN backlog=8192 reuseport;
        proxy_pass BACKEND;
        proxy_timeout 1h;
    }
}
`

// peers returns the proxies that are compared, as far as they are installed: the others with two threads each, HAProxy
// with one as well, and Penstock.
func peers(b *testing.B) (all []carrier) {
	if _, ok := installed(b, "haproxy"); ok {
		all = append(all, carrier{name: "haproxy", peer: haproxy(2, haproxyForward)},
			carrier{name: "haproxy-1thread", peer: haproxy(1, haproxyForward)})
	}
	if _, ok := installed(b, "nginx"); ok {
		all = append(all, carrier{name: "nginx", peer: configured(nginxConfig, "nginx", "-c")})
	}
	return append(all, carrier{name: "epoll", peer: ownProxy("epoll")}, carrier{name: "iocopy", peer: ownProxy("iocopy")},
		unmanaged, managed("ebpf"))
}

// capturing returns the proxies that serve captured connections, and Penstock's mode forward.
func capturing(b *testing.B) (all []carrier) {
	if _, ok := installed(b, "haproxy"); ok {
		all = append(all, captured(carrier{name: "haproxy", peer: haproxy(2, haproxyTPROXY)}),
			captured(carrier{name: "haproxy-1thread", peer: haproxy(1, haproxyTPROXY)}))
	}
	return append(all, captured(unmanaged), captured(managed("ebpf")), unmanaged)
}

// captured has what c does be done of connections that TPROXY hands it.
func captured(c carrier) carrier {
	c.name, c.captured = c.name+"-tproxy", true
	return c
}

// rounds is how often each proxy of BenchmarkPeers is measured, in turns: what else the machine does falls on all.
const rounds = 5

// BenchmarkPeers has the same done by Penstock, managed and not, and by other proxies, and prints what each took.
//
//	go test -run '^$' -bench Peers/connections -benchtime 1x -timeout 1h ./test/cost
func BenchmarkPeers(b *testing.B) {
	executable := build(b)
	for _, l := range []struct {
		name    string
		measure func(*testing.B, *site) figures
		load    load // without measure
		related []string
		among   func(*testing.B) []carrier // nil: peers
	}{
		{name: "connections", measure: connect, related: []string{"CPU-us/connection", "p99-ms"}},
		{name: "captured", measure: connect, related: []string{"CPU-us/connection", "p99-ms"}, among: capturing},
		{name: "closed-loop", measure: closedLoop, related: []string{"requests/s", "CPU-us/request", "p99-ms"}},
		{name: "open-loop", measure: openLoop, related: []string{"CPU-us/request", "p99-ms"}},
		{name: "idle", measure: keepIdle, related: []string{"KiB/connection"}},
		{name: "download-1", load: load{flows: 1}, related: []string{"Mbit/s", "CPU-s/GB"}},
		{name: "download-16", load: load{flows: 16}, related: []string{"Mbit/s", "CPU-s/GB"}},
		{name: "upload-1", load: load{flows: 1, up: true}, related: []string{"Mbit/s", "CPU-s/GB"}},
		{name: "upload-16", load: load{flows: 16, up: true}, related: []string{"Mbit/s", "CPU-s/GB"}},
	} {
		b.Run(l.name, func(b *testing.B) {
			among := l.among
			if among == nil {
				among = peers
			}
			l.load.wall = 2 * time.Second
			compareInTurns(b, among(b), l.related, func(c carrier) figures {
				if l.measure == nil {
					u := run(b, executable, l.load, c)
					foreign := 100 * u.foreign.Seconds() / u.wall.Seconds()
					return figures{"Mbit/s": u.mbps(), "CPU-s/GB": u.perGB(), "foreign-CPU-%": foreign}
				}
				s := newSite(b, executable, c)
				defer s.close(b)
				return l.measure(b, s)
			})
		})
	}
}

// contestant is what compareInTurns compares.
type contestant interface {
	label() string
	isPeer() bool
}

func (c carrier) label() string { return c.name }

func (c carrier) isPeer() bool { return c.peer != nil }

// compareInTurns measures each carrier rounds times, and prints minimum, median and maximum of each figure. Medians of
// related figures are divided by the best of the peers: the highest of rates, which are figures per second, and the
// lowest of all others.
func compareInTurns[C contestant](b *testing.B, carriers []C, related []string, measure func(C) figures) {
	seen := map[string]map[string][]float64{} // by unit and name of the carrier
	for range rounds {
		for _, c := range carriers {
			for unit, v := range measure(c) {
				if seen[unit] == nil {
					seen[unit] = map[string][]float64{}
				}
				seen[unit][c.label()] = append(seen[unit][c.label()], v)
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "%s\tproxy\tn\tminimum\tmedian\tmaximum\tof the best peer's\n", b.Name())
	for _, unit := range slices.Sorted(maps.Keys(seen)) {
		var best float64
		for _, c := range carriers {
			took := seen[unit][c.label()]
			slices.Sort(took)
			m := took[len(took)/2]
			if c.isPeer() && (best == 0 || strings.HasSuffix(unit, "/s") == (m > best)) {
				best = m
			}
		}
		for _, c := range carriers {
			took := seen[unit][c.label()]
			m := took[len(took)/2]
			fmt.Fprintf(table, "%s\t%s\t%d\t%.4g\t%.4g\t%.4g", unit, c.label(), len(took), took[0], m, took[len(took)-1])
			if slices.Contains(related, unit) && best > 0 {
				fmt.Fprintf(table, "\t%.2f", m/best)
				if !c.isPeer() {
					b.ReportMetric(m/best, c.label()+"-x-"+unit)
				}
			}
			fmt.Fprintln(table)
		}
	}
	require.NoError(b, table.Flush())
}

// connect opens connections for one exchange each, which the server ends, 32 at a time.
func connect(b *testing.B, s *site) figures {
	const workers, wall, traced = 32, 2 * time.Second, 200
	from := hosts(0, crowdHosts)
	s.exchanges(b, workers, func(done int64) bool { return done >= 500 }, from) // what is made once
	before := s.account(b)
	began := time.Now()
	took := s.exchanges(b, workers, func(int64) bool { return time.Since(began) > wall }, from)
	after := s.account(b)
	n := float64(len(took))
	f := figures{
		"connections/s": n / after.at.Sub(before.at).Seconds(), "p50-ms": took.ms(.5), "p99-ms": took.ms(.99),
		"CPU-us/connection": float64((after.cpu - before.cpu).Microseconds()) / n,
		"foreign-CPU-%":     after.since(before)["foreign-CPU-%"],
	}
	if calls, ok := s.calls(b, func() {
		s.exchanges(b, 1, func(done int64) bool { return done >= traced }, from)
	}); ok {
		f["syscalls/connection"] = float64(calls) / traced
	}
	return f
}

// exchanges has workers open a connection each, ask once and read to the end, until enough.
func (s *site) exchanges(b *testing.B, workers int, enough func(done int64) bool, from []netip.Addr) latencies {
	var done atomic.Int64
	took := make([]latencies, workers)
	errs := make([]error, workers)
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			errs[w] = s.lab.Client.Do(func() error {
				for !enough(done.Load()) {
					began := time.Now()
					conn, err := s.dial(from[int(done.Add(1))%len(from)], askOnce)
					if err != nil {
						return err
					}
					_, err = io.Copy(io.Discard, conn)
					if err = errors.Join(err, conn.Close()); err != nil {
						return err
					}
					took[w] = append(took[w], time.Since(began))
				}
				return nil
			})
		})
	}
	all.Wait()
	require.NoError(b, errors.Join(errs...))
	sum := slices.Concat(took...)
	slices.Sort(sum)
	return sum
}

// calls counts the proxy's system calls during f; false: there is no strace.
func (s *site) calls(b *testing.B, f func()) (n int64, ok bool) {
	executable, ok := installed(b, "strace")
	if !ok {
		return 0, false
	}
	table := filepath.Join(b.TempDir(), "calls")
	args := []string{"-f", "-c", "-S", "calls", "-o", table}
	for _, pid := range processes(b, s.edge.pid()) {
		args = append(args, "-p", strconv.Itoa(pid))
	}
	cmd := exec.Command(executable, args...)
	said, err := cmd.StderrPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	_, err = said.Read(make([]byte, 1)) // "Process … attached"
	require.NoError(b, err)
	var all sync.WaitGroup
	all.Go(func() { _, _ = io.Copy(io.Discard, said) })
	f()
	require.NoError(b, cmd.Process.Signal(syscall.SIGINT))
	all.Wait()
	_ = cmd.Wait() // it ends by the signal
	text, err := os.ReadFile(table)
	require.NoError(b, err)
	b.Logf("%s:\n%s", b.Name(), text)
	for line := range bytes.Lines(text) {
		if fields := strings.Fields(string(line)); len(fields) > 4 && fields[len(fields)-1] == "total" {
			n, err = strconv.ParseInt(fields[3], 10, 64)
			require.NoError(b, err)
			return n, true
		}
	}
	require.Fail(b, "strace counted nothing", string(text))
	return 0, false
}

// talkers are how many connections exchange messages.
const talkers = 64

// closedLoop has each connection ask again as soon as it is answered.
func closedLoop(b *testing.B, s *site) figures {
	conns := s.open(b, hosts(0, talkers), talkers, askEcho)
	loop := newAsking(b, conns)
	defer loop.close()
	loop.run(b, time.Second)
	before := s.account(b)
	took := loop.run(b, 2*time.Second)
	after := s.account(b)
	return requested(took, before, after)
}

// openLoop has 8,000 requests each second, by the clock.
func openLoop(b *testing.B, s *site) figures {
	conns := s.open(b, hosts(0, talkers), talkers, askEcho)
	warm := startPings(conns, talkers*time.Second/8000)
	time.Sleep(time.Second)
	warm.end(b)
	before := s.account(b)
	requests := startPings(conns, talkers*time.Second/8000)
	time.Sleep(2 * time.Second)
	took := requests.end(b)
	return requested(took, before, s.account(b))
}

func requested(took latencies, before, after account) figures {
	n := float64(len(took))
	return figures{
		"requests/s": n / after.at.Sub(before.at).Seconds(), "p50-ms": took.ms(.5), "p99-ms": took.ms(.99),
		"CPU-us/request": float64((after.cpu - before.cpu).Microseconds()) / n,
		"foreign-CPU-%":  after.since(before)["foreign-CPU-%"],
	}
}

// keepIdle has connections that have had one exchange. The kernel's part is that of both
// legs and of the far ends.
func keepIdle(b *testing.B, s *site) figures {
	n := enough(3000)
	kernel, resident, open := procField(b, "/proc/meminfo", "Slab"), s.edge.memory(b), s.edge.descriptors(b)
	s.open(b, hosts(0, crowdHosts), n, askEcho)
	time.Sleep(warmUp)
	own := float64(s.edge.memory(b)-resident) / float64(n)
	slab := float64(procField(b, "/proc/meminfo", "Slab")-kernel) / float64(n)
	return figures{
		"RSS-KiB": own, "slab-KiB": slab, "KiB/connection": own + slab,
		"descriptors": float64(s.edge.descriptors(b)-open) / float64(n),
	}
}
