//go:build linux

package cost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/netlab"
)

// peer makes the command of another proxy between the two addresses.
type peer func(b *testing.B, at *netlab.Node, listen, backend string) *netlab.Cmd

// copying is the plain proxy.
func copying(b *testing.B, at *netlab.Node, listen, backend string) *netlab.Cmd {
	self, err := os.Executable()
	require.NoError(b, err)
	cmd := at.Command(context.Background(), self)
	cmd.Env = append(os.Environ(), copyEnv+"="+listen+" "+backend)
	return cmd
}

// configured is a program that reads a configuration, given after its arguments.
func configured(config string, name string, args ...string) peer {
	return func(b *testing.B, at *netlab.Node, listen, backend string) *netlab.Cmd {
		executable, ok := installed(b, name)
		if !ok {
			b.SkipNow()
		}
		file := filepath.Join(b.TempDir(), name+".conf")
		text := strings.NewReplacer("LISTEN", listen, "BACKEND", backend, "DIR", filepath.Dir(file)).Replace(config)
		require.NoError(b, os.WriteFile(file, []byte(text), 0o600))
		return at.Command(context.Background(), executable, append(args, file)...)
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
    bind LISTEN backlog 8192
    maxconn 6000
    server s BACKEND
`

const nginxConfig = `
load_module ` + streamModule + `;
daemon off;
master_process off;
pid DIR/nginx.pid;
error_log stderr error;
events { worker_connections 14000; }
stream {
    access_log off;
    server {
        listen LISTEN backlog=8192;
        proxy_pass BACKEND;
        proxy_timeout 1h;
    }
}
`

// peers are the proxies that are compared; ratios are to the first. nginx has one process.
func peers() []carrier {
	return []carrier{
		{name: "haproxy", peer: configured(fmt.Sprintf(haproxyConfig, 1), "haproxy", "-db", "-f")},
		{name: "haproxy-2threads", peer: configured(fmt.Sprintf(haproxyConfig, 2), "haproxy", "-db", "-f")},
		{name: "nginx", peer: configured(nginxConfig, "nginx", "-c")},
		{name: "iocopy", peer: copying},
		unmanaged,
		managed("ebpf"),
	}
}

// captured has what c does be done of connections that TPROXY hands it.
func captured(c carrier) carrier {
	c.name, c.captured = c.name+"-tproxy", true
	return c
}

// BenchmarkPeers has the same done by Penstock, managed and not, and by other proxies.
//
//	go test -run '^$' -bench Peers/connections -benchtime 1x ./test/cost
func BenchmarkPeers(b *testing.B) {
	executable := build(b)
	for _, l := range []struct {
		name    string
		run     func(*testing.B, *site) figures
		related []string
	}{
		{"connections", connect, []string{"CPU-us/connection", "p99-ms", "syscalls/connection"}},
		{"closed-loop", closedLoop, []string{"CPU-us/request", "p99-ms"}},
		{"open-loop", openLoop, []string{"CPU-us/request", "p99-ms"}},
		{"idle", keepIdle, []string{"KiB/connection"}},
	} {
		b.Run(l.name, func(b *testing.B) {
			var rows []row
			for _, c := range append(peers(), captured(unmanaged), captured(managed("ebpf"))) {
				rows = append(rows, row{name: c.name, run: func(b *testing.B) figures {
					s := newSite(b, executable, c)
					defer s.close(b)
					return l.run(b, s)
				}})
			}
			tabulate(b, rows, l.related...)
		})
	}
	for _, l := range []load{
		{name: "download-1", flows: 1},
		{name: "download-16", flows: 16},
		{name: "upload-1", flows: 1, up: true},
		{name: "upload-16", flows: 16, up: true},
	} {
		l.wall = 5 * time.Second
		compare(b, executable, l, peers())
	}
}

// connect opens connections for one exchange each, which the server ends, 32 at a time.
func connect(b *testing.B, s *site) figures {
	const workers, wall, traced = 32, 5 * time.Second, 200
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
	cmd := exec.Command(executable, "-f", "-c", "-S", "calls", "-o", table, "-p", strconv.Itoa(s.edge.pid()))
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
	took := loop.run(b, 5*time.Second)
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
	time.Sleep(5 * time.Second)
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
