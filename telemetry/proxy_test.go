package telemetry

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
)

// bulk has everything go by a fixed window.
const bulk = `rules:
  - {name: bulk, match: {destination: [127.0.0.0/8]}, algorithm: "static:cwnd_packets=64"}`

// startProxy runs a real proxy for CONNECT on loopback and returns it with the
// address of its listener; terms are the rules or defaults of its configuration.
func startProxy(t *testing.T, terms string) (p *proxy.Kernel, clock func() cc.Time, addr string) {
	t.Helper()
	cfg := configure(t, terms)
	begin := time.Now()
	clock = func() cc.Time { return cc.Time(time.Since(begin) + time.Second) }
	p, err := proxy.Open(t.Context(), cfg, nil, &flow.Manager{}, clock, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- p.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-served)
		assert.NoError(t, p.Close())
	})
	return p, clock, p.Addrs()["local"].String()
}

// configure returns the configuration of startProxy.
func configure(t *testing.T, terms string) config.Config {
	t.Helper()
	cfg, err := config.Parse([]byte(`
listeners:
  - {name: local, mode: connect, address: "127.0.0.1:0", allow: [127.0.0.0/8]}
` + terms + `
shutdown: {drain: 1ms}
`))
	require.NoError(t, err)
	return cfg
}

// tunnel opens a connection to target through the proxy at addr.
func tunnel(t *testing.T, addr, target string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	_, err = fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target)
	require.NoError(t, err)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Zero(t, r.Buffered())
	return conn
}

// echo serves connections that send back what they get.
func echo(t *testing.T) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	need.Serve(t, ln, func(c net.Conn) { _, _ = io.Copy(c, c) })
	return ln.Addr().String()
}

// totals returns every counter, and the count and sum of every histogram, by
// name and labels.
func totals(t *testing.T, g prometheus.Gatherer) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for name, family := range gather(t, g) {
		for _, m := range family.GetMetric() {
			key := fmt.Sprint(name, m.GetLabel())
			switch family.GetType() {
			case dto.MetricType_COUNTER:
				out[key] = m.GetCounter().GetValue()
			case dto.MetricType_HISTOGRAM:
				out[key+" count"] = float64(m.GetHistogram().GetSampleCount())
				out[key+" sum"] = m.GetHistogram().GetSampleSum()
			}
		}
	}
	return out
}

func TestCountersMoveWhileFlowsLiveAndNeverGoBack(t *testing.T) {
	p, clock, addr := startProxy(t, bulk)
	registry := NewRegistry(p, Options{Clock: clock})
	target := echo(t)

	const (
		connections = 20
		size        = 256 << 10
	)
	done := make(chan struct{})
	go func() {
		defer close(done)
		var clients sync.WaitGroup
		for range connections {
			conn := tunnel(t, addr, target)
			clients.Go(func() {
				defer conn.Close()
				go func() { _, _ = conn.Write(make([]byte, size)) }()
				_, err := io.ReadFull(conn, make([]byte, size))
				assert.NoError(t, err)
			})
		}
		clients.Wait()
	}()

	// Scrape until all flows have ended and been accounted for.
	for before, closed := totals(t, registry), 0; closed < connections; {
		after := totals(t, registry)
		for key, was := range before {
			is, still := after[key]
			require.True(t, still, "%s has gone", key)
			require.GreaterOrEqual(t, is, was, "%s went back", key)
		}
		before, closed = after, 0
		for _, m := range gather(t, registry)["penstock_flow_closes_total"].GetMetric() {
			closed += int(m.GetCounter().GetValue())
		}
	}
	<-done
	for _, direction := range []string{"down", "up"} {
		assert.EqualValues(t, connections*size, bytesTotalOf(t, registry, direction), direction)
	}
}

// bytesTotalOf returns what has been written in one direction.
func bytesTotalOf(t *testing.T, g prometheus.Gatherer, direction string) float64 {
	t.Helper()
	to := map[string]string{"down": "client", "up": "server"}[direction]
	for _, m := range gather(t, g)["penstock_bytes_total"].GetMetric() {
		labels := map[string]string{}
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		if labels["direction"] == direction && labels["leg"] == to {
			assert.Equal(t, "bulk", labels["rule"])
			return m.GetCounter().GetValue()
		}
	}
	return 0
}

