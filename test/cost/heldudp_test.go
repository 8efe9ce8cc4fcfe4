//go:build linux

package cost

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/capture"
)

const (
	datagramPayload = 1250   // bytes of a datagram
	heldQueue       = "2510" // of the listener
	heldRounds      = 5      // of each way, in turns: medians are compared
	heldSettle      = 2 * time.Second
	heldMeasure     = 4 * time.Second
)

// BenchmarkHeldUDP compares what UDP costs the whole path per packet, forwarded by the kernel alone and held by
// Penstock: sender, edge, kernel threads of the network, receiver. Rows differ in rate and in segments per message
// (UDP_SEGMENT).
func BenchmarkHeldUDP(b *testing.B) {
	executable := build(b)
	for _, c := range []struct{ segments, mbit int }{{10, 1000}, {1, 500}} {
		b.Run(fmt.Sprintf("%dsegments-%dmbit", c.segments, c.mbit), func(b *testing.B) {
			forwarded, held := compareHeld(b, executable, c.segments, c.mbit)
			b.ReportMetric(0, "ns/op")
			for name, way := range map[string][]datagramCost{"forwarded": forwarded, "held": held} {
				b.ReportMetric(medianCost(way, func(c datagramCost) float64 { return c.total }), name+"-µs/packet")
				b.ReportMetric(medianCost(way, func(c datagramCost) float64 { return c.mbit }), name+"-Mbit/s")
			}
			b.ReportMetric(medianCost(held, func(c datagramCost) float64 { return c.edge }), "edge-µs/packet")
			b.ReportMetric(medianCost(held, func(c datagramCost) float64 { return c.wakes }), "edge-switches/s")
			b.ReportMetric(medianCost(held, func(c datagramCost) float64 { return c.total })/
				medianCost(forwarded, func(c datagramCost) float64 { return c.total }), "x-CPU")
		})
	}
}

// datagramCost is what a round of a UDP download took.
type datagramCost struct {
	total, edge float64 // microseconds of processor time per packet that arrived, of all and of Penstock
	mbit        float64 // per second that arrived
	wakes       float64 // context switches of Penstock per second
}

