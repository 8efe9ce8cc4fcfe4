package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/proxy/fleet"
)

// endlessServer sends to each client without end.
func endlessServer(t *testing.T) (address string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				piece := make([]byte, 16<<10)
				for err := error(nil); err == nil; {
					_, err = conn.Write(piece)
				}
				_ = conn.Close()
			}()
		}
	}()
	return ln.Addr().String()
}

// download counts what comes from an address, over n connections.
func download(t *testing.T, at string, n int) *atomic.Int64 {
	var count atomic.Int64
	for range n {
		conn, err := net.Dial("tcp", at)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		go func() {
			piece := make([]byte, 64<<10)
			for {
				n, err := conn.Read(piece)
				if count.Add(int64(n)); err != nil {
					return
				}
			}
		}()
	}
	return &count
}

// TestAHostOverTwoEdgesKeepsToItsLimit runs edges as processes. A host with connections over two of them has no more
// than over one, and all of it over one when the other is killed. A process with another key is not heard.
func TestAHostOverTwoEdgesKeepsToItsLimit(t *testing.T) {
	const limit = 20 * 1e6
	dir, server := t.TempDir(), endlessServer(t)
	keys := map[string]string{
		"key":   "AQgPFh0kKzI5QEdOVVxjanF4f4aNlJuiqbC3vsXM09o=",
		"wrong": "AgkQFx4lLDM6QUhPVl1ka3J5gIeOlZyjqrG4v8bN1Ns=",
	}
	for name, key := range keys {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(key+"\n"), 0o600))
	}
	first := vacantPort(t)
	begin := func(name, listen, key string) (g *generation, at, pages string) {
		at, pages = vacantPort(t), vacantPort(t)
		file := filepath.Join(dir, name+".yaml")
		require.NoError(t, os.WriteFile(
			file, fmt.Appendf(nil, "listeners: [{name: l, mode: forward, target: %q, address: %q}]\n"+
				"defaults: {down: {max_rate: 20mbit, shared: true}}\ntelemetry: {address: %q}\nlog: {flows: false}\n"+
				"fleet: {name: %s, listen: %q, key_file: %s, join: [%q]}\n", server, at, pages, name, listen, key, first), 0o600))
		g = &generation{cmd: clitest.Program(t.Context(), "run", "--config", file), end: make(chan struct{})}
		g.cmd.Stderr = &g.log
		require.NoError(t, g.cmd.Start())
		go func() { defer close(g.end); _ = g.cmd.Wait() }()
		t.Cleanup(func() {
			g.kill()
			if t.Failed() {
				t.Logf("%s: %s", name, &g.log)
			}
			for _, key := range keys {
				assert.NotContains(t, g.log.String(), key)
			}
		})
		g.log.has(t, "listening")
		return g, at, pages
	}
	state := func(pages string) (s fleet.Status) {
		code, out, _ := run(t, "fleet", "--json", "--telemetry", pages)
		require.Zero(t, code)
		require.NoError(t, json.Unmarshal([]byte(out), &s))
		return s
	}
	live := func(pages string, n int) func() bool {
		return func() bool {
			s := state(pages)
			heard := 0
			for _, m := range s.Members {
				if m.Live {
					heard++
				}
			}
			return heard == n
		}
	}
	a, atA, pagesA := begin("a", first, "key")
	_, atB, pagesB := begin("b", vacantPort(t), "key")
	wrong, _, pagesWrong := begin("wrong", vacantPort(t), "wrong")
	require.Eventually(t, live(pagesA, 2), 20*time.Second, 20*time.Millisecond)
	require.Eventually(t, live(pagesB, 2), 20*time.Second, 20*time.Millisecond)
	wrong.log.has(t, "no other edge is reached")
	assert.Len(t, state(pagesWrong).Members, 1)

	counts := []*atomic.Int64{download(t, atA, 2), download(t, atB, 2)}
	rates := func(d time.Duration) (each []float64, sum float64) {
		before := []int64{counts[0].Load(), counts[1].Load()}
		time.Sleep(d)
		for i, c := range counts {
			rate := float64(cc.RateOf(cc.Bytes(c.Load()-before[i]), d))
			each, sum = append(each, rate), sum+rate
		}
		return each, sum
	}
	rates(2 * time.Second)
	each, sum := rates(4 * time.Second)
	t.Logf("over both edges: %.2f + %.2f = %.2f Mbit/s", each[0]/1e6, each[1]/1e6, sum/1e6)
	assert.InDelta(t, limit, sum, limit/10)
	assert.InDelta(t, limit/2, each[0], limit/8)
	assert.Contains(t, scrape(t, "http://"+pagesA+"/metrics"), "penstock_fleet_members{state=\"live\"} 2")
	view := scrape(t, "http://"+pagesB+"/v1/view")
	assert.Contains(t, view, `"fleet":["Fleet: a, b (this one)"`)
	assert.Regexp(t, `of 20mbit here, granted by [ab]; sends \d`, view)
	_, out, _ := run(t, "fleet", "--telemetry", pagesB)
	assert.Contains(t, out, "this one")
	assert.Contains(t, out, "20mbit")
	assert.True(t, strings.Contains(out, "127.0.0.1"), out)

	a.kill()
	began := time.Now()
	require.Eventually(t, func() bool {
		limits := state(pagesB).Limits
		return len(limits) == 1 && limits[0].Rate == limit
	}, 20*time.Second, 20*time.Millisecond)
	t.Logf("the other edge has all %v after one was killed", time.Since(began).Round(10*time.Millisecond))
	rates(time.Second)
	each, _ = rates(3 * time.Second)
	t.Logf("over one edge: %.2f Mbit/s", each[1]/1e6)
	assert.InDelta(t, limit, each[1], limit/10)
}
