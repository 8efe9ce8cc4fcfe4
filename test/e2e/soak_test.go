//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/netlab"
)

// soakFor is the variable that says how long the mixed load goes on.
const soakFor = "PENSTOCK_E2E_SOAK"

// workload is a kind of connection, of which so many are open at a time.
type workload struct {
	name   string // whose first letter the client says first
	at     int
	pause  time.Duration // between one and the next
	client func(*net.TCPConn) error
	server func(*net.TCPConn) error
}

const (
	soakPiece = 1 << 10
	soakLong  = 2 * megabyte
)

// pieces has n bytes go one way and as many come back, in turns of a piece.
func pieces(n int64) func(*net.TCPConn) error {
	return func(c *net.TCPConn) error {
		for range n / soakPiece {
			if err := sends(c, soakPiece); err != nil {
				return err
			}
			if err := takes(c, soakPiece); err != nil {
				return err
			}
		}
		return nil
	}
}

func sends(c *net.TCPConn, n int64) error {
	_, err := io.Copy(struct{ io.Writer }{c}, io.LimitReader(endless{}, n))
	return err
}

func takes(c *net.TCPConn, n int64) error {
	_, err := io.CopyN(io.Discard, c, n)
	return err
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

// toTheEnd says all of n bytes and its end, and hears as many and the other's.
func toTheEnd(n int64) func(*net.TCPConn) error {
	return func(c *net.TCPConn) error {
		said := make(chan error, 1)
		go func() { said <- errors.Join(sends(c, n), c.CloseWrite()) }()
		got, err := io.Copy(io.Discard, c)
		if err == nil && got != n {
			err = fmt.Errorf("%d bytes of %d", got, n)
		}
		return errors.Join(err, <-said)
	}
}

func answer(c *net.TCPConn) error {
	if err := takes(c, soakPiece); err != nil {
		return err
	}
	return sends(c, soakPiece)
}

// untilReset is an end that only a reset may bring about.
func untilReset(of func(*net.TCPConn) error) func(*net.TCPConn) error {
	return func(c *net.TCPConn) error {
		if err := of(c); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			return fmt.Errorf("ended without a reset: %w", err)
		}
		return nil
	}
}

// resetAfter hears n bytes, waits, and resets.
func resetAfter(n int64, wait time.Duration) func(*net.TCPConn) error {
	return func(c *net.TCPConn) error {
		err := takes(c, n)
		time.Sleep(wait)
		return errors.Join(err, c.SetLinger(0))
	}
}

func forEver(c *net.TCPConn) error { return sends(c, 1<<40) }