// medianCost returns the median of one figure.
func medianCost(rounds []datagramCost, figure func(datagramCost) float64) float64 {
	var all []float64
	for _, r := range rounds {
		all = append(all, figure(r))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// compareHeld downloads in turns past Penstock and held by it.
func compareHeld(b *testing.B, executable string, segments, mbit int) (forwarded, held []datagramCost) {
	lab := newLab(b)
	defer func() { require.NoError(b, lab.Close()) }()
	rules := capture.Rules{
		Mode: capture.TPROXY, Port: proxyPort, Interfaces: []string{netlab.NearDevice},
		Connected: capture.ConnectedCapture, Hold: capture.Hold{All: true},
	}
	p := startHolder(b, lab, executable)
	defer p.stop(b)
	var got atomic.Int64
	defer startDatagrams(b, lab, segments, float64(mbit)*1e6, &got)()
	ends := append(networkThreads(b), os.Getpid())
	for range b.N * heldRounds {
		forwarded = append(forwarded, countDatagrams(b, &got, p, ends))
		require.NoError(b, lab.Edge.Do(func() error { return rules.Apply(context.Background()) }))
		p.profile(b, "held", measure)
		held = append(held, countDatagrams(b, &got, p, append(ends, p.pid())))
		require.NoError(b, lab.Edge.Do(func() error { return capture.Remove(context.Background()) }))
	}
	return forwarded, held
}

// startHolder starts Penstock with a queue for UDP.
func startHolder(b *testing.B, lab *netlab.Routed, executable string) *program {
	config := filepath.Join(b.TempDir(), "penstock.yaml")
	require.NoError(b, os.WriteFile(config, fmt.Appendf(nil, `listeners:
- {name: bench, mode: tproxy, address: "[::]:%d", udp: {queue: %s}}
telemetry: {address: %q}
log: {level: warn, flows: false}
shutdown: {drain: 1ms}
`, proxyPort, heldQueue, telemetryAddr), 0o600))
	p := &program{edge: lab.Edge}
	p.cmd = lab.Edge.Command(context.Background(), executable, "run", "--pprof", "--config", config)
	p.cmd.Stderr = &p.said
	require.NoError(b, p.cmd.Start())
	require.Eventually(b, func() bool { _, err := p.get("/readyz"); return err == nil }, 20*time.Second,
		50*time.Millisecond, "Penstock is not ready")
	return p
}

// countDatagrams measures one round, once the way has settled. Processes are those whose time counts.
func countDatagrams(b *testing.B, got *atomic.Int64, p *program, processes []int) datagramCost {
	time.Sleep(heldSettle)
	read := func() (bytes, switches int64, all, edge time.Duration) {
		switches = p.switches(b)
		for _, pid := range processes {
			all += cpuTime(b, pid)
		}
		return got.Load(), switches, all, p.cpuTime(b)
	}
	bytes, switches, all, edge := read()
	at := time.Now()
	time.Sleep(heldMeasure)
	moreBytes, moreSwitches, moreAll, moreEdge := read()
	n, wall := float64(max(1, moreBytes-bytes))/datagramPayload, time.Since(at).Seconds()
	return datagramCost{
		total: float64((moreAll - all).Nanoseconds()) / 1e3 / n,
		edge:  float64((moreEdge - edge).Nanoseconds()) / 1e3 / n,
		mbit:  n * datagramPayload * 8 / 1e6 / wall, wakes: float64(moreSwitches-switches) / wall,
	}
}

// networkThreads returns the kernel's threads for packets that no process handles.
func networkThreads(b *testing.B) (pids []int) {
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	require.NoError(b, err)
	for _, name := range names {
		if text, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(text), "ksoftirqd/") {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			require.NoError(b, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// startDatagrams sends from the server to the client until end, messages of several segments at even times, at a rate
// in bits per second. The client has the kernel join what it can (UDP_GRO).
func startDatagrams(b *testing.B, lab *netlab.Routed, segments int, rate float64, got *atomic.Int64) (end func()) {
	from := datagramSocket(b, lab.Server, unix.UDP_SEGMENT, datagramPayload)
	to := datagramSocket(b, lab.Client, unix.UDP_GRO, 1)
	address := &unix.SockaddrInet4{Port: serverPort, Addr: lab.ClientAddr.V4.As4()}
	require.NoError(b, unix.Bind(to, address))
	require.NoError(b, unix.Connect(from, address))
	var ends sync.WaitGroup
	var ended atomic.Bool
	ends.Go(func() { receiveDatagrams(to, got) })
	ends.Go(func() {
		message := make([]byte, segments*datagramPayload)
		every := time.Duration(float64(len(message)) * 8 / rate * 1e9)
		for due := time.Now(); !ended.Load(); due = due.Add(every) {
			if wait := time.Until(due); wait > 0 {
				ts := unix.NsecToTimespec(wait.Nanoseconds())
				_ = unix.Nanosleep(&ts, nil)
			} else if wait < -100*time.Millisecond {
				due = time.Now() // the machine stood still: what was not sent is left out
			}
			_, _ = unix.Write(from, message)
		}
	})
	return func() {
		ended.Store(true)
		_ = unix.Shutdown(to, unix.SHUT_RD)
		ends.Wait()
		_, _ = unix.Close(from), unix.Close(to)
	}
}

// datagramSocket opens a UDP socket of a node with an option of UDP.
func datagramSocket(b *testing.B, on *netlab.Node, option, value int) (socket int) {
	require.NoError(b, on.Do(func() (err error) {
		socket, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return errors.Join(err, unix.SetsockoptInt(socket, unix.IPPROTO_UDP, option, value),
			unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20))
	}))
	return socket
}

// receiveDatagrams counts what arrives until the socket is shut down.
func receiveDatagrams(socket int, got *atomic.Int64) {
	for buffer := make([]byte, 1<<16); ; {
		n, err := unix.Read(socket, buffer)
		if n == 0 || err != nil {
			return
		}
		got.Add(int64(n))
	}
}
