//go:build linux

package cost

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// Who pings, and how often.
const (
	pingers      = 4
	pingEvery    = 5 * time.Millisecond
	crowdHosts   = 200 // client addresses of idle connections
	defaultTerms = ""  // both directions are managed, each in the group of the host its bytes go to
)

// unmanaged leaves both legs to the system's congestion control.
var unmanaged = carrier{name: "none", envelope: "ebpf", algorithm: "none"}

// managed is the default algorithm over an envelope.
func managed(envelope string) carrier {
	return carrier{name: envelope, envelope: envelope, algorithm: cc.Default, terms: defaultTerms}
}

// BenchmarkBystanders has 20 hosts with one connection each request 1 KB each 50 ms
// while others trickle: from 2,000 hosts, and from one with as many or fewer. A fall
// is a socket that left its algorithm for Reno, as nobody answered it.
func BenchmarkBystanders(b *testing.B) {
	executable := build(b)
	var rows []row
	for _, crowd := range []struct{ connections, hosts int }{{2000, 2000}, {100, 1}, {2000, 1}} {
		rows = append(rows, row{
			name:        fmt.Sprintf("%dconnections-%dhosts", crowd.connections, crowd.hosts),
			connections: crowd.connections,
			run:         func(b *testing.B) figures { return bystand(b, executable, crowd.connections, crowd.hosts) },
		})
	}
	tabulate(b, rows, "p99-ms", "CPU-%")
}

func bystand(b *testing.B, executable string, connections, others int) figures {
	const bystanders, every, wall = 20, 50 * time.Millisecond, 20 * time.Second
	s := newSite(b, executable, managed("ebpf"))
	defer s.close(b)
	quiet := hosts(0, bystanders)
	few := s.open(b, quiet, bystanders, askEcho)
	s.open(b, hosts(bystanders, others), connections, askTrickle)
	time.Sleep(warmUp)
	before, got := s.account(b), s.got.Load()
	requests := startPings(few, every)
	time.Sleep(wall)
	took := requests.end(b)
	after := s.account(b)
	received := s.got.Load() - got

	// The bystanders are the oldest, so they are read before this look at all flows
	// can disturb them.
	falls := s.fallsOf(b, quiet)
	f := after.since(before)
	f["Mbit/s"], f["of-asked"] = trickled(received, connections, after.at.Sub(before.at))
	f["bystander-falls"] = falls
	f["falls"] = s.falls(b)
	f["p50-ms"], f["p99-ms"], f["max-ms"] = took.ms(.5), took.ms(.99), took.ms(1)
	return f
}

// trickled is what tricklers received in a time, also as a part of what was theirs.
// Much less than 1 says that the machine had no time for the server.
func trickled(received int64, connections int, wall time.Duration) (mbps, ofAsked float64) {
	asked := float64(connections) * trickleSize * wall.Seconds() / trickleEvery.Seconds()
	return float64(received) * 8 / wall.Seconds() / 1e6, float64(received) / asked
}

func (s *site) page(b *testing.B, path string) []byte {
	page, err := s.edge.get(path)
	require.NoError(b, err)
	return page
}

// falls counts those of all connections so far.
func (s *site) falls(b *testing.B) float64 {
	seen, err := s.edge.telemetry()
	require.NoError(b, err)
	require.Contains(b, seen, "falls")
	return seen["falls"]
}

// fallsOf counts the falls of the oldest connections, which are these hosts'.
func (s *site) fallsOf(b *testing.B, clients []netip.Addr) (falls float64) {
	type leg struct{ Fallbacks float64 }
	var flows []struct {
		Client    netip.AddrPort
		ClientLeg leg `json:"client_leg"`
		ServerLeg leg `json:"server_leg"`
	}
	require.NoError(b, json.Unmarshal(s.page(b, fmt.Sprintf("/flows?limit=%d", len(clients))), &flows))
	require.Len(b, flows, len(clients))
	for _, f := range flows {
		require.Contains(b, clients, f.Client.Addr())
		falls += f.ClientLeg.Fallbacks + f.ServerLeg.Fallbacks
	}
	return falls
}

// BenchmarkBusy keeps 4,000 hosts with one connection each trickling, and counts the
// falls of a minute. Their number includes what one look at all flows causes.
func BenchmarkBusy(b *testing.B) {
	const connections = 4000
	executable := build(b)
	busy := func(c carrier, wall time.Duration) row {
		return row{name: c.name, connections: connections, run: func(b *testing.B) figures {
			s := newSite(b, executable, c)
			defer s.close(b)
			s.open(b, hosts(0, connections), connections, askTrickle)
			time.Sleep(warmUp)
			falls := s.falls(b)
			before, got := s.account(b), s.got.Load()
			time.Sleep(wall)
			after := s.account(b)
			f := after.since(before)
			f["Mbit/s"], f["of-asked"] = trickled(s.got.Load()-got, connections, after.at.Sub(before.at))
			f["falls"] = s.falls(b) - falls
			return f
		}}
	}
	tabulate(b, []row{
		busy(unmanaged, 20*time.Second),
		busy(managed("ebpf"), time.Minute),
	}, "CPU-%")
}

// BenchmarkIdleConnections has four connections request 1 KB each 5 ms beside others
// to the same server that do nothing.
func BenchmarkIdleConnections(b *testing.B) {
	executable := build(b)
	for _, c := range []carrier{managed("ebpf"), managed("bbr")} {
		var rows []row
		for _, idle := range []int{100, 8000} {
			rows = append(rows, row{
				name:        fmt.Sprintf("%s/%didle", c.name, idle),
				connections: idle,
				run:         func(b *testing.B) figures { return besideIdle(b, executable, c, idle) },
			})
		}
		tabulate(b, rows, "p99-ms", "CPU-us/request")
	}
}