func TestAnOpenFlowIsListedAndCounted(t *testing.T) {
	p, clock, addr := startProxy(t, bulk)
	pages := Pages{Source: p, Metrics: NewRegistry(p, Options{Clock: clock})}
	server := httptest.NewServer(pages.Handler(true))
	defer server.Close()

	conn := tunnel(t, addr, echo(t))
	defer conn.Close()
	// Bytes are counted once they are written on, which is after the far end may
	// have them; but before any that come later.
	for _, n := range []int{5000, 1} {
		_, err := conn.Write(make([]byte, n))
		require.NoError(t, err)
		_, err = io.ReadFull(conn, make([]byte, n))
		require.NoError(t, err)
	}

	assert.GreaterOrEqual(t, bytesTotalOf(t, NewRegistry(p, Options{Clock: clock}), "up"), 5000.0, "counted while open")
	flows, _ := listItems[Flow](t, pages, "/flows")
	require.Len(t, flows, 1)
	f := flows[0]
	assert.Equal(t, "bulk", f.Rule)
	assert.Equal(t, conn.LocalAddr().String(), f.Client)
	require.NotNil(t, f.Down)
	assert.GreaterOrEqual(t, f.Down.Written, cc.Bytes(5000))
	require.NotNil(t, f.Down.Control)
	assert.Equal(t, "static", f.Down.Algorithm)
	assert.Positive(t, f.Down.Control.Cwnd)
	assert.Equal(t, "kernel", f.ClientLeg.Tier)
	assert.NotEmpty(t, f.ClientLeg.Envelope)
}

// A hint goes in by HTTP and comes out in the window of a connection.
func TestAHintReachesTheAlgorithmsOfItsHost(t *testing.T) {
	p, clock, addr := startProxy(t, `defaults: {algorithm: "nacc"}`)
	site := pages(p)
	site.Hints = &HintReceiver{Pass: p.Hint, Clock: clock}

	hint := func(host string) (groups int) {
		body := fmt.Sprintf(`{"host": %q, "link_rate_bits_per_second": 5e9, "flows": 1}`, host)
		rec := post(site, true, nil, body)
		require.Equal(t, http.StatusOK, rec.Code, rec.Body)
		var answer struct{ Groups int }
		require.NoError(t, json.Unmarshal(rec.Body.Bytes(), &answer))
		return answer.Groups
	}
	assert.Zero(t, hint("127.0.0.1"), "it has no connection")

	conn := tunnel(t, addr, echo(t))
	defer conn.Close()
	payload := bytes.Repeat([]byte("x"), 10_000)
	require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	for guided := false; !guided; {
		_, err := conn.Write(payload)
		require.NoError(t, err)
		_, err = io.ReadFull(conn, payload) // once it answers, both directions are open
		require.NoError(t, err)
		assert.Equal(t, 2, hint("127.0.0.1"), "the client, and the server beside it")
		_, flows := p.Flows()
		var d flow.Snapshot
		for f := range flows {
			d = f.Down.Flow
		}
		guided = d.Phase == "guided" && d.Internals[0] == 10
	}
	assert.Zero(t, hint("127.0.0.9"), "somebody else's")
}

// A hint bounds a control that knows nothing of hints, for as long as a rule wants it.
func TestAHintCapsWhoseRuleSaysSo(t *testing.T) {
	p, clock, addr := startProxy(t, "defaults: {algorithm: cubic, hint_cap: 0.5}")
	site := pages(p)
	site.Hints = &HintReceiver{Pass: p.Hint, Clock: clock}
	conn := tunnel(t, addr, echo(t))
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	payload := bytes.Repeat([]byte("x"), 10_000)
	// until has bytes and hints go to and fro until the downloads are as wanted.
	until := func(wanted func(Group) bool) (down Group) {
		for !wanted(down) {
			rec := post(site, true, nil, `{"prefix": "127.0.0.0/8", "capacity_bits_per_second": 80e6}`)
			require.Equal(t, http.StatusOK, rec.Code, rec.Body)
			_, err := conn.Write(payload)
			require.NoError(t, err)
			_, err = io.ReadFull(conn, payload)
			require.NoError(t, err)
			groups, _ := listItems[Group](t, site, "/hosts")
			i := slices.IndexFunc(groups, func(g Group) bool { return g.Name == "down|local|127.0.0.1" })
			require.GreaterOrEqual(t, i, 0)
			down = groups[i]
		}
		return down
	}
	down := until(func(g Group) bool { return g.Capped })
	assert.Equal(t, cc.Rate(40e6), down.PacingRate)
	assert.Equal(t, []netip.Addr{netip.MustParseAddr("127.0.0.1")}, down.Hosts)
	require.NotNil(t, down.Hint)
	assert.Equal(t, cc.Rate(80e6), down.Hint.Capacity)
	assert.GreaterOrEqual(t, down.Hint.Age, 0.)

	done, err := p.Reload(configure(t, "defaults: {algorithm: cubic, hint_cap: 0.25, class: guarantee, target: "+
		"50mbit, min_rate: 1mbit}"))
	require.NoError(t, err)
	assert.Equal(t, 2, done.Moved, "both directions, in place")
	down = until(func(g Group) bool { return g.PacingRate == 20e6 })
	assert.Equal(t, 1, down.Members)

	_, err = p.Reload(configure(t, "defaults: {algorithm: cubic}"))
	require.NoError(t, err)
	down = until(func(g Group) bool { return g.Members == 1 && !g.Capped })
	assert.Zero(t, down.PacingRate, "cubic is not paced")
}