// TestAMixOfLoadsLeavesNothingBehind has short, long, stalled, reset and idle connections go
// on together, with a reload now and then: what the program holds does not grow meanwhile,
// it holds nothing afterwards, and has counted each connection once.
//
//	PENSTOCK_E2E_TIER=ebpf PENSTOCK_E2E_SOAK=10m go test -run AMixOfLoads -v -timeout 20m ./test/e2e
func TestAMixOfLoadsLeavesNothingBehind(t *testing.T) {
	lasts := 20 * time.Second
	if given := os.Getenv(soakFor); given != "" {
		var err error
		lasts, err = time.ParseDuration(given)
		require.NoError(t, err, "%s is a duration, as 10m", soakFor)
	}
	loads := []workload{
		{
			name: "exchange", at: 8, pause: 20 * time.Millisecond, client: pieces(soakPiece),
			server: answer,
		},
		{name: "long", at: 2, pause: 100 * time.Millisecond, client: toTheEnd(soakLong), server: toTheEnd(soakLong)},
		{
			name: "stalled", at: 16, client: resetAfter(64*soakPiece, lasts/10),
			server: untilReset(forEver),
		},
		{
			name: "reset by the client", at: 2, pause: 20 * time.Millisecond, client: resetAfter(64*soakPiece, 0),
			server: untilReset(forEver),
		},
		{
			name: "by the server reset", at: 2, pause: 20 * time.Millisecond, client: untilReset(forEver),
			server: resetAfter(64*soakPiece, 0),
		},
		{
			name: "idle", at: 200, client: func(c *net.TCPConn) error {
				time.Sleep(lasts / 5)
				return pieces(soakPiece)(c)
			}, server: answer,
		},
	}

	w := named("forward")
	under := func(algorithm string) string {
		return strings.Replace(w.yaml("defaults: {algorithm: "+algorithm+"}\n"), "level: debug", "flows: false", 1)
	}
	s := newScene(t)
	p := s.start(under("penstock"))
	var failed sync.Map
	service := s.serve(servicePort, serving(loads, &failed))
	began := p.holds()

	var opened atomic.Int64
	var over atomic.Bool
	var all sync.WaitGroup
	for _, l := range loads {
		for range l.at {
			all.Go(func() {
				for !over.Load() {
					c, err := w.connect(s, service)
					if err != nil {
						failed.Store(l.name+": "+err.Error(), true)
						return
					}
					opened.Add(1)
					_ = c.SetDeadline(time.Now().Add(lasts + patience))
					_, err = c.Write([]byte(l.name[:1]))
					if err = errors.Join(err, l.client(c), c.Close()); err != nil {
						failed.Store(l.name+": "+err.Error(), true)
					}
					time.Sleep(l.pause)
				}
			})
		}
	}
	algorithms := []string{"penstock", "cubic", "none"}
	period := min(10*time.Second, lasts/6)
	var held []holds
	for i, end := 1, time.Now().Add(lasts); time.Now().Before(end); i++ {
		for next := time.Now().Add(period); time.Now().Before(next); time.Sleep(period / 10) {
			held = append(held, p.holds())
		}
		p.rewrite(under(algorithms[i%len(algorithms)]))
		p.signal(syscall.SIGHUP)
		p.reloaded(float64(i))
	}
	over.Store(true)
	all.Wait()

	if aborts := s.outOfMemory(); aborts > 0 {
		t.Logf("the kernel reset %d connections, since others use up TCP's memory (net.ipv4.tcp_mem)", aborts)
	} else {
		failed.Range(func(what, _ any) bool { return assert.Fail(t, what.(string)) })
	}
	p.awaitMetric(0, "penstock_connections_active")
	n := float64(opened.Load())
	for _, counted := range []string{
		"penstock_connections_accepted_total", "penstock_flows_total", "penstock_flow_closes_total",
		"penstock_flow_duration_seconds_count",
	} {
		assert.Equal(t, n, p.metric(counted), counted)
	}
	assert.Zero(t, p.metric("penstock_flow_rejections_total"))
	assert.Zero(t, p.metric("penstock_flows_active"))
	assert.Eventually(t, func() bool { // a pipe or two wait for the next connection
		ended := p.holds()
		return ended.goroutines <= began.goroutines+34 && ended.descriptors <= began.descriptors+140
	}, patience, 100*time.Millisecond)

	early, late := most(held[len(held)/4:len(held)/2]), most(held[3*len(held)/4:])
	t.Logf("%v, %.0f connections: at first %+v, in the second quarter at most %+v, in the fourth %+v, afterwards %+v",
		lasts, n, began, early, late, p.holds())
	assert.LessOrEqual(t, late.memory, early.memory*5/4+4*megabyte, "bytes")
	assert.LessOrEqual(t, late.goroutines, early.goroutines*5/4+16, "goroutines")
	assert.LessOrEqual(t, late.descriptors, early.descriptors*5/4+32, "descriptors")
}

// outOfMemory is how many connections the kernel has reset for want of memory, which is one
// for the whole machine.
func (s *scene) outOfMemory() (aborts int) {
	s.t.Helper()
	for _, at := range []*netlab.Node{s.Client, s.Edge, s.Server} {
		require.NoError(s.t, at.Do(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/netstat")
			if err != nil {
				return err
			}
			lines := strings.Split(string(text), "\n") // names, and values below them
			i := slices.Index(strings.Fields(lines[0]), "TCPAbortOnMemory")
			n, err := strconv.Atoi(strings.Fields(lines[1])[i])
			aborts += n
			return err
		}))
	}
	return aborts
}

// serving serves a connection as its first byte says.
func serving(loads []workload, failed *sync.Map) func(net.Conn) {
	return func(c net.Conn) {
		var first [1]byte
		if _, err := io.ReadFull(c, first[:]); err != nil {
			failed.Store("the server: "+err.Error(), true)
			return
		}
		l := loads[slices.IndexFunc(loads, func(l workload) bool { return l.name[0] == first[0] })]
		if err := l.server(c.(*net.TCPConn)); err != nil {
			failed.Store(l.name+", at the server: "+err.Error(), true)
		}
	}
}

// holds is what a program holds at a moment.
type holds struct{ memory, goroutines, descriptors int }

func (p *program) holds() holds {
	p.t.Helper()
	return holds{
		memory: p.rss(), goroutines: int(p.metric("go_goroutines")),
		descriptors: int(p.metric("process_open_fds")),
	}
}

// most is the most of each.
func most(held []holds) (m holds) {
	for _, h := range held {
		m = holds{
			max(m.memory, h.memory), max(m.goroutines, h.goroutines), max(m.descriptors, h.descriptors),
		}
	}
	return m
}