func besideIdle(b *testing.B, executable string, c carrier, idle int) figures {
	s := newSite(b, executable, c)
	defer s.close(b)
	start := s.account(b)
	s.open(b, hosts(0, crowdHosts), idle, askEcho)
	opened := s.account(b)
	few := s.open(b, hosts(0, pingers), pingers, askEcho)
	time.Sleep(warmUp)

	before := s.account(b)
	requests := startPings(few, pingEvery)
	time.Sleep(measure)
	took := requests.end(b)
	after := s.account(b)

	closing := s.account(b)
	s.hangUp()
	gone := func() bool { return s.serving.Load() == 0 }
	require.Eventually(b, gone, 2*time.Minute, time.Millisecond, "the server has not seen all of them go")
	closed := s.account(b)
	return figures{
		"p50-ms": took.ms(.5), "p99-ms": took.ms(.99), "max-ms": took.ms(1),
		"requests/s":     float64(len(took)) / after.at.Sub(before.at).Seconds(),
		"foreign-CPU-%":  after.since(before)["foreign-CPU-%"],
		"CPU-us/request": float64((after.cpu - before.cpu).Microseconds()) / float64(len(took)),
		"open-s":         opened.at.Sub(start.at).Seconds(), "open-CPU-s": (opened.cpu - start.cpu).Seconds(),
		"close-s": closed.at.Sub(closing.at).Seconds(), "close-CPU-s": (closed.cpu - closing.cpu).Seconds(),
	}
}

// BenchmarkScrape fetches the pages that look at every flow, with requests made meanwhile;
// and it has a browser watch the flows. Downloads alone are managed, so that hosts are groups,
// and from their first byte on, which without a limit of their own they would not be.
func BenchmarkScrape(b *testing.B) {
	flows := enough(10000)
	executable := build(b)
	var rows []row
	for _, groups := range []int{flows, 1} {
		rows = append(rows, row{
			name:        fmt.Sprintf("%dflows-%dgroups", flows, groups),
			connections: flows,
			run:         func(b *testing.B) figures { return scrape(b, executable, flows, groups) },
		})
	}
	tabulate(b, rows, "metrics-ms", "flows-ms", "metrics-stall-ms", "flows-stall-ms")
}

// scrapes is how often each page is fetched. A page's figures are medians over these: how
// long it took, and the longest that a request waited meanwhile. What requests wait beside
// nothing at all, for a tenth of a second each time, is the machine's.
const scrapes = 10

func scrape(b *testing.B, executable string, flows, groups int) figures {
	s := newSite(b, executable, carrier{envelope: "ebpf", algorithm: cc.Default, terms: "down: {hint_cap: 1}, " + downAlone})
	defer s.close(b)
	s.open(b, hosts(pingers, groups), flows, askEcho)
	few := s.open(b, hosts(0, pingers), pingers, askEcho)
	time.Sleep(warmUp)
	f := figures{}
	beside := func(name string, what func()) {
		var took, stalls latencies
		cpu := -cpuTime(b, s.edge.pid())
		for range scrapes {
			requests := startPings(few, pingEvery)
			start := time.Now()
			what()
			took = append(took, time.Since(start))
			waits := requests.end(b)
			stalls = append(stalls, waits[len(waits)-1])
			time.Sleep(time.Second) // so that none is spared the sampling
		}
		cpu += cpuTime(b, s.edge.pid())
		slices.Sort(took)
		slices.Sort(stalls)
		f[name+"-ms"], f[name+"-stall-ms"], f[name+"-CPU-ms"] = took.ms(.5), stalls.ms(.5), cpu.Seconds()*1e3/scrapes
	}
	beside("nothing", func() { time.Sleep(100 * time.Millisecond) })
	beside("metrics", func() { s.page(b, "/metrics") })
	beside("flows", func() {
		require.Equal(b, flows+pingers, bytes.Count(s.page(b, "/flows?limit=0"), []byte(`"id"`)))
	})
	beside("hosts", func() {
		require.LessOrEqual(b, groups+pingers, bytes.Count(s.page(b, "/hosts?limit=0"), []byte(`"name"`)))
	})
	delete(f, "nothing-ms")
	f["CPU-%"] = s.busy(b, func() { time.Sleep(watchFor) })
	f["watched-CPU-%"] = s.busy(b, func() { s.watch(b) })
	return f
}

// watchFor is how long the page is open.
const watchFor = 20 * time.Second

// busy is how much of a core the proxy takes while f runs.
func (s *site) busy(b *testing.B, f func()) float64 {
	before := s.account(b)
	f()
	after := s.account(b)
	return 100 * (after.cpu - before.cpu).Seconds() / after.at.Sub(before.at).Seconds()
}

// watch asks for what a browser shows as often as the page in it does.
func (s *site) watch(b *testing.B) {
	for end := time.Now().Add(watchFor); time.Now().Before(end); {
		var view struct {
			Fresh float64 `json:"fresh_seconds"`
		}
		require.NoError(b, json.Unmarshal(s.page(b, "/v1/view?table=flows&events=0&offset=0&rows=60"), &view))
		time.Sleep(max(2*time.Second, time.Duration(view.Fresh*float64(time.Second))))
	}
}
