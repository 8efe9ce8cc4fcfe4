package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// BenchmarkRelay moves bytes over loopback through this package's relay and,
// for comparison, through the plainest proxy there is: accept, dial, two
// io.Copy, which package net turns into splice. Source and sink run in
// processes of their own, so the CPU time per gigabyte is the proxy's alone;
// the rate is that of all three on the CPUs they share.
//
// The window of "static" never binds: what it adds to "none" is the price of
// being managed.
func BenchmarkRelay(b *testing.B) {
	starts := []struct {
		name  string
		start func(testing.TB, string) string // takes the backend's address, returns the proxy's
	}{
		{"iocopy", startCopyProxy},
		{"none", startPenstock("none")},
		{"static", startPenstock("static:cwnd_packets=100000")},
		{"copa", startPenstock("copa")},
	}
	for _, load := range []struct {
		name  string
		flows int
		rate  int // bytes per second of each flow; 0: as fast as it goes
	}{
		{"1flow", 1, 0},
		{"16flows", 16, 0},
		{"1flow-1gbit", 1, 125_000_000},
	} {
		var plain usage
		for _, s := range starts {
			b.Run(load.name+"/"+s.name, func(b *testing.B) {
				u := transfer(b, s.start, load.flows, load.rate)
				if s.name == "iocopy" {
					plain = u
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(u.gbps(), "Gbit/s")
				b.ReportMetric(u.perGB(), "CPU-s/GB")
				if plain.bytes > 0 {
					b.ReportMetric(u.gbps()/plain.gbps(), "x-rate")
					b.ReportMetric(u.perGB()/plain.perGB(), "x-CPU")
				}
			})
		}
	}
}

// usage is what moving bytes took.
type usage struct {
	bytes     int64
	wall, cpu time.Duration
}

func (u usage) gbps() float64  { return float64(u.bytes) * 8 / u.wall.Seconds() / 1e9 }
func (u usage) perGB() float64 { return u.cpu.Seconds() / (float64(u.bytes) / 1e9) }

// transfer moves b.N MiB from a source to a sink.
func transfer(b *testing.B, start func(testing.TB, string) string, flows, rate int) usage {
	source := startPeer(b, "source", strconv.Itoa(rate))
	sink := startPeer(b, "sink", start(b, source.line(b)), strconv.Itoa(flows))
	sink.line(b) // connected
	u := usage{bytes: int64(b.N) << 20}
	before := need.CPU(b)
	b.ResetTimer()
	sink.say(b, strconv.FormatInt(u.bytes, 10))
	sink.line(b) // done
	u.wall = b.Elapsed()
	u.cpu = need.CPU(b) - before
	return u
}

func startPenstock(algorithm policy.Algorithm) func(testing.TB, string) string {
	return func(tb testing.TB, backend string) string {
		r := newRig(tb, func(c *config.Config) {
			c.Defaults.Algorithm = algorithm
			c.Listeners[0].Target = backend
		})
		return r.addr()
	}
}

func startCopyProxy(tb testing.TB, backend string) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	need.Serve(tb, ln, need.Copy(backend))
	return ln.Addr().String()
}

// peer is a source or a sink in a process of its own: this test binary again.
type peer struct {
	in  io.WriteCloser
	out *bufio.Reader
}

const peerEnv = "PENSTOCK_TEST_PEER"

func startPeer(tb testing.TB, args ...string) *peer {
	tb.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), peerEnv+"="+strings.Join(args, " "))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() { // it ends with its standard input
		_ = in.Close()
		require.NoError(tb, cmd.Wait())
	})
	return &peer{in, bufio.NewReader(out)}
}

func (p *peer) line(tb testing.TB) string {
	tb.Helper()
	s, err := p.out.ReadString('\n')
	require.NoError(tb, err)
	return strings.TrimSpace(s)
}

func (p *peer) say(tb testing.TB, s string) {
	tb.Helper()
	_, err := fmt.Fprintln(p.in, s)
	require.NoError(tb, err)
}

// runPeer is the other process.
func runPeer(args []string) error {
	if args[0] == "source" {
		return runSource(args[1])
	}
	return runSink(args[1], args[2])
}

const peerPiece = 128 << 10

func runSource(rateArg string) error {
	rate, err := strconv.Atoi(rateArg)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go feed(conn, rate)
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// feed writes at a rate, in pieces that are due every few milliseconds.
func feed(conn net.Conn, rate int) {
	defer conn.Close() //nolint:errcheck // the sink is content
	piece := make([]byte, peerPiece)
	began, sent := time.Now(), 0
	for {
		n, err := conn.Write(piece)
		if err != nil {
			return
		}
		if sent += n; rate > 0 {
			due := began.Add(time.Duration(float64(sent) / float64(rate) * float64(time.Second)))
			time.Sleep(time.Until(due))
		}
	}
}

func runSink(addr, flowsArg string) error {
	flows, err := strconv.Atoi(flowsArg)
	if err != nil {
		return err
	}
	conns := make([]net.Conn, flows)
	for i := range conns {
		if conns[i], err = net.Dial("tcp", addr); err != nil {
			return err
		}
		defer conns[i].Close() //nolint:errcheck // read what was wanted
	}
	fmt.Println("connected")
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadString('\n')
	if err != nil {
		return nil //nolint:nilerr // the parent gave up
	}
	total, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, conn := range conns {
		wg.Go(func() {
			buf := make([]byte, 2*peerPiece)
			for left := total / int64(flows); left > 0; {
				n, err := conn.Read(buf[:min(left, int64(len(buf)))])
				if err != nil {
					fmt.Fprintln(os.Stderr, "sink:", err)
					os.Exit(1)
				}
				left -= int64(n)
			}
		})
	}
	wg.Wait()
	fmt.Println("done")
	_, err = io.Copy(io.Discard, in)
	return err
}
